"""The simulator against published step times: ``make bench-simulate`` writes benchmarks/results/simulate.json.

It needs no accelerator and no engine; it takes a few minutes of one core.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

from machine import machine

from slipstream.simulate.calibrate import BOUND, VERL_CANDIDATES, fit_nemo, fit_verl
from slipstream.simulate.published import NEMO

RESULTS = Path(__file__).parent / "results" / "simulate.json"


def main() -> None:
    where = machine()
    started = time.perf_counter()
    fits = []
    for case in NEMO:
        fits.append(fit_nemo(case))
        print(json.dumps(fits[-1].as_json()), flush=True)
    fits += fit_verl(VERL_CANDIDATES)
    for fit in fits[len(NEMO) :]:
        print(json.dumps(fit.as_json()), flush=True)
    sensitivity = [
        {"bound": bound, **fit_nemo(NEMO[-1], bound=bound).as_json()} for bound in (0.1, 0.4)
    ]  # the published loss must not hang on the assumed shape of a decode step
    errors = [abs(fit.predicted_ratio / fit.published_ratio - 1) for fit in fits]
    RESULTS.write_text(
        json.dumps(
            {
                "what": "synchronous over asynchronous step time, published against simulated",
                "machine": where,
                "seconds": round(time.perf_counter() - started, 1),
                "decode_step_bound_share": BOUND,
                "cases": [fit.as_json() for fit in fits],
                "same_sign": sum(fit.same_sign for fit in fits),
                "of": len(fits),
                "mean_abs_ratio_residual": round(sum(errors) / len(errors), 3),
                "worst_abs_ratio_residual": round(max(errors), 3),
                "sensitivity_of_the_loss": sensitivity,
            },
            indent=1,
        )
        + "\n"
    )
    print(f"written to {RESULTS}", file=sys.stderr)


if __name__ == "__main__":
    main()
