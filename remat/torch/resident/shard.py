"""Training with FSDP2, where parameters, gradients and optimizer state are divided over ranks: what a rank holds.

`fully_shard` gathers the parameters of a block before its passes and drops them afterwards. Its hooks do not act inside
one graph of the whole model, so that each block is a part with a plan of its own. To plan for ranks that need not be
there, a step is followed in which a stand-in for FSDP2 holds the bytes of its buffers, from and to the same moments.

Checked with PyTorch 2.13. The stand-in does as `fully_shard` by default: blocks are dropped after their forward pass,
the root is not, and the backward pass gathers one block ahead.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from remat.errors import InvalidInput, shown
from remat.torch.internals.autograd import after_backward, storage_key
from remat.torch.internals.operators import tree_map
from remat.torch.measuring.plain import Follower
from remat.torch.resident.optimizer import state_bytes
from remat.torch.step.blocks import blocks_in_rows, forwards_replaced, in_place
from remat.torch.step.work import local_part, storage_bytes, tensors_of

ROOT = ""  # the name of the group of all parameters that stand outside of blocks


def shard_of(parameter: Tensor, ranks: int) -> nn.Parameter:
    """What a rank holds of a parameter, without contents: equal rows of the first dimension, padded."""
    rows, *rest = parameter.shape
    shape = (-(-rows // ranks), *rest)
    return nn.Parameter(torch.empty(shape, dtype=parameter.dtype, device="meta"), parameter.requires_grad)


def shards_bytes(parameters: Sequence[Tensor], ranks: int) -> int:
    """Bytes that a rank holds of parameters, or of their gradients."""
    return sum(shard.numel() * shard.element_size() for shard in (shard_of(p, ranks) for p in parameters))


def bytes_per_rank(
    model: nn.Module, ranks: int, optimizer: str | int | None = None, blocks: Sequence[str] | None = None
) -> dict[str, int]:
    """FSDP2's arithmetic for a model, without a step.

    Args:
        ranks: over which parameters are divided.
        optimizer: its name, or the size of its state on a rank.
        blocks: names of the modules that are gathered one by one; by default those of `repeated_blocks`, if any.

    Returns:
        Bytes of ``parameters``, ``gradients``, ``optimizer state``; and ``gathered``, the most that exists only in
        passing: the root's parameters and gradients; those of a block; the parameters of the one that is gathered next,
        and the gradients of the one before, which are being divided. Of these, ``gathered gradients`` are gradients.

    Raises:
        InvalidInput: FSDP2 cannot divide these parameters.
    """
    names = list(blocks_in_rows(model)) if blocks is None else list(blocks)
    groups = groups_of(model, names)
    sizes = [ranks * shards_bytes(groups[name], ranks) for name in names]
    gradients = [ranks * shards_bytes(_trained(groups[name]), ranks) for name in names]
    passing = ((sum(sizes[max(0, i - 1) : i + 1]), sum(gradients[i : i + 2])) for i in range(len(names)))
    whole, given = max(passing, key=sum, default=(0, 0))
    every, root = list(model.parameters()), groups[ROOT]
    given += ranks * shards_bytes(_trained(root), ranks)
    return {
        "parameters": shards_bytes(every, ranks),
        "gradients": shards_bytes(_trained(every), ranks),
        "optimizer state": state_bytes(optimizer, [shard_of(p, ranks) for p in every]),
        "gathered": ranks * shards_bytes(root, ranks) + whole + given,
        "gathered gradients": given,
    }


def groups_of(model: nn.Module, blocks: Sequence[str]) -> dict[str, list[nn.Parameter]]:
    """[block, or ROOT for the rest] the parameters that FSDP2 gathers together.

    Raises:
        InvalidInput: FSDP2 cannot divide them.
    """
    groups = {name: list(model.get_submodule(name).parameters()) for name in blocks}
    n_owners = Counter(id(p) for group in groups.values() for p in group)
    groups[ROOT] = [p for p in model.parameters() if id(p) not in n_owners]
    for name, p in model.named_parameters():
        if not p.dim() or not p.is_contiguous():
            raise InvalidInput(f"fully_shard does not divide the parameter '{name}': it has no rows, or gaps in them")
        if n_owners[id(p)] > 1:
            raise InvalidInput(f"the parameter '{name}' is in several parts, of which fully_shard lets one gather it")
    for name, group in groups.items():
        if len({p.dtype for p in _trained(group)}) > 1:
            raise InvalidInput(f"fully_shard needs one dtype for all trained parameters of '{name or 'the model'}'")
    return groups


def _trained(parameters: Sequence[Tensor]) -> list[Tensor]:
    return [p for p in parameters if p.requires_grad]


class Whole:
    """A model that one rank has as a whole."""

    ranks = 1

    def parameters_bytes(self, model: nn.Module, others: Iterable[Tensor]) -> int:
        """Bytes that a rank holds of the model's parameters and of other tensors."""
        return sum({storage_key(x): storage_bytes(x) for x in (*model.parameters(), *others)}.values())

    def stands_in(self, model: nn.Module) -> AbstractContextManager[Callable[[Follower], None]]:
        """Let steps of the model that are followed meanwhile hold the bytes of the division; gives what begins one."""
        return nullcontext(lambda _: None)

    def part(self, model: nn.Module, name: str) -> nn.Module:
        """The part that is captured and compiled."""
        return model.get_submodule(name)

    def placed(self, model: nn.Module, modules: Mapping[str, nn.Module]) -> AbstractContextManager[None]:
        """Let the model run `modules` in place of its parts of these names."""
        return in_place(model, modules)

    def apply(self, model: nn.Module) -> None:
        """Divide the model, if there are processes to divide it over."""

    def check_applied(self, model: nn.Module) -> None:
        """Refuse to run a step that is not divided, because there was no process group when the plan was made."""

    def check_prepare(self) -> None:
        """Refuse to plan other shapes ahead."""


WHOLE = Whole()


@dataclass(frozen=True, slots=True)
class Sharding:
    """How FSDP2 divides a model over ranks; for its methods see `Whole`.

    Attributes:
        ranks: over which each parameter is divided.
        blocks: names of the modules that are gathered one by one.
        device: on which a rank trains.
    """

    ranks: int
    blocks: tuple[str, ...]
    device: str

    @classmethod
    def of(cls, model: nn.Module, ranks: int, blocks: Sequence[str], device: str) -> Sharding:
        """A division of this model.

        Raises:
            InvalidInput: FSDP2 cannot divide its parameters.
        """
        groups_of(model, blocks)
        return cls(ranks, tuple(blocks), device)

    def parameters_bytes(self, model: nn.Module, others: Iterable[Tensor]) -> int:
        there = {storage_key(x): storage_bytes(x) for x in others}
        return sum(there.values()) + shards_bytes(list(model.parameters()), self.ranks)

    def part(self, model: nn.Module, name: str) -> nn.Module:
        return _WithoutHooks(model.get_submodule(name))

    def placed(self, model: nn.Module, modules: Mapping[str, nn.Module]) -> AbstractContextManager[None]:
        return forwards_replaced(model, {name: module.__call__ for name, module in modules.items()})

    def check_prepare(self) -> None:
        raise InvalidInput("prepare() does not plan for a sharded model: rematerialize with the largest arguments")

    @contextmanager
    def stands_in(self, model: nn.Module) -> Iterator[Callable[[Follower], None]]:
        stand_in = _StandIn(self, model)
        modules = {name: model.get_submodule(name) if name else model for name in (*self.blocks, ROOT)}
        handles = []
        for name, module in modules.items():
            before, after = stand_in.hooks(name)
            handles.append(module.register_forward_pre_hook(before, prepend=True, with_kwargs=True))
            handles.append(module.register_forward_hook(after))
        try:
            yield stand_in.begin
        finally:
            for handle in handles:
                handle.remove()

    def apply(self, model: nn.Module) -> None:
        from torch import distributed

        if not (distributed.is_available() and distributed.is_initialized()):
            return
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh(self.device, (self.ranks,))
        for name in self.blocks:
            fully_shard(model.get_submodule(name), mesh=mesh)
        fully_shard(model, mesh=mesh)

    def check_applied(self, model: nn.Module) -> None:
        if not any(_is_divided(p) for p in model.parameters()):
            raise InvalidInput(
                f"the plan is for one of {self.ranks} ranks: start {self.ranks} processes (torchrun --nproc-per-node="
                f"{self.ranks}), and call torch.distributed.init_process_group before rematerialize"
            )


Division = Whole | Sharding


def check_ranks(model: nn.Module, ranks: Any) -> None:
    """Refuse a number of ranks that makes no sense."""
    if isinstance(ranks, bool) or not isinstance(ranks, int) or ranks < 1:
        raise InvalidInput(f"shard must be a number of ranks, 1 or more, not {shown(ranks)}")
    n = sum(p.numel() for p in model.parameters())
    if ranks > n:
        raise InvalidInput(f"shard={shown(ranks)} is more than the model's {n} parameters")


def check_shard(model: nn.Module, ranks: Any, optimizer: Any, accumulate: bool, verify: bool) -> None:
    """Refuse what cannot be divided, before anything takes time."""
    from torch import distributed

    check_ranks(model, ranks)
    if isinstance(optimizer, torch.optim.Optimizer):
        raise InvalidInput(
            "with shard=, give optimizer= as a name (e.g. 'adamw') or a size on a rank, and make the optimizer "
            "afterwards: sharding replaces the model's parameters"
        )
    if accumulate or verify:
        raise InvalidInput(f"{'accumulate' if accumulate else 'verify'}=True is not planned with shard=; leave it out")
    if distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() != ranks:
        raise InvalidInput(f"shard={ranks}, but torch.distributed runs {distributed.get_world_size()} processes")


def check_whole(model: nn.Module) -> None:
    """Refuse a model that is divided over ranks already."""
    divided = next((name for name, p in model.named_parameters() if _is_divided(p)), None)
    if divided is None:
        return
    from torch.distributed.fsdp import FSDPModule

    if any(isinstance(module, FSDPModule) for module in model.modules()):
        raise InvalidInput("the model is sharded already: give the plain model and shard=, which calls fully_shard")
    raise InvalidInput(
        f"the parameter '{divided}' is a DTensor: tensor parallelism is not planned, only shard= (FSDP2)"
    )


def _is_divided(tensor: Tensor) -> bool:
    return local_part(tensor) is not tensor


class _WithoutHooks(nn.Module):
    """A module's forward pass, without its hooks: FSDP2's act outside of the graph."""

    def __init__(self, module: nn.Module):
        super().__init__()
        self.module, self.passes = module, module.forward

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.passes(*args, **kwargs)


@dataclass(slots=True)
class _Group:
    """Parameters that are gathered together, in a step.

    Attributes:
        gathered_bytes: of all of them, padded.
        is_gathered: the collective has run, and its result is not copied to the parameters yet.
        is_whole: the parameters have storages.
        at: numbers of its forward passes whose backward pass has not begun.
        holds_gradients: a rank's part of the gradients exists.
        is_in_backward, passed: its backward pass has begun; has ended.
    """

    parameters: list[nn.Parameter]
    gathered_bytes: int
    is_gathered: bool = False
    is_whole: bool = False
    at: list[int] = field(default_factory=list)
    holds_gradients: bool = False
    is_in_backward: bool = False
    passed: bool = False


class _StandIn:
    """FSDP2 in a followed step: bytes in place of its buffers, from and to the same moments.

    On a CPU, gloo's copies of what a collective takes and gives count too.
    """

    def __init__(self, sharding: Sharding, model: nn.Module):
        self.sharding, self.model = sharding, model

    def begin(self, follower: Follower) -> None:
        """Begin a step, also after another that did not end."""
        ranks = self.sharding.ranks
        self.follower = follower
        self.groups = {
            name: _Group(parameters, ranks * shards_bytes(parameters, ranks))
            for name, parameters in groups_of(self.model, self.sharding.blocks).items()
        }
        self.order: list[_Group] = []  # of forward passes
        self.last_bytes = 0  # of the result of the last collective of the forward pass
        self.reduced_bytes = 0  # of the gradients that were divided last
        self.ends = False

    def hooks(self, name: str) -> tuple[Callable[..., Any], Callable[..., Any]]:
        """What runs before and after the forward pass of the module of a group."""

        def before(_module: nn.Module, args: Any, kwargs: Any) -> Any:
            group = self.groups[name]
            self._gather(group)
            self._copy_out(group, in_forward=True)
            return self._watched((args, kwargs), group) if group.parameters else (args, kwargs)

        def after(_module: nn.Module, _args: Any, output: Any) -> None:
            group = self.groups[name]
            if group.parameters:
                group.at.append(len(self.order))
                self.order.append(group)
            if name:
                self._drop(group)
            else:
                self._hold(-self.last_bytes)
                self.last_bytes = 0
            for x in tensors_of(output):
                if x.requires_grad:
                    x.register_hook(lambda _: self._before_backward(group))

        return before, after

    def _watched(self, given: Any, group: _Group) -> Any:
        """The arguments, behind a function whose backward pass ends that of the group."""
        watched = [x for x in tensors_of(given) if x.requires_grad]
        if not watched:
            return given
        tensors = iter(_End.apply(lambda: self._after_backward(group), *watched))  # pyright: ignore[reportArgumentType]
        return tree_map(lambda x: next(tensors) if isinstance(x, Tensor) and x.requires_grad else x, given)

    def _gather(self, group: _Group) -> None:
        if not group.is_whole and not group.is_gathered:
            self._hold(group.gathered_bytes)
            self._pass_by(group.gathered_bytes)
            group.is_gathered = True

    def _copy_out(self, group: _Group, in_forward: bool) -> None:
        """Let the parameters have storages. In the forward pass the collective's result lives until the next one."""
        if not group.is_gathered:
            return
        self._hold(group.gathered_bytes)
        group.is_gathered, group.is_whole = False, True
        if in_forward:
            self._hold(-self.last_bytes)
            self.last_bytes = group.gathered_bytes
        else:
            self._hold(-group.gathered_bytes)

    def _drop(self, group: _Group) -> None:
        if group.is_whole:
            self._hold(-group.gathered_bytes)
            group.is_whole = False

    def _before_backward(self, group: _Group) -> None:
        if not self.ends:
            self.ends = True
            after_backward(self._end)
        if group.is_in_backward or not group.parameters:
            return
        group.is_in_backward, group.passed = True, False
        self._gather(group)
        self._copy_out(group, in_forward=False)
        if group.at and (i := group.at.pop()):
            self._gather(self.order[i - 1])

    def _after_backward(self, group: _Group) -> None:
        """Divide the gradients; what the collective read lives until the next one has read its own."""
        group.is_in_backward, group.passed = False, True
        self._drop(group)
        self._hold(-self.reduced_bytes)
        ranks, given = self.sharding.ranks, [p for p in group.parameters if p.grad is not None]
        own_bytes = shards_bytes(given, ranks)
        self.reduced_bytes = ranks * own_bytes
        self._hold(self.reduced_bytes)
        self._pass_by(ranks * shards_bytes([p for p in given if len(p) % ranks], ranks))  # copies with padding
        for p in given:
            p.grad = None
        self._hold(own_bytes)
        self._pass_by(self.reduced_bytes)
        if group.holds_gradients:  # to which these are added
            self._hold(-own_bytes)
        group.holds_gradients |= bool(given)

    def _end(self) -> None:
        """After the backward pass: blocks whose arguments need no gradient, and the root, have not ended theirs."""
        for name in (ROOT, *self.sharding.blocks):
            if not self.groups[name].passed:
                self._after_backward(self.groups[name])
        self._hold(-self.reduced_bytes)
        self.reduced_bytes = 0

    def _hold(self, n_bytes: int) -> None:
        self.follower.hold(n_bytes)

    def _pass_by(self, n_bytes: int) -> None:
        """Bytes that live within a call on a CPU, where gloo copies what it gives or takes."""
        if self.sharding.device == "cpu":
            self._hold(n_bytes)
            self._hold(-n_bytes)


class _End(torch.autograd.Function):
    """Calls a function when the gradients of tensors have been computed."""

    @staticmethod
    def forward(ctx: Any, then: Callable[[], None], *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.then = then
        return tensors

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.then()
        return None, *gradients
