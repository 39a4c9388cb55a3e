"""Shared fixtures: one tiny model for the whole run, and few threads."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


@pytest.fixture(scope="session")
def tiny_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A saved 2-layer random Llama with a byte-level tokenizer and a ChatML template."""
    from slipstream.inference.embedded.tiny import tiny_model_dir

    return tiny_model_dir(tmp_path_factory.mktemp("tiny") / "model", seed=0)
