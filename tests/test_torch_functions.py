"""Models with a `torch.autograd.Function` train under plans, wherever it stands and whatever it does with gradients."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from helpers import refused
from orders import random_order
from torch import Tensor, nn
from torch.autograd import Function
from torch_helpers import MARKS, Applies, assert_same_steps, both, rematerialize, reordered

import remat.torch as rt
from remat.torch.internals.operators import tree_leaves

pytestmark = MARKS

# pyright: reportIncompatibleMethodOverride=false - each Function has its own arguments
# pyright: reportArgumentType=false, reportOptionalOperand=false


class View(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, copies: bool) -> Tensor:
        return x.clone() if copies else x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return -0.3 * gradient, None


class Clipped(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, least: float) -> Tensor:
        ctx.save_for_backward(x)
        ctx.least = least
        return x.clamp(min=least)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        (x,) = ctx.saved_tensors
        return gradient * (x > ctx.least) * 1.5, None


class MeanSquare(Function):
    """A loss of one's own, whose gradient ignores the one that comes in."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, target: Tensor) -> Tensor:
        ctx.save_for_backward(x, target)
        return (x - target).square().mean()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        x, target = ctx.saved_tensors
        return 2 * (x - target) / x.numel(), None


class Largest(Function):
    """Two results with gradients, and one without."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> tuple[Tensor, ...]:
        values, places = x.max(1, keepdim=True)
        ctx.mark_non_differentiable(places)
        ctx.save_for_backward(x, places)
        return values, x.exp(), places

    @staticmethod
    def backward(ctx: Any, of_values: Tensor, of_exp: Tensor, _places: Any) -> Tensor:
        x, places = ctx.saved_tensors
        return torch.zeros_like(x).scatter(1, places, of_values) + of_exp * x.exp()


class InPlace(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.mark_dirty(x)
        x.mul_(2)
        return x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * 2


class Product(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        of_x = gradient @ weight.T if ctx.needs_input_grad[0] else None
        return of_x, x.T @ gradient if ctx.needs_input_grad[1] else None


class Missing(Function):
    """Tells a gradient that is missing from one of zeros; beside a result there may be another, or places."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, beside: str) -> Any:
        ctx.set_materialize_grads(False)
        if beside == "places":
            ctx.mark_non_differentiable(places := x.argmax(1, keepdim=True))
            return x * 1, places
        return (x * 1, x * 2) if beside else x * 1

    @staticmethod
    def backward(ctx: Any, gradient: Tensor | None, *others: Tensor | None) -> tuple[Tensor | None, None]:
        if gradient is None:
            return None, None
        return gradient + sum(5.0 if each is None else each for each in others), None


def model_of(last: Callable[[Any, Tensor], Any]) -> nn.Module:
    """Two layers; `last` gets what the second one makes, and may be anything in terms of Functions."""
    return Applies(lambda self, x: last(self, self.b(torch.tanh(self.a(x)))))


def of_everything(outputs: Any) -> Tensor:
    return sum(x.square().sum() for x in tree_leaves(outputs) if x.requires_grad)


CASES: dict[str, Callable[[Any, Tensor], Any]] = {
    "several": lambda m, h: Clipped.apply(View.apply(m.a(Clipped.apply(h, -0.1)), False), 0.1),
    "own loss beside features": lambda m, h: (MeanSquare.apply(h, torch.ones(())), torch.tanh(h)),
    "several results": lambda m, h: (*Largest.apply(h), h * Largest.apply(m.a(h))[2], m.a(Largest.apply(m.b(h))[1])),
    "in place": lambda m, h: InPlace.apply(m.b(m.a(InPlace.apply(m.b(h))))),
    "of parameters": lambda m, h: Product.apply(Product.apply(h, m.b.weight).detach(), m.a.weight),
    "missing": lambda m, h: m.a(Missing.apply(h, "")) + Clipped.apply(torch.ones(16), 0.0),
}


@pytest.mark.parametrize("name", CASES)
def test_functions_train_under_plans(name: str) -> None:
    plain, x = model_of(CASES[name]), torch.randn(8, 16, requires_grad=True)
    model = copy.deepcopy(plain)
    made = rematerialize(model, (x,)).plan
    order = random_order(made.graph, np.random.default_rng(0), 0.3)
    ours = rt.rematerialize(model, (x,), plan=reordered(made, order))
    for scale in (1.0, 3.0):
        assert_same_steps(plain, ours, x, loss_of=lambda out, scale=scale: scale * of_everything(out))


@pytest.mark.parametrize("of_argument", [False, True])
def test_a_view_by_a_function_beside_its_argument_is_refused_and_a_copy_trains(of_argument: bool) -> None:
    def beside(copies: bool) -> nn.Module:
        """Returns a Function's result beside what it was made of."""
        return Applies(lambda self, x: (h := self.a(x), View.apply(x if of_argument else h, copies)))

    x = torch.randn(4, 16, requires_grad=True)
    with refused(r"output 2 .*return x.clone\(\)"):
        rematerialize(beside(False), (x,))
    assert_same_steps(*both(beside(True), (x,)), x, loss_of=lambda out: out[0].square().sum() + out[1].abs().sum())


@pytest.mark.parametrize("beside", ["another", "places"])
def test_a_function_that_asks_for_missing_gradients_is_refused_or_left_out_of_a_plan(beside: str) -> None:
    plain, x = model_of(lambda m, h: m.a(Missing.apply(h, beside)[0])), torch.randn(8, 16)
    says = r"Function Missing calls ctx\.set_materialize_grads\(False\) and has .*, at line \d+ of .*; leave .* parts="
    with refused(says):
        rematerialize(plain, (x,))
    assert_same_steps(*both(plain, (x,), parts=["b"]), x)
