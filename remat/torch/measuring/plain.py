"""Peak of the framework's own step, without computing anything: the same code on tensors without contents.

The model runs, and is differentiated, on fake tensors whose storages are followed from birth to death. PyTorch keeps
the same tensors for the backward pass, and Python holds its variables as long, as in the real step. Only the kernels do
not run; their workspaces come from measurements.
"""

from __future__ import annotations

import json
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from remat.errors import InvalidInput, first_line
from remat.graph import Graph, Operation, Work
from remat.torch.internals.autograd import storage_key
from remat.torch.internals.dynamo import Place, tracing_shown
from remat.torch.internals.operators import (
    ASKS_DEVICE,
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    TorchDispatchMode,
    answers_device,
    current_dispatch_mode,
    fakes_hidden,
    is_fake,
    outside_modes,
    replaced,
    schema_of,
    tree_leaves,
    tree_map,
    with_tensors,
)
from remat.torch.measuring.measure import undone
from remat.torch.step.branches import is_readable
from remat.torch.step.layouts import layouts_of_kernels
from remat.torch.step.loss import NO_LOSS, Needs, Outside, differentiated, gradients_restored
from remat.torch.step.refusals import check_buffers
from remat.torch.step.state import State, replaced_tensors
from remat.torch.step.work import call_signature, dense_bytes, storage_bytes, tensors_of

T = TypeVar("T")
Readable = Sequence[tuple[Tensor, Tensor]]  # arguments on whose values a model may branch: without, with contents
MOST_CONSTANT = 100_000  # elements of a tensor that is computed, or the largest readable argument's if it has more


@dataclass(frozen=True, slots=True)
class FollowedStep:
    """Calls of a step that was followed on tensors without contents, in their order.

    Attributes:
        signatures: [C] of each call, '' where it cannot be written down or only gives a view or a property of a tensor.
        held_bytes: [C] bytes of all storages that the step made and holds when the call ends, its results included.
        is_eager: the model computed as in eager mode, because it reads no values that are not known.
        left_bytes: of the tensors that the step leaves in the model's attributes.
        loss: what a loss outside of the module was taken to need, for people.
        returns_loss: the module's outputs have the loss.
        has_backward: outputs were found that need a gradient, so that there is a backward pass.
    """

    signatures: tuple[str, ...]
    held_bytes: tuple[int, ...]
    is_eager: bool = field(default=True, kw_only=True)
    left_bytes: int = field(default=0, kw_only=True)
    loss: str = field(default="", kw_only=True)
    returns_loss: bool = field(default=False, kw_only=True)
    has_backward: bool = field(default=True, kw_only=True)

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
    model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], outside: Outside = NO_LOSS,
    begin: Callable[[Follower], None] = lambda _: None, seen: AbstractContextManager[Any] | None = None,
    traced_at: Collection[Place] = (), sets_up: bool = False,
) -> FollowedStep:  # fmt: skip
    """Follow one forward and backward pass of `model` on fake tensors; model and gradients do not change.

    Args:
        begin: is called with the follower, before the step begins; more than once if the step begins again.
        outside: the loss.
        seen: a mode that sees the calls too.
        traced_at: places at which the model hears that it is traced, as when it is captured; by default nowhere.
        sets_up: keep what the model sets up in its first call, see `attributes_kept`.
    """

    def run(args: Any, kwargs: Any, readable: Readable) -> FollowedStep:
        return _step(model, args, kwargs, outside, begin, seen, readable)

    step, is_eager = _on_fakes(model, args, kwargs, run, traced_at, sets_up)
    return replace(step, is_eager=is_eager)


def real_step(
    model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], outside: Outside,
    begin: Callable[[Follower], None], device: str,
) -> FollowedStep:  # fmt: skip
    """As `plain_step`, of a step that runs; for models that compute differently without contents, or fail."""
    with undone(model, args, kwargs, device):
        return _step(model, args, kwargs, outside, begin)


def _on_fakes(
    model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], run: Callable[[Any, Any, Readable], T],
    traced_at: Collection[Place] = (), sets_up: bool = False,
) -> tuple[T, bool]:  # fmt: skip
    """What `run` makes of fake arguments, while parameters and buffers are fake too; it may begin again.

    The second result is `FollowedStep.is_eager`.
    """
    mode = FakeTensorMode(allow_non_fake_inputs=True)

    def bare(x: Tensor) -> Tensor:
        return mode.from_tensor(x.detach()).requires_grad_(x.requires_grad)

    fake_args, fake_kwargs = with_tensors(bare, (args, dict(kwargs)))
    both = zip(tree_leaves((fake_args, fake_kwargs)), tree_leaves((args, dict(kwargs))), strict=True)
    readable = [(fake, x) for fake, x in both if is_readable(x)]

    def followed(*contexts: AbstractContextManager[Any]) -> T:
        with replaced_tensors(model, bare, sets_up=sets_up), ExitStack() as stack:
            for context in (layouts_of_kernels(), *contexts, mode):
                stack.enter_context(context)
            return run(fake_args, fake_kwargs, readable)

    try:
        return followed(fakes_hidden(), *([tracing_shown(traced_at)] if traced_at else [])), True
    except (DataDependentOutputException, DynamicOutputShapeException):
        # Some models read values only where they are not traced.
        return followed(tracing_shown()), False


def _step(
    model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], outside: Outside,
    begin: Callable[[Follower], None], seen: AbstractContextManager[Any] | None = None,
    readable: Readable = (),
) -> FollowedStep:  # fmt: skip
    known = [*State(model).tensors, *tensors_of((args, kwargs))]  # held, so that no new storage takes the place of one
    follower = Follower(known, readable)
    taken = list[Needs]()  # of the loss, since the first backward pass began
    begin(follower)

    @contextmanager
    def loss(found: list[Tensor]) -> Iterator[None]:
        needs = outside.assumed(found)
        with follower.holding(needs.most_bytes - sum(each.held_bytes for each in taken)):
            yield
        if not taken:
            taken.append(needs)
            follower.hold(needs.held_bytes)

    with follower, seen or nullcontext():
        outputs = model(*args, **kwargs)
        returns_loss = outside.knowing(outputs) is not outside
        has_backward = outside.given is not None or bool(differentiated(outputs))
        outside.backward_from(outputs, loss)
        del outputs
    check_buffers(model)
    left = {storage_key(x) for x in State(model).tensors} & follower.alive.keys()
    return FollowedStep(
        tuple(follower.signatures),
        tuple(follower.held),
        left_bytes=sum(follower.alive[key] for key in left),
        loss="".join(each.text for each in taken),
        returns_loss=returns_loss,
        has_backward=has_backward,
    )


@dataclass(frozen=True, slots=True)
class FollowedLoss:
    """A loss outside of a module, followed alone, from the module's outputs to the beginning of its backward pass.

    Attributes:
        step: what it makes, the gradients of outputs included, and the copies of these that the backward pass makes if
            their layout is not the output's; the outputs themselves do not count.
        held_bytes: when the module's backward pass begins.
        given_bytes: of the gradients of outputs that are there then.
        outputs_bytes: of gradients for all outputs that may have one.
        read_bytes: of tensors from outside that it reads.
        left_out: (shape, dtype) of outputs that get no gradient; no other output is like them.
    """

    step: FollowedStep
    held_bytes: int
    given_bytes: int
    outputs_bytes: int
    read_bytes: int
    left_out: frozenset[tuple[Any, ...]]


def followed_loss(
    model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], outside: Outside, device: str
) -> FollowedLoss:
    """Follow a given loss on the outputs that the model has without contents; on real ones if it reads values.

    Raises:
        InvalidInput: the loss cannot be computed, or is no scalar.
    """

    def run(args: Any, kwargs: Any, readable: Readable = ()) -> FollowedLoss:
        return _loss_alone(model, args, kwargs, outside, readable)

    try:
        return _on_fakes(model, args, kwargs, run)[0]
    except InvalidInput:
        raise
    except Exception:  # whatever stops it: on real tensors it shows whether the loss is at fault
        pass
    try:
        with undone(model, args, kwargs, device):
            return run(args, kwargs)
    except InvalidInput:
        raise
    except Exception as error:
        raise InvalidInput(
            f"loss= fails on the module's outputs for the sample arguments ({first_line(error)}): give a "
            "function of these outputs, or leave it out"
        ) from error


def _loss_alone(model: nn.Module, args: Any, kwargs: Any, outside: Outside, readable: Readable) -> FollowedLoss:
    made = model(*args, **kwargs)
    found = differentiated(made)
    start = torch.zeros((), requires_grad=True)
    begun = dict[str, Any]()
    known = [*State(model).tensors, *tensors_of((args, kwargs, made))]
    follower = Follower(known, readable)

    def begins(gradients: Sequence[Tensor | None]) -> None:
        pairs = [(x, g) for x, g in zip(found, gradients, strict=True) if g is not None]
        own = {storage_key(g): storage_bytes(g) for _, g in pairs if storage_key(g) in follower.alive}
        left_out = {like(x) for x in found} - {like(x) for x, _ in pairs}
        begun.update(held_bytes=follower.total_bytes, given_bytes=sum(own.values()), left_out=frozenset(left_out))
        for x, g in pairs:
            if g.stride() != x.stride():
                torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device).copy_(g)

    outputs = iter(_Standing.apply(begins, start, *(x.detach() for x in found)) if found else ())  # pyright: ignore[reportArgumentType]
    standing = {id(x): next(outputs) for x in found}
    stands_for = with_tensors(lambda x: standing.get(id(x), x), made)
    del made
    with follower:
        loss = outside.loss(stands_for)
        with gradients_restored(loss):
            loss.backward(retain_graph=outside.retains)
    if not begun:
        raise InvalidInput("loss= does not depend on the module's outputs: give a function of these")
    del loss
    step = FollowedStep(tuple(follower.signatures), tuple(follower.held))
    return FollowedLoss(
        step, **begun, outputs_bytes=sum(dense_bytes(x) for x in found if x.numel() > 1),
        read_bytes=sum(n_bytes for _, n_bytes in follower.outside.values()),
    )  # fmt: skip


def like(output: Tensor) -> tuple[Any, ...]:
    """What distinguishes outputs whose order is not known."""
    return tuple(output.shape), output.dtype


class _Standing(torch.autograd.Function):
    """A module of which only the outputs are there; its backward pass does no more than begin."""

    @staticmethod
    def forward(ctx: Any, begins: Callable[..., None], _start: Tensor, *outputs: Tensor) -> tuple[Tensor, ...]:
        ctx.begins = begins
        ctx.set_materialize_grads(False)
        return outputs

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.begins(gradients)
        return None, None, *(None for _ in gradients)


class Follower(TorchDispatchMode):
    """Counts the bytes of the storages that calls make, from the call that makes one until it is dropped.

    Args:
        known: tensors that were there before.
        readable: (tensor without contents, the same with them) of arguments on whose values the model may branch.
    """

    def __init__(self, known: list[Tensor], readable: Readable = ()):
        super().__init__()
        self.known = {storage_key(t) for t in known}
        self.constants = WeakTensorKeyDictionary()  # without contents -> with contents
        for fake, x in readable:
            self.constants[fake] = x
        self.most_constant = max([MOST_CONSTANT, *(x.numel() for _, x in readable)])
        self.alive: dict[int, int] = {}
        self.outside: dict[int, tuple[Tensor, int]] = {}  # storage -> (a tensor from outside with it, its bytes)
        self.total_bytes = self.extra_bytes = 0
        self.sees = True
        self.signatures: list[str] = []
        self.held: list[int] = []

    def holding(self, extra_bytes: int) -> AbstractContextManager[None]:
        """Count `extra_bytes` more meanwhile."""
        return replaced(self, extra_bytes=extra_bytes)

    def hold(self, n_bytes: int) -> None:
        """Count bytes that no tensor has from now on; less if negative."""
        self.total_bytes += n_bytes
        if n_bytes > 0:
            self.signatures.append("")
            self.held.append(self.total_bytes + self.extra_bytes)

    def unseen(self) -> AbstractContextManager[None]:
        """Count nothing that is made meanwhile."""
        return replaced(self, sees=False)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not self.sees:
            return func(*args, **kwargs)
        if func is ASKS_DEVICE:  # two of three calls of a step: it has to be quick
            self.signatures.append("")
            self.held.append(self.total_bytes + self.extra_bytes)
            return answers_device(args) if isinstance(args[0], FakeTensor) else func(*args)
        if func is torch.ops.aten._local_scalar_dense.default and args[0] in self.constants:
            with outside_modes():
                return self.constants[args[0]].item()  # the model branches on it
        self._note_outside(tensors_of((args, kwargs)))
        is_mutable = schema_of(func).is_mutable
        signature = call_signature(func, args, kwargs) if is_mutable else ""  # before shapes change in place
        made = func(*args, **kwargs)
        self._note_constant(func, args, kwargs, made)
        new = [self.follow(x) for x in tensors_of(made)]
        if any(new) and not is_mutable:
            signature = call_signature(func, args, kwargs)
        self.signatures.append(signature)
        self.held.append(self.total_bytes + self.extra_bytes)
        return made

    def _note_outside(self, given: Iterable[Tensor]) -> None:
        """Note tensors that were there before; of one with contents, its counterpart without.

        They are held, so that no later storage gets the place of one of theirs.
        """
        mode = current_dispatch_mode()
        for x in given:
            inside = mode.from_tensor(x) if isinstance(mode, FakeTensorMode) and not is_fake(x) else x
            key = storage_key(inside)
            if key not in self.known and key not in self.alive:
                self.known.add(key)
                self.outside[key] = inside, storage_bytes(x)

    def _note_constant(self, func: Any, args: Any, kwargs: Any, made: Any) -> None:
        """Compute what depends on readable arguments at most, e.g. on `torch.arange` only, if it is small."""
        given = tensors_of((args, kwargs))
        if schema_of(func).is_mutable:
            changed = set(map(storage_key, given))
            for tensor in [tensor for tensor in self.constants if storage_key(tensor) in changed]:
                del self.constants[tensor]
        elif (
            isinstance(made, Tensor)
            and made.numel() <= self.most_constant
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
