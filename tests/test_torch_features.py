"""Returned tensors that the module also uses: their gradients are the plain step's, or refused."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from helpers import refused
from torch import Tensor, nn
from torch_helpers import MARKS, Applies, both, gradients, said

pytestmark = MARKS
REFUSED = r"tensor that the module returns or stores, and also uses, .* use \.model"


def features(self: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    h = torch.tanh(self.a(x))
    return self.b(torch.sigmoid(h)).sum(), h


def beside(self: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    """The feature that is returned is not the one that is used."""
    y, h = features(self, x)
    return y, h * 2


def detached(self: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    h = torch.tanh(self.a(x))
    return self.b(x).sum() + h.detach().sum(), h


def of(function: Callable[..., Any], x: Tensor | None = None) -> tuple[Any, Any, Tensor]:
    """(the plain model, the same under a plan, an argument)"""
    x = torch.randn(8, 16) if x is None else x
    return *both(Applies(function), (x,)), x


def gradient(how: str, model: nn.Module, x: Tensor) -> Any:
    """Somebody reads a gradient, of the feature if nothing else is said."""
    y, h = model(x)
    seen: list[Tensor] = []
    both_used = y + h.square().sum()
    if how == "hooked":
        h.register_hook(seen.append)
        both_used.backward()
        return seen[0]
    if how == "asked for":
        return torch.autograd.grad(y, h)[0]
    if how == "asked for also":
        return torch.autograd.grad(both_used, h)[0]
    if how == "of weights":
        return torch.autograd.grad(both_used, model.a.weight)[0]
    of = h[:2] if how == "of a view" else h
    of.retain_grad()
    if how == "input of backward":
        y.backward(inputs=[h])
    elif how == "only feature":
        h.square().sum().backward()
    else:
        (y + of.square().sum()).backward()
    return of.grad


def test_whoever_reads_the_gradient_of_a_used_feature_is_refused() -> None:
    plain, ours, x = of(features)
    for how in ("retained", "hooked", "asked for", "asked for also", "input of backward"):
        assert gradient(how, plain, x) is not None
        with refused(REFUSED):
            gradient(how, ours, x)


@pytest.mark.parametrize(
    ("function", "readers"),
    [
        (beside, ("retained", "hooked")), (detached, ("retained", "hooked")),
        (features, ("only feature", "of a view", "of weights")),  # gradients that come from outside alone
    ],
)  # fmt: skip
def test_other_gradients_are_those_of_the_plain_step(function: Callable[..., Any], readers: Any) -> None:
    plain, ours, x = of(function)
    for how in readers:
        assert torch.equal(gradient(how, plain, x), gradient(how, ours, x))


def test_an_argument_that_comes_back_keeps_its_whole_gradient() -> None:
    """A conversion that changes nothing returns its argument."""

    def returns(self: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        h = x.float()
        return self.b(torch.tanh(self.a(h))).sum(), h

    plain, ours, _ = of(returns)
    for x in (torch.randn(8, 16, requires_grad=True), torch.randn(8, 16, requires_grad=True) * 2):
        for _ in range(2):
            assert torch.equal(gradient("asked for also", plain, x), gradient("asked for also", ours, x))


def test_a_feature_that_a_hook_stores_is_refused_too() -> None:
    plain, x, stored = Applies(features), torch.randn(8, 16), list[Tensor]()
    plain.a.register_forward_hook(lambda _module, _args, h: stored.append(h))
    for model in both(plain, (x,)):
        stored.clear()
        y, _ = model(x)
        stored[0].retain_grad()
        with nullcontext() if model is plain else refused(REFUSED):
            y.backward()
            assert stored[0].grad is not None


def compare(plain: nn.Module, ours: nn.Module, x: Tensor, loss: Callable[[Any], Tensor]) -> list[Tensor]:
    """The gradients of parameters, which are those of the plain model."""
    theirs, mine = (gradients(each, lambda m: loss(m(x))) for each in (plain, ours))
    assert len(theirs) == len(mine)
    assert all(map(torch.equal, theirs, mine))
    return mine


def test_a_gradient_asked_for_together_with_those_of_parameters_is_said_to_be_incomplete() -> None:
    plain, ours, x = of(features)

    def asked(model: nn.Module, *more: str) -> Any:
        y, h = model(x)
        wanted = [h, *model.parameters()] if more else [*model.parameters()]
        return torch.autograd.grad(y + h.square().sum(), wanted)

    assert not said(lambda: asked(ours))
    assert said(lambda: asked(ours, "h"), "gives only the part from outside")
    assert all(map(torch.equal, asked(plain, "h")[1:], asked(ours, "h")[1:]))


def of_an_error(self: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    error = self.b(torch.tanh(self.a(x))).square().mean()
    return error, error.exp()


def hidden(self: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    h = torch.tanh(self.a(x))
    return self.b(h), h


def turned(self: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    """The gradient of the hidden tensor is transposed in memory if it comes from the first output alone."""
    h = self.a(x)
    return self.b(h.transpose(1, 2)), h * 1


@pytest.mark.parametrize(
    ("function", "loss", "sizes"),
    [
        (of_an_error, lambda out: out[0] + out[1], (8, 16)),  # the loss's own gradient
        (hidden, lambda out: (out[0] + out[1]).square().sum(), (8, 16)),  # one that flows into two outputs
        (turned, lambda out: out[0].square().sum(), (4, 16, 16)),  # one that is missing
    ],
)
def test_gradients_that_nobody_asks_for_are_the_plain_ones_without_a_word(
    function: Callable[..., Any], loss: Callable[[Any], Tensor], sizes: tuple[int, ...]
) -> None:
    plain, ours, x = of(function, torch.randn(sizes))
    assert not said(lambda: compare(plain, ours, x, loss))


def test_gradients_of_a_feature_and_a_view_of_it_are_said_to_be_added_in_another_order() -> None:
    def and_view(self: Any, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        h = torch.tanh(self.a(x))
        part = h[:, ::2]
        return self.b(torch.sigmoid(part).repeat(1, 2)).sum(), h, part

    def of_one(outputs: tuple[Tensor, ...]) -> Tensor:
        return outputs[0] + outputs[1].square().sum()

    def of_both(outputs: tuple[Tensor, ...]) -> Tensor:
        return of_one(outputs) + outputs[2].exp().sum()

    plain, ours, x = of(and_view)
    assert not said(lambda: compare(plain, ours, x, of_one))
    found: list[list[Tensor]] = []
    told = said(lambda: found.extend(gradients(ours, lambda m: of_both(m(x))) for _ in range(2)))
    assert ["same memory" in text for text in told] == [True]  # once is enough
    for one, other in zip(gradients(plain, lambda m: of_both(m(x))), found[1], strict=True):
        torch.testing.assert_close(one, other)


def test_gradients_of_a_part_of_a_returned_view_are_refused_to_its_readers_and_reach_its_base() -> None:
    """Gradients that are missing must not stop those of a hidden tensor of which the outputs are views."""

    def and_part(self: Any, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        g = torch.tanh(self.a(x))
        h = self.b(g).view(4, 32)
        return h, h[:1], g.view(-1)

    def read(model: nn.Module) -> Any:
        h, part, _ = model(x)
        h.retain_grad()
        part.square().sum().backward()
        return h.grad

    plain, ours, x = of(and_part)
    assert read(plain) is not None
    with refused(REFUSED):
        read(ours)
    assert len(compare(plain, ours, x, lambda outputs: outputs[1].square().sum())) == 4


@pytest.mark.parametrize("rows", [4, 8])
def test_a_detached_twin_of_a_returned_view_is_the_plain_models(rows: int) -> None:
    """AOT autograd transposes it twice, which shows in its shape or, of a square, in its values alone."""

    def remembers(self: Any, x: Tensor) -> Tensor:
        h = torch.tanh(self.a(x)).exp()
        self.kept = [h.transpose(0, 1).detach(), h.detach().transpose(0, 1), h.transpose(0, 1).data]
        return h.transpose(0, 1)

    plain, ours, x = of(remembers, torch.randn(rows, 4, 16))
    assert len(compare(plain, ours, x, lambda output: output.square().sum())) == 2  # the other layer is not used
    assert all(map(torch.equal, plain.kept, ours.kept))
    assert not any(h.requires_grad for h in ours.kept)
