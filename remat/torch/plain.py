"""Peak of the framework's own step, without computing anything: the same code on tensors without contents.

The model runs, and is differentiated, on fake tensors whose storages are followed from birth to death. PyTorch keeps
the same tensors for the backward pass, and Python holds its variables as long, as in the real step. Only the kernels do
not run; their workspaces come from measurements.
"""

from __future__ import annotations

import json
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from remat.graph import Graph, Operation, Work
from remat.torch._loss import backward_from
from remat.torch._private import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
    TorchDispatchMode,
    fakes_hidden,
    outside_modes,
    schema_of,
    storage_key,
    tracing_shown,
    tree_map,
)
from remat.torch._state import State, replaced_tensors
from remat.torch._work import call_signature, storage_bytes, tensors_of
from remat.torch.layouts import layouts_of_kernels
from remat.torch.measure import undone

LossBytes = int | Callable[[list[Tensor]], int]
MOST_CONSTANT = 100_000  # elements of a tensor that is computed because it depends on none from outside


@dataclass(frozen=True, slots=True)
class FollowedStep:
    """Calls of a step that was followed on tensors without contents, in their order.

    Attributes:
        signatures: [C] of each call, '' where it cannot be written down or only gives a view or a property of a tensor.
        held_bytes: [C] bytes of all storages that the step made and holds when the call ends, its results included.
        left_bytes: of the tensors that the step leaves in the model's attributes.
    """

    signatures: tuple[str, ...]
    held_bytes: tuple[int, ...]
    left_bytes: int = field(default=0, kw_only=True)

    def peak_bytes(self, workspaces: Mapping[str, int]) -> int:
        """Most bytes that the step holds above those held before it; `workspaces`: [signature] bytes."""
        calls = zip(self.signatures, self.held_bytes, strict=True)
        return max((held + workspaces.get(signature, 0) for signature, held in calls), default=0)


def has_recurrent_layer(model: nn.Module) -> bool:
    """Whether a step cannot be followed: without contents these layers run unrolled, and need other memory."""
    return any(isinstance(module, nn.RNNBase) for module in model.modules())


def calls_graph(name: str, signatures: Iterable[str]) -> Graph:
    """Distinct calls as operations of their own, to be measured; not a graph to plan on."""
    distinct = sorted(set(signatures) - {""})
    operations = []
    for i, signature in enumerate(distinct):
        called = json.loads(signature)["op"]
        kind = called.rpartition(".")[0] or called
        operations.append(Operation(f"{kind}_{i}", kind, (), (), work=Work(signature=signature)))
    return Graph(name, tuple(operations), ())


def plain_step(
    model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], loss_bytes: LossBytes,
    begin: Callable[[Follower], None] = lambda _: None, seen: AbstractContextManager[Any] | None = None,
    sets_up: bool = False,
) -> FollowedStep:  # fmt: skip
    """Follow one forward and backward pass of `model` on fake tensors; model and gradients do not change.

    Args:
        begin: is told who follows, before the step begins; more than once if the step begins again.
        loss_bytes: bytes that a loss outside of the module holds between forward and backward, beside the outputs and
            their gradients; or a function that gives them from the outputs.
        seen: a mode that sees the calls too.
        sets_up: keep what the model sets up in its first call, see `attributes_kept`.
    """
    mode = FakeTensorMode(allow_non_fake_inputs=True)

    def bare(x: Tensor) -> Tensor:
        return mode.from_tensor(x.detach()).requires_grad_(x.requires_grad)

    fake_args, fake_kwargs = tree_map(lambda x: bare(x) if isinstance(x, Tensor) else x, (args, dict(kwargs)))

    def followed(tells_truth: bool) -> FollowedStep:
        shown = tracing_shown if tells_truth else fakes_hidden
        with replaced_tensors(model, bare, sets_up=sets_up), layouts_of_kernels(), shown(), mode:
            return _step(model, fake_args, fake_kwargs, loss_bytes, begin, seen)

    try:
        return followed(tells_truth=False)
    except (DataDependentOutputException, DynamicOutputShapeException):
        # Some models read values only where they are not traced.
        return followed(tells_truth=True)


def real_step(
    model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], loss_bytes: LossBytes,
    begin: Callable[[Follower], None], device: str,
) -> FollowedStep:  # fmt: skip
    """As `plain_step`, of a step that runs; for models that do otherwise, or nothing, on tensors without contents."""
    with undone(model, args, kwargs, device):
        return _step(model, args, kwargs, loss_bytes, begin)


def _step(
    model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], loss_bytes: LossBytes,
    begin: Callable[[Follower], None], seen: AbstractContextManager[Any] | None = None,
) -> FollowedStep:  # fmt: skip
    known = [*State(model).tensors, *tensors_of((args, kwargs))]  # held, so that no new storage takes the place of one
    follower = Follower(known)
    begin(follower)

    def loss(found: list[Tensor]) -> AbstractContextManager[None]:
        return follower.holding(loss_bytes if isinstance(loss_bytes, int) else loss_bytes(found))

    with follower, seen or nullcontext():
        backward_from(model(*args, **kwargs), loss)
    left = {storage_key(x) for x in State(model).tensors} & follower.alive.keys()
    return FollowedStep(
        tuple(follower.signatures), tuple(follower.held), left_bytes=sum(follower.alive[key] for key in left)
    )


class Follower(TorchDispatchMode):
    """Counts the bytes of the storages that calls make, from the call that makes one until it is dropped."""

    def __init__(self, known: list[Tensor]):
        super().__init__()
        self.known = {storage_key(t) for t in known}
        self.constants = WeakTensorKeyDictionary()  # without contents -> with contents
        self.alive: dict[int, int] = {}
        self.total_bytes = self.extra_bytes = 0
        self.sees = True
        self.signatures: list[str] = []
        self.held: list[int] = []

    @contextmanager
    def holding(self, extra_bytes: int) -> Iterator[None]:
        """Count `extra_bytes` more meanwhile."""
        self.extra_bytes = extra_bytes
        try:
            yield
        finally:
            self.extra_bytes = 0

    def hold(self, n_bytes: int) -> None:
        """Count bytes that no tensor has from now on; less if negative."""
        self.total_bytes += n_bytes
        if n_bytes > 0:
            self.signatures.append("")
            self.held.append(self.total_bytes + self.extra_bytes)

    @contextmanager
    def unseen(self) -> Iterator[None]:
        """Count nothing that is made meanwhile."""
        self.sees = False
        try:
            yield
        finally:
            self.sees = True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not self.sees:
            return func(*args, **kwargs)
        if func is torch.ops.aten._local_scalar_dense.default and args[0] in self.constants:
            with outside_modes():
                return self.constants[args[0]].item()  # the model branches on it
        signature = call_signature(func, args, kwargs)  # before the call, which may change shapes in place
        made = func(*args, **kwargs)
        self._note_constant(func, args, kwargs, made)
        new = [self.follow(x) for x in tensors_of(made)]
        self.signatures.append(signature if any(new) or schema_of(func).is_mutable else "")
        self.held.append(self.total_bytes + self.extra_bytes)
        return made

    def _note_constant(self, func: Any, args: Any, kwargs: Any, made: Any) -> None:
        """Compute what depends on no tensor from outside, e.g. on `torch.arange` only, if it is small."""
        given = tensors_of((args, kwargs))
        if schema_of(func).is_mutable:
            changed = set(map(storage_key, given))
            for tensor in [tensor for tensor in self.constants if storage_key(tensor) in changed]:
                del self.constants[tensor]
        elif (
            isinstance(made, Tensor)
            and made.numel() <= MOST_CONSTANT
            and torch.Tag.nondeterministic_seeded not in func.tags
            and all(x in self.constants for x in given)
        ):
            args, kwargs = tree_map(lambda x: self.constants[x] if isinstance(x, Tensor) else x, (args, kwargs))
            with outside_modes():
                self.constants[made] = func(*args, **kwargs)

    def follow(self, tensor: Tensor) -> bool:
        """Count the tensor's storage if it is new; returns whether it is."""
        key = storage_key(tensor)
        if key in self.known or key in self.alive:
            return False
        self.alive[key] = storage_bytes(tensor)
        self.total_bytes += self.alive[key]
        weakref.finalize(tensor.untyped_storage(), self._drop, key)
        return True

    def _drop(self, key: int) -> None:
        self.total_bytes -= self.alive.pop(key)
