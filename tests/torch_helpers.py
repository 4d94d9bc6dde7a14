"""Small networks of PyTorch and their steps, for tests and for the processes that they start."""

from __future__ import annotations

import contextlib
import copy
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._pytree import tree_leaves

import remat.torch as rt
from remat.execution import StepPlan
from remat.plan import Plan
from remat.torch.measuring.measure import peak_of_step
from remat.torch.planning.planner import there_before
from remat.torch.resident.optimizer import TEMPORARIES
from remat.torch.resident.updates import with_updates
from remat.torch.step.training_graph import CapturedStep
from remat.torch.step.work import dense_bytes

MARKS = [
    pytest.mark.usefixtures("warm_search", "torch_cache", "torch_seed"),
    pytest.mark.filterwarnings("ignore::remat.cost.CostWarning"),  # how busy the machine was does not matter
]
QUICK = {"cost": "flops", "time_limit_s": 0.5, "strategy": "search"}
IMAGES = (8, 3, 32, 32)
Context = Callable[[], contextlib.AbstractContextManager[Any]]


class Net(nn.Module):
    """Convolutions with batch norm, in-place ReLU and dropout."""

    def __init__(self, width: int = 24, n: int = 3, dropout: float = 0.1):
        super().__init__()
        self.convs = nn.ModuleList(nn.Conv2d(3 if i == 0 else width, width, 3, padding=1) for i in range(n))
        self.norms = nn.ModuleList(nn.BatchNorm2d(width) for _ in range(n))
        self.drop, self.head = nn.Dropout(dropout), nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        for conv, norm in zip(self.convs, self.norms, strict=True):
            x = self.drop(F.relu(norm(conv(x)), inplace=True))
        return self.head(x.mean((2, 3)))


class Applies(nn.Module):
    """A function of the module, which has two layers (none of width 0), and of the arguments; with more attributes."""

    def __init__(self, function: Callable[..., Any], width: int = 16, **attributes: Any):
        super().__init__()
        self.function = function
        if width:
            self.a, self.b = nn.Linear(width, width), nn.Linear(width, width)
        for name, x in attributes.items():
            self.register_buffer(name, x) if type(x) is Tensor else setattr(self, name, x)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(self, *args, **kwargs)


class Between(Applies):
    """Two layers, and a function of what the first one makes and the other arguments between them."""

    def __init__(self, function: Callable[..., Any] = lambda h, *_: h, width: int = 16):
        super().__init__(function, width)

    def forward(self, x: Tensor, *others: Tensor) -> Tensor:
        return self.b(torch.tanh(self.function(self.a(x), *others)))


def rows(*sizes: int) -> tuple[Tensor]:
    return (torch.randn(sizes),)


def images(**options: Any) -> tuple[Tensor]:
    return (torch.randn(IMAGES, **options),)


def squares(output: Tensor) -> Tensor:
    return output.float().square().mean()


def with_updates_by_name(step: CapturedStep, optimizer: str) -> CapturedStep:
    """The step with the updates of all its parameters by an optimizer that is only named, e.g. ``adamw``."""
    primals = enumerate(step.training_graph.primals)
    parameters = {i: x for i, x in primals if isinstance(x, nn.Parameter) and x.requires_grad}
    return with_updates(step, {i: TEMPORARIES[optimizer] * dense_bytes(x) for i, x in parameters.items()}, optimizer)


@contextlib.contextmanager
def threads(n: int) -> Iterator[None]:
    """Kernels run on so many threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(n)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def autocast() -> torch.autocast:
    return torch.autocast("cpu", dtype=torch.bfloat16)


def rematerialize(model: nn.Module, args: tuple[Any, ...], budget: Any = "1GB", **options: Any) -> rt.Rematerialized:
    return rt.rematerialize(model, args, budget, **QUICK | options)


def said(call: Callable[[], object], words: str = "") -> list[str]:
    """Messages of the warnings of a call that hold these words."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        call()
    return [str(each.message) for each in caught if words in str(each.message)]


def gradients(model: nn.Module, loss_of: Callable[[Any], Tensor]) -> list[Tensor]:
    """Of the parameters, of a loss that is made of the model; those that are there."""
    model.zero_grad()
    loss_of(model).backward()
    return [p.grad for p in model.parameters() if p.grad is not None]


def both(model: nn.Module, args: tuple[Any, ...], budget: Any = "1GB", **options: Any) -> tuple[Any, Any]:
    """(the plain model, a copy of it under a plan)"""
    return model, rematerialize(copy.deepcopy(model), args, budget, **options)


def reordered(made: StepPlan, order: Sequence[int]) -> StepPlan:
    """The plan of a step with another order of computations, whatever that needs."""
    return replace(made, plan=Plan.from_order(made.graph, order), budget_bytes=None)


def step(
    model: nn.Module, args: tuple[Any, ...], loss_of: Callable[..., Tensor] = squares, seed: int = 0,
    context: Context = contextlib.nullcontext, **kwargs: Any,
) -> dict[str, Tensor]:  # fmt: skip
    """Everything that a step leaves behind; gradients are added to those that are there."""
    torch.manual_seed(seed)
    leaves = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor) and x.requires_grad and x.is_leaf]
    for x in leaves:
        x.grad = None
    with context():
        outputs = model(*args, **kwargs)
        loss = loss_of(outputs)
    loss.backward()
    left = {"loss": loss.detach(), "random state": torch.get_rng_state()}
    left |= {f"output {i}": x.detach() for i, x in enumerate(tree_leaves(outputs)) if isinstance(x, Tensor)}
    left |= {f"gradient of {name}": p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    left |= {f"gradient of argument {i}": x.grad.clone() for i, x in enumerate(leaves) if x.grad is not None}
    return left | {f"buffer {name}": b.clone() for name, b in model.named_buffers()}


def assert_same(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert one.keys() == other.keys()
    assert [name for name in one if not torch.equal(one[name], other[name])] == []


def assert_same_steps(plain: nn.Module, ours: nn.Module, *args: Any, n: int = 1, **how: Any) -> None:
    """Steps with fresh gradients leave the same bits behind; `how` are keywords of `step`."""
    for seed in range(n):
        plain.zero_grad()
        ours.zero_grad()
        assert_same(*(step(model, args, seed=seed, **how) for model in (plain, ours)))


def check(
    model: nn.Module, args: tuple[Any, ...], budget: Any = 0.75, loss_of: Callable[..., Tensor] = squares,
    context: Context = contextlib.nullcontext, kwargs: dict[str, Any] | None = None, **options: Any,
) -> rt.Rematerialized:  # fmt: skip
    """Two steps of the plain model and of the rematerialized one leave the same behind, bit for bit."""
    plain, kwargs = copy.deepcopy(model), kwargs or {}
    with context():
        ours = rematerialize(model, args, budget, sample_kwargs=kwargs, **options)
    assert_same_steps(plain, ours, *args, n=2, loss_of=loss_of, context=context, **kwargs)
    return ours


def needs(ours: rt.Rematerialized, args: tuple[Any, ...], model: nn.Module | None = None) -> int:
    """Bytes at the peak of a step of the planned model, or of `model` in its place."""
    return there_before(ours.plan) + peak_of_step(model or ours, args, {}, "cpu")
