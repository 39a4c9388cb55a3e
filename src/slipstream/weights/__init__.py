"""Policy versions, and publishing them in place to every replica: stage, pause, load, verify, resume.

Transports: ``InProcessTransport`` (engines in this process), ``DiskTransport``, ``MemoryTransport``,
``GlooTransport`` and ``DeltaTransport`` (engines behind a URL: ``slipstream serve``, or vLLM with the plug-in), and
``NativeTransport`` (vLLM's own NCCL and CUDA IPC engines), ``AdapterTransport`` (LoRA adapters for vLLM).

>>> from slipstream.weights import Publisher, Replica, VersionCounter
>>> counter = VersionCounter("policy", incarnation=0)
>>> str(counter.current), str(counter.next())
('policy/0/0', 'policy/0/1')
"""

from slipstream.weights.adapter import AdapterTransport
from slipstream.weights.delta import DeltaTransport
from slipstream.weights.native import NativeTransport
from slipstream.weights.publisher import Deadlines, Publisher
from slipstream.weights.receipt import Receipt
from slipstream.weights.replica import Replica
from slipstream.weights.transport import InProcessTransport, Staged, Transport, collect
from slipstream.weights.verify import Probe, Verification
from slipstream.weights.version import VersionCounter
from slipstream.weights.wire import DiskTransport, GlooTransport, MemoryTransport, WireEngine

__all__ = [
    "AdapterTransport",
    "Deadlines",
    "DeltaTransport",
    "DiskTransport",
    "GlooTransport",
    "InProcessTransport",
    "MemoryTransport",
    "NativeTransport",
    "Probe",
    "Publisher",
    "Receipt",
    "Replica",
    "Staged",
    "Transport",
    "Verification",
    "VersionCounter",
    "WireEngine",
    "collect",
]
