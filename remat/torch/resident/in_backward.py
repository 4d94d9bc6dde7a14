"""An optimizer whose updates run in the backward pass: each parameter's own step, and what a loop must not do then."""

from __future__ import annotations

import collections
import inspect
import itertools
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from remat.errors import InvalidInput, InvalidPlan, headline, shown
from remat.torch.internals import autograd
from remat.torch.internals.autograd import storage_key
from remat.torch.internals.operators import replaced, tree_map
from remat.torch.measuring.plain import Follower
from remat.torch.resident.updates import with_updates
from remat.torch.step.training_graph import CapturedStep
from remat.torch.step.work import CUDA_BLOCK_BYTES, in_blocks, tensors_of

OPTION = "optimizer_in_backward=True"
NO_GRADIENT = (
    f"no gradients are held with {OPTION}, because parameters are updated in the backward pass: leave clipping, "
    "accumulation, GradScaler and reads of .grad out"
)
TWICE = f"with {OPTION} each backward pass updates the parameters"
NUMBER_BYTES = 12  # of a number in a tensor, in a kernel on the CPU: float64, and its cast to float32
MOST_TENSORS = 4  # temporaries that an update holds at once
_HARMLESS = {torch.ops.aten.zero_.default, torch.ops.aten.detach.default, torch.ops.aten._foreach_zero_.default}


class Given(Tensor):
    """In place of a gradient that was given to the optimizer: 0 bytes, and every use of it is refused."""

    @staticmethod
    def __new__(cls, parameter: Tensor) -> Given:
        return autograd.of_no_bytes(cls, parameter)  # pyright: ignore[reportReturnType]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _HARMLESS:  # zero_grad(set_to_none=False)
            return args[0]
        raise InvalidInput(NO_GRADIENT)

    def __repr__(self, **_: Any) -> str:
        return f"Given(shape={tuple(self.shape)})"


def step_on(optimizer: torch.optim.Optimizer, state: Any, group: dict[str, Any]) -> bool:
    """One step of an optimizer on the parameters of one group, without its hooks.

    Returns:
        Whether it changed numbers of its own, beside `state` and the parameters.
    """
    own = autograd.optimizer_without_hooks(optimizer, state, group)
    before = {**vars(own), **group}
    autograd.step_without_hooks(own)(own)
    after = {**vars(own), **group}
    return before.keys() != after.keys() or any(after[key] is not value for key, value in before.items())


def update_bytes(optimizer: torch.optim.Optimizer, parameter: Tensor) -> int:
    """Bytes that an update of one parameter needs beside its gradient and its state.

    It is followed on copies: without contents if that suffices, else on the CPU; without state if it makes its own.

    Raises:
        InvalidInput: the optimizer keeps numbers for all parameters together, or its step fails.
    """
    name, why = type(optimizer).__name__, ""
    for device in ("meta", "cpu"):
        for state in ({}, optimizer.state.get(parameter, {})):
            try:
                n_bytes = _followed(optimizer, parameter, device, state)
            except Exception as error:  # an optimizer may read values, or need its state, in any way
                why = headline(error, 160)
                continue
            if n_bytes is None:
                raise InvalidInput(f"{OPTION}: {name} keeps numbers for all parameters together; leave it out")
            return n_bytes
    raise InvalidInput(f"{OPTION}: a step of {name} on one parameter fails ({why}); leave it out")


def _followed(
    optimizer: torch.optim.Optimizer, parameter: Tensor, device: str, of_parameter: Mapping[str, Any]
) -> int | None:  # fmt: skip
    """Bytes that an update needs, on a copy of the parameter that is all ones; None if it changes other numbers."""
    copied, state = nn.Parameter(torch.ones_like(parameter, device=device)), collections.defaultdict[Any, Any](dict)
    copied.grad = torch.ones_like(copied)
    if of_parameter:
        state[copied] = tree_map(lambda x: _moved(x, device), of_parameter)
    group = next(group for group in optimizer.param_groups if any(p is parameter for p in group["params"]))
    group = {**group, "params": [copied]}
    if group.get("capturable"):
        group["capturable"] = False
    if "foreach" in group and group["foreach"] is None:
        group["foreach"] = parameter.is_cuda and not group.get("fused")  # as PyTorch chooses
    most = 0
    for _ in range(2):  # the first step makes state
        known = _storages(state)
        follower = Follower([copied, copied.grad, *tensors_of([*state.values()])])
        with torch.no_grad(), follower:
            if step_on(optimizer, state, group):
                return None
        made = sum(size for key, size in _storages(state).items() if key not in known)
        most = max([most, *(held - made for held in follower.held)])
    if parameter.is_cuda:  # the allocator rounds each of the tensors up
        return in_blocks(most) + MOST_TENSORS * CUDA_BLOCK_BYTES
    return most + NUMBER_BYTES


class ByTheLoop:
    """The training loop calls its optimizer; steps leave gradients."""

    def added(self, step: CapturedStep) -> CapturedStep:
        """The step with the updates that are operations of it."""
        return step

    def update_of(self, parameter: Tensor) -> Callable[[Tensor], None]:
        """The function that updates a parameter of the model with its gradient, in a step with updates."""
        raise InvalidPlan("the plan updates parameters, which the loop does here")

    def trained(self) -> tuple[bool, ...]:
        """For each parameter of the model whether a step updates it; () if none does."""
        return ()

    def check(self) -> None:
        """Refuse, before a forward pass, what updates cannot do, in one line."""

    def check_copy(self) -> None:
        """Refuse a copy of the module, of which other parameters would be updated."""

    def watch(self, node: Any) -> None:
        """Note a forward pass by its node of the autograd graph."""

    def collecting(self) -> AbstractContextManager[None]:
        """Meanwhile gradients are left in ``.grad``, and nothing is updated."""
        return nullcontext()

    def undone(self) -> AbstractContextManager[None]:
        """Undo afterwards what updates change: parameters, the optimizer's state, and what is noted of the loop."""
        return nullcontext()


BY_THE_LOOP = ByTheLoop()


class InBackward:
    """The updates of a model's parameters by an optimizer, in the backward pass; for its methods see `ByTheLoop`.

    `Given` tensors take the place of gradients until ``optimizer.step()`` or ``zero_grad()``, so that what reads
    gradients is refused and does not silently do nothing.

    Raises:
        InvalidInput: the optimizer cannot step on one parameter alone, or has none of the model's.
    """

    def __init__(self, optimizer: Any, model: nn.Module):
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise InvalidInput(
                f"{OPTION} needs optimizer=, a torch.optim.Optimizer over the model's parameters, not "
                f"{shown(optimizer)}"
            )
        self.optimizer, self.model = optimizer, weakref.ref(model)
        self.name = type(optimizer).__name__
        self.sizes: dict[Any, int] = {}  # [what decides it] bytes that an update needs
        self.groups: dict[int, dict[str, Any]] = {}  # id of a parameter -> its group, during a backward pass
        self.steps = 0  # backward passes that updated
        self.since = 0  # the same since the loop's last optimizer.step() or zero_grad()
        self.is_stepped = False  # whether the loop calls optimizer.step()
        self.collects = False  # gradients are left to the caller, and nothing is updated
        self.forwards: list[tuple[int, weakref.ref[Any]]] = []  # (steps before it, its node of the autograd graph)
        self._refuse()
        handle = optimizer.register_step_pre_hook(_calling(weakref.WeakMethod(self._before_step)))
        weakref.finalize(self, handle.remove)

    def _refuse(self) -> None:
        name = self.name
        closure = inspect.signature(type(self.optimizer).step).parameters.get("closure")
        if closure is not None and closure.default is closure.empty:
            raise InvalidInput(f"{OPTION}: {name} steps on all parameters at once (it needs a closure); leave it out")
        held, storages = self._parameters(), dict[int, Tensor]()
        if not held:
            raise InvalidInput(f"{OPTION}: the optimizer ({name}) has no parameter of the model that needs a gradient")
        for p in held:
            if storages.setdefault(storage_key(p), p) is not p:
                raise InvalidInput(f"{OPTION}: two parameters of {name} share memory; tie them to one parameter")

    def trained(self) -> tuple[bool, ...]:
        ids = {id(p) for group in self.optimizer.param_groups for p in group["params"]}
        return tuple(p.requires_grad and id(p) in ids for p in self._model().parameters())

    def _parameters(self) -> list[nn.Parameter]:
        """Those parameters of the model that the optimizer trains."""
        return list(itertools.compress(self._model().parameters(), self.trained()))

    def added(self, step: CapturedStep) -> CapturedStep:
        group_of = {id(p): i for i, group in enumerate(self.optimizer.param_groups) for p in group["params"]}
        held = {id(p) for p in self._parameters()}
        primals = step.training_graph.primals
        workspaces = {i: self._update_bytes(x, group_of[id(x)]) for i, x in enumerate(primals) if id(x) in held}
        return with_updates(step, workspaces, self.name)

    def _update_bytes(self, parameter: Tensor, group: int) -> int:
        key = group, parameter.shape, parameter.stride(), parameter.dtype, parameter.device
        if key not in self.sizes:
            self.sizes[key] = update_bytes(self.optimizer, parameter)
        return self.sizes[key]

    def update_of(self, parameter: Tensor) -> Callable[[Tensor], None]:
        (name,) = (name for name, p in self._model().named_parameters() if p is parameter)

        def update(gradient: Tensor) -> None:
            self._update(self._model().get_parameter(name), gradient)

        return update

    def _model(self) -> nn.Module:
        model = self.model()
        assert model is not None, "the model that is trained is gone"
        return model

    def _update(self, parameter: Tensor, gradient: Tensor) -> None:
        if parameter.grad is not None and not isinstance(parameter.grad, Given):
            raise InvalidInput(f"{TWICE}: a parameter has another gradient, from outside of the module; leave that out")
        parameter.grad = gradient
        if not self.collects:
            try:
                step_on(self.optimizer, self.optimizer.state, {**self.groups[id(parameter)], "params": [parameter]})
            finally:
                parameter.grad = Given(parameter)

    # What a loop does

    def check(self) -> None:
        group = torch.distributed
        if group.is_available() and group.is_initialized() and group.get_world_size() > 1:
            raise InvalidInput(f"{OPTION} does not add gradients of several processes up; leave it out")
        for p in self._parameters():
            if p.grad is not None and not isinstance(p.grad, Given):
                raise InvalidInput(f"{TWICE}; gradients of an earlier step are held: call zero_grad() first")
            if autograd.has_hooks(p):
                raise InvalidInput(f"{OPTION}: hooks on the gradients of parameters are not called; remove them")

    def check_copy(self) -> None:
        raise TypeError("a module whose optimizer runs in the backward pass cannot be copied: copy its .model")

    def watch(self, node: Any) -> None:
        steps, me = self.steps, weakref.ref(node)
        self.forwards = [each for each in self.forwards if each[1]() is not None and each[0] == steps]
        self.forwards.append((steps, me))
        node.register_prehook(lambda _: self._begin(steps, me))

    def _begin(self, steps: int, node: weakref.ref[Any]) -> None:
        if self.collects:
            return
        others = [other() for at, other in self.forwards if other is not node and at == self.steps]
        if steps != self.steps or any(other is not None and autograd.will_run(other) for other in others):
            raise InvalidInput(f"{TWICE}: go through one forward pass, once, and then make the next one")
        self.since = self._since()
        if self.since and self.is_stepped:
            raise InvalidInput(
                f"{TWICE}: gradients cannot be accumulated over several; call optimizer.step() after each"
            )
        self.groups = {id(p): group for group in self.optimizer.param_groups for p in group["params"]}
        own: Any = node()
        leaves = [leaf for leaf, _ in own.next_functions if id(getattr(leaf, "variable", None)) in self.groups]
        if not all(map(autograd.gets_gradient, leaves)):
            raise InvalidInput(
                f"{TWICE}, so that torch.autograd.grad() and backward(inputs=...) would too: call backward() alone"
            )
        self.steps += 1
        self.since += 1
        autograd.note_step(self.optimizer)

    def _since(self) -> int:
        """Backward passes since the last ``optimizer.step()`` or ``zero_grad()``, which leaves no `Given` behind."""
        return self.since if any(isinstance(p.grad, Given) for p in self._parameters()) else 0

    def _before_step(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """At the loop's ``optimizer.step()``, which finds nothing to do for the parameters that are updated."""
        since, self.since, self.is_stepped = self._since(), 0, True
        self._forget()
        if since > 1:
            raise InvalidInput(
                f"{TWICE}: {since} ran before this optimizer.step(), and their gradients were not accumulated"
            )
        me, *given = args
        closure = given[0] if given else kwargs.get("closure")
        return (args, kwargs) if closure is None else ((me,), {"closure": self._forgetting(closure)})

    def _forgetting(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        def called() -> Any:
            loss = closure()
            self._forget()
            return loss

        return called

    def _forget(self) -> None:
        for group in self.optimizer.param_groups:
            for p in group["params"]:
                if isinstance(p.grad, Given):
                    p.grad = None

    # Steps that are undone

    def collecting(self) -> AbstractContextManager[None]:
        return replaced(self, collects=True)

    @contextmanager
    def undone(self) -> Iterator[None]:
        noted = self.steps, self.since
        parameters = [p for group in self.optimizer.param_groups for p in group["params"]]
        before = [p.detach().to("cpu", copy=True) for p in parameters]
        state = self.optimizer.state
        copied = {p: tree_map(lambda x: x.clone() if isinstance(x, Tensor) else x, of) for p, of in state.items()}
        self.optimizer.state = collections.defaultdict(dict, copied)
        try:
            yield
        finally:
            self.optimizer.state = state
            self.steps, self.since = noted
            self._forget()
            with torch.no_grad():
                for p, old in zip(parameters, before, strict=True):
                    p.copy_(old)


Updates = ByTheLoop | InBackward


def _moved(x: Any, device: str) -> Any:
    """A part of an optimizer's state on a device; counters keep their contents, on which a step may branch."""
    if not isinstance(x, Tensor):
        return x
    return x.clone() if x.numel() == 1 else torch.ones_like(x, device=device)


def _storages(state: Mapping[Any, Any]) -> dict[int, int]:
    """[storage] bytes of an optimizer's state."""
    return {storage_key(x): x.untyped_storage().nbytes() for x in tensors_of([*state.values()])}


def _calling(method: weakref.WeakMethod[Any]) -> Callable[..., Any]:
    """A hook before an optimizer's step that does not keep the method's object alive."""

    def hook(_optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        found = method()
        return None if found is None else found(args, kwargs)

    return hook
