"""The description of an implementation: the calls that it replaces, what it reads and keeps, and when it applies."""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, fx

from remat.torch.internals.operators import schema_of

Gradients = tuple[Tensor | None, Tensor | None, Tensor | None]  # of input, weight and bias; None unless asked for


class Family(enum.Enum):
    """What an implementation changes."""

    OUTPUT = "backward reads the output instead of the input"
    INTERMEDIATE = "backward reads something small that the forward pass made for it"
    INPUT = "backward reads the input alone and computes again what it lacks"
    ALGORITHM = "the same inputs and outputs by other kernels, with other time and workspace"
    IN_PLACE = "the output is written over an input"


@dataclass(frozen=True, slots=True)
class Calls:
    """ATen calls of a captured graph that an implementation replaces; tensors may be `fx` nodes.

    Attributes:
        forward: for each forward call, in order, all arguments by position, defaults included (`all_arguments`).
        backward: the same for the backward calls, in the order in which they run.
        results: of the forward pass, in the order of `TorchImplementation.results`.
        kept: further results of the implementation's forward function, in the order of `TorchImplementation.kept`.
    """

    forward: tuple[tuple[Any, ...], ...]
    backward: tuple[tuple[Any, ...], ...] = ()
    results: tuple[Any, ...] = ()
    kept: tuple[Any, ...] = ()


@dataclass(frozen=True, slots=True)
class TorchImplementation:
    """One implementation of an operator's forward and backward pass.

    Attributes:
        name: unique.
        forward_kinds: kinds (`kind_of`) of the chain of forward calls that it replaces. In the forward pass, only the
            next call reads the result of each call but the last.
        backward_kinds: kinds of their backward calls, in the order in which they run; () if these stay.
        reads: tensors that the backward function reads besides the gradient: input, weight, bias, rstd or output,
            or names among `kept`. A tensor of which only the shape matters is not read.
        results: for each result of `forward` before the kept ones: the (forward call, index of its result) that it
            equals. Results that are not listed are not computed, and must not be read.
        kept: further results of `forward`, for the backward pass.
        forward: called with ``forward_arguments(calls)``; returns one tensor, or a tuple of results and kept. None: the
            forward calls stay.
        backward: called with ``backward_arguments(calls)``; returns the results of the last backward call. None: it
            stays.
        why_not: (calls, forward and backward known, with nodes or tensors) -> why it does not apply, '' if it does.
            It looks at types and shapes only.
        tolerance: {dtype: largest error relative to the largest gradient}; empty if gradients have the default's bits.
        overwrites: argument of the first forward call over which the result is written.
        random: the forward function draws the random numbers of the calls that it replaces.
        is_default: ATen does the same by default.
        devices: where it can run. Those that run on a CPU were tested there, none on CUDA.
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
    forward_arguments: Callable[[Calls], tuple[Any, ...]] = lambda calls: calls.forward[0]
    backward_arguments: Callable[[Calls], tuple[Any, ...]] | None = None
    why_not: Callable[[Calls], str] = lambda _: ""
    tolerance: Mapping[str, float] = field(default_factory=dict)
    overwrites: int | None = None
    random: bool = False
    is_default: bool = False
    devices: tuple[str, ...] = ("cpu", "cuda")

    @property
    def exact(self) -> bool:
        """Whether gradients have the bits of the default's."""
        return not self.tolerance


def all_arguments(target: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any, ...]:
    """Arguments of a call of an ATen operator by position, with the schema's defaults for those that are missing."""

    def of(argument: Any) -> Any:
        return kwargs.get(argument.name, argument.default_value if argument.has_default_value() else None)

    return (*args, *(of(argument) for argument in schema_of(target).arguments[len(args) :]))


def value_of(x: Any) -> Any:
    """The (fake) tensor of a node of a captured graph; anything else unchanged."""
    return x.meta["val"] if isinstance(x, fx.Node) else x
