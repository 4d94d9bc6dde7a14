"""Hierarchical rematerialization: options of parts within parts, combined along a chain by dynamic programming."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from baselines._chain import SLOTS, Chain
from baselines._forward import Forward
from baselines._hierarchy import Option, Part, Solver, narrow_places
from baselines._persistent import Schedules, Stages, schedule_table
from remat import Candidate, Plan, Problem, Scope, simulate, strategy
from remat.context import Context
from remat.search.choices import drop_unread_repeats
from remat.search.online import in_stages
from remat.solution import Outcome

MOST_STAGES = 100  # the upper program takes time in the cube of their number; beyond it neighbours are one part
LEAST_STAGES = 2  # neighbours are grouped to parts, twice as many each time, down to so few
ABOVE = 1.25  # largest limit over the budget: the program rounds up, and the simulator frees earlier
OPTIONS_SHARE = 0.5  # of the time, for options
WORK_PER_S = 300_000  # operations of options evaluated, in a repeatable run: the speed of a slow machine
PLAN_S = 0.3  # needed for another try


@strategy(
    "hierarchical", baseline=True, version=1, allowed={"slots": SLOTS}, compiles=schedule_table, gives_starts=True,
)  # fmt: skip
def hierarchical(problem: Problem, context: Context, *, slots: int = 500) -> Outcome:
    """Parts of the graph with options of what to save, combined level by level (Gusak et al., ICML 2025).

    The forward pass is cut into a chain of parts where little but one operation's outputs is read later. Each part has
    options: what it holds between its passes, its peaks and its cost. Large parts are split again, down to parts in
    which every set of values is tried (`baselines._hierarchy`). The dynamic program of Rotor then chooses for each part
    whether it runs without saving, saves its input, or saves by one of its options, as in Rockmate (Zhao et al., ICML
    2023). It does so for the finest chain, then with 2, 4, ... neighbours as one part; the cheapest plan counts.

    Deviations: HiRemate solves parts by integer programs; here every set of up to 8 values is tried, and where there
    are more, values are dropped one by one where a byte costs least. Its upper levels are integer programs over the
    options too; here the top level is the dynamic program. The program's limit is raised or lowered until the simulator
    finds the budget just met. Staged plans have the repeats between two first computations in the graph's order.

    Args:
        slots: into which the memory is divided.

    @inproceedings{gusak2025hiremate, title={HiRemate: Hierarchical Approach for Efficient Re-materialization of Neural
    Networks}, author={Gusak, Julia and Zhao, Xunyi and Le Hellard, Théotime and Li, Zhe and Eyraud-Dubois, Lionel
    and Beaumont, Olivier}, booktitle={ICML}, year={2025}}
    """
    graph = problem.graph
    forward = Forward.of(graph)
    finest = Chain.cut(forward, narrow_places(forward))
    ends = (1 - OPTIONS_SHARE) * context.remaining_s()
    most_work = context.steps_in(WORK_PER_S) if context.repeats else 0
    solver = Solver(lambda work: work > most_work if context.repeats else context.remaining_s() <= ends)
    plans, size = list[Candidate](), 1 << ((len(finest.forward) - 1) // MOST_STAGES).bit_length()
    while True:
        chain = finest.grouped(size)
        parts = [Part(forward, *passes) for passes in zip(chain.forward, chain.backward, strict=True)]
        levels = _Levels(chain, parts, [solver.options(part) for part in parts])
        plan = levels.plan(problem, context, slots)
        plans += [] if plan is None else [Candidate(plan, {"parts": len(parts)})]
        size *= 2
        if len(parts) <= LEAST_STAGES or solver.is_over():
            return Outcome(tuple(plans), stats={"solved": solver.solved, "levels": 1 + solver.levels})


@dataclass(frozen=True, slots=True)
class _Levels:
    """A chain whose stages are parts with options."""

    chain: Chain
    parts: Sequence[Part]
    options: Sequence[Sequence[Option]]

    def plan(self, problem: Problem, context: Context, slots: int) -> Plan | None:
        """The plan of the largest limit with which the simulator finds the budget met, by bisection."""
        graph, room = problem.graph, problem.budget_bytes - problem.graph.fixed_bytes
        if room < 0:
            return None
        schedules = Schedules(self.stages().in_slots(max(1, -(-room // slots))), int(ABOVE * slots))
        plan, low, high = None, 0, schedules.slots
        while low <= high and (context.repeats or context.remaining_s() > PLAN_S):
            limit = (low + high) // 2
            passes = schedules.within(limit)
            found = None if passes is None else Plan.from_order(graph, self.order(passes, problem.scope))
            if found is not None and simulate(graph, found).peak_bytes > problem.budget_bytes:
                high = limit - 1
            else:
                plan, low = found or plan, limit + 1
        return plan

    def stages(self) -> Stages:
        """The chain's stages, with the parts' options."""
        shape = len(self.parts), max(map(len, self.options))
        sizes = {name: np.zeros(shape, dtype=np.int64) for name in ("saved", "saving", "returning")}
        backward = np.full(shape, np.inf)
        for i, row in enumerate(self.options):
            backward[i, : len(row)] = [option.cost for option in row]
            for name, size in sizes.items():
                size[i, : len(row)] = [getattr(option, name) for option in row]
        return self.chain.stages()._replace(backward=backward, **sizes)

    def order(self, passes: Sequence[tuple[str, int, int]], scope: Scope) -> list[int]:
        """Computations of passes, without those whose outputs nothing reads."""
        graph, order, known = self.chain.graph, list[int](), set[int]()
        for kind, i, which in passes:
            part, option = self.parts[i], self.options[i][which]
            ops = [part.operations[k] for k in option.backward] if kind == "return" else part.forward
            order += [k for k in ops if not (k in known and graph.operations[k].run_once)]
            known.update(ops)
        calls = [(k, "") for k in (in_stages(order) if scope is Scope.STAGED else order)]
        return [k for k, _ in drop_unread_repeats(graph, calls)]
