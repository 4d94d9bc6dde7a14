"""Plans executed in PyTorch against PyTorch's own step: what it computes bit for bit, what it holds in bytes."""

from __future__ import annotations

import contextlib
import copy
import json
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from orders import random_order

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402
from torch.nn import functional as F  # noqa: E402
from torch_helpers import IMAGES, Net, squares  # noqa: E402

import remat  # noqa: E402
import remat.torch as rt  # noqa: E402
from remat.execution import Fingerprint  # noqa: E402
from remat.plan import Plan  # noqa: E402
from remat.torch.measuring.measure import peak_of_step  # noqa: E402
from remat.torch.measuring.plain import calls_graph, plain_step  # noqa: E402
from remat.torch.networks.diffusion_unet import diffusion_unet  # noqa: E402
from remat.torch.networks.t5 import t5  # noqa: E402
from remat.torch.networks.transformer import gpt2  # noqa: E402
from remat.torch.planning.planner import there_before  # noqa: E402

Context = Callable[[], contextlib.AbstractContextManager[Any]]
pytestmark = pytest.mark.usefixtures("warm_search", "torch_cache", "torch_seed")


@pytest.fixture(autouse=True, scope="module")
def _quiet() -> Iterator[None]:
    """How busy the machine was does not matter."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", remat.cost.CostWarning)
        yield


def rematerialize(model: nn.Module, args: tuple[Any, ...], budget: Any = 0.75, **options: Any) -> rt.Rematerialized:
    options = {"cost": "flops", "time_limit_s": 0.6, "strategy": "search"} | options
    return rt.rematerialize(model, args, budget, **options)


def step(
    model: nn.Module, args: tuple[Any, ...], loss_of: Any = squares, seed: int = 0,
    context: Context = contextlib.nullcontext, **kwargs: Any,
) -> dict[str, torch.Tensor]:  # fmt: skip
    """Everything that a step leaves behind; gradients are added to those that are there."""
    torch.manual_seed(seed)
    with context():
        loss = loss_of(model(*args, **kwargs))
    loss.backward()
    left = {"loss": loss.detach(), "random state": torch.get_rng_state()}
    left |= {f"gradient of {name}": p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return left | {f"buffer {name}": b.clone() for name, b in model.named_buffers()}


def assert_same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert one.keys() == other.keys()
    assert [name for name in one if not torch.equal(one[name], other[name])] == []


def check(model: nn.Module, args: tuple[Any, ...], budget: Any = 0.75, loss_of: Any = squares,
          context: Context = contextlib.nullcontext, kwargs: dict[str, Any] | None = None, **options: Any,
          ) -> rt.Rematerialized:  # fmt: skip
    """Two steps of the plain model and of the rematerialized one leave the same behind, bit for bit."""
    plain, kwargs = copy.deepcopy(model), kwargs or {}
    with context():
        ours = rematerialize(model, args, budget, sample_kwargs=kwargs, **options)
    for seed in range(2):
        plain.zero_grad()
        ours.zero_grad()
        assert_same(
            step(plain, args, loss_of, seed, context, **kwargs), step(ours, args, loss_of, seed, context, **kwargs)
        )
    return ours


@pytest.mark.short
def test_a_network_with_batch_norm_dropout_and_in_place_operations() -> None:
    ours = check(Net(), (torch.randn(IMAGES),), 0.55)
    kinds = {op.name: op.kind for op in ours.plan.graph.operations}
    again = {kinds[name] for name in ours.plan.recomputed}
    assert ours.predicted_peak_bytes <= ours.budget_bytes < ours.plan.plain_peak_bytes
    assert ours.overhead > 0
    assert "aten._native_batch_norm_legit_functional" in again  # statistics would move twice


def test_calls_of_the_plain_step_that_only_give_a_view_are_not_measured() -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(12, 3), nn.ReLU(inplace=True))
    plain = plain_step(model, (torch.randn(2, 3, 4),), {})
    kinds = {op.kind for op in calls_graph("step", plain.signatures).operations}
    assert {"aten.addmm", "aten.relu_", "aten.mm"} <= kinds
    assert kinds.isdisjoint({"aten.view", "aten._unsafe_view", "aten.t", "aten.detach", "prim.device"})
    assert len(plain.signatures) == len(plain.held_bytes) > sum(map(bool, plain.signatures))


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("kind", ["net", "gpt2", "recurrent"])
def test_random_valid_plans_are_bit_identical(kind: str, seed: int) -> None:
    if kind == "net":
        model, args, loss_of = Net(), (torch.randn(IMAGES),), squares
    elif kind == "gpt2":
        model, _ = gpt2(2, length=16, vocabulary=50, context=16, width=32, n_layers=2, n_heads=2, dropout=0.1)
        args, loss_of = tuple(torch.randint(0, 50, (2, 2, 16))), torch.Tensor.sum
    else:
        model, args, loss_of = Recurrent(nn.LSTM, dropout=0.5), (torch.randn(4, 7, 8),), squares
    plain = copy.deepcopy(model)
    made = rematerialize(model, args, 1.0).plan
    order = random_order(made.graph, np.random.default_rng(seed), 0.05)
    assert len(order) > len(made.graph) + 2
    plan = remat.execution.StepPlan(
        Plan.from_order(made.graph, order), made.graph, made.fingerprint, "random", None, None, made.fixed, made.costs
    )
    ours = rt.rematerialize(model, args, plan=plan)
    assert ours.plan.order.tolist() == order
    assert_same(step(plain, args, loss_of, seed), step(ours, args, loss_of, seed))


class Recurrent(nn.Module):
    def __init__(self, layer: type[nn.Module], **options: Any):
        super().__init__()
        self.embed, self.layer = nn.Linear(8, 8), layer(8, 16, num_layers=2, batch_first=True, **options)
        self.head = nn.Linear(options.get("proj_size", 32 if options.get("bidirectional") else 16), 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.layer(torch.tanh(self.embed(x)))[0]))


def test_a_tiny_t5() -> None:
    model, _ = t5(vocabulary=50, width=32, hidden=48, n_layers=2, n_heads=2)
    ids, (targets, labels) = torch.randint(0, 50, (2, 16)), torch.randint(0, 50, (2, 2, 12))
    ours = check(model, (ids, targets, labels), 0.8, torch.Tensor.sum)
    assert ours.plan.recomputed


def test_a_tiny_diffusion_unet() -> None:
    model, (x, _, noise) = diffusion_unet(2, (3, 16, 16), width=16, multipliers=(1, 2), attention=(8,), n_heads=2)
    args = torch.randn_like(x), torch.randint(0, 1000, (2,)), torch.randn_like(noise)
    ours = check(model, args, 0.8, torch.Tensor.sum)
    assert ours.plan.recomputed


@pytest.mark.parametrize(
    ("layer", "options"),
    [
        (nn.LSTM, {"dropout": 0.5}), (nn.LSTM, {"bidirectional": True}), (nn.LSTM, {"proj_size": 8}),
        (nn.GRU, {"dropout": 0.5, "bidirectional": True}), (nn.RNN, {"nonlinearity": "relu"}),
    ],
)  # fmt: skip
def test_recurrent_layers_run_their_native_kernels(layer: type[nn.Module], options: dict[str, Any]) -> None:
    ours = check(Recurrent(layer, **options), (torch.randn(4, 7, 8),), "100MB")
    kinds = [op.kind for op in ours.plan.graph.operations]
    assert kinds.count("remat.recurrent") == kinds.count("remat.recurrent_backward") == 2  # layers


def test_modes_of_training() -> None:
    x = torch.randn(IMAGES)
    check(Net().to(memory_format=torch.channels_last), (x.to(memory_format=torch.channels_last),))
    frozen = Net()
    for part in (frozen.convs[0], frozen.norms[1]):
        part.requires_grad_(False)
    ours = check(frozen, (x,))
    assert frozen.convs[0].weight.grad is None
    assert ours.convs[0].weight is frozen.convs[0].weight
    check(Net(dropout=0.0), (x.clone().requires_grad_(),))


class Tied(nn.Module):
    """Weights that are used twice and in two precisions: under autocast each is cast once."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.layer, self.head = nn.Embedding(10, 64), nn.Linear(64, 64), nn.Linear(64, 10, bias=False)
        self.head.weight = self.table.weight

    def forward(self, index: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.layer(torch.tanh(self.layer(self.table(index))))))


@pytest.mark.parametrize("kind", ["net", "gpt2", "tied"])
def test_autocast(kind: str) -> None:
    def autocast() -> torch.autocast:
        return torch.autocast("cpu", dtype=torch.bfloat16)

    if kind == "net":
        check(Net(), (torch.randn(IMAGES),), context=autocast)
    elif kind == "tied":
        check(Tied(), (torch.randint(0, 10, (128,)),), 0.95, context=autocast)
    else:
        model, _ = gpt2(2, length=16, vocabulary=50, context=16, width=32, n_layers=2, n_heads=2, dropout=0.1)
        check(model, tuple(torch.randint(0, 50, (2, 2, 16))), 0.9, torch.Tensor.float, autocast)


def test_operators_that_are_traced_by_another_formula_than_eager_mode_uses() -> None:
    class Resizes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(3, 4, 3, padding=1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.conv(x)
            for mode in ("nearest", "bilinear", "bicubic"):
                x = torch.tanh(F.interpolate(x, scale_factor=1.3, mode=mode))
            return F.softshrink(F.interpolate(x.flatten(2), scale_factor=1.2, mode="linear"))

    check(Resizes(), (torch.randn(2, 3, 16, 16),), 0.95)


def test_what_is_drawn_does_not_depend_on_the_memory_layout() -> None:
    x = torch.randn(4, 3, 16, 16).to(memory_format=torch.channels_last)
    for drop in (nn.Dropout(0.15), nn.AlphaDropout(0.15)):
        model = nn.Sequential(nn.Conv2d(3, 8, 3), drop, nn.Tanh(), nn.Conv2d(8, 2, 3)).to(
            memory_format=torch.channels_last
        )
        check(model, (x,), 0.99)


@pytest.mark.parametrize("in_place", [False, True])
def test_random_slopes_lay_gradients_out_as_eager_mode(in_place: bool) -> None:
    """The gradient of `rrelu` has the layout of its draws, so sums behind it add in another order."""

    class Slopes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 16)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.layer(x).transpose(0, 1)
            return F.rrelu(y, training=True, inplace=in_place).transpose(0, 1)

    check(Slopes(), (torch.randn(174, 8),), 0.99, lambda y: y.pow(3).sum())


def bfloat16() -> torch.autocast:
    return torch.autocast("cpu", dtype=torch.bfloat16)


class Unlike(nn.Module):
    """A region without autocast in a model that is trained with it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.head = nn.TransformerEncoderLayer(32, 2, 64, 0.1, batch_first=True), nn.Linear(32, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.layer(x)
        with torch.autocast("cpu", enabled=False):
            return torch.tanh(self.head(torch.tanh(self.head(x.float()))))


def test_autocast_of_parts_and_of_recurrent_layers() -> None:
    check(Unlike(), (torch.randn(4, 8, 32),), 0.99, context=bfloat16)
    check(Recurrent(nn.LSTM, dropout=0.5), (torch.randn(4, 7, 8),), "100MB", context=bfloat16)


@pytest.mark.parametrize("layer", [nn.GRU, nn.RNN])
@pytest.mark.parametrize("bidirectional", [False, True])
def test_autocast_of_a_recurrent_layer_on_a_wide_input(layer: type[nn.Module], bidirectional: bool) -> None:
    """Each direction casts the input, so that the input's gradients are added in float32."""

    class Wide(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gain = nn.Parameter(torch.randn(8))
            self.layer = layer(8, 16, num_layers=2, batch_first=True, bidirectional=bidirectional)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.tanh(self.layer(self.gain * x)[0])

    check(Wide(), (torch.randn(4, 7, 8),), "100MB", context=bfloat16)


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
    latest = list(ours._planner.plans.values())[-1]
    assert latest.fixed["optimizer state"] > 3 * before
    with pytest.warns(UserWarning, match="gradients are held from an earlier step"):
        step(ours, (x,))


def test_an_optimizer_that_was_not_counted_is_told_of() -> None:
    model = nn.Sequential(nn.Linear(512, 512), nn.Tanh(), nn.Linear(512, 512))
    x = torch.randn(64, 512)
    for optimizer, told, copied in ((None, 1, False), ("adam", 0, False), (None, 1, True)):
        ours = rematerialize(model, (x,), "1GB", optimizer=optimizer)
        ours = copy.deepcopy(ours) if copied else ours
        adam = torch.optim.Adam(ours.parameters())
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for _ in range(2):
                step(ours, (x,))
                adam.step()
        messages = [str(w.message) for w in caught if "Adam holds" in str(w.message)]
        assert len(messages) == told
        assert all("optimizer=optimizer" in message for message in messages)


def test_an_ordinary_loop() -> None:
    """Accumulation, two forwards and one backward, retain_graph, eval, no_grad, a smaller last batch, clipping."""
    x = torch.randn(IMAGES)
    ours = check(Net(), (x,))
    plain = copy.deepcopy(ours.model)
    for model in (plain, ours):
        model.zero_grad()
    for size in (8, 5, 3, 5):
        assert_same(step(plain, (x[:size],), seed=size), step(ours, (x[:size],), seed=size))

    assert_same(step(Twice(plain), (x,)), step(Twice(ours), (x,)))
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


class Twice(nn.Module):
    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.model(x) + self.model(2 * x)


def test_it_is_the_model_in_every_other_respect() -> None:
    model = Net()
    ours = rematerialize(model, (torch.randn(IMAGES),))
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
    x = torch.randn(IMAGES)
    assert_same(step(twin, (x,)), step(ours, (x,)))


def test_twenty_steps_give_the_same_losses() -> None:
    x, y = torch.randn(IMAGES), torch.randint(0, 10, (8,))
    plain = Net()
    ours = rematerialize(copy.deepcopy(plain), (x,))
    losses = []
    for model in (plain, ours):
        torch.manual_seed(0)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
        losses.append([])
        for _ in range(20):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            losses[-1].append(loss.item())
    assert losses[0] == losses[1]
    assert losses[0][-1] < losses[0][0]


class Scaled(torch.autograd.Function):
    """A gradient that no automatic differentiation would give."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x.clamp(min=0) * 2

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        (x,) = ctx.saved_tensors
        return gradient * (x > 0) * 3


class Odd(nn.Module):
    """Custom gradient, shared weights, a keyword, several outputs: no tensor, a view, an input among them."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(64, 64), nn.Linear(64, 8)

    def forward(self, x: torch.Tensor, y: torch.Tensor, *, scale: float = 1.0) -> dict[str, Any]:
        h = Scaled.apply(self.a(torch.tanh(self.a(torch.tanh(self.a(x))))))
        small = self.b(h * torch.sigmoid(self.a(y)))
        return {"small": small * scale, "list": [small[:, :4], y], "n": 3, "none": None}


def test_custom_gradients_shared_weights_and_structures() -> None:
    def loss_of(out: dict[str, Any]) -> torch.Tensor:
        assert (out["n"], out["none"]) == (3, None)
        return out["small"].sum() + out["list"][0].square().sum() + out["list"][1].sum()

    ours = check(Odd(), (torch.randn(256, 64), torch.randn(256, 64)), 0.8, loss_of, kwargs={"scale": 2.0})
    assert ours.plan.recomputed


class Drifting(nn.Module):
    """A buffer that is read before and after it changes, forward and backward."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(64, 64)
        self.register_buffer("level", torch.ones(64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        level = self.level.clone()
        x = torch.tanh(self.a(torch.tanh(self.a(x) * level)) * self.level.clone())
        self.level.mul_(0.9)
        return (self.a(x) * self.level.clone()).sum(1)


def test_buffers_that_are_read_and_overwritten() -> None:
    check(Drifting(), (torch.randn(256, 64),), 0.9)
    spectral = nn.utils.parametrizations.spectral_norm(nn.Linear(64, 64))
    check(nn.Sequential(spectral, nn.Tanh(), spectral, nn.Tanh(), nn.Linear(64, 1)), (torch.randn(256, 64),), 0.97)


class Halves(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.a(x).tanh(), self.b(x).tanh()


def test_a_backward_pass_that_failed_leaves_nothing_to_the_next() -> None:
    x, net = torch.randn(2, 4), nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Tanh())
    first, second = rematerialize(Halves(), (x,), "1GB"), rematerialize(net, (x,), "1GB")
    loss = first(x)[0].sum()
    loss.backward()
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()
    assert_same(step(copy.deepcopy(net), (x,)), step(second, (x,)))
    assert net[0].weight.grad is not None


class Applies(nn.Module):
    """Two layers, a buffer, and a function of them."""

    def __init__(self, function: Callable[..., Any]):
        super().__init__()
        self.a, self.b, self.function = nn.Linear(64, 64), nn.Linear(64, 64), function
        self.register_buffer("levels", torch.rand(2, 64))
        self.scale = 1.0

    def forward(self, x: torch.Tensor) -> Any:
        return self.function(self, x)


def test_parts_of_a_buffer_that_is_overwritten_are_read_before() -> None:
    def function(self: Applies, x: torch.Tensor) -> torch.Tensor:
        mean, deviation = self.levels.unbind(0)
        x = torch.tanh(self.a(x) - mean) + deviation.exp()
        x = torch.tanh(self.b(torch.tanh(self.b(x))) - mean)
        self.levels.mul_(0.9)
        return squares(self.b(x))

    check(Applies(function), (torch.randn(512, 64),), 0.7, torch.Tensor.clone)


def test_an_output_may_be_a_view_of_what_was_written_through_a_view() -> None:
    def function(self: Applies, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = torch.sin(self.a(x)) + 0
        x[2] = 0.0
        return x, x[1]

    check(Applies(function), (torch.randn(8, 64),), "1GB", lambda out: out[0].sum() + out[1].square().sum())


def test_what_the_loss_does_not_depend_on_gets_no_gradient() -> None:
    def function(self: Applies, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        first, both = torch.tanh(self.a(x)), torch.tanh(self.b(torch.tanh(self.a(x))))
        return first, both, both[:2]

    x = torch.randn(8, 64)
    plain = Applies(function)
    ours = rematerialize(copy.deepcopy(plain), (x,), "1GB")
    for used in ((0,), (1,), (2,), (0, 2), (0, 1, 2)):
        for model in (plain, ours):
            model.zero_grad()
            outputs = model(x)
            sum(squares(outputs[i]) for i in used).backward()
        for (name, p), q in zip(plain.named_parameters(), ours.parameters(), strict=True):
            assert (p.grad is None) == (q.grad is None), (used, name)
            assert p.grad is None or torch.equal(p.grad, q.grad), (used, name)
    assert plain.b.weight.grad is not None


class Norms(nn.Module):
    """Rows of squares and their roots, which have no derivative at 0; and halves of them, joined."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.count = nn.Linear(4, 4, bias=False), nn.BatchNorm1d(4)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        h = self.a(x).square()
        left, right = h.split(2, 1)
        return self.count(h).sum(1), h.sqrt(), left.exp(), right.sqrt()


@pytest.mark.parametrize("used", [(0,), (2,), (0, 2), (1,), (0, 1, 2, 3)])
def test_what_the_loss_does_not_depend_on_adds_nothing(used: tuple[int, ...]) -> None:
    """Zero times an infinite derivative would be NaN."""
    x = torch.randn(8, 4)
    x[0] = 0

    def loss_of(outputs: tuple[torch.Tensor, ...]) -> torch.Tensor:
        return torch.stack([outputs[i].sum() for i in used]).sum()

    plain = Norms()
    ours = rematerialize(copy.deepcopy(plain), (x,), "1GB")
    theirs, mine = step(plain, (x,), loss_of), step(ours, (x,), loss_of)
    for name, value in theirs.items():
        assert torch.equal(value.nan_to_num(-1), mine[name].nan_to_num(-1)), name
        assert bool(value.isnan().any()) == (name == "gradient of a.weight" and 1 in used)


def test_the_same_step_has_the_same_fingerprint_again() -> None:
    def function(self: Applies, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.a(x)) * 1
        x[::2] *= 2
        return squares(torch.tanh(self.a(x)))

    x = torch.randn(64, 64)
    ours = rematerialize(Applies(function), (x,), "1GB")
    ours(x).backward()
    assert len(ours._planner.plans) == 1
    assert rt.rematerialize(Applies(function), (x,), plan=ours.plan).plan.order.tolist() == ours.plan.order.tolist()


@pytest.mark.parametrize("p", [0.04, 0.15, 0.5, 0.97, 1.0])
def test_dropout_rounds_as_in_eager_mode(p: float) -> None:
    check(
        nn.Sequential(nn.Linear(16, 16), nn.Dropout(p), nn.Linear(16, 16), nn.Dropout(0.5)),
        (torch.randn(8, 16),),
        "1GB",
    )


def test_what_is_set_on_it_reaches_the_model() -> None:
    x = torch.randn(8, 64)
    ours = rematerialize(Applies(lambda self, x: torch.tanh(self.a(x)) * self.scale), (x,), "1GB")
    before = ours(x)
    ours.scale = 3.0
    assert ours.model.scale == 3.0
    assert torch.equal(ours(x), before * 3)
    ours.model.a.register_forward_hook(lambda _module, _args, output: output * 0)
    assert not ours(x).any()
    row = rematerialize(nn.Sequential(nn.Linear(4, 4), nn.Tanh()), (torch.randn(2, 4),), "1GB")
    assert (len(row), bool(row), isinstance(row[1], nn.Tanh), len(list(row))) == (2, True, True, 2)
    with pytest.raises(TypeError, match="save its state_dict"):
        ours.__reduce__()


def test_a_plan_is_followed_without_a_solve(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain, x = Net(dropout=0.0), torch.randn(IMAGES)
    planned = rematerialize(copy.deepcopy(plain), (x,), 0.7)
    planned.plan.save(tmp_path / "plan.json")
    monkeypatch.setattr("remat.torch.planning.eager.find_plan", None)
    for plan in (planned.plan, tmp_path / "plan.json"):
        module = rt.follow(copy.deepcopy(plain), (x,), plan)
        assert module.plan.recomputed == planned.plan.recomputed
        for each in (plain, module):
            each.zero_grad()
            squares(each(x)).backward()
        assert all(torch.equal(p.grad, q.grad) for p, q in zip(plain.parameters(), module.parameters(), strict=True))
    with pytest.raises(remat.InvalidInput, match="was made for inputs"):
        rt.follow(nn.Sequential(nn.Linear(4, 4)), (torch.randn(2, 4),), planned.plan)


def test_hooks_for_all_modules_see_the_calls_of_the_plain_model() -> None:
    plain, x, seen = nn.Sequential(nn.Linear(8, 8), nn.Tanh()), torch.randn(4, 8), list[str]()
    ours = rematerialize(copy.deepcopy(plain), (x,), "1GB")

    def hook(module: nn.Module, _args: object, output: torch.Tensor) -> torch.Tensor:
        seen.append(type(module).__name__)
        return output * 1.1

    handle = nn.modules.module.register_module_forward_hook(hook)
    try:
        theirs, mine = plain(x), ours(x)
    finally:
        handle.remove()
    assert torch.equal(theirs, mine)
    assert seen == ["Linear", "Tanh", "Sequential"] * 2


def test_an_exception_inside_the_step_leaves_buffers_alone() -> None:
    class Fails(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net, self.table = Net(), nn.Embedding(4, 10)

        def forward(self, x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
            return self.net(x) + self.table(index)

    x, good = torch.randn(IMAGES), torch.zeros(8, dtype=torch.long)
    ours = rematerialize(Fails(), (x, good))
    before = {name: t.clone() for name, t in ours.state_dict().items()}
    with pytest.raises(IndexError):
        ours(x, good + 100)
    assert all(torch.equal(t, before[name]) for name, t in ours.state_dict().items())
    plain = copy.deepcopy(ours.model)
    assert_same(step(plain, (x, good)), step(ours, (x, good)))


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


class Wide(nn.Module):
    """Large activations on few parameters, and a scalar at the end."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Net(16, 8, 0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return squares(self.net(x))


@pytest.mark.parametrize("share", [0.9, pytest.param(0.6, marks=pytest.mark.slow), 0.45])
def test_a_promised_budget_is_kept_and_predicted(share: float) -> None:
    args = (torch.randn(16, 3, 48, 48),)
    model = Wide()
    plain = copy.deepcopy(model)
    ours = rematerialize(model, args, share, strategy="portfolio", time_limit_s=15)
    needs = measured(ours, plain, args)
    assert ours.plan.plain_peak_bytes == pytest.approx(needs, rel=0.01)
    assert ours.budget_bytes == pytest.approx(share * needs, rel=0.01)
    peak = measured(ours, ours, args)
    assert peak <= ours.budget_bytes
    assert peak == pytest.approx(ours.predicted_peak_bytes, rel=0.02)


class Awkward(nn.Module):
    """Gradients that PyTorch copies when it accumulates them: one for two parameters, an expanded one, a layout."""

    def __init__(self) -> None:
        super().__init__()
        self.p, self.q, self.r = (nn.Parameter(torch.randn(300, 300)) for _ in range(3))
        self.t = nn.Parameter(torch.randn(4, 300, 60).transpose(1, 2))
        self.conv = nn.Conv2d(60, 60, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.tanh(x @ (self.p + self.q)) + self.r.sum()
        z = torch.bmm(self.t, y.view(4, 300, 4)).reshape(1, 60, 4, 4).contiguous(memory_format=torch.channels_last)
        return self.conv(z).square().sum()


def test_gradients_that_are_copied_are_counted() -> None:
    args = (torch.randn(16, 300),)
    ours = check(Awkward(), args, "100MB", torch.Tensor.sum)
    assert 1.0 <= ours.predicted_peak_bytes / measured(ours, ours, args) <= 1.001


def test_the_gradient_of_a_part_is_as_large_as_the_part() -> None:
    """Of the first step of a sequence, as classifiers return; the strides of its gradient have no holes either."""

    class First(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(32, 64), nn.Linear(64, 32)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.b(torch.tanh(self.a(x)))[:, 0]

    args = (torch.randn(8, 40, 32),)
    ours = check(First(), args, 0.99, lambda y: y.square().sum())
    needs, plain = (
        there_before(ours.plan) + peak_of_step(model, args, {}, "cpu") for model in (ours, copy.deepcopy(ours.model))
    )
    assert needs <= ours.budget_bytes < plain
    assert needs == pytest.approx(ours.predicted_peak_bytes, rel=0.02)


def test_the_state_of_random_numbers_counts_only_where_it_is_read() -> None:
    """A step so small that the 5 kB of a state are most of it; nothing is drawn again."""

    class Small(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return squares(torch.tanh(F.dropout(self.layer(x))))

    args = (torch.randn(16, 8),)
    ours = check(Small(), args, "1MB", torch.Tensor.sum)
    assert measured(ours, ours, args) == pytest.approx(ours.predicted_peak_bytes, rel=0.02)


def test_the_loss_and_what_starts_the_backward_pass_are_counted() -> None:
    """A plan that fills its budget to the byte, of a module that returns the loss; large outputs and a loss outside."""
    x = torch.randn(16, 3, 48, 48)
    most = rematerialize(Wide(), (x,), "1GB").predicted_peak_bytes
    ours = rematerialize(Wide(), (x,), most)
    assert measured(ours, ours, (x,)) <= most

    layers = [nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.Tanh()) for _ in range(6)]
    x, target = torch.randn(8, 8, 64, 64), torch.randint(0, 8, (8, 64, 64))
    for loss, tightness in ((None, 0.8), (lambda out: F.cross_entropy(out, target), 0.99)):
        ours = rematerialize(nn.Sequential(*layers), (x,), 0.85, verify=True, loss=loss)
        assert ours.measured_peak_bytes is not None
        assert ours.measured_peak_bytes <= ours.budget_bytes

        def run(ours: rt.Rematerialized = ours) -> None:
            outputs = ours(x)
            F.cross_entropy(outputs, target).backward()

        run()
        ours.zero_grad()
        assert tightness <= (there_before(ours.plan) + rt.measured_peak(run)) / ours.predicted_peak_bytes <= 1.0


def test_a_recurrent_network_is_not_run_to_be_planned() -> None:
    calls: list[int] = []
    model, x = Recurrent(nn.LSTM), torch.randn(4, 7, 8)
    model.register_forward_pre_hook(lambda *_: calls.append(1) if not torch.compiler.is_compiling() else None)
    ours = rematerialize(model, (x,), "100MB")
    assert calls == []
    assert ours.plan.plain_peak_bytes is None


def test_what_else_is_resident_counts() -> None:
    args = (torch.randn(IMAGES),)
    model = Net()
    trained = sum(p.numel() * 4 for p in model.parameters())
    bare = rematerialize(model, args, 1.0)
    adam = torch.optim.AdamW(model.parameters())
    for optimizer, state in ((adam, 2 * trained), ("adam", 2 * trained), ("sgd", 0), (12345, 12345), ("1MB", 10**6)):
        ours = rematerialize(model, args, 1.0, optimizer=optimizer)
        steps = 4 * len(list(model.parameters())) if optimizer is adam else 0  # Adam counts its steps
        assert ours.plan.graph.fixed_bytes - bare.plan.graph.fixed_bytes == state + steps
        assert ours.plan.plain_peak_bytes - bare.plan.plain_peak_bytes == state + steps
    step(model, args)
    adam.step()
    again = rematerialize(model, args, 1.0, optimizer=adam)
    assert again.plan.graph.fixed_bytes - bare.plan.graph.fixed_bytes == 2 * trained + 4 * len(list(model.parameters()))
    more = rematerialize(model, args, 1.0, accumulate=True)
    assert more.plan.graph.fixed_bytes - bare.plan.graph.fixed_bytes == trained


def test_a_saved_plan_needs_no_solver(tmp_path: Path) -> None:
    args = (torch.randn(IMAGES),)
    ours = rematerialize(Net(), args)
    path = tmp_path / "plan.json"
    ours.plan.save(path)
    code = f"""
import sys, torch
sys.path.insert(0, {str(Path(__file__).parent)!r})
import remat.torch as rt
from torch_helpers import IMAGES, Net
model = rt.rematerialize(Net(), (torch.randn(IMAGES),), plan={str(path)!r})
model(torch.randn(IMAGES)).sum().backward()
print(model.predicted_peak_bytes, model.budget_bytes, len(model.plan.order))
print(*sorted(name for name in sys.modules if name.split('.')[0] in ('ortools', 'highspy', 'cvxpy', 'hydra', 'pandas')))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=tmp_path)
    numbers, solvers = (
        done.stdout.splitlines()[-2:] if done.stdout.endswith("\n\n") else (*done.stdout.splitlines(), "")[:2]
    )
    assert numbers.split() == [str(ours.predicted_peak_bytes), str(ours.budget_bytes), str(len(ours.plan.order))]
    assert solvers == ""


@pytest.mark.slow
def test_a_budget_beside_a_plan_is_what_is_promised(tmp_path: Path) -> None:
    args = (torch.randn(IMAGES),)
    made = rematerialize(Net(), args)
    peak = made.predicted_peak_bytes
    ours = rt.rematerialize(Net(), args, peak + 10, plan=made.plan)
    assert ours.budget_bytes == peak + 10
    step(ours, (torch.randn(7, 3, 32, 32),))  # planned when it occurs
    assert {plan.budget_bytes for plan in ours._planner.plans.values()} == {peak + 10}
    with pytest.raises(remat.InvalidInput, match="above the budget of"):
        rt.rematerialize(Net(), args, peak - 1, plan=made.plan)
    made.plan.save(tmp_path / "plan.json")
    with pytest.raises(remat.InvalidInput, match=r"above the budget it was made for, .*optimizer state 2.00 GB"):
        rt.rematerialize(Net(), args, plan=tmp_path / "plan.json", optimizer=2 * 10**9)
    with pytest.raises(remat.InvalidInput, match=r"plan must be the \.plan of a module"):
        rt.rematerialize(Net(), args, plan=made.plan.plan)  # pyright: ignore[reportArgumentType]


def test_where_nothing_is_compiled_nothing_runs() -> None:
    x = torch.randn(IMAGES)
    ours = rematerialize(Net(), (x,))
    before = {name: b.clone() for name, b in ours.named_buffers()}
    for context, says in (
        (torch.compiler.set_stance("force_eager"), "set_stance"),
        (torch.utils.flop_counter.FlopCounterMode(display=False), "FlopCounterMode"),
        (torch._dynamo.config.patch(disable=True), "TORCHDYNAMO_DISABLE"),
    ):
        with context, pytest.raises(remat.InvalidInput, match=says):
            ours(x)
        with context, pytest.raises(remat.InvalidInput, match=says):
            rematerialize(Net(), (x,))
    assert all(torch.equal(b, before[name]) for name, b in ours.named_buffers())


def test_a_plan_for_something_else_is_refused_with_both_fingerprints(tmp_path: Path) -> None:
    args = (torch.randn(IMAGES),)
    ours = rematerialize(Net(), args)
    path = tmp_path / "plan.json"
    ours.plan.save(path)

    def refused(model: nn.Module, x: torch.Tensor, why: str, plan: Any = path) -> None:
        with pytest.raises(remat.InvalidPlan, match=why) as error:
            rt.rematerialize(model, (x,), plan=plan)
        assert str(ours.plan.fingerprint) in str(error.value)
        assert str(error.value).count("torch 2") >= 2

    refused(Net(), torch.randn(7, 3, 32, 32), "made for inputs float32")
    refused(Net(width=16), args[0], "made for another model")
    refused(Net(width=16), args[0], "made for another model", ours.plan)
    refused(Net().eval(), args[0], "made for another model")
    document = json.loads(path.read_text())
    document["execution"]["version"] = "2.0.0"
    other = tmp_path / "other.json"
    other.write_text(json.dumps(document))
    with pytest.raises(remat.InvalidPlan, match=r"made for torch 2\.0\.0, this is"):
        rt.rematerialize(Net(), args, plan=other)
    for broken in ({"operation_costs": [1]}, {"workspace_bytes": None}):
        other.write_text(json.dumps(json.loads(path.read_text()) | {"execution": document["execution"] | broken | {
            "version": ours.plan.fingerprint.version}}))  # fmt: skip
        with pytest.raises(remat.InvalidPlan, match=f"{next(iter(broken))}' must be"):
            rt.rematerialize(Net(), args, plan=other)
    other.write_text(json.dumps({key: value for key, value in document.items() if key != "execution"}))
    with pytest.raises(remat.InvalidPlan, match="no 'execution' section"):
        rt.rematerialize(Net(), args, plan=other)
    with pytest.raises(ValueError, match="above the budget"):
        rt.rematerialize(Net(), args, "1MB", plan=path)


def test_the_plan_reads_well() -> None:
    ours = rematerialize(Net(), (torch.randn(IMAGES),))
    text = str(ours.plan)
    assert text.startswith(
        f"Net: {len(ours.plan.graph)} operations, {len(ours.plan.recomputed)} of them computed again ("
    )
    assert f"float32{list(IMAGES)}" in text
    for said in ("budget", "predicted peak", "of the plain step's", "always there", "overhead", "computed again"):
        assert said in text
    assert isinstance(ours.plan.fingerprint, Fingerprint)


class Overlaps(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(32, 32)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        z = torch.tanh(self.a(x.clone()))
        y.mul_(0.5)
        return torch.tanh(self.a(z)) + y.sum() + x.sin()


def test_bad_input_gets_one_line() -> None:
    x = torch.randn(2, 64)
    model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64))

    class Branches(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * 2 if x.sum() > 0 else x

    for message, build in {
        "must be a tuple": lambda: rt.rematerialize(model, x, 0.5),  # pyright: ignore[reportArgumentType]
        "give a budget": lambda: rt.rematerialize(model, (x,)),
        "above 0 and at most 1": lambda: rt.rematerialize(model, (x,), 0.0),
        "cannot read '8QB'": lambda: rt.rematerialize(model, (x,), "8QB"),
        "unknown backend 'eagr'; did you mean eager": lambda: rt.rematerialize(model, (x,), 0.5, backend="eagr"),
        "unknown cost model": lambda: rt.rematerialize(model, (x,), 0.5, cost="flop"),
        "unknown optimizer 'adm'; did you mean": lambda: rt.rematerialize(model, (x,), 0.5, optimizer="adm"),
        "nothing in the model needs a gradient": lambda: rt.rematerialize(
            copy.deepcopy(model).requires_grad_(False), (x,), 0.5
        ),
        "does not compile into one graph": lambda: rt.rematerialize(nn.Sequential(Branches(), model), (x,), 0.5),
        "Data-dependent branching": lambda: rt.rematerialize(nn.Sequential(Branches(), model), (x,), 0.5),
        "does not take these arguments: .*same reduction dim": lambda: rt.rematerialize(model, (x[:, :3],), 0.5),
        r"Sequential.forward\(input\) does not take these arguments: too many": lambda: rt.rematerialize(
            model, (x, x), 0.5
        ),
        "makes a sparse tensor": lambda: rt.rematerialize(
            nn.Sequential(nn.Embedding(10, 64, sparse=True), model), (torch.arange(5),), "1GB"
        ),
        "gpu='h200' is of cost='roofline'": lambda: rt.rematerialize(model, (x,), 0.5, gpu="h200"),
        "rematerialized already": lambda: rt.rematerialize(rematerialize(model, (x,), 1.0), (x,), 0.5),
        "no plan of 'Sequential' within 1.00 kB": lambda: rt.rematerialize(model, (x,), "1kB"),
        "arguments that overlap": lambda: rt.rematerialize(Overlaps(), (x[0, :32], x[0, 16:48]), "1GB"),
    }.items():
        with pytest.raises(ValueError, match=message) as error:
            build()
        assert "\n" not in str(error.value)


@pytest.mark.slow
def test_inductor_is_near_and_verified() -> None:
    """To 1e-4 of the largest gradient; the measured peak is within the budget because it is verified."""
    args = (torch.randn(IMAGES),)
    model = Net(8, 2, dropout=0.0)
    plain = copy.deepcopy(model)
    ours = rematerialize(model, args, 0.9, backend="inductor", verify=True)
    assert ours.measured_peak_bytes is not None
    assert ours.measured_peak_bytes <= ours.budget_bytes
    assert all(p.grad is None for p in ours.parameters())
    assert all(torch.equal(a, b) for a, b in zip(plain.buffers(), ours.buffers(), strict=True))
    theirs, mine = step(plain, args), step(ours, args)
    largest = max(t.abs().max().item() for name, t in theirs.items() if name.startswith("gradient"))
    for name in theirs:
        if name != "random state":
            assert torch.allclose(theirs[name], mine[name], rtol=1e-4, atol=1e-4 * largest), name
    assert ours.plan.recomputed


@pytest.mark.slow
def test_the_example_trains_and_learns() -> None:
    sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
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
ours = rt.rematerialize(model, (x,), 0.7, cost="flops", time_limit_s=30)
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
    """Gradients averaged over two gloo processes equal those of plain DDP, bit for bit."""
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
