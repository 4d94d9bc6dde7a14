"""Returned tensors that the module also uses: their gradients are the plain step's, or refused."""

from __future__ import annotations

import copy
import pickle
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import Tensor, nn  # noqa: E402

import remat.torch as rt  # noqa: E402
from remat.errors import InvalidInput  # noqa: E402

pytestmark = pytest.mark.usefixtures("warm_search", "torch_cache", "torch_seed")


REFUSED = r"tensor that the module returns or stores, and also uses, .* use \.model"


class Features(nn.Module):
    """(what is made of a feature, the feature in some form)"""

    def __init__(self, form: Callable[[Tensor], Tensor] = lambda h: h):
        super().__init__()
        self.a, self.b, self.form = nn.Linear(16, 16), nn.Linear(16, 4), form

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = self.form(torch.tanh(self.a(x)))
        return self.b(torch.sigmoid(h)).sum(), h


class Beside(Features):
    """The feature that is returned is not the one that is used."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y, h = super().forward(x)
        return y, h * 2


class Detached(Features):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = torch.tanh(self.a(x))
        return self.b(x).sum() + h.detach().sum(), h


def both(plain: nn.Module) -> tuple[nn.Module, rt.Rematerialized]:
    model, x = copy.deepcopy(plain), torch.randn(8, 16)
    return plain, rt.rematerialize(model, (x,), "1GB", cost="flops", time_limit_s=0.5, strategy="search")


def retained(_model: nn.Module, y: Tensor, h: Tensor) -> Any:
    h.retain_grad()
    (y + h.square().sum()).backward()
    return h.grad


def hooked(_model: nn.Module, y: Tensor, h: Tensor) -> Any:
    seen: list[Tensor] = []
    h.register_hook(seen.append)
    (y + h.square().sum()).backward()
    return seen[0]


def hooked_and_dropped(_model: nn.Module, y: Tensor, h: Tensor) -> Any:
    seen: list[Tensor] = []
    h.register_hook(seen.append)
    del h
    y.backward()
    return seen[0]


def asked_for(_model: nn.Module, y: Tensor, h: Tensor) -> Any:
    return torch.autograd.grad(y, h)[0]


def asked_for_also(_model: nn.Module, y: Tensor, h: Tensor) -> Any:
    return torch.autograd.grad(y + h.square().sum(), h)[0]


def input_of_backward(_model: nn.Module, y: Tensor, h: Tensor) -> Any:
    y.backward(inputs=[h])
    return h.grad


READERS = (retained, hooked, hooked_and_dropped, asked_for, asked_for_also, input_of_backward)


@pytest.mark.parametrize("form", [lambda h: h, lambda h: h.view(4, 32)[:, :16]], ids=["itself", "a view"])
def test_whoever_reads_the_gradient_of_a_used_feature_is_refused(form: Callable[[Tensor], Tensor]) -> None:
    plain, ours = both(Features(form))
    x = torch.randn(8, 16)
    for read in READERS:
        assert read(plain, *plain(x)) is not None
        with pytest.raises(InvalidInput, match=REFUSED):
            read(ours, *ours(x))


@pytest.mark.parametrize("kind", [Beside, Detached])
def test_gradients_of_other_features_are_those_of_the_plain_step(kind: type[Features]) -> None:
    plain, ours = both(kind())
    x = torch.randn(8, 16)
    for read in (retained, hooked, asked_for_also):
        assert torch.equal(read(plain, *plain(x)), read(ours, *ours(x)))


def test_gradients_that_come_from_outside_alone_are_those_of_the_plain_step() -> None:
    def only_feature(_model: nn.Module, _y: Tensor, h: Tensor) -> Any:
        h.retain_grad()
        h.square().sum().backward()
        return h.grad

    def of_a_view(_model: nn.Module, y: Tensor, h: Tensor) -> Any:
        part = h[:2]
        part.retain_grad()
        (y + part.square().sum()).backward()
        return part.grad

    def of_weights(model: nn.Module, y: Tensor, h: Tensor) -> Any:
        return torch.autograd.grad(y + h.square().sum(), model.a.weight)[0]

    def twice(model: nn.Module, y: Tensor, h: Tensor) -> Any:
        model.zero_grad()
        y.backward(retain_graph=True)
        h.retain_grad()
        h.square().sum().backward()
        return torch.cat([h.grad.flatten(), model.a.weight.grad.flatten()])

    plain, ours = both(Features())
    x = torch.randn(8, 16)
    for read in (only_feature, of_a_view, of_weights, twice):
        assert torch.equal(read(plain, *plain(x)), read(ours, *ours(x)))


def test_an_argument_that_comes_back_keeps_its_whole_gradient() -> None:
    """A conversion that changes nothing returns its argument."""

    class Returns(Features):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            h = x.float()
            return self.b(torch.tanh(self.a(h))).sum(), h

    plain, ours = both(Returns())
    for x in (torch.randn(8, 16, requires_grad=True), torch.randn(8, 16, requires_grad=True) * 2):
        for _ in range(2):
            assert torch.equal(asked_for_also(plain, *plain(x)), asked_for_also(ours, *ours(x)))


def test_a_feature_that_a_hook_stores_is_refused_too() -> None:
    plain = Features()
    stored: list[Tensor] = []
    plain.a.register_forward_hook(lambda _module, _args, h: stored.append(h))
    for model in both(plain):
        stored.clear()
        y, _ = model(torch.randn(8, 16))
        stored[0].retain_grad()
        with nullcontext() if model is plain else pytest.raises(InvalidInput, match=REFUSED):
            y.backward()
            assert stored[0].grad is not None


@pytest.mark.filterwarnings("error")
def test_features_can_be_pickled() -> None:
    _, ours = both(Features())
    _, h = ours(torch.randn(8, 16))
    assert torch.equal(pickle.loads(pickle.dumps(h)), h)


def gradients(model: nn.Module, loss: Callable[[Any], Tensor], x: Tensor) -> list[Any]:
    """Of the parameters, for a loss of the module's outputs."""
    model.zero_grad()
    loss(model(x)).backward()
    return [p.grad for p in model.parameters()]


def _said(of: Callable[[], Any]) -> list[str]:
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        of()
    return [str(each.message) for each in told]


def test_a_gradient_asked_for_together_with_those_of_parameters_is_said_to_be_incomplete() -> None:
    plain, ours = both(Features())
    x = torch.randn(8, 16)

    def asked(model: nn.Module, *more: str) -> Any:
        y, h = model(x)
        wanted = [h, *model.parameters()] if more else [*model.parameters()]
        return torch.autograd.grad(y + h.square().sum(), wanted)

    assert not _said(lambda: asked(ours))
    assert any("gives only the part from outside" in text for text in _said(lambda: asked(ours, "h")))
    for one, other in zip(asked(plain, "h")[1:], asked(ours, "h")[1:], strict=True):
        assert torch.equal(one, other)


class SharedGradient(nn.Module):
    """Two outputs whose gradient is one tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = torch.tanh(self.a(x))
        return self.b(h), h


def test_a_gradient_that_flows_into_two_outputs_is_not_taken_for_one_that_is_asked_for() -> None:
    plain, ours = both(SharedGradient())
    x = torch.randn(8, 16)

    def step(model: nn.Module) -> list[Any]:
        y, h = model(x)
        return list(torch.autograd.grad((y + h).square().sum(), [*model.parameters()]))

    assert not _said(lambda: step(ours))
    assert all(map(torch.equal, step(plain), step(ours)))


class FeatureAndView(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(16, 16), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        h = torch.tanh(self.a(x))
        part = h[:, ::2]
        return self.b(torch.sigmoid(part)).sum(), h, part


def test_gradients_of_a_feature_and_a_view_of_it_are_said_to_be_added_in_another_order() -> None:
    plain, ours = both(FeatureAndView())
    x = torch.randn(8, 16)

    def of_one(outputs: tuple[Tensor, ...]) -> Tensor:
        return outputs[0] + outputs[1].square().sum()

    def of_both(outputs: tuple[Tensor, ...]) -> Tensor:
        return of_one(outputs) + outputs[2].exp().sum()

    assert not _said(lambda: gradients(ours, of_one, x))
    assert all(map(torch.equal, gradients(plain, of_one, x), gradients(ours, of_one, x)))
    assert any("same memory" in text for text in _said(lambda: gradients(ours, of_both, x)))
    assert not _said(lambda: gradients(ours, of_both, x)), "once is enough"
    for one, other in zip(gradients(plain, of_both, x), gradients(ours, of_both, x), strict=True):
        torch.testing.assert_close(one, other)


class FeatureAndPart(nn.Module):
    """A view of a hidden tensor, and a part of that view; both returned."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        g = torch.tanh(self.a(x))
        h = self.b(g).view(4, 32)
        return h, h[:1], g.view(-1)


def test_the_gradient_of_a_view_that_reaches_it_through_a_part_of_it_is_refused_to_readers() -> None:
    plain, ours = both(FeatureAndPart())
    x = torch.randn(8, 16)

    def read(model: nn.Module, retains: bool) -> Any:
        h, part, _ = model(x)
        if retains:
            h.retain_grad()
        part.square().sum().backward()
        return h.grad

    assert read(plain, True) is not None
    with pytest.raises(InvalidInput, match=REFUSED):
        read(ours, True)


def test_a_loss_of_one_output_reaches_what_another_output_was_made_of() -> None:
    """Gradients that are missing must not stop those of a hidden tensor of which the outputs are views."""
    plain, ours = both(FeatureAndPart())
    x = torch.randn(8, 16)
    theirs, mine = (gradients(model, lambda outputs: outputs[1].square().sum(), x) for model in (plain, ours))
    assert len(theirs) == 4
    assert all(map(torch.equal, theirs, mine))


class Remembers(nn.Module):
    """Returns a view, and keeps a detached twin of it."""

    def __init__(self, twin: Callable[[Tensor], Tensor]):
        super().__init__()
        self.a, self.twin = nn.Linear(16, 16), twin
        self.kept: Any = None

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.a(x)).exp()
        self.kept = self.twin(h)
        return h.transpose(0, 1)


@pytest.mark.parametrize("rows", [4, 8], ids=["square", "oblong"])
@pytest.mark.parametrize(
    "twin",
    [lambda h: h.transpose(0, 1).detach(), lambda h: h.detach().transpose(0, 1), lambda h: h.transpose(0, 1).data],
    ids=["detached", "before", "data"],
)
def test_a_detached_twin_of_a_returned_view_is_the_plain_models(twin: Callable[[Tensor], Tensor], rows: int) -> None:
    """AOT autograd transposes it twice, which shows in its shape or, of a square, in its values alone."""
    plain, x = Remembers(twin), torch.randn(rows, 4, 16)
    model = copy.deepcopy(plain)
    ours = rt.rematerialize(model, (x,), "1GB", cost="flops", time_limit_s=0.5, strategy="search")
    theirs, mine = (gradients(each, lambda output: output.square().sum(), x) for each in (plain, ours))
    assert torch.equal(plain.kept, model.kept)
    assert not model.kept.requires_grad
    assert all(map(torch.equal, theirs, mine))


class TransposedAtTheEnd(nn.Module):
    """The gradient of the hidden tensor is transposed in memory if it comes from the first output alone."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(16, 16), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = self.a(x)
        return self.b(h.transpose(1, 2)), h * 1


def test_a_gradient_that_is_missing_leaves_the_others_in_their_layout() -> None:
    plain, x = TransposedAtTheEnd(), torch.randn(4, 8, 16)
    ours = rt.rematerialize(copy.deepcopy(plain), (x,), "1GB", cost="flops", time_limit_s=0.5, strategy="search")
    theirs, mine = (gradients(each, lambda outputs: outputs[0].square().sum(), x) for each in (plain, ours))
    assert all(map(torch.equal, theirs, mine))
