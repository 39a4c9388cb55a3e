"""Which policy a ratio is measured from.

Owns: the interpolated proximal policy and the lag of each token.  Refuses: forward passes (the trainer's business).

``algorithm.old_logprobs`` says which anchor a loss gets: the sampler's own log-probs, a forward pass before the update,
or, without one, a log-linear interpolation between behaviour and present policy by the token's version lag
(A-3PO, arXiv 2512.06547).  That needs the version of every token, as the server reported it, which is why spans carry
it.  A token of lag 0 is anchored at its sampler, as in PPO; the longer the lag, the nearer the anchor to the present.

>>> import numpy as np
>>> from slipstream.algorithms.ops import numpy_ops
>>> behaviour, present = np.array([-2.0, -2.0]), np.array([-1.0, -1.0])
>>> interpolated_anchor(numpy_ops(), present, behaviour, np.array([0.0, 3.0])).tolist()
[-2.0, -1.25]
"""

from __future__ import annotations

import numpy as np

from slipstream.algorithms.batch import Batch, FloatArray
from slipstream.algorithms.ops import Array, Ops
from slipstream.errors import ContractError


def interpolated_anchor(xp: Ops, logprobs: Array, behaviour: Array, lags: Array) -> Array:
    """``log old = log mu + lag / (lag + 1) (sg(log pi) - log mu)``; all ``(N,)``, no gradient.

    The paper's ``alpha = 1 / d`` with ``d = lag + 1``: the weights being made are one publish ahead of the trainer's.
    """
    return behaviour + lags / (lags + 1.0) * (xp.stop_gradient(logprobs) - behaviour)


def token_lags(batch: Batch, current: int) -> list[FloatArray]:
    """For each row, ``current`` minus the version counter of each trained token, ``(n_trained,)``.

    Raises ``ContractError`` when a token has no version, or one that is newer than the trainer's.
    """
    lags: list[FloatArray] = []
    for row in batch.rows:
        if row.versions_T is None or np.any(row.versions_T[row.trained_T] < 0):
            raise ContractError(
                f"row {row.row_id} has tokens without a version, so their lag is unknown; "
                "use algorithm.old_logprobs=recompute"
            )
        lag = current - row.versions_T[row.trained_T].astype(np.float64)
        if np.any(lag < 0):
            raise ContractError(f"row {row.row_id} was sampled by a version newer than the trainer's ({current})")
        lags.append(lag)
    return lags
