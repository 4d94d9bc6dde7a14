"""The back-end that runs PyTorch's own kernels one by one."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from torch import nn

from remat.cost.profile import begin_to_measure, profile_workspaces
from remat.errors import InvalidInput, first_line, warn
from remat.execution import Peaks, StepPlan, cheapest_fitting, find_plan
from remat.execution.phases import MEASURING, SEARCH
from remat.graph import Graph
from remat.plan import Plan
from remat.problem import check_host
from remat.registry import get_strategy
from remat.simulator import simulate
from remat.solving.api import solve
from remat.torch.inductor.compiled import AS_IT_IS
from remat.torch.internals.dynamo import Place
from remat.torch.measuring import carried
from remat.torch.measuring.plain import FollowedStep, calls_graph, has_recurrent_layer, plain_step
from remat.torch.planning.capturing import trace_settings, whole_step
from remat.torch.planning.planner import Backend, Planner, StepToPlan, with_workspaces
from remat.torch.planning.replay import retained_peak
from remat.torch.resident.in_backward import BY_THE_LOOP, Updates
from remat.torch.resident.residents import EARLIER_GRADIENTS
from remat.torch.resident.updates import plan_in_order, postponed
from remat.torch.step import aot
from remat.torch.step.capture import TrainingGraph
from remat.torch.step.chunked_loss import with_one_call
from remat.torch.step.loss import OWN_LOSS, Needs, Outside
from remat.torch.step.runners import EAGER, Runner
from remat.torch.step.training_graph import CapturedStep
from remat.torch.step.with_implementations import with_implementations
from remat.units import format_size

REPAIR_S = 0.5  # of search for a step with other shapes, while a loop waits
CHEAP = 0.001  # overhead that is not worth a search
MOST_AIMS = 6  # budgets within which a step whose graph is retained is planned
OTHER_SHAPE = "from another shape"  # strategy of a plan that takes the order of another one


@dataclass(frozen=True, slots=True)
class Eager(Backend):
    """Runs the calls of a plan one by one; results have the plain step's bits.

    Attributes:
        retains: whether steps have several backward passes, which read what the first one would write over.
    """

    runner: ClassVar[Runner] = EAGER
    implementations: str = "default"
    updates: Updates = BY_THE_LOOP
    retains: bool = False

    @property
    def rewrites(self) -> bool:
        return self.implementations == "joint" and not self.retains

    @aot.no_collection()
    def step_of(self, training_graph: TrainingGraph, name: str, model: nn.Module) -> CapturedStep:
        if self.rewrites:
            with_one_call(training_graph)
        step = whole_step(training_graph, name, model)
        return self.updates.added(with_implementations(step, self.implementations))

    def plain_peak(
        self, planner: Planner, step: CapturedStep, model: nn.Module, args: tuple[Any, ...],
        kwargs: Mapping[str, Any], *, may_run: bool,
    ) -> Peaks:  # fmt: skip
        fixed_bytes = step.graph.fixed_bytes + sum(planner.resident.bytes_beside(step.training_graph).values())
        if has_recurrent_layer(model):
            if not may_run:
                return Peaks(None, "the model has a recurrent layer, so that a step would have to run")
            planner.follow_loss(model, args, kwargs)
            return Peaks(fixed_bytes + planner.read_bytes + planner.measured_peak(model, args, kwargs))
        known = step.training_graph.known
        operations = tuple(replace(op, inputs=(), outputs=()) for op in step.graph.every_implementation().operations)
        if planner.outside not in known:  # else they are measured
            begin_to_measure(Graph(planner.name, operations, ()), planner.options.cache_folder, planner.device)
        try:
            plain = known.get(planner.outside) or _followed(planner, model, args, kwargs)
        except InvalidInput:
            raise
        except Exception as error:  # fake tensors do not support everything that compiles
            return Peaks(None, f"the model does not run on tensors without contents ({first_line(error)})")
        if not plain.has_backward:
            return Peaks(None, "no output that needs a gradient was found: return it in a tuple, dict or dataclass")
        is_kept = planner.outside.given is None
        if is_kept:
            known[planner.outside] = plain
        planner.resident.left_bytes = plain.left_bytes
        if plain.returns_loss:
            planner.loss_needs = OWN_LOSS
        if places := frozenset(trace_settings(model).places):
            key = planner.outside, places
            traced = known.get(key) or plain_step(model, args, kwargs, planner.outside, traced_at=places)
            if is_kept:
                known[key] = traced
            _warn_if_traced_differs(model, plain, traced, places)
        # Measure also the operations of the plan: the process that measures takes seconds to start.
        calls = calls_graph(planner.name, plain.signatures)
        both = Graph(planner.name, (*calls.operations, *operations), ())
        with planner.phases.of(MEASURING):
            sizes = profile_workspaces(both, planner.options.cache_folder, planner.device)[0][: len(calls)]
        workspaces = {op.work.signature: size for op, size in zip(calls.operations, sizes, strict=True) if op.work}
        planner.follow_loss(model, args, kwargs)  # its calls are measured by now
        return Peaks(fixed_bytes + planner.read_bytes + plain.peak_bytes(workspaces))

    def carried(self, planner: Planner, own: StepToPlan) -> StepPlan | None:
        with aot.no_collection():
            return _Search(planner, own, in_loop=True).carried()

    def new(self, planner: Planner, own: StepToPlan, in_loop: bool) -> StepPlan:
        return _Search(planner, own, in_loop).new()

    def retained_peak(self, plan: StepPlan) -> int | None:
        if plan.plan.has_copies:
            return None
        return retained_peak(plan.graph, plan.plan, bool(plan.fixed.get(EARLIER_GRADIENTS)))


@dataclass(frozen=True, slots=True)
class _Search:
    """The search for the plan of a step.

    Attributes:
        in_loop: a training loop waits.
    """

    planner: Planner
    own: StepToPlan
    in_loop: bool

    def new(self) -> StepPlan:
        """The step once if that fits, else the cheapest plan that is found."""
        planner, step = self.planner, self.own.step
        graph, fixed, budget = self.own.graph, self.own.fixed, planner.budget_bytes
        workspaces = planner.workspaces(graph)
        graph = with_workspaces(graph, step, workspaces)
        check_host(graph, planner.options.link, "this step", "offload=")
        is_sample = not (planner.plans or self.in_loop)
        plan, strategy, costs, noise = _once(graph, budget), AS_IT_IS, "", None
        fits = planner.peak(graph, plan, fixed) <= budget
        if is_sample or not fits or graph.has_implementations:  # else there is no choice, and no need to time
            if max(graph.largest_working_set()[0], graph.final_bytes) <= budget:  # else there is no plan
                (graph, noise), costs = planner.with_costs(graph), planner.options.cost
            plan, strategy = (self._retained if planner.outside.retains else self._cheapest)(graph)
        graph = with_workspaces(graph, step, workspaces, plan)
        plain = planner.plain.plain_bytes if is_sample else None
        return self._planned(graph, plan, strategy, costs, plain_peak_bytes=plain, noise=noise)

    def carried(self) -> StepPlan | None:
        """The plan of another shape for this one, made cheaper by a moment of search; None if no plan is found so.

        Other shapes are those of steps with the same calls. Their costs and workspaces stand for those here, scaled.
        """
        planner, step, graph = self.planner, self.own.step, self.own.graph
        known = planner.plans.nearest(graph)
        if known is None:
            return None
        options = planner.options
        workspaces = carried.workspaces(known.graph, graph, options.cache_folder, planner.device)
        graph = with_workspaces(graph, step, workspaces)
        graph = graph.with_costs(carried.scaled_costs(known.graph, graph, options.gpu), known.graph.cost_unit)
        plan = self._repaired(graph)
        if plan is None:
            return None
        is_once = len(plan.order) == len(graph) and not graph.has_implementations and not plan.has_copies
        strategy, costs = (AS_IT_IS, "") if is_once else (OTHER_SHAPE, known.costs)
        made = self._planned(with_workspaces(graph, step, workspaces, plan), plan, strategy, costs)
        fits = planner.peak(made.graph, made.plan, made.fixed) <= planner.budget_bytes
        return made if fits else None

    def _planned(self, graph: Graph, plan: Plan, strategy: str, costs: str, **others: Any) -> StepPlan:
        implementations = self.planner.backend.implementations
        return self.own.planned(
            graph, plan, strategy, self.planner.budget_bytes, costs, implementations=implementations, **others
        )

    def _orders(self, graph: Graph) -> list[Plan]:
        """Every operation once, and the orders of known steps with the same calls."""
        alike = self.planner.plans.alike(graph)
        return [_once(graph, self.planner.budget_bytes), *(self._in_order(other.plan, graph) for other in alike)]

    def _in_order(self, plan: Plan, graph: Graph) -> Plan:
        """A plan with updates behind the last readers of their parameters, on `graph`."""
        if not self.own.step.updates:
            return plan.on(graph, self.planner.budget_bytes)
        order = postponed(plan.order.tolist(), self.own.step.updates)
        return Plan.from_order(graph, order, self.planner.budget_bytes, plan.choices)

    def _repaired(self, graph: Graph) -> Plan | None:
        """The cheapest order of other shapes that fits, or a cheaper one that a moment of search finds; or None."""
        options, budget = self.planner.options, self.planner.budget_bytes
        best = cheapest_fitting(graph, self._orders(graph), budget)
        if best is not None and simulate(graph, best).cost <= (1 + CHEAP) * graph.total_cost:
            return best
        if not graph.total_cost or get_strategy(options.strategy).is_baseline:  # a search must not change its plans
            return best
        how = options.within(REPAIR_S).of_solver()
        found = solve(graph, budget, "search", link=options.link, **how, warm_start=best)
        plans = [best, None if found.plan is None else self._in_order(found.plan, graph)]
        return cheapest_fitting(graph, filter(None, plans), budget)

    def _retained(self, graph: Graph) -> tuple[Plan, str]:
        """As `_cheapest`, of plans that keep the budget with the graph retained: it is planned within less.

        Raises:
            InvalidInput: none was found.
        """
        budget = self.planner.budget_bytes
        within, above, least = 0, budget, 0
        aim = above
        for _ in range(MOST_AIMS):
            options = self.planner.options.within(self.planner.options.time_limit_s / MOST_AIMS)
            planner = replace(self.planner, budget_bytes=aim, options=options)
            try:
                plan, strategy = replace(self, planner=planner)._cheapest(graph)
            except InvalidInput:  # this aim is too small, which another may not be
                within = aim
            else:
                peak = self.planner.peak(graph, plan, self.own.fixed)
                if peak <= budget:
                    return plan, strategy
                above, least = min(aim, simulate(graph, plan).peak_bytes), min(least or peak, peak)
            aim = max((within + above) // 2, above + budget - least if least else 0)
        known = f"; the smallest budget known to suffice is {format_size(least, up=True)}" if least else ""
        raise InvalidInput(
            f"no plan of '{self.planner.name}' was found within {format_size(budget)} with retain_graph=True, which "
            f"keeps what a plan frees{known}; add the losses up and call backward() once, or give a larger budget"
        )

    def _cheapest(self, graph: Graph) -> tuple[Plan, str]:
        """(the cheapest known order that fits, while a loop waits, or else the solver's plan; the strategy's name)."""
        budget, options = self.planner.budget_bytes, self.planner.options
        known = self._orders(graph)
        found = cheapest_fitting(graph, known, budget) if self.in_loop else None
        if found is not None:
            return found, OTHER_SHAPE

        def find(graph: Graph, known: Sequence[Plan] = ()) -> tuple[Plan, str]:
            with self.planner.phases.of(SEARCH):
                solution = find_plan(graph, budget, options, known)
            assert solution.plan is not None
            return solution.plan, solution.strategy

        updates = self.own.step.updates
        return plan_in_order(graph, updates, budget, find) if updates else find(graph, known)


def _once(graph: Graph, budget_bytes: int) -> Plan:
    """Every operation once, in the graph's order."""
    return Plan.from_order(graph, range(len(graph)), budget_bytes)


def _followed(planner: Planner, model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> FollowedStep:
    """The plain step; where the given loss reads values, with one that needs as much."""
    try:
        return plain_step(model, args, kwargs, planner.outside)
    except InvalidInput:
        raise
    except Exception:  # whatever stops it: the model alone shows whether it is the loss
        if planner.outside.given is None:
            raise
    planner.follow_loss(model, args, kwargs)
    return plain_step(model, args, kwargs, Outside(taken=lambda *_: planner.loss_needs or Needs()))


def _warn_if_traced_differs(
    model: nn.Module, plain: FollowedStep, traced: FollowedStep, places: Collection[Place]
) -> None:  # fmt: skip
    """Warn if a model makes other calls than in eager mode, because it had to hear at `places` that it is traced."""
    if plain.is_eager and traced.is_eager and traced.signatures == plain.signatures:
        return
    where = ", ".join(sorted({f"line {line} of {file}" for place in places for file, line in place[:-1][:2]}))
    warn(
        f"{type(model).__name__} computes differently while it is traced ({where}), so that the last bits may differ "
        "from those of the plain step; verify=True says by how much"
    )
