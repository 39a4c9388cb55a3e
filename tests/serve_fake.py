"""A ``FakeEngine`` behind the real server, as a process: ``python serve_fake.py PORT STEP_SECONDS TRANSFER_DIR``."""

import sys
from pathlib import Path

from slipstream.inference.fake import FakeEngine
from slipstream.inference.server import serve

if __name__ == "__main__":
    port, step, folder = int(sys.argv[1]), float(sys.argv[2]), Path(sys.argv[3])
    engine = FakeEngine(300, scale=1.0, step_seconds=step, max_model_len=4096)
    serve(engine, port=port, transfer_root=folder, log_level="error")
