"""Runs of a model's blocks in a followed step: what they hold, call, and leave."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from remat.torch.checkpointing.checkpointed import casting_anew
from remat.torch.internals.autograd import NOT_IN_POLICIES, storage_key, version_of
from remat.torch.internals.operators import TorchDispatchMode, schema_of
from remat.torch.measuring.plain import Follower
from remat.torch.step.work import call_signature, storage_bytes, tensors_of


@dataclass(slots=True)
class Call:
    """A call in a run of a block.

    Attributes:
        operator: e.g. ``aten.mm.default``.
        signature: see `call_signature`.
        made: [storage] bytes of those that it makes; 0 of those that the block returns, which are there anyway.
        may_be_kept: it changes nothing, and nothing changes what it makes.
        draws: random numbers.
    """

    operator: str
    signature: str
    made: dict[int, int]
    may_be_kept: bool
    draws: bool


@dataclass(slots=True)
class Region:
    """One run of a module inside a run of a block.

    Attributes:
        before: storages that are there when it begins.
        start, end: in numbers of the step's calls.
        held: [storage] bytes of what it makes and saves for its backward pass, or returns.
        is_whole: its results are tensors, alone or in one tuple or list, and nothing changes them later.
    """

    before: set[int]
    start: int
    end: int = 0
    held: dict[int, int] = field(default_factory=dict)
    is_whole: bool = True


@dataclass(slots=True)
class Run:
    """One run of a block in a step.

    Attributes:
        block: its name.
        changes_input: in place.
        before, after: bytes that the step holds when the run begins and ends.
        starts, ends: in numbers of the step's calls; the second start is that of its backward pass, which begins with
            the repetition in a checkpoint.
        calls: of the first run, as policies count them.
        repeated: calls of the repetition, which ends early where the backward pass needs no more.
        regions: [name of a module within the block] its runs.
        returned: storages.
        made: [storage] bytes of those that it makes and returns.
    """

    block: str
    before: int = 0
    after: int = 0
    changes_input: bool = False
    starts: list[int] = field(default_factory=list)
    ends: list[int] = field(default_factory=list)
    calls: list[Call] = field(default_factory=list)
    repeated: list[Call] = field(default_factory=list)
    regions: dict[str, list[Region]] = field(default_factory=dict)
    returned: set[int] = field(default_factory=set)
    made: dict[int, int] = field(default_factory=dict)

    def leaves(self, left: set[int]) -> None:
        """What is there anyway when a checkpoint has run, as its results are: keeping it needs nothing."""
        for call in reversed(self.calls):  # an earlier storage of the same key is gone
            for key in left & call.made.keys():
                call.made[key] = 0
                left.discard(key)


Savers = dict[int, set[int]]  # [storage] the runs that save it for the backward pass, by number


class _Calls(TorchDispatchMode):
    """Notes the calls that a policy of selective checkpointing is asked about."""

    def __init__(self, calls: list[Call]):
        super().__init__()
        self.calls = calls
        self.makers: dict[int, Call] = {}  # [storage] the call that made it; the last one, if earlier ones are gone

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in NOT_IN_POLICIES:
            return func(*args, **kwargs)
        signature, given = call_signature(func, args, kwargs), tensors_of((args, kwargs))
        made = func(*args, **kwargs)
        old = set(map(storage_key, given))
        changes = schema_of(func).is_mutable
        for key in old & self.makers.keys() if changes else ():
            self.makers[key].may_be_kept = False
        new = {storage_key(x): storage_bytes(x) for x in tensors_of(made) if storage_key(x) not in old}
        draws = torch.Tag.nondeterministic_seeded in func.tags
        name = signature if new or changes else ""
        call = Call(str(func), name, new, bool(new) and not changes, draws)
        self.calls.append(call)
        self.makers |= dict.fromkeys(new, call)
        return made


class Changes(TorchDispatchMode):
    """Notes which regions have results that the forward pass changes in place, so that they cannot be saved.

    Args:
        runs: of blocks.
        inside: regions that run now.
    """

    def __init__(self, runs: list[Run], inside: list[Region]):
        super().__init__()
        self.runs, self.inside = runs, inside

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if schema_of(func).is_mutable and torch.is_grad_enabled():
            old = set(map(storage_key, tensors_of((args, kwargs))))
            for run in self.runs:
                changed = old & run.returned if run.ends else old
                for region in (region for regions in run.regions.values() for region in regions) if changed else ():
                    region.is_whole &= region in self.inside or changed.isdisjoint(region.held)
        return func(*args, **kwargs)


def marked(
    forward: Callable[..., Any], name: str, runs: list[Run], followers: list[Follower], wraps: bool = False
) -> Callable[..., Any]:
    """`forward`, which notes its runs; as a checkpoint if `wraps`."""

    def called(*args: Any, **kwargs: Any) -> Any:
        run, (follower,) = Run(name), followers
        runs.append(run)

        def body(*args: Any, **kwargs: Any) -> Any:
            run.starts.append(len(follower.signatures))
            if len(run.starts) == 1:
                run.before = follower.total_bytes
            given = [(x, version_of(x)) for x in tensors_of((args, kwargs))]
            try:
                return casting_anew(forward)(*args, **kwargs)
            finally:
                run.ends.append(len(follower.signatures))
                run.changes_input |= any(version_of(x) != version for x, version in given)

        def contexts() -> tuple[_Calls, _Calls]:
            return _Calls(run.calls), _Calls(run.repeated)

        def backward_begins(_: Tensor) -> None:
            if len(run.starts) == 1:
                run.starts.append(len(follower.signatures))

        made = body(*args, **kwargs) if not wraps else checkpoint(
            body, *args, use_reentrant=False, preserve_rng_state=False, context_fn=contexts, **kwargs
        )  # fmt: skip
        run.after = follower.total_bytes
        run.returned = {storage_key(x) for x in tensors_of(made)}
        if wraps:
            run.leaves({*follower.alive})
        for x in tensors_of(made) if not wraps else ():
            if x.requires_grad:
                x.register_hook(backward_begins)
        return made

    return called


def saving(
    forward: Callable[..., Any], name: str, runs: list[Run], _followers: list[Follower], savers: Savers
) -> Callable[..., Any]:
    """`forward` of a block, whose runs note in `savers` what they save."""

    def called(*args: Any, **kwargs: Any) -> Any:
        run, own, old = Run(name), len(runs), {storage_key(x) for x in tensors_of((args, kwargs))}
        runs.append(run)
        made = saving_as(casting_anew(forward), own, savers)(*args, **kwargs)
        run.made = {storage_key(x): storage_bytes(x) for x in tensors_of(made) if storage_key(x) not in old}
        return made

    return called


def saving_as(forward: Callable[..., Any], saver: int, savers: Savers) -> Callable[..., Any]:
    """`forward`, which notes in `savers` what it saves outside of others that do."""

    def pack(x: Tensor) -> Tensor:
        savers.setdefault(storage_key(x), set()).add(saver)
        return x.detach()

    def called(*args: Any, **kwargs: Any) -> Any:
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
            return forward(*args, **kwargs)

    return called


def marked_region(
    forward: Callable[..., Any], name: str, runs: list[Run], followers: list[Follower], inside: list[Region]
) -> Callable[..., Any]:
    """`forward` of a module within a block, which notes what it saves; `inside` are the regions that run now."""

    def pack(x: Tensor) -> Tensor:
        _hold(x, followers[0], inside)
        return x.detach()  # an output that its own node held would never go

    def called(*args: Any, **kwargs: Any) -> Any:
        (follower,) = followers
        region = Region(set(follower.alive), len(follower.signatures))
        runs[-1].regions.setdefault(name, []).append(region)
        inside.append(region)
        try:
            with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
                made = forward(*args, **kwargs)
        finally:
            inside.pop()
        region.end = len(follower.signatures)
        leaves = made if isinstance(made, (tuple, list)) else [made]
        region.is_whole &= all(isinstance(x, Tensor) or (x is None and len(leaves) > 1) for x in leaves)
        for x in tensors_of(made):
            _hold(x, follower, [region])
        return made

    return called


def _hold(x: Tensor, follower: Follower, regions: list[Region]) -> None:
    key = storage_key(x)
    for region in regions:
        if key in follower.alive and key not in region.before:
            region.held[key] = follower.alive[key]
