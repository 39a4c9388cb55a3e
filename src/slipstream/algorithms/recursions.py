"""Discounted returns and GAE over the sampled tokens of one trajectory.

Owns: the two recursions.  Refuses: observation tokens.  Both gather the sampled slots first, run on the
compacted arrays and scatter back, so that inserting observations, or changing what masked slots hold, changes
nothing.  Rewards sit on sampled tokens; a masked slot's reward or value is never read.  Masked slots get 0.

>>> returns_compacted([0.0, 0.0, 1.0], [1, 0, 1], gamma=0.5).tolist()
[0.5, 0.0, 1.0]
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from slipstream.algorithms.batch import FloatArray
from slipstream.errors import ContractError


def _sampled_slots(mask: npt.ArrayLike, *arrays: FloatArray) -> npt.NDArray[np.int64]:
    flags = np.asarray(mask)
    if flags.ndim != 1 or not np.all((flags == 0) | (flags == 1)):
        raise ContractError("recursion: the mask must be a flat array of 0 and 1")
    for array in arrays:
        if array.shape != flags.shape:
            raise ContractError(f"recursion: an array of shape {array.shape} beside a mask of shape {flags.shape}")
    slots = np.flatnonzero(flags)
    for array in arrays:
        if not np.all(np.isfinite(array[slots])):
            raise ContractError("recursion: a sampled token has a reward or value that is not finite")
    return slots


def returns_compacted(rewards: npt.ArrayLike, mask: npt.ArrayLike, gamma: float) -> FloatArray:
    """``G_t = r_t + gamma G_{t+1}`` where ``t + 1`` is the next *sampled* token; all arrays ``(T,)``."""
    r = np.asarray(rewards, dtype=np.float64)
    slots = _sampled_slots(mask, r)
    out = np.zeros(r.shape)
    ahead = 0.0
    for slot in slots[::-1]:
        ahead = r[slot] + gamma * ahead
        out[slot] = ahead
    return out


def gae_compacted(
    rewards: npt.ArrayLike, values: npt.ArrayLike, mask: npt.ArrayLike, gamma: float, lam: float
) -> FloatArray:
    """Generalised advantage estimation (1506.02438) over sampled tokens; all arrays ``(T,)``.

    ``delta_t = r_t + gamma V_{t+1} - V_t`` and ``A_t = delta_t + gamma lam A_{t+1}`` with ``t + 1`` the next
    sampled token; after the last one V and A are 0.  Critic targets are ``A + V`` on the sampled slots.
    """
    r = np.asarray(rewards, dtype=np.float64)
    v = np.asarray(values, dtype=np.float64)
    slots = _sampled_slots(mask, r, v)
    out = np.zeros(r.shape)
    next_value = ahead = 0.0
    for slot in slots[::-1]:
        ahead = r[slot] + gamma * next_value - v[slot] + gamma * lam * ahead
        out[slot] = ahead
        next_value = v[slot]
    return out
