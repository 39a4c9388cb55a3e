from __future__ import annotations

import numpy as np
import pytest

from slipstream.algorithms import gae_compacted, returns_compacted
from slipstream.errors import ContractError


def test_returns_step_over_observations():
    assert returns_compacted([0, 0, 1], [1, 0, 1], gamma=0.5).tolist() == [0.5, 0.0, 1.0]


def test_gae_does_not_bootstrap_from_a_masked_tail():
    got = gae_compacted([0, 1, 0], [0, 0, 100], [1, 1, 0], gamma=1.0, lam=0.95)
    assert got.tolist() == pytest.approx([0.95, 1.0, 0.0])


@pytest.mark.parametrize("fill", [0.0, 1e6, -np.inf, np.nan])
def test_gae_is_the_same_with_observations_inserted(fill):
    want = [0.7084, 0.676, 0.64, 0.6]
    rewards, values = [0.0, 0, 0, 1], [0.1, 0.2, 0.3, 0.4]
    assert gae_compacted(rewards, values, [1] * 4, 1.0, 0.9).tolist() == pytest.approx(want)
    mask = np.array([1, 0, 0, 1, 1, 0, 1, 0])
    wide_r, wide_v = np.full(8, fill), np.full(8, fill)
    wide_r[mask == 1], wide_v[mask == 1] = rewards, values
    got = gae_compacted(wide_r, wide_v, mask, 1.0, 0.9)
    assert got[mask == 1].tolist() == pytest.approx(want)
    assert got[mask == 0].tolist() == [0.0] * 4


def test_returns_of_a_masked_reward_are_not_read():
    assert returns_compacted([np.nan, 1.0], [0, 1], 0.9).tolist() == [0.0, 1.0]


@pytest.mark.parametrize(
    ("mask", "rule"), [([1, 2, 0], "0 and 1"), ([1, 0], "beside a mask"), ([1, 1, 1], "not finite")]
)
def test_bad_input_is_refused(mask, rule):
    with pytest.raises(ContractError, match=rule):
        returns_compacted([0.0, np.nan, 1.0], mask, 0.9)
