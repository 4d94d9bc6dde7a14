"""How the calls of a model follow plans, and the calls of a model that compiles into one graph."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import fx, nn

from remat.errors import warn
from remat.execution import StepPlan
from remat.execution.phases import FIRST_STEP
from remat.torch import _random
from remat.torch.implementations import NotInvertible
from remat.torch.planning.capturing import call_of, captured_step, describe_inputs, trace_settings
from remat.torch.planning.eager import Eager
from remat.torch.planning.planner import Planner
from remat.torch.step import aot
from remat.torch.step.branches import NewBranches, Values
from remat.torch.step.capture import TrainingGraph, compile_graph, compiling
from remat.torch.step.emit import emit
from remat.torch.step.numbers import check_containers
from remat.torch.step.refusals import causes, check_given_tensors, refusals
from remat.torch.step.sums import Sums


class Following(Protocol):
    """A model's call under plans.

    Attributes:
        planner: of the model's steps.
    """

    model: nn.Module
    planner: Planner

    def __call__(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any: ...

    def plans_for(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[StepPlan]:
        """The plans of a step on these arguments, made now if they are not known."""
        ...

    def of(self, model: nn.Module) -> Following:
        """The same for a copy of the model."""
        ...


class InOneGraph:
    """A call that compiles into one graph; each new combination of shapes and modes has a plan of its own."""

    def __init__(self, model: nn.Module, planner: Planner):
        self.model, self.planner = model, planner
        self.called = threading.local()  # its `inputs` name a plan that is made during the call; `values` of arguments
        # The keys say which parameters need a gradient: PyTorch 2.11's compiler does not notice when that changes.
        # They also have the outcomes of the model's branches on values, of which the compiler does not know.
        self.compiled: dict[tuple[Any, ...], Callable[..., Any]] = {}
        self.states: dict[tuple[str, str], set[Any]] = {}
        self.sums = Sums()

    def of(self, model: nn.Module) -> InOneGraph:
        return InOneGraph(model, self.planner)

    def plans_for(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[StepPlan]:
        step = captured_step(self.model, args, kwargs, self.planner.backend)
        return [self.planner.plan(step, describe_inputs((args, kwargs)))]

    def __call__(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        if self.planner.backend.implementations != "joint":
            return self._call(args, kwargs)
        random = _random.random_states()
        try:
            return self._call(args, kwargs)
        except NotInvertible as error:
            _random.set_random_states(random)
            self._invert_nothing(str(error))
            return self._call(args, kwargs)

    def _invert_nothing(self, why: str) -> None:
        """Plan this and later steps with ``exact`` implementations, because a weight came near zero in training.

        The forward pass ended before it changed a buffer, so that it can run again.
        """
        warn(f"{why}; from here on steps are planned with implementations='exact'")
        self.planner.backend = Eager("exact")
        self.planner.plans.clear()
        self.compiled.clear()

    def _call(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        aot.check_that_calls_are_compiled()
        self.called.inputs = inputs = describe_inputs((args, kwargs))
        self.called.values = values = Values(self.model, args, kwargs, inputs)
        updates = self.planner.backend.updates
        trained = (*(p.requires_grad for p in self.model.parameters()), *updates.trained())

        def call() -> Any:
            key = trained, values.key()
            if key not in self.compiled:
                self.compiled[key] = torch.compile(
                    call_of(self.model), backend=self._compile, fullgraph=True, dynamic=False
                )
            return self.compiled[key](*args, **kwargs)

        check_given_tensors(self.model, args, kwargs)
        began, self.called.plan = time.perf_counter(), None
        try:
            with causes(self.model, args, kwargs), refusals("this step cannot be executed under a plan"):
                outputs = compiling(call, trace_settings(self.model), values)
        finally:
            del self.called.values  # which holds the arguments
            self._note_first_step(time.perf_counter() - began)

        def watch(node: Any) -> None:
            node.register_prehook(lambda _: self.planner.warn_if_retained(inputs))
            updates.watch(node)
            self.sums.watch(node)

        aot.leave_unread_gradients_out(outputs, watch)
        return outputs

    def _note_first_step(self, seconds: float) -> None:
        """Note the time of a call that compiled a plan; it includes what the plan's other phases took meanwhile."""
        if self.called.plan is not None and self.called.plan.phases is not None:
            self.called.plan.phases.setdefault(FIRST_STEP, seconds)

    def _compile(self, graph: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        if self.called.values.learn():
            raise NewBranches
        check_containers(self.states, self.called.inputs)
        return compile_graph(graph, example_inputs, self.planner.backend.runner, self._halves_of)

    def _halves_of(self, training_graph: TrainingGraph) -> tuple[fx.GraphModule, fx.GraphModule]:
        began, planner = time.perf_counter(), self.planner
        self.sums.note(training_graph, self.model)
        step = planner.backend.step_of(training_graph, planner.name, self.model)
        self.called.plan = plan = planner.plan(step, self.called.inputs, in_loop=True)
        halves = emit(
            step, plan.order.tolist(), plan.plan.choices, plan.groups, planner.backend.updates.update_of,
            planner.copying(plan, step),
        )  # fmt: skip
        plan.ran(time.perf_counter() - began)
        return halves
