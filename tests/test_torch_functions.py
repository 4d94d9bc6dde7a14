"""Models with a `torch.autograd.Function` train under plans, wherever it stands and whatever it does with gradients."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from orders import random_order

torch = pytest.importorskip("torch")

from torch import Tensor, nn  # noqa: E402
from torch.autograd import Function  # noqa: E402

import remat.torch as rt  # noqa: E402
from remat.errors import InvalidInput  # noqa: E402
from remat.execution import StepPlan  # noqa: E402
from remat.plan import Plan  # noqa: E402
from remat.torch.internals.operators import tree_leaves  # noqa: E402

pytestmark = pytest.mark.usefixtures("warm_search", "torch_cache", "torch_seed")

# pyright: reportIncompatibleMethodOverride=false - each Function has its own arguments
# pyright: reportArgumentType=false, reportOptionalOperand=false


class Reversal(Function):
    """Gradient reversal."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return -gradient


class Clipped(Function):
    """A saved input, and a number that needs no gradient."""

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


class Parts(Function):
    """Several results."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(x)
        return x.exp(), x.square()

    @staticmethod
    def backward(ctx: Any, of_exp: Tensor, of_square: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return of_exp * x.exp() + of_square * x


class Largest(Function):
    """A result without a gradient beside one that has one."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        values, places = x.max(1, keepdim=True)
        ctx.mark_non_differentiable(places)
        ctx.save_for_backward(places)
        ctx.shape = x.shape
        return values, places

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, _places: Any) -> Tensor:
        (places,) = ctx.saved_tensors
        return torch.zeros(ctx.shape).scatter(1, places, gradient)


class InPlace(Function):
    """Changes its input."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.mark_dirty(x)
        x.mul_(2)
        return x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * 2


class Product(Function):
    """Looks at `needs_input_grad`."""

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


class Model(nn.Module):
    """Two layers; the function gets what the second one makes, and may be anything in terms of Functions."""

    def __init__(self, last: Callable[[Model, Tensor], Any]):
        super().__init__()
        self.a, self.b, self.last = nn.Linear(16, 16), nn.Linear(16, 16), last

    def forward(self, x: Tensor) -> Any:
        return self.last(self, self.b(torch.tanh(self.a(x))))


CASES: dict[str, Callable[[Model, Tensor], Any]] = {
    "last": lambda m, h: Reversal.apply(h),
    "inside": lambda m, h: m.a(Reversal.apply(h)),
    "several": lambda m, h: Clipped.apply(Reversal.apply(m.a(Clipped.apply(h, -0.1))), 0.1),
    "own loss": lambda m, h: MeanSquare.apply(h, torch.ones(())),
    "own loss beside features": lambda m, h: (MeanSquare.apply(h, torch.ones(())), torch.tanh(h)),
    "several results": lambda m, h: Parts.apply(h),
    "one of several results": lambda m, h: Parts.apply(h)[1],
    "several results inside": lambda m, h: sum(Parts.apply(m.b(h))),
    "not differentiable": lambda m, h: Largest.apply(h),
    "only places inside": lambda m, h: h * Largest.apply(h)[1],
    "in place": lambda m, h: InPlace.apply(m.b(h)),
    "in place inside": lambda m, h: m.a(InPlace.apply(m.b(h))),
    "of a parameter": lambda m, h: Product.apply(h.detach(), m.a.weight),
    "of both": lambda m, h: Product.apply(h, m.a.weight),
    "of the same twice": lambda m, h: Product.apply(h.T @ h, Reversal.apply(h.T @ h)),
    "missing": lambda m, h: m.a(Missing.apply(h, "")),
    "of a constant": lambda m, h: h + Clipped.apply(torch.ones(16), 0.0),
}


FAST = ("last", "several", "own loss", "several results", "not differentiable", "in place", "of a parameter")


@pytest.mark.parametrize(
    "name", [name if name in FAST else pytest.param(name, marks=pytest.mark.slow) for name in CASES]
)
def test_functions_train_under_plans(name: str) -> None:
    plain = Model(CASES[name])
    model, x = copy.deepcopy(plain), torch.randn(8, 16, requires_grad=True)
    made = rt.rematerialize(model, (x,), "1GB", cost="flops", time_limit_s=0.5, strategy="search").plan
    order = random_order(made.graph, np.random.default_rng(0), 0.3)
    again = StepPlan(
        Plan.from_order(made.graph, order), made.graph, made.fingerprint, "random", None, None, made.fixed, ""
    )
    ours = rt.rematerialize(model, (x,), plan=again)
    for scale in (1.0, 3.0):
        expected, found = (_gradients(each, x, scale) for each in (plain, ours))
        assert expected.keys() == found.keys()
        assert [key for key in expected if not torch.equal(expected[key], found[key])] == []


def _gradients(model: nn.Module, x: Tensor, scale: float) -> dict[str, Tensor]:
    model.zero_grad()
    x.grad = None
    outputs = [each for each in tree_leaves(model(x)) if each.requires_grad]
    (sum((each * scale).square().sum() for each in outputs)).backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    gradients |= {} if x.grad is None else {"x": x.grad.clone()}
    return gradients | {f"output {i}": each.detach() for i, each in enumerate(outputs)}


class View(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, copies: bool) -> Tensor:
        return x.clone() if copies else x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return -0.3 * gradient, None


class Beside(nn.Module):
    """Returns a Function's result beside what it was made of."""

    def __init__(self, copies: bool, of_argument: bool):
        super().__init__()
        self.layer, self.copies, self.of_argument = nn.Linear(8, 8), copies, of_argument

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = self.layer(x)
        return h, View.apply(x if self.of_argument else h, self.copies)


@pytest.mark.parametrize("of_argument", [False, True])
def test_a_view_by_a_function_beside_its_argument_is_refused_and_a_copy_trains(of_argument: bool) -> None:
    x = torch.randn(4, 8, requires_grad=True)
    options: dict[str, Any] = {"cost": "flops", "strategy": "search", "time_limit_s": 0.5}
    with pytest.raises(InvalidInput, match=r"output 2 .*return x.clone\(\)"):
        rt.rematerialize(Beside(False, of_argument), (x,), "1MB", **options)
    plain = Beside(True, of_argument)
    ours, found = rt.rematerialize(copy.deepcopy(plain), (x,), "1MB", **options), []
    for model in (plain, ours):
        h, reversed_h = model(x)
        x.grad = None
        (h.square().sum() + reversed_h.abs().sum()).backward()
        found.append((x.grad, model.layer.weight.grad))
    assert all(torch.equal(*pair) for pair in zip(*found, strict=True))


@pytest.mark.parametrize("beside", ["another", "places"])
def test_a_function_that_asks_for_missing_gradients_is_refused_or_left_out_of_a_plan(beside: str) -> None:
    plain, x = Model(lambda m, h: m.a(Missing.apply(h, beside)[0])), torch.randn(8, 16)
    words = (
        r"the torch\.autograd\.Function Missing calls ctx\.set_materialize_grads\(False\) and has .*, at line \d+ of "
    )
    with pytest.raises(
        InvalidInput, match=words + r".*; leave set_materialize_grads out, .*, or give parts="
    ) as caught:
        rt.rematerialize(copy.deepcopy(plain), (x,), "1GB", cost="flops", time_limit_s=0.5, strategy="search")
    assert "\n" not in str(caught.value)
    model = copy.deepcopy(plain)
    ours = rt.rematerialize(model, (x,), "1GB", cost="flops", time_limit_s=0.5, strategy="search", parts=["b"])
    expected, found = (_gradients(each, x, 1.0) for each in (plain, ours))
    assert all(torch.equal(expected[key], found[key]) for key in expected)
