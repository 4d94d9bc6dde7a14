"""Updates in the backward pass against the ordinary loop: bits, bytes, plans in which they wait, and refusals."""

from __future__ import annotations

import copy
import itertools
import json
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from orders import random_order

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402
from torch_helpers import Net, squares  # noqa: E402

import remat  # noqa: E402
import remat.torch as rt  # noqa: E402
from remat.execution import StepPlan  # noqa: E402
from remat.graph import Graph, Operation, Value  # noqa: E402
from remat.plan import Plan  # noqa: E402
from remat.simulator import simulate  # noqa: E402
from remat.torch._emit import emit  # noqa: E402
from remat.torch._in_backward import update_bytes  # noqa: E402
from remat.torch._updates import UPDATE_KIND, plan_in_order, postponed  # noqa: E402
from remat.torch.networks.llama import llama  # noqa: E402
from remat.torch.networks.transformer import gpt2  # noqa: E402
from remat.torch.step_graph import Update  # noqa: E402

pytestmark = pytest.mark.usefixtures("warm_search", "torch_cache", "torch_seed")
IMAGES = (8, 3, 16, 16)
Make = Callable[[Any], torch.optim.Optimizer]


@pytest.fixture(autouse=True, scope="module")
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", remat.cost.CostWarning)
        yield


def images(n: int = IMAGES[0]) -> torch.Tensor:
    return torch.randn(n, *IMAGES[1:])


def rematerialize(
    model: nn.Module, args: tuple[Any, ...], optimizer: Any, budget: Any = "1GB", **options: Any
) -> rt.Rematerialized:
    options = {"cost": "flops", "time_limit_s": 0.6, "strategy": "search", "optimizer_in_backward": True} | options
    return rt.rematerialize(model, args, budget, optimizer=optimizer, **options)


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=1e-2)


def pair(make: Make = adam, model: nn.Module | None = None, budget: Any = "1GB", **options: Any) -> tuple[Any, ...]:
    """(a plain model, its optimizer, the same rematerialized, its optimizer)."""
    plain = Net() if model is None else model
    ours = copy.deepcopy(plain)
    optimizer = make(ours)
    return plain, make(plain), rematerialize(ours, (images(),), optimizer, budget, **options), optimizer


def train(model: nn.Module, args: tuple[Any, ...], after: Callable[[], Any] = lambda: None, n: int = 3) -> None:
    """Steps from the same seeds; `after` is what the loop does after each backward pass."""
    for seed in range(n):
        torch.manual_seed(seed)
        outputs = model(*args)
        (outputs if outputs.numel() == 1 else squares(outputs)).backward()
        after()


def ordinary(optimizer: torch.optim.Optimizer) -> Callable[[], None]:
    def after() -> None:
        optimizer.step()
        optimizer.zero_grad()

    return after


def assert_same(plain: nn.Module, optimizer: Any, ours: nn.Module, in_backward: Any) -> None:
    """The same bits of parameters, buffers and the optimizers' states."""
    for one, other in (
        (plain.state_dict(), ours.state_dict()),
        *zip(optimizer.state_dict()["state"].values(), _in_order(in_backward, optimizer), strict=True),
    ):
        assert one.keys() == other.keys()
        assert all(
            torch.equal(torch.as_tensor(x), torch.as_tensor(other[key])) for key, x in one.items() if x is not None
        )


def _in_order(optimizer: Any, like: Any) -> list[dict[str, Any]]:
    state = optimizer.state_dict()["state"]
    return [state[key] for key in like.state_dict()["state"]]


def in_groups(model: nn.Module) -> torch.optim.Optimizer:
    decayed = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() <= 1]
    return torch.optim.AdamW([{"params": decayed, "weight_decay": 0.1}, {"params": others, "lr": 3e-3}], lr=1e-2)


@pytest.mark.parametrize(
    "make",
    [lambda m: torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9), adam, in_groups,
     lambda m: torch.optim.Adagrad(m.parameters())],
    ids=["sgd", "adam", "groups", "adagrad"],
)  # fmt: skip
def test_steps_equal_those_of_the_ordinary_loop(make: Make) -> None:
    plain, optimizer, ours, in_backward = pair(make, budget=0.7)
    assert ours.plan.recomputed
    x = images()
    train(plain, (x,), ordinary(optimizer))
    train(ours, (x,))  # the loop may leave step() and zero_grad() out
    assert_same(plain, optimizer, ours, in_backward)
    assert any(p.grad is not None for p in ours.parameters())
    in_backward.zero_grad(set_to_none=False)  # as for a gradient
    ours.zero_grad()
    train(plain, (x,), ordinary(optimizer))
    train(ours, (x,), ordinary(in_backward))  # or call both
    assert_same(plain, optimizer, ours, in_backward)
    assert all(p.grad is None for p in ours.parameters())
    before = copy.deepcopy(ours.state_dict())
    with torch.no_grad():
        ours(x)
    assert all(torch.equal(before[name], p) for name, p in ours.named_parameters())


class Tied(nn.Module):
    """A table that is used twice, a frozen layer, one without a gradient, a view of a parameter, and two outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(10, 16), nn.Linear(16, 10, bias=False)
        self.head.weight = self.table.weight
        self.frozen, self.unused, self.layer = nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 16)
        self.scale, self.other = nn.Parameter(torch.ones(2, 16)), nn.Linear(16, 3)
        self.frozen.requires_grad_(False)

    def forward(self, index: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = torch.tanh(self.layer(self.layer(self.table(index))))
        x = torch.tanh(self.frozen(x * self.scale[0])) * self.scale.view(-1)[16:]
        return self.head(x), torch.sqrt(self.other(x).square())


@pytest.mark.parametrize("seed", range(2))
def test_random_orders_and_awkward_parameters(seed: int) -> None:
    index = torch.randint(0, 10, (5,))
    plain = Tied()
    model = copy.deepcopy(plain)
    optimizer, in_backward = adam(plain), adam(model)
    made = rematerialize(model, (index,), in_backward)
    step = rt.module.captured_step(model, (index,), {}, "eager", "default", made._planner.in_backward)
    updates = step.updates
    assert len(updates) == len([op for op in made.plan.graph.operations if op.kind == UPDATE_KIND]) == 6
    order = random_order(made.plan.graph, np.random.default_rng(seed), 0.2)
    late = postponed(order, updates)
    assert sorted(late) == sorted(order) != late
    plan = Plan.from_order(made.plan.graph, late)
    ours = rematerialize(model, (index,), in_backward, None, plan=replace(made.plan, plan=plan, budget_bytes=None))
    for both in (True, False, True):  # a loss that reads one output only gives fewer gradients
        for module, after in ((plain, ordinary(optimizer)), (ours, lambda: None)):
            outputs = module(index)
            (sum(map(squares, outputs)) if both else squares(outputs[0])).backward()
            after()
    assert_same(plain, optimizer, ours, in_backward)
    with pytest.raises(remat.InvalidPlan, match="reads a parameter after its update"):
        bad = Plan.from_order(made.plan.graph, order)
        rematerialize(model, (index,), in_backward, None, plan=replace(made.plan, plan=bad, budget_bytes=None))
    with pytest.raises(remat.InvalidPlan, match="is read after its update"):
        emit(step, order, update_of=made._planner.in_backward.update_of)


def parts() -> tuple[Graph, dict[int, Update]]:
    """A reader of a parameter (0), the gradient (2), the update (3), and an operation (5) that reads the reader's result
    and a large value (4). Without repetition the reader's result takes memory together with the large value."""
    operations = (
        Operation("read", "a", (), (0,), 1), Operation("other", "a", (0,), (1,), 1),
        Operation("gradient", "a", (1,), (2,), 1, is_backward=True),
        Operation("update", UPDATE_KIND, (2,), (), is_backward=True, run_once=True),
        Operation("large", "a", (1,), (3,), 1, is_backward=True),
        Operation("last", "a", (0, 3), (4,), 1, is_backward=True),
    )  # fmt: skip
    values = (Value("x", 2), Value("y", 1), Value("g", 4), Value("z", 5), Value("end", 1, keep=True))
    return Graph("late", operations, values), {3: Update(0, None, frozenset({0}))}  # pyright: ignore[reportArgumentType]


def test_a_plan_that_reads_after_an_update_is_repaired_or_made_again() -> None:
    graph, updates = parts()
    late, asked = [0, 1, 2, 3, 4, 0, 5], list[Graph]()

    def find(tied: Graph) -> tuple[Plan, str]:
        """First the late plan; then the least peak of a brute force over orders without repetition."""
        asked.append(tied)
        orders = itertools.permutations(range(len(tied))) if len(asked) > 1 else [late]
        plans = [Plan.from_order(tied, order) for order in orders if _is_valid(tied, order)]
        return min(plans, key=lambda plan: simulate(tied, plan).peak_bytes), "brute force"

    def found(budget_bytes: int) -> tuple[list[int], int]:
        asked.clear()
        plan, _ = plan_in_order(graph, updates, budget_bytes, find)
        assert simulate(graph, plan).peak_bytes <= budget_bytes
        return plan.order.tolist(), len(asked)

    assert simulate(graph, Plan.from_order(graph, late)).peak_bytes == 8  # what the solver thought
    assert found(11) == ([0, 1, 2, 4, 0, 3, 5], 1)  # the update is moved, and the gradient held for longer
    assert found(9) == ([0, 1, 4, 5, 2, 3], 2)  # it waits for the operation for whose sake the reader was repeated
    assert found(8) == ([0, 1, 2, 3, 4, 5], 3)  # the reader runs once
    with pytest.raises(remat.InvalidInput, match="no plan of 'late' within 7 B .* its last use: 8 B .* to suffice"):
        found(7)
    assert len(asked) == 5
    assert [op.name for op in asked[-1].operations][-1] == "update"


def _is_valid(graph: Graph, order: Sequence[int]) -> bool:
    done: set[int] = set()
    for k in order:
        if not done.issuperset(graph.predecessors(k)):
            return False
        done.add(k)
    return True
