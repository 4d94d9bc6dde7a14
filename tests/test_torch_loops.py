"""Training loops as people write them: batches of other sizes, other modes, plans made ahead, loaded, printed."""

from __future__ import annotations

import gc
import json
import linecache
import logging
import warnings
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import blocks_of, refused, run_blocks
from torch import Tensor, nn
from torch_helpers import MARKS, Applies, assert_same_steps, both, rematerialize, squares

import remat
import remat.torch as rt
from remat import simulate
from remat.cost import load_gpu
from remat.cost import profile as profile_module
from remat.cost.records import write_record
from remat.graph import Graph, Operation, Value, Work
from remat.torch.measuring import carried
from remat.torch.measuring.measure import difference_of_steps, peak_of_step
from remat.torch.planning import capturing
from remat.torch.planning.capturing import captured_step
from remat.torch.planning.eager import Eager
from remat.torch.planning.planner import there_before

pytestmark = [*MARKS, pytest.mark.usefixtures("one_thread")]


class Net(nn.Module):
    def __init__(self, momentum: float | None = 0.1):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8, momentum=momentum), nn.ReLU(), nn.Dropout(0.1),
            nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Dropout(0.1),
            nn.Conv2d(8, 8, 3, padding=1), nn.Tanh(),
        )  # fmt: skip

    def forward(self, x: Tensor, *, shift: Tensor | None = None) -> Tensor:
        x = self.layers(x).mean((2, 3))
        return x if shift is None else x + shift


def images(n: int, device: str = "cpu") -> Tensor:
    return torch.randn(n, 3, 16, 16, device=device)


def announced(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == "remat"]


def test_a_fraction_is_of_the_sample_and_what_fits_runs_as_it_is() -> None:
    x = images(16)
    plain, ours = both(Net(), (x,), 0.7)
    assert ours.plan.recomputed
    for n in (7, 16, 12):
        assert_same_steps(plain, ours, x[:n])
    (small,) = ours.prepare((x[:7],))
    assert small.recomputed == {}
    assert small.budget_bytes == ours.budget_bytes == int(0.7 * ours.plan.plain_peak_bytes)
    assert ours.plan.fingerprint.inputs == "float32[16, 3, 16, 16]"
    with refused(r"no plan of 'Net'.*is of float32\[64, .*given for float32\[16, .*: rematerialize with the largest"):
        ours(images(64))


def test_other_shapes_count_what_is_resident_beside_the_step() -> None:
    ours = rematerialize(Net(), (images(16),), 0.8, optimizer="adam", accumulate=True)
    trained = sum(p.numel() * p.element_size() for p in ours.parameters())
    for plan in (ours.plan, *ours.prepare((images(7),))):
        assert plan.fixed["optimizer state"] == 2 * trained
        assert plan.fixed["gradients of earlier steps"] == trained
        assert plan.budget_bytes == ours.budget_bytes == int(0.8 * ours.plan.plain_peak_bytes)
        assert plan.peak_bytes <= ours.budget_bytes


def test_a_pause_is_announced_once_for_each_new_step(caplog: pytest.LogCaptureFixture) -> None:
    ours = rematerialize(Net(), (images(16),), 0.7)
    ours(images(16))
    assert announced(caplog) == []  # nothing was planned in the loop
    ours(images(5))
    assert announced(caplog) == []  # the plan of another shape is taken
    for mode, n in ((True, 5), (True, 5), (True, 6), (False, 6), (True, 5)):  # in another mode it is another step
        ours.train(mode)(images(n), shift=torch.ones(n, 8))
    first, second = announced(caplog)
    assert {record.levelno for record in caplog.records if record.name == "remat"} == {logging.WARNING}
    assert "pauses to plan 'Net' for float32[5, 3, 16, 16], float32[5, 8]" in first
    assert "up to 0.5 s of search, and" in first
    assert "; model.prepare(...) before the loop" in first
    assert "float32[6, 3, 16, 16], float32[6, 8] (planned before with another mode, other" in second
    assert "\n" not in first + second


def test_prepared_steps_are_not_planned_in_the_loop(caplog: pytest.LogCaptureFixture) -> None:
    plain, ours = both(Net(), (images(16),), 0.7)
    held, device = ours.plan, "meta"
    small, large = ours.prepare((images(5, device),), (images(14, device),))
    assert small.recomputed == {}
    assert large.recomputed
    assert large.peak_bytes <= ours.budget_bytes
    (shifted,) = ours.prepare((images(5, device),), sample_kwargs={"shift": torch.ones(8, device=device)})
    ours.eval()
    ours.prepare((images(5, device),))
    ours.train()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        ours.prepare((images(5, device),))
    x = images(16)
    for n in (5, 14):
        assert_same_steps(plain, ours, x[:n])
    ours(x[:5], shift=torch.ones(8)).sum().backward()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        ours(x[:5]).sum().backward()
    ours.eval()(x[:5]).sum().backward()
    assert announced(caplog) == []
    assert ours.plan is held
    ours.train()
    assert ours.prepare([(images(5),), (images(14),)]) == (small, large)
    assert shifted.fingerprint.inputs == "float32[5, 3, 16, 16], float32[8]"
    for wrong in ((images(5),), (), ([images(5)],), ([],)):
        with refused(r"prepare takes tuples .*prepare\(\(x,\), \(y,\)\)"):
            ours.prepare(*wrong)


def test_a_batch_norm_that_averages_over_all_steps_is_refused_by_name() -> None:
    x = images(4)
    says = r"^layers\.1 \(BatchNorm2d\) has momentum=None, .*set its momentum to a number"
    with refused(says):
        rematerialize(Net(momentum=None), (x,))
    with refused(r"^the model \(BatchNorm2d\) has momentum=None"):
        rematerialize(nn.BatchNorm2d(3, momentum=None), (x,))
    ours = rematerialize(Net(momentum=None).eval(), (x,), "1GB")  # nothing is averaged
    ours(x).sum().backward()
    with refused(says):
        ours.train()(x)


def test_a_loaded_plan_compares_what_is_counted_alike(tmp_path: Path) -> None:
    x, path = images(16), tmp_path / "plan.json"
    made, bare = (rematerialize(Net(), (x,), 0.7, optimizer=name) for name in ("adam", None))
    state = made.plan.fixed["optimizer state"]
    assert made.plan.plain_peak_bytes - bare.plan.plain_peak_bytes == state > 0
    made.plan.save(path)
    for plan in (path, made.plan):
        loaded = rt.rematerialize(Net(), (x,), plan=plan)
        assert loaded.predicted_peak_bytes == made.predicted_peak_bytes - state
        assert loaded.plan.plain_peak_bytes == bare.plan.plain_peak_bytes
    again = rt.rematerialize(Net(), (x,), plan=loaded.plan, optimizer="adam")
    assert again.plan.plain_peak_bytes == made.plan.plain_peak_bytes
    document = json.loads(path.read_text())
    del document["execution"]["fixed"]  # as earlier versions wrote it
    path.write_text(json.dumps(document))
    for optimizer, plain_bytes in ((None, None), ("adam", made.plan.plain_peak_bytes)):  # it held the optimizer
        assert rt.rematerialize(Net(), (x,), plan=path, optimizer=optimizer).plan.plain_peak_bytes == plain_bytes
    document["execution"]["fixed"] = {"optimizer state": -1}
    path.write_text(json.dumps(document))
    with pytest.raises(remat.InvalidPlan, match=r"'execution\.fixed' must be"):
        rt.rematerialize(Net(), (x,), plan=path)


@pytest.fixture
def without_a_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every operation takes 50 us, and once 40 us; none has a workspace."""

    def child(missing: dict[str, str], job: dict[str, Any], *_: Any) -> dict[str, str]:
        for key in missing:
            times = {"ns": 50_000, "best_ns": 40_000} if job["quantity"] == "time" else {"workspace_bytes": 0}
            write_record(Path(job["folder"], f"{key}{job['suffix']}"), times)
        return {}

    monkeypatch.setattr(profile_module, "_measure", child)


@pytest.mark.usefixtures("without_a_clock")
def test_noise_of_measured_costs_is_said_and_kept(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    ours = rematerialize(Net(), (images(4),), 1.0, cost="profile", cache_folder=tmp_path)
    n = sum(not op.work.is_free for op in ours.plan.graph.operations)
    assert f"(profile; {n} operations measured to 25%)" in str(ours.plan)
    ours.plan.save(path)
    assert rt.rematerialize(Net(), (images(4),), plan=path).plan.noise == ours.plan.noise
    document = json.loads(path.read_text())
    document["execution"]["noise"] = {"scatter": "much"}
    path.write_text(json.dumps(document))
    assert rt.rematerialize(Net(), (images(4),), plan=path).plan.noise is None


def warned(call: Callable[[], Any], says: str = "", kind: type[Warning] = Warning) -> list[tuple[str, str]]:
    """(file, line of text) of the warnings of a call."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        call()
    found = [one for one in caught if says in str(one.message) and issubclass(one.category, kind)]
    return [(one.filename, linecache.getline(one.filename, one.lineno).strip()) for one in found]


def test_warnings_are_at_the_users_line() -> None:
    ours = rematerialize(Net(), (images(4),))

    def twice() -> None:
        ours(images(4)).sum().backward()
        ours(images(4)).sum()  # gradients are held here

    assert warned(twice, "gradients are held") == [(__file__, "ours(images(4)).sum()  # gradients are held here")]
    big = rematerialize(nn.Sequential(nn.Linear(512, 512), nn.Tanh(), nn.Linear(512, 512)), (torch.randn(4, 512),))
    adam = torch.optim.Adam(big.parameters())

    def stepped() -> None:
        big(torch.randn(4, 512)).sum().backward()
        adam.step()  # more is held than was counted

    assert warned(stepped, "Adam holds") == [(__file__, "adam.step()  # more is held than was counted")]
    spectral = Applies(lambda self, x: torch.fft.rfft(self.a(x)).abs())  # has no FLOP rule
    args = (torch.randn(4, 16),)
    costs = warned(lambda: rt.rematerialize(spectral, args, "1GB", cost="flops"), kind=remat.cost.CostWarning)
    assert {file for file, _ in costs} == {__file__}


@pytest.mark.slow
def test_examples_of_the_guide(here: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The blocks of docs/how-to/pytorch.md one after the other, as a reader would copy them."""
    guide = Path(__file__).parents[1] / "docs" / "how-to" / "pytorch.md"
    images = torch.randn(8, 3, 32, 32)
    model = Net()
    names = {"torch": torch, "images": images, "model": model, "optimizer": torch.optim.Adam(model.parameters())}
    names["branching"] = Applies(  # reads a value between its parts
        lambda self, x: self.decoder(y if (y := self.encoder(x)).sum().item() < 1e9 else -y),
        encoder=Net(), decoder=nn.Linear(8, 8),
    )  # fmt: skip
    ours = run_blocks(guide, names)["model"]
    assert isinstance(ours, rt.Rematerialized)
    assert (here / "plan.json").exists()
    assert announced(caplog) == []
    assert len(blocks_of(guide)) == 8
    assert (here / "checkpoints.py").exists()


def test_bad_input_gets_one_line(tmp_path: Path) -> None:
    x, model = images(4), Net()
    (tmp_path / "file").touch()
    ours, y = rematerialize(model, (x,)), torch.randn(2, 64)
    wide = nn.Sequential(nn.Linear(64, 2048), nn.Linear(2048, 1))
    wide[0].requires_grad_(False)
    frozen = rematerialize(wide, (y,), "700kB")
    wide.requires_grad_(True)  # gradients of 524 kB more
    kept = "measurements cannot be kept in .*: give another cache_folder= or set REMAT_CACHE"
    for message, options in (
        ("sample_kwargs must hold the model's keyword", {"sample_kwargs": [1]}),
        ("optimizer must be a torch.optim.Optimizer", {"optimizer": torch.optim.Adam}),
        ("cache_folder must be the path", {"cache_folder": 5}), (kept, {"cache_folder": tmp_path / "file"}),
    ):  # fmt: skip
        with refused(message):
            rematerialize(model, (x,), 0.7, **options)
    with refused(r"keyword arguments by name, e\.g\."):
        ours.prepare((x,), sample_kwargs={1: x})
    with refused("budget was given for this step in another mode, or with"):
        frozen.prepare((y,))


@pytest.fixture
def captured(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """One entry for each capture."""
    found, original = list[int](), capturing.compile_graph
    monkeypatch.setattr(capturing, "compile_graph", lambda *args: found.append(1) or original(*args))
    return found


def test_another_budget_needs_no_second_capture_while_nothing_has_changed(captured: list[int]) -> None:
    model, x = Net(), images(8)

    def count(batch: torch.Tensor, budget: float = 0.9) -> int:
        captured.clear()
        planned = rematerialize(model, (batch,), budget)
        assert planned.plan.budget_bytes == int(budget * planned.plan.plain_peak_bytes)
        assert all(
            words in str(planned.plan) for words in ("planned in", "  places  ", "  CUDA allocator  simulated: ")
        )
        return len(captured)

    assert [count(x), count(x, 0.8), count(torch.randn(8, 3, 16, 16))] == [1, 0, 0]
    setattr(model.layers[3], "p", 0.2)  # noqa: B010
    assert [count(x), count(x)] == [1, 0]
    model.layers[1].eval()
    assert [count(x), count(x)] == [1, 0]
    model.layers[0].weight.requires_grad_(False)
    assert [count(x), count(x[:4]), count(x[:4].clone())] == [1, 1, 0]
    part, whole = (rematerialize(model, (batch,), "9MB").plan.graph for batch in (x[:4], x[:4].clone()))
    assert part.fixed_bytes - whole.fixed_bytes == x[4:].nbytes  # a part of a batch keeps all of it
    reference = weakref.ref(x)
    del x
    assert reference() is None


def test_one_capture_serves_the_first_steps_of_every_budget(captured: list[int]) -> None:
    model, x = Net(), images(16)
    modules = [rematerialize(model, (x,), budget) for budget in (0.9, 0.65)]
    for module in (*modules, *modules):  # by turns: each keeps to its own plan
        assert difference_of_steps(model, module, (x,), {}, "cpu") == 0
    peaks = [peak_of_step(module, (x,), {}, "cpu") for module in (model, *modules)]
    assert peaks == sorted(peaks, reverse=True)
    assert len(set(peaks)) == 3
    assert captured == [1]
    modules[1](images(8)).sum().backward()
    assert captured == [1, 1]  # another shape
    reference = weakref.ref(model)
    del model, modules, module
    gc.collect()
    assert reference() is None


# --- other lengths

WIDTH = 32


def transformer() -> nn.Module:
    return nn.Sequential(
        *(nn.TransformerEncoderLayer(WIDTH, 4, 64, 0.1, batch_first=True, norm_first=True) for _ in range(2))
    )


def sentences(length: int) -> torch.Tensor:
    return torch.randn(8, length, WIDTH)


def test_other_lengths_keep_the_budget_and_the_bits_without_a_pause(caplog) -> None:
    plain, planned = both(transformer(), (sentences(64),), 0.6, time_limit_s=2, strategy="portfolio")
    budget = planned.budget_bytes
    with caplog.at_level(logging.WARNING, logger="remat"):
        for length in (60, 10, 70):
            x = sentences(length)
            assert_same_steps(plain, planned, x)
            (plan,) = planned.prepare((x,))
            assert plan.added_s
            assert plan.strategy == ("from another shape" if plan.recomputed else "fits as it is")
            assert simulate(plan.graph, plan.plan).peak_bytes == plan.peak_bytes <= budget
            planned.zero_grad()
            loss_outside = 3 * 4 * x.numel()  # which the plan allows
            peak = rt.measured_peak(lambda x=x: squares(planned(x)).backward())
            assert there_before(plan) + peak <= max(budget, plan.peak_bytes) + loss_outside
            assert plan.recomputed or length < 60
    assert announced(caplog) == []


def graph_of(size: int, workspace_bytes: int, cost: int) -> Graph:
    work = Work(flops=10**6 * size, bytes_moved=10**6 * size, signature="{}")
    op = Operation("a", "aten.mm", (), (0,), cost, workspace_bytes, work=work)
    return Graph("g", (op,), (Value("v", size),), cost_unit="ns")


def test_costs_and_workspaces_are_scaled(monkeypatch, tmp_path) -> None:
    known, gpu = graph_of(4, 100, 1000), load_gpu("cpu")
    (half,), (twice,) = (carried.scaled_costs(known, graph_of(n, 0, 0), gpu) for n in (2, 8))
    assert 400 < half < 700  # a launch does not shrink
    assert 1500 < twice < 2100
    monkeypatch.setattr(carried, "profiler_is_on", lambda: True)  # nothing can be measured
    monkeypatch.setattr(
        carried, "profile_workspaces", lambda graph, *_: ([op.workspace_bytes for op in graph.operations], {})
    )
    assert carried.workspaces(known, graph_of(8, 0, 0), tmp_path, "cpu") == [200]
    assert carried.workspaces(known, graph_of(2, 0, 0), tmp_path, "cpu") == [100]  # never less


def test_workspaces_are_measured_here_and_leave_random_numbers_alone(tmp_path, monkeypatch) -> None:
    step = captured_step(transformer(), (sentences(8),), {}, Eager())
    in_child, _ = carried.profile_workspaces(step.graph, tmp_path / "child", "cpu")
    monkeypatch.setattr(carried, "MEASURE_S", 60)
    state = torch.get_rng_state()
    here = carried.workspaces(step.graph, step.graph, tmp_path / "here", "cpu")
    assert torch.equal(state, torch.get_rng_state())
    assert here == in_child
    assert any(here)
