"""From a captured step to the plan that executes it."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, fx, nn

from remat.cost import Noise, costs_and_noise
from remat.cost.gpu import DEFAULT_GPU, Gpu, gpu_names, load_gpu
from remat.cost.profile import profile_workspaces
from remat.errors import CostWarning, InvalidInput, InvalidPlan, warn
from remat.execution import (
    UNKNOWN,
    Fingerprint,
    Peaks,
    PlanOptions,
    StepPlan,
    announce_pause,
    cheapest_fitting,
    find_plan,
    fingerprint_of,
)
from remat.graph import Graph, Operation
from remat.plan import Plan
from remat.registry import get_strategy
from remat.simulator import simulate
from remat.solution import Solution
from remat.solving.api import solve
from remat.torch._random import random_state
from remat.torch.inductor.compiled import AS_IT_IS, CompiledStep, cheapest
from remat.torch.internals.autograd import retains_graph
from remat.torch.internals.operators import tree_leaves
from remat.torch.measuring import carried
from remat.torch.measuring.plain import calls_graph, followed_loss, like
from remat.torch.planning.replay import replayed
from remat.torch.resident.in_backward import InBackward
from remat.torch.resident.residents import EARLIER_GRADIENTS, Resident
from remat.torch.resident.updates import check_order, plan_in_order, postponed
from remat.torch.step import aot
from remat.torch.step.capture import TrainingGraph
from remat.torch.step.loss import ANY_LOSS, Needs, Outside
from remat.torch.step.training_graph import CapturedStep, end_of, is_random, with_loss_outside
from remat.torch.step.work import CUDA_BLOCK_BYTES, dense_bytes, tensors_of
from remat.units import format_size

REPAIR_S = 0.5  # of search for a step with other shapes, while a loop waits
CHEAP = 0.001  # overhead that is not worth a search
START = "start of backward"  # counted as resident, although the step makes it
MOST_AIMS = 6  # budgets within which a step whose graph is retained is planned
READ_BY_LOSS = "what the loss reads"
VERSION = torch.__version__.split("+")[0]
COMPILED = 2  # counts changes of how compiled plans are made, so that plans of earlier versions are not kept for ever


@dataclass(slots=True)
class Planner:
    """Plans the steps of one model, and keeps the plans.

    Attributes:
        device: of the model: ``cpu`` or ``cuda``.
        budget_bytes: for every step.
        plain: peak of the plain step on the sample arguments.
        resident: what is there beside parameters, buffers and arguments of a step.
        sample: shapes and dtypes of the sample arguments, for which the budget was given.
        implementations: the implementations that plans may choose, see `remat.torch.step.with_implementations`.
        in_backward: the optimizer whose updates are operations of steps; None if the loop updates.
        find: (graph of groups, budget, known plans) -> solution, in place of the solver where none is installed.
        end_bytes: held outside this step between its passes, within the budget; None for the loss of the step.
        outside: the loss outside of the module.
        loss_needs: of the loss on the sample arguments, if it is given.
        has_warned: of a graph that is retained, although that is not counted.
        plans: by the sha256 of the step's fingerprint.
        lowered: the step that was captured last, if Inductor compiles it and it has no plan yet.
    """

    name: str
    options: PlanOptions
    device: str
    budget_bytes: int = 0
    plain: Peaks = UNKNOWN
    resident: Resident = field(default_factory=Resident)
    sample: str = ""
    implementations: str = "default"
    in_backward: InBackward | None = None
    end_bytes: int | None = None
    outside: Outside = ANY_LOSS
    loss_needs: Needs | None = None
    has_warned: bool = False
    find: Callable[[Graph, int, Sequence[Plan]], Solution] | None = None
    plans: dict[str, StepPlan] = field(default_factory=dict)
    lowered: CompiledStep | None = None
    lock: Any = field(default_factory=threading.RLock)

    def plan(self, step: CapturedStep, inputs: str, *, in_loop: bool = False) -> StepPlan:
        """The plan of a step: one made before, or a new one.

        Args:
            in_loop: a training loop waits: announce that, and take the order of another shape if it fits.

        Raises:
            InvalidInput: no plan within the budget was found.
        """
        graph, fixed = self.with_everything_resident(step)
        fingerprint = fingerprint_of_step(step, inputs)
        with self.lock:
            if fingerprint.sha256 not in self.plans:
                carries = in_loop and step.training_graph.lowering is None
                plan = self._carried(graph, step, fixed, fingerprint) if carries else None
                if in_loop and plan is None:
                    announce_pause(
                        self.name, self._what_is_new(inputs), self.options.time_limit_s, "model.prepare(...)"
                    )
                try:
                    self.plans[fingerprint.sha256] = plan or self._new(graph, step, fixed, fingerprint, in_loop)
                except InvalidInput as error:
                    if not self.plans:
                        raise
                    raise InvalidInput(f"{error}; {self._what_the_budget_is_for(inputs)}") from None
            return self.plans[fingerprint.sha256]

    def take(
        self, path: str | PathLike[str] | StepPlan, step: CapturedStep, inputs: str, budget_bytes: int | None = None
    ) -> StepPlan:
        """The plan of a file, or of another module, for this step; nothing is solved or measured.

        Args:
            budget_bytes: promised instead of the plan's own budget, for other shapes too.

        Raises:
            InvalidInput: the plan exceeds the budget with the bytes that are resident here.
            InvalidPlan: it was made for another step, or reads a parameter after its update.
        """
        graph, fixed = self.with_everything_resident(step)
        fingerprint = fingerprint_of_step(step, inputs)
        if isinstance(path, StepPlan):
            plan = path.moved(graph, fingerprint, fixed)
        else:
            plan = StepPlan.load(path, graph, fingerprint, fixed)
        check_order(plan.order.tolist(), step)
        plan = self._told(_with_loss_of(graph, plan), step).promising(budget_bytes)
        if self.plain.plain_bytes is not None:
            plan = replace(plan, plain_peak_bytes=self.plain.plain_bytes)
        self.budget_bytes = plan.budget_bytes or plan.peak_bytes
        self.plans[fingerprint.sha256] = plan
        return plan

    def with_everything_resident(self, step: CapturedStep) -> tuple[Graph, dict[str, int]]:
        """The graph with all resident bytes in `fixed_bytes`, and these bytes by name."""
        fixed = {
            "parameters, buffers and inputs": step.graph.fixed_bytes,
            **self.resident.bytes_beside(step.training_graph),
        }
        fixed |= {START: _start_bytes(step.training_graph)}
        graph = step.graph
        if self.end_bytes is not None:
            operations, end = list(graph.operations), end_of(graph)
            operations[end] = replace(operations[end], workspace_bytes=self.end_bytes)
            graph = replace(graph, operations=tuple(operations))
        else:
            graph, needs = with_loss_outside(step, self.needs_of)
            fixed |= {READ_BY_LOSS: needs.read_bytes} if needs.read_bytes else {}
        return replace(graph, fixed_bytes=sum(fixed.values())), fixed

    def needs_of(self, outputs: Sequence[Tensor]) -> Needs:
        """What the loss needs on outputs of these sizes."""
        if self.loss_needs is None:
            return self.outside.assumed(outputs)
        return self.loss_needs.of(sum(dense_bytes(x) for x in outputs if x.numel() > 1))

    def _told(self, plan: StepPlan, step: CapturedStep) -> StepPlan:
        """The plan with what is known of what the loop does outside of the module."""
        loss = "" if self.end_bytes is not None else with_loss_outside(step, self.needs_of)[1].text
        retained = self._peak(plan.graph, plan.plan, plan.fixed) if self.outside.retains else None
        return replace(plan, loss=loss, retained_bytes=retained)

    def _peak(self, graph: Graph, plan: Plan, fixed: Mapping[str, int]) -> int:
        """The peak, with the graph retained if the loop retains it."""
        if not self.outside.retains:
            return simulate(graph, plan).peak_bytes
        return retained_peak(graph, plan, bool(fixed.get(EARLIER_GRADIENTS)))

    def warn_if_retained(self, inputs: str) -> None:
        """Warn, once, before a backward pass that retains the graph exceeds the budget, if that is not counted."""
        if self.outside.retains or self.has_warned or not retains_graph():
            return
        plans = [plan for plan in self.plans.values() if plan.fingerprint.inputs == inputs and not plan.generated]
        most = max((retained_peak(p.graph, p.plan, bool(p.fixed.get(EARLIER_GRADIENTS))) for p in plans), default=0)
        if plans and self.end_bytes is None and most <= self.budget_bytes:
            return
        self.has_warned = True
        needs = f": the step needs up to {format_size(most)}, the budget is {format_size(self.budget_bytes)}"
        remedy = "add the losses up and call backward() once"
        if self.end_bytes is None and plans:
            remedy = f"give rematerialize(..., retain_graph=True), or {remedy}"
        warn(f"backward(retain_graph=True) keeps what the plan frees{needs if plans else ''}: {remedy}")

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

    def weigh(self, graph: Graph, step: CapturedStep) -> Graph:
        """The graph with costs and workspaces."""
        return self._with_costs(self.with_workspaces(graph, step))[0]

    def with_workspaces(self, graph: Graph, step: CapturedStep, plan: Plan | None = None) -> Graph:
        """The graph with the workspaces that `plan` needs; by default with those of any plan."""
        return _with_workspaces(graph, step, self._workspaces(graph), plan)

    def carried(self, step: CapturedStep, inputs: str) -> StepPlan | None:
        """A plan that takes the order of a known step with the same calls; None if no such order fits."""
        graph, fixed = self.with_everything_resident(step)
        return self._carried(graph, step, fixed, fingerprint_of_step(step, inputs))

    def weigh_calls(self, signatures: Iterable[str], graph: Graph) -> dict[str, tuple[int, int]]:
        """[signature] (workspace in bytes, cost) of calls of steps that were followed.

        Only measurements know a call by its signature. Other models cost the operations of `graph`, the step's, and
        take calls that it does not have as free.
        """
        calls = calls_graph(self.name, signatures)
        costed = self._with_costs(calls if self.options.cost == "profile" else graph)[0]
        costs = {op.work.signature: op.cost for op in costed.operations if op.work is not None}
        sizes = self.workspaces_of(signatures)
        return {signature: (size, costs.get(signature, 0)) for signature, size in sizes.items()}

    def workspaces_of(self, signatures: Iterable[str]) -> dict[str, int]:
        """[signature] workspace in bytes of calls of steps that were followed."""
        calls = calls_graph(self.name, signatures)
        pairs = zip(calls.operations, self._workspaces(calls), strict=True)
        return {op.work.signature: size for op, size in pairs if op.work}

    def _workspaces(self, graph: Graph) -> list[int]:
        """Workspaces in bytes of every implementation of every operation."""
        sizes, unmeasured = profile_workspaces(graph.every_implementation(), self.options.cache_folder, self.device)
        if unmeasured:
            named = ", ".join(f"{kind} ({why})" for kind, why in sorted(unmeasured.items()))
            warn(f"workspace not measured, taken as 0: {named}", CostWarning)
        return sizes

    def _with_costs(self, graph: Graph) -> tuple[Graph, Noise | None]:
        options = self.options
        return costs_and_noise(
            graph, options.cost, options.gpu, cache_folder=options.cache_folder, device=self.device
        )  # fmt: skip

    def _new(
        self, graph: Graph, step: CapturedStep, fixed: Mapping[str, int], fingerprint: Fingerprint, in_loop: bool
    ) -> StepPlan:
        if step.training_graph.lowering is not None:
            return self._new_compiled(graph, step, fixed, fingerprint)
        workspaces = self._workspaces(graph)
        graph = _with_workspaces(graph, step, workspaces)
        is_sample = not (self.plans or in_loop)
        plan, strategy, costs, noise = _once(graph, self.budget_bytes), AS_IT_IS, "", None
        fits = self._peak(graph, plan, fixed) <= self.budget_bytes
        if is_sample or not fits or graph.has_implementations:  # else there is no choice, and no need to time
            if max(graph.largest_working_set()[0], graph.final_bytes) <= self.budget_bytes:  # else there is no plan
                (graph, noise), costs = self._with_costs(graph), self.options.cost
            retains = self.outside.retains
            plan, strategy = (self._retained if retains else self._cheapest)(graph, step, in_loop, fixed)
        graph = _with_workspaces(graph, step, workspaces, plan)
        plan = Plan.from_order(graph, plan.order.tolist(), self.budget_bytes, plan.choices)
        plain = self.plain.plain_bytes if is_sample else None
        made = StepPlan(
            plan, graph, fingerprint, strategy, self.budget_bytes, plain, fixed, costs,
            implementations=self.implementations, noise=noise,
        )  # fmt: skip
        return self._told(made, step)

    def _new_compiled(
        self, graph: Graph, step: CapturedStep, fixed: Mapping[str, int], fingerprint: Fingerprint
    ) -> StepPlan:
        """A plan of a step that Inductor compiles, or one made for a larger budget that fits.

        Plans are kept beside the measurements, so that a smaller budget never has a higher peak than a larger one had.
        """
        held = self.budget_bytes - graph.fixed_bytes
        folder = self._folder_of_plans(fingerprint)
        known = _plans_in(folder, graph, fingerprint, fixed)
        fitting = {budget: plan for budget, plan in known.items() if _held(plan) <= held}
        larger = [budget for budget in fitting if budget >= held]
        if larger:
            return self._told(replace(fitting[min(larger)], budget_bytes=self.budget_bytes), step)
        compiled, self.lowered = self.compiled(step), None

        def find(groups: Graph, limit: int, known: Sequence[Plan]) -> Solution:
            return solve(
                groups, limit, self.options.strategy, **self.options.of_solver(),
                warm_start=cheapest_fitting(groups, known, limit), target_gap=CHEAP,
            )  # fmt: skip

        found = cheapest(compiled, self.budget_bytes, self.options.cost, self.options.gpu, self.find or find)
        graph = graph.with_costs([0] * len(graph), found.cost_unit)
        plan = StepPlan(
            Plan.from_order(graph, found.candidate.order, self.budget_bytes), graph, fingerprint, found.strategy,
            self.budget_bytes, graph.fixed_bytes + compiled.plain.peak_bytes, fixed,
            self.options.cost if found.cost_unit else "", noise=found.noise, generated=found.generated,
        )  # fmt: skip
        best = min([plan, *fitting.values()], key=lambda each: each.overhead)
        best = self._told(replace(best, budget_bytes=self.budget_bytes), step)
        folder.mkdir(parents=True, exist_ok=True)
        best.save(folder / f"{held}.json")
        return best

    def _folder_of_plans(self, fingerprint: Fingerprint) -> Path:
        """Where plans of this step under these options are kept, each with its budget above the fixed bytes as name."""
        options = self.options
        determines = (
            COMPILED, fingerprint.version, fingerprint.sha256, options.cost, options.gpu.name, options.strategy,
            options.scope, options.seed, options.time_limit_s, options.threads, torch.get_num_threads(),
        )  # fmt: skip
        return options.cache_folder / "plans" / hashlib.sha256(repr(determines).encode()).hexdigest()[:32]

    def compiled(self, step: CapturedStep) -> CompiledStep:
        """What Inductor makes of a step for it, with everything resident; kept until a plan is made of it."""
        if self.lowered is None or self.lowered.step.training_graph is not step.training_graph:
            graph, _ = self.with_everything_resident(step)
            self.lowered = CompiledStep(replace(step, graph=graph), self.options.cache_folder, self.device)
        return self.lowered

    @aot.no_collection()
    def _carried(
        self, graph: Graph, step: CapturedStep, fixed: Mapping[str, int], fingerprint: Fingerprint
    ) -> StepPlan | None:
        """The plan of another shape for this one, made cheaper by a moment of search; None if no plan is found so.

        Other shapes are those of steps with the same calls. Their costs and workspaces stand for those here, scaled.
        """
        alike = [plan for plan in self.plans.values() if _same_calls(plan.graph, graph)]
        if not alike:
            return None
        known = min(alike, key=lambda plan: (not plan.costs, abs(_bytes_made(plan.graph) - _bytes_made(graph))))
        workspaces = carried.workspaces(known.graph, graph, self.options.cache_folder, self.device)
        graph = _with_workspaces(graph, step, workspaces)
        graph = graph.with_costs(carried.scaled_costs(known.graph, graph, self.options.gpu), known.graph.cost_unit)
        plan = self._repaired(graph, step)
        if plan is None:
            return None
        is_once = len(plan.order) == len(graph) and not graph.has_implementations
        strategy, costs = (AS_IT_IS, "") if is_once else ("from another shape", known.costs)
        graph = _with_workspaces(graph, step, workspaces, plan)
        plan = Plan.from_order(graph, plan.order.tolist(), self.budget_bytes, plan.choices)
        made = StepPlan(
            plan, graph, fingerprint, strategy, self.budget_bytes, None, fixed, costs,
            implementations=self.implementations,
        )  # fmt: skip
        return None if self._peak(graph, plan, fixed) > self.budget_bytes else self._told(made, step)

    def _orders(self, graph: Graph, step: CapturedStep) -> list[Plan]:
        """Every operation once, and the orders of known steps with the same calls."""
        alike = (other.plan for other in self.plans.values() if _same_calls(other.graph, graph))
        return [_once(graph, self.budget_bytes), *(self._in_order(plan, graph, step) for plan in alike)]

    def _in_order(self, plan: Plan, graph: Graph, step: CapturedStep) -> Plan:
        """A plan with updates behind the last readers of their parameters, on `graph`."""
        order = plan.order.tolist()
        order = postponed(order, step.updates) if step.updates else order
        return Plan.from_order(graph, order, self.budget_bytes, plan.choices)

    def _repaired(self, graph: Graph, step: CapturedStep) -> Plan | None:
        """The cheapest order of other shapes that fits, or a cheaper one that a moment of search finds; or None."""
        best = cheapest_fitting(graph, self._orders(graph, step), self.budget_bytes)
        if best is not None and simulate(graph, best).cost <= (1 + CHEAP) * graph.total_cost:
            return best
        if not graph.total_cost or self.find is not None:
            return best
        if get_strategy(self.options.strategy).is_baseline:  # whose plans a search must not change
            return best
        found = solve(
            graph, self.budget_bytes, "search", **self.options.within(REPAIR_S).of_solver(), warm_start=best,
            target_gap=CHEAP,
        )  # fmt: skip
        plans = [best, None if found.plan is None else self._in_order(found.plan, graph, step)]
        return cheapest_fitting(graph, filter(None, plans), self.budget_bytes)

    def _what_is_new(self, inputs: str) -> str:
        """The inputs of a step that has no plan, and what else may be new if a plan has the same."""
        if all(plan.fingerprint.inputs != inputs for plan in self.plans.values()):
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

    def _retained(
        self, graph: Graph, step: CapturedStep, in_loop: bool, fixed: Mapping[str, int]
    ) -> tuple[Plan, str]:  # fmt: skip
        """As `_cheapest`, of plans that keep the budget with the graph retained: it is planned within less.

        Raises:
            InvalidInput: none was found.
        """
        within, above, least = 0, self.budget_bytes, 0
        aim = above
        for _ in range(MOST_AIMS):
            options = self.options.within(self.options.time_limit_s / MOST_AIMS)
            planner = replace(self, budget_bytes=aim, options=options)
            try:
                plan, strategy = planner._cheapest(graph, step, in_loop, fixed)
            except InvalidInput:  # this aim is too small, which another may not be
                within = aim
            else:
                peak = self._peak(graph, plan, fixed)
                if peak <= self.budget_bytes:
                    return plan, strategy
                above, least = min(aim, simulate(graph, plan).peak_bytes), min(least or peak, peak)
            aim = max((within + above) // 2, above + self.budget_bytes - least if least else 0)
        known = f"; the smallest budget known to suffice is {format_size(least, up=True)}" if least else ""
        raise InvalidInput(
            f"no plan of '{self.name}' was found within {format_size(self.budget_bytes)} with retain_graph=True, which "
            f"keeps what a plan frees{known}; add the losses up and call backward() once, or give a larger budget"
        )

    def _cheapest(
        self, graph: Graph, step: CapturedStep, in_loop: bool, _fixed: Mapping[str, int]
    ) -> tuple[Plan, str]:  # fmt: skip
        """(the cheapest known order that fits, while a loop waits, or else the solver's plan; the strategy's name)."""
        known = self._orders(graph, step)
        found = cheapest_fitting(graph, known, self.budget_bytes) if in_loop else None
        if found is not None:
            return found, "from another shape"

        def find(graph: Graph, known: Sequence[Plan] = ()) -> tuple[Plan, str]:
            solution = find_plan(graph, self.budget_bytes, self.options, known)
            assert solution.plan is not None
            return solution.plan, solution.strategy

        return plan_in_order(graph, step.updates, self.budget_bytes, find) if step.updates else find(graph, known)


def fingerprint_of_step(step: CapturedStep, inputs: str) -> Fingerprint:
    """The fingerprint of a step; the loss outside of the module is no part of it."""
    return fingerprint_of(step.graph.default(), "torch", VERSION, inputs)


def _with_loss_of(graph: Graph, plan: StepPlan) -> StepPlan:
    """A plan made with another loss outside of the module, with the loss of `graph`."""
    operations, end = list(plan.graph.operations), end_of(graph)
    operations[end] = graph.operations[end]
    graph = replace(plan.graph, operations=tuple(operations), values=graph.values)
    moved = Plan.from_order(graph, plan.order.tolist(), plan.budget_bytes, plan.plan.choices)
    return replace(plan, plan=moved, graph=graph)


def retained_peak(graph: Graph, plan: Plan, accumulates: bool) -> int:
    """The peak of a step whose graph is retained for several backward passes.

    What is saved for the backward pass then stays to its end, and the gradients of the pass before are held too.

    Args:
        accumulates: whether `fixed_bytes` counts gradients that are there before.
    """
    trace, end = simulate(graph, plan), end_of(graph)
    at = trace.order.tolist().index(end)
    made = [v for v, value in enumerate(graph.values) if value.keep and graph.producer[v] > end]
    earlier = 0 if accumulates else sum(graph.values[v].bytes for v in made)
    begin_of_next = int(trace.running_bytes[at]) + earlier  # the loss is differentiated again
    saved, extra, peak, n = None, 0, max(trace.peak_bytes, begin_of_next), 0
    held = set[int]()
    for k, new, others in replayed(graph, plan):
        if k >= 0:
            if n == at + 1:
                saved = held - set(graph.operations[end].outputs)
            if saved is not None:
                peak = max(peak, int(trace.running_bytes[n]) + extra + earlier)
            held.update(new)
            n += 1
        else:
            held.difference_update(others)
            if saved is not None:
                extra += sum(graph.values[v].bytes for v in saved.intersection(others))
                saved.difference_update(others)
    return max(peak, trace.final_bytes + extra + earlier)


def _once(graph: Graph, budget_bytes: int) -> Plan:
    """Every operation once, in the graph's order."""
    return Plan.from_order(graph, range(len(graph)), budget_bytes)


def _held(plan: StepPlan) -> int:
    """The peak above the fixed bytes."""
    return plan.peak_bytes - plan.graph.fixed_bytes


def _plans_in(
    folder: Path, graph: Graph, fingerprint: Fingerprint, fixed: Mapping[str, int]
) -> dict[int, StepPlan]:  # fmt: skip
    """[budget above the fixed bytes] plan; files that cannot be used here are left out."""
    plans = {}
    for path in folder.glob("*.json"):
        try:
            plans[int(path.stem)] = StepPlan.load(path, graph, fingerprint, fixed)
        except (InvalidPlan, ValueError):  # cut off, or written by another version
            continue
    return plans


def _bytes_made(graph: Graph) -> int:
    return sum(value.bytes for value in graph.values)


def there_before(plan: StepPlan) -> int:
    """The part of a plan's fixed bytes that is resident before a step."""
    return plan.graph.fixed_bytes - plan.fixed.get(START, 0)


def _with_workspaces(graph: Graph, step: CapturedStep, measured: Sequence[int], plan: Plan | None = None) -> Graph:
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


def _start_bytes(training_graph: TrainingGraph) -> int:
    """Bytes that the caller of ``loss.backward()`` holds: a gradient of one element, and a loss outside the module."""
    outputs = [node.meta["val"] for node in training_graph.tangents]
    cuda = any(x.device.type == "cuda" for x in outputs)
    one = CUDA_BLOCK_BYTES if cuda else max((x.element_size() for x in outputs), default=0)
    return one if len(outputs) == 1 and outputs[0].numel() == 1 else 2 * max(one, torch.float32.itemsize)


def _same_calls(one: Graph, other: Graph) -> bool:
    """Whether two graphs differ in sizes only, so that an order of one is an order of the other."""

    def described(op: Operation) -> tuple[Any, ...]:
        names = [implementation.name for implementation in op.implementations]
        return op.kind, op.inputs, op.outputs, op.run_once, names

    return [*map(described, one.operations)] == [*map(described, other.operations)]


def describe_inputs(args: Any) -> str:
    """Shapes and dtypes of tensors in a structure of arguments, e.g. ``float32[32, 3, 224, 224]``."""
    return ", ".join(map(_described, tree_leaves(args))) or "no inputs"


def _described(x: Any) -> str:
    if isinstance(x, Tensor):
        place = f"@{x.device.type}" if x.device.type != "cpu" else ""
        return f"{str(x.dtype).removeprefix('torch.')}{list(x.shape)}{place}"
    plain = isinstance(x, (bool, int, float, complex, str, torch.dtype, type(None)))
    return repr(x)[:40] if plain else type(x).__name__  # other representations may hold an address


def device_of(model: nn.Module, args: Any) -> str:
    """``cpu`` or ``cuda``: the device of all tensors; arguments on ``meta`` go there.

    Raises:
        InvalidInput: there are several devices, or one on which remat cannot measure.
    """
    tensors = [*model.parameters(), *model.buffers(), *(x for x in tensors_of(args) if not x.is_meta)]
    kinds = {x.device.type for x in tensors}
    if len({x.device for x in tensors if x.device.type != "cpu"}) > 1 or kinds - {"cpu", "cuda"}:
        places = ", ".join(sorted({str(x.device) for x in tensors}))
        raise InvalidInput(f"model and sample_args are on {places}; move both to the CPU or to one CUDA device")
    return "cuda" if "cuda" in kinds else "cpu"


def default_gpu(device: str) -> Gpu:
    """The device of the roofline: this machine's GPU if it is known, else a V100; the CPU for a model on the CPU."""
    if device == "cpu":
        return load_gpu("cpu")
    name = torch.cuda.get_device_name().lower().replace(" ", "")
    alike = [load_gpu(known) for known in gpu_names() if known.split("_")[0] in name]  # may differ in memory
    memory_bytes = torch.cuda.get_device_properties(0).total_memory
    return min(alike, key=lambda gpu: abs(gpu.memory_bytes - memory_bytes), default=load_gpu(DEFAULT_GPU))
