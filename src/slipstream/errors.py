"""The one exception tree.

Owns: the base class of every error that Slipstream raises on purpose.  Refuses: catching anything.
Every error names the thing that is wrong and, where it can, the mend.  Errors also inherit the
standard-library class that fits, so that ``except ValueError`` keeps working, and all of them
survive pickling (they carry plain positional arguments only).
"""

from __future__ import annotations


class SlipstreamError(Exception):
    """Base of every deliberate Slipstream error."""


class ContractError(SlipstreamError, ValueError):
    """A record breaks a contract; the message names the rule it broke."""


class SettingsError(SlipstreamError, ValueError):
    """A setting is unknown, contradictory or cannot be honoured."""


class DataError(SlipstreamError, ValueError):
    """A dataset row or file is malformed."""


class ModelError(SlipstreamError, ValueError):
    """A model directory cannot be used (no weights, no tokenizer, unsupported architecture)."""


class EnvironmentFault(SlipstreamError, RuntimeError):
    """An environment raised, hung, or returned something that is not a step output."""


class InferenceError(SlipstreamError, RuntimeError):
    """An inference engine refused a request, died, or broke the contract."""


class RequestError(InferenceError):
    """The request itself is at fault (too long, unknown field, bad token id); repeating it cannot help."""


class PublishError(SlipstreamError, RuntimeError):
    """New weights could not be published to, or verified on, every replica."""


class NonFiniteStepError(SlipstreamError, ArithmeticError):
    """An optimiser step was refused because a gradient or loss was not finite."""


class CheckpointError(SlipstreamError, OSError):
    """A checkpoint is missing, torn, corrupt, or belongs to other settings."""


class DeadlineError(SlipstreamError, TimeoutError):
    """A wait passed its deadline; the message names the task, its last event and its age."""


class BudgetExceededError(SlipstreamError, RuntimeError):
    """More rollouts failed than the run's failure budget allows."""


class LedgerError(SlipstreamError, OSError):
    """A file of a run's ledger is missing, torn or corrupt; the message names the file."""
