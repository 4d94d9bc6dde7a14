"""How the calls of a model follow plans, and the calls of a model that compiles into one graph."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from torch import nn

from remat.errors import warn
from remat.execution import StepPlan
from remat.execution.phases import FIRST_STEP
from remat.torch import _random
from remat.torch.implementations import NotInvertible
from remat.torch.planning.capturing import calls_of, captured_step, trace_settings
from remat.torch.planning.eager import Eager
from remat.torch.planning.planner import Planner
from remat.torch.step import aot
from remat.torch.step.branches import Arguments, Values, describe_inputs
from remat.torch.step.capture import Halfway, Halves, TrainingGraph, called_by, compiling
from remat.torch.step.emit import emit
from remat.torch.step.refusals import causes, check_given_tensors, refusals
from remat.torch.step.sums import Sums


class Following(Protocol):
    """A model's call under plans.

    Attributes:
        planner: of the model's steps.
    """

    model: nn.Module
    planner: Planner

    def __call__(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], parameters: Sequence[nn.Parameter]) -> Any:
        """Call the model; `parameters` are its own, in any order."""
        ...

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
        self.calls = calls_of(model, planner.backend)
        self.compiled: dict[Halfway, Callable[[list[Any]], Any]] = {}  # with the halves of this module's plans
        self.sums = Sums()

    def of(self, model: nn.Module) -> InOneGraph:
        return InOneGraph(model, self.planner)

    def plans_for(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[StepPlan]:
        step = captured_step(self.model, args, kwargs, self.planner.backend)
        return [self.planner.plan(step, describe_inputs((args, kwargs)))]

    def __call__(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], parameters: Sequence[nn.Parameter]) -> Any:
        if self.planner.backend.implementations != "joint":
            return self._call(args, kwargs, parameters)
        random = _random.random_states()
        try:
            return self._call(args, kwargs, parameters)
        except NotInvertible as error:
            _random.set_random_states(random)
            self._invert_nothing(str(error))
            return self._call(args, kwargs, parameters)

    def _invert_nothing(self, why: str) -> None:
        """Plan this and later steps with ``exact`` implementations, because a weight came near zero in training.

        The forward pass ended before it changed a buffer, so that it can run again.
        """
        warn(f"{why}; from here on steps are planned with implementations='exact'")
        self.planner.backend = Eager("exact")
        self.planner.plans.clear()
        self.calls = calls_of(self.model, self.planner.backend)
        self.compiled.clear()

    def _call(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], parameters: Sequence[nn.Parameter]) -> Any:
        aot.check_that_calls_are_compiled()
        arguments, updates = Arguments(args, kwargs), self.planner.backend.updates
        check_given_tensors(self.model, args, kwargs, arguments.leaves)
        own, inputs = _Call(self, Values(self.model, arguments), arguments.inputs), arguments.inputs

        def call() -> Any:
            return self.calls(self.model, args, kwargs, own.values, parameters, updates.trained())

        try:
            with called_by(own):
                outputs = compiling(call, trace_settings(self.model), own.values)
        except Exception:  # what explains it is entered only now, because each step would pay for it
            with causes(self.model, args, kwargs), refusals("this step cannot be executed under a plan"):
                raise
        own.note_first_step()

        def watch(node: Any) -> None:
            node.register_prehook(lambda _: self.planner.warn_if_retained(inputs))
            updates.watch(node)
            self.sums.watch(node)

        aot.leave_unread_gradients_out(own.made, watch)
        return outputs


class _Call:
    """A call that runs the halves of plans.

    Attributes:
        inputs: name the plan.
        made: what the compiled step returned, in whatever the model's outputs hold it.
        plan: that is compiled in this call.
    """

    def __init__(self, of: InOneGraph, values: Values, inputs: str):
        self.of, self.values, self.inputs = of, values, inputs
        self.made: Any = ()
        self.plan: StepPlan | None = None
        self.began = time.perf_counter()

    def note_first_step(self) -> None:
        """Note the time of a call that compiled a plan; it includes what the plan's other phases took meanwhile."""
        if self.plan is not None and self.plan.phases is not None:
            self.plan.phases.setdefault(FIRST_STEP, time.perf_counter() - self.began)

    def run(self, step: Halfway, args: list[Any]) -> Any:
        compiled = self.of.compiled.get(step)
        if compiled is None:
            compiled = self.of.compiled[step] = step.with_halves(self.halves_of(step.on(args)))
        self.made = compiled(args)
        return self.made

    def halves_of(self, training_graph: TrainingGraph) -> Halves:
        began, planner = time.perf_counter(), self.of.planner
        self.of.sums.note(training_graph, self.of.model)
        step = planner.backend.step_of(training_graph, planner.name, self.of.model)
        self.plan = plan = planner.plan(step, self.inputs, in_loop=True)
        halves = emit(
            step, plan.order.tolist(), plan.plan.choices, plan.groups, planner.backend.updates.update_of,
            planner.copying(plan, step),
        )  # fmt: skip
        plan.ran(time.perf_counter() - began)
        return halves
