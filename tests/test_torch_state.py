"""State in a model's Python attributes: planning leaves it alone, and steps carry it as the plain model's do."""

from __future__ import annotations

import copy
import gc
import os
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from helpers import refused
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.parametrizations import spectral_norm
from torch_helpers import MARKS, Applies, both, gradients, rematerialize, rows, said

from remat.errors import InvalidInput
from remat.torch.measuring.measure import measured_peak, peak_of_step
from remat.torch.measuring.plain import plain_step
from remat.torch.step import numbers

WIDTH = 16
pytestmark = MARKS


class Held:
    def __init__(self, **contents: Any):
        vars(self).update(contents)


class Slots:
    __slots__ = "mem", "n"

    def __init__(self) -> None:
        self.n = 0


class Two(Applies):
    """Two layers, and something between them that `between` does with (module, first layer's result)."""

    def __init__(self, between: Callable[[Any, Tensor], Tensor], width: int = WIDTH, **state: Any):
        super().__init__(between, width)
        vars(self).update(state)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.function(self, torch.tanh(self.a(x))))


def counted(self: Any, h: Tensor) -> Tensor:
    self.n += 1
    return h * 2 if self.n == 3 else h


def remembered(self: Any, h: Tensor) -> Tensor:
    if self.mem is not None:
        h = h + self.mem.mean(0)
    self.mem = h.detach()
    return h


def averaged_in_place(self: Any, h: Tensor) -> Tensor:
    self.mean.mul_(0.9).add_(h.detach().mean(0))
    return h + self.mean


def first_only(self: Any, h: Tensor) -> Tensor:
    if not self.is_ready:
        self.scale, self.is_ready = h.detach().std(), True
    return h / self.scale


def windowed(self: Any, h: Tensor) -> Tensor:
    self.last.append(h.detach().mean())
    if len(self.last) > 2:
        self.last.pop(0)
    return h * sum(self.last)


def in_containers(self: Any, h: Tensor) -> Tensor:
    self.held["h"] = self.slots.mem = h.detach()
    self.held["list"][0].append(h.detach().mean())
    self.held["list"][0].pop(0)
    self.cache.layers[0].keys = h.detach()
    self.cache.n += 1
    self.slots.n += 1
    self.counts[0] += 1
    return h


def reset(self: Any, h: Tensor) -> Tensor:
    self.layer = 0
    for _ in range(2):
        h = h * (self.layer + 1)
        self.layer += 1
    return h


def makes(self: Any, h: Tensor) -> Tensor:
    """Objects that a step makes are no state."""
    made, some = Held(n=0), {"n": 0}
    made.n, some["n"] = made.n + 1, some["n"] + 1
    self.made, self.some = made, some
    return h * made.n


CARRIED = {  # models with several of these in a row
    "numbers": lambda: (Two(counted, n=0), Two(reset, layer=7), Two(makes, made=None, some=None)),
    "tensors": lambda: (
        Two(remembered, mem=None), Two(averaged_in_place, mean=torch.ones(WIDTH)), Two(first_only, is_ready=False),
        Two(windowed, last=[]),
    ),
    "containers": lambda: (
        Two(
            in_containers, held={"list": [[torch.zeros(())], {1}]}, cache=Held(layers=[Held()], n=0), slots=Slots(),
            counts=np.zeros(2),
        ),
    ),
}  # fmt: skip


def losses(model: nn.Module, x: Tensor, n: int = 5) -> list[Tensor]:
    optimizer, found = torch.optim.SGD(model.parameters(), 0.1), []
    for i in range(n):
        optimizer.zero_grad()
        loss = model(x + i).square().mean()
        loss.backward()
        optimizer.step()
        found.append(loss.detach())
    return [*found, *(p.detach() for p in model.parameters())]


def assert_carried(plain: nn.Module, ours: Any) -> None:
    (x,) = rows(8, WIDTH)
    assert all(map(torch.equal, losses(plain, x), losses(ours, x)))
    assert _state(ours.model) == _state(plain)


def _state(model: nn.Module) -> str:
    """All attributes with the values in them."""
    return "\n".join(f"{name}: {_told(vars(module))}" for name, module in model.named_modules())


def _told(x: Any) -> Any:
    if isinstance(x, Tensor):
        return type(x).__name__, x.tolist()
    if isinstance(x, dict):
        return [(name, _told(y)) for name, y in x.items() if name not in ("_modules", "function")]
    if isinstance(x, (list, tuple, set, deque)):
        return type(x).__name__, [_told(y) for y in x]
    if isinstance(x, Slots):
        return [(name, _told(getattr(x, name, "nothing"))) for name in x.__slots__]
    return _told(vars(x)) if isinstance(x, Held) else repr(x)


@pytest.mark.parametrize("kind", CARRIED)
def test_state_in_attributes_moves_from_step_to_step_as_in_the_plain_loop(kind: str) -> None:
    model = nn.Sequential(*CARRIED[kind](), nn.Tanh())
    plain, before, attributes = copy.deepcopy(model), _state(model), {name: id(x) for name, x in vars(model[0]).items()}
    ours = rematerialize(model, rows(8, WIDTH), verify=True)  # captures a step, follows plain ones, measures real ones
    ours.prepare(rows(4, WIDTH))
    assert _state(model) == before
    assert {name: id(x) for name, x in vars(model[0]).items()} == attributes
    assert_carried(plain, ours)


def test_containers_of_all_kinds_are_put_back_in_their_order() -> None:
    def changes(self: Any, h: Tensor) -> Tensor:
        self.ordered.move_to_end("a")
        self.queue.append(h.detach())
        self.seen.add("new")
        self.pair[0].clear()
        self.hidden[0].n += 1
        self.added = h
        del self.removed
        return h

    state = {"ordered": OrderedDict(a=1, b=2), "queue": deque([1, 2], maxlen=2), "seen": {"old"}, "pair": ([3],)}
    model = Two(changes, hidden=[Two(counted, n=0)], removed=None, **state)
    before = _state(model)
    plain_step(model, rows(8, WIDTH), {})
    assert _state(model) == before
    assert ([*model.ordered], model.hidden[0].n) == (["a", "b"], 0)


def test_a_failed_or_refused_run_leaves_attributes_alone() -> None:
    def fails(self: Any, h: Tensor) -> Tensor:
        self.n += 1
        raise RuntimeError("broken")

    def broken(self: Any, h: Tensor) -> Tensor:
        if not self.is_built:
            open(os.devnull).close()  # cannot be traced
            self.scale, self.is_built = torch.ones(WIDTH), True
        return h * self.scale

    failing, model, (x,) = Two(fails, n=0), Two(broken, is_built=False, scale=None), rows(8, WIDTH)
    with pytest.raises(RuntimeError, match="broken"):
        plain_step(failing, (x,), {})
    for each in (failing, model):
        with pytest.raises(InvalidInput):
            rematerialize(each, (x,))
    assert (failing.n, model.is_built, model.scale) == (0, False, None)
    assert model(x).isfinite().all()


def test_what_a_model_sets_up_in_its_first_call_is_kept() -> None:
    """transformers' models install hooks then, in a way that cannot be traced."""

    def sets_up(self: Any, h: Tensor) -> Tensor:
        if not self.is_set_up:
            if torch.compiler.is_compiling():
                torch._dynamo.graph_break()
            self.b.register_forward_hook(lambda module, args, output: output * 2)
            self.is_set_up = True
        self.n += 1
        return h

    (x,) = rows(8, WIDTH)
    plain, ours = both(Two(sets_up, is_set_up=False, n=0), (x,))
    assert (ours.model.is_set_up, ours.model.n, len(ours.model.b._forward_hooks)) == (True, 0, 1)
    assert all(map(torch.equal, losses(plain, x), losses(ours, x)))


def test_runs_on_real_tensors_put_back_what_no_version_tells_of() -> None:
    """Batch norm's kernel notes no new version of its statistics; a buffer is written behind autograd."""

    def averaged(self: Any, x: Tensor) -> Tensor:
        h = self.norm(self.a(x))
        self.mean.data.mul_(0.9).add_(h.detach().mean(0))
        return torch.tanh(h)

    (x,) = rows(8, WIDTH)
    model = Applies(averaged, norm=nn.BatchNorm1d(WIDTH), mean=torch.zeros(WIDTH))
    before = copy.deepcopy(model.state_dict())
    assert rematerialize(model, (x,), verify=True).plan.difference == 0
    peak_of_step(model, (x,), {}, "cpu")
    assert all(torch.equal(before[name], x) for name, x in model.state_dict().items())


def test_neither_samples_nor_arguments_are_held() -> None:
    x, y = rows(4, WIDTH)[0], rows(4, WIDTH)[0]
    held = [weakref.ref(x), weakref.ref(y)]
    planned = rematerialize(nn.Linear(WIDTH, WIDTH), (x,))
    planned(y).sum().backward()
    del x, y
    gc.collect()
    assert [each() for each in held] == [None, None]


def test_a_counter_is_not_compiled_again_for_each_value(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = []
    apart = numbers.numbers_apart
    model = Two(counted, n=5)
    ours = rematerialize(model, rows(8, WIDTH))
    monkeypatch.setattr("remat.torch.step.capture.numbers_apart", lambda *args: compiled.append(1) or apart(*args))
    losses(ours, rows(8, WIDTH)[0], 6)
    assert model.n == 11
    assert not compiled  # what was captured for planning counts on


def scaled(self: Any, h: Tensor) -> Tensor:
    self.n += 1
    return h * self.n


def cooled(self: Any, h: Tensor) -> Tensor:
    self.heat = 0.9 * self.heat
    return h * self.heat


def queued(self: Any, h: Tensor) -> Tensor:
    self.queue.append(h.detach().mean())
    return h * sum(self.queue)


def test_state_that_cannot_be_followed_is_refused_by_name() -> None:
    changes = "is a number that changes in each step"
    for between, state, message in (
        (scaled, {"n": 0}, f"'0.n' {changes}, and tensors depend on it"),
        (lambda self, h: scaled(self.counter, h), {"counter": Slots()}, f"'0.counter.n' {changes}"),
        (cooled, {"heat": 1.0}, rf"'0.heat' {changes} \(1 to 0.9\)"),
        (queued, {"queue": deque(maxlen=2)}, "'0.queue' is a deque with maxlen"),
    ):
        with refused(message):
            rematerialize(nn.Sequential(Two(between, **state)), rows(8, WIDTH))


def test_a_list_that_grows_is_refused_by_name_and_one_that_the_loop_clears_is_not(monkeypatch: Any) -> None:
    def appended(self: Any, h: Tensor) -> Tensor:
        self.seen.append(h.detach().mean())
        return h

    monkeypatch.setattr(numbers, "MOST_STATES", 2)
    model, x = Two(appended, seen=[]), rows(8, WIDTH)[0]
    ours = rematerialize(model, (x,))
    for _ in range(4):
        ours(x).sum().backward()
        model.seen.clear()
    ours.zero_grad()
    with refused(r"'seen' \(of 2 items\) changes in each step"):
        losses(ours, x, 4)


def test_history_in_an_attribute_fails_as_in_plain_pytorch_or_not_at_all() -> None:
    def with_history(self: Any, h: Tensor) -> Tensor:
        h = h if self.mem is None else h + self.mem.mean(0)
        self.mem = h
        return h

    (x,) = rows(8, WIDTH)
    models = both(Two(with_history, mem=None), (x,))
    # Truncated: one backward pass through two steps.
    assert all(map(torch.equal, *(gradients(each, lambda m: m(x).sum() + m(x + 1).sum()) for each in models)))
    for each in models:
        with pytest.raises(RuntimeError, match="backward through the graph a second time"):
            each(x).sum().backward()


def test_the_budget_counts_tensors_in_attributes() -> None:
    def kept(self: Any, h: Tensor) -> Tensor:
        h = h + self.mem if self.mem is not None else h
        self.mem = h.detach()
        return torch.tanh(torch.tanh(torch.tanh(h)))

    model, x = Two(kept, width=128, mem=None), torch.randn(512, 128)
    ours = rematerialize(model, (x,), "3MB", verify=True)
    there = sum(y.numel() * 4 for y in (*model.parameters(), x))
    assert model.mem is None
    for _ in range(3):
        ours.zero_grad()
        held = 0 if model.mem is None else model.mem.numel() * 4
        peak = there + held + measured_peak(lambda: ours(x).sum().backward())
        assert peak <= ours.predicted_peak_bytes


def test_parts_carry_their_state() -> None:
    def reads_a_value(self: Any, h: Tensor) -> Tensor:
        self.seen.append(h.detach().mean())
        return remembered(self, h * 2 if float(self.seen[-1]) > 5 else h)

    between = Two(reads_a_value, seen=[], mem=None)
    parts = nn.Sequential(Two(averaged_in_place, mean=torch.ones(WIDTH)), between, Two(counted, n=0))
    plain, ours = both(parts, rows(8, WIDTH), parts=["0", "2"])
    assert _state(ours.model) == _state(plain)
    assert_carried(plain, ours)


@pytest.mark.parametrize("kind", ["tied", "spectral norm", "plain"])
def test_two_calls_before_a_backward_pass_have_the_plain_bits_or_a_warning(kind: str) -> None:
    first, second, args = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1), [rows(8, WIDTH)[0] for _ in range(2)]
    model: nn.Module = nn.Sequential(first, nn.Tanh(), second)
    if kind == "spectral norm":
        model = nn.Sequential(spectral_norm(first), nn.Tanh(), spectral_norm(second))
    elif kind == "tied":  # the embedding is also the weight of the last layer
        args, table = [torch.randint(0, 20, (4, 5)) for _ in range(2)], nn.Embedding(20, WIDTH)
        model = Applies(lambda self, x: F.linear(torch.tanh(self.a(self.table(x))), self.table.weight), table=table)
    plain, ours = both(model, (args[0],))

    def of(n: int) -> Callable[[Any], Tensor]:
        return lambda each: sum(each(x).square().mean() for x in args[:n])

    mine: list[Tensor] = []
    assert not said(lambda: mine.extend(gradients(ours, of(1))))
    assert all(map(torch.equal, gradients(plain, of(1)), mine))
    mine.clear()
    warned = said(lambda: mine.extend(gradients(ours, of(2))), "two calls of the module")
    theirs = gradients(plain, of(2))
    assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(theirs, mine, strict=True))
    assert all(map(torch.equal, theirs, mine)) or len(warned) == 1
    assert bool(warned) == (kind != "plain")


def test_a_penalty_outside_is_said_to_be_added_in_another_order() -> None:
    def penalised(name: str) -> Callable[[Any], Tensor]:
        return lambda each: each(x).square().mean() + (1e-3 * each.get_parameter(name).square().sum() if name else 0)

    def compare() -> None:
        for name in ("", "b.weight"):
            assert all(map(torch.equal, gradients(plain, penalised(name)), gradients(ours, penalised(name))))
        handle = ours.model.a.weight.register_hook(lambda gradient: gradient * 2)
        gradients(ours, penalised(""))  # whoever changes a gradient adds nothing to it
        handle.remove()

    def compare_nearly() -> None:
        for _ in range(2):
            found = (gradients(each, penalised("a.weight")) for each in (plain, ours))
            assert all(torch.allclose(*pair, atol=1e-6) for pair in zip(*found, strict=True))

    (x,) = rows(8, WIDTH)
    plain, ours = both(Applies(lambda self, x: self.b(torch.tanh(self.a(torch.tanh(self.a(x)))))), (x,))
    assert not said(compare)
    (message,) = said(compare_nearly)
    assert "the loss reads 'a.weight' outside of the module, too: gradients of it are added in another order" in message


def test_steps_of_a_recurrent_layer_are_terms_of_a_sum() -> None:
    (x,) = rows(4, 5, WIDTH)
    plain, ours = both(nn.GRU(WIDTH, WIDTH, batch_first=True), (x,))
    for loss_of in (
        lambda each: each(x)[0].square().mean() + each.weight_hh_l0.square().sum(),
        lambda each: each(x)[0].square().mean() + each(2 * x)[0].square().mean(),
    ):
        again = copy.deepcopy(ours)  # what is said once is not said again
        with pytest.warns(UserWarning, match="are added in another order"):
            mine = gradients(again, loss_of)
        assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(gradients(plain, loss_of), mine, strict=True))
