"""The loss outside of a module: what it needs, as PyTorch's allocator counts it, and what is promised."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import refused
from random_loops import ASSUMED, OTHERS
from torch import Tensor, nn
from torch.nn import functional as F
from torch_helpers import MARKS, QUICK, Applies, Context, autocast

import remat.torch as rt
from remat.torch.planning.planner import READ_BY_LOSS, there_before

pytestmark = [*MARKS, pytest.mark.usefixtures("one_thread")]
ROWS, WIDTH = 256, 48
Loss = Callable[[Any], Tensor]


def net(outputs: int, n: int = 4) -> nn.Sequential:
    layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.LayerNorm(WIDTH)) for _ in range(n)]
    return nn.Sequential(*layers, nn.Linear(WIDTH, outputs))


def planned(model: nn.Module, x: Tensor, budget: Any = 0.8, **options: Any) -> rt.Rematerialized:
    return rt.rematerialize(model, (x,), budget, **QUICK, **options)


def peak(
    module: nn.Module, x: Tensor, loss_of: Loss, context: Context = contextlib.nullcontext, backward_passes: int = 1
) -> int:
    """Of a step as people write it: outputs and loss are held to its end."""

    def step() -> None:
        with context():
            outputs = module(x)
            loss = loss_of(outputs)
        for left in reversed(range(backward_passes)):
            loss.backward(retain_graph=left > 0)

    step()  # compiles
    module.zero_grad()
    found = rt.measured_peak(step)
    module.zero_grad()
    return found


def needs(
    ours: rt.Rematerialized, x: Tensor, loss_of: Loss, *how: Any, model: nn.Module | None = None, **more: Any
) -> int:  # fmt: skip
    """Bytes at the peak of such a step of the planned model, or of `model`, with what is there before."""
    return there_before(ours.plan) + peak(model or ours, x, loss_of, *how, **more)


def ctc(outputs: Tensor) -> Loss:
    loss = OTHERS["ctc"](outputs.unflatten(0, (16, 16)))
    return lambda out: loss(out.unflatten(0, (16, 16)))


def turned(outputs: Tensor) -> Loss:
    wanted = torch.rand_like(outputs)
    return lambda out: F.mse_loss(out.t().contiguous(), wanted.t())


def reads_values(outputs: Tensor) -> Loss:
    loss = ASSUMED["cross_entropy"](outputs)
    return lambda out: loss(out) * (2 if out.sum() > 0 else 3)


def loss_named(name: str, width: int) -> Loss:
    make = (ASSUMED | OTHERS | {"ctc": ctc, "turned": turned, "reads_values": reads_values})[name]
    return make(torch.empty(ROWS, width))


@pytest.mark.parametrize(
    ("name", "context"),
    [
        *((name, contextlib.nullcontext) for name in ("mse", "ctc", "turned", "reads_values")),
        ("cross_entropy", autocast),
    ],
)
def test_a_given_loss_is_counted_exactly(name: str, context: Context) -> None:
    """The plain step's prediction, and what a plan promises that recomputes nothing; wide outputs make the peak."""
    model, x, loss = net(6 * WIDTH, 2), torch.randn(ROWS, WIDTH), loss_named(name, 6 * WIDTH)
    with context():
        ours = planned(model, x, 1.0, loss=loss)
    assert ours.plan.plain_peak_bytes == pytest.approx(needs(ours, x, loss, context, model=model), rel=0.005)
    needed = needs(ours, x, loss, context)
    assert needed <= ours.budget_bytes
    assert ours.predicted_peak_bytes == pytest.approx(needed, rel=0.01)


@pytest.mark.parametrize(("width", "context"), [(WIDTH // 2, contextlib.nullcontext), (4 * WIDTH, autocast)])
def test_losses_that_are_not_given_keep_the_promise(width: int, context: Context) -> None:
    """A plan that fills its budget, with every loss that is no more than the one that is assumed."""
    model, x = net(width), torch.randn(ROWS, WIDTH)
    with context():
        ours = planned(model, x)
        ours = rt.rematerialize(ours.model, (x,), ours.predicted_peak_bytes, plan=ours.plan)
    assert ours.plan.recomputed
    assert "loss outside    not given" in str(ours.plan)
    for name in (*ASSUMED, "float_entropy", "smoothed"):
        assert needs(ours, x, loss_named(name, width), context) <= ours.budget_bytes, name


def test_a_plan_that_fills_its_budget_keeps_it_with_the_given_loss() -> None:
    """The mean squared error keeps the storage of all squares: one output more, to the end of the step."""
    x, loss = torch.randn(ROWS, WIDTH), loss_named("mse", WIDTH // 2)
    ours = planned(net(WIDTH // 2), x, loss=loss, verify=True)
    assert ours.plan.recomputed
    assert needs(ours, x, loss) == pytest.approx(ours.predicted_peak_bytes, rel=0.002)
    assert ours.measured_peak_bytes == pytest.approx(ours.predicted_peak_bytes, rel=0.002)
    other = planned(ours.model, x, "1GB", plan=ours.plan, loss=loss_named("l1", WIDTH // 2))
    assert needs(other, x, loss_named("l1", WIDTH // 2)) <= other.predicted_peak_bytes


def test_what_the_loss_reads_counts_once() -> None:
    """Labels are there before the step; an argument of the module counts already."""
    x, y = torch.randn(ROWS, WIDTH), torch.randn(ROWS, WIDTH)
    labelled = lambda out: F.mse_loss(out, y.flatten(0).view(ROWS, WIDTH))  # noqa: E731
    for loss, read in ((labelled, y.nbytes), (lambda out: F.mse_loss(out, x), None), (None, None)):
        assert planned(net(WIDTH, 1), x, "1GB", loss=loss).plan.fixed.get(READ_BY_LOSS) == read


def test_a_loss_with_parameters_of_its_own_is_left_as_it_is() -> None:
    x, head = torch.randn(ROWS, WIDTH), nn.Linear(WIDTH, 4)
    before = head.weight.detach().clone()
    ours = planned(net(WIDTH, 1), x, "1GB", loss=lambda out: head(out).square().mean())
    assert head.weight.grad is None
    assert torch.equal(before, head.weight)
    assert ours.plan.fixed[READ_BY_LOSS] == sum(p.nbytes for p in head.parameters())


def test_another_batch_needs_in_proportion() -> None:
    x, y = torch.randn(ROWS, WIDTH), torch.randn(ROWS, 6 * WIDTH)
    ours = planned(net(6 * WIDTH, 2), x, "100MB", loss=lambda out: F.l1_loss(out, y[: len(out)]))
    (small,) = ours.prepare((x[: ROWS // 2],))
    needed = there_before(small) + peak(ours, x[: ROWS // 2], lambda out: F.l1_loss(out, y[: ROWS // 2]))
    assert needed == pytest.approx(small.peak_bytes, rel=0.01)


def test_parts_count_the_loss_too() -> None:
    def breaking(self: Any, x: Tensor) -> Tensor:
        x = self.one(x)
        return self.two(x / 2 if x.mean().item() > 100 else x)

    x, loss = torch.randn(ROWS, WIDTH), loss_named("l1", 4 * WIDTH)
    model = Applies(breaking, one=net(WIDTH, 2), two=net(4 * WIDTH, 2))
    ours = planned(model, x, 0.9, parts=["one", "two"], loss=loss)
    assert ours.plan.fixed_bytes + peak(ours, x, loss) <= ours.budget_bytes


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"loss": "mse"}, "loss must be a function"),
        ({"loss": lambda out: out}, "must return a scalar"),
        ({"loss": lambda _: torch.ones((), requires_grad=True) * 2}, "does not depend on the module's outputs"),
        ({"loss": lambda out: F.cross_entropy(out, torch.zeros(3, dtype=torch.long))}, "fails on the module's outputs"),
        ({"retain_graph": True, "backend": "inductor"}, "retain_graph=True .* does not go with backend='inductor'"),
    ],
)
def test_a_loss_that_cannot_be_counted_is_refused(options: dict[str, Any], message: str) -> None:
    with refused(message):
        planned(net(8, 1), torch.randn(ROWS, WIDTH), "1GB", **options)


# Several backward passes through one forward pass


def test_a_retained_graph_keeps_the_promise_when_asked(tmp_path: Path) -> None:
    model, x, loss = net(10), torch.randn(ROWS, WIDTH), loss_named("cross_entropy", 10)
    ours = planned(model, x, 0.7, retain_graph=True, loss=loss)
    assert ours.plan.recomputed
    plain = needs(ours, x, loss, backward_passes=2, model=model)
    assert ours.plan.plain_peak_bytes == pytest.approx(plain, rel=0.005)
    with warnings.catch_warnings(action="error"):
        needed = [needs(ours, x, loss, backward_passes=n) for n in (1, 2, 3)]
    assert max(needed) <= ours.budget_bytes
    assert needed[2] == pytest.approx(ours.predicted_peak_bytes, rel=0.005)
    ours.plan.save(tmp_path / "plan.json")
    again = planned(ours.model, x, None, plan=tmp_path / "plan.json", retain_graph=True, loss=loss)
    assert again.predicted_peak_bytes == pytest.approx(ours.predicted_peak_bytes, abs=8)
    with refused(r"with retain_graph=True, .* call backward"):
        planned(ours.model, x, 0.4, retain_graph=True)


def test_a_retained_graph_that_is_not_counted_is_told_before_the_budget_is_exceeded() -> None:
    x = torch.randn(ROWS, WIDTH)
    ours = planned(net(10), x, 0.7)
    loss = ours(x).square().mean()
    with pytest.warns(UserWarning, match=r"keeps what the plan frees: .* rematerialize\(..., retain_graph=True\)"):
        loss.backward(retain_graph=True)
    with warnings.catch_warnings(action="error"):  # once, and not where nothing is exceeded
        loss.backward(retain_graph=True)
        roomy = planned(net(10), x, "1GB")
        roomy(x).square().mean().backward(retain_graph=True)


def test_a_loss_that_the_module_returns_is_the_loops() -> None:
    """Beside large outputs, as transformers' models do."""

    def with_loss(self: Any, x: Tensor) -> dict[str, Tensor]:
        logits = self.net(x)
        return {"loss": F.cross_entropy(logits, x[:, 0].abs().long()), "logits": logits}

    def loss(out: dict[str, Tensor]) -> Tensor:
        return out["loss"]

    model, x = Applies(with_loss, net=net(400)), torch.randn(ROWS, WIDTH)
    ours = planned(model, x, "100MB", verify=True)
    assert ours.plan.plain_peak_bytes == pytest.approx(needs(ours, x, loss, model=model), rel=0.01)
    measured = needs(ours, x, loss)
    assert measured <= ours.predicted_peak_bytes <= 1.01 * measured
    assert "returns it" in str(ours.plan)


@pytest.mark.parametrize("at", [0, 1])
def test_an_output_that_the_loss_leaves_out_has_no_gradient_to_count(at: int) -> None:
    """Two outputs of different sizes share a hidden tensor."""

    def several(self: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        h = torch.tanh(self.body(x))
        return self.small(h), self.large(h)

    def loss(outputs: Any) -> Tensor:
        return outputs[at].square().mean()

    model = Applies(several, body=net(WIDTH), small=nn.Linear(WIDTH, 4), large=nn.Linear(WIDTH, 400))
    x = torch.randn(ROWS, WIDTH)
    ours = planned(model, x, "100MB", loss=loss)
    measured = needs(ours, x, loss)
    assert measured <= ours.predicted_peak_bytes <= 1.02 * measured
