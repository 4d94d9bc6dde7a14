"""Updates in the backward pass against the ordinary loop: bits, bytes, plans in which they wait, and refusals."""

from __future__ import annotations

import contextlib
import copy
import itertools
import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from helpers import refused
from orders import random_order
from torch import nn
from torch.nn import functional as F
from torch_helpers import MARKS, QUICK, Applies, Net, reordered, rows, squares, with_updates_by_name

import remat
import remat.torch as rt
from remat.graph import Graph, Operation, Value
from remat.plan import Plan
from remat.simulator import simulate
from remat.torch.frontend.graphs import step_with_loss
from remat.torch.planning import eager
from remat.torch.planning.capturing import captured_step as captured_call
from remat.torch.resident.in_backward import NUMBER_BYTES, update_bytes
from remat.torch.resident.optimizer import TEMPORARIES, state_bytes
from remat.torch.resident.updates import UPDATE_KIND, plan_in_order, postponed
from remat.torch.step.emit import emit
from remat.torch.step.training_graph import Update

pytestmark = [*MARKS, pytest.mark.usefixtures("one_thread")]
Make = Callable[[Any], torch.optim.Optimizer]


def images(n: int = 8) -> torch.Tensor:
    return torch.randn(n, 3, 16, 16)


def rematerialize(model: nn.Module, args: tuple[Any, ...], optimizer: Any, budget: Any = "1GB", **options: Any) -> Any:
    return rt.rematerialize(
        model, args, budget, optimizer=optimizer, **{**QUICK, "optimizer_in_backward": True, **options}
    )


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
    theirs, mine = (each.state_dict()["state"] for each in (optimizer, in_backward))
    assert theirs.keys() == mine.keys()
    for one, other in ((plain.state_dict(), ours.state_dict()), *((theirs[key], mine[key]) for key in theirs)):
        assert one.keys() == other.keys()
        assert all(torch.equal(*map(torch.as_tensor, (x, other[key]))) for key, x in one.items() if x is not None)


def in_groups(model: nn.Module) -> torch.optim.Optimizer:
    decayed = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() <= 1]
    return torch.optim.AdamW([{"params": decayed, "weight_decay": 0.1}, {"params": others, "lr": 3e-3}], lr=1e-2)


@pytest.mark.parametrize(
    "make",
    [lambda m: torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9), in_groups,
     lambda m: torch.optim.Adagrad(m.parameters()), lambda m: torch.optim.Adafactor(m.parameters())],
    ids=["sgd", "groups", "adagrad", "adafactor"],
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


def test_schedulers_closures_and_other_shapes() -> None:
    plain, optimizer, ours, in_backward = pair()
    schedules = [torch.optim.lr_scheduler.ExponentialLR(each, 0.5) for each in (optimizer, in_backward)]
    with warnings.catch_warnings(action="error"):  # a scheduler warns if no step came before it
        for n in (8, 5, 8):
            torch.manual_seed(n)
            x = images(n)
            train(plain, (x,), ordinary(optimizer), 1)
            train(ours, (x,), n=1)
            for schedule in schedules:
                schedule.step()
    assert_same(plain, optimizer, ours, in_backward)
    assert UPDATE_KIND in {op.kind for op in ours.prepare((images(5),))[0].graph.operations}
    in_backward.zero_grad()
    x = images()

    def closure(module: nn.Module, each: torch.optim.Optimizer) -> torch.Tensor:
        torch.manual_seed(0)
        each.zero_grad()
        (loss := squares(module(x))).backward()
        return loss.detach()

    for _ in range(2):
        assert torch.equal(
            *(each.step(partial(closure, m, each)) for m, each in ((plain, optimizer), (ours, in_backward)))
        )
    assert_same(plain, optimizer, ours, in_backward)


def test_state_is_the_optimizers_own_and_comes_back() -> None:
    plain, optimizer, ours, in_backward = pair()
    x = images()
    train(plain, (x,), ordinary(optimizer))
    train(ours, (x,), ordinary(in_backward))
    state = copy.deepcopy(in_backward.state_dict())
    other = adam(ours)
    other.load_state_dict(state)
    again = rematerialize(ours.model, (x,), other)
    train(plain, (x,), ordinary(optimizer))
    train(again, (x,))
    assert_same(plain, optimizer, again, other)


def test_a_peak_is_the_promised_one_below_what_gradients_take(tmp_path: Path) -> None:
    plain, args = nn.Sequential(*(m for _ in range(6) for m in (nn.Linear(96, 96), nn.Tanh()))), rows(8, 96)
    model = copy.deepcopy(plain)
    optimizer, in_backward = (torch.optim.AdamW(m.parameters(), lr=1e-3) for m in (plain, model))
    # The ordinary step holds parameters, their state and all gradients at its end.
    ends_with = 4 * sum(p.numel() * p.element_size() for p in plain.parameters())
    before = copy.deepcopy(model.state_dict())
    ours = rematerialize(model, args, in_backward, int(0.92 * ends_with), verify=True)
    assert all(torch.equal(before[name], x) for name, x in model.state_dict().items())
    assert not in_backward.state
    assert ours.plan.difference == 0
    assert ours.measured_peak_bytes is not None
    assert ours.predicted_peak_bytes - 64 <= ours.measured_peak_bytes <= ours.predicted_peak_bytes < ends_with
    train(plain, args, ordinary(optimizer), 2)
    train(ours, args, n=2)
    assert_same(plain, optimizer, ours, in_backward)
    ours.plan.save(tmp_path / "plan.json")
    loaded = rematerialize(model, args, in_backward, None, plan=tmp_path / "plan.json")
    assert loaded.plan.order.tolist() == ours.plan.order.tolist()
    for options in ({"optimizer_in_backward": False}, {"optimizer": torch.optim.SGD(model.parameters())}):
        with pytest.raises(remat.InvalidPlan, match="made for"):
            rematerialize(model, args, **{"optimizer": in_backward, "budget": None, "plan": ours.plan, **options})


def test_updates_by_an_optimizer_that_is_only_named() -> None:
    p = nn.Parameter(torch.ones(100, 10))
    kinds = {"sgd": "SGD", "rmsprop": "RMSprop", "adagrad": "Adagrad", "adam": "Adam", "adamw": "AdamW"}
    for name, kind in (kinds | {"momentum": "SGD"}).items():
        optimizer = getattr(torch.optim, kind)([p], foreach=True, **({"momentum": 0.9} if name == "momentum" else {}))
        assert update_bytes(optimizer, p) == TEMPORARIES[name] * 4000 + NUMBER_BYTES
        assert 0 <= state_bytes(optimizer, [p]) - state_bytes(name, [p]) <= 4  # beside a counter of steps
    step = step_with_loss(Net(), (images(),), name="step")
    updated = with_updates_by_name(step, "adamw").graph
    assert len(updated) == len(step.graph) + 14
    assert step.graph.final_bytes - updated.final_bytes == sum(p.numel() * p.element_size() for p in Net().parameters())


def tied(self: Any, index: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A table that is used twice, a frozen layer, one without a gradient, a view of a parameter, and two outputs."""
    x = torch.tanh(self.a(self.a(self.table(index))))
    x = torch.tanh(self.frozen(x * self.scale[0])) * self.scale.view(-1)[16:]
    return F.linear(x, self.table.weight), torch.sqrt(self.other(x).square())


def test_random_orders_and_awkward_parameters(monkeypatch: pytest.MonkeyPatch) -> None:
    """A strategy that repeats readers after updates: the planner moves these."""
    orders: list[list[int]] = []

    def find_plan(graph: Graph, budget_bytes: int, *_: Any) -> Any:
        orders.append(random_order(graph, np.random.default_rng(0), 0.2))
        return SimpleNamespace(plan=Plan.from_order(graph, orders[-1]), strategy="random")

    monkeypatch.setattr(eager, "find_plan", find_plan)
    index = torch.randint(0, 10, (5,))
    plain = Applies(
        tied, table=nn.Embedding(10, 16), frozen=nn.Linear(16, 16).requires_grad_(False), other=nn.Linear(16, 3),
        scale=nn.Parameter(torch.ones(2, 16)),
    )  # fmt: skip
    model = copy.deepcopy(plain)
    optimizer, in_backward = adam(plain), adam(model)
    ours = rematerialize(model, (index,), in_backward)
    step = captured_call(model, (index,), {}, ours._planner.backend)
    assert len(step.updates) == len([op for op in ours.plan.graph.operations if op.kind == UPDATE_KIND]) == 6
    (order,) = orders
    assert ours.plan.order.tolist() == postponed(order, step.updates) != order
    for both in (True, False, True):  # a loss that reads one output only gives fewer gradients
        for module, after in ((plain, ordinary(optimizer)), (ours, lambda: None)):
            outputs = module(index)
            (sum(map(squares, outputs)) if both else squares(outputs[0])).backward()
            after()
    assert_same(plain, optimizer, ours, in_backward)
    with pytest.raises(remat.InvalidPlan, match="reads a parameter after its update"):
        rematerialize(model, (index,), in_backward, None, plan=reordered(ours.plan, order))
    with pytest.raises(remat.InvalidPlan, match="is read after its update"):
        emit(step, order, update_of=ours._planner.backend.updates.update_of)


def parts() -> tuple[Graph, dict[int, Update]]:
    """A reader of a parameter (0), its gradient (2) and update (3), and an operation (5) that reads the reader's result
    and a large value (4)."""
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
    with refused(r"no plan of 'late' within 7 B .* its last use: 8 B .* to suffice"):
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


class Counting(torch.optim.SGD):
    """Counts its steps in its group."""

    def step(self, closure: Any = None) -> Any:
        self.param_groups[0]["n"] = self.param_groups[0].get("n", 0) + 1
        return super().step(closure)


class Failing(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        raise RuntimeError("no step here")


def test_options_that_do_not_go_together() -> None:
    model, x = Net(), images()
    shared = nn.ParameterList([nn.Parameter(model.head.bias.data), model.head.bias])
    sgd = torch.optim.SGD(model.parameters())
    for says, options in {
        "needs optimizer=, a torch.optim.Optimizer over the model's parameters, not 'adam'": {"optimizer": "adam"},
        "not None": {"optimizer": None},
        "LBFGS steps on all parameters at once": {"optimizer": torch.optim.LBFGS(model.parameters())},
        r"the optimizer \(SGD\) has no parameter of the model": {"optimizer": torch.optim.SGD(Net().parameters())},
        "two parameters of SGD share memory": {"model": shared, "optimizer": torch.optim.SGD(shared.parameters())},
        "Counting keeps numbers for all parameters together": {"optimizer": Counting(model.parameters())},
        "a step of Failing on one parameter fails .no step here.": {"optimizer": Failing(model.parameters())},
        "does not go with backend='inductor'": {"backend": "inductor"},
        "does not go with implementations='joint'": {"implementations": "joint"},
        "does not go with scope='staged'": {"scope": "staged"},
        "does not go with accumulate=True": {"accumulate": True},
        "does not go with parts=": {"parts": ["head"]},
    }.items():
        given = {"model": model, "optimizer": sgd, **options}
        with refused(says):
            rematerialize(given.pop("model"), (x,), **given)


def test_what_needs_gradients_is_refused_in_one_line() -> None:
    _, _, ours, optimizer = pair(lambda m: torch.optim.SGD(m.parameters(), lr=0.01))
    x, scaled = images(), torch.amp.GradScaler("cpu")
    scaled.scale(torch.ones(()))

    def backward() -> None:
        squares(ours(x)).backward()

    @contextlib.contextmanager
    def refused_after_a_step(says: str, is_left_alone: bool = False) -> Iterator[None]:
        ours.zero_grad()
        backward()
        before = copy.deepcopy(ours.state_dict())
        with refused(says):
            yield
        assert not is_left_alone or all(torch.equal(before[name], p) for name, p in ours.named_parameters())

    for call in (
        lambda: nn.utils.clip_grad_norm_(ours.parameters(), 1.0),
        lambda: nn.utils.clip_grad_value_(ours.parameters(), 1.0),
        lambda: nn.utils.get_total_norm([p.grad for p in ours.parameters()]),
        lambda: scaled.unscale_(optimizer), lambda: scaled.step(optimizer),
        lambda: ours.head.bias.sum().backward(),  # a use of a parameter outside of the module
    ):  # fmt: skip
        with refused_after_a_step(
            "no gradients are held with optimizer_in_backward=True.*leave clipping, accumulation"
        ):
            call()
    with refused_after_a_step("2 ran before this optimizer.step"):
        backward()
        optimizer.step()
    with refused_after_a_step("gradients cannot be accumulated over several", is_left_alone=True):
        backward()  # the loop calls step()

    ours.zero_grad()
    once, twice = squares(ours(x)), squares(ours(x))
    before = copy.deepcopy(ours.state_dict())
    for loss in (once + twice, once):
        with refused("go through one forward pass, once"):
            loss.backward(retain_graph=True)
            assert loss is once
            loss.backward()
        assert loss is once or all(torch.equal(before[name], p) for name, p in ours.named_parameters())
    ours.zero_grad()
    ours.head.bias.grad = torch.ones(10)
    with refused("gradients of an earlier step are held: call zero_grad"):
        backward()
    ours.zero_grad()
    hook = ours.head.bias.register_hook(lambda gradient: gradient)
    with refused("hooks on the gradients of parameters are not called"):
        backward()
    hook.remove()
    backward()
    with pytest.raises(TypeError, match=r"cannot be copied: copy its \.model"):
        copy.deepcopy(ours)
