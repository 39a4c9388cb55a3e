"""Errors of the environment registry, shaped like ``skyrl_gym.error``.

``Error`` is the base; ``RegistrationError`` is raised for a second environment under one id.
"""

from __future__ import annotations

from slipstream.errors import SlipstreamError


class Error(SlipstreamError):
    """Base class of registry errors."""


class RegistrationError(Error):
    """An environment cannot be registered (its id is taken)."""
