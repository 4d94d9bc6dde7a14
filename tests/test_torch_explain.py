"""`rt.explain` and `remat explain`: an answer before the GPU."""

import pickle
import pickletools
from dataclasses import replace

import pytest
from helpers import refused

pytest.importorskip("torch")

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch_helpers import Applies, with_updates_by_name

import remat.torch as rt
from remat.cli import main
from remat.frontends.spec import ModelSpec
from remat.simulator import plain_peak, simulate
from remat.solving.api import solve
from remat.torch.explaining.explain import held_values
from remat.torch.explaining.page import OTHERS, held_by_module
from remat.torch.explaining.sizes import StepAtSize, StepAtSizes
from remat.torch.frontend.graphs import extract, step_with_loss
from remat.torch.measuring.measure import peak_of_step
from remat.torch.networks.llama import llama
from remat.torch.networks.transformer import gpt2

SMALL = {"vocabulary": 300, "width": 64, "hidden": 128, "n_layers": 2, "n_heads": 4, "length": 48}
TARGET = "remat.torch.networks.llama:llama"
# What the visualizer's reader knows of pickle's operations (its JavaScript, 2026)
READ = """
    APPEND APPENDS BINFLOAT BINGET BININT BININT1 BININT2 BINPUT BINUNICODE DICT EMPTY_DICT EMPTY_LIST EMPTY_TUPLE FRAME
    LIST LONG1 LONG_BINGET LONG_BINPUT MARK MEMOIZE NEWFALSE NEWTRUE NONE PROTO SETITEM SETITEMS SHORT_BINUNICODE STOP
    TUPLE TUPLE1 TUPLE2 TUPLE3
"""


def graph_at(batch_size: int = 4, **options: int):
    return extract(ModelSpec("llama", "torch", TARGET, batch_size, options=SMALL | options))


@pytest.fixture(scope="module")
def explained() -> rt.Explanation:
    return rt.explain(llama, gpu="cpu", budget="3.2MB", link="20GB/s", time_limit_s=0.2, batch_size=4, **SMALL)


@pytest.mark.parametrize(("sizes", "size", "name"), [((2, 4), 7, "batch_size"), ((24, 48, 72), 100, "length")])
def test_a_step_between_captures_is_as_captured(sizes: tuple[int, ...], size: int, name: str) -> None:
    sized = StepAtSizes.of(lambda n: StepAtSize(graph_at(n_layers=1, **{name: n})), sizes)
    made, real = sized.at(size).graph, graph_at(n_layers=1, **{name: size})
    assert made.fixed_bytes == real.fixed_bytes
    assert [value.bytes for value in made.values] == [value.bytes for value in real.values]
    work = [(op.work.flops, op.work.bytes_moved) for op in made.operations if op.work]
    assert work == [(op.work.flops, op.work.bytes_moved) for op in real.operations if op.work]


def test_operations_that_differ_between_sizes_are_refused() -> None:
    with refused("operations differ between size 2 and size 3"):
        StepAtSizes.of(lambda n: StepAtSize(graph_at(n_layers=n)), (2, 3))


def picky(batch_size: int = 4):
    if batch_size > 9:
        raise ValueError("no more than 9")
    return llama(batch_size, **SMALL)


POSITIONS = {"vocabulary": 100, "width": 32, "n_layers": 1, "n_heads": 2, "context": 100, "length": 48, "batch_size": 2}


@pytest.mark.slow
def test_a_size_that_the_model_does_not_take_has_no_largest() -> None:
    told = rt.explain(gpt2, gpu="cpu", budget="8MB", time_limit_s=0.1, **POSITIONS)
    assert [*told.largest] == ["batch"]
    assert "the model changes with it" in told.refused["length"]  # more positions from length 100 on
    told = rt.explain(picky, gpu="cpu", budget="8MB", time_limit_s=0.1)
    assert not told.largest
    assert "no more than 9" in told.refused["batch"]


def test_what_is_held_adds_up_to_the_peak(explained: rt.Explanation) -> None:
    trace = simulate(explained.graph, explained.plain)
    i = trace.peak_computation
    held = held_values(explained.graph, explained.plain, i)
    workspace = explained.graph.operations[int(trace.order[i])].workspace_bytes
    n_bytes = sum(explained.graph.values[v].bytes for v in held)
    assert explained.graph.fixed_bytes + n_bytes + workspace == trace.peak_bytes
    assert {"blocks.0.feed", "head"} <= {explained.modules[v] for v in held}


def test_copies_to_the_host_never_cost_more_than_recomputing_alone(explained: rt.Explanation, tmp_path) -> None:
    told = explained
    copying = told.copying
    assert copying is not None
    assert copying.least_bytes < told.least_bytes
    for share, overhead in told.overheads.items():
        assert (copying.overheads[share] or 0) <= (overhead or float("inf"))
    for what, largest in told.largest.items():
        assert all((copying.largest[what][overhead] or 0) >= (size or 0) for overhead, size in largest.items())
    plan = copying.plan
    assert plan is not None
    assert plan.has_copies
    trace = simulate(told.graph, plan)
    assert held_by_module(told.graph, told.modules, plan, [OTHERS]).sum(0).tolist() == trace.running_bytes.tolist()
    told.save(tmp_path / "page.html")
    assert "to the host" in (tmp_path / "page.html").read_text()
    words = str(told)
    assert "with copies to the host, 20 GB/s" in words
    assert words.count("CUDA allocator    simulated: needs ") == (1 if told.plan is None else 2)  # for each plan
    assert words.count("    places            one block of 1.") == words.count("CUDA allocator")


def test_bytes_are_those_of_the_model_and_of_a_real_step(explained: rt.Explanation) -> None:
    model, args = llama(4, **SMALL)
    for x in args:
        x.random_(SMALL["vocabulary"])
    n = sum(p.numel() for p in model.parameters())
    assert explained.bytes_of["parameters"] == explained.bytes_of["gradients"] == 4 * n
    assert explained.bytes_of["optimizer state"] == 8 * n
    assert explained.bytes_of["buffers and inputs"] == 2 * 4 * 48 * 8 + 4  # and the gradient of the loss
    assert explained.changes["adamw in bfloat16"] == -4 * n
    fixed = explained.graph.fixed_bytes - explained.bytes_of["optimizer state"]
    measured = fixed + peak_of_step(model, args, {}, "cpu") + explained.bytes_of["optimizer state"]
    assert abs(measured - explained.plain_peak_bytes) <= 8


def test_overheads_rise_as_the_budget_falls(explained: rt.Explanation) -> None:
    found = [overhead for overhead in explained.overheads.values() if overhead is not None]
    assert len(found) >= 2
    assert found == sorted(found)
    for share, overhead in explained.overheads.items():
        assert (overhead is None) == (share * explained.plain_peak_bytes < explained.least_bytes)


def test_the_largest_batch_fits_and_the_next_does_not(explained: rt.Explanation) -> None:
    largest = explained.largest["batch"]
    room = explained.budget_bytes - explained.bytes_of["optimizer state"]
    assert plain_peak(graph_at(largest[0.0])) <= room < plain_peak(graph_at(largest[0.0] + 1))
    sizes = [n or 0 for n in largest.values()]
    assert sizes == sorted(sizes)
    assert sizes[0] < sizes[-1]
    with_a_plan = graph_at(sizes[-1])
    plan = solve(with_a_plan, room, "search", time_limit_s=1.0).plan
    assert plan is not None
    assert simulate(with_a_plan, plan).peak_bytes <= room < plain_peak(with_a_plan)


def test_the_snapshot_shows_each_plan(explained: rt.Explanation, tmp_path) -> None:
    """The visualizer adds up its events: they reach the peak, and what it finds at the end is still held."""
    budget_bytes = round(0.8 * explained.plain_peak_bytes)
    plan = solve(explained.graph, budget_bytes, "search", time_limit_s=0.2).plan
    assert plan is not None
    explained = replace(explained, plan=plan, budget_bytes=budget_bytes)
    file = tmp_path / "step.pickle"
    explained.save_snapshot(file)
    assert {operation.name for operation, _, _ in pickletools.genops(file.read_bytes())} <= {*READ.split()}
    snapshot = pickle.loads(file.read_bytes())
    for device, of in enumerate((explained.plain, plan)):
        held, peak = dict[int, int](), 0
        for event in snapshot["device_traces"][device]:
            if event["action"] == "alloc":
                assert event["addr"] not in held
                held[event["addr"]] = event["size"]
                peak = max(peak, sum(held.values()))
            elif event["action"] == "free_completed":
                assert held.pop(event["addr"]) == event["size"]
        assert peak == simulate(explained.graph, of).peak_bytes
        segment = snapshot["segments"][device]
        assert sum(block["size"] for block in segment["blocks"]) == segment["total_size"]
        ends = {block["address"]: block["size"] for block in segment["blocks"] if block["state"] == "active_allocated"}
        assert ends == held
    frames = {frame["filename"] for event in snapshot["device_traces"][0] for frame in event["frames"]}
    assert {"before the step", "blocks.0.feed", "head"} <= frames


@pytest.mark.slow
def test_the_answer_for_a_rank_is_near_the_plan_of_one() -> None:
    deep = {**SMALL, "n_layers": 4, "batch_size": 4}

    def factory():  # without sizes that could grow
        return llama(**deep)

    found = rt.explain(factory, gpu="cpu", budget="9MB", time_limit_s=0.1, shard=2)
    model, args = llama(**deep)
    planned = rt.rematerialize(
        model, args, 1.0, shard=2, optimizer="adamw", strategy="search", cost="roofline", time_limit_s=0.1
    ).plan
    assert abs(planned.plain_peak_bytes - found.plain_peak_bytes) <= 8
    kept = simulate(found.graph, found.plain).peak_bytes  # plans count what is gathered throughout
    assert planned.plain_peak_bytes <= kept <= 1.05 * planned.plain_peak_bytes
    assert "factory on cpu, one of 2 ranks, within 9.00 MB" in str(found)
    assert "gathered parameters" in str(found)
    whole = rt.explain(factory, gpu="cpu", budget="9MB", time_limit_s=0.1)
    assert whole.changes["a rank of shard=2"] == pytest.approx(found.plain_peak_bytes - whole.plain_peak_bytes, rel=0.3)
    assert "updates in backward" not in found.changes


def test_updates_in_the_backward_pass_change_the_peak_as_planned_ones() -> None:
    short = {**SMALL, "n_layers": 4, "batch_size": 1, "length": 8}
    model, args = llama(**short)
    step = step_with_loss(model, args, name="llama")
    real = plain_peak(with_updates_by_name(step, "adamw").graph) - plain_peak(step.graph)
    told = rt.explain(lambda: llama(**short), gpu="cpu", budget="9MB", time_limit_s=0.1).changes["updates in backward"]
    assert real <= told <= 0.9 * real < 0


def broken() -> None:
    raise OSError("no data here")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--budget", "1GB", "--budget", "2GB"], "--budget was given twice; give one"),
        (["--shard", "many"], "invalid int value: 'many'"),
    ],
)
def test_an_option_that_cannot_be_read_is_one_line(arguments: list[str], message: str, capsys) -> None:
    with pytest.raises(SystemExit) as end:
        main(["explain", TARGET, *arguments])
    told = capsys.readouterr().err
    assert end.value.code == 2
    assert message in told
    assert told.count("\n") == 1


@pytest.mark.parametrize("name", ["checkpointed", "dropout", "normed"])
def test_the_plain_peak_is_eager_modes(name: str, tmp_path) -> None:
    """Captured operations save other tensors than eager mode does."""
    model, args = EAGER[name]()
    told = rt.explain(EAGER[name], gpu="cpu", budget="1GB", optimizer=None, time_limit_s=0.1)
    measured = told.graph.fixed_bytes + peak_of_step(model, args, {}, "cpu")
    assert told.plain_peak_bytes == pytest.approx(measured, rel=0.005)
    assert told.fits
    assert told.plan is not None
    assert not told.largest  # the factory takes no sizes
    told.save(tmp_path / "page.html")  # fewer modules than colours
    assert (tmp_path / "page.html").read_text().count("<svg") == 1


def _layers(*last: nn.Module) -> nn.Module:
    each = [nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64), *last) for _ in range(4)]
    return nn.Sequential(*each)


def _checkpointed(self, x: Tensor) -> Tensor:
    for layer in self.layers:
        x = checkpoint(layer, x, use_reentrant=False)
    return x.square().mean()


def _mean(self, x: Tensor) -> Tensor:
    return self.layers(x).square().mean()


EAGER = {
    "checkpointed": lambda: (Applies(_checkpointed, layers=_layers()), (torch.ones(128, 64),)),
    "dropout": lambda: (Applies(_mean, layers=_layers(nn.Dropout(0.1))), (torch.ones(128, 64),)),
    "normed": lambda: (Applies(_mean, layers=_layers(nn.BatchNorm1d(64))), (torch.ones(128, 64),)),
}


def test_models_without_an_answer_are_one_line() -> None:
    for factory, options, message in (
        (broken, {}, "broken raised OSError: no data here"),
        (lambda: (nn.LSTM(4, 4), (torch.ones(3, 2, 4),)), {}, "has a recurrent layer"),
        (
            lambda: (nn.Linear(4, 4).requires_grad_(False), (torch.ones(3, 4),)), {},
            "nothing in the model needs a gradient",
        ),
        (nn.Linear(4, 4), {}, "give a function that makes the model"),
        (lambda: llama(2, **SMALL), {"batch_size": 8}, "takes no batch_size; leave it out"),
        (lambda batch_size: llama(batch_size, **SMALL), {}, r"takes batch_size; give it, e\.g\. batch_size=8"),
    ):  # fmt: skip
        with refused(message):
            rt.explain(factory, gpu="v100", **options)


def test_the_page_and_the_text(tmp_path, capsys) -> None:
    page, pickled = tmp_path / "page.html", tmp_path / "step.pickle"
    sizes = [f"{name}={SMALL[name]}" for name in ("vocabulary", "width", "hidden", "n_heads")]
    options = f"batch_size=2 n_layers=1 length=24 --budget 1GB --time-limit 0.1 --out {page} --snapshot {pickled}"
    assert main(["explain", TARGET, *sizes, *options.split()]) == 0
    told = capsys.readouterr().out
    assert all(word in told for word in ("plain peak", "fits", "largest batch", "largest length"))
    assert pickled.stat().st_size > 1000
    written = page.read_text()
    assert written.startswith("<!doctype html>")
    assert written.count("<svg") == 1
    assert "blocks.*.feed" in written


LLAMA_OF_8 = "width=8 hidden=8 n_layers=1 vocabulary=9 n_heads=2"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("", "name a GPU or a budget, e.g. --gpu h100 or --budget 24GB"),
        ("--gpu h1000", "unknown gpu 'h1000'; did you mean h100"),
        ("--gpu v100 --out /no/such/page.html", "page.html cannot be written: name a file in a folder"),
        ("--budget 0", "the budget is 0; give a size"),
        ("input_size=3 --gpu v100", "input_size must be whole numbers"),
        ("gpu=h100", "gpu is an option of remat explain; write it as --gpu"),
        ("--gpu v100 --link 12", "has no unit per second"),
        ("--gpu cpu --link auto", "gpu 'cpu' has no link to a host"),
        ("n_layer=2 --gpu v100", "unexpected keyword argument 'n_layer'"),
        ("--budget 3XB", "cannot read '3XB' as a size"),
        ("--gpu v100 --shard 0", "shard must be a number of ranks, 1 or more"),
        (f"{LLAMA_OF_8} --gpu v100 --shard 1000000", "shard=1000000 is more than the model's"),
        ("--gpu v100 --time-limit 0", "time limit must be a positive number"),
        ("width=8 --gpu v100 batch_size=0", "batch_size must be a positive integer, not 0"),  # arguments behind options
        ("--gpu v100 --batch 4 batch_size=8", "batch_size is given twice; give it once"),
        ("--gpu v100 width={[]:1}", "raised TypeError"),  # text that Python cannot evaluate stays text
        ("remat.torch.networks.llama:LAYERS --gpu v100", "LAYERS"),
        ("remat.torch.networks.resnet:resnet50 --gpu v100", "give input_size"),
    ],
)
def test_a_mistake_is_one_line(arguments: str, message: str, capsys) -> None:
    target = [] if arguments.startswith("remat.") else [TARGET]
    assert main(["explain", *target, *arguments.split()]) == 1
    told = capsys.readouterr().err
    assert message in told
    assert told.count("\n") == 1
