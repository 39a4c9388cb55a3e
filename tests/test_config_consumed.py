"""A key is consumed or refused: nothing is a setting that no room reads."""

from __future__ import annotations

import pytest

from slipstream.config.readers import readers
from slipstream.config.tree import leaves

ALLOWED_UNREAD: frozenset[str] = frozenset()
"""Settings that may be unread.  It is empty, and stays so."""


@pytest.mark.parametrize("path", list(leaves()))
def test_the_setting_is_read_by_a_room(path: str) -> None:
    assert path in ALLOWED_UNREAD or readers(leaves()[path]), f"nothing reads {path}; wire it up or remove it"
