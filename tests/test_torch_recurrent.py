"""Recurrent layers under a plan against PyTorch's own, bit for bit: their kernels depend on layouts and gradients."""

from __future__ import annotations

import copy
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

import remat.torch as rt  # noqa: E402

KINDS = [
    (nn.GRU, {}), (nn.LSTM, {}), (nn.LSTM, {"proj_size": 8}), (nn.RNN, {}), (nn.RNN, {"nonlinearity": "relu"}),
]  # fmt: skip
pytestmark = pytest.mark.usefixtures("warm_search", "torch_cache", "torch_seed")


class Layers(nn.Module):
    """A layer of each kind, in one direction and in two, side by side."""

    def __init__(self, **options: Any):
        super().__init__()
        self.layers = nn.ModuleList(
            kind(16, 16, bidirectional=both, **own, **options) for kind, own in KINDS for both in (False, True)
        )

    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        return [y for layer in self.layers for y in self._parts(layer(x))]

    def _parts(self, made: Any) -> list[torch.Tensor]:
        output, states = made
        return [output, *(states if isinstance(states, tuple) else (states,))]


def results(model: nn.Module, x: torch.Tensor) -> list[Any]:
    """Outputs, loss and gradients of a step."""
    model.zero_grad()
    outputs = model(x)
    loss = torch.stack([y.square().mean() for y in outputs if y.requires_grad]).sum()
    loss.backward()
    return [*outputs, loss, *(p.grad for p in model.parameters())]


def assert_same(model: nn.Module, x: torch.Tensor, *, evaluates: bool = False) -> None:
    plain = copy.deepcopy(model)
    ours = rt.rematerialize(model, (x,), "100MB", cost="flops", time_limit_s=0.5, strategy="search")
    for training in (True, False) if evaluates else (True,):
        theirs, mine = results(plain.train(training), x), results(ours.train(training), x)
        assert len(theirs) == len(mine)
        unlike = [
            i for i, (a, b) in enumerate(zip(theirs, mine, strict=True))
            if (a is None) != (b is None) or (a is not None and not torch.equal(a, b))
        ]  # fmt: skip
        assert unlike == []


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("batch", [2, *(pytest.param(n, marks=pytest.mark.slow) for n in (1, 3, 4, 5, 6, 7, 8))])
def test_every_layer_at_every_batch_and_layout(batch: int, batch_first: bool) -> None:
    shape = (batch, 8, 16) if batch_first else (8, batch, 16)
    assert_same(Layers(batch_first=batch_first), torch.randn(shape), evaluates=batch == 2)


class Mixed(nn.Module):
    """Layers of which some are frozen, and some run without gradients."""

    def __init__(self, kind: type[nn.Module]):
        super().__init__()
        self.trained, self.frozen, self.apart = (kind(16, 16, num_layers=2, batch_first=True) for _ in range(3))
        self.frozen.requires_grad_(False)
        self.end = nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        with torch.no_grad():
            before = self.apart(x)[0] + self.frozen(x)[0]
        return [self.end(self.frozen(self.trained(x)[0])[0]), self.end(self.frozen(before)[0]), before]


@pytest.mark.parametrize("kind", [nn.GRU, nn.LSTM])
def test_frozen_layers_and_layers_without_gradients(kind: type[nn.Module]) -> None:
    assert_same(Mixed(kind), torch.randn(2, 8, 16))
