"""A key is consumed or refused: nothing is a setting that no room reads."""

from __future__ import annotations

import pytest

from slipstream.config.readers import unread
from slipstream.config.tree import leaves

ALLOWED_UNREAD: frozenset[str] = frozenset()
"""Settings that may be unread.  It is empty, and stays so."""


@pytest.fixture(scope="module")
def not_read() -> frozenset[str]:
    return frozenset(unread())


@pytest.mark.parametrize("path", list(leaves()))
def test_the_setting_is_read_by_a_room(path: str, not_read: frozenset[str]) -> None:
    assert path in ALLOWED_UNREAD or path not in not_read, f"nothing reads {path}; wire it up or remove it"
