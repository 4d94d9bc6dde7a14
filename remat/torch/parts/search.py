"""Plans of a model in parts, for a model that does not compile into one graph: one budget for all of them.

Each part is a module with a plan of its own; what stands between parts runs as PyTorch runs it. A step is followed once
with parts that are opaque: that gives the bytes that everything else holds at each moment. A part adds what its plan
holds while it runs, and between its passes. Plans for several limits of both are made for each part; an integer
program chooses among them, and a last search uses what is left of the budget.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import nn

from remat.bounds.min_budget import min_budget
from remat.errors import InvalidInput
from remat.execution import Peaks, PlanOptions, StepPlan, cheapest_fitting, find_plan
from remat.graph import Graph
from remat.plan import Plan
from remat.registry import get_strategy
from remat.simulator import simulate
from remat.solving.api import solve
from remat.torch.internals.operators import tree_map
from remat.torch.measuring.plain import FollowedStep
from remat.torch.parts.opaque import Run, bares, by_key, followed_parts, with_storage
from remat.torch.parts.parts_plan import PartsPlan
from remat.torch.planning.book import PlanBook
from remat.torch.planning.capturing import captured_step
from remat.torch.planning.eager import CHEAP
from remat.torch.planning.planner import Planner, StepToPlan, with_workspace_at_end
from remat.torch.resident.shard import WHOLE, Division
from remat.torch.step.branches import describe_inputs
from remat.torch.step.loss import NO_LOSS
from remat.torch.step.training_graph import CapturedStep, end_of
from remat.units import format_size

KEPT = (1.0, 0.6, 0.3, 0.1, 0.0)  # of what a part saves without a plan: limits that are tried
SEARCH_S = 10.0  # of the integer program
START_BYTES = 16  # most that the caller of loss.backward() holds: two numbers


@dataclass(frozen=True, slots=True)
class _Moment:
    """A stretch of a step.

    Attributes:
        bytes: most that all except parts holds in it.
        waiting: parts between their passes.
        running: (part, 0 for its forward or 1 for its backward pass); None if none runs.
    """

    bytes: int
    waiting: tuple[str, ...]
    running: tuple[str, int] | None = None

    def is_of(self, part: str) -> bool:
        """Whether a pass of the part runs."""
        return self.running is not None and self.running[0] == part


@dataclass(frozen=True, slots=True)
class _Choice:
    """A plan of a part, and the bytes that it holds beside what the part's caller holds.

    Attributes:
        waiting: between its passes.
        running: while its forward pass runs, while its backward pass runs.
    """

    plan: Plan
    cost: int
    waiting: int
    running: tuple[int, int]

    def bytes_at(self, part: str, moment: _Moment) -> int:
        """At a moment, if this is the plan of `part`."""
        running = self.running[moment.running[1]] if moment.running and moment.is_of(part) else 0
        return running + self.waiting * moment.waiting.count(part)


@dataclass(slots=True)
class PartsSearch:
    """Finds plans of the parts of a model within one budget.

    Attributes:
        planner: of the whole model; it has the options and the budget.
        planners: [part] of its steps, each within the part's share.
        division: of the model over ranks.
    """

    planner: Planner
    planners: dict[str, Planner] = field(default_factory=dict)
    division: Division = WHOLE

    def plan(
        self, model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], names: Sequence[str], fixed_bytes: int
    ) -> PartsPlan:
        """The plans of the parts of these names for a step on these arguments.

        Raises:
            InvalidInput: no plans fit; a part does not compile into one graph, or runs on other shapes within a step.
        """
        outside = self.planner.outside
        _, runs = followed_parts(model, args, kwargs, names, self.planner.device, outside, (), self.division)
        for name in names:
            _check_runs(model, name, [run for run in runs if run.part == name])
        parts = {key: self._part(model, key, run) for key, run in by_key(runs).items()}
        read = {part.name for part in parts.values() if part.reads_outputs}
        step, runs = followed_parts(model, args, kwargs, names, self.planner.device, outside, read, self.division)
        parts = _one_of_each_step(parts, runs)
        moments = [*self._moments(step, runs)]
        room = self.planner.budget_bytes - fixed_bytes - START_BYTES
        for part in parts.values():
            part.find_choices(room - max(m.bytes for m in moments if m.is_of(part.key)), len(parts))
        choices = _choices_within(parts, moments, room)
        if choices is None:
            least = {name: min(part.choices, key=lambda c: (c.waiting, max(c.running))) for name, part in parts.items()}
            raise InvalidInput(
                f"no plan of {len(parts)} parts of '{self.planner.name}' was found within "
                f"{format_size(self.planner.budget_bytes)}; the smallest budget known to suffice is "
                f"{format_size(fixed_bytes + START_BYTES + _peak(least, moments), up=True)}"
            )
        for name, part in parts.items():
            last = part.last(choices[name], *_left(name, choices, moments, room), len(parts))
            if _peak({**choices, name: last}, moments) <= room:  # a part that runs twice may use both limits at once
                choices[name] = last
        plans = {key: part.planned(choices[key]) for key, part in parts.items()}
        for part in parts.values():
            self.planners[part.name].plans.update(part.planner.plans)
        return PartsPlan(
            self.planner.name, plans,
            self.planner.budget_bytes, fixed_bytes, fixed_bytes + START_BYTES + _peak(choices, moments),
            self.planner.plain.plain_bytes, ranks=self.division.ranks,
            loss=self.planner.loss_needs.text if self.planner.loss_needs else step.loss,
        )  # fmt: skip

    def plans_for(
        self, model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], names: Sequence[str]
    ) -> list[StepPlan]:
        """Plans of all runs of parts in a step on other arguments, each within the part's share.

        Raises:
            InvalidInput: the model is divided over ranks.
        """
        self.division.check_prepare()
        plans = []
        for run in followed_parts(model, args, kwargs, names, self.planner.device, NO_LOSS, (), self.division)[1]:
            planner = self.planners[run.part]
            given = tree_map(with_storage(planner.device), (run.args, run.kwargs))
            step = _captured(self.division.part(model, run.part), run, given, planner)
            plans.append(planner.plan(step, describe_inputs(given)))
        return plans

    def _part(self, model: nn.Module, key: str, run: Run) -> _Part:
        """A part with its step, and a planner for it."""
        given = tree_map(with_storage(self.planner.device), (run.args, run.kwargs))
        resident = replace(self.planner.resident, part=model.get_submodule(run.part))
        planner = replace(
            self.planner, name=run.part, resident=resident, sample=describe_inputs(given), plans=PlanBook(),
            plain=Peaks(None, "it is a part of a step"), end_bytes=0,
        )  # fmt: skip
        self.planners.setdefault(run.part, planner)
        step = _captured(self.division.part(model, run.part), run, given, planner)
        own = planner.surrounded(step, planner.sample)
        return _Part(key, run.part, planner, own, planner.weigh(own.graph, step))

    def _moments(self, step: FollowedStep, runs: Sequence[Run]) -> Iterator[_Moment]:
        """The moments of a followed step, in their order."""
        sizes = self.planner.workspaces_of(step.signatures)
        totals = [held + sizes.get(name, 0) for held, name in zip(step.held_bytes, step.signatures, strict=True)]
        events = [(run.forward, run, 0) for run in runs]
        events += [(run.backward, run, 1) for run in runs if run.backward is not None]
        at, waiting = 0, list[str]()
        for (held, begin, end), run, half in sorted(events, key=lambda event: event[0][1:]):
            yield _Moment(max(totals[at:begin], default=0), tuple(waiting))
            if half:
                waiting.remove(run.key)
            yield _Moment(held, tuple(waiting), (run.key, half))
            if not half:  # for good if it has no backward pass: somebody may hold its outputs
                waiting.append(run.key)
            at = end
        yield _Moment(max(totals[at:], default=0), tuple(waiting))


def _check_runs(model: nn.Module, name: str, runs: Sequence[Run]) -> None:
    """Refuse a part whose runs in a step cannot be planned."""
    part = model.get_submodule(name)
    if not runs:
        children = [f"{name}.{child}" for child, _ in part.named_children()]
        instead = f", or give its modules: {', '.join(children[:4])}" if children else ""
        raise InvalidInput(
            f"the part '{name}' does not run in a step on these arguments, or not where the model has it as a "
            f"submodule; leave it out of parts={instead}"
        )
    trained = any(p.requires_grad for p in part.parameters())
    if not trained and not any(x.needs_gradient for run in runs for x in bares(run)):
        raise InvalidInput(f"the part '{name}' needs no gradient, so that it saves nothing; leave it out of parts=")
    if any([x.layout for x in bares(run)] != [x.layout for x in bares(runs[0])] for run in runs):
        raise InvalidInput(f"the part '{name}' runs on different shapes within a step, which parts= cannot plan")


def _one_of_each_step(parts: Mapping[str, _Part], runs: Sequence[Run]) -> dict[str, _Part]:
    """The parts without those whose step another one has, which gets their runs: a loop follows one plan of a step."""
    first, keys = dict[tuple[str, str], _Part](), dict[str, str]()
    for key, part in parts.items():
        same = part.name, part.own.fingerprint.sha256
        keys[key] = first.setdefault(same, part).key
    for run in runs:
        run.key = keys[run.key]
    return {part.key: part for part in first.values()}


def _captured(part: nn.Module, run: Run, given: Any, planner: Planner) -> CapturedStep:
    """The step of a part; a refusal says of which."""
    is_on, dtype, keeps = run.autocast
    try:
        with torch.autocast(planner.device, dtype, is_on, cache_enabled=keeps):
            return captured_step(part, given[0], given[1], planner.backend)
    except InvalidInput as error:
        raise InvalidInput(f"the part '{run.part}': {error}") from error


@dataclass(slots=True)
class _Part:
    """A part, and the plans that are known for it.

    Attributes:
        key: of its runs.
        own: its step.
        weighed: the graph of its step; nothing else is held at its end.
        graph: the same, where outputs and gradients of outputs have no bytes, because the caller holds them.
    """

    key: str
    name: str
    planner: Planner
    own: StepToPlan
    weighed: Graph
    graph: Graph = field(init=False)
    choices: list[_Choice] = field(default_factory=list)

    def __post_init__(self) -> None:
        graph, values = self.weighed, list(self.weighed.values)
        end = end_of(graph)
        outputs = [v for v, value in enumerate(values) if value.keep and graph.producer[v] < end]
        for v in (*outputs, *graph.operations[end].outputs):
            values[v] = replace(values[v], bytes=0)
        self.graph = replace(graph, values=tuple(values))

    @property
    def reads_outputs(self) -> bool:
        """Whether an operation beside the end reads an output."""
        end = end_of(self.weighed)
        outputs = (v for v, value in enumerate(self.weighed.values) if value.keep and self.weighed.producer[v] < end)
        return any(set(self.weighed.users[v]) - {end} for v in outputs)

    def find_choices(self, limit: int, n_parts: int) -> None:
        """Plans for several limits of what is held while the part runs, at most `limit`, and between its passes."""
        plain = self._choice(Plan.from_order(self.graph, range(len(self.graph)), None))
        least = min_budget(self.graph, self.planner.options.scope, time_limit_s=1.0)
        self.choices = [plain, self._choice(least.plan)]
        options = self._options(n_parts)
        strategy = options.strategy if get_strategy(options.strategy).is_baseline else "search"
        smallest = least.bytes - self.graph.fixed_bytes
        limits = [most for most in (limit, (limit + smallest) // 2) if most >= smallest]
        pairs = [*itertools.product(limits, KEPT)]
        for most, share in pairs:
            graph, budget = self._within(most, round(share * plain.waiting))
            start = cheapest_fitting(graph, (self._bound(graph, c.plan) for c in self.choices), budget)
            if start is not None and simulate(graph, start).cost <= (1 + CHEAP) * graph.total_cost:
                continue
            found = solve(
                graph, budget, strategy, **options.within(options.time_limit_s / len(pairs)).of_solver(),
                warm_start=start,
            )  # fmt: skip
            if found.plan is not None:
                self.choices.append(self._choice(found.plan))

    def last(self, choice: _Choice, limits: tuple[int, int], kept: int, n_parts: int) -> _Choice:
        """The choice, or a cheaper one.

        Args:
            limits: of what is held while the forward pass runs, and while the backward pass runs.
            kept: of what is held between them.
        """
        graph, budget = self._within(min(limits) if max(choice.running) <= min(limits) else max(limits), kept)
        found = find_plan(graph, budget, self._options(n_parts), known=[self._bound(graph, choice.plan)])
        assert found.plan is not None
        other = self._choice(found.plan)
        fits = all(held <= limit for held, limit in zip(other.running, limits, strict=True)) and other.waiting <= kept
        return other if fits and other.cost < choice.cost else choice

    def _options(self, n_parts: int) -> PlanOptions:
        """Those of one of two solves of a part."""
        options = self.planner.options
        return options.within(options.time_limit_s / (2 * n_parts))

    def planned(self, choice: _Choice) -> StepPlan:
        """The plan as the part's planner finds it again when the part runs; other shapes get as many bytes."""
        planner, most = self.planner, max(choice.running)
        given = sum(self.weighed.values[v].bytes for v in self.weighed.operations[end_of(self.weighed)].outputs)
        hidden = sum(value.bytes for value in self.weighed.values) - sum(value.bytes for value in self.graph.values)
        planner.end_bytes = max(0, most - choice.waiting)
        planner.budget_bytes = self.graph.fixed_bytes + most + hidden - given
        own = planner.surrounded(self.own.step, planner.sample)
        graph = planner.weigh(own.graph, own.step)
        options = planner.options
        plan = own.planned(
            graph, choice.plan, options.strategy, planner.budget_bytes + given, options.cost,
            implementations=planner.backend.implementations,
        )  # fmt: skip
        planner.plans[own.fingerprint.sha256] = plan
        return plan

    def _within(self, limit: int, kept: int) -> tuple[Graph, int]:
        """(a graph whose end needs what others hold then, a budget): their plans keep both limits."""
        return with_workspace_at_end(self.graph, max(0, limit - kept)), self.graph.fixed_bytes + limit

    def _bound(self, graph: Graph, plan: Plan) -> Plan:
        return Plan.from_order(graph, plan.order.tolist(), None, plan.choices)

    def _choice(self, plan: Plan) -> _Choice:
        plan = self._bound(self.graph, plan)
        trace = simulate(self.graph, plan)
        i = trace.order.tolist().index(end_of(self.graph))
        held, running = trace.resident_bytes - self.graph.fixed_bytes, trace.running_bytes - self.graph.fixed_bytes
        forward, backward = int(running[:i].max(initial=0)), int(running[i + 1 :].max(initial=0))
        return _Choice(plan, trace.cost, int(held[i]), (forward, backward))


def _peak(choices: Mapping[str, _Choice], moments: Sequence[_Moment]) -> int:
    """Most bytes above those that are there before."""
    return max(m.bytes + sum(c.bytes_at(name, m) for name, c in choices.items()) for m in moments)


def _left(
    name: str, choices: Mapping[str, _Choice], moments: Sequence[_Moment], room: int
) -> tuple[tuple[int, int], int]:
    """(bytes that a part may hold in its forward and its backward pass, bytes that it may hold between them)."""
    limits, kept, own = [room, room], room, choices[name]
    for moment in moments:
        n = moment.waiting.count(name)
        left = room - moment.bytes - sum(c.bytes_at(other, moment) for other, c in choices.items() if other != name)
        if moment.running is not None and moment.is_of(name):
            half = moment.running[1]
            limits[half] = min(limits[half], left - n * own.waiting)
        if n:
            kept = min(kept, (left - own.bytes_at(name, moment)) // n + own.waiting)
    return (limits[0], limits[1]), kept


def _choices_within(parts: Mapping[str, _Part], moments: Sequence[_Moment], room: int) -> dict[str, _Choice] | None:
    """The cheapest choice of a plan for each part within the budget."""
    from remat.programs import highs, program  # they import SciPy, which training does not need

    columns = [(name, choice) for name, part in parts.items() for choice in part.choices]
    held = [[choice.bytes_at(name, moment) for name, choice in columns] for moment in moments]
    one = [[float(name == part) for name, _ in columns] for part in parts]
    scale, ones = program.scale_of(room), np.ones(len(parts))
    most = np.array([room - moment.bytes for moment in moments]) * scale
    found, _ = highs.cheapest_columns(
        np.array([float(choice.cost) for _, choice in columns]), np.vstack([np.array(held) * scale, np.array(one)]),
        np.concatenate([np.full(len(moments), -np.inf), ones]), np.concatenate([most, ones]), SEARCH_S,
    )  # fmt: skip
    if found is None:
        return None
    choices = {name: choice for (name, choice), is_chosen in zip(columns, found, strict=True) if is_chosen}
    return choices if _peak(choices, moments) <= room else None
