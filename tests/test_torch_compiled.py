"""Plans that Inductor compiles: predicted and measured memory, results, files, and what is refused."""

from __future__ import annotations

import copy
import itertools
import json
import re
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from helpers import refused, step_of

pytest.importorskip("torch")

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._inductor.graph import GraphLowering
from torch_helpers import MARKS, needs, threads

import remat.torch as rt
from remat.errors import InvalidPlan
from remat.graph import Graph
from remat.plan import Plan
from remat.search.greedy import greedy_eviction
from remat.simulator import plain_peak, simulate
from remat.torch.inductor.compiled import LoweredStep, Weighed, _within
from remat.torch.measuring.measure import difference_of_steps, peak_of_step
from remat.torch.planning.capturing import captured_step, default_gpu
from remat.torch.planning.inductor import Inductor

pytestmark = [
    *MARKS,
    pytest.mark.skipif(shutil.which("g++") is None, reason="Inductor needs a C++ compiler"),
]
WIDTH, LENGTH, BATCH = 64, 64, 4
NEAR = 1e-5  # of a gradient's largest number: what another order of additions may change


class Block(nn.Module):
    def __init__(self, dropout: float):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.heads, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.wide, self.narrow = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.drop = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            part.view(*x.shape[:2], 4, -1).transpose(1, 2) for part in self.heads(self.norm1(x)).chunk(3, dim=-1)
        )
        x = x + self.drop(self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(x.shape)))
        return x + self.drop(self.narrow(F.gelu(self.wide(self.norm2(x)))))


class Words(nn.Module):
    def __init__(self, dropout: float = 0.1):
        super().__init__()
        self.embed, self.head = nn.Embedding(100, WIDTH), nn.Linear(WIDTH, 100)
        self.block = Block(dropout)

    def forward(self, words: Tensor) -> Tensor:
        return F.cross_entropy(self.head(self.block(self.embed(words))).flatten(0, 1), words.flatten())


class Image(nn.Module):
    """Convolutions with batch norm, which changes buffers; it returns its loss."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        widths = (3, width, width, width)
        self.layers = nn.Sequential(*(
            nn.Sequential(nn.Conv2d(a, b, 3, padding=1), nn.BatchNorm2d(b), nn.ReLU())
            for a, b in itertools.pairwise(widths)
        ))  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x).square().mean()


def words() -> Tensor:
    return torch.randint(0, 100, (BATCH, LENGTH))


def compiled(model: nn.Module, args: tuple[Tensor, ...], budget: float | int | str, **options) -> rt.Rematerialized:
    quick = {"cost": "roofline", "strategy": "search", "time_limit_s": 0.7, "backend": "inductor"}
    return rt.rematerialize(model, args, budget, **{**quick, **options})


def check_promise(planned: rt.Rematerialized, args: tuple[Tensor, ...]) -> int:
    peak = needs(planned, args)
    assert peak == planned.predicted_peak_bytes
    assert peak <= planned.budget_bytes
    return peak


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the plans of `words_at` are kept."""
    return tmp_path_factory.mktemp("plans")


@pytest.fixture(scope="module")
def words_at(folder: Path) -> Iterator[dict[float, rt.Rematerialized]]:
    """The language model under several budgets, the largest first; one thread, for which workspaces are planned."""
    torch.manual_seed(0)
    model, generated, generate = Words(), list[str](), GraphLowering.codegen
    with threads(1):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(GraphLowering, "codegen", lambda self: generated.append(self.name) or generate(self))
            found = {share: compiled(model, (words(),), share, cache_folder=folder) for share in (1.0, 0.75)}
        assert generated
        yield found


def test_the_code_keeps_the_budget_to_the_byte_and_draws_the_same_numbers_again(words_at) -> None:
    whole, less = words_at.values()
    peaks = [check_promise(planned, (words(),)) for planned in (whole, less)]
    assert peaks == sorted(peaks, reverse=True)
    assert not whole.plan.groups
    assert less.plan.recomputed
    assert difference_of_steps(whole, less, (words(),), {}, "cpu") < NEAR  # of repeated dropout, too
    plain = torch.compile(whole.model)
    assert peak_of_step(plain, (words(),), {}, "cpu") == peak_of_step(whole, (words(),), {}, "cpu")
    assert whole.overhead == 0
    assert whole.plan.plain_peak_bytes == whole.predicted_peak_bytes


def test_nothing_is_searched_or_generated_twice(words_at, folder, monkeypatch) -> None:
    """A step finds its code in Inductor's cache; a later process finds the plan, for a smaller budget that it fits."""
    generated = list[str]()
    monkeypatch.setattr(GraphLowering, "codegen", lambda self: generated.append(self.name))
    monkeypatch.setattr("remat.torch.planning.inductor.solve", None)
    for kept in (folder / "plans").iterdir():
        (kept / "1.json").write_text("cut o")  # what an interrupted process may leave is not read
    model, args = Words(), (words(),)
    for share, planned in words_at.items():
        again = compiled(copy.deepcopy(model), args, planned.predicted_peak_bytes, cache_folder=folder)
        for each in (planned, again):
            each(*args).backward()
        assert again.plan.order.tolist() == planned.plan.order.tolist()
        assert again.budget_bytes == again.predicted_peak_bytes == planned.predicted_peak_bytes
        assert bool(again.plan.groups) == (share < 1)
    assert not generated


@pytest.mark.slow
def test_batch_norm_moves_its_statistics_once() -> None:
    args = (torch.randn(8, 3, 24, 24),)
    model = Image()
    plain, planned = compiled(model, args, 1.0), compiled(model, args, 0.8)
    assert planned.plan.recomputed
    check_promise(planned, args)
    assert difference_of_steps(plain, planned, args, {}, "cpu") < NEAR


def test_copies_of_weights_are_counted(tmp_path) -> None:
    """Inductor keeps weights of convolutions in another layout throughout, where they are most of the memory."""
    args = (torch.randn(2, 3, 8, 8),)
    step = captured_step(Image(64), args, {}, Inductor())
    made = LoweredStep(step, tmp_path, "cpu")
    weighed = made.weighed("roofline", default_gpu("cpu"))
    order = [*range(len(weighed.graph))]
    held = simulate(weighed.graph, Plan.from_order(weighed.graph, order, None)).peak_bytes - weighed.shift
    assert made.candidate(order).peak_bytes == held - weighed.graph.fixed_bytes
    copies = weighed.graph.operations[0]
    assert copies.run_once
    assert sum(weighed.graph.values[v].bytes for v in copies.outputs) == 4 * (9 * 64 * (3 + 64 + 64) + args[0].numel())


def test_a_saved_plan_keeps_its_groups(words_at, tmp_path) -> None:
    path, made = tmp_path / "plan.json", words_at[0.75]
    made.plan.save(path)
    model = Words()
    again = compiled(model, (words(),), None, plan=path)
    assert again.plan.groups == made.plan.groups
    assert again.predicted_peak_bytes == made.predicted_peak_bytes
    check_promise(again, (words(),))
    document = json.loads(path.read_text())
    document["execution"]["generated"]["groups"] = [1]
    path.write_text(json.dumps(document))
    with pytest.raises(InvalidPlan, match=r"'execution.generated' must hold counts"):
        compiled(model, (words(),), None, plan=path)


@pytest.mark.slow
def test_measured_costs_choose_the_fastest_code() -> None:
    planned = compiled(Words(0.0), (words(),), 0.7, cost="profile")
    check_promise(planned, (words(),))
    assert planned.plan.generated.cost > 0
    assert planned.plan.generated.plain_cost > 0


@pytest.mark.slow
def test_new_shapes_are_planned_in_a_loop(words_at) -> None:
    shorter = words()[:, : LENGTH // 2]
    words_at[0.75](shorter).backward()
    assert words_at[0.75].prepare((shorter,))[0].fingerprint.inputs == f"int64[{BATCH}, {LENGTH // 2}]"


@pytest.mark.slow
def test_a_budget_that_is_too_small_names_one_that_suffices() -> None:
    with refused(r"compiled by Inductor was found within 400.00 kB.*known to suffice") as error:
        compiled(Words(), (words(),), "400kB")
    (least,) = re.findall(r"suffice is ([\d.]+ MB)", str(error.value))
    check_promise(compiled(Words(), (words(),), least), (words(),))


def test_cuda_graphs_are_refused() -> None:
    with refused(r"'reduce-overhead' is not supported, only 'default'.*CUDA graphs"):
        compiled(Words(), (words(),), 1.0, mode="reduce-overhead")
    with torch._inductor.config.patch({"triton.cudagraphs": True}), refused("CUDA graphs"):
        compiled(Words(), (words(),), 1.0)


def test_code_that_needs_a_little_more_each_time_is_given_room() -> None:
    """Tries ended a few kilobytes above the budget, and the plan of the smallest budget was taken: 45 % overhead."""
    small = step_of(12)
    graph = small.resized(values=[replace(value, bytes=1000 * value.bytes) for value in small.values])
    budget_bytes, limits = round(0.7 * plain_peak(graph)), list[int]()

    def find(graph: Graph, limit: int, _: list[Plan]) -> SimpleNamespace:
        limits.append(limit)
        return SimpleNamespace(plan=greedy_eviction(graph, limit), strategy="greedy")

    def candidate(order: list[int]) -> SimpleNamespace:
        return SimpleNamespace(peak_bytes=limits[-1] + 1000 + 60 * len(limits), groups=[])

    compiled = SimpleNamespace(step=SimpleNamespace(graph=graph), candidate=candidate)
    found = _within(compiled, Weighed(graph, graph, 0, None), budget_bytes, [], find, None)
    assert found is not None
    assert found.generated.peak_bytes <= budget_bytes
    assert 0.97 * budget_bytes < limits[-1] < budget_bytes
