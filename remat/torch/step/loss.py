"""The loss outside of a module and the backward pass as in a training loop, for steps without one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from remat.errors import InvalidInput
from remat.graph import reached
from remat.torch.internals.autograd import base_of
from remat.torch.internals.operators import fields_of, make_contiguous_strides_for
from remat.torch.step.work import dense_bytes, tensors_of
from remat.units import format_size

Meanwhile = Callable[[list[Tensor]], AbstractContextManager[Any]]
FULL_TIMES = 4  # the bytes of outputs in full precision: they, their gradients, and two more in cross-entropy
HALF_TIMES = 7  # the same of outputs in half precision, because the loss is computed in float32


@dataclass(frozen=True, slots=True)
class Needs:
    """Bytes that a loss outside of a module needs, beside the outputs and the gradients of outputs.

    Attributes:
        most_bytes: at most, between forward and backward pass.
        held_bytes: the part of these that stays to the end of the step.
        read_bytes: of tensors that are there before the step, e.g. labels.
        outputs_bytes: of the outputs that it was found for.
        text: how it was found, for people.
        leaves_out: whether an output gets no gradient; not where that is uncertain.
    """

    most_bytes: int = 0
    held_bytes: int = 0
    read_bytes: int = 0
    outputs_bytes: int = 0
    text: str = ""
    leaves_out: Callable[[Tensor], bool] = field(default=lambda _: False, compare=False)

    def of(self, outputs_bytes: int) -> Needs:
        """The same of a step with other outputs, in proportion."""
        if outputs_bytes == self.outputs_bytes:
            return self

        def scaled(n_bytes: int) -> int:
            return -(-n_bytes * outputs_bytes // max(1, self.outputs_bytes))

        most, held, read = map(scaled, (self.most_bytes, self.held_bytes, self.read_bytes))
        return replace(self, most_bytes=most, held_bytes=held, read_bytes=read, outputs_bytes=outputs_bytes)


def assumed(outputs: Sequence[Tensor], retains: bool = False) -> Needs:
    """What a loss of these outputs is taken to need if nobody says what it is: no less than cross-entropy or the mean
    squared error.

    Cross-entropy makes two tensors of the outputs' size beside the gradient. Of outputs in half precision these are
    in float32, as is a copy of the outputs, or the gradient before it is rounded. The mean squared error keeps the
    storage of all squares, of which it is one number. If the graph is retained, so are these tensors.
    """
    most = held = 0
    large = [x for x in outputs if x.numel() > 1]
    for x in large:
        is_half = x.element_size() < torch.float32.itemsize
        rows = x.numel() // max(1, min(x.shape[1:], default=1))  # cross-entropy sums over classes
        most += ((HALF_TIMES if is_half else FULL_TIMES) - 2) * dense_bytes(x) + rows * torch.float32.itemsize
        held += (2 if is_half and retains else 1) * max(dense_bytes(x), x.numel() * torch.float32.itemsize)
    total = sum(map(dense_bytes, large))
    times = sorted({HALF_TIMES if x.element_size() < torch.float32.itemsize else FULL_TIMES for x in large})
    text = (
        f"not given: taken to need {' or '.join(map(str, times))} times the outputs' {format_size(total)}, them and "
        "their gradients included (cross-entropy, mean squared error); loss= counts yours"
    )
    return Needs(most, held, 0, total, text if large else "")


@dataclass(frozen=True, slots=True)
class Outside:
    """What a training loop does with a module's outputs.

    Attributes:
        given: (outputs) -> a scalar; None if it is not known.
        retains: whether the graph is retained, for several backward passes.
        taken: (differentiated outputs, whether the graph is retained) -> what a loss that is not known needs.
    """

    given: Callable[[Any], Tensor] | None = None
    retains: bool = False
    taken: Callable[[Sequence[Tensor], bool], Needs] = assumed

    def assumed(self, outputs: Sequence[Tensor]) -> Needs:
        """What a loss that is not known is taken to need."""
        return self.taken(outputs, self.retains)

    def loss(self, outputs: Any) -> Tensor:
        """The given loss.

        Raises:
            InvalidInput: it is no scalar with a gradient.
        """
        assert self.given is not None
        loss = self.given(outputs)
        if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.requires_grad:
            made = f"a tensor of shape {list(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
            made += " without a gradient" if isinstance(loss, Tensor) and not loss.requires_grad else ""
            raise InvalidInput(
                f"loss= must return a scalar that depends on the module's outputs, not {made}; e.g. "
                "loss=lambda out: F.cross_entropy(out, labels)"
            )
        return loss

    def knowing(self, outputs: Any) -> Outside:
        """The same; a scalar that outputs hold as ``loss`` is the given one if none is given (transformers' models)."""
        loss = _own_loss(outputs) if self.given is None else None
        is_own = isinstance(loss, Tensor) and loss.numel() == 1 and loss.requires_grad
        return replace(self, given=_own_loss) if is_own else self

    def backward_from(self, outputs: Any, meanwhile: Meanwhile) -> None:
        """Differentiate a module's outputs as the loop does; `meanwhile` stands for a loss that is not given."""
        if (known := self.knowing(outputs)) is not self:
            known.backward_from(outputs, meanwhile)
            return
        if self.given is None:
            loss = backward_from(outputs, meanwhile, self.retains)
            if self.retains and loss is not None:
                loss.backward()
            return
        loss = self.loss(outputs)
        with gradients_restored(loss):
            if self.retains:
                loss.backward(retain_graph=True)
            loss.backward()


def _own_loss(outputs: Any) -> Any:
    """What a mapping or a dataclass holds as ``loss``."""
    return (outputs if isinstance(outputs, Mapping) else fields_of(outputs)).get("loss")


OWN_LOSS = Needs(
    text="none: the module returns it as 'loss', which alone is differentiated; loss= counts more",
    leaves_out=lambda x: x.numel() > 1,
)
NO_LOSS = Outside(taken=lambda *_: Needs())
ANY_LOSS = Outside()


def nothing(_outputs: list[Tensor]) -> AbstractContextManager[Any]:
    """A loss that holds nothing."""
    return nullcontext()


def backward_from(outputs: Any, meanwhile: Meanwhile = nothing, retains: bool = False) -> Tensor | None:
    """Differentiate a module's outputs: a loss directly, others through a loss outside that holds nothing.

    As in a loop, only the engine holds the gradients of outputs, and drops them after they are read. Outputs that are
    parameters, arguments or views of these are left out, because the caller had them before.

    Args:
        meanwhile: (differentiated outputs) -> a context that is entered while their gradients are made; what it gives
            lives as long as the loss.
        retains: whether the graph is retained.

    Returns:
        The loss; None if no output has a gradient.
    """
    found = differentiated(outputs)
    if len(found) == 1 and found[0].numel() == 1:
        with meanwhile(found):
            start = torch.ones_like(found[0])
        found[0].backward(start, retain_graph=retains)
        return found[0]
    if not found:
        return None
    loss: Tensor = _LossOutside.apply(lambda: meanwhile(found), *found)  # pyright: ignore[reportAssignmentType]
    loss.backward(retain_graph=retains)
    return loss


@contextmanager
def gradients_restored(loss: Tensor) -> Iterator[None]:
    """Let gradients be afterwards what they were; the loss may have parameters of its own."""
    nodes = reached([loss.grad_fn], lambda node: [] if node is None else [before for before, _ in node.next_functions])
    leaves = (getattr(node, "variable", None) for node in nodes)
    before = [(x, x.grad) for x in leaves if isinstance(x, Tensor)]
    try:
        yield
    finally:
        for x, gradient in before:
            x.grad = gradient


def differentiated(outputs: Any) -> list[Tensor]:
    """The tensors among a module's outputs whose gradients its backward pass takes."""
    tensors = (x for x in tensors_of(outputs) if x.requires_grad and not _is_of_a_leaf(x))
    return list({id(x): x for x in tensors}.values())


def _is_of_a_leaf(x: Tensor) -> bool:
    viewed = base_of(x)
    base = x if viewed is None else viewed
    return base.is_leaf and base.requires_grad


class _LossOutside(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, meanwhile: Callable[[], AbstractContextManager[Any]], *outputs: Tensor) -> Tensor:
        ctx.meanwhile = meanwhile
        ctx.like = [(*_layout(x), x.dtype, x.device) for x in outputs]
        return outputs[0].new_zeros(())

    @staticmethod
    def backward(ctx: Any, *_gradient: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.held = None  # of an earlier pass
        with ctx.meanwhile() as ctx.held:
            return None, *(
                torch.empty_strided(shape, strides, dtype=dtype, device=device).fill_(1)
                for shape, strides, dtype, device in ctx.like
            )


def _layout(x: Tensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """(shape, strides) of a gradient of `x`: those of `x`, unless it repeats elements or leaves gaps."""
    dense = torch.ops.aten.is_non_overlapping_and_dense(x)
    return tuple(x.shape), x.stride() if dense else make_contiguous_strides_for(x.shape)
