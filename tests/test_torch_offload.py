"""Plans that copy values to the host, executed in PyTorch on a CPU: bits, bytes on both sides, and what goes wrong."""

from __future__ import annotations

import copy
import gc
import inspect
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from brute_force import random_graph
from helpers import refused
from orders import random_copies, random_order
from torch import Tensor, nn
from torch_helpers import (
    MARKS,
    Applies,
    Net,
    assert_same,
    assert_same_steps,
    images,
    needs,
    rematerialize,
    rows,
    squares,
    step,
)

import remat.torch as rt
from remat import Graph, InvalidPlan, Link, Operation, Plan, Value, simulate
from remat.cost import load_gpu
from remat.errors import RematError
from remat.execution import StepPlan
from remat.plan import DROP, OFFLOAD
from remat.torch.copying import streams
from remat.torch.copying.places import Places
from remat.torch.copying.streams import OnCpu, OnCuda
from remat.torch.networks.llama import llama
from remat.torch.networks.transformer import gpt2

pytestmark = [pytest.mark.usefixtures("torch_cache", "torch_seed"), *MARKS[1:]]  # only one test searches
FAST = Link(40 * 10**9, 40 * 10**9, latency_s=0)


def with_loss(net: nn.Module) -> nn.Module:
    """A network with its loss, so that everything is counted exactly."""
    return Applies(lambda self, x: squares(self.net(x)), 0, net=net)


def network(kind: str) -> tuple[nn.Module, tuple[Tensor, ...]]:
    torch.manual_seed(0)
    text, sizes = tuple(torch.randint(0, 50, (2, 2, 16))), {"length": 16, "vocabulary": 50, "width": 32, "n_layers": 2}
    layers = [layer for _ in range(3) for layer in (nn.Linear(64, 64), nn.Tanh())]
    return {
        "net": lambda: (with_loss(Net()), images()), "small": lambda: (with_loss(Net(8, 1)), images()),
        "gpt2": lambda: (gpt2(2, context=16, n_heads=2, dropout=0.1, **sizes)[0], text),
        "llama": lambda: (llama(2, hidden=48, n_heads=4, n_groups=2, **sizes)[0], text),
        "dense": lambda: (with_loss(nn.Sequential(*layers)), rows(128, 64)),
    }[kind]()  # fmt: skip


def drawn(made: StepPlan, seed: int, often: float = 0.3, drop: float = 0.03, link: Link = FAST) -> StepPlan:
    """A plan of the same step with random repeats and copies."""
    rng = np.random.default_rng(seed)
    graph = replace(made.graph, cost_unit="ns")
    plan = random_copies(graph, random_order(graph, rng, drop), rng, link, often)
    return replace(made, plan=plan, graph=graph, budget_bytes=None)


def with_most_copies(made: StepPlan) -> StepPlan:
    return max((drawn(made, seed, often=0.6) for seed in range(20)), key=lambda plan: len(plan.trace.copies))


def following(kind: str, *seeds: int) -> Iterator[tuple[nn.Module, rt.Rematerialized, tuple[Tensor, ...]]]:
    """The plain model, the model under a random plan, the arguments."""
    model, args = network(kind)
    plain, made = copy.deepcopy(model), rematerialize(model, args, 1.0).plan
    for seed in seeds:
        yield plain, rt.rematerialize(model, args, plan=drawn(made, seed)), args


def of_itself(loss: Tensor) -> Tensor:
    return loss


@pytest.fixture(scope="module")
def dense() -> tuple[nn.Module, rt.Rematerialized, tuple[Tensor, ...]]:
    """A small network under a plan with many copies, compiled once."""
    model, args = network("dense")
    plain, made = copy.deepcopy(model), rematerialize(model, args, 1.0).plan
    plan = with_most_copies(made)
    assert len(plan.trace.copies) > 20
    return plain, rt.rematerialize(model, args, plan=plan), args


def host_blocks(module: rt.Rematerialized) -> list[int]:
    """Sizes of the host's memory that no step uses now."""
    gc.collect()
    return [len(block) for hosts in module._planner.hosts.values() for block in hosts.free]


def copy_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("remat-copy")]


# --- what it computes and holds


@pytest.mark.parametrize(("kind", "seed"), [("net", 1), ("gpt2", 3), ("llama", 4)])
def test_random_plans_with_copies_have_the_plain_bits_and_exactly_the_judges_peaks(kind: str, seed: int) -> None:
    for plain, ours, args in following(kind, seed):
        trace = ours.plan.trace
        assert len(trace.copies) > 5
        assert_same_steps(plain, ours, *args, n=2, loss_of=of_itself)
        ours.zero_grad()
        # Running statistics stay where a plan makes them again before the loss, which no repetition does.
        stay = 6 * 96 if kind == "net" else 0
        assert -4 <= needs(ours, args) - ours.predicted_peak_bytes <= stay  # 4: the loss may start the backward pass
        assert host_blocks(ours) == [trace.host_peak_bytes]
        assert copy_threads() == []


def test_copies_that_are_late_change_no_bit_and_no_peak(dense: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    plain, ours, args = dense
    rng, transfer = np.random.default_rng(4), OnCpu.transfer

    def late(self: OnCpu, pairs: Any) -> None:
        time.sleep(rng.choice([0, 0, 1e-3, 5e-3]))
        transfer(self, pairs)
        time.sleep(rng.choice([0, 0, 1e-3]))

    monkeypatch.setattr(OnCpu, "transfer", late)
    peaks = set[int]()
    for _ in range(4):
        assert_same_steps(plain, ours, *args, loss_of=of_itself)
        ours.zero_grad()
        peaks.add(needs(ours, args))
    assert peaks == {ours.predicted_peak_bytes}
    assert host_blocks(ours) == [ours.plan.trace.host_peak_bytes]


def test_places_on_the_host_never_overlap_and_fill_it() -> None:
    in_pieces = 0
    for seed in range(150):
        rng = np.random.default_rng(seed)
        graph = random_graph(rng, int(rng.integers(3, 10)), multi_output=0.3, keep=0.3, once=0.3, max_bytes=9)
        graph = replace(graph, cost_unit="ns")
        plan = random_copies(graph, random_order(graph, rng, 0.1), rng, FAST, 0.5)
        places = Places.of(graph, plan)
        assert places.n_bytes == simulate(graph, plan).host_peak_bytes
        taken, of_value = dict[int, int](), dict[int, int]()  # byte -> copy
        for move in (move for moves in places.moves for move in moves):
            if move.kind == OFFLOAD:
                of_value[move.value] = move.copy
                own = [x for start, n in places.pieces[move.copy] for x in range(start, start + n)]
                assert len(own) == graph.values[move.value].bytes
                assert taken.keys().isdisjoint(own)
                assert not own or max(own) < places.n_bytes
                taken |= dict.fromkeys(own, move.copy)
                in_pieces += len(places.pieces[move.copy]) > 1
            elif move.kind == DROP:
                taken = {x: c for x, c in taken.items() if c != of_value[move.value]}
    assert in_pieces > 20


def test_an_output_that_the_caller_holds_is_never_freed() -> None:
    operations = [
        Operation("a", "op", (), (0,), 1, run_once=True), Operation("b", "op", (0,), (1,), 1),
        Operation("c", "op", (0, 1), (2,), 1),
    ]  # fmt: skip
    values = [Value("a", 4, keep=True), Value("b", 1), Value("c", 1, keep=True)]
    graph = Graph("held", tuple(operations), tuple(values))
    steps = [("compute", 0), ("offload", 0), ("free", 0), ("prefetch", 0), ("compute", 1), ("compute", 2)]
    with pytest.raises(InvalidPlan, match="kept and made only once"):
        simulate(graph, Plan.from_steps(graph, steps, link=FAST))


# --- loops


def test_other_loops_do_as_with_the_plain_model(dense: Any) -> None:
    plain, ours, (x,) = dense
    y = torch.randn_like(x)

    def both(run: Callable[[nn.Module], Any]) -> None:
        for model in (plain, ours):
            model.zero_grad()
            run(model)
        pairs = zip(plain.parameters(), ours.parameters(), strict=True)
        assert all(torch.equal(p.grad, q.grad) for p, q in pairs)  # pyright: ignore[reportArgumentType]

    def retained(model: nn.Module) -> None:
        loss = model(x)
        for i in range(3):
            loss.backward(retain_graph=i < 2)

    def crossed(model: nn.Module) -> None:
        losses = model(x), model(y)
        for loss in losses:
            loss.backward()

    def given_up(model: nn.Module) -> None:
        model(y)
        model(x).backward()

    both(lambda model: (model(x) + model(y)).backward())
    both(crossed)
    both(given_up)
    both(lambda model: [model(z).backward() for z in (x, y)])  # accumulation
    with pytest.warns(UserWarning, match="retain_graph=True"):
        both(retained)
    assert set(host_blocks(ours)) == {ours.plan.trace.host_peak_bytes}
    assert copy_threads() == []


def test_another_mode_and_another_length_follow_plans_of_their_own(tmp_path: Path) -> None:
    for plain, ours, args in following("small", 1):
        assert_same_steps(plain.eval(), ours.eval(), *args, loss_of=of_itself)
        assert_same_steps(plain.train(), ours.train(), args[0][:3], loss_of=of_itself)
        ours.plan.save(tmp_path / "plan.json")
        model, _ = network("small")
        again = rt.follow(model, args, tmp_path / "plan.json")
        assert again.plan.plan.steps == ours.plan.plan.steps
        assert again.plan.plan.link == FAST
        said = str(again.plan)
        assert f"{len(again.plan.offloaded)} values meanwhile" in said
        assert "over 40 GB/s" in said
        assert "values on the host meanwhile" in repr(again.plan)


def test_a_loss_of_some_outputs_copies_only_what_is_made() -> None:
    """The second output has an infinite derivative."""

    def two(self: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        h = torch.tanh(self.a(torch.tanh(self.a(x))))
        return self.b(torch.tanh(self.b(h))), torch.sqrt(self.third(h).square() * 0)

    plain, args = Applies(two, third=nn.Linear(16, 16)), rows(8, 16)
    model = copy.deepcopy(plain)
    ours = rt.rematerialize(model, args, plan=with_most_copies(rematerialize(model, args, 1.0).plan))
    assert_same_steps(plain, ours, *args, n=2, loss_of=lambda outputs: squares(outputs[0]))
    assert copy_threads() == []


# --- what goes wrong


def broken(monkeypatch: pytest.MonkeyPatch, at: int, fail: Callable[[OnCpu], None]) -> None:
    """Let the copy number `at` fail, and only that one."""
    transfer, seen = OnCpu.transfer, list[int]()

    def transfers(self: OnCpu, pairs: Any) -> None:
        seen.append(1)
        if len(seen) == at:
            fail(self)
        transfer(self, pairs)

    monkeypatch.setattr(OnCpu, "transfer", transfers)


def assert_nothing_leaked(of: Any) -> None:
    plain, ours, args = of
    assert copy_threads() == []
    assert set(host_blocks(ours)) <= {ours.plan.trace.host_peak_bytes}
    ours.zero_grad()
    plain.zero_grad()
    assert_same(*(step(model, args, of_itself) for model in (plain, ours)))
    assert set(host_blocks(ours)) == {ours.plan.trace.host_peak_bytes}


@pytest.mark.parametrize("at", [1, 20])
def test_an_exception_in_a_copy_is_one_line_and_the_next_step_works(
    dense: Any, monkeypatch: pytest.MonkeyPatch, at: int
) -> None:
    def fail(_: OnCpu) -> None:
        raise OSError("no\nsuch bus")

    broken(monkeypatch, at, fail)
    with refused("a copy of .* the host failed: OSError: no", RematError):
        dense[1](*dense[2]).backward()
    assert_nothing_leaked(dense)


def test_ctrl_c_in_a_copy_ends_the_step_and_the_next_one_works(dense: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(self: OnCpu) -> None:
        os.kill(os.getpid(), signal.SIGINT)  # which the main thread gets
        self.closing.wait(10)

    broken(monkeypatch, 8, interrupt)
    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        dense[1](*dense[2]).backward()
    assert time.monotonic() - began < 9
    assert_nothing_leaked(dense)


def test_a_host_without_memory_is_one_line_and_the_next_step_works(dense: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for hosts in dense[1]._planner.hosts.values():
        hosts.free.clear()

    def fail(_: int) -> Tensor:
        raise MemoryError("cudaHostRegister gives error 2")

    with monkeypatch.context() as patch:
        patch.setattr(OnCpu, "host", staticmethod(fail))
        with refused("the host has no .* of memory for a step's copies .*host_bytes", RematError):
            dense[1](*dense[2])
    assert_nothing_leaked(dense)


def test_saved_tensors_that_hooks_move_are_refused(dense: Any) -> None:
    _, ours, args = dense
    with torch.autograd.graph.saved_tensors_hooks(Tensor.clone, of_itself):
        loss = ours(*args)
    with refused("leave hooks on saved tensors .*out"):
        loss.backward()
    del loss
    assert_nothing_leaked(dense)


def test_what_does_not_go_with_copies_is_refused_in_one_line() -> None:
    model, args = network("dense")
    made = rematerialize(model, args, 1.0).plan
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    usual: dict[str, Any] = {"cost": "roofline", "offload": "8GB/s"}
    wrong: list[tuple[str, dict[str, Any]]] = [
        ("backend='inductor'", {"backend": "inductor"}),
        ("implementations='exact'", {"implementations": "exact"}),
        ("parts=", {"parts": ["net"]}),
        ("shard=", {"shard": 2, "optimizer": "adam"}),
        ("retain_graph=True", {"retain_graph": True}),
        ("optimizer_in_backward=True", {"optimizer_in_backward": True, "optimizer": optimizer}),
        ("cost='flops', which is no time", {"cost": "flops"}),
        ("plan=, which says what is copied", {"plan": drawn(made, 0)}),
        ("'8' has no unit per second", {"offload": "8"}),
        ("unknown link 'pcie9'; did you mean", {"offload": "pcie9"}),
        ("-1GB", {"offload": "-1GB/s"}),
        ("must be a remat.Link or text", {"offload": 8}),
        ("host_bytes of 1 B hold no value of this step", {"offload": Link(10**9, 10**9, host_bytes=1)}),
    ]
    for message, options in wrong:
        with refused(message):
            rt.rematerialize(model, args, 0.5, **{**usual, **options})
    for message, options in (wrong[0], wrong[4]):
        with refused(f"a plan that copies values to the host does not go with {message}"):
            rt.rematerialize(model, args, plan=drawn(made, 0), **options)


def test_auto_takes_the_link_of_the_gpu_and_copies_nothing_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    from remat.torch.planning import capturing

    model, args = network("dense")
    assert not rematerialize(model, args, 1.0, cost="roofline", offload="auto").plan.plan.has_copies
    monkeypatch.setattr(capturing, "_this_gpu", lambda: load_gpu("h100"))
    assert str(capturing.offload_link("auto", "cuda")) == "50 GB/s"
    monkeypatch.setattr(capturing, "_this_gpu", lambda: None)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "GPU of tomorrow")
    with refused("between GPU of tomorrow and its host is not known; give it, e.g. offload='25GB/s'"):
        capturing.offload_link("auto", "cuda")


def test_streams_of_every_device_have_the_same_methods() -> None:
    def methods(kind: type) -> dict[str, list[str]]:
        return {
            name: [*inspect.signature(x).parameters]
            for name, x in inspect.getmembers(kind, inspect.isfunction)
            if not name.startswith("_") or name == "__init__"
        }

    on_cpu, on_cuda = methods(OnCpu), methods(OnCuda)
    assert on_cuda.items() <= on_cpu.items()
    assert on_cpu.keys() - on_cuda.keys() == {"transfer"}  # which only threads need
    assert {"cpu": OnCpu, "cuda": OnCuda} == streams.STREAMS


# --- planned


@pytest.mark.usefixtures("warm_search")
def test_a_plan_within_a_budget_copies_rather_than_computes_again() -> None:
    """Over a fast link nothing is computed again; the step is the plain one within the budget."""
    torch.manual_seed(0)
    model = with_loss(nn.Sequential(*(layer for _ in range(4) for layer in (nn.Linear(256, 256), nn.GELU()))))
    args = (torch.randn(2048, 256),)
    plain = copy.deepcopy(model)
    ours = rematerialize(model, args, 0.65, cost="roofline", offload="100GB/s", time_limit_s=3)
    assert ours.plan.offloaded
    assert not ours.plan.recomputed
    assert_same_steps(plain, ours, *args, loss_of=of_itself)
    ours.zero_grad()
    assert ours.budget_bytes is not None
    assert needs(ours, args) == ours.predicted_peak_bytes <= ours.budget_bytes
    shorter = torch.randn(1024, 256)
    (other,) = ours.prepare((shorter,))
    assert other.peak_bytes <= ours.budget_bytes
    assert_same_steps(plain, ours, shorter, loss_of=of_itself)


def test_a_step_that_waits_for_copies_lasts_as_long_as_the_judge_says(dense: Any) -> None:
    """Over a link so slow that computations take no time beside the copies, on a busy machine too."""
    model, args = network("dense")
    made = dense[1].plan
    slow = Link(10**6, 15 * 10**5, latency_s=1e-3)
    quick = replace(made.graph, operations=tuple(replace(op, cost=20_000) for op in made.graph.operations))
    plan = Plan.from_steps(quick, made.plan.steps, None, slow)
    ours = rt.rematerialize(model, args, plan=replace(made, plan=plan, graph=quick))
    judged = ours.plan.trace.cost / 1e9
    assert judged > 0.5
    ours(*args).backward()  # compiles
    seconds = []
    for _ in range(3):
        began = time.perf_counter()
        ours(*args).backward()
        seconds.append(time.perf_counter() - began)
    assert 0.999 * judged < min(seconds) < 1.3 * judged  # on a busy machine threads wake late
