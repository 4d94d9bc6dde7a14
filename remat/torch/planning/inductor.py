"""The back-end that lets Inductor compile a plan; plans are kept in files, because making one takes long."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

from torch import nn

from remat.errors import InvalidPlan
from remat.execution import Peaks, StepPlan, cheapest_fitting
from remat.execution.phases import LOWERING, SEARCH
from remat.graph import Graph
from remat.plan import Plan
from remat.solution import Solution
from remat.solving.api import solve
from remat.torch.inductor.compiled import LoweredStep, cheapest
from remat.torch.internals.inductor import settings_key
from remat.torch.planning.capturing import whole_step
from remat.torch.planning.planner import Backend, Planner, StepToPlan
from remat.torch.resident.in_backward import BY_THE_LOOP, Updates
from remat.torch.step import aot, runners
from remat.torch.step.capture import TrainingGraph
from remat.torch.step.runners import Runner
from remat.torch.step.training_graph import CapturedStep

COMPILED = 3  # counts changes of how compiled plans are made, so that plans of earlier versions are not kept for ever


@dataclass(frozen=True, slots=True)
class Inductor(Backend):
    """Compiles the groups of calls that Inductor fuses; a plan is judged by the code that Inductor generates."""

    runner: ClassVar[Runner] = runners.Inductor()
    instead: ClassVar[str] = ", or backend='eager', whose peak is the predicted one"
    implementations: str = "default"
    updates: Updates = BY_THE_LOOP

    @aot.no_collection()
    def step_of(self, training_graph: TrainingGraph, name: str, model: nn.Module) -> CapturedStep:
        return whole_step(training_graph, name, model)

    def plain_peak(
        self, planner: Planner, step: CapturedStep, model: nn.Module, args: tuple[Any, ...],
        kwargs: Mapping[str, Any], *, may_run: bool,
    ) -> Peaks:  # fmt: skip
        planner.follow_loss(model, args, kwargs)
        with planner.phases.of(LOWERING):
            compiled = self._compiled(planner, planner.surrounded(step, ""))
            return Peaks(compiled.step.graph.fixed_bytes + compiled.plain.peak_bytes)

    def carried(self, planner: Planner, own: StepToPlan) -> StepPlan | None:
        return None

    def new(self, planner: Planner, own: StepToPlan, in_loop: bool) -> StepPlan:
        """A plan of a step that Inductor compiles, or one made for a larger budget that fits.

        Plans are kept beside the measurements, so that a smaller budget never has a higher peak than a larger one had.
        """
        options, held = planner.options, planner.budget_bytes - own.graph.fixed_bytes
        folder = self._folder_of_plans(planner, own)
        fitting = {budget: plan for budget, plan in _plans_in(folder, own).items() if _held(plan) <= held}
        larger = [budget for budget in fitting if budget >= held]
        if larger:
            return replace(fitting[min(larger)], budget_bytes=planner.budget_bytes)
        compiled = self._compiled(planner, own)

        def find(groups: Graph, limit: int, known: Sequence[Plan]) -> Solution:
            with planner.phases.of(SEARCH):
                return solve(
                    groups, limit, options.strategy, **options.of_solver(),
                    warm_start=cheapest_fitting(groups, known, limit),
                )  # fmt: skip

        with planner.phases.of(LOWERING):
            found = cheapest(compiled, planner.budget_bytes, options.cost, options.gpu, find)
        graph = own.graph.with_costs([0] * len(own.graph), found.cost_unit)
        plan = own.planned(
            graph, Plan.from_order(graph, found.candidate.order), found.strategy, planner.budget_bytes,
            options.cost if found.cost_unit else "", noise=found.noise, generated=found.generated,
            plain_peak_bytes=graph.fixed_bytes + compiled.plain.peak_bytes,
        )  # fmt: skip
        best = min([plan, *fitting.values()], key=lambda each: each.overhead)
        best = replace(best, budget_bytes=planner.budget_bytes)
        best.save(folder / f"{held}.json")
        return best

    def retained_peak(self, plan: StepPlan) -> int | None:
        return None

    def _compiled(self, planner: Planner, own: StepToPlan) -> LoweredStep:
        """What Inductor makes of a step, with everything resident; kept as long as the captured step."""
        known, folder = own.step.training_graph.known, planner.options.cache_folder
        key = LoweredStep, own.graph.sha256(), folder
        if key not in known:
            primals = (None,) * len(own.step.training_graph.primals)  # the compiler must not keep the tensors
            training_graph = replace(own.step.training_graph, primals=primals, known={})
            step = replace(own.step, graph=own.graph, training_graph=training_graph)
            known[key] = LoweredStep(step, folder, planner.device)
        known[key].phases = planner.phases
        return known[key]

    def _folder_of_plans(self, planner: Planner, own: StepToPlan) -> Path:
        """Where plans of this step under these options are kept, each with its budget above the fixed bytes as name."""
        options, fingerprint = planner.options, own.fingerprint
        determines = (
            COMPILED, fingerprint.version, fingerprint.sha256, options.cost, options.gpu.name, options.strategy,
            options.scope, options.seed, options.time_limit_s, options.threads, settings_key(),
        )  # fmt: skip
        return options.cache_folder / "plans" / hashlib.sha256(repr(determines).encode()).hexdigest()[:32]


def _held(plan: StepPlan) -> int:
    """The peak above the fixed bytes."""
    return plan.peak_bytes - plan.graph.fixed_bytes


def _plans_in(folder: Path, own: StepToPlan) -> dict[int, StepPlan]:
    """[budget above the fixed bytes] plan; files that cannot be used here are left out."""
    plans = {}
    for path in folder.glob("*.json"):
        try:
            plans[int(path.stem)] = StepPlan.load(path, own.graph, own.fingerprint, own.fixed)
        except (InvalidPlan, ValueError):  # cut off, or written by another version
            continue
    return plans
