"""Policy versions, and publishing them in place to every replica: stage, pause, load, verify, resume.

>>> from slipstream.weights import Publisher, Replica, VersionCounter
>>> counter = VersionCounter("policy", incarnation=0)
>>> str(counter.current), str(counter.next())
('policy/0/0', 'policy/0/1')
"""

from slipstream.weights.publisher import Deadlines, Publisher
from slipstream.weights.receipt import Receipt
from slipstream.weights.replica import Replica
from slipstream.weights.transport import InProcessTransport, Staged, Transport, collect
from slipstream.weights.verify import Probe, Verification
from slipstream.weights.version import VersionCounter

__all__ = [
    "Deadlines",
    "InProcessTransport",
    "Probe",
    "Publisher",
    "Receipt",
    "Replica",
    "Staged",
    "Transport",
    "Verification",
    "VersionCounter",
    "collect",
]
