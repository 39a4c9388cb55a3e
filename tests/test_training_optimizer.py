"""Master weights: equal to plain AdamW, refusable, restorable, scheduled."""

from __future__ import annotations

import pytest
import torch

from slipstream.config.settings import OptimizerSettings
from slipstream.errors import CheckpointError, SettingsError
from slipstream.training import optimizer as optimizer_module
from slipstream.training.optimizer import MasterOptimizer, learning_rate

SETTINGS = OptimizerSettings(lr=0.1, weight_decay=0.0, max_grad_norm=1e9)


def model(dtype=torch.float32):
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.Linear(5, 2)).to(dtype)


def loss(net, scale=1.0):
    x = torch.linspace(-1, 1, 12).view(4, 3).to(net[0].weight.dtype)
    return net(x).float().square().sum() * scale


def test_equals_torch_adamw_with_clipping():
    ours, theirs = model(), model()
    settings = OptimizerSettings(lr=1e-2, weight_decay=0.01, max_grad_norm=0.5)
    optimizer = MasterOptimizer(dict(ours.named_parameters()), settings, None)
    plain = torch.optim.AdamW(theirs.parameters(), lr=1e-2, weight_decay=0.01)
    for _ in range(4):
        for part in (0.25, 0.75):  # two micro-batches that add up
            loss(ours, part).backward()
        result = optimizer.step()
        plain.zero_grad()
        loss(theirs).backward()
        norm = torch.nn.utils.clip_grad_norm_(theirs.parameters(), 0.5)
        plain.step()
        assert result.applied
        assert result.grad_norm == pytest.approx(float(norm), rel=1e-5)
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(a, b)


def test_bfloat16_models_accumulate_and_update_in_float32():
    net = model()
    optimizer = MasterOptimizer(dict(net.named_parameters()), OptimizerSettings(lr=1e-5, weight_decay=0.0), None)
    net.to(torch.bfloat16)
    start = {n: t.clone() for n, t in dict(optimizer.state())["master"].items()}
    for _ in range(3):
        loss(net).backward()
        assert all(p.grad is None for p in net.parameters())
        assert optimizer.step().applied
    moved = dict(optimizer.state())["master"]
    # 1e-5 is far below bfloat16's resolution at these weights; the masters moved all the same.
    assert all(float((moved[n] - start[n]).abs().max()) == pytest.approx(3e-5, rel=0.1) for n in start)
    for name, parameter in net.named_parameters():
        assert parameter.dtype == torch.bfloat16
        assert torch.equal(parameter, moved[name].bfloat16())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_in_blocks_are_the_whole_ones(monkeypatch, dtype):
    """Vectors and matrices whose rows do not fill the last block; twice, so that both writing and adding are seen."""
    monkeypatch.setattr(optimizer_module, "_BLOCK", 8)
    net = model(dtype)
    optimizer = MasterOptimizer(dict(net.named_parameters()), SETTINGS, None)
    left, right, bias = (torch.randn(shape).to(dtype) for shape in ((7, 5), (7, 3), (5,)))
    for _ in range(2):
        optimizer.add_product(net[0].weight, left, right)
        optimizer.add_gradient(net[0].bias, bias)
        optimizer.add_gradient(net[1].weight, left[:2].clone())
    found = optimizer.gradients()
    tolerance = {"rtol": 1e-5, "atol": 1e-5} if dtype is torch.float32 else {"rtol": 2e-2, "atol": 2e-2}
    torch.testing.assert_close(found["0.weight"], 2 * left.float().t() @ right.float(), **tolerance)
    assert torch.equal(found["0.bias"], 2 * bias.float())
    assert torch.equal(found["1.weight"], 2 * left[:2].float())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_parameter_that_is_one_number_or_none(dtype):
    parameters = {
        "one": torch.nn.Parameter(torch.tensor(2.0, dtype=dtype)),
        "none": torch.nn.Parameter(torch.zeros(0, 3, dtype=dtype)),
    }
    optimizer = MasterOptimizer(parameters, SETTINGS, None)
    for _ in range(2):
        (parameters["one"] * 3 + parameters["none"].sum()).backward()
    assert float(optimizer.gradients()["one"]) == 6.0
    assert optimizer.step().applied


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_non_finite_gradient_changes_nothing_and_says_where(bad):
    net = model()
    optimizer = MasterOptimizer(dict(net.named_parameters()), SETTINGS, None)
    loss(net).backward()
    optimizer.step()
    before = {part: {n: t.clone() for n, t in tensors.items()} for part, tensors in optimizer.state()}
    loss(net).backward()
    optimizer.gradients()["1.bias"][0] = bad
    result = optimizer.step()
    assert not result.applied
    assert "1.bias" in result.reason
    after = dict(optimizer.state())
    assert all(torch.equal(before[part][n], after[part][n]) for part in before for n in before[part])
    assert optimizer.step_count == 1
    assert all(not g.any() for g in optimizer.gradients().values())
    loss(net).backward()
    assert optimizer.step().applied


def test_a_poisoned_step_is_refused_even_with_finite_gradients():
    net = model()
    optimizer = MasterOptimizer(dict(net.named_parameters()), SETTINGS, None)
    loss(net).backward()
    optimizer.poison("the loss is nan")
    assert optimizer.step().reason == "the loss is nan"
    loss(net).backward()
    assert optimizer.step().applied


def test_restoring_moments_continues_exactly_and_a_cold_start_does_not():
    def fresh():
        net = model()
        return net, MasterOptimizer(dict(net.named_parameters()), SETTINGS, None)

    def steps(net, optimizer, count):
        for _ in range(count):
            loss(net).backward()
            optimizer.step()
        return torch.cat([p.detach().flatten() for p in net.parameters()]).clone()

    whole = steps(*fresh(), 4)
    net, optimizer = fresh()
    steps(net, optimizer, 3)
    parts = {part: {n: t.clone() for n, t in tensors.items()} for part, tensors in optimizer.state()}
    net, optimizer = fresh()
    optimizer.restore(parts, 3)
    assert torch.equal(steps(net, optimizer, 1), whole)
    net, optimizer = fresh()
    optimizer.restore({"master": parts["master"]}, None)
    assert not torch.allclose(steps(net, optimizer, 1), whole, atol=1e-4)


def test_restore_names_what_is_missing_and_changes_nothing():
    net = model()
    optimizer = MasterOptimizer(dict(net.named_parameters()), SETTINGS, None)
    before = [p.detach().clone() for p in net.parameters()]
    master = {n: t.clone() + 1 for n, t in dict(optimizer.state())["master"].items()}
    gone = {n: t for n, t in master.items() if n != "1.weight"}
    with pytest.raises(CheckpointError, match=r"lacks 1\.weight"):
        optimizer.restore({"master": gone}, None)
    with pytest.raises(CheckpointError, match="shape"):
        optimizer.restore({"master": {**master, "1.weight": torch.zeros(1)}}, None)
    with pytest.raises(CheckpointError, match="does not train"):
        optimizer.restore({"master": {**master, "2.weight": torch.zeros(1)}}, None)
    assert all(torch.equal(a, b) for a, b in zip(before, net.parameters(), strict=True))


def test_schedules():
    warm = OptimizerSettings(lr=1.0, warmup_steps=4)
    assert [learning_rate(warm, s, None) for s in range(6)] == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]
    linear = OptimizerSettings(lr=1.0, scheduler="linear", min_lr_ratio=0.1)
    assert [learning_rate(linear, s, 10) for s in (0, 5, 10, 99)] == pytest.approx([1.0, 0.55, 0.1, 0.1])
    cosine = OptimizerSettings(lr=2.0, scheduler="cosine", warmup_steps=2)
    assert [learning_rate(cosine, s, 12) for s in (1, 2, 7, 12)] == pytest.approx([2.0, 2.0, 1.0, 0.0])
    with pytest.raises(SettingsError, match="total_steps"):
        learning_rate(linear, 0, None)
