"""The quickstart over three seeds, short and full; rewrites the table of docs/results.md.

    python benchmarks/quickstart_seeds.py [--seeds 0 1 2] [--only short|full]

Each run is a process of its own in a fresh directory, as a new user would start it.  The JSON of all runs goes to
benchmarks/results/quickstart.json; runs that are already there for this commit are not repeated.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

from machine import commit, processor

ROOT = Path(__file__).parent.parent
OUT = ROOT / "benchmarks" / "results" / "quickstart.json"
PAGE = ROOT / "docs" / "results.md"


def run_one(kind: str, seed: int) -> dict[str, object]:
    directory = ROOT / "runs" / f"results-{kind}-seed{seed}"
    shutil.rmtree(directory, ignore_errors=True)
    command = [sys.executable, "-m", "slipstream.cli", "quickstart"]
    command += ["--seed", str(seed), "--run-dir", str(directory)]
    began = time.perf_counter()
    subprocess.run([*command, *(["--full"] if kind == "full" else [])], cwd=ROOT, check=True)
    summary = json.loads((directory / "summary.json").read_text())
    return {**summary, "kind": kind, "wall_minutes": round((time.perf_counter() - began) / 60, 2)}


def row(run: dict[str, object]) -> str:
    def points(key: str) -> str:
        return f"{100 * float(run[key]):.1f} %"  # type: ignore[arg-type]

    gain = 100 * (float(run["accuracy_after"]) - float(run["accuracy_after_sft"]))  # type: ignore[arg-type]
    cells = [
        run["kind"], run["seed"], run["questions"], points("accuracy_before"), points("accuracy_after_sft"),
        points("accuracy_after"), f"**{gain:+.1f}**", run["steps"], run["wall_minutes"], f"{run['peak_memory_gb']} GB",
    ]  # fmt: skip
    return "| " + " | ".join(str(c) for c in cells) + " |"


def write_page(runs: list[dict[str, object]]) -> None:
    text = PAGE.read_text()
    head, rest = text.split("## Quickstart", 1)
    table_end = rest.index("\n## ")
    titles = ["run", "seed", "questions", "untouched", "after SFT", "after RL", "gain of RL alone"]
    header = "| " + " | ".join([*titles, "steps", "minutes", "peak memory"]) + " |"
    lines = [
        "", "", "`make quickstart`, held-out execution accuracy, greedy decoding. `make results` measures this table.",
        "",
        header, "|" + "---|" * 10, *[row(r) for r in runs], "",
        f"Machine: {processor()}, {os.cpu_count()} cores. Commit: {commit()}.", "",
    ]  # fmt: skip
    PAGE.write_text(head + "## Quickstart" + "\n".join(lines) + rest[table_end:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--only", choices=["short", "full"])
    options = parser.parse_args()
    saved = json.loads(OUT.read_text()) if OUT.exists() else {"runs": []}
    here = commit()
    runs = [r for r in saved["runs"] if r["commit"] == here]
    for kind in [options.only] if options.only else ["short", "full"]:
        for seed in options.seeds:
            if not any((r["kind"], r["seed"]) == (kind, seed) for r in runs):
                runs.append({**run_one(kind, seed), "commit": here})
                OUT.parent.mkdir(parents=True, exist_ok=True)
                OUT.write_text(
                    json.dumps({"machine": f"{processor()}, {os.cpu_count()} cores", "runs": runs}, indent=1) + "\n"
                )
    runs.sort(key=lambda r: (r["kind"] != "short", r["seed"]))
    write_page(runs)


if __name__ == "__main__":
    main()
