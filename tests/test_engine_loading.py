"""Loading models: what two threads load at once is what one loads alone."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

pytest.importorskip("torch")

from slipstream.inference.embedded.pretrained import load_causal_lm


def test_models_are_loaded_one_after_another(tiny_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers is not made for threads: a second load in the middle of a first unties the first one's head."""
    from transformers import AutoModelForCausalLM

    plain, inside, crowd, alone = AutoModelForCausalLM.from_pretrained, [], [], threading.Event()

    def watched(*args, **kwargs):
        inside.append(1)
        crowd.append(len(inside))
        alone.wait(0.3)  # long enough for the other thread to come in, if it may
        found = plain(*args, **kwargs)
        inside.pop()
        return found

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", watched)
    with ThreadPoolExecutor(2) as pool:
        models = list(pool.map(load_causal_lm, [str(tiny_dir)] * 2))
    assert crowd == [1, 1]
    for model in models:
        assert model.get_output_embeddings().weight is model.get_input_embeddings().weight
