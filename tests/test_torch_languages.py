"""Plans in the languages of other executors: the best of all choices, with exact promises and the plain step's bits."""

from __future__ import annotations

import copy
import functools
import itertools
import runpy
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from helpers import refused

pytest.importorskip("torch")

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts
from torch.utils.flop_counter import FlopCounterMode
from torch_helpers import MARKS, needs, rematerialize

import remat.torch as rt
from remat.torch.checkpointing import for_fsdp2, for_torch_remat, for_torchtitan, for_transformers
from remat.torch.measuring.measure import difference_of_steps, peak_of_step
from remat.torch.planning.planner import there_before

pytestmark = MARKS
WIDTH, TOKENS = 32, 99
MODULES = {"fsdp2": for_fsdp2, "torchtitan": for_torchtitan, "torch_remat": for_torch_remat,
           "transformers": for_transformers}  # fmt: skip


class Block(nn.Module):
    def __init__(self, inner: int):
        super().__init__()
        self.up, self.act, self.down = nn.Linear(WIDTH, inner, bias=False), nn.GELU(), nn.Linear(inner, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.act(self.up(x).view(16, 16, -1)).flatten(0, 1))


class Net(nn.Module):
    def __init__(self, widths: Sequence[int] = (160, 96)):
        super().__init__()
        self.layers = nn.Sequential(*map(Block, widths))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x).square().mean()


ARGS = (torch.linspace(-1, 1, 256 * WIDTH).view(256, WIDTH),)
NAMES = ("layers.0", "layers.1")
SUBSETS = {
    "fsdp2": ("aten.mm.default", "aten.gelu.default", "aten.addmm.default"),
    "torchtitan": ("aten.mm.default", "aten.gelu.default", "aten.addmm.default"),
    "torch_remat": ("up", "act", "down"),
}


def needs_package(language: str) -> None:
    if language in ("torch_remat", "transformers"):
        pytest.importorskip(language)


def every_choice(language: str) -> Iterator[dict[str, tuple[tuple[str, ...], bool]]]:
    """All choices of a language: for each layer, that it is no checkpoint, or what it keeps."""
    whole = SUBSETS[language]
    subsets = [None, *itertools.chain.from_iterable(itertools.combinations(whole, n) for n in range(len(whole) + 1))]
    is_alike = language == "torchtitan"
    for choice in ((own,) * 2 for own in subsets) if is_alike else itertools.product(subsets, repeat=2):
        yield {name: (kept, False) for name, kept in zip(NAMES, choice, strict=True) if kept is not None}


@functools.cache
def measured(language: str) -> list[tuple[int, float]]:
    """(measured peak, counted FLOPs over the plain step's, minus 1) of every choice, made by the executor."""
    found = []
    for kept in every_choice(language):
        model = MODULES[language].apply(Net(), kept)
        with FlopCounterMode(display=False) as counter:
            model(*ARGS).backward()
        found.append((peak_of_step(model, ARGS, {}, "cpu"), float(counter.get_total_flops())))
    plain = found[0][1]
    return [(peak, flops / plain - 1) for peak, flops in found]


@pytest.mark.parametrize("share", [0.9, 0.8])
@pytest.mark.parametrize("language", [*SUBSETS])
def test_no_other_choice_is_better_and_the_bound_is_below_all(language: str, share: float) -> None:
    """The bound against every choice, executed; FLOPs of activations are counted by the plan, and not by PyTorch."""
    needs_package(language)
    model = Net()
    planned = rematerialize(model, ARGS, share)
    before, budget = there_before(planned.plan), planned.budget_bytes or 0
    fitting = [more for peak, more in measured(language) if before + peak <= budget]
    if not fitting:
        with refused("no checkpoints of 2 blocks fit"):
            rt.checkpoints(planned, ARGS, language=language)
        return
    found = rt.checkpoints(planned, ARGS, language=language)
    assert found.overhead == pytest.approx(min(fitting), abs=0.02)
    assert found.least_overhead <= min(fitting) + 0.02
    assert 0 <= found.gap < 0.01
    applied = found.apply(copy.deepcopy(model))
    assert needs(planned, ARGS, applied) == found.peak_bytes <= found.budget_bytes
    assert difference_of_steps(model, applied, ARGS, {}, "cpu") == 0


def _transformer(kind: str, n_layers: int = 3) -> tuple[nn.Module, dict[str, Tensor]]:
    """A small model of transformers, with dropout where it has one."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    ids = torch.randint(0, TOKENS, (4, 64))
    text = {"input_ids": ids, "labels": ids}
    common = {"hidden_size": 64, "num_hidden_layers": n_layers, "num_attention_heads": 4, "intermediate_size": 192}
    causal = {"vocab_size": TOKENS, "use_cache": False, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    if kind == "gpt2":
        config = transformers.GPT2Config(n_positions=64, n_embd=64, n_layer=n_layers, n_head=4, **causal)
        return transformers.GPT2LMHeadModel(config).train(), text
    if kind == "llama":
        return transformers.LlamaForCausalLM(transformers.LlamaConfig(**common, **causal)).train(), text
    config = transformers.ViTConfig(**common, image_size=32, patch_size=4)
    return transformers.ViTForImageClassification(config).train(), {
        "pixel_values": torch.randn(4, 3, 32, 32), "labels": torch.randint(0, 2, (4,)),
    }  # fmt: skip


@functools.cache
def planned_transformer(kind: str) -> tuple[nn.Module, dict[str, Tensor], rt.Rematerialized]:
    model, inputs = _transformer(kind)
    return model, inputs, rematerialize(model, (), 0.75, sample_kwargs=inputs)


@pytest.mark.parametrize("language", [*MODULES])
@pytest.mark.parametrize("kind", ["gpt2", "llama", "vit"])
def test_plans_of_transformers_fit_with_the_plain_bits(language: str, kind: str, tmp_path: Path) -> None:
    needs_package(language)
    model, inputs, planned = planned_transformer(kind)
    found = rt.checkpoints(planned, (), sample_kwargs=inputs, language=language)
    assert found.kept
    assert found.gap < 0.01
    applied = copy.deepcopy(model)
    if language == "torchtitan":
        found.apply(applied)
    else:
        found.save(tmp_path / "made.py")
        runpy.run_path(str(tmp_path / "made.py"))["apply"](applied)
    measured = there_before(planned.plan) + peak_of_step(applied, (), inputs, "cpu")
    assert 0.99 * found.peak_bytes <= measured <= found.peak_bytes <= found.budget_bytes  # states are no tensors
    assert difference_of_steps(model, applied, (), inputs, "cpu") == 0


class StandIn:
    """What torchtitan documents of its ``SelectiveAC``: saves these operators, and of products every second one."""

    @dataclass(kw_only=True, slots=True)
    class Config:
        preserve_rng_state: bool = True

    def __init__(self, config: Config):
        self.config = config

    def get_save_ops(self) -> set[Any]:
        raise NotImplementedError

    def apply(self, model: nn.Module) -> None:
        from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

        layers = model.get_submodule("layers")
        for name, layer in layers.named_children():
            layers.register_module(
                name,
                checkpoint_wrapper(
                    layer, context_fn=self.contexts, early_stop=False, preserve_rng_state=self.config.preserve_rng_state
                ),
            )

    def contexts(self) -> Any:
        return create_selective_checkpoint_contexts(self.policy())

    def policy(self) -> Callable[..., CheckpointPolicy]:
        saved, products = self.get_save_ops(), {True: 0, False: 0}

        def choose(context: Any, operator: Any, *_: Any, **__: Any) -> CheckpointPolicy:
            if operator is torch.ops.aten.mm.default:
                products[context.is_recompute] += 1
                if products[context.is_recompute] % 2 == 0:
                    return CheckpointPolicy.PREFER_RECOMPUTE
            return CheckpointPolicy.MUST_SAVE if operator in saved else CheckpointPolicy.PREFER_RECOMPUTE

        return choose


def test_the_file_for_torchtitan_does_what_was_promised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = Net((96,) * 4)
    planned = rematerialize(model, ARGS, 0.8)
    found = rt.checkpoints(planned, ARGS, language="torchtitan")
    found.save(tmp_path / "made.py")
    module = types.ModuleType("torchtitan.distributed.activation_checkpoint")
    module.__dict__.update(SelectiveAC=StandIn, FullAC=StandIn)
    for name in ("torchtitan", "torchtitan.distributed"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    made = runpy.run_path(str(tmp_path / "made.py"))
    applied = copy.deepcopy(model)
    made["PlannedAC"](made["ACTIVATION_CHECKPOINT"]).apply(applied)
    assert needs(planned, ARGS, applied) == found.peak_bytes
    assert difference_of_steps(model, applied, ARGS, {}, "cpu") == 0


def test_a_copy_with_regions_runs_its_own_weights() -> None:
    needs_package("torch_remat")
    applied = for_torch_remat.apply(Net(), {"layers.1": (("up",), False)})
    other = copy.deepcopy(applied)
    other(*ARGS).backward()
    assert all(p.grad is None for p in applied.parameters())
    assert all(p.grad is not None for p in other.parameters())


def test_wrong_languages_are_refused_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    planned = rematerialize(Net(), ARGS, 0.8)
    with refused("language='transformers' is for models of transformers"):
        rt.checkpoints(planned, ARGS, language="transformers")
    with refused("the block 'layers.0' is no layer that transformers can make a checkpoint of"):
        rt.checkpoints(planned, ARGS, language="transformers", blocks=["layers.0"])
    with refused("unknown language 'axolot'"):
        rt.checkpoints(planned, ARGS, language="axolot")
    monkeypatch.setattr("remat.torch.checkpointing.languages.find_spec", lambda _: None)
    with refused("language='torch_remat' needs the package torch_remat: pip install torch_remat"):
        rt.checkpoints(planned, ARGS, language="torch_remat")


def test_a_batch_norm_in_a_block_is_refused() -> None:
    layers = (nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU()) for _ in range(3))
    model, args = nn.Sequential(*layers), (torch.randn(2, 4, 16, 16),)
    planned = rematerialize(model, args, 0.9)
    with refused("the block '0' has a batch norm, whose statistics language='fsdp2' would move twice"):
        rt.checkpoints(planned, args, language="fsdp2")
