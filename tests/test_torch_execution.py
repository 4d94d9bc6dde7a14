"""Plans executed in PyTorch against PyTorch's own step: what it computes bit for bit, what it holds in bytes."""

from __future__ import annotations

import copy
import gc
import json
import operator
import subprocess
import sys
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers import refused, run_python
from orders import random_order
from torch import Tensor, fx, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint
from torch_helpers import (
    IMAGES,
    MARKS,
    Applies,
    Net,
    assert_same,
    assert_same_steps,
    autocast,
    check,
    images,
    needs,
    rematerialize,
    reordered,
    rows,
    said,
    squares,
    step,
)

import remat
import remat.torch as rt
from remat.execution import PlanOptions
from remat.torch.internals.aot import FUNCTIONS, boxed
from remat.torch.networks.diffusion_unet import diffusion_unet
from remat.torch.networks.t5 import t5
from remat.torch.networks.transformer import gpt2
from remat.torch.planning.capturing import captured_step
from remat.torch.planning.eager import Eager
from remat.torch.planning.planner import Planner, there_before
from remat.torch.step.emit import emit

pytestmark = MARKS
aten = torch.ops.aten


@pytest.mark.short
def test_a_network_with_batch_norm_dropout_and_in_place_operations() -> None:
    ours = check(Net(), (torch.randn(IMAGES),), 0.55)
    kinds = {op.name: op.kind for op in ours.plan.graph.operations}
    again = {kinds[name] for name in ours.plan.recomputed}
    assert ours.predicted_peak_bytes <= ours.budget_bytes < ours.plan.plain_peak_bytes
    assert ours.overhead > 0
    assert "aten._native_batch_norm_legit_functional" in again  # statistics would move twice


# --- networks and situations that train as they do without a plan


def tiny_gpt2() -> tuple[nn.Module, tuple[Tensor, ...]]:
    model, _ = gpt2(2, length=16, vocabulary=50, context=16, width=32, n_layers=2, n_heads=2, dropout=0.1)
    return model, tuple(torch.randint(0, 50, (2, 2, 16)))


def recurrent(**options: Any) -> nn.Module:
    def function(self: Any, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.layer(torch.tanh(self.a(x)))[0]))

    layer = nn.LSTM(8, 16, num_layers=2, batch_first=True, **options)
    return Applies(function, 8, layer=layer, head=nn.Linear(16, 4))


@pytest.mark.parametrize("kind", ["net", "gpt2", "recurrent"])
def test_random_valid_plans_are_bit_identical(kind: str) -> None:
    model, args = {
        "net": lambda: (Net(), images()), "gpt2": tiny_gpt2,
        "recurrent": lambda: (recurrent(dropout=0.5), rows(4, 7, 8)),
    }[kind]()  # fmt: skip
    plain = copy.deepcopy(model)
    made = rematerialize(model, args, 1.0).plan
    for seed in range(2):
        order = random_order(made.graph, np.random.default_rng(seed), 0.05)
        assert len(order) > len(made.graph) + 2
        ours = rt.rematerialize(copy.deepcopy(plain), args, plan=reordered(made, order))
        assert ours.plan.order.tolist() == order
        assert_same_steps(copy.deepcopy(plain), ours, *args)


def unlike(self: Any, x: Tensor) -> Tensor:
    x = self.layer(x)
    with torch.autocast("cpu", enabled=False):
        return torch.tanh(self.b(torch.tanh(self.b(x.float()))))


def tied(self: Any, index: Tensor) -> Tensor:
    """Weights that are used twice and in two precisions: under autocast each is cast once."""
    return F.linear(torch.tanh(self.a(torch.tanh(self.a(self.table(index))))), self.table.weight)


def wide(layer: type[nn.Module]) -> nn.Module:
    """Each direction casts the input, so that the input's gradients are added in float32; in one direction and two."""

    def function(self: Any, x: Tensor) -> list[Tensor]:
        return [torch.tanh(layer(gain * x)[0]) for layer, gain in zip(self.layers, self.gains, strict=True)]

    layers = (layer(8, 16, num_layers=2, batch_first=True, bidirectional=both) for both in (False, True))  # pyright: ignore
    gains = nn.ParameterList(torch.randn(8) for _ in range(2))
    return Applies(function, 0, gains=gains, layers=nn.ModuleList(layers))


def resized(self: Any, x: Tensor) -> Tensor:
    """Operators that are traced by another formula than eager mode uses."""
    x = self.conv(x)
    for mode in ("nearest", "bilinear", "bicubic"):
        x = torch.tanh(F.interpolate(x, scale_factor=1.3, mode=mode))
    return F.softshrink(F.interpolate(x.flatten(2), scale_factor=1.2, mode="linear"))


def drawn_channels_last() -> nn.Module:
    layers = nn.Conv2d(3, 8, 3), nn.Dropout(0.15), nn.Tanh(), nn.Conv2d(8, 2, 3), nn.AlphaDropout(0.15), nn.Tanh()
    return nn.Sequential(*layers).to(memory_format=torch.channels_last)


def slopes(self: Any, x: Tensor) -> Tensor:
    """The gradient of `rrelu` has the layout of its draws, so sums behind it add in another order."""
    x = F.rrelu(self.a(x).transpose(0, 1), training=True).transpose(0, 1)
    return F.rrelu(self.b(x).transpose(0, 1), training=True, inplace=True).transpose(0, 1)


class Scaled(torch.autograd.Function):
    """A gradient that no automatic differentiation would give."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.clamp(min=0) * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        (x,) = ctx.saved_tensors
        return gradient * (x > 0) * 3


def odd(self: Any, x: Tensor, y: Tensor, *, scale: float = 1.0) -> dict[str, Any]:
    """Custom gradient, shared weights, a keyword, several outputs: no tensor, a view, an input among them."""
    h = Scaled.apply(self.a(torch.tanh(self.a(torch.tanh(self.a(x))))))
    small = self.b(h * torch.sigmoid(self.a(y)))
    return {"small": small * scale, "list": [small[:, :4], y], "n": 3, "none": None}


def of_odd(out: dict[str, Any]) -> Tensor:
    assert (out["n"], out["none"]) == (3, None)
    return out["small"].sum() + out["list"][0].square().sum() + out["list"][1].sum()


def drifting(self: Any, x: Tensor) -> Tensor:
    """A buffer that is read before and after it changes, forward and backward."""
    level = self.level.clone()
    x = torch.tanh(self.a(torch.tanh(self.a(x) * level)) * self.level.clone())
    self.level.mul_(0.9)
    return (self.a(x) * self.level.clone()).sum(1)


def parted(self: Any, x: Tensor) -> Tensor:
    """Parts of a buffer that is overwritten are read before."""
    mean, deviation = self.levels.unbind(0)
    x = torch.tanh(self.a(x) - mean) + deviation.exp()
    x = torch.tanh(self.b(torch.tanh(self.b(x))) - mean)
    self.levels.mul_(0.9)
    return squares(self.b(x))


def redrawn(self: Any, x: Tensor) -> Tensor:
    """A buffer that is read and then drawn anew, before other draws."""
    x = torch.tanh(self.a(x * self.noise))
    self.noise.normal_()
    return F.dropout(self.b(x), 0.5)


def written(self: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    x = torch.sin(self.a(x)) + 0
    x[2] = 0.0
    return x, x[1]


def spectral() -> nn.Module:
    layer = nn.utils.parametrizations.spectral_norm(nn.Linear(64, 64))
    return nn.Sequential(layer, nn.Tanh(), layer, nn.Tanh(), nn.Linear(64, 1))


def dropouts(self: Any, x: Tensor) -> list[Tensor]:
    return [F.dropout(self.b(F.dropout(self.a(x), p)), 0.5) for p in (0.04, 0.15, 0.5, 0.97, 1.0)]


def tiny_t5() -> tuple[Any, ...]:
    model, _ = t5(vocabulary=50, width=32, hidden=48, n_layers=2, n_heads=2)
    ids, (targets, labels) = torch.randint(0, 50, (2, 16)), torch.randint(0, 50, (2, 2, 12))
    return model, (ids, targets, labels), 0.8, {"loss_of": Tensor.sum}


def tiny_unet() -> tuple[Any, ...]:
    model, (x, _, noise) = diffusion_unet(2, (3, 16, 16), width=16, multipliers=(1, 2), attention=(8,), n_heads=2)
    return model, (torch.randn_like(x), torch.randint(0, 1000, (2,)), torch.randn_like(noise)), 0.8, {
        "loss_of": Tensor.sum
    }  # fmt: skip


def frozen() -> nn.Module:
    model = Net()
    for part in (model.convs[0], model.norms[1]):
        part.requires_grad_(False)
    return model


def channels_last(x: Any) -> Any:
    return x.to(memory_format=torch.channels_last)


def of_all(outputs: Any) -> Tensor:
    return torch.stack([y.square().mean() for y in tree_leaves(outputs) if y.requires_grad]).sum()


AUTOCAST, RECOMPUTES = {"context": autocast}, ("t5", "diffusion_unet", "odd")
SITUATIONS: dict[str, Callable[[], tuple[Any, ...]]] = {  # (model, arguments, budget, options of `check`)
    "t5": tiny_t5,
    "diffusion_unet": tiny_unet,
    "channels_last": lambda: (channels_last(Net()), (channels_last(*images()),), 0.75, {}),
    "gradient of the input": lambda: (Net(dropout=0.0), images(requires_grad=True), 0.75, {}),
    "frozen layers": lambda: (frozen(), images(), 0.75, {}),
    "resized": lambda: (Applies(resized, conv=nn.Conv2d(3, 4, 3, padding=1)), rows(2, 3, 16, 16), 0.95, {}),
    "odd": lambda: (
        Applies(odd, 64), (*rows(256, 64), *rows(256, 64)), 0.8, {"loss_of": of_odd, "kwargs": {"scale": 2.0}}
    ),
    "drifting": lambda: (Applies(drifting, 64, level=torch.ones(64)), rows(256, 64), 0.9, {}),
    "spectral": lambda: (spectral(), rows(256, 64), 0.97, {}),
    "parted": lambda: (Applies(parted, 64, levels=torch.rand(2, 64)), rows(512, 64), 0.7, {"loss_of": Tensor.clone}),
    "redrawn": lambda: (Applies(redrawn, 64, noise=torch.ones(64)), rows(256, 64), "1GB", {}),
    "written": lambda: (
        Applies(written, 64), rows(8, 64), "1GB", {"loss_of": lambda out: out[0].sum() + out[1].square().sum()}
    ),
    "autocast": lambda: (Net(), images(), 0.75, AUTOCAST),
    "autocast tied": lambda: (
        Applies(tied, 64, table=nn.Embedding(10, 64)), (torch.randint(0, 10, (128,)),), 0.95, AUTOCAST
    ),
    "autocast gpt2": lambda: (*tiny_gpt2(), 0.9, AUTOCAST),
    "autocast unlike": lambda: (
        Applies(unlike, 32, layer=nn.TransformerEncoderLayer(32, 2, 64, 0.1, batch_first=True)), rows(4, 8, 32), 0.99,
        AUTOCAST,
    ),
    "autocast recurrent": lambda: (recurrent(dropout=0.5), rows(4, 7, 8), "100MB", AUTOCAST),
    "dropouts": lambda: (Applies(dropouts), rows(8, 16), "1GB", {"loss_of": of_all}),
    "draws of another layout": lambda: (drawn_channels_last(), (channels_last(*rows(4, 3, 16, 16)),), 0.99, {}),
    "slopes": lambda: (Applies(slopes), rows(174, 16), 0.99, {"loss_of": lambda y: y.pow(3).sum()}),
    "autocast GRU": lambda: (wide(nn.GRU), rows(4, 7, 8), "100MB", AUTOCAST | {"loss_of": of_all}),
    "autocast RNN": lambda: (wide(nn.RNN), rows(4, 7, 8), "100MB", AUTOCAST | {"loss_of": of_all}),
}  # fmt: skip


@pytest.mark.parametrize("name", SITUATIONS)
def test_a_situation_has_the_plain_bits(name: str) -> None:
    model, args, budget, options = SITUATIONS[name]()
    ours = check(model, args, budget, **options)
    assert ours.plan.recomputed or name not in RECOMPUTES


KINDS = [(nn.GRU, {}), (nn.LSTM, {}), (nn.LSTM, {"proj_size": 8}), (nn.RNN, {}), (nn.RNN, {"nonlinearity": "relu"})]


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("batch", [2, *(pytest.param(n, marks=pytest.mark.slow) for n in (1, 3, 4, 5, 6, 7, 8))])
def test_recurrent_layers_of_each_kind_at_every_batch_and_layout(batch: int, batch_first: bool) -> None:
    """Kernels depend on layouts and gradients; a layer of each kind, in one direction and in two, side by side."""
    layers = nn.ModuleList(
        kind(16, 16, bidirectional=both, batch_first=batch_first, **own)
        for kind, own in KINDS
        for both in (False, True)
    )
    x = torch.randn((batch, 8, 16) if batch_first else (8, batch, 16))
    plain = Applies(lambda self, x: [layer(x) for layer in self.layers], 0, layers=layers)
    ours = rematerialize(copy.deepcopy(plain), (x,), "100MB")
    for training in (True, False) if batch == 2 else (True,):
        assert_same_steps(plain.train(training), ours.train(training), x, loss_of=of_all)


def test_recurrent_layers_are_measured(tmp_path: Path) -> None:
    own: dict[str, Any] = {"time_limit_s": 1, "cache_folder": tmp_path}
    assert not said(lambda: rt.rematerialize(nn.LSTM(16, 16), rows(4, 5, 16), "10MB", **own), "not measured")


@pytest.mark.parametrize("kind", [nn.GRU, nn.LSTM])
def test_recurrent_layers_may_be_frozen_or_run_without_gradients(kind: type[nn.Module]) -> None:
    def mixed(self: Any, x: Tensor) -> list[Tensor]:
        with torch.no_grad():
            before = self.apart(x)[0] + self.frozen(x)[0]
        return [self.end(self.frozen(self.trained(x)[0])[0]), self.end(self.frozen(before)[0]), before]

    trained, frozen, apart = (kind(16, 16, num_layers=2, batch_first=True) for _ in range(3))
    frozen.requires_grad_(False)
    model = Applies(mixed, 0, trained=trained, frozen=frozen, apart=apart, end=nn.Linear(16, 4))
    check(model, rows(2, 8, 16), "100MB", of_all)


def test_what_comes_on_top_of_the_promise_is_counted_or_told_of() -> None:
    model = nn.Sequential(*(part for _ in range(4) for part in (nn.Linear(256, 256), nn.Tanh())))
    for part in model[:6]:
        part.requires_grad_(False)
    x, adam = torch.randn(64, 256), torch.optim.Adam(model.parameters())
    ours = rematerialize(model, (x,), "30MB", optimizer=adam)
    before = ours.plan.fixed["optimizer state"]
    step(ours, (x,))
    adam.step()
    ours.requires_grad_(True)  # from now on everything is trained, and the optimizer will hold more
    adam.zero_grad()
    step(ours, (x,))
    assert all(p.grad is not None for p in model.parameters())
    (latest,) = ours.prepare((x,))
    assert latest.fixed["optimizer state"] > 3 * before
    with pytest.warns(UserWarning, match="gradients are held from an earlier step"):
        step(ours, (x,))


@pytest.mark.parametrize(("optimizer", "told", "copied"), [(None, 1, False), ("adam", 0, False), (None, 1, True)])
def test_an_optimizer_that_was_not_counted_is_told_of(optimizer: Any, told: int, copied: bool) -> None:
    x = torch.randn(64, 512)
    ours = rematerialize(nn.Sequential(nn.Linear(512, 512), nn.Tanh(), nn.Linear(512, 512)), (x,), optimizer=optimizer)
    ours = copy.deepcopy(ours) if copied else ours
    adam = torch.optim.Adam(ours.parameters())
    messages = said(lambda: [(step(ours, (x,)), adam.step()) for _ in range(2)], "Adam holds")
    assert len(messages) == told
    assert all("optimizer=optimizer" in message for message in messages)


class Summing(torch.optim.Optimizer):
    """Keeps a number of its own, and the sum of all gradients."""

    def __init__(self, parameters: Any):
        super().__init__(parameters, {"lr": 0.1})
        self.times = 2

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for p in self.param_groups[0]["params"]:
            self.state[p].setdefault("sum", torch.zeros_like(p)).add_(p.grad, alpha=self.times)
            p.sub_(self.state[p]["sum"])


def test_the_state_of_an_optimizer_with_numbers_of_its_own_is_counted() -> None:
    model = nn.Linear(8, 8)
    made = rematerialize(model, rows(2, 8), optimizer=Summing(model.parameters())).plan
    assert made.fixed["optimizer state"] == 4 * (64 + 8)


def test_an_ordinary_loop() -> None:
    """Accumulation, two forwards and one backward, retain_graph, eval, no_grad, a smaller last batch, clipping."""
    x = torch.randn(IMAGES)
    ours = check(Net(), (x,))
    plain = copy.deepcopy(ours.model)
    for model in (plain, ours):
        model.zero_grad()
    for size in (8, 5, 3, 5):
        assert_same(step(plain, (x[:size],), seed=size), step(ours, (x[:size],), seed=size))
    twice = [step(Applies(lambda _, x, model=model: model(x) + model(2 * x)), (x,)) for model in (plain, ours)]
    assert_same(*twice)
    for model in (plain, ours):
        torch.manual_seed(1)
        loss = squares(model(x))
        loss.backward(retain_graph=True)
        loss.backward()
    norms = [nn.utils.clip_grad_norm_(model.parameters(), 0.01) for model in (plain, ours)]
    assert torch.equal(*norms)
    plain.eval(), ours.eval()
    assert not ours.model.training
    assert_same(step(plain, (x,)), step(ours, (x,)))
    with torch.no_grad():
        assert torch.equal(plain(x), ours(x))
    ours.train()
    assert ours.model.training
    assert ours.model.norms[0].training


def test_it_is_the_model_in_every_other_respect() -> None:
    model = Net()
    ours = rematerialize(model, images(), 0.75)
    assert list(ours.state_dict()) == list(model.state_dict())
    assert all(a is b for a, b in zip(ours.parameters(), model.parameters(), strict=True))
    assert [name for name, _ in ours.named_modules()][1:] == [name for name, _ in model.named_modules()][1:]
    other = Net()
    ours.load_state_dict(other.state_dict())
    assert torch.equal(model.head.weight, other.head.weight)
    assert ours.drop.p == 0.1
    with pytest.raises(AttributeError, match="nothing"):
        _ = ours.nothing
    twin = copy.deepcopy(ours)
    assert twin.head.weight is not model.head.weight
    assert_same_steps(twin, ours, *images())


def test_batch_norms_in_checkpoints_move_once_which_is_said() -> None:
    """PyTorch moves their statistics in each of both runs."""
    layers = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Tanh())
    model, x = Applies(lambda self, x: checkpoint(self.layers, x, use_reentrant=False), layers=layers), rows(4, 8)[0]
    (message,) = said(lambda: rematerialize(model, (x,)), "move their statistics once")
    assert "torch.utils.checkpoint" in message
    ours = rematerialize(model, (x,))
    step(ours, (x,))
    assert layers[1].num_batches_tracked == 1
    norms = Applies(lambda self, x: self.norm(checkpoint(self.a, x, use_reentrant=False)), 8, norm=nn.BatchNorm1d(8))
    assert not said(lambda: check(norms, (x,), "1GB"), "statistics")


class Counts(nn.Linear):
    """Keeps a number in its state."""

    n = 1

    def get_extra_state(self) -> Any:
        return {"n": self.n}

    def set_extra_state(self, state: Any) -> None:
        self.n = state["n"]


def test_state_that_is_no_tensor_and_hooks_on_state_are_the_models_own() -> None:
    model, seen = Counts(4, 4), list[str]()
    whole = nn.Sequential(rematerialize(model, rows(2, 4)))
    whole[0].register_state_dict_post_hook(lambda *_: seen.append("saved"))
    whole[0].register_load_state_dict_post_hook(lambda *_: seen.append("loaded"))
    state, model.n = whole.state_dict(), 5
    whole.load_state_dict(state)
    assert model.n == 1
    whole[0].load_state_dict(whole[0].state_dict())
    assert seen == ["saved", "loaded"] * 2


def test_a_backward_pass_that_failed_leaves_nothing_to_the_next() -> None:
    x, net = torch.randn(2, 4), nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Tanh())
    halves = Applies(lambda self, x: (self.a(x).tanh(), self.b(x).tanh()), 4)
    first, second = rematerialize(halves, (x,)), rematerialize(net, (x,))
    loss = first(x)[0].sum()
    loss.backward()
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()
    assert_same(step(copy.deepcopy(net), (x,)), step(second, (x,)))
    assert net[0].weight.grad is not None


@pytest.mark.parametrize("used", [(0,), (2,), (0, 2), (1,), (0, 1, 2, 3)])
def test_what_the_loss_does_not_depend_on_gets_no_gradient_and_adds_nothing(used: tuple[int, ...]) -> None:
    """Zero times an infinite derivative would be NaN: rows of squares and their roots, and halves of them, joined."""

    def function(self: Any, x: Tensor) -> tuple[Tensor, ...]:
        h = F.linear(x, self.a.weight).square()
        left, right = h.split(2, 1)
        return self.count(h).sum(1), h.sqrt(), left.exp(), right.sqrt()

    def loss_of(outputs: tuple[Tensor, ...]) -> Tensor:
        return torch.stack([outputs[i].sum() for i in used]).sum()

    x, plain = torch.randn(8, 4), Applies(function, 4, count=nn.BatchNorm1d(4))
    x[0] = 0
    ours = rematerialize(copy.deepcopy(plain), (x,))
    theirs, mine = step(plain, (x,), loss_of), step(ours, (x,), loss_of)
    assert theirs.keys() == mine.keys()  # `step` leaves out gradients that are None
    for name, value in theirs.items():
        assert torch.equal(value.nan_to_num(-1), mine[name].nan_to_num(-1)), name
        assert bool(value.isnan().any()) == (name == "gradient of a.weight" and 1 in used)


@dataclass(frozen=True)
class Batch:
    x: Tensor
    scale: float = 2.0


@dataclass
class Made:
    roots: Tensor
    tanh: Tensor


def test_arguments_and_outputs_may_be_in_dataclasses() -> None:
    """As in a tuple: the plain peak counts the backward pass, and what the loss does not read gets no gradient."""

    def in_a_tuple(self: Any, x: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        h = F.linear(x, self.a.weight).square() * scale
        return h.sqrt(), torch.tanh(self.b(h))

    x = torch.randn(8, 16)
    x[0] = 0
    plain = Applies(lambda self, batch: Made(*in_a_tuple(self, batch.x, batch.scale)))
    ours = rematerialize(copy.deepcopy(plain), (Batch(x.to("meta")),), 1.0)
    assert ours.plan.plain_peak_bytes == rematerialize(Applies(in_a_tuple), (x, 2.0), 1.0).plan.plain_peak_bytes
    assert_same_steps(plain, ours, Batch(x), loss_of=lambda made: made.tanh.sum())
    with pytest.raises(remat.InvalidInput, match="create_graph=True"):
        torch.autograd.grad(ours(Batch(x)).tanh.sum(), [*ours.parameters()], create_graph=True, allow_unused=True)


def test_the_same_step_has_the_same_fingerprint_again() -> None:
    def function(self: Any, x: Tensor) -> Tensor:
        x = torch.tanh(self.a(x)) * 1
        x[::2] *= 2
        return squares(torch.tanh(self.a(x)))

    (x,) = rows(64, 64)
    ours = rematerialize(Applies(function, 64), (x,))
    ours(x).backward()
    assert ours.prepare((x,)) == (ours.plan,)
    again = rt.rematerialize(Applies(function, 64), (x,), plan=ours.plan)
    assert again.plan.order.tolist() == ours.plan.order.tolist()


def test_what_is_set_on_it_reaches_the_model() -> None:
    (x,) = rows(8, 64)
    ours = rematerialize(Applies(lambda self, x: torch.tanh(self.a(x)) * self.scale, 64, scale=1.0), (x,))
    before = ours(x)
    ours.scale = 3.0
    assert ours.model.scale == 3.0
    assert torch.equal(ours(x), before * 3)
    ours.model.a.register_forward_hook(lambda _module, _args, output: output * 0)
    assert not ours(x).any()
    row = rematerialize(nn.Sequential(nn.Linear(4, 4), nn.Tanh()), rows(2, 4))
    assert (len(row), bool(row), isinstance(row[1], nn.Tanh), len(list(row))) == (2, True, True, 2)
    with pytest.raises(TypeError, match="save its state_dict"):
        ours.__reduce__()


def test_hooks_for_all_modules_see_the_calls_of_the_plain_model() -> None:
    plain, x, seen = nn.Sequential(nn.Linear(8, 8), nn.Tanh()), torch.randn(4, 8), list[str]()
    ours = rematerialize(copy.deepcopy(plain), (x,))

    def hook(module: nn.Module, _args: object, output: Tensor) -> Tensor:
        seen.append(type(module).__name__)
        return output * 1.1

    handle = nn.modules.module.register_module_forward_hook(hook)
    try:
        assert torch.equal(plain(x), ours(x))
    finally:
        handle.remove()
    assert seen == ["Linear", "Tanh", "Sequential"] * 2


def test_an_exception_inside_the_step_leaves_buffers_alone() -> None:
    def function(self: Any, x: Tensor, index: Tensor) -> Tensor:
        return self.net(x) + self.table(index)

    x, good = torch.randn(IMAGES), torch.zeros(8, dtype=torch.long)
    ours = rematerialize(Applies(function, net=Net(), table=nn.Embedding(4, 10)), (x, good), 0.75)
    before = {name: t.clone() for name, t in ours.state_dict().items()}
    with pytest.raises(IndexError):
        ours(x, good + 100)
    assert all(torch.equal(t, before[name]) for name, t in ours.state_dict().items())
    assert_same_steps(copy.deepcopy(ours.model), ours, x, good)


# --- bytes


def measured(ours: rt.Rematerialized, model: nn.Module, args: tuple[Any, ...]) -> int:
    """Bytes that a step of `model` holds at most: what is there before, and what the allocator adds."""

    def run() -> None:
        model(*args).sum().backward()

    run()
    model.zero_grad()
    there = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in (*model.state_dict().values(), *args)}
    assert sum(there.values()) == there_before(ours.plan)
    peak = rt.measured_peak(run)
    model.zero_grad()
    return sum(there.values()) + peak


def test_what_was_left_over_before_a_step_does_not_hide_its_bytes() -> None:
    def leaves_a_cycle() -> None:
        held: list[Any] = [torch.empty(1 << 20, dtype=torch.uint8)]
        held.append(held)

    def step() -> None:
        gc.collect()
        torch.empty(1000, dtype=torch.uint8)

    assert rt.measured_peak(leaves_a_cycle) == 1 << 20
    assert rt.measured_peak(step) == 1000


def large() -> nn.Module:
    """Large activations on few parameters, and a scalar at the end."""
    return Applies(lambda self, x: squares(self.net(x)), net=Net(16, 8, 0.1))


@pytest.mark.parametrize("share", [0.9, pytest.param(0.6, marks=pytest.mark.slow), 0.45])
def test_a_promised_budget_is_kept_and_predicted(share: float) -> None:
    args = rows(16, 3, 48, 48)
    model = large()
    plain = copy.deepcopy(model)
    ours = rematerialize(model, args, share, strategy="search", time_limit_s=3)
    needed = measured(ours, plain, args)
    assert ours.plan.plain_peak_bytes == pytest.approx(needed, rel=0.01)
    assert ours.budget_bytes == pytest.approx(share * needed, rel=0.01)
    peak = measured(ours, ours, args)
    assert peak <= ours.budget_bytes
    assert peak == pytest.approx(ours.predicted_peak_bytes, rel=0.02)


def awkward() -> nn.Module:
    """Gradients that PyTorch copies when it accumulates them: one for two parameters, an expanded one, a layout."""

    def function(self: Any, x: Tensor) -> Tensor:
        y = torch.tanh(x @ (self.p + self.q)) + self.r.sum()
        z = torch.bmm(self.t, y.view(4, 300, 4)).reshape(1, 60, 4, 4).contiguous(memory_format=torch.channels_last)
        return self.conv(z).square().sum()

    square = {name: nn.Parameter(torch.randn(300, 300)) for name in "pqr"}
    turned = nn.Parameter(torch.randn(4, 300, 60).transpose(1, 2))
    return Applies(function, 0, t=turned, conv=nn.Conv2d(60, 60, 3), **square)


def first(self: Any, x: Tensor) -> Tensor:
    """The first step of a sequence, as classifiers return; the strides of its gradient have no holes either."""
    return self.out(torch.tanh(self.up(x)))[:, 0]


PEAKS = {
    "gradients that are copied": (lambda: (awkward(), rows(16, 300)), "100MB", Tensor.sum, 0.001),
    "the gradient of a part": (
        lambda: (Applies(first, 1, up=nn.Linear(32, 64), out=nn.Linear(64, 32)), rows(8, 40, 32)), 0.99,
        lambda y: y.square().sum(), 0.02,
    ),
    # A step so small that the 5 kB of a state of random numbers are most of it; nothing is drawn again.
    "no state of random numbers": (
        lambda: (Applies(lambda self, x: squares(torch.tanh(F.dropout(self.a(x)))), 8), rows(16, 8)), "1MB",
        Tensor.sum, 0.02,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", PEAKS)
def test_what_a_step_needs_besides_is_predicted(name: str) -> None:
    make, budget, loss_of, tolerance = PEAKS[name]
    model, args = make()
    ours = check(model, args, budget, loss_of)
    found = needs(ours, args)
    assert found <= min(ours.budget_bytes, ours.predicted_peak_bytes * (1 + tolerance))
    assert found == pytest.approx(ours.predicted_peak_bytes, rel=tolerance)
    assert budget != 0.99 or ours.budget_bytes < needs(ours, args, copy.deepcopy(ours.model))


def test_the_loss_and_what_starts_the_backward_pass_are_counted() -> None:
    """A plan that fills its budget to the byte, of a module that returns the loss; large outputs and a loss outside."""
    (x,) = rows(16, 3, 48, 48)
    most = rematerialize(large(), (x,)).predicted_peak_bytes
    ours = rematerialize(large(), (x,), most)
    assert measured(ours, ours, (x,)) <= most

    layers = [nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.Tanh()) for _ in range(6)]
    x, target = torch.randn(8, 8, 64, 64), torch.randint(0, 8, (8, 64, 64))
    for loss, tightness in ((None, 0.8), (lambda out: F.cross_entropy(out, target), 0.99)):
        ours = rematerialize(nn.Sequential(*layers), (x,), 0.85, verify=True, loss=loss)
        assert ours.measured_peak_bytes <= ours.budget_bytes

        def run(ours: rt.Rematerialized = ours) -> None:
            outputs = ours(x)
            F.cross_entropy(outputs, target).backward()

        run()
        ours.zero_grad()
        assert tightness <= (there_before(ours.plan) + rt.measured_peak(run)) / ours.predicted_peak_bytes <= 1.0


def test_a_recurrent_network_is_not_run_to_be_planned() -> None:
    calls: list[int] = []
    model, x = recurrent(), torch.randn(4, 7, 8)
    model.register_forward_pre_hook(lambda *_: calls.append(1) if not torch.compiler.is_compiling() else None)
    ours = rematerialize(model, (x,), "100MB")
    assert calls == []
    assert ours.plan.plain_peak_bytes is None


def test_what_else_is_resident_counts() -> None:
    args, model = images(), Net()
    trained, n = sum(p.numel() * 4 for p in model.parameters()), len(list(model.parameters()))
    bare = rematerialize(model, args, 1.0).plan
    adam = torch.optim.AdamW(model.parameters())
    counted = 2 * trained + 4 * n  # Adam counts its steps
    for optimizer, state in ((adam, counted), ("adam", 2 * trained), ("sgd", 0), (12345, 12345), ("1MB", 10**6)):
        plan = rematerialize(model, args, 1.0, optimizer=optimizer).plan
        assert plan.graph.fixed_bytes - bare.graph.fixed_bytes == state
        assert plan.plain_peak_bytes - bare.plain_peak_bytes == state
    step(model, args)
    adam.step()
    for options, state in (({"optimizer": adam}, counted), ({"accumulate": True}, trained)):
        plan = rematerialize(model, args, 1.0, **options).plan
        assert plan.graph.fixed_bytes - bare.graph.fixed_bytes == state


# --- plans that are given


SAVED = """
import sys, torch
sys.path.insert(0, sys.argv[1])
import remat.torch as rt
from torch_helpers import IMAGES, Net
model = rt.rematerialize(Net(dropout=0.0), (torch.randn(IMAGES),), plan=sys.argv[2])
model(torch.randn(IMAGES)).sum().backward()
solvers = [name for name in sys.modules if name.split('.')[0] in ('ortools', 'highspy', 'cvxpy', 'hydra', 'pandas')]
print(model.predicted_peak_bytes, model.budget_bytes, len(model.plan.order), *sorted(solvers))
"""


def test_a_plan_is_followed_without_a_solve(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain, (x,), path = Net(dropout=0.0), images(), tmp_path / "plan.json"
    planned = rematerialize(copy.deepcopy(plain), (x,), 0.7)
    planned.plan.save(path)
    printed = run_python(SAVED, str(Path(__file__).parent), str(path), cwd=tmp_path)
    expected = [planned.predicted_peak_bytes, planned.budget_bytes, len(planned.plan.order)]
    assert printed.split() == [*map(str, expected)]
    monkeypatch.setattr("remat.torch.planning.eager.find_plan", None)
    for plan in (planned.plan, path):
        module = rt.follow(copy.deepcopy(plain), (x,), plan)
        assert module.plan.recomputed == planned.plan.recomputed
        assert_same_steps(copy.deepcopy(plain), module, x)
    with pytest.raises(remat.InvalidPlan, match="was made for inputs"):
        rt.follow(nn.Sequential(nn.Linear(4, 4)), rows(2, 4), planned.plan)


@pytest.mark.slow
def test_a_budget_beside_a_plan_is_what_is_promised(tmp_path: Path) -> None:
    args = images()
    made = rematerialize(Net(), args, 0.75)
    peak = made.predicted_peak_bytes
    ours = rt.rematerialize(Net(), args, peak + 10, plan=made.plan)
    assert ours.budget_bytes == peak + 10
    assert ours.prepare((torch.randn(7, 3, 32, 32),))[0].budget_bytes == peak + 10
    made.plan.save(tmp_path / "plan.json")
    for match, budget, options in (
        ("above the budget of", peak - 1, {"plan": made.plan}),
        (
            r"above the budget it was made for, .*optimizer state 2.00 GB", None,
            {"plan": tmp_path / "plan.json", "optimizer": 2 * 10**9},
        ),
        (r"plan must be the \.plan of a module", None, {"plan": made.plan.plan}),
    ):  # fmt: skip
        with refused(match):
            rt.rematerialize(Net(), args, budget, **options)


def test_where_nothing_is_compiled_nothing_runs() -> None:
    (x,) = images()
    ours = rematerialize(Net(), (x,), 0.75)
    before = {name: b.clone() for name, b in ours.named_buffers()}
    for context, says in (
        (torch.compiler.set_stance("force_eager"), "set_stance"),
        (torch.utils.flop_counter.FlopCounterMode(display=False), "FlopCounterMode"),
        (torch._dynamo.config.patch(disable=True), "TORCHDYNAMO_DISABLE"),
    ):
        for call in (lambda: ours(x), lambda: rematerialize(Net(), (x,))):
            with context, refused(says):
                call()
    assert all(torch.equal(b, before[name]) for name, b in ours.named_buffers())


def test_a_plan_for_something_else_is_refused_with_both_fingerprints(tmp_path: Path) -> None:
    args = images()
    ours = rematerialize(Net(), args, 0.75)
    path, other = tmp_path / "plan.json", tmp_path / "other.json"
    ours.plan.save(path)
    for model, x, why, plan in (
        (Net(), torch.randn(7, 3, 32, 32), "made for inputs float32", path),
        (Net(width=16), args[0], "made for another model", path),
        (Net(width=16), args[0], "made for another model", ours.plan),
        (Net().eval(), args[0], "made for another model", path),
    ):
        with pytest.raises(remat.InvalidPlan, match=why) as error:
            rt.rematerialize(model, (x,), plan=plan)
        assert str(ours.plan.fingerprint) in str(error.value)
        assert str(error.value).count("torch 2") >= 2
    document = json.loads(path.read_text())
    for changes, why in (
        ({"version": "2.0.0"}, r"made for torch 2\.0\.0, this is"),
        ({"operation_costs": [1]}, "operation_costs' must be"),
        ({"workspace_bytes": None}, "workspace_bytes' must be"),
        ({"sharing": [[]]}, "'execution': 'sharing' must be a list"),
        (None, "no 'execution' section"),
    ):
        changed = {key: value for key, value in document.items() if key != "execution"}
        if changes is not None:
            changed["execution"] = document["execution"] | changes
        other.write_text(json.dumps(changed))
        with pytest.raises(remat.InvalidPlan, match=why):
            rt.rematerialize(Net(), args, plan=other)
    with pytest.raises(ValueError, match="above the budget"):
        rt.rematerialize(Net(), args, "1MB", plan=path)


def overlapping(self: Any, x: Tensor, y: Tensor) -> Tensor:
    z = torch.tanh(self.a(x.clone()))
    y.mul_(0.5)
    return torch.tanh(self.a(z)) + y.sum() + x.sin()


def test_bad_input_gets_one_line() -> None:
    x = torch.randn(2, 64)
    model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64))
    branching = nn.Sequential(Applies(lambda _, x: x * 2 if x.sum() > 0 else x), model)
    sparse = nn.Sequential(nn.Embedding(10, 64, sparse=True), model)
    frozen = copy.deepcopy(model).requires_grad_(False)
    for message, of, args, budget, options in (
        ("must be a tuple", model, x, 0.5, {}),
        ("give a budget", model, (x,), None, {}),
        ("above 0 and at most 1", model, (x,), 0.0, {}),
        ("cannot read '8QB'", model, (x,), "8QB", {}),
        ("unknown backend 'eagr'; did you mean eager", model, (x,), 0.5, {"backend": "eagr"}),
        ("unknown cost model", model, (x,), 0.5, {"cost": "flop"}),
        ("unknown optimizer 'adm'; did you mean", model, (x,), 0.5, {"optimizer": "adm"}),
        ("nothing in the model needs a gradient", frozen, (x,), 0.5, {}),
        ("does not compile into one graph.*Data-dependent branching", branching, (x,), 0.5, {}),
        ("does not take these arguments: .*same reduction dim", model, (x[:, :3],), 0.5, {}),
        (r"Sequential.forward\(input\) does not take these arguments: too many", model, (x, x), 0.5, {}),
        ("makes a sparse tensor", sparse, (torch.arange(5),), "1GB", {}),
        ("gpu='h200' is of cost='roofline'", model, (x,), 0.5, {"gpu": "h200"}),
        ("rematerialized already", rematerialize(model, (x,), 1.0), (x,), 0.5, {}),
        ("no plan of 'Sequential' within 1.00 kB", model, (x,), "1kB", {}),
        ("arguments that overlap", Applies(overlapping, 32), (x[0, :32], x[0, 16:48]), "1GB", {}),
    ):
        with refused(message, ValueError):
            rt.rematerialize(of, args, budget, **options)


# --- other loops


@pytest.mark.slow
def test_inductor_is_near_and_verified() -> None:
    """To 1e-4 of the largest gradient; the measured peak is within the budget because it is verified."""
    args = images()
    model = Net(8, 2, dropout=0.0)
    plain = copy.deepcopy(model)
    ours = rematerialize(model, args, 0.9, backend="inductor", verify=True)
    assert ours.measured_peak_bytes <= ours.budget_bytes
    assert all(p.grad is None for p in ours.parameters())
    assert all(torch.equal(a, b) for a, b in zip(plain.buffers(), ours.buffers(), strict=True))
    theirs, mine = step(plain, args), step(ours, args)
    largest = max(t.abs().max().item() for name, t in theirs.items() if name.startswith("gradient"))
    for name in theirs.keys() - {"random state"}:
        assert torch.allclose(theirs[name], mine[name], rtol=1e-4, atol=1e-4 * largest), name
    assert ours.plan.recomputed


@pytest.mark.slow
def test_the_example_trains_and_learns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "examples"))
    import torch_loop

    losses = torch_loop.main(steps=12)
    assert losses[-1] < losses[0]


DDP = """
import os, sys, torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
sys.path.insert(0, sys.argv[1])
import remat.torch as rt
from torch_helpers import IMAGES, Net, squares
rank = int(sys.argv[2])
dist.init_process_group("gloo", init_method="file://" + sys.argv[3], rank=rank, world_size=2)
torch.manual_seed(0)
plain, model = Net(dropout=0.0), Net(dropout=0.0)
model.load_state_dict(plain.state_dict())
torch.manual_seed(rank)
x = torch.randn(IMAGES)
ours = rt.rematerialize(model, (x,), 0.7, cost="flops", strategy="search", time_limit_s=5)
assert ours.plan.recomputed
plain, ours = DistributedDataParallel(plain), DistributedDataParallel(ours)
for step in range(2):
    for one in (plain, ours):
        one.zero_grad()
        squares(one(x)).backward()
    pairs = list(zip(plain.parameters(), ours.parameters(), strict=True))
    assert all(torch.equal(a.grad, b.grad) for a, b in pairs)
others = [torch.empty_like(pairs[0][1].grad) for _ in range(2)]
dist.all_gather(others, pairs[0][1].grad)
assert torch.equal(*others)
assert all(torch.equal(a, b) for a, b in zip(plain.buffers(), ours.buffers(), strict=True))
print("equal on", rank)
dist.destroy_process_group()
"""


def test_distributed_data_parallel_on_two_processes(tmp_path: Path) -> None:
    command = [sys.executable, "-c", DDP, str(Path(__file__).parent)]
    runs = [
        subprocess.Popen(
            [*command, str(rank), str(tmp_path / "meeting")], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        for rank in range(2)
    ]
    for rank, run in enumerate(runs):
        out, errors = run.communicate(timeout=300)
        assert run.returncode == 0, errors[-2000:]
        assert f"equal on {rank}" in out


# --- the code of the halves


@pytest.mark.short
def test_pytorchs_own_functions_are_the_operators_that_they_stand_for() -> None:
    x, y, w, image = torch.randn(6, 6), torch.randn(6, 6), torch.randn(6), torch.randn(2, 3, 8, 8)
    batch, kernel = torch.randn(2, 6, 6), torch.randn(4, 3, 3, 3)
    examples: dict[Any, list[tuple[Any, ...]]] = {
        aten.add.Tensor: [(x, y), (x, 2.5), (x.half(), x)], aten.addmm.default: [(w, x, y)],
        aten.bmm.default: [(batch, batch)], aten.clone.default: [(x.t(),)],
        aten.convolution.default: [(image, kernel, None, [2, 1], [1, 1], [1, 1], False, [0, 0], 1)],
        aten.expand.default: [(w, [6, 6]), (x, [2, -1, 6])], aten.mm.default: [(x, y.t())],
        aten.mul.Tensor: [(x, y), (x, 2.5)], aten.native_dropout.default: [(x, 0.5, True)],
        aten.native_layer_norm.default: [(x, [6], w, None, 1e-5)], aten.permute.default: [(image, [0, 2, 3, 1])],
        aten.relu.default: [(x,)], aten.select.int: [(x, 1, -2)], aten.squeeze.dim: [(x[:1], 0), (x, 0)],
        aten.sum.dim_IntList: [(x, [0]), (x, [0], True), (x, None)], aten.t.default: [(x,), (w,)],
        aten.transpose.int: [(image, -2, -1)], aten.unsqueeze.default: [(x, -1)], aten.view.default: [(x, [2, 3, -1])],
    }  # fmt: skip
    assert examples.keys() == FUNCTIONS.keys()
    for op, calls in examples.items():
        for args in calls:
            torch.manual_seed(0)
            expected = op(*args)
            torch.manual_seed(0)
            with Called() as called:
                found = FUNCTIONS[op](*args)
            assert called.operators == [op]
            for one, other in zip(tree_leaves(expected), tree_leaves(found), strict=True):
                assert torch.equal(one, other)
                assert one.stride() == other.stride()
                assert one.dtype == other.dtype


class Called(TorchDispatchMode):
    """Notes the operators that reach their kernels."""

    def __init__(self) -> None:
        super().__init__()
        self.operators = list[Any]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.operators.append(func)
        return func(*args, **(kwargs or {}))


@pytest.mark.short
def test_the_code_of_a_half_computes_what_its_graph_says_and_drops_what_is_not_read_again() -> None:
    alive = list[int]()
    made = list[weakref.ref[Tensor]]()

    def noted(x: Tensor, *_others: Any, **_more: Any) -> Tensor:
        alive.append(sum(each() is not None for each in made))
        made.append(weakref.ref(y := x + 1))
        return y

    graph = fx.Graph()
    x, _unread, z = (graph.placeholder(name) for name in ("x", "unread", "c0"))  # a name as of the code's own
    constant = graph.get_attr("constant")
    first = graph.call_function(noted, (x, [z, (slice(None, 2), 1.5)]), {"like": {"a": z, "inf": float("inf")}})
    second = graph.call_function(noted, (first,), {"dtype": torch.float32})
    graph.call_function(noted, (second,))  # nobody reads it
    parts = graph.call_function(aten.split.Tensor, (second, 1))
    part = graph.call_function(operator.getitem, (parts, 0))
    added = graph.call_function(aten.add.Tensor, (part, constant), {"alpha": 2})
    graph.output((added, None, [z]))
    owner = nn.Module()
    owner.register_buffer("constant", torch.tensor([[3.0]]))
    args = [torch.zeros(2, 2), torch.ones(1), given := torch.ones(3)]
    freed = weakref.ref(args[1])
    outputs = boxed(fx.GraphModule(owner, graph))(args)
    assert torch.equal(outputs[0], torch.full((1, 2), 8.0))
    assert outputs[1] is None
    assert outputs[2] == [given]
    assert not args
    assert freed() is None
    assert alive == [0, 1, 1]  # the first result is gone when the third call begins


@pytest.mark.short
def test_halves_make_no_views_that_change_nothing() -> None:
    model, x = nn.Sequential(*(nn.Linear(8, 8) for _ in range(3))), torch.randn(4, 8)
    planner = Planner("linear", PlanOptions(cost="flops"), "cpu", Eager())
    step = captured_step(model, (x,), {}, planner.backend)
    for half in emit(step, range(len(step.graph))):
        views = [node for node in half.graph.nodes if node.target is aten.t.default]
        assert views
        assert not any(node.args[0].target is aten.t.default for node in views)  # pyright: ignore[reportAttributeAccessIssue]
    assert_same_steps(copy.deepcopy(model), rematerialize(model, (x,)), x)
