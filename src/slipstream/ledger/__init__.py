"""The run record: events, trajectories, metrics, conservation, sinks, queries and the report.

Owns: what a run writes down, how it is read back, and how it is shown.  Refuses: knowing how anything
was computed; importing torch.  The trackers' clients are imported only when a sink is named.
"""

from slipstream.ledger.conservation import TokenAccount, TokenFlow
from slipstream.ledger.metrics import eval_metrics, step_metrics
from slipstream.ledger.query import QueryResult, query
from slipstream.ledger.reader import Event, LedgerReader, MetricsRow
from slipstream.ledger.records import EvalRecord, StepRecord, TrajectoryRecord
from slipstream.ledger.report import write_report
from slipstream.ledger.sinks import ConsoleSink, JsonlSink, MultiSink, Sink, build_sinks
from slipstream.ledger.store import Ledger, next_incarnation

__all__ = [
    "ConsoleSink",
    "EvalRecord",
    "Event",
    "JsonlSink",
    "Ledger",
    "LedgerReader",
    "MetricsRow",
    "MultiSink",
    "QueryResult",
    "Sink",
    "StepRecord",
    "TokenAccount",
    "TokenFlow",
    "TrajectoryRecord",
    "build_sinks",
    "eval_metrics",
    "next_incarnation",
    "query",
    "step_metrics",
    "write_report",
]
