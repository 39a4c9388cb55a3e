"""Every bundled loss once more, token by token in plain floats: the independent side of the agreement tests.

Nothing here calls the package.  Each function gets one token ``t`` and the whole list of tokens, and returns the value
that the token's unit has.
"""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass
class Token:
    row: int
    lp: float
    old: float
    mu: float
    adv: float
    value: float = 0.0
    old_value: float = 0.0
    ret: float = 0.0
    noise: float = 0.0
    top: tuple[tuple[float, float], ...] = ()
    """(log pi, log mu) of the sampler's likely tokens."""


def ratio(a: float, b: float) -> float:
    return math.exp(max(-20.0, min(20.0, a - b)))


def clip(x: float, low: float, high: float) -> float:
    return max(low, min(high, x))


def clipped(r: float, a: float, low: float, high: float) -> float:
    return max(-r * a, -clip(r, low, high) * a)


def ppo_clip(t, tokens, clip_low=0.2, clip_high=0.2):
    return clipped(ratio(t.lp, t.old), t.adv, 1 - clip_low, 1 + clip_high)


def tinker_ppo(t, tokens, clip_low_threshold=0.8, clip_high_threshold=1.2):
    return clipped(ratio(t.lp, t.old), t.adv, clip_low_threshold, clip_high_threshold)


def dual_clip(t, tokens, clip_low=0.2, clip_high=0.2, clip_dual=3.0):
    value = ppo_clip(t, tokens, clip_low, clip_high)
    return min(value, -clip_dual * t.adv) if t.adv < 0 else value


def gspo(t, tokens, clip_low=3e-4, clip_high=4e-4):
    logs = [math.log(ratio(u.lp, u.old)) for u in tokens if u.row == t.row]
    return clipped(math.exp(sum(logs) / len(logs)), t.adv, 1 - clip_low, 1 + clip_high)


def decoupled_ppo(t, tokens, clip_low=0.2, clip_high=0.2, behaviour_cap=5.0):
    return min(ratio(t.old, t.mu), behaviour_cap) * ppo_clip(t, tokens, clip_low, clip_high)


def importance_sampling(t, tokens):
    return -ratio(t.lp, t.old) * t.adv


def cispo(t, tokens, clip_low=1.0, clip_high=4.0):
    return -clip(ratio(t.lp, t.old), 1 - clip_low, 1 + clip_high) * t.adv * t.lp


def tinker_cispo(t, tokens, clip_low_threshold=0.0, clip_high_threshold=4.0):
    return -clip(ratio(t.lp, t.old), clip_low_threshold, clip_high_threshold) * t.adv * t.lp


def sapo(t, tokens, tau_positive=1.0, tau_negative=1.05):
    tau = tau_positive if t.adv > 0 else tau_negative
    return -(4 / tau) / (1 + math.exp(-tau * (ratio(t.lp, t.old) - 1))) * t.adv


def rollout_is(t, tokens, clip_low=0.5, clip_high=4.0):
    r = ratio(t.lp, t.mu)
    return -r * t.adv * t.lp if 1 - clip_low < r < 1 + clip_high else 0.0


def dppo(t, tokens, divergence="tv", delta_low=None, delta_high=None):
    own = {"tv": 0.15, "kl": 0.05}[divergence]
    delta_low, delta_high = own if delta_low is None else delta_low, own if delta_high is None else delta_high
    p, q = math.exp(min(t.lp, 0.0)), math.exp(min(t.mu, 0.0))
    if divergence == "tv":
        d = abs(p - q)
    else:
        d = q * -math.log(ratio(t.lp, t.mu)) + (1 - q) * math.log((1 - q + 1e-8) / (1 - p + 1e-8))
    if (t.adv > 0 and p > q and d > delta_high) or (t.adv < 0 and p < q and d > delta_low):
        return 0.0
    return -ratio(t.lp, t.mu) * t.adv


def dro(t, tokens, beta=0.05):
    return -(t.adv * t.lp - beta / 2 * (t.lp - t.old) ** 2)


def score_centering(t, tokens, cap=None):
    p = [math.exp(a) for a, _ in t.top]
    q = [math.exp(b) for _, b in t.top]
    rho = max(0.0, 1 - sum(q)) / max(1e-6, 1 - sum(p))
    w, mass, alpha = 1.0, q, rho
    if cap is not None:
        w, mass, alpha = (
            min(ratio(t.lp, t.mu), cap),
            [min(a, cap * b) for a, b in zip(p, q, strict=False)],
            min(1.0, cap * rho),
        )
    centre = sum((m - alpha * a) * lp for m, a, (lp, _) in zip(mass, p, t.top, strict=False))
    return -w * t.adv * t.lp + t.adv * centre


def _covariances(tokens):
    n = len(tokens)
    adv, lp = sum(t.adv for t in tokens) / n, sum(t.lp for t in tokens) / n
    return [(t.adv - adv) * (t.lp - lp) for t in tokens]


def clip_cov(t, tokens, clip_low=0.2, clip_high=0.2, fraction=2e-4, cov_low=1.0, cov_high=5.0):
    band = []
    for u, c in zip(tokens, _covariances(tokens), strict=False):
        r = ratio(u.lp, u.old)
        free = -r * u.adv >= -clip(r, 1 - clip_low, 1 + clip_high) * u.adv
        if cov_low < c < cov_high and free:
            band.append(u)
    chosen = sorted(band, key=lambda u: u.noise)[: max(1, int(fraction * len(tokens)))]
    return 0.0 if any(u is t for u in chosen) else ppo_clip(t, tokens, clip_low, clip_high)


def kl_cov(t, tokens, fraction=2e-3, penalty=1.0):
    order = sorted(zip(_covariances(tokens), tokens, strict=False), key=lambda pair: (-pair[0], pair[1].noise))
    chosen = [u for _, u in order[: max(1, int(fraction * len(tokens)))]]
    r = ratio(t.lp, t.old)
    return -r * t.adv + (penalty * abs(math.log(r)) if any(u is t for u in chosen) else 0.0)


def cross_entropy(t, tokens):
    return -t.lp


def value_clip(t, tokens, clip=0.2):
    if clip is None:
        return 0.5 * (t.value - t.ret) ** 2
    moved = t.old_value + max(-clip, min(clip, t.value - t.old_value))
    return 0.5 * max((t.value - t.ret) ** 2, (moved - t.ret) ** 2)
