"""The chunked vocabulary projection against plain torch, values and gradients."""

from __future__ import annotations

import math

import pytest
import torch

from slipstream.training import scorer
from slipstream.training.scorer import Head, Kept, score_tokens


def plain(hidden, weight, bias, targets, temperature, softcap=None):
    z = torch.nn.functional.linear(hidden, weight, bias)
    if softcap is not None:
        z = softcap * torch.tanh(z / softcap)
    logp = (z / temperature[:, None]).log_softmax(-1)
    entropy = -torch.where(logp.exp() > 0, logp.exp() * logp, 0.0).sum(-1)
    return logp.gather(1, targets[:, None])[:, 0], entropy


def inputs(n=11, d=8, v=37):
    torch.manual_seed(0)
    hidden, weight, bias = torch.randn(n, d), torch.randn(v, d), torch.randn(v)
    targets, temperature = torch.randint(0, v, (n,)), torch.rand(n) + 0.5
    return [x.requires_grad_() for x in (hidden, weight, bias)], targets, temperature, torch.randn(2, n)


@pytest.mark.parametrize("chunk", [1, 4, 11, 64])
@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize("slice_elements", [37, 1 << 20])
def test_values_and_gradients_equal_plain_torch_for_every_chunk_size(chunk, softcap, slice_elements, monkeypatch):
    monkeypatch.setattr(scorer, "_SLICE_ELEMENTS", slice_elements)
    leaves, targets, temperature, mix = inputs()
    want = plain(*leaves, targets, temperature, softcap)
    got = score_tokens(leaves[0], Head(leaves[1], leaves[2], softcap), targets, temperature, chunk=chunk, entropy=True)
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b)
    want_grads = torch.autograd.grad((mix[0] * want[0] + mix[1] * want[1]).sum(), leaves)
    got_grads = torch.autograd.grad((mix[0] * got[0] + mix[1] * got[1]).sum(), leaves)
    for a, b in zip(got_grads, want_grads, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_logprobs_alone_have_the_same_gradient():
    leaves, targets, temperature, mix = inputs()
    want = torch.autograd.grad((mix[0] * plain(*leaves, targets, temperature)[0]).sum(), leaves)
    got, none = score_tokens(leaves[0], Head(leaves[1], leaves[2]), targets, temperature, chunk=4)
    assert none is None
    for a, b in zip(torch.autograd.grad((mix[0] * got).sum(), leaves), want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("entropy", [False, True])
def test_several_ids_in_each_place_have_the_gradient_of_plain_torch(entropy):
    leaves, targets, temperature, mix = inputs()
    beside = torch.stack([targets, (targets + 1) % 37, targets], 1)  # an id may come twice
    z = torch.nn.functional.linear(leaves[0], leaves[1], leaves[2]) / temperature[:, None]
    want = z.log_softmax(-1).gather(1, beside)
    head = Head(leaves[1], leaves[2])
    got, spread = score_tokens(leaves[0], head, beside, temperature, chunk=4, entropy=entropy)
    torch.testing.assert_close(got, want)
    slopes = torch.randn(want.shape)
    extra = [(mix[0] * h).sum() for h in (spread, plain(*leaves, targets, temperature)[1])] if entropy else [0, 0]
    got_grads = torch.autograd.grad((slopes * got).sum() + extra[0], leaves)
    want_grads = torch.autograd.grad((slopes * want).sum() + extra[1], leaves)
    for a, b in zip(got_grads, want_grads, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_a_frozen_head_gets_no_gradient():
    leaves, targets, temperature, _ = inputs()
    head = Head(leaves[1].detach(), leaves[2].detach())
    score_tokens(leaves[0], head, targets, temperature)[0].sum().backward()
    assert leaves[0].grad is not None
    assert leaves[1].grad is None


def test_entropy_of_a_masked_vocabulary_is_finite_and_flat_at_its_maximum():
    hidden = torch.zeros(1, 2, requires_grad=True)
    bias = torch.tensor([0.0, 0.0, -math.inf])
    weight = torch.randn(3, 2)
    _, entropy = score_tokens(hidden, Head(weight, bias), torch.tensor([0]), torch.ones(1), entropy=True)
    entropy.sum().backward()
    assert float(entropy) == pytest.approx(math.log(2), abs=1e-4)
    assert float(entropy) == pytest.approx(0.6931, abs=1e-4)
    torch.testing.assert_close(hidden.grad, torch.zeros(1, 2))


def test_temperature_half_on_logits_two_zero():
    """The forgotten temperature would give a ratio of 0.897."""
    head = Head(torch.tensor([[2.0], [0.0]]))
    cold, _ = score_tokens(torch.ones(1, 1), head, torch.tensor([0]), torch.tensor([0.5]))
    warm, _ = score_tokens(torch.ones(1, 1), head, torch.tensor([0]), torch.tensor([1.0]))
    assert math.exp(float(warm - cold)) == pytest.approx(0.897, abs=1e-3)
    assert float(cold) == pytest.approx(-math.log1p(math.exp(-4)), abs=1e-6)


def kept_sets(n, v, targets, limited):
    """Random kept sets that hold the target, for the tokens marked in ``limited``; and the mask they mean."""
    torch.manual_seed(1)
    mask = torch.rand(n, v) < 0.3
    mask[torch.arange(n), targets] = True
    mask[~limited] = True
    sizes = torch.where(limited, mask.sum(1), 0)
    pairs = (mask & limited[:, None]).nonzero()
    edges = [0, *sizes.cumsum(0).tolist()]
    return Kept(pairs[:, 1].contiguous(), pairs[:, 0].contiguous(), limited, edges), mask


@pytest.mark.parametrize("chunk", [1, 4, 64])
@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize("slice_elements", [74, 1 << 20])
def test_kept_sets_restrict_values_and_gradients(chunk, softcap, slice_elements, monkeypatch):
    monkeypatch.setattr(scorer, "_SLICE_ELEMENTS", slice_elements)
    leaves, targets, temperature, mix = inputs()
    limited = torch.tensor([True, False, True, True, True, False, False, True, True, True, True])
    kept, mask = kept_sets(11, 37, targets, limited)
    z = torch.nn.functional.linear(*leaves)
    if softcap is not None:
        z = softcap * torch.tanh(z / softcap)
    logp = (z / temperature[:, None]).masked_fill(~mask, -1e30).log_softmax(-1)
    want = logp.gather(1, targets[:, None])[:, 0], -torch.where(mask, logp.exp() * logp, 0.0).sum(-1)
    head = Head(leaves[1], leaves[2], softcap)
    got = score_tokens(leaves[0], head, targets, temperature, chunk=chunk, entropy=True, kept=kept)
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b)
    want_grads = torch.autograd.grad((mix[0] * want[0] + mix[1] * want[1]).sum(), leaves)
    got_grads = torch.autograd.grad((mix[0] * got[0] + mix[1] * got[1]).sum(), leaves)
    for a, b in zip(got_grads, want_grads, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_a_kept_set_of_one_has_log_prob_zero_and_no_gradient():
    leaves, targets, temperature, _ = inputs()
    n = len(targets)
    kept = Kept(targets, torch.arange(n), torch.ones(n, dtype=torch.bool), list(range(n + 1)))
    logprobs, _ = score_tokens(leaves[0], Head(leaves[1], leaves[2]), targets, temperature, kept=kept)
    assert logprobs.abs().max() == 0
    grads = torch.autograd.grad(logprobs.sum(), leaves)
    assert all(float(g.abs().max()) == 0 for g in grads)
