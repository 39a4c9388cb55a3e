"""A small engine behind the real HTTP server, as a process of its own; told how to misbehave by argument.

Usage: python tests/transfer_server.py TRANSFER_DIR [fault]; prints its URL.
Faults: keeps-old, ok-without-loading, dies-in-the-middle, tears-one.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

from slipstream.inference.fake import FakeEngine
from slipstream.inference.server import serve

VOCAB = 64


class KeepsOld(FakeEngine):
    """Takes the first update and then no other, silently."""

    updates = 0

    async def update_weights(self, chunk):
        self.updates += 1
        if self.updates == 1:
            await super().update_weights(chunk)


class OkWithoutLoading(FakeEngine):
    """Says that everything went well, and has not looked at it."""

    async def update_weights(self, chunk):
        return None


class DiesInTheMiddle(FakeEngine):
    """Loads half of the second update; then the process is gone."""

    updates = 0

    async def update_weights(self, chunk):
        self.updates += 1
        if self.updates == 2:
            await super().update_weights(dict(list(chunk.items())[:1]))
            os.kill(os.getpid(), signal.SIGKILL)
        await super().update_weights(chunk)


ENGINES = {
    "sound": FakeEngine,
    "keeps-old": KeepsOld,
    "ok-without-loading": OkWithoutLoading,
    "dies-in-the-middle": DiesInTheMiddle,
}

if __name__ == "__main__":
    engine = ENGINES[sys.argv[2] if len(sys.argv) > 2 else "sound"](VOCAB, scale=2.0)
    serve(
        engine,
        port=0,
        transfer_root=Path(sys.argv[1]),
        log_level="error",
        ready=lambda url: print(url, flush=True),
    )
