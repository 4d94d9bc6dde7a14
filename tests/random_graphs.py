"""Random graphs against brute force: what `make fuzz` runs as the campaign ``graphs``.

A case is a random small graph, with or without implementations, at a random budget and scope, solved by some of the
strategies. The exhaustive solvers are switched off, so that the searches and the proofs are tested.
"""

from __future__ import annotations

import contextlib
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
from brute_force import optimum, random_problem, replay_plan, scope_by_definition

import remat
from remat import Graph, Plan, Scope, Solution, Status, simulate
from remat.bounds import _annealed
from remat.bounds import min_budget as minimum
from remat.solvers import choose, portfolio
from remat.solving import dispatch
from remat.solving.here import solve_here

OFTEN = ("portfolio", "search", "interval_cp")  # and three of the other strategies in each case


def check(seed: int) -> str:
    """The outcome of one random case, see `fuzz`."""
    rng = np.random.default_rng(seed)
    graph, budget, scope, best = random_problem(rng, ["staged", "staged", "fixed_order", "free"])
    others = [name for name in remat.strategies() if name not in OFTEN]
    with without_exhaustive(), tempfile.TemporaryDirectory() as folder:
        for name in (*OFTEN, *rng.choice(others, 3, replace=False).tolist()):
            solution = remat.solve_sweep(graph, [budget], name, scope=scope, isolate=False, **limits(rng, name))[0]
            wrong = wrong_with(graph, solution, best, Path(folder))
            if wrong:
                return f"different: {name}: {wrong}"
        name = str(rng.choice(OFTEN))
        results = repeated(graph, budget, name, scope, seed)
        if len(results) > 1:
            return f"different: {name}: two runs that must give the same do not: {results}"
        return wrong_with_minimum(graph, scope) or "ok"


@contextlib.contextmanager
def without_exhaustive() -> Iterator[None]:
    """Without the solvers that try everything, which would decide all graphs of this size; all in this process."""
    with (
        mock.patch.object(
            dispatch, "solve_isolated", lambda context, name, options, _: solve_here(context, name, options)
        ),
        mock.patch.object(portfolio, "EXHAUSTIVE_OPERATIONS", 0),
        mock.patch.object(choose, "EXHAUSTIVE_OPERATIONS", 0),
        mock.patch.object(minimum, "MAX_EXACT_OPERATIONS", 0),
        mock.patch.object(_annealed, "SEARCH_MOVES", 2000),
        mock.patch.object(_annealed, "ORDER_MOVES", 2000),
    ):
        yield


def limits(rng: np.random.Generator, strategy: str) -> dict[str, Any]:
    """By work or by a short time, on one thread or two."""
    most = 5 if strategy == "interval_cp" else 3000  # its unit of work is a program solved
    common = {"seed": int(rng.integers(100)), "threads": int(rng.integers(1, 3))}
    if rng.random() < 0.7:
        return {**common, "time_limit_s": 20, "work_limit": int(rng.integers(1, most))}
    return {**common, "time_limit_s": 0.5, "deterministic": bool(rng.random() < 0.3)}


def repeated(
    graph: Graph, budget: int, strategy: str, scope: str, seed: int, time_limit_s: float = 3.0
) -> set[tuple[Any, ...]]:  # fmt: skip
    """What deterministic runs on machines of different speed give, without those that the clock cut: one result."""
    results = set()
    real, began = time.monotonic, time.monotonic()
    for speed in (1.0, 3.0):  # of a clock: the machine seems as much slower
        with mock.patch("time.monotonic", lambda speed=speed: began + speed * (real() - began)):
            solution = remat.solve_sweep(
                graph, [budget], strategy, scope=scope, deterministic=True, seed=seed, time_limit_s=time_limit_s,
                isolate=False,
            )[0]  # fmt: skip
        if not solution.cut_by_clock:
            plan, proof = solution.plan, solution.certificate
            said = (solution.status, solution.cost, solution.bound, solution.ended)
            results.add((*said, plan and str(plan.steps), proof and str(proof.to_dict())))
    return results


def wrong_with(graph: Graph, solution: Solution, best: int | None, folder: Path) -> str:
    """What a solution claims that is not so; '' if nothing. `best` is the optimum, None if no plan fits."""
    if solution.status is Status.FAILED or solution.ended:
        return f"{solution.status}: {solution.message}"
    if "\n" in solution.message:
        return f"a message of several lines: {solution.message!r}"
    if solution.status is Status.INFEASIBLE and best is not None:
        return f"INFEASIBLE, but a plan costs {best}"
    if best is not None and solution.bound is not None and solution.bound > best:
        return f"the bound {solution.bound}, but a plan costs {best}"
    if solution.certificate is not None:
        proven = remat.verify_bound(
            graph, solution.certificate, budget=solution.budget_bytes, scope=str(solution.scope)
        )  # fmt: skip
        if solution.bound is None or not proven <= solution.bound:
            return f"the bound {solution.bound}, but the certificate proves {proven}"
    if (solution.plan is None) != (solution.cost is None) or (solution.plan is None) != (solution.peak_bytes is None):
        return "a plan without a cost, or a cost without a plan"
    if solution.plan is None:
        return "" if solution.message else f"{solution.status} without a reason"
    if best is None:
        return "a plan, but none fits"
    if solution.status is Status.OPTIMAL and solution.cost != best:
        return f"OPTIMAL at {solution.cost}, but a plan costs {best}"
    return wrong_with_plan(graph, solution, folder)


def wrong_with_plan(graph: Graph, solution: Solution, folder: Path) -> str:
    """What is said of a plan that is not so; '' if nothing."""
    plan = solution.plan
    trace = simulate(graph, plan)
    truth = replay_plan(graph, plan)
    said = (solution.cost, solution.peak_bytes)
    if not said == (trace.cost, trace.peak_bytes) == (truth.cost, truth.peak_bytes):
        return (
            f"cost and peak {said}, simulated {trace.cost, trace.peak_bytes}, in truth {truth.cost, truth.peak_bytes}"
        )
    if truth.peak_bytes > solution.budget_bytes:
        return f"a peak of {truth.peak_bytes} with a budget of {solution.budget_bytes}"
    scope = scope_by_definition(plan.order.tolist(), len(graph))
    if scope != plan.scope or not solution.scope.contains(plan.scope):
        return f"a {scope} plan said to be {plan.scope}, asked for {solution.scope}"
    plan.save(folder / "plan.json")
    remat.save_graph(graph, folder / "graph.json")
    again = remat.load_graph(folder / "graph.json")
    loaded = Plan.load(folder / "plan.json", again)
    if again.sha256() != graph.sha256() or (loaded.steps, loaded.scope) != (plan.steps, plan.scope):
        return "another plan or graph after saving and loading"
    return ""


def wrong_with_minimum(graph: Graph, scope: str) -> str:
    """What `min_budget` claims that is not so; '' if nothing."""
    known = remat.min_budget(graph, scope)
    trace = simulate(graph, known.plan)
    if trace.peak_bytes != known.bytes or not Scope(scope).contains(known.plan.scope):
        return f"different: min_budget: {known.bytes} bytes, but its plan needs {trace.peak_bytes}"
    if optimum(graph, known.lower_bound_bytes - 1, scope) is not None:
        return f"different: min_budget: a plan needs less than {known.lower_bound_bytes}"
    return ""
