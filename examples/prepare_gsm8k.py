"""GSM8K's own JSON lines (``question``, ``answer``) as rows for the environment ``gsm8k``.

    python examples/prepare_gsm8k.py train.jsonl data/gsm8k/train.parquet

A row of your own data needs no more than this: ``prompt`` for the model, and the columns that the environment reads.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

ASK = ' Let\'s think step by step and output the final answer after "####".'


def main(source: Path, target: Path) -> None:
    rows = []
    for number, line in enumerate(source.read_text(encoding="utf-8").splitlines(), 1):
        if not line.strip():
            continue
        item = json.loads(line)
        _, found, answer = item["answer"].partition("####")
        if not found:
            raise SystemExit(f"{source} line {number}: the answer has no '####'")
        rows.append(
            {
                "prompt": [{"role": "user", "content": item["question"] + ASK}],
                "env_class": "gsm8k",
                "reward_spec": {"ground_truth": answer.strip().replace(",", "")},
                "data_source": "openai/gsm8k",
            }
        )
    target.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist(rows), target)
    print(f"{len(rows)} rows in {target}")


if __name__ == "__main__":
    if len(sys.argv) != 3:
        raise SystemExit(__doc__)
    main(Path(sys.argv[1]), Path(sys.argv[2]))
