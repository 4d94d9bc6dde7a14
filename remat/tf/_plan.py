"""From a captured step and a budget to a `StepPlan`, or to an error that says why there is none."""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import tensorflow as tf

from remat.cost import CostWarning, Noise, costs_and_noise, load_gpu
from remat.errors import InvalidInput, InvalidPlan, RematError, shortened
from remat.execution import (
    Fingerprint,
    Peaks,
    PlanOptions,
    StepPlan,
    default_cache,
    find_plan,
    fingerprint_of,
    is_fraction,
    parse_budget,
)
from remat.graph import Graph
from remat.plan import Plan, Scope
from remat.tf._workspace import Footprint, measure_footprint
from remat.tf.capture import CapturedStep
from remat.tf.emit import emit, emit_plain
from remat.tf.portable import measure_step
from remat.units import format_size

# Memory of TensorFlow's executor other than tensors, fitted with 2.21: for the whole step an entry for each input of
# each node, and for each tensor its buffer object and the bytes that alignment adds.
ENTRY_BYTES = 48
TENSOR_BYTES = 128
ROUNDS = 4  # solves; each raises or lowers the solver's budget, because the solver knows no sharing of storage
VERIFYING_RUNS = 10
LEFT_FREE = 0.002  # share of the budget left free in verification: processes differ by a few kilobytes
SMALL = 1e-5  # share of the budget: a gradient up to this size may be held to the end of the step
NEAR = 0.01  # share of the budget: if less is left, another solve is not worth its time


SavedPlan = StepPlan | str | os.PathLike[str]


@dataclass(frozen=True, slots=True)
class Options(PlanOptions):
    """How to plan; see `remat.tf.rematerialize`."""

    verify: bool = True
    plan: SavedPlan | None = None


@dataclass(frozen=True, slots=True)
class Promise:
    """A budget in bytes, and the plain step's peak if the budget is a fraction of it."""

    budget_bytes: int
    plain: Peaks


def promise_of(step: CapturedStep, budget: int | float | str) -> Promise:
    """`budget` for `step`; for a fraction the plain step's peak is measured.

    Raises:
        InvalidInput: a budget that cannot be read.
    """
    plain = measured_plain_peak(step) if is_fraction(budget) else Peaks(None, "not measured")
    return Promise(parse_budget(budget, plain), plain)


def make_plan(step: CapturedStep, promise: Promise, options: Options, inputs: str) -> StepPlan:
    """The cheapest plan found whose peak is within the promise.

    Raises:
        InvalidInput: no plan was found within it.
    """
    return _StepSearch(step, measure_footprint(step), promise, options, inputs).run()


def load_plan(step: CapturedStep, plan: SavedPlan, inputs: str, budget: int | float | str | None) -> StepPlan:
    """A plan made before, for this step; `budget` replaces the promise of the plan.

    Raises:
        InvalidInput: the plan exceeds the budget.
        InvalidPlan: it was made for something else; both fingerprints are shown.
    """
    here = fingerprint(step, inputs)
    if isinstance(plan, StepPlan):
        known = plan.moved(step.graph, here, step.fixed)
    else:
        known = StepPlan.load(plan, step.graph, here, step.fixed)
    if known.plan.has_copies:
        raise InvalidPlan("the plan copies values to the host, which only PyTorch executes (remat.torch.follow)")
    return _with_executor(known, step).promising(None if budget is None else promise_of(step, budget).budget_bytes)


def fingerprint(step: CapturedStep, inputs: str) -> Fingerprint:
    return fingerprint_of(step.graph, "tensorflow", tf.__version__, inputs)


def measured_plain_peak(step: CapturedStep) -> Peaks:
    """Peak of the framework's own `tf.function` of this step, measured in a fresh process."""
    try:
        measured = measure_step(emit_plain(step.function), as_written=False)
    except RematError as error:  # the user can still give the budget as a size
        return Peaks(None, shortened(error, 300))
    return Peaks(step.graph.fixed_bytes + measured.peak_bytes)


def executor_bytes(step: CapturedStep, order: Sequence[int]) -> int:
    """Memory of the executor of a step with these computations, other than tensors."""
    entries = np.array([len(node.inputs) for node in step.nodes])
    return ENTRY_BYTES * int(entries[np.asarray(order)].sum()) + TENSOR_BYTES * len(step.graph.values)


def _with_executor(plan: StepPlan, step: CapturedStep) -> StepPlan:
    """The plan on a graph whose fixed bytes include the executor's."""
    order = plan.order.tolist()
    extra = executor_bytes(step, order)
    graph = replace(plan.graph, fixed_bytes=step.graph.fixed_bytes + extra)
    same_order = Plan.from_order(graph, order, plan.budget_bytes)
    return replace(plan, plan=same_order, graph=graph, fixed=step.fixed | {"executor": extra})


class _StepSearch:
    def __init__(
        self, step: CapturedStep, footprint: Footprint, promise: Promise, options: Options, inputs: str
    ) -> None:
        self.step, self.options = step, options
        self.budget_bytes, self.plain = promise.budget_bytes, promise.plain
        self.fingerprint = fingerprint(step, inputs)
        self.footprint = footprint
        self.graph, self.costs = footprint.graph, ""  # costs are computed when there is a choice between plans
        self.noise: Noise | None = None
        self.planned = self._planned_for_solvers()
        self.scope = options.scope
        if step.in_order_only and self.is_merged:
            self.scope = str(Scope.FIXED_ORDER)
        self.margin = 0  # bytes by which a measurement exceeded its prediction

    @property
    def is_merged(self) -> bool:
        """Whether updates run among the planned operations; for scopes other than ``free`` they come last."""
        return Scope(self.options.scope) is Scope.FREE

    def _planned_for_solvers(self) -> Graph:
        once = executor_bytes(self.step, range(len(self.graph)))
        planned = replace(self.footprint.planned, fixed_bytes=self.footprint.planned.fixed_bytes + once)
        if not self.is_merged:
            return planned
        return self.step.epilogue.for_solvers(self.step.graph, planned, int(SMALL * self.budget_bytes))

    def _take_costs(self) -> None:
        if not self.costs:
            self.costs = self.options.cost
            self.graph, self.noise = _costed(self.graph, self.costs)
            costs = [op.cost for op in self.graph.operations[: len(self.planned)]]
            self.planned = self.planned.with_costs(costs, self.graph.cost_unit)

    def run(self) -> StepPlan:
        self._check_floor()
        plan = self._cheapest(self.options.time_limit_s)
        for attempt in range(3 if self.options.verify else 0):
            excess = self._measured_excess(plan)
            if excess <= 0:
                return plan
            # The margin is relative to the prediction, which may have been below the budget already. It grows faster
            # than the excess because runs differ.
            self.margin = max(self.margin, self.budget_bytes - plan.peak_bytes) + (attempt + 1) * excess
            plan = self._cheapest(self.options.time_limit_s / 2)
        if self.options.verify and self._measured_excess(plan) > 0:
            raise InvalidInput(
                f"no plan of '{self.graph.name}' within {format_size(self.budget_bytes)} kept it when it was measured; "
                "give a larger budget"
            )
        return plan

    def _measured_excess(self, plan: StepPlan) -> int:
        """Bytes over the budget in a fresh process, plus the spread of runs; negative where the promise is kept."""
        measured = measure_step(emit(self.step, plan.order.tolist()), as_written=True, runs=VERIFYING_RUNS)
        spread = max(measured.spread_bytes, int(LEFT_FREE * self.budget_bytes))
        return self.step.graph.fixed_bytes + measured.peak_bytes + spread - self.budget_bytes

    def _check_floor(self) -> None:
        """Refuse a budget below the epilogue's memory after the last planned operation, which every plan needs."""
        once = self._step_plan(list(range(len(self.planned))), "")
        end = np.flatnonzero(once.order < len(self.planned))[-1]
        needed = int(once.trace.running_bytes[end + 1 :].max(initial=0))
        if needed > self.budget_bytes:
            raise InvalidInput(
                f"no plan of '{self.graph.name}' within {format_size(self.budget_bytes)}: applying the gradients alone "
                f"needs {format_size(needed)} (variables, optimizer state, gradients and the batch are never dropped)"
            )

    def _cheapest(self, time_limit_s: float) -> StepPlan:
        """The cheapest plan of a few solves within the user's budget.

        A plan may peak above or below the budget given to the solver. Each solve gets another one, so that the peaks
        approach the user's budget.
        """
        budget = self.budget_bytes - self.margin
        once = self._step_plan(list(range(len(self.planned))), self.options.strategy)
        if once.peak_bytes <= budget:
            return once
        self._take_costs()
        until = time.monotonic() + time_limit_s
        best: StepPlan | None = None
        reason: InvalidInput | None = None
        nearest = once.peak_bytes
        # solver's budgets: `fits` gave a plan that fits, `exceeds` one that does not
        fits, exceeds, asked = None, None, budget
        for _ in range(ROUNDS):
            try:
                found = self._solve(asked, best, until)
            except InvalidInput as error:
                reason = error if asked == budget else reason
                if best is not None:
                    break
                asked = int(asked * 1.08)
                continue
            if found.peak_bytes <= budget:
                best, fits = (found if best is None or found.trace.cost <= best.trace.cost else best), asked
                if found.overhead == 0 or budget - found.peak_bytes < NEAR * budget:
                    break
                asked += budget - found.peak_bytes
                if exceeds is not None and asked >= exceeds:
                    asked = (fits + exceeds) // 2
            else:
                exceeds, nearest = asked, min(nearest, found.peak_bytes)
                asked = (fits + exceeds) // 2 if fits is not None else asked - (found.peak_bytes - budget)
        if best is None:
            raise reason or InvalidInput(
                f"no plan of '{self.graph.name}' within {format_size(self.budget_bytes)} found in "
                f"{self.options.time_limit_s:g} s; the nearest needs {format_size(nearest)}: give a larger budget or "
                "time_limit_s"
            )
        return best

    def _solve(self, solver_budget: int, best: StepPlan | None, until: float) -> StepPlan:
        left = max(1.0, (until - time.monotonic()) / 2)
        n = len(self.planned)
        known = [] if best is None else [Plan.from_order(self.planned, [k for k in best.order.tolist() if k < n])]
        solution = find_plan(
            self.planned, solver_budget, replace(self.options, scope=self.scope, time_limit_s=left), known
        )
        assert solution.plan is not None
        return self._step_plan(solution.plan.order.tolist(), solution.strategy)

    def _step_plan(self, planned_order: list[int], strategy: str) -> StepPlan:
        end = range(len(self.planned), len(self.graph))
        order = self.step.epilogue.merged(planned_order) if self.is_merged else [*planned_order, *end]
        extra = executor_bytes(self.step, order)
        graph = replace(self.graph, fixed_bytes=self.step.graph.fixed_bytes + extra)
        graph = self.footprint.with_scratch_shared(graph, order)
        plan = Plan.from_order(graph, order, self.budget_bytes)
        fixed = self.step.fixed | {"executor": extra}
        return StepPlan(
            plan, graph, self.fingerprint, strategy, self.budget_bytes, self.plain.plain_bytes, fixed,
            self.costs, self.footprint.sharing, noise=self.noise,
        )  # fmt: skip


def _costed(graph: Graph, cost: str) -> tuple[Graph, Noise | None]:
    gpu = load_gpu("cpu") if cost == "roofline" else None
    with warnings.catch_warnings():
        # assignments have no kernel that runs alone; they cost only the bytes that they move
        warnings.filterwarnings("ignore", r"not measured.*: (Assign\w+ \([^)]*\)(, )?)+$", CostWarning)
        return costs_and_noise(graph, cost, gpu, cache_folder=default_cache() / "profile", device="cpu")
