"""The steps of one model within one budget: what is resident around them, what they cost, and their plans."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from os import PathLike
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, fx, nn

from remat.cost import Noise, costs_and_noise
from remat.cost.profile import one_child, profile_workspaces
from remat.errors import CostWarning, InvalidInput, warn
from remat.execution import UNKNOWN, Fingerprint, Peaks, PlanOptions, StepPlan, announce_pause, fingerprint_of
from remat.execution.phases import MEASURING, Phases
from remat.graph import Graph, Operation
from remat.link import Link
from remat.plan import Plan
from remat.simulator import simulate
from remat.torch._random import random_state
from remat.torch.copying.copies import Copying, Hosts
from remat.torch.copying.places import Places
from remat.torch.internals.autograd import retains_graph
from remat.torch.measuring.measure import peak_of_step
from remat.torch.measuring.plain import calls_graph, followed_loss, like
from remat.torch.planning.book import PlanBook
from remat.torch.planning.replay import retained_peak
from remat.torch.resident.in_backward import Updates
from remat.torch.resident.residents import EARLIER_GRADIENTS, Resident
from remat.torch.resident.updates import check_order
from remat.torch.step import aot
from remat.torch.step.capture import TrainingGraph
from remat.torch.step.loss import ANY_LOSS, Needs, Outside
from remat.torch.step.runners import Runner, is_random
from remat.torch.step.training_graph import CapturedStep, end_of, with_loss_outside
from remat.torch.step.work import CUDA_BLOCK_BYTES, dense_bytes
from remat.units import format_size

START = "start of backward"  # counted as resident, although the step makes it
READ_BY_LOSS = "what the loss reads"
VERSION = torch.__version__.split("+")[0]


@dataclass(frozen=True, slots=True)
class StepToPlan:
    """A captured step with everything that is resident around it.

    Attributes:
        step: as captured.
        graph: with all resident bytes in `fixed_bytes`, and with what the loss outside of the module needs.
        fixed: parts of these bytes, by name.
        fingerprint: of the step; the loss outside of the module is no part of it.
        loss: what that loss needs, for people.
    """

    step: CapturedStep
    graph: Graph
    fixed: Mapping[str, int]
    fingerprint: Fingerprint
    loss: str

    def planned(
        self, graph: Graph, plan: Plan, strategy: str, budget_bytes: int | None, costs: str = "", **others: Any
    ) -> StepPlan:
        """The step's plan with all that is known of it.

        Args:
            graph: with costs and workspaces.
            others: further attributes of a `StepPlan`.
        """
        plan = plan.on(graph, budget_bytes)
        known = {"plain_peak_bytes": None, "fixed": self.fixed, "costs": costs, **others}
        return StepPlan(plan, graph, self.fingerprint, strategy, budget_bytes, **known)


class Backend(ABC):
    """What runs the steps of a model: it captures them, knows the plain step's peak, plans them, and writes the code.

    Attributes:
        runner: of both halves of a step.
        implementations: that plans may choose, see `remat.torch.step.with_implementations`.
        updates: who updates the parameters.
        instead: what else to do about a step that needs more than was predicted, as the end of a sentence.
    """

    runner: ClassVar[Runner]
    instead: ClassVar[str] = ""
    implementations: str
    updates: Updates

    @property
    def rewrites(self) -> bool:
        """Whether `step_of` changes the training graph, so that no other back-end may use it."""
        return False

    @abstractmethod
    def step_of(self, training_graph: TrainingGraph, name: str, model: nn.Module) -> CapturedStep:
        """The step of a training graph, with all tensors of the model resident.

        Raises:
            InvalidInput: a buffer keeps gradient history, or an implementation or an update is not possible.
        """

    @abstractmethod
    def plain_peak(
        self, planner: Planner, step: CapturedStep, model: nn.Module, args: tuple[Any, ...],
        kwargs: Mapping[str, Any], *, may_run: bool,
    ) -> Peaks:  # fmt: skip
        """Peak of the model's own step, everything that is always there included.

        Args:
            may_run: the step may be executed if its peak cannot be known without that.
        """

    @abstractmethod
    def carried(self, planner: Planner, own: StepToPlan) -> StepPlan | None:
        """The plan of another shape for this one, within a moment; None if no plan is found so."""

    @abstractmethod
    def new(self, planner: Planner, own: StepToPlan, in_loop: bool) -> StepPlan:
        """A new plan.

        Raises:
            InvalidInput: none was found within the budget.
        """

    @abstractmethod
    def retained_peak(self, plan: StepPlan) -> int | None:
        """The peak of a step whose graph is retained for several backward passes; None if it is not known."""


@dataclass(slots=True)
class Planner:
    """Plans the steps of one model, and keeps the plans.

    Attributes:
        device: of the model: ``cpu`` or ``cuda``.
        budget_bytes: for every step.
        plain: peak of the plain step on the sample arguments.
        resident: what is there beside parameters, buffers and arguments of a step.
        sample: shapes and dtypes of the sample arguments, for which the budget was given.
        end_bytes: held outside this step between its passes, within the budget; None for the loss of the step.
        outside: the loss outside of the module.
        loss_needs: of the loss on the sample arguments, if it is given.
        phases: where the seconds of the next plan go.
        hosts: memory on the host for steps whose plans have copies, by the link that these go over.
        has_warned: of a graph that is retained, although that is not counted.
    """

    name: str
    options: PlanOptions
    device: str
    backend: Backend
    budget_bytes: int = 0
    plain: Peaks = UNKNOWN
    resident: Resident = field(default_factory=Resident)
    sample: str = ""
    end_bytes: int | None = None
    outside: Outside = ANY_LOSS
    loss_needs: Needs | None = None
    has_warned: bool = False
    plans: PlanBook = field(default_factory=PlanBook)
    phases: Phases = field(default_factory=Phases)
    hosts: dict[Link, Hosts] = field(default_factory=dict)
    lock: Any = field(default_factory=threading.RLock)

    @one_child()
    def plan(self, step: CapturedStep, inputs: str, *, in_loop: bool = False) -> StepPlan:
        """The plan of a step: one made before, or a new one.

        Args:
            in_loop: a training loop waits: announce that, and take the order of another shape if it fits.

        Raises:
            InvalidInput: no plan within the budget was found.
        """
        own = self.surrounded(step, inputs)
        key = own.fingerprint.sha256
        with self.lock:
            if key not in self.plans:
                plan = self.backend.carried(self, own) if in_loop else None
                if in_loop and plan is None:
                    announce_pause(
                        self.name, self._what_is_new(inputs), self.options.time_limit_s, "model.prepare(...)"
                    )
                try:
                    self.plans[key] = self._completed(plan or self.backend.new(self, own, in_loop), own)
                except InvalidInput as error:
                    if not self.plans:
                        raise
                    raise InvalidInput(f"{error}; {self._what_the_budget_is_for(inputs)}") from None
            return self.plans[key]

    def take(
        self, path: str | PathLike[str] | StepPlan, step: CapturedStep, inputs: str, budget_bytes: int | None
    ) -> StepPlan:
        """The plan of a file, or of another module, for this step; nothing is solved or measured.

        Args:
            budget_bytes: promised instead of the plan's own budget, for other shapes too.

        Raises:
            InvalidInput: the plan exceeds the budget with the bytes that are resident here.
            InvalidPlan: it was made for another step, or reads a parameter after its update.
        """
        own = self.surrounded(step, inputs)
        if isinstance(path, StepPlan):
            plan = path.moved(own.graph, own.fingerprint, own.fixed)
        else:
            plan = StepPlan.load(path, own.graph, own.fingerprint, own.fixed)
        check_order(plan.order.tolist(), step)
        if plan.plan.has_copies:  # so may those of other shapes
            self.options = replace(self.options, link=plan.plan.link)
        plan = self._completed(_with_loss_of(own.graph, plan), own).promising(budget_bytes)
        if self.plain.plain_bytes is not None:
            plan = replace(plan, plain_peak_bytes=self.plain.plain_bytes)
        self.budget_bytes = plan.budget_bytes or plan.peak_bytes
        self.plans[own.fingerprint.sha256] = plan
        return plan

    def surrounded(self, step: CapturedStep, inputs: str) -> StepToPlan:
        """The step with everything that is resident around it.

        Args:
            inputs: shapes and dtypes of its arguments.
        """
        fixed = {
            "parameters, buffers and inputs": step.graph.fixed_bytes,
            **self.resident.bytes_beside(step.training_graph),
            START: _start_bytes(step.training_graph),
        }
        if self.end_bytes is None:
            graph, needs = with_loss_outside(step, self.needs_of)
            fixed |= {READ_BY_LOSS: needs.read_bytes} if needs.read_bytes else {}
            loss = needs.text
        else:
            graph, loss = with_workspace_at_end(step.graph, self.end_bytes), ""
        graph = replace(graph, fixed_bytes=sum(fixed.values()))
        fingerprint = fingerprint_of(step.graph.default(), "torch", VERSION, inputs)
        return StepToPlan(step, graph, fixed, fingerprint, loss)

    def needs_of(self, outputs: Sequence[Tensor]) -> Needs:
        """What the loss needs on outputs of these sizes."""
        if self.loss_needs is None:
            return self.outside.assumed(outputs)
        return self.loss_needs.of(sum(dense_bytes(x) for x in outputs if x.numel() > 1))

    def _completed(self, plan: StepPlan, own: StepToPlan) -> StepPlan:
        """The plan with what is known of what the loop does outside of the module."""
        retained = self.peak(plan.graph, plan.plan, plan.fixed) if self.outside.retains else None
        phases, self.phases = self.phases, Phases()
        return replace(plan, loss=own.loss, retained_bytes=retained, phases=phases)

    def peak(self, graph: Graph, plan: Plan, fixed: Mapping[str, int]) -> int:
        """The peak, with the graph retained if the loop retains it."""
        if not self.outside.retains:
            return simulate(graph, plan).peak_bytes
        return retained_peak(graph, plan, bool(fixed.get(EARLIER_GRADIENTS)))

    def warn_if_retained(self, inputs: str) -> None:
        """Warn, once, before a backward pass that retains the graph exceeds the budget, if that is not counted."""
        if self.outside.retains or self.has_warned or not retains_graph():
            return
        found = map(self.backend.retained_peak, self.plans.made_for(inputs))
        peaks = [peak for peak in found if peak is not None]
        most = max(peaks, default=0)
        if peaks and self.end_bytes is None and most <= self.budget_bytes:
            return
        self.has_warned = True
        needs = f": the step needs up to {format_size(most)}, the budget is {format_size(self.budget_bytes)}"
        remedy = "add the losses up and call backward() once"
        if self.end_bytes is None and peaks:
            remedy = f"give rematerialize(..., retain_graph=True), or {remedy}"
        warn(f"backward(retain_graph=True) keeps what the plan frees{needs if peaks else ''}: {remedy}")

    def copying(self, plan: StepPlan, step: CapturedStep) -> Copying | None:
        """What the code of a plan with copies needs; None for a plan without."""
        if not plan.plan.has_copies:
            return None
        assert plan.plan.link is not None  # the judge has asked for it
        device = next(
            x.device for x in step.training_graph.primals if isinstance(x, Tensor) and x.device.type == self.device
        )
        with self.lock:
            hosts = self.hosts.setdefault(plan.plan.link, Hosts(plan.plan.link))
        return Copying(Places.of(plan.graph, plan.plan), hosts, device)

    @property
    def read_bytes(self) -> int:
        """Of tensors that the given loss reads."""
        return self.loss_needs.read_bytes if self.loss_needs else 0

    def follow_loss(self, model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Find what the given loss needs on the sample arguments, if one is given.

        Raises:
            InvalidInput: it cannot be computed.
        """
        if self.outside.given is None or self.loss_needs is not None:
            return
        found = followed_loss(model, args, kwargs, self.outside, self.device)
        held = found.held_bytes - found.given_bytes
        step_bytes = found.step.peak_bytes(self.workspaces_of(found.step.signatures))
        most = max(held, step_bytes - found.outputs_bytes)
        read = f", and reads {format_size(found.read_bytes)}" if found.read_bytes else ""
        text = f"given: needs {format_size(most)} beside the outputs and their gradients{read}"
        self.loss_needs = Needs(
            most, held, found.read_bytes, found.outputs_bytes, text, lambda x: like(x) in found.left_out
        )  # fmt: skip

    def measured_peak(self, model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> int:
        """Most bytes of a step that runs, with the loss that is given, or one that holds what it is taken to hold."""

        @contextmanager
        def meanwhile(outputs: list[Tensor]) -> Iterator[Tensor]:
            needs = self.outside.assumed(outputs)
            held, rest = (
                torch.empty(n_bytes, dtype=torch.uint8, device=self.device)
                for n_bytes in (needs.held_bytes, needs.most_bytes - needs.held_bytes)
            )
            yield held
            del rest

        return peak_of_step(model, args, kwargs, self.device, meanwhile, self.outside)

    def weigh(self, graph: Graph, step: CapturedStep) -> Graph:
        """The graph with costs, and with the workspaces of any plan."""
        return self.with_costs(with_workspaces(graph, step, self.workspaces(graph)))[0]

    def weigh_calls(self, signatures: Iterable[str], graph: Graph) -> dict[str, tuple[int, int]]:
        """[signature] (workspace in bytes, cost) of calls of steps that were followed.

        Only measurements know a call by its signature. Other models cost the operations of `graph`, the step's, and
        take calls that it does not have as free.
        """
        calls = calls_graph(self.name, signatures)
        costed = self.with_costs(calls if self.options.cost == "profile" else graph)[0]
        costs = {op.work.signature: op.cost for op in costed.operations if op.work is not None}
        sizes = self.workspaces_of(signatures)
        return {signature: (size, costs.get(signature, 0)) for signature, size in sizes.items()}

    def workspaces_of(self, signatures: Iterable[str]) -> dict[str, int]:
        """[signature] workspace in bytes of calls of steps that were followed."""
        calls = calls_graph(self.name, signatures)
        pairs = zip(calls.operations, self.workspaces(calls), strict=True)
        return {op.work.signature: size for op, size in pairs if op.work}

    def workspaces(self, graph: Graph) -> list[int]:
        """Workspaces in bytes of every implementation of every operation."""
        with self.phases.of(MEASURING):
            sizes, unmeasured = profile_workspaces(graph.every_implementation(), self.options.cache_folder, self.device)
        if unmeasured:
            named = ", ".join(f"{kind} ({why})" for kind, why in sorted(unmeasured.items()))
            warn(f"workspace not measured, taken as 0: {named}", CostWarning)
        return sizes

    def with_costs(self, graph: Graph) -> tuple[Graph, Noise | None]:
        """(the graph with costs, their noise)."""
        options = self.options
        with self.phases.of(MEASURING):
            return costs_and_noise(
                graph, options.cost, options.gpu, cache_folder=options.cache_folder, device=self.device
            )

    def _what_is_new(self, inputs: str) -> str:
        """The inputs of a step that has no plan, and what else may be new if a plan has the same."""
        if not self.plans.made_for(inputs):
            return inputs
        kinds = "another mode, other gradients, values of a mask, attributes or configuration"
        return f"{inputs} (planned before with {kinds})"

    def _what_the_budget_is_for(self, inputs: str) -> str:
        """The end of an error: for which arguments the budget was given, and what to do."""
        if inputs == self.sample:
            other = "in another mode, or with other gradients, values of a mask or tensors in attributes"
            return f"the budget was given for this step {other}: give a larger one"
        return (
            f"this step is of {inputs}, the budget was given for {self.sample}: "
            "rematerialize with the largest arguments that occur, or with a larger budget"
        )


def _with_loss_of(graph: Graph, plan: StepPlan) -> StepPlan:
    """A plan made with another loss outside of the module, with the loss of `graph`."""
    operations, end = list(plan.graph.operations), end_of(graph)
    operations[end] = graph.operations[end]
    graph = replace(plan.graph, operations=tuple(operations), values=graph.values)
    return replace(plan, plan=plan.plan.on(graph, plan.budget_bytes), graph=graph)


def with_workspace_at_end(graph: Graph, n_bytes: int) -> Graph:
    """The graph whose operation between both passes needs so many bytes."""
    operations, end = list(graph.operations), end_of(graph)
    operations[end] = replace(operations[end], workspace_bytes=n_bytes)
    return replace(graph, operations=tuple(operations))


def there_before(plan: StepPlan) -> int:
    """The part of a plan's fixed bytes that is resident before a step."""
    return plan.graph.fixed_bytes - plan.fixed.get(START, 0)


def _start_bytes(training_graph: TrainingGraph) -> int:
    """Bytes that the caller of ``loss.backward()`` holds: a gradient of one element, and a loss outside the module."""
    outputs = [node.meta["val"] for node in training_graph.tangents]
    cuda = any(x.device.type == "cuda" for x in outputs)
    one = CUDA_BLOCK_BYTES if cuda else max((x.element_size() for x in outputs), default=0)
    return one if len(outputs) == 1 and outputs[0].numel() == 1 else 2 * max(one, torch.float32.itemsize)


def with_workspaces(graph: Graph, step: CapturedStep, measured: Sequence[int], plan: Plan | None = None) -> Graph:
    """The graph with workspaces: the measured ones, or the bytes to read a random generator's state if these are more.

    Args:
        measured: [implementations of all operations] bytes.
        plan: the state is read before the draws that it repeats; by default before every draw that may be repeated.
    """
    times = [2] * len(graph) if plan is None else np.bincount(plan.order, minlength=len(graph))
    sizes, next_measured = list[int](), iter(measured)
    for op, nodes, n in zip(graph.operations, step.nodes, times, strict=True):
        state = _state_bytes(op, nodes) if n > 1 else 0
        for implementation in op.all_implementations:
            output_bytes = sum(graph.values[v].bytes for v in implementation.outputs)
            sizes.append(max(next(next_measured), state - output_bytes))
    return graph.with_workspaces(sizes)


def _state_bytes(op: Operation, nodes: Sequence[fx.Node]) -> int:
    """Bytes that PyTorch's allocator takes to read the random generator's state before a call that may be repeated."""
    replayed = [node for node in nodes if is_random(node) and not op.run_once]
    devices = (device for device in map(aot.device_of, replayed) if device.type == "cpu")
    return max((random_state(device).nbytes for device in devices), default=0)
