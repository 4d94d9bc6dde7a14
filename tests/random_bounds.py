"""Bounds against plans: what `make fuzz` runs as the campaign ``bounds``.

A case is a random graph of 2 to 400 operations at a random budget and scope. No bound of any solver may be above the
cost of a plan. Small graphs have the optimum of brute force; larger ones have the plans of a MILP, an exact search and
the strategies, which the reference of `brute_force` replays. Every certificate is checked, and must be refused once
it claims more than a plan costs. The limits are in seconds, so that a case need not repeat exactly.
"""

from __future__ import annotations

import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from types import SimpleNamespace
from typing import cast
from unittest import mock

import numpy as np
from brute_force import optimum, random_graph, random_step, replay_plan, scope_by_definition, with_implementations
from helpers import context_of
from random_graphs import without_exhaustive

import remat
from remat import BoundCertificate, Graph, InvalidInput, Plan, Scope, Status, simulate
from remat.bounds import window_integers
from remat.bounds.lp import SMALL_COLUMNS, lower_bound, model_columns
from remat.bounds.window_integers import Listener, WindowIntegers
from remat.bounds.windows import WindowBound
from remat.frontends import synthetic
from remat.incumbent import Incumbent
from remat.search.exhaustive import exhaustive
from remat.search.greedy import greedy_eviction
from remat.simulator import plain_peak

LARGEST = 400  # operations
SMALL, SMALL_JOINT, MIDDLE = 10, 7, 60  # most operations for brute force, for it with implementations, and for a MILP
ASTAR = 24  # most operations for the exact search
MANY_COLUMNS = 1000  # of the window MILP, for each second
SCOPES = ("staged", "staged", "staged", "fixed_order", "fixed_order", "free")


@dataclass(slots=True)
class Case:
    """A problem, and what was found about it, with who found it."""

    graph: Graph
    budget: int
    scope: Scope
    costs: list[tuple[int, str]] = field(default_factory=list)  # of the plans that fit the budget and the scope
    bounds: list[tuple[int, str]] = field(default_factory=list)
    proofs: list[tuple[BoundCertificate, str]] = field(default_factory=list)
    impossible: list[str] = field(default_factory=list)  # who claims that no plan fits
    failures: list[str] = field(default_factory=list)  # of strategies; one whose bound is above its own plan fails
    is_optimal: bool = False  # whether an exact method ended with one of the plans

    @property
    def is_small(self) -> bool:
        """Whether brute force is quick."""
        return len(self.graph) <= (SMALL_JOINT if self.graph.has_implementations else SMALL)

    def add_plan(self, plan: Plan, who: str) -> None:
        """Replay a plan, and keep its cost if it fits the budget and the scope."""
        truth = replay_plan(self.graph, plan)
        scope = Scope(scope_by_definition(plan.order.tolist(), len(self.graph)))
        if truth.peak_bytes <= self.budget and self.scope.contains(scope):
            self.costs.append((truth.cost, who))

    def add_proof(self, proof: BoundCertificate, who: str) -> None:
        """Keep a bound with a certificate."""
        self.bounds.append((proof.bound, who))
        self.proofs.append((proof, who))


def check(seed: int, most: int = LARGEST, seconds: float = 1.0) -> str:
    """The outcome of one random case, see `fuzz`: of up to `most` operations; a long step takes about `seconds`."""
    rng = np.random.default_rng(seed)
    case = random_case(rng, most)
    with without_exhaustive():
        find_plans(case, rng, seconds)
        known = best_cost(case)
        find_bounds(case, rng, seconds, known)
    wrong = wrong_with(case, known)
    if wrong:
        graph = f"{len(case.graph)} operations, {'with' if case.graph.has_implementations else 'without'} choices"
        return f"{wrong} ({case.graph.name}: {graph}, budget {case.budget}, {case.scope})"
    return summary(case, known)


def best_cost(case: Case) -> int | None:
    """The optimum of a small graph, or None if it has no plan; otherwise the cost of the best plan."""
    if case.is_small:
        return optimum(case.graph, case.budget, str(case.scope))
    return min(case.costs)[0] if case.costs else None


def find_plans(case: Case, rng: np.random.Generator, seconds: float) -> None:
    """Plans of greedy eviction, of exact methods where they end soon, and of the search or the portfolio."""
    plan = greedy_eviction(case.graph.default(), case.budget, deadline=time.monotonic() + seconds)
    if plan is not None:
        case.add_plan(Plan.from_order(case.graph, plan.order.tolist()), "greedy")
    n, joint = len(case.graph), case.graph.has_implementations
    if n <= ASTAR and not case.is_small and not joint:
        found = exhaustive(case.graph, case.budget, str(case.scope), deadline=time.monotonic() + seconds)
        if found.plan is not None:
            case.add_plan(found.plan, "exact search")
            case.is_optimal = True
        if found.infeasible:
            case.impossible.append("exact search")
        elif found.bound is not None:
            case.bounds.append((found.bound, "exact search"))
    if n <= MIDDLE and (not case.is_small or rng.random() < 0.3):
        solve(case, "checkmate_milp", rng, 2 * seconds)
    chance = 0.5 if case.scope is Scope.FREE else 0.35
    solve(case, "portfolio" if rng.random() < chance else "search", rng, rng.uniform(1, 3) * seconds)


def solve(case: Case, strategy: str, rng: np.random.Generator, seconds: float) -> None:
    """The plan, the bound and the certificate of a strategy."""
    seconds = 0.3 * seconds if strategy == "search" else seconds
    solution = remat.solve_sweep(
        case.graph, [case.budget], strategy, scope=str(case.scope), isolate=False, threads=1, time_limit_s=seconds,
        seed=int(rng.integers(100)),
    )[0]  # fmt: skip
    if solution.status is Status.FAILED:
        case.failures.append(f"{strategy}: {solution.message}")
    if solution.status is Status.INFEASIBLE:
        case.impossible.append(strategy)
    if solution.plan is not None:
        case.add_plan(solution.plan, strategy)
        is_exact = strategy == "checkmate_milp" and case.scope is Scope.STAGED and not case.graph.has_implementations
        case.is_optimal |= is_exact and solution.status is Status.OPTIMAL
    if solution.bound is not None:
        case.bounds.append((solution.bound, strategy))
    if solution.certificate is not None:
        case.add_proof(solution.certificate, f"{strategy}'s certificate")


def find_bounds(case: Case, rng: np.random.Generator, seconds: float, known: int | None) -> None:
    """Bounds of windows with and without cuts, in integers, of the staged LP, and of the smallest budget."""
    problem = context_of(case.graph, case.budget, scope=case.scope).problem
    rounds = int(rng.integers(1, 9))
    for with_cuts in (False, True):
        windows = WindowBound(problem, with_cuts=with_cuts, tries=int(rng.integers(1, 5)))
        who = "windows" if with_cuts else "windows without cuts"
        windows.run(time.monotonic() + seconds, on_bound=partial(case.add_proof, who=who), rounds=rounds)
    listener = Listener(
        on_proof=partial(case.add_proof, who="window tree"), on_plan=partial(case.add_plan, who="window MILP"),
        on_bound=lambda bound: case.bounds.append((bound, "window MILP")), should_stop=lambda: False,
    )  # fmt: skip
    for cost in (None, known) if case.is_small else (known if rng.random() < 0.7 else None,):
        if cost is not None and rng.random() < 0.5:  # a cost that no plan need have
            cost += int(rng.choice([1, 2, 1 + cost // 50]))
        integers = WindowIntegers(windows, cast("Incumbent", SimpleNamespace(cost=cost)))
        with mock.patch.object(window_integers, "COLUMNS_PER_S", MANY_COLUMNS):  # HiGHS need not end in time
            integers.run(time.monotonic() + 1.5 * seconds, listener)
    if model_columns(case.graph) <= SMALL_COLUMNS:
        lower_bound(
            context_of(case.graph, case.budget, scope=case.scope, seconds=seconds),
            on_bound=partial(case.add_proof, who="staged LP"),
        )
    least = remat.min_budget(case.graph, str(case.scope), time_limit_s=0.2 * seconds)
    if least.lower_bound_bytes > case.budget:
        case.impossible.append("min_budget")


def wrong_with(case: Case, known: int | None) -> str:
    """What contradicts a plan, or brute force if the graph is small; '' if nothing."""
    if case.failures:
        return f"failed: {'; '.join(case.failures)}"
    if case.is_small and case.costs and (known is None or min(case.costs)[0] < known):
        return f"a plan of {min(case.costs)}, but brute force finds {known}"
    costs = [*case.costs, *([(known, "brute force")] if case.is_small and known is not None else [])]
    least, finder = min(costs, default=(None, ""))  # perhaps none fits: the certificates must hold all the same
    if least is not None and case.impossible:
        return f"impossible: {case.impossible} say that no plan fits, but one of {finder} costs {least}"
    for bound, who in case.bounds:
        if least is not None and bound > least:
            return f"above a plan: {who} proves {bound}, but a plan of {finder} costs {least}"
    for proof, who in case.proofs:
        try:
            proven = remat.verify_bound(case.graph, proof, budget=case.budget, scope=str(case.scope))
        except InvalidInput as error:
            return f"not verified: a certificate of {who}: {error}"
        if proven != proof.bound:
            return f"not verified: a certificate of {who} claims {proof.bound}, but proves {proven}"
        with suppress(InvalidInput):
            if least is not None:
                remat.verify_bound(case.graph, replace(proof, bound=least + 1))
                return f"forged: a certificate of {who} is believed to prove {least + 1}, but a plan costs {least}"
    return ""


def summary(case: Case, known: int | None) -> str:
    """Ok, and how many bounds above the least cost, which is trivial, were compared with what."""
    against = "brute force" if case.is_small else "exact optima" if case.is_optimal else "plans"
    against = "no plan" if known is None and not case.is_small else against
    above = [who for bound, who in case.bounds if bound > case.graph.least_cost]
    counts = Counter(f"bounds of {who} against {against}" for who in above)
    counts["certificates verified"] = len(case.proofs)
    counts["proofs that no plan fits"] = len(case.impossible)
    counts[f"graphs in scope {case.scope} compared with {against}"] = 1
    return "ok: " + ", ".join(f"{count} {what}" for what, count in counts.items() if count)


def random_case(rng: np.random.Generator, most: int = LARGEST) -> Case:
    """A random graph at a budget below its plain peak, most often one that a plan meets to the byte.

    Most small graphs need repeats.
    """
    scope = str(rng.choice(SCOPES))
    while True:
        joint = bool(rng.random() < 0.25)
        size = str(rng.choice(["small", "middle", "large"], p=[0.5, 0.3, 0.2]))
        few = SMALL_JOINT if joint else SMALL
        low, high = {"small": (2, few), "middle": (few + 1, MIDDLE), "large": (MIDDLE + 1, LARGEST)}[size]
        n = int(rng.integers(min(low, most), min(high, most) + 1))
        graph = random_numbers(rng, random_structure(rng, n))
        if joint:
            graph = with_implementations(graph, rng, share=0.6 if size == "small" else 0.2)
        budget = random_budget(rng, graph, scope)
        if budget is None:
            continue
        case = Case(graph, budget, Scope(scope))
        if not case.is_small or best_cost(case) != graph.least_cost or rng.random() < 0.2:
            return case


def random_structure(rng: np.random.Generator, n: int) -> Graph:
    """A graph of about `n` operations of a random family; its numbers are drawn later."""
    family, seed = str(rng.choice(["random", "step", "step", "layered", "skip"])), int(rng.integers(1 << 30))
    if family == "skip":
        graph = synthetic.skip(depth=max(1, (n - 3) // 4))
    elif family == "layered":
        width, density, skips = rng.uniform(0.1, 1), rng.uniform(0, 0.5), rng.uniform(0, 0.4)
        graph = synthetic.layered(n=max(3, n), width=width, density=density, skips=skips, seed=seed)
    else:
        make = random_step if family == "step" else random_graph
        graph = make(rng, n, multi_output=float(rng.choice([0, 0, 0.4])))
    return replace(graph, name=family)


def random_numbers(rng: np.random.Generator, graph: Graph) -> Graph:
    """The graph with other sizes and costs, and sometimes with workspace, kept values, operations that run once."""
    sizes, costs = draw(rng, len(graph.values)), draw(rng, len(graph))
    scratch = draw(rng, len(graph)) if rng.random() < 0.3 else [0] * len(graph)
    scratch = [min(bytes_, 2 * max(sizes, default=0)) for bytes_ in scratch]
    once, keep = (rng.uniform(0, 0.3) if rng.random() < 0.3 else 0.0 for _ in range(2))
    operations = tuple(
        replace(op, cost=cost, workspace_bytes=workspace, run_once=bool(rng.random() < once))
        for op, cost, workspace in zip(graph.operations, costs, scratch, strict=True)
    )
    values = tuple(
        replace(value, bytes=size, keep=bool(rng.random() < keep))
        for value, size in zip(graph.values, sizes, strict=True)
    )
    fixed = int(rng.integers(max(sizes, default=0) + 2)) if rng.random() < 0.3 else 0
    return replace(graph, operations=operations, values=values, fixed_bytes=fixed)


def draw(rng: np.random.Generator, n: int) -> list[int]:
    """`n` numbers of one kind: few different ones, many zeros, equal, spread, large, or multiples of a large unit."""
    kind = rng.choice(["few", "few", "zeros", "equal", "spread", "large", "units"])
    if kind == "equal":
        return [int(rng.integers(1, 1000))] * n
    if kind in ("few", "zeros"):
        return rng.integers(kind == "few", 7 if kind == "few" else 3, n).tolist()
    if kind == "units":
        return (rng.integers(1, 5, n) << 30).tolist()
    return (2.0 ** rng.uniform(0, 12 if kind == "spread" else 40, n)).astype(np.int64).tolist()


def random_budget(rng: np.random.Generator, graph: Graph, scope: str) -> int | None:
    """From the largest working set to below the plain peak, often what a plan needs; None if there is none between."""
    low, peak = max(graph.largest_working_set()[0], graph.final_bytes), plain_peak(graph)
    if peak <= low:
        return None
    budget = low + int((peak - low) * rng.choice([0, 0.02, 0.1, 0.3, 0.5, 0.8]))
    choice = rng.random()
    if choice < 0.4:
        budget = max(budget, remat.min_budget(graph, scope, time_limit_s=0.2).bytes)
    plan = greedy_eviction(graph.default(), budget) if choice < 0.8 else None
    if plan is not None:
        budget = simulate(graph, Plan.from_order(graph, plan.order.tolist())).peak_bytes
    return min(peak - 1, max(low, budget - int(rng.random() < 0.1)))
