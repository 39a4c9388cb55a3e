"""The table of all drills of a session, once they are done; one process that forks for all of them."""

from __future__ import annotations

from collections.abc import Iterator

import drill_kit
import pytest
from drill_forge import Forge


@pytest.fixture(scope="session", autouse=True)
def table() -> Iterator[None]:
    """Print what was injected and what happened."""
    yield
    print("\n\n" + drill_kit.show(drill_kit.ROWS), flush=True)


@pytest.fixture(scope="session")
def forge() -> Iterator[Forge]:
    """Where processes that are killed come from."""
    with Forge() as forge:
        yield forge
