"""Plans executed in PyTorch against PyTorch's own step: what it computes bit for bit, what it holds in bytes."""

from __future__ import annotations

import copy
import gc
import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers import refused, run_python
from orders import random_order
from torch import Tensor, nn
from torch.nn import functional as F
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
    both,
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
from remat.torch.networks.diffusion_unet import diffusion_unet
from remat.torch.networks.t5 import t5
from remat.torch.networks.transformer import gpt2
from remat.torch.planning.planner import there_before

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


def tiny_gpt2() -> tuple[nn.Module, tuple[Tensor, ...]]:
    model, _ = gpt2(2, length=16, vocabulary=50, context=16, width=32, n_layers=2, n_heads=2, dropout=0.1)
    return model, tuple(torch.randint(0, 50, (2, 2, 16)))


def recurrent() -> nn.Module:
    def function(self: Any, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.layer(torch.tanh(self.a(x)))[0]))

    return Applies(function, 8, layer=nn.LSTM(8, 16, 2, batch_first=True, dropout=0.5), head=nn.Linear(16, 4))


@pytest.mark.parametrize("kind", ["net", "gpt2", "recurrent"])
def test_random_valid_plans_are_bit_identical(kind: str) -> None:
    model, args = {
        "net": lambda: (Net(), images()), "gpt2": tiny_gpt2, "recurrent": lambda: (recurrent(), rows(4, 7, 8)),
    }[kind]()  # fmt: skip
    plain = copy.deepcopy(model)
    made = rematerialize(model, args, 1.0).plan
    order = random_order(made.graph, np.random.default_rng(0), 0.05)
    assert len(order) > len(made.graph) + 2
    ours = rt.rematerialize(copy.deepcopy(plain), args, plan=reordered(made, order))
    assert ours.plan.order.tolist() == order
    assert_same_steps(plain, ours, *args)


def unlike(self: Any, x: Tensor) -> Tensor:
    x = self.layer(x)
    with torch.autocast("cpu", enabled=False):
        return torch.tanh(self.b(torch.tanh(self.b(x.float()))))


def tied(self: Any, index: Tensor) -> Tensor:
    """Weights that are used twice and in two precisions: under autocast each is cast once."""
    return F.linear(torch.tanh(self.a(torch.tanh(self.a(self.table(index))))), self.table.weight)


def wide() -> nn.Module:
    """Each direction casts the input, so that the input's gradients are added in float32; in one direction and two."""

    def function(self: Any, x: Tensor) -> list[Tensor]:
        return [torch.tanh(layer(gain * x)[0]) for layer, gain in zip(self.layers, self.gains, strict=True)]

    kinds = (nn.GRU, True), (nn.GRU, False), (nn.RNN, True), (nn.RNN, False)
    layers = [kind(8, 16, 2, batch_first=True, dropout=0.5, bidirectional=both) for kind, both in kinds]
    gains = nn.ParameterList(torch.randn(8) for _ in kinds)
    return Applies(function, 0, gains=gains, layers=nn.ModuleList(layers))


def slopes(self: Any, x: Tensor) -> Tensor:
    """The gradient of `rrelu` has the layout of its draws, so sums behind it add in another order."""
    x = F.rrelu(self.a(x).transpose(0, 1), training=True).transpose(0, 1)
    return F.rrelu(self.b(x).transpose(0, 1), training=True, inplace=True).transpose(0, 1)


def unusual(self: Any, x: Tensor) -> list[Tensor]:
    """Draws in another layout, and operators that are traced by another formula than eager mode uses."""
    x = torch.tanh(self.net(x))
    for mode in ("nearest", "bilinear", "bicubic"):
        x = torch.tanh(F.interpolate(x, scale_factor=1.3, mode=mode))
    x = F.softshrink(F.interpolate(x.flatten(2), scale_factor=1.2, mode="linear"))
    return [F.dropout(x, p) for p in (0.04, 0.15, 0.5, 0.97, 1.0)]


def drawing() -> nn.Module:
    layers = nn.Conv2d(3, 8, 3), nn.Dropout(0.15), nn.Tanh(), nn.Conv2d(8, 2, 3), nn.AlphaDropout(0.15)
    return Applies(unusual, 0, net=channels_last(nn.Sequential(*layers)))


def odd(self: Any, x: Tensor, y: Tensor, *, scale: float = 1.0) -> dict[str, Any]:
    """Shared weights, a keyword, several outputs: no tensor, a view, an input among them."""
    h = torch.relu(self.a(torch.tanh(self.a(torch.tanh(self.a(x))))))
    small = self.b(h * torch.sigmoid(self.a(y)))
    return {"small": small * scale, "list": [small[:, :4], y], "n": 3, "none": None}


def of_odd(out: dict[str, Any]) -> Tensor:
    assert (out["n"], out["none"]) == (3, None)
    return out["small"].sum() + out["list"][0].square().sum() + out["list"][1].sum()


def drifting(self: Any, x: Tensor) -> Tensor:
    """Buffers are read before and after they change, as a whole and in parts."""
    level, (mean, deviation) = self.level.clone(), self.levels.unbind(0)
    x = torch.tanh(self.a(x) * level - mean) + deviation.exp()
    x = torch.tanh(self.b(torch.tanh(self.b(x) * self.level.clone())) - mean)
    for buffer in (self.level, self.levels):
        buffer.mul_(0.9)
    return (self.a(x) * self.level.clone()).sum(1)


def redrawn(self: Any, x: Tensor) -> Tensor:
    """A buffer that is read and then drawn anew, before other draws."""
    x = torch.tanh(self.a(x * self.noise))
    self.noise.normal_()
    return F.dropout(self.b(x), 0.5)


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
    "channels_last": lambda: (channels_last(Net()), (channels_last(*images()).requires_grad_(),), 0.75, {}),
    "frozen layers": lambda: (frozen(), images(), 0.75, {}),
    "odd": lambda: (
        Applies(odd, 64), (*rows(256, 64), *rows(256, 64)), 0.8, {"loss_of": of_odd, "kwargs": {"scale": 2.0}}
    ),
    "drifting": lambda: (
        Applies(drifting, 64, level=torch.ones(64), levels=torch.rand(2, 64)), rows(512, 64), 0.9, {}
    ),
    "redrawn": lambda: (Applies(redrawn, 64, noise=torch.ones(64)), rows(256, 64), "1GB", {}),
    "autocast": lambda: (Net(), images(), 0.75, AUTOCAST),
    "autocast tied": lambda: (
        Applies(tied, 64, table=nn.Embedding(10, 64)), (torch.randint(0, 10, (128,)),), 0.95, AUTOCAST
    ),
    "autocast unlike": lambda: (
        Applies(unlike, 32, layer=nn.TransformerEncoderLayer(32, 2, 64, 0.1, batch_first=True)), rows(4, 8, 32), 0.99,
        AUTOCAST,
    ),
    "autocast LSTM": lambda: (recurrent(), rows(4, 7, 8), "100MB", AUTOCAST),
    "autocast GRU and RNN": lambda: (wide(), rows(4, 7, 8), "100MB", AUTOCAST | {"loss_of": of_all}),
    "drawing": lambda: (drawing(), (channels_last(*rows(4, 3, 16, 16)),), 0.99, {"loss_of": of_all}),
    "slopes": lambda: (Applies(slopes), rows(174, 16), 0.99, {"loss_of": lambda y: y.pow(3).sum()}),
}  # fmt: skip


@pytest.mark.parametrize("name", SITUATIONS)
def test_a_situation_has_the_plain_bits(name: str) -> None:
    model, args, budget, options = SITUATIONS[name]()
    ours = check(model, args, budget, **options)
    assert ours.plan.recomputed or name not in RECOMPUTES


KINDS = [(nn.GRU, {}), (nn.LSTM, {}), (nn.LSTM, {"proj_size": 8}), (nn.RNN, {}), (nn.RNN, {"nonlinearity": "relu"})]


def test_recurrent_layers_of_each_kind_in_each_layout() -> None:
    """Kernels depend on layouts and gradients; a layer of each kind, in one direction and in two, side by side."""
    layers = nn.ModuleList(
        kind(16, 16, bidirectional=both, batch_first=(i + both) % 2 == 0, **own)
        for i, (kind, own) in enumerate(KINDS)
        for both in (False, True)
    )
    plain, (x,) = Applies(lambda self, x: [layer(x) for layer in self.layers], 0, layers=layers), rows(2, 8, 16)
    ours = rematerialize(copy.deepcopy(plain), (x,), "100MB")
    for training in (True, False):
        assert_same_steps(plain.train(training), ours.train(training), x, loss_of=of_all)


def test_recurrent_layers_may_be_frozen_or_run_without_gradients() -> None:
    def mixed(self: Any, x: Tensor) -> list[Tensor]:
        made: list[Tensor] = []
        for trained, frozen, apart in self.layers:
            with torch.no_grad():
                made.append(apart(x)[0] + frozen(x)[0])
            made += [self.b(frozen(trained(x)[0])[0]), self.b(frozen(made[-1])[0])]
        return made

    layers = nn.ModuleList(
        nn.ModuleList(kind(16, 16, num_layers=2, batch_first=True) for _ in range(3)) for kind in (nn.GRU, nn.LSTM)
    )
    for _, frozen, _ in layers:  # pyright: ignore[reportGeneralTypeIssues]
        frozen.requires_grad_(False)
    check(Applies(mixed, layers=layers), rows(2, 8, 16), "100MB", of_all)


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


@pytest.mark.parametrize(("optimizer", "copied"), [(None, False), ("adam", False), (None, True)])
def test_an_optimizer_that_was_not_counted_is_told_of(optimizer: Any, copied: bool) -> None:
    x = torch.randn(64, 512)
    ours = rematerialize(nn.Sequential(nn.Linear(512, 512), nn.Tanh(), nn.Linear(512, 512)), (x,), optimizer=optimizer)
    ours = copy.deepcopy(ours) if copied else ours
    adam = torch.optim.Adam(ours.parameters())
    messages = said(lambda: [(step(ours, (x,)), adam.step()) for _ in range(2)], "Adam holds")
    assert ["optimizer=optimizer" in message for message in messages] == ([] if optimizer else [True])


class Summing(torch.optim.Optimizer):
    """Keeps a number of its own, and the sum of all gradients."""

    def __init__(self, parameters: Any):
        super().__init__(parameters, {"lr": 0.1})
        self.times = 2

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for p in self.param_groups[0]["params"]:
            self.state[p].setdefault("sum", torch.zeros_like(p)).add_(p.grad, alpha=self.times)


def test_an_ordinary_loop() -> None:
    """Accumulation, two forwards and one backward, retain_graph, eval, no_grad, a smaller last batch, clipping."""
    x = torch.randn(IMAGES)
    plain, ours = both(Net(12, 2), (x,), 0.85)
    for size in (8, 5, 8):
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
    model, (x,) = Net(), images()
    ours = rematerialize(model, (x,), 0.75)
    assert list(ours.state_dict()) == list(model.state_dict())
    assert all(a is b for a, b in zip(ours.parameters(), model.parameters(), strict=True))
    assert [name for name, _ in ours.named_modules()][1:] == [name for name, _ in model.named_modules()][1:]
    ours.load_state_dict(other := Net().state_dict())
    assert torch.equal(model.head.weight, other["head.weight"])
    assert ours.drop.p == 0.1
    with pytest.raises(AttributeError, match="nothing"):
        _ = ours.nothing
    with pytest.raises(TypeError, match="save its state_dict"):
        ours.__reduce__()
    twin = copy.deepcopy(ours)
    assert twin.head.weight is not model.head.weight
    assert_same_steps(twin, ours, x)


def test_what_is_set_on_it_reaches_the_model() -> None:
    (x,) = rows(8, 64)
    ours = rematerialize(Applies(lambda self, x: torch.tanh(self.a(x)) * self.scale, 64, scale=1.0), (x,))
    before = ours(x)
    ours.scale = 3.0
    assert ours.model.scale == 3.0
    assert torch.equal(ours(x), before * 3)
    ours.model.a.register_forward_hook(lambda _module, _args, output: output * 0)
    assert not ours(x).any()


def test_batch_norms_in_checkpoints_move_once_which_is_said() -> None:
    """PyTorch moves their statistics in each of both runs."""
    layers = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Tanh())
    model, x = Applies(lambda self, x: checkpoint(self.layers, x, use_reentrant=False), layers=layers), rows(4, 8)[0]
    (message,) = said(lambda: step(rematerialize(model, (x,)), (x,)), "move their statistics once")
    assert "torch.utils.checkpoint" in message
    assert layers[1].num_batches_tracked == 1
    norms = Applies(lambda self, x: self.norm(checkpoint(self.a, x, use_reentrant=False)), 8, norm=nn.BatchNorm1d(8))
    assert not said(lambda: check(norms, (x,), "1GB"), "statistics")


def test_state_that_is_no_tensor_and_hooks_on_state_are_the_models_own() -> None:
    class Counts(nn.Linear):
        n = 1

        def get_extra_state(self) -> Any:
            return self.n

        def set_extra_state(self, state: Any) -> None:
            self.n = state

    model, seen = Counts(4, 4), list[str]()
    whole = nn.Sequential(rematerialize(model, rows(2, 4)))
    whole[0].register_state_dict_post_hook(lambda *_: seen.append("saved"))
    whole[0].register_load_state_dict_post_hook(lambda *_: seen.append("loaded"))
    state, model.n = whole.state_dict(), 5
    whole.load_state_dict(state)
    assert model.n == 1
    whole[0].load_state_dict(whole[0].state_dict())
    assert seen == ["saved", "loaded"] * 2


def test_a_pass_that_failed_leaves_buffers_alone_and_nothing_to_the_next() -> None:
    def function(self: Any, x: Tensor, index: Tensor) -> Tensor:
        return self.net(x) + self.table(index)

    x, good = torch.randn(IMAGES), torch.zeros(8, dtype=torch.long)
    ours = rematerialize(Applies(function, net=Net(), table=nn.Embedding(4, 10)), (x, good), 0.75)
    before = {name: t.clone() for name, t in ours.state_dict().items()}
    with pytest.raises(IndexError):
        ours(x, good + 100)
    assert all(torch.equal(t, before[name]) for name, t in ours.state_dict().items())
    halves = Applies(lambda self, x: (self.a(x).tanh(), self.b(x).tanh()), 4)
    loss = rematerialize(halves, rows(2, 4))(*rows(2, 4))[0].sum()
    loss.backward()
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()
    assert_same_steps(copy.deepcopy(ours.model), ours, x, good)


def test_what_the_loss_does_not_depend_on_gets_no_gradient_and_adds_nothing() -> None:
    """Zero times an infinite derivative would be NaN: rows of squares and their roots, and halves of them, joined."""

    def function(self: Any, x: Tensor) -> tuple[Tensor, ...]:
        h = F.linear(x, self.a.weight).square()
        left, right = h.split(2, 1)
        return self.count(h).sum(1), h.sqrt(), left.exp(), right.sqrt()

    x, plain = torch.randn(8, 4), Applies(function, 4, count=nn.BatchNorm1d(4))
    x[0] = 0
    ours = rematerialize(copy.deepcopy(plain), (x,))
    for used in ((0,), (2,), (0, 2), (1,), (0, 1, 2, 3)):
        plain.zero_grad(), ours.zero_grad()
        theirs, mine = (
            step(each, (x,), lambda outputs, used=used: torch.stack([outputs[i].sum() for i in used]).sum())
            for each in (plain, ours)
        )
        assert theirs.keys() == mine.keys()  # `step` leaves out gradients that are None
        for name, value in theirs.items():
            assert torch.equal(value.nan_to_num(-1), mine[name].nan_to_num(-1)), (used, name)
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
    plain, ours = both(
        Applies(lambda self, batch: Made(*in_a_tuple(self, batch.x, batch.scale))), (Batch(x.to("meta")),)
    )
    assert ours.plan.plain_peak_bytes == rematerialize(Applies(in_a_tuple), (x, 2.0), 1.0).plan.plain_peak_bytes
    assert_same_steps(plain, ours, Batch(x), loss_of=lambda made: made.tanh.sum())
    with pytest.raises(remat.InvalidInput, match="create_graph=True"):
        torch.autograd.grad(ours(Batch(x)).tanh.sum(), [*ours.parameters()], create_graph=True, allow_unused=True)


def test_a_step_that_writes_in_place_has_the_plain_bits_and_the_same_fingerprint_again() -> None:
    def function(self: Any, x: Tensor) -> Tensor:
        x = torch.tanh(self.a(x)) * 1
        x[::2] *= 2
        return squares(torch.tanh(self.a(x)))

    (x,) = rows(64, 64)
    plain, ours = both(Applies(function, 64), (x,))
    assert_same_steps(plain, ours, x, loss_of=Tensor.clone)
    assert ours.prepare((x,)) == (ours.plan,)
    again = rt.rematerialize(Applies(function, 64), (x,), plan=ours.plan)
    assert again.plan.order.tolist() == ours.plan.order.tolist()


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


# --- bytes


def measured(ours: rt.Rematerialized, model: nn.Module, args: tuple[Any, ...]) -> int:
    """Bytes that a step of `model` holds at most: what is there before, and what the allocator adds."""
    there = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in (*model.state_dict().values(), *args)}
    assert sum(there.values()) == there_before(ours.plan)
    return needs(ours, args, model)


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
    return Applies(lambda self, x: squares(self.net(x)), net=Net(16, 4))


def test_a_promised_budget_is_kept_and_predicted() -> None:
    args = rows(8, 3, 32, 32)
    model = large()
    plain = copy.deepcopy(model)
    ours = rematerialize(model, args, 0.6)
    needed, peak = measured(ours, plain, args), measured(ours, ours, args)
    assert ours.plan.plain_peak_bytes == pytest.approx(needed, rel=0.01)
    assert ours.budget_bytes == pytest.approx(0.6 * needed, rel=0.01)
    assert peak <= ours.budget_bytes
    assert peak == pytest.approx(ours.predicted_peak_bytes, rel=0.02)
    most = rematerialize(large(), args).predicted_peak_bytes
    ours = rematerialize(large(), args, most)  # filled to the byte
    assert measured(ours, ours, args) <= most


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


def test_a_recurrent_network_is_measured_and_not_run_to_be_planned(tmp_path: Path) -> None:
    calls: list[int] = []
    model, own = nn.LSTM(16, 16), {"time_limit_s": 1, "cache_folder": tmp_path}
    model.register_forward_pre_hook(lambda *_: calls.append(1) if not torch.compiler.is_compiling() else None)
    assert not said(lambda: rt.rematerialize(model, rows(4, 5, 16), "10MB", **own), "not measured")  # pyright: ignore
    assert calls == []


def test_what_else_is_resident_counts() -> None:
    args, model = images(), Net(n=2)
    trained, n = sum(p.numel() * 4 for p in model.parameters()), len(list(model.parameters()))
    bare = rematerialize(model, args, 1.0).plan
    adam = torch.optim.AdamW(model.parameters())
    counted = 2 * trained + 4 * n  # Adam counts its steps

    def compare(bytes_: int, **options: Any) -> None:
        plan = rematerialize(model, args, 1.0, **options).plan
        assert plan.graph.fixed_bytes - bare.graph.fixed_bytes == bytes_
        assert plan.plain_peak_bytes - bare.plain_peak_bytes == bytes_

    for optimizer, state in (
        (adam, counted), ("adam", 2 * trained), ("sgd", 0), ("1MB", 10**6), (Summing(model.parameters()), trained),
    ):  # fmt: skip
        compare(state, optimizer=optimizer)
    step(model, args)
    adam.step()
    compare(counted, optimizer=adam)
    compare(trained, accumulate=True)


# --- plans that are given


SAVED = """
import sys, torch
sys.path.insert(0, sys.argv[1])
import remat.torch as rt
from torch_helpers import IMAGES, Net
model = rt.rematerialize(Net(8, 2, 0.0), (torch.randn(IMAGES),), plan=sys.argv[2])
model(torch.randn(IMAGES)).sum().backward()
solvers = [name for name in sys.modules if name.split('.')[0] in ('ortools', 'highspy', 'cvxpy', 'hydra', 'pandas')]
print(model.predicted_peak_bytes, model.budget_bytes, len(model.plan.order), *sorted(solvers))
"""


def test_a_plan_is_followed_without_a_solve(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain, (x,), path = Net(8, 2, 0.0), images(), tmp_path / "plan.json"
    planned = rematerialize(copy.deepcopy(plain), (x,), 0.9)
    planned.plan.save(path)
    printed = run_python(SAVED, str(Path(__file__).parent), str(path), cwd=tmp_path)
    expected = [planned.predicted_peak_bytes, planned.budget_bytes, len(planned.plan.order)]
    assert printed.split() == [*map(str, expected)]
    monkeypatch.setattr("remat.torch.planning.eager.find_plan", None)
    module = rt.follow(copy.deepcopy(plain), (x,), path)
    assert module.plan.recomputed == planned.plan.recomputed
    assert_same_steps(plain, module, x)


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
    model, args = Net(8, 1), images()
    ours = rematerialize(model, args)
    path, other = tmp_path / "plan.json", tmp_path / "other.json"
    ours.plan.save(path)
    for other_model, x, why, plan in (
        (Net(8, 1), torch.randn(7, 3, 32, 32), "made for inputs float32", path),
        (Net(9, 1), args[0], "made for another model", ours.plan),
        (Net(8, 1).eval(), args[0], "made for another model", path),
    ):
        with pytest.raises(remat.InvalidPlan, match=why) as error:
            rt.follow(other_model, (x,), plan)
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
            rt.rematerialize(copy.deepcopy(model), args, plan=other)
    peak, more = ours.predicted_peak_bytes, "above the budget it was made for, .*optimizer state 2.00 GB"
    for budget, options, why in (
        (peak - 1, {"plan": path}, "above the budget of"), (None, {"plan": path, "optimizer": 2 * 10**9}, more),
        (None, {"plan": ours.plan.plan}, r"plan must be the \.plan of a module"),
    ):  # fmt: skip
        with refused(why):
            rt.rematerialize(copy.deepcopy(model), args, budget, **options)
    beside = rt.rematerialize(copy.deepcopy(model), args, peak + 10, plan=ours.plan)
    shorter = torch.randn(7, *args[0].shape[1:])
    assert beside.prepare((shorter,))[0].budget_bytes == beside.budget_bytes == peak + 10


def overlapping(self: Any, x: Tensor, y: Tensor) -> Tensor:
    z = torch.tanh(self.a(x.clone()))
    y.mul_(0.5)
    return torch.tanh(self.a(z)) + y.sum() + x.sin()


def test_bad_input_gets_one_line() -> None:
    x, model = torch.randn(2, 64), nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64))
    sparse = nn.Sequential(nn.Embedding(10, 64, sparse=True), model)
    frozen = copy.deepcopy(model).requires_grad_(False)
    for message, of, args, budget, options in (
        ("must be a tuple", model, x, 0.5, {}),
        ("give a budget", model, (x,), None, {}),
        ("above 0 and at most 1", model, (x,), 0.0, {}),
        ("unknown backend 'eagr'; did you mean eager", model, (x,), 0.5, {"backend": "eagr"}),
        ("unknown optimizer 'adm'; did you mean", model, (x,), 0.5, {"optimizer": "adm"}),
        ("nothing in the model needs a gradient", frozen, (x,), 0.5, {}),
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
def test_the_example_trains_and_learns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "examples"))
    import torch_loop

    losses = torch_loop.main(steps=12)
    assert losses[-1] < losses[0]


DDP = """
import sys, torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
sys.path.insert(0, sys.argv[1])
from torch_helpers import assert_same_steps, both, images, Net
rank = int(sys.argv[2])
dist.init_process_group("gloo", init_method="file://" + sys.argv[3], rank=rank, world_size=2)
torch.manual_seed(0)
model = Net(8, 2, 0.0)
torch.manual_seed(rank)
(x,) = images()
plain, ours = both(model, (x,), 0.9)
assert ours.plan.recomputed
plain, ours = DistributedDataParallel(plain), DistributedDataParallel(ours)
assert_same_steps(plain, ours, x, n=2)
gradient = next(p.grad for p in ours.parameters() if p.grad is not None)
others = [torch.empty_like(gradient) for _ in range(2)]
dist.all_gather(others, gradient)
assert torch.equal(*others)
print("equal on", rank)
dist.destroy_process_group()
"""


def test_distributed_data_parallel_on_two_processes(tmp_path: Path) -> None:
    command = [sys.executable, "-c", DDP, str(Path(__file__).parent)]
    given: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    runs = [subprocess.Popen([*command, str(rank), str(tmp_path / "meeting")], **given) for rank in range(2)]
    for rank, run in enumerate(runs):
        out, errors = run.communicate(timeout=300)
        assert run.returncode == 0, errors[-2000:]
        assert f"equal on {rank}" in out
