"""Steps in which the parts of a model are opaque: what they are called with, and what all else holds meanwhile."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from remat.errors import InvalidInput
from remat.torch.internals.autograd import version_of
from remat.torch.internals.operators import tree_flatten, tree_leaves, tree_map, tree_unflatten
from remat.torch.measuring.plain import FollowedStep, Follower, has_recurrent_layer, plain_step, real_step
from remat.torch.resident.shard import WHOLE, Division
from remat.torch.step.blocks import in_place
from remat.torch.step.branches import describe_inputs
from remat.torch.step.loss import ANY_LOSS, Outside


@dataclass(slots=True)
class Run:
    """One run of a part in a step.

    Attributes:
        args, kwargs: without contents.
        key: one for all runs of the part that have the same plan.
        autocast: (whether it is on, its type, whether it keeps casts) where the part runs.
        forward: (bytes that all else holds, the outputs included, numbers of the step's calls when it begins and ends).
        backward: the same of its backward pass, the gradients of outputs included.
    """

    part: str
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    autocast: tuple[bool, torch.dtype, bool]
    key: str = ""
    forward: tuple[int, int, int] = (0, 0, 0)
    backward: tuple[int, int, int] | None = None


@dataclass(frozen=True, slots=True)
class _Bare:
    """What is known of a tensor that a part takes."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    needs_gradient: bool
    is_leaf: bool

    @property
    def layout(self) -> tuple[Any, ...]:
        """What a plan is made for."""
        return self.shape, self.strides, self.dtype


def bares(run: Run) -> list[_Bare]:
    return [x for x in tree_leaves((run.args, run.kwargs)) if isinstance(x, _Bare)]


def _bare(x: Any) -> Any:
    if not isinstance(x, Tensor):
        return x
    return _Bare(tuple(x.shape), x.stride(), x.dtype, x.requires_grad, x.is_leaf)


def with_storage(device: str) -> Callable[[Any], Any]:
    """Makes tensors of what `_bare` noted; integers are 0, a valid index."""

    def made(x: Any) -> Any:
        if not isinstance(x, _Bare):
            return x
        empty = torch.empty_strided(x.shape, x.strides, dtype=x.dtype, device=device)
        if not empty.is_floating_point():
            return empty.zero_()
        start = torch.zeros((), device=device, requires_grad=True)
        return empty.requires_grad_(x.needs_gradient) if x.is_leaf else _Computed.apply(start, empty)

    return made


class _Computed(torch.autograd.Function):
    """A tensor as if it had been computed: no leaf, so that nobody accumulates its gradient."""

    @staticmethod
    def forward(ctx: Any, _start: Tensor, empty: Tensor) -> Tensor:
        return empty

    @staticmethod
    def backward(ctx: Any, *_gradient: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        return None, None


def followed_parts(
    model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], names: Sequence[str], device: str,
    outside: Outside, reading: Collection[str], division: Division,
) -> tuple[FollowedStep, list[Run]]:  # fmt: skip
    """A step in which the parts of these names are opaque, and their runs.

    Args:
        outside: the loss.
        reading: parts whose operations read the outputs, so that these exist until their backward pass.
        division: of the model over ranks.
    """
    runs, followers = list[Run](), list[Follower]()

    def begin(follower: Follower) -> None:
        runs.clear()
        followers[:] = [follower]

    seen = dict[str, nn.Module]()
    for name in names:
        seen[name] = copy.copy(model.get_submodule(name))  # it shares parameters, hooks and all else
        seen[name].forward = _opaque(seen[name], name, name in reading, runs, followers, device)
    with in_place(model, seen):
        step = followed_step(model, args, kwargs, device, outside, begin, division)
    by_key(runs)
    return step, runs


def followed_step(
    model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], device: str,
    outside: Outside = ANY_LOSS, begin: Callable[[Follower], None] = lambda _: None, division: Division = WHOLE,
) -> FollowedStep:  # fmt: skip
    """A step on tensors without contents; one that runs if the model reads results, or has recurrent layers."""
    with division.stands_in(model) as begin_division:

        def begin_all(follower: Follower) -> None:
            begin_division(follower)
            begin(follower)

        if not has_recurrent_layer(model):
            try:
                return plain_step(model, args, kwargs, outside, begin_all)
            except InvalidInput:
                raise
            except Exception:  # whatever stops it: the real step shows whether the model is at fault
                pass
        return real_step(model, args, kwargs, outside, begin_all, device)


def _opaque(
    part: nn.Module, name: str, reads_outputs: bool, runs: list[Run], followers: list[Follower], device: str
) -> Callable[..., Any]:
    """The forward function of a part whose calls nobody sees; it notes its runs."""
    forward = part.forward

    def called(*args: Any, **kwargs: Any) -> Any:
        (follower,) = followers
        autocast = (
            torch.is_autocast_enabled(device),
            torch.get_autocast_dtype(device),
            torch.is_autocast_cache_enabled(),
        )
        bare = tree_map(_bare, (args, kwargs))
        run = Run(name, bare[0], bare[1], autocast)
        runs.append(run)
        leaves, spec = tree_flatten((args, kwargs))
        places = [i for i, x in enumerate(leaves) if isinstance(x, Tensor)]
        rest: list[Any] = []

        def body(*tensors: Tensor) -> tuple[Tensor, ...]:
            given = list(leaves)
            for i, x in zip(places, tensors, strict=False):
                given[i] = x
            own_args, own_kwargs = tree_unflatten(given, spec)
            before = [version_of(x) for x in tensors[: len(places)]]
            with follower.unseen():
                made, shape = tree_flatten(forward(*own_args, **own_kwargs))
            if before != [version_of(x) for x in tensors[: len(places)]]:
                raise InvalidInput(f"the part '{name}' changes an argument in place, which parts= cannot plan")
            rest[:] = [made, shape]
            return tuple(x for x in made if isinstance(x, Tensor))

        trained = [p for p in part.parameters() if p.requires_grad]
        outputs = iter(_Opaque.apply(run, follower, reads_outputs, body, *(leaves[i] for i in places), *trained))  # pyright: ignore[reportArgumentType]
        made, shape = rest
        return tree_unflatten([next(outputs) if isinstance(x, Tensor) else x for x in made], shape)

    return called


class _Opaque(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, run: Run, follower: Follower, reads_outputs: bool, body: Callable[..., Any], *tensors: Tensor
    ) -> Any:
        ctx.run, ctx.follower = run, follower
        begin = len(follower.signatures)
        made = body(*tensors)
        for x in made:
            follower.follow(x)
        run.forward = follower.total_bytes, begin, len(follower.signatures)
        ctx.save_for_backward(*tensors, *(made if reads_outputs else ()))
        ctx.n_given, ctx.strides = len(tensors), [x.stride() for x in made]
        ctx.mark_non_differentiable(*(x for x in made if not (x.is_floating_point() or x.is_complex())))
        return made

    @staticmethod
    def backward(ctx: Any, *given: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        held, begin = ctx.follower.total_bytes, len(ctx.follower.signatures)
        for x, strides in zip(given, ctx.strides, strict=True):
            if x is not None and x.stride() != strides:  # the part's backward pass begins with a copy
                held += x.numel() * x.element_size()
        needed = zip(ctx.needs_input_grad[4:], ctx.saved_tensors[: ctx.n_given], strict=True)
        gradients = [torch.zeros_like(x) if needs else None for needs, x in needed]
        ctx.run.backward = held, begin, len(ctx.follower.signatures)
        return None, None, None, None, *gradients


def by_key(runs: Iterable[Run]) -> dict[str, Run]:
    """[key] a run with it; runs of a part that may differ in more than contents of tensors get different keys."""
    kinds, found = dict[str, list[Any]](), dict[str, Run]()
    for run in runs:
        kind = bares(run), describe_inputs((run.args, run.kwargs)), run.autocast
        known = kinds.setdefault(run.part, [])
        if kind not in known:
            known.append(kind)
        at = known.index(kind)
        run.key = f"{run.part} ({at + 1})" if at else run.part
        found.setdefault(run.key, run)
    return found
