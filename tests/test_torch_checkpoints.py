"""The best checkpoints in PyTorch's own languages: optimal, with exact promises, and the plain step's bits."""

from __future__ import annotations

import copy
import itertools
import runpy
from collections.abc import Iterator
from typing import Any

import pytest
from helpers import refused

pytest.importorskip("torch")

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode
from torch_helpers import MARKS, Applies, needs, rematerialize

import remat.torch as rt
from remat.torch.checkpointing import checkpointed
from remat.torch.checkpointing.checkpoints import _Search
from remat.torch.checkpointing.languages import Kept, language_named
from remat.torch.checkpointing.program import Program
from remat.torch.measuring.measure import difference_of_steps, peak_of_step
from remat.torch.planning.planner import there_before
from remat.torch.step.blocks import blocks_of

pytestmark = MARKS
WIDTH = 32
LANGUAGES = pytest.mark.parametrize("language", ["blocks", "selective"])


class Block(nn.Module):
    def __init__(self, inner: int, dropout: float):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(WIDTH, inner), nn.GELU(), nn.Dropout(dropout), nn.Linear(inner, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.net(x)


class Net(nn.Module):
    def __init__(self, widths: tuple[int, ...] = (48, 96, 160, 64, 128), dropout: float = 0.0):
        super().__init__()
        self.blocks = nn.Sequential(*(Block(width, dropout) for width in widths))

    def forward(self, x: Tensor) -> Tensor:
        return self.blocks(x).square().mean()


ARGS = (torch.linspace(-1, 1, 256 * WIDTH).view(256, WIDTH),)


def by_hand(model: nn.Module, names: tuple[str, ...]) -> nn.Module:
    """A copy of the model with checkpoints of these modules, as PyTorch's tutorial makes them."""
    model = copy.deepcopy(model)
    for name in names:
        block = model.get_submodule(name)
        block.forward = lambda x, run=block.forward: checkpoint(run, x, use_reentrant=False, preserve_rng_state=False)
    return model


def flops_of(model: nn.Module) -> int:
    with FlopCounterMode(display=False) as counter:
        model(*ARGS).backward()
    return counter.get_total_flops()


@pytest.fixture(scope="module")
def every_choice() -> dict[tuple[str, ...], tuple[int, float]]:
    """[blocks that are checkpoints] (measured peak, FLOPs over those of the plain step, minus 1)."""
    model = Net()
    names, plain = list(blocks_of(model)), flops_of(model)
    choices = itertools.chain.from_iterable(itertools.combinations(names, n) for n in range(len(names) + 1))
    made = {choice: by_hand(model, choice) for choice in choices}
    return {choice: (peak_of_step(x, ARGS, {}, "cpu"), flops_of(x) / plain - 1) for choice, x in made.items()}


@pytest.mark.parametrize(
    "share", [0.85, 0.65, *(pytest.param(share, marks=pytest.mark.slow) for share in (0.95, 0.75))]
)
def test_blocks_are_the_best_of_all_choices(every_choice, share) -> None:
    planned = rematerialize(Net(), ARGS, share)
    found = rt.checkpoints(planned, ARGS, language="blocks")
    before = there_before(planned.plan)
    best = min(more for peak, more in every_choice.values() if before + peak <= planned.budget_bytes)
    peak, more = every_choice[tuple(found.kept)]
    assert more == best
    assert found.overhead == pytest.approx(best, rel=0.02)  # activations cost FLOPs here, which PyTorch does not count
    assert found.peak_bytes == before + peak <= planned.budget_bytes


@pytest.mark.parametrize("share", [0.85, 0.65])
def test_selective_ones_are_between_blocks_and_the_free_plan(share) -> None:
    model = Net()
    planned = rematerialize(model, ARGS, share)
    blocks, found = (rt.checkpoints(planned, ARGS, language=language) for language in ("blocks", "selective"))
    assert found.free_overhead <= found.overhead < blocks.overhead
    applied = found.apply(copy.deepcopy(model))
    assert needs(planned, ARGS, applied) == found.peak_bytes
    assert found.peak_bytes <= planned.budget_bytes
    assert difference_of_steps(model, applied, ARGS, {}, "cpu") == 0


@LANGUAGES
def test_a_saved_file_makes_them_and_draws_the_same_numbers(language, tmp_path) -> None:
    model = Net(dropout=0.5)
    planned = rematerialize(model, ARGS, 0.7, cost="roofline")
    found = rt.checkpoints(planned, ARGS, language=language)
    found.save(tmp_path / "made.py")
    applied = runpy.run_path(str(tmp_path / "made.py"))["apply"](copy.deepcopy(model))
    assert difference_of_steps(model, applied, ARGS, {}, "cpu") == 0
    peak = needs(planned, ARGS, applied)
    states = len(found.kept) + 1
    assert (
        peak <= found.peak_bytes <= peak + states * torch.get_rng_state().nbytes
    )  # generators' states are not tensors
    assert "remat" not in {
        line.split()[1] for line in (tmp_path / "made.py").read_text().splitlines() if "import" in line
    }
    assert f"the free plan's overhead is {planned.overhead:.1%}" in str(found)


def test_a_copy_runs_its_own_weights_and_another_choice_replaces_the_first() -> None:
    planned = rematerialize(Net(), ARGS, 0.7)
    found = rt.checkpoints(planned, ARGS)
    applied = found.apply(found.apply(Net()))
    other = copy.deepcopy(applied)
    other(*ARGS).backward()
    assert all(p.grad is None for p in applied.parameters())
    assert all(p.grad is not None for p in other.parameters())
    assert needs(planned, ARGS, other) == found.peak_bytes


def test_attributes_of_the_model_named_checkpoint_stay() -> None:
    model = Net()
    block: Any = model.blocks[0]
    block.checkpoint = "weights.pt"
    planned = rematerialize(model, ARGS, 0.7)
    found = rt.checkpoints(planned, ARGS, language="blocks")
    assert found.kept
    assert (type(block), block.checkpoint) == (Block, "weights.pt")
    found.apply(model)
    checkpointed.undo(model)
    assert (type(block), block.checkpoint) == (Block, "weights.pt")


def steps_and_choices(
    model: nn.Module, language: str, args: tuple[Tensor, ...] = ARGS
) -> Iterator[tuple[Program, Kept, int, int]]:
    """(program, choice, its peak, its cost above the plain step's), followed, for up to one thing a block."""
    search = _Search(rematerialize(model, args, 1.0), args, {}, None, language_named(language))
    program = Program(search.steps, search.language)
    own = {name: [key for place, key in program.columns if place == name and key is not None] for name in program.names}
    subsets = {
        name: [None, *itertools.chain.from_iterable(itertools.combinations(keys, n) for n in range(2))]
        for name, keys in own.items()
    }
    for choice in itertools.product(*subsets.values()):
        kept = {name: (keys, False) for name, keys in zip(subsets, choice, strict=True) if keys is not None}
        peak, cost = search._judged(kept, program)
        yield program, kept, peak, cost - search.steps.cost(search.steps.plain.signatures)


class Ends(nn.Module):
    """A block whose result nobody saves but itself, because the next one begins with an addition or a factor."""

    def __init__(self, inner: int, begins: str):
        super().__init__()
        self.begins, self.up, self.down = begins, nn.Linear(WIDTH, inner), nn.Linear(inner, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        h = x + 1.0 if self.begins == "sum" else 2.0 * x
        return torch.softmax(self.down(torch.relu(self.up(h))), -1)


@pytest.mark.parametrize("language", ["blocks", "fsdp2"])
@pytest.mark.parametrize("kind", ["plain", "ends", "frozen"])
def test_the_program_asks_for_no_more_than_any_choice_needs(kind: str, language: str) -> None:
    model: Any = nn.Sequential(nn.Sequential(*(Ends(n, begins) for n, begins in ((64, "sum"), (48, "factor")))))
    if kind != "ends":
        model = Net((48, 96))
        for parameter in model.blocks[0].parameters():
            parameter.requires_grad_(kind != "frozen")
    for program, kept, peak, more in steps_and_choices(model, language):
        chosen = program._chosen(kept)
        assert max(float(row @ chosen) + rest for row, rest in program.limits) <= peak, kept
        assert program.cost @ chosen == more, kept


class Shares(nn.Module):
    """A block whose first result changes in place, and whose last layer is another block's, too."""

    def __init__(self, down: nn.Linear):
        super().__init__()
        self.norm, self.up, self.act, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 64), nn.ReLU(inplace=True), down

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.act(self.up(self.norm(x))))


def test_regions_are_modules_of_one_block_whose_results_do_not_change() -> None:
    pytest.importorskip("torch_remat")
    down = nn.Linear(64, WIDTH)
    blocks = nn.Sequential(Shares(down), Shares(down))
    model = Applies(lambda self, x: self.blocks(x).square().mean(), 1, blocks=blocks)
    offered = set[tuple[str, str]]()
    for program, kept, peak, more in steps_and_choices(model, "torch_remat"):
        offered |= {(place, key) for place, key in program.columns if key is not None}
        chosen = program._chosen(kept)
        assert max(float(row @ chosen) + rest for row, rest in program.limits) <= peak, kept
        assert program.cost @ chosen == more, kept
    assert offered == {("blocks.0", "norm"), ("blocks.1", "norm")}


@pytest.mark.parametrize("language", ["blocks", "fsdp2", "torch_remat"])
def test_a_block_in_two_places_is_a_checkpoint_in_both(language: str) -> None:
    if language == "torch_remat":
        pytest.importorskip("torch_remat")
    block = Block(96, 0.0)
    model = Applies(lambda self, x: self.row(x).square().mean(), 1, row=nn.Sequential(block, block, Block(64, 0.0)))
    planned = rematerialize(model, ARGS, 0.75)
    found = rt.checkpoints(planned, ARGS, language=language)
    applied = found.apply(copy.deepcopy(model))
    assert applied.get_submodule("row.0") is applied.get_submodule("row.1")
    assert found.kept
    assert needs(planned, ARGS, applied) <= found.peak_bytes
    assert 0 <= found.gap < 0.01
    with refused("the model has the block 'row.0' in several places; language='torchtitan'"):
        rt.checkpoints(planned, ARGS, language="torchtitan")


def test_a_model_that_fits_needs_none() -> None:
    found = rt.checkpoints(rematerialize(Net(), ARGS, 1.0), ARGS)
    assert not found.kept
    assert found.overhead == 0
    assert "0 modules" in str(found)


@pytest.mark.slow
def test_a_module_that_runs_twice() -> None:
    model = Applies(
        lambda self, x: self.other(self.block(self.block(x))).square().mean(), 1, block=Block(96, 0.0),
        other=Block(64, 0.0),
    )  # fmt: skip
    planned = rematerialize(model, ARGS, 0.75)
    found = rt.checkpoints(planned, ARGS, blocks=["block", "other"])
    applied = found.apply(copy.deepcopy(model))
    assert found.kept
    assert needs(planned, ARGS, applied) <= found.peak_bytes
    assert difference_of_steps(model, applied, ARGS, {}, "cpu") == 0


@LANGUAGES
def test_statistics_of_batch_norms_move_once(language) -> None:
    layers = (nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU()) for _ in range(4))
    model, args = nn.Sequential(*layers), (torch.randn(4, 4, 16, 16),)
    planned = rematerialize(model, args, 0.9)
    found = rt.checkpoints(planned, args, language=language)
    assert found.kept
    applied = found.apply(copy.deepcopy(model))
    assert difference_of_steps(model, applied, args, {}, "cpu") == 0  # of buffers too
    assert int(applied[0][1].num_batches_tracked) == 0  # and the step was undone


@LANGUAGES
def test_autocast(language) -> None:
    model = Net()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        planned = rematerialize(model, ARGS, 0.75, cost="roofline")
        found = rt.checkpoints(planned, ARGS, language=language)
        applied = found.apply(copy.deepcopy(model))
        assert difference_of_steps(model, applied, ARGS, {}, "cpu") == 0
        assert needs(planned, ARGS, applied) <= found.peak_bytes


def test_a_block_that_changes_its_input_is_left_out() -> None:
    changing = nn.Sequential(nn.ReLU(inplace=True), nn.Linear(WIDTH, WIDTH))
    blocks = nn.Sequential(changing, *Net().blocks)
    model = Applies(lambda self, x: self.blocks(self.a(x)).square().mean(), WIDTH, blocks=blocks)
    planned = rematerialize(model, ARGS, 0.8)
    assert "blocks.0" not in rt.checkpoints(planned, ARGS, language="blocks").kept
    with refused(r"the block 'blocks.0' changes its input in place"):
        rt.checkpoints(planned, ARGS, blocks=["blocks.0", "blocks.1"])


@pytest.mark.parametrize(
    ("share", "options", "message"),
    [
        (0.7, {"language": "policy"}, "unknown language 'policy'"),
        (0.7, {"blocks": ["layers.7"]}, "unknown block 'layers.7'"),
        (0.7, {"blocks": []}, "no block was found"),
        (0.7, {"blocks": "blocks.0"}, "blocks must be a list of names of modules, not 'blocks.0'"),
        (0.7, {"blocks": ["blocks.0", "blocks.0.net"]}, "the block 'blocks.0.net' is inside of another"),
        (
            0.55,
            {"language": "blocks"},
            r"no checkpoints of 5 blocks fit .*: the step needs .* with them; give a larger",
        ),
    ],
)
def test_refusals_are_one_line(share, options, message) -> None:
    planned = rematerialize(Net(), ARGS, share)
    with refused(message):
        rt.checkpoints(planned, ARGS, **options)


def test_what_is_not_a_rematerialized_module_is_refused() -> None:
    with refused("takes the module that rematerialize returns"):
        rt.checkpoints(Net(), ARGS)  # pyright: ignore[reportArgumentType]


@pytest.mark.slow
def test_recurrent_layers_are_refused() -> None:
    def forward(self, x: Tensor) -> Tensor:
        return self.blocks(self.rows(x.view(16, 16, WIDTH))[0]).square().mean()

    blocks = nn.Sequential(Block(64, 0.0), Block(64, 0.0))
    planned = rematerialize(Applies(forward, rows=nn.LSTM(WIDTH, WIDTH), blocks=blocks), ARGS, 1.0)
    with refused("recurrent layer"):
        rt.checkpoints(planned, ARGS)
