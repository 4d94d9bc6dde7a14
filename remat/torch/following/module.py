"""The module that `rematerialize` returns: the model's own parameters, executed under a plan."""

from __future__ import annotations

import copy
import functools
import itertools
import threading
import time
import types
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import fx, nn

from remat.errors import InvalidInput, warn
from remat.execution import Planned, StepPlan
from remat.torch import _random
from remat.torch.implementations import NotInvertible
from remat.torch.internals import autograd, inductor
from remat.torch.internals.autograd import share_tables, storage_key
from remat.torch.internals.dynamo import Told
from remat.torch.internals.notes import primals_of
from remat.torch.internals.operators import is_fake, tree_map
from remat.torch.measuring.plain import plain_step
from remat.torch.planning.planner import Planner, describe_inputs
from remat.torch.resident import optimizer
from remat.torch.resident.in_backward import Given, InBackward
from remat.torch.resident.updates import with_updates
from remat.torch.step import aot, capture, features
from remat.torch.step import training_graph as step_graph
from remat.torch.step.branches import NewBranches, Values
from remat.torch.step.emit import emit
from remat.torch.step.numbers import check_containers, numbers_apart
from remat.torch.step.recurrent import replace_recurrent
from remat.torch.step.refusals import (
    causes,
    check_functions,
    check_given_tensors,
    check_history,
    check_momentum,
    check_own_tensors,
    refusals,
)
from remat.torch.step.state import State
from remat.torch.step.sums import Sums
from remat.torch.step.with_implementations import with_implementations
from remat.torch.step.work import local_part
from remat.units import format_size

COMPILES_ITSELF = "a rematerialized module compiles its own steps: leave it out of torch.compile, or fullgraph=True out"
_numbers = itertools.count()


class Rematerialized(Planned, nn.Module):
    """A model whose training steps follow a plan; in every other respect the model itself.

    Parameters, buffers, submodules and `state_dict` are the model's own objects under its own names. The model answers
    for all other attributes. Without gradients (``torch.no_grad()``) the plain model runs. A step with other shapes (a
    smaller last batch) or another mode is captured and planned when it first occurs, or before, by `prepare`.

    Attributes:
        model: the plain model.
        plan: of a step on the sample arguments; ``print`` it, ``plan.save(path)`` it.
        measured_peak_bytes: of that step, if it was verified; it counts the same things as `predicted_peak_bytes`.
    """

    plan: StepPlan
    measured_peak_bytes: int | None = None

    def __init__(self, model: nn.Module, planner: Planner, plan: StepPlan, backend: str, accumulates: bool = False):
        super().__init__()
        share_tables(self, model)
        self.__dict__.update(model=model, _planner=planner, plan=plan, _backend=backend, training=model.training)
        self.__dict__["_accumulates"] = accumulates  # set too once a step finds gradients of an earlier one
        self.__dict__["_step"] = _CompiledStep(model, planner, backend)
        self.__dict__["forward"] = _signed(weakref.WeakMethod(self._forward), model)
        optimizer.watch(self, planner.resident.state_bytes)

    @property
    def __class__(self) -> type:  # pyright: ignore[reportIncompatibleMethodOverride] - `type(self)` tells the truth
        """The model's class, so that trainers and savers treat the module as they treat the model."""
        return type(self.__dict__.get("model", self))

    def _call_impl(self, *args: Any, **kwargs: Any) -> Any:  # of `nn.Module`: what ``model(...)`` runs
        """Without hooks of its own the module is no step of its own to hooks for all modules: they see the model."""
        return super()._call_impl(*args, **kwargs) if autograd.has_own_hooks(self) else self.forward(*args, **kwargs)

    def _forward(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return self.model(*args, **kwargs)
        if self._planner.in_backward is not None:
            self._planner.in_backward.check()
        if not self._accumulates:
            self._warn_of_held_gradients()
        if self._planner.implementations != "joint":
            return self._step(args, kwargs)
        random = _random.random_states()
        try:
            return self._step(args, kwargs)
        except NotInvertible as error:
            _random.set_random_states(random)
            self._invert_nothing(str(error))
            return self._step(args, kwargs)

    def prepare(
        self,
        *sample_args: tuple[Any, ...] | list[tuple[Any, ...]],
        sample_kwargs: Mapping[str, Any] | None = None,
    ) -> tuple[StepPlan, ...]:
        """Plan steps on other arguments before they occur, so that a loop does not pause to plan them.

        Steps are planned for the mode (train or eval) and the autocast in force now, within the same budget in bytes.
        A step that fits without recomputation takes seconds; others take up to `time_limit_s` each.

        Args:
            sample_args: for each step a tuple of the model's positional arguments, or one list of such tuples; only
                shapes and dtypes matter, so that tensors on ``meta`` suffice.
            sample_kwargs: keyword arguments of the model, for all of these steps.

        Returns:
            A plan for each step.

        Raises:
            InvalidInput: no plan within the budget was found, or the model does not compile for these arguments.
        """
        planner, plans = self._planner, []
        steps = sample_args[0] if len(sample_args) == 1 and isinstance(sample_args[0], list) else sample_args
        if not steps or not all(isinstance(args, tuple) for args in steps):
            raise InvalidInput("prepare takes tuples of the model's positional arguments, e.g. prepare((x,), (y,))")
        for args in steps:
            plans += self._plans_for(*with_storages((args, keywords(sample_kwargs)), planner.device))
        return tuple(plans)

    def _plans_for(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[StepPlan]:
        planner = self._planner
        step = captured_step(
            self.model, args, kwargs, self._backend, planner.implementations, planner.in_backward
        )  # fmt: skip
        return [planner.plan(step, describe_inputs((args, kwargs)))]

    def _invert_nothing(self, why: str) -> None:
        """Plan this and later steps with ``exact`` implementations, because a weight came near zero in training.

        The forward pass ended before it changed a buffer, so that it can run again.
        """
        warn(f"{why}; from here on steps are planned with implementations='exact'")
        planner = self._planner
        planner.implementations = "exact"
        planner.plans.clear()
        self.__dict__["_step"] = _CompiledStep(self.model, planner, self._backend)

    def _warn_of_held_gradients(self) -> None:
        """Warn, once, if gradients that the budget does not count are still held when a step begins."""
        real = (p.grad for p in self.parameters() if p.grad is not None and not isinstance(p.grad, Given))
        gradients = map(local_part, real)
        sizes = {storage_key(x): x.untyped_storage().nbytes() for x in gradients}  # DDP's are views of buckets
        held = sum(sizes.values())
        if held:
            self.__dict__["_accumulates"] = True
            warn(
                f"{format_size(held)} of gradients are held from an earlier step and come on top of the promised peak: "
                "call zero_grad() before the forward pass, or give rematerialize(..., accumulate=True)"
            )

    def extra_repr(self) -> str:
        return repr(self.plan)

    def train(self, mode: bool = True) -> Rematerialized:
        self.model.train(mode)
        self.training = mode
        return self

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return self.model.state_dict(*args, **kwargs)

    def load_state_dict(self, state_dict: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
        return self.model.load_state_dict(state_dict, *args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if "model" not in self.__dict__:
                raise
            return getattr(self.__dict__["model"], name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self.__dict__ or "model" not in self.__dict__:
            super().__setattr__(name, value)
        else:
            setattr(self.model, name, value)

    def __delattr__(self, name: str) -> None:
        delattr(self.model, name)

    def __len__(self) -> int:
        return len(self.model)  # pyright: ignore[reportArgumentType] - not every model has a length

    def __getitem__(self, key: Any) -> Any:
        return self.model[key]  # pyright: ignore[reportIndexIssue]

    def __iter__(self) -> Iterator[Any]:
        return iter(self.model)  # pyright: ignore[reportCallIssue, reportArgumentType]

    def __bool__(self) -> bool:
        return True  # even where the length is 0

    def __reduce__(self) -> Any:
        raise TypeError("a rematerialized module cannot be pickled: save its state_dict() and its plan (plan.save)")

    def __deepcopy__(self, memo: dict[int, Any]) -> Rematerialized:
        if self._planner.in_backward is not None:
            raise TypeError("a module whose optimizer runs in the backward pass cannot be copied: copy its .model")
        return Rematerialized(
            copy.deepcopy(self.model, memo), self._planner, self.plan, self._backend, self._accumulates
        )


def _signed(forward: Callable[[], Any], model: nn.Module) -> Callable[..., Any]:
    """What `forward` gives, as a function with the signature and the text of the model's own, which trainers read.

    A compiler of the code around the module leaves it alone; else it would look inside, and no plan would be followed.
    """

    @functools.wraps(model.forward)
    @torch.compiler.disable(reason=COMPILES_ITSELF)
    def signed(*args: Any, **kwargs: Any) -> Any:
        return forward()(*args, **kwargs)

    return signed


class _CompiledStep:
    """A model's call; each new combination of shapes and modes is compiled with its own plan."""

    def __init__(self, model: nn.Module, planner: Planner, backend: str):
        self.model, self.planner, self.backend = model, planner, backend
        self.called = threading.local()  # its `inputs` name a plan that is made during the call; `values` of arguments
        # The keys say which parameters need a gradient: PyTorch 2.11's compiler does not notice when that changes.
        # They also say which way the model's branches on values go, of which the compiler does not know.
        self.compiled: dict[tuple[Any, ...], Callable[..., Any]] = {}
        self.states: dict[tuple[str, str], set[Any]] = {}
        self.sums = Sums()

    def __call__(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        aot.check_that_calls_are_compiled()
        self.called.inputs = inputs = describe_inputs((args, kwargs))
        self.called.values = values = Values(self.model, args, kwargs, inputs)
        in_backward = self.planner.in_backward
        trained = tuple(p.requires_grad for p in self.model.parameters())
        trained += in_backward.held() if in_backward else ()

        def call() -> Any:
            key = trained, values.key()
            if key not in self.compiled:
                step = call_of(self.model)
                self.compiled[key] = torch.compile(step, backend=self._compile, fullgraph=True, dynamic=False)
            return self.compiled[key](*args, **kwargs)

        check_given_tensors(self.model, args, kwargs)
        try:
            with causes(self.model, args, kwargs), refusals("this step cannot be executed under a plan"):
                outputs = capture.compiling(call, told_of(self.model), values)
        finally:
            del self.called.values  # which holds the arguments

        def watch(node: Any) -> None:
            node.register_prehook(lambda _: self.planner.warn_if_retained(inputs))
            (in_backward or self.sums).watch(node)

        aot.leave_unread_gradients_out(outputs, watch)
        return outputs

    def _compile(self, graph: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        if self.called.values.learn():
            raise NewBranches
        check_functions(graph)
        graph, example_inputs, with_numbers = numbers_apart(graph, example_inputs)
        check_containers(self.states, self.called.inputs)
        with_detached = features.detached_apart(graph)
        primals, planner, used = primals_of(graph), self.planner, features.used_features(graph)
        replace_recurrent(graph)
        lowering = inductor.lowering(graph, example_inputs) if self.backend == "inductor" else None

        def partition(training_graph: fx.GraphModule, n_forward: int) -> tuple[fx.GraphModule, fx.GraphModule]:
            began = time.perf_counter()
            captured = capture.read_training_graph(training_graph, n_forward, primals, lowering)
            self.sums.note(captured, self.model)
            step = step_of(
                captured, planner.name, self.model, self.backend, planner.implementations, planner.in_backward
            )  # fmt: skip
            plan = planner.plan(step, self.called.inputs, in_loop=True)
            update_of = planner.in_backward.update_of if planner.in_backward else None
            halves = emit(step, plan.order.tolist(), plan.plan.choices, plan.groups, update_of)
            plan.ran(time.perf_counter() - began)
            return halves

        step = aot.backend_of(self.backend)(graph, example_inputs, partition)
        return with_numbers(with_detached(features.Watched(step, used) if used else step))


_told_of: weakref.WeakKeyDictionary[nn.Module, Told] = weakref.WeakKeyDictionary()


def told_of(model: nn.Module) -> Told:
    """How a model has to be traced, see `capture.compiling`."""
    return _told_of.setdefault(model, Told())


def keywords(sample_kwargs: Mapping[str, Any] | None) -> dict[str, Any]:
    """The keyword arguments as a dict.

    Raises:
        InvalidInput: they are no mapping from names.
    """
    given = {} if sample_kwargs is None else sample_kwargs
    if not isinstance(given, Mapping) or not all(isinstance(name, str) for name in given):
        raise InvalidInput("sample_kwargs must hold the model's keyword arguments by name, e.g. {'mask': mask}")
    return dict(given)


def captured_step(
    model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], backend: str, implementations: str,
    in_backward: InBackward | None = None,
) -> step_graph.CapturedStep:  # fmt: skip
    """The step on these arguments, equal to the one that the compiled call captures; nothing is computed."""
    check_momentum(model)
    check_own_tensors(model)
    check_given_tensors(model, args, kwargs)

    def captured() -> capture.TrainingGraph:
        values = Values(model, args, kwargs, describe_inputs((args, kwargs)))
        return capture.capture_module(call_of(model), args, kwargs, aot.backend_of(backend), told_of(model), values)

    with causes(model, args, kwargs), torch.enable_grad():
        try:
            training_graph = captured()
        except InvalidInput:
            before = State(model)
            if not _is_set_up(model, args, kwargs):
                raise
            try:
                training_graph = captured()
            except InvalidInput:
                before.put_back()
                raise
    return step_of(training_graph, type(model).__name__, model, backend, implementations, in_backward)


def _is_set_up(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Whether the model runs on tensors without contents: what it sets up in its first call is then set up.

    transformers' models install hooks then, for example, in a way that cannot be traced.
    """
    try:
        plain_step(model, args, kwargs, sets_up=True)
    except Exception:  # whatever stops it here: the compiler's refusal is what the user reads
        return False
    return True


def with_storages(arguments: Any, device: str) -> Any:
    """The arguments, with storages on `device` for tensors without contents, because the compiler needs storages.

    Integers are 0, a valid index.
    """

    def real(x: Any) -> Any:
        if not isinstance(x, torch.Tensor) or not is_fake(x):
            return x
        empty = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=device if x.is_meta else x.device)
        return empty.requires_grad_(x.requires_grad) if x.is_floating_point() or x.is_complex() else empty.zero_()

    return tree_map(real, arguments)


def call_of(model: nn.Module) -> Callable[..., Any]:
    """The model's call as a function with its own code, because the compiler counts compilations per code object."""

    def call(*args: Any, **kwargs: Any) -> Any:
        return model(*args, **kwargs)

    code = call.__code__.replace(co_name=f"rematerialized_{next(_numbers)}")
    return types.FunctionType(code, call.__globals__, code.co_name, None, call.__closure__)


@aot.no_collection()
def step_of(
    training_graph: capture.TrainingGraph, name: str, model: nn.Module, backend: str, implementations: str = "default",
    in_backward: InBackward | None = None,
) -> step_graph.CapturedStep:  # fmt: skip
    """The step of a training graph, with all tensors of the model resident, and with other implementations or with the
    updates of an optimizer.

    Raises:
        InvalidInput: a buffer keeps gradient history, or an implementation or an update is not possible.
    """
    check_history(model, training_graph.primals, training_graph.tangents)
    resident = (*model.parameters(), *model.buffers())
    step = step_graph.split_graph_of(training_graph, name, resident, replays_random=backend == "eager")
    if in_backward is not None:
        return with_updates(step, in_backward.workspaces(training_graph), in_backward.name)
    return with_implementations(step, implementations)
