"""Prometheus text under vLLM's metric names.

Owns: the mapping of an engine's ``metrics()`` to vLLM's names, and counters the server keeps itself.
Refuses: a metrics library's global registry (two engines in one process must not share counters).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from slipstream.inference.types import GenerateResult

# Names that vLLM exports too keep its prefix, so that its dashboards and routers work unchanged.
_VLLM = frozenset(
    {
        "num_requests_running",
        "num_requests_waiting",
        "kv_cache_usage_perc",
        "prompt_tokens_total",
        "generation_tokens_total",
        "prefix_cache_queries_total",
        "prefix_cache_hits_total",
        "num_preemptions_total",
    }
)


@dataclass
class Counters:
    """What only the server sees: finished requests by reason."""

    by_reason: Counter[str] = field(default_factory=Counter)

    def finished(self, result: GenerateResult) -> None:
        """Count one finished request."""
        self.by_reason[result.finish_reason] += 1


def _sample(name: str, labels: Mapping[str, str], value: float) -> str:
    inner = ",".join(
        '{}="{}"'.format(key, text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n"))
        for key, text in labels.items()
    )
    return f"{name}{{{inner}}} {value!r}"


def prometheus_text(engine: Mapping[str, float], counters: Counters, model_name: str) -> str:
    """The exposition format, version 0.0.4.  A name that ends in ``_total`` is a counter, any other a gauge."""
    labels = {"model_name": model_name, "engine": "0"}
    lines = []
    for name, value in sorted(engine.items()):
        bare = name.removeprefix("vllm:")
        full = f"vllm:{bare}" if bare in _VLLM else f"slipstream:{bare}"
        kind = "counter" if bare.endswith("_total") else "gauge"
        lines += [f"# TYPE {full} {kind}", _sample(full, labels, float(value))]
    lines.append("# TYPE vllm:request_success_total counter")
    for reason in ("stop", "length", "abort"):
        row = {**labels, "finished_reason": reason}
        lines.append(_sample("vllm:request_success_total", row, float(counters.by_reason[reason])))
    return "\n".join(lines) + "\n"
