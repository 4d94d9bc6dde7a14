"""How an implementation of an operator is described: what it stands for, what it reads and keeps, when it applies."""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import fx

from remat.torch._private import schema_of


class Family(enum.Enum):
    """What an implementation changes."""

    OUTPUT = "backward reads the output instead of the input"
    INTERMEDIATE = "backward reads something small that the forward pass made for it"
    INPUT = "backward reads the input alone and computes again what it lacks"
    ALGORITHM = "the same inputs and outputs by other kernels, with other time and workspace"
    IN_PLACE = "the output is written over an input"


@dataclass(frozen=True, slots=True)
class Calls:
    """ATen calls of a captured graph that an implementation shall stand for; tensors may be `fx` nodes.

    Attributes:
        forward: of each forward call, in order, all its arguments by position, defaults filled in (`all_arguments`).
        backward: likewise of the backward calls, in the order in which they run.
        results: what the forward pass returns, in the order of `TorchImplementation.results`.
        kept: what the implementation's forward function returns besides, in the order of `TorchImplementation.kept`.
    """

    forward: tuple[tuple[Any, ...], ...]
    backward: tuple[tuple[Any, ...], ...] = ()
    results: tuple[Any, ...] = ()
    kept: tuple[Any, ...] = ()


def _first_forward(calls: Calls) -> tuple[Any, ...]:
    return calls.forward[0]


def _applies(calls: Calls) -> str:
    return ""


@dataclass(frozen=True, slots=True)
class TorchImplementation:
    """One way to run an operator's forward and backward pass.

    Attributes:
        name: unique.
        forward_kinds: of the chain of forward calls that it stands for (`kind_of`); each call but the last is read by
            the next one only, as far as the forward pass goes.
        backward_kinds: of their backward calls, in the order in which they run; () if the backward pass is left alone.
        reads: what the backward function reads besides the gradient: input, weight, bias, rstd or output,
            or names among `kept`. Shapes alone are not read.
        results: of each result of `forward`, before what is kept: (forward call, result of it) that it equals. What is
            not listed here is not made, and must not be read.
        kept: what `forward` returns behind these, for the backward pass.
        forward: called with ``forward_arguments(calls)``; returns one tensor, or a tuple of results and kept. None: the
            forward calls stay as they are.
        backward: called with ``backward_arguments(calls)``; returns what the last backward call does. None: it stays.
        why_not: (calls, forward and backward known, with nodes or tensors) -> why it does not apply, '' if it does.
            Types and shapes only.
        exact: gradients have the bits of the default's.
        tolerance: {dtype: largest error relative to the largest gradient} if not.
        lossy: the network computes something else; none of these.
        overwrites: argument of the first forward call that the result is written over.
        random: the forward function draws random numbers: those of the calls that it stands for.
        is_default: what ATen does anyway.
        devices: where it can run. All were tested on a CPU if they run there, none on CUDA.
        source: publication.
    """

    name: str
    family: Family
    forward_kinds: tuple[str, ...]
    backward_kinds: tuple[str, ...]
    reads: tuple[str, ...]
    results: tuple[tuple[int, int], ...] = ((0, 0),)
    kept: tuple[str, ...] = ()
    forward: Callable[..., Any] | None = None
    backward: Callable[..., Any] | None = None
    forward_arguments: Callable[[Calls], tuple[Any, ...]] = _first_forward
    backward_arguments: Callable[[Calls], tuple[Any, ...]] | None = None
    why_not: Callable[[Calls], str] = _applies
    exact: bool = True
    tolerance: Mapping[str, float] = field(default_factory=dict)
    lossy: bool = False
    overwrites: int | None = None
    random: bool = False
    is_default: bool = False
    devices: tuple[str, ...] = ("cpu", "cuda")
    source: str = "MONeT, Shah et al., ICLR 2021"


def all_arguments(target: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any, ...]:
    """Arguments of a call of an ATen operator by position, with the defaults of its schema where none are given."""

    def of(argument: Any) -> Any:
        return kwargs.get(argument.name, argument.default_value if argument.has_default_value() else None)

    return (*args, *(of(argument) for argument in schema_of(target).arguments[len(args) :]))


def value_of(x: Any) -> Any:
    """The (fake) tensor that a node of a captured graph stands for; anything else as it is."""
    return x.meta["val"] if isinstance(x, fx.Node) else x
