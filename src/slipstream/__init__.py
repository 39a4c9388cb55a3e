"""Slipstream: reinforcement-learning post-training of language models and agents.

Data flows one way round a ring, and every arrow carries a typed, validated record::

    data -> schedule -> rollout (env <-> inference) -> trajectory -> batch -> training -> weights -> inference

The package root imports nothing heavy: each room is imported by its own name
(``slipstream.trajectory``, ``slipstream.envs``, ...).  See ``docs/architecture.md``.
"""

__version__ = "0.1.0"
