"""Where Slipstream keeps what it fetches or builds once for all runs.

Owns: the cache directory's place.  Refuses: creating it, knowing what lies in it.
"""

from __future__ import annotations

import os
from pathlib import Path


def cache_dir() -> Path:
    """``$SLIPSTREAM_CACHE``, else ``~/.cache/slipstream``."""
    return Path(os.environ.get("SLIPSTREAM_CACHE", Path.home() / ".cache" / "slipstream"))
