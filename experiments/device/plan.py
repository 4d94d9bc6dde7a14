"""The second command: wherever a solver is, without PyTorch. Plans every captured step within several budgets."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from typing import Any

import numpy as np

import remat
from experiments.device.folder import SMALLEST, Case, write_document
from remat.execution import Fingerprint, PlanOptions, StepPlan, find_plan
from remat.files import write_text
from remat.frontends.json import load_graph
from remat.graph import Graph
from remat.plan import Plan

SMALLEST_S = 10.0  # most time to look for the plan that needs the least
ROOM = 1.02  # times that plan's peak is the smallest budget
# Budgets of a compiled step, as parts of what was asked for: the code that Inductor generates for a plan may need more
# than the graph of its groups says.
LESS = (1.0, 0.96, 0.92)


@dataclass(frozen=True, slots=True)
class Job:
    """Plans of one case within one budget."""

    case: Case
    share: str
    time_limit_s: float
    threads: int


def plan(cases: list[Case], shares: list[str], time_limit_s: float, threads: int, at_once: int) -> Iterator[str]:
    """Plan what is not planned yet, `at_once` plans at a time; yields a line for each as it is done."""
    jobs = [
        Job(case, share, time_limit_s, threads)
        for share in (*shares, SMALLEST) for case in cases if not case.outcome_file(share).exists()
    ]  # fmt: skip
    if jobs:
        rounds = -(-len(jobs) // at_once)
        yield f"{len(jobs)} plans to make, {at_once} at once: at most about {rounds * time_limit_s / 60:.0f} minutes"
    pool = ThreadPoolExecutor(at_once)  # each solve is a process, which a thread waits for
    running: dict[Future[str], Job] = {pool.submit(_planned, job): job for job in jobs}
    try:
        for i, done in enumerate(as_completed(running), 1):
            job = running[done]
            yield f"[{i}/{len(jobs)}] {job.case.name} {job.share}: {done.result()}"
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def _planned(job: Job) -> str:
    """Write the plans of a job, then how the search ended; returns the end as text."""
    began = time.monotonic()
    captured = job.case.captured()
    assert captured is not None, "only captured cases are planned"
    graph = load_graph(job.case.graph_file("graph"))
    if job.share == SMALLEST:
        least = remat.min_budget(graph, "free", time_limit_s=min(SMALLEST_S, job.time_limit_s))
        budget, known = int(ROOM * least.bytes) - captured.get("shift_bytes", 0), [least.plan]
    else:
        budget, known = int(float(job.share) * captured["plain_bytes"]), []
    try:
        end = (_calls if captured["backend"] == "eager" else _groups)(job, captured, graph, budget, known)
    except remat.InvalidInput as error:
        end = {"failed": str(error)}
    seconds = time.monotonic() - began
    write_document(job.case.outcome_file(job.share), {"budget_bytes": budget, "seconds": seconds, **end})
    return f"{end.get('failed') or end['found']} ({seconds:.0f} s)"


def _calls(job: Job, captured: dict[str, Any], graph: Graph, budget: int, known: list[Plan]) -> dict[str, Any]:
    """A plan of single calls, as a module saves it."""
    found = _solved(graph, budget, job, job.time_limit_s, known)
    assert found.plan is not None, "find_plan raises without a plan"
    order = found.plan.order
    repeated = np.bincount(order, minlength=len(graph)) > 1
    sizes = zip((op.workspace_bytes for op in graph.operations), captured["workspaces_once"], repeated, strict=True)
    graph = graph.with_workspaces([size if again else once for size, once, again in sizes])
    step_plan = StepPlan(
        Plan.from_order(graph, order.tolist(), budget), graph, Fingerprint(**captured["fingerprint"]), found.strategy,
        budget, captured["plain"]["predicted_peak_bytes"], captured["fixed"], captured["cost"],
    )  # fmt: skip
    step_plan.save(job.case.plan_file(job.share))
    return {"found": f"{step_plan.peak_bytes / 1e6:.1f} MB, {step_plan.overhead:.2%} overhead"}


def _solved(graph: Graph, budget: int, job: Job, seconds: float, known: list[Plan]) -> remat.Solution:
    return find_plan(graph, budget, PlanOptions(time_limit_s=seconds, threads=job.threads), known)


def _groups(job: Job, captured: dict[str, Any], graph: Graph, budget: int, known: list[Plan]) -> dict[str, Any]:
    """Orders of groups, for both graphs and for less; the device takes the one whose code fits."""
    cautious, found, failed = load_graph(job.case.graph_file("cautious")), [], ""
    for each, part in ((graph, 1.0), *((cautious, part) for part in LESS)):
        limit = int(part * budget) + captured["shift_bytes"]
        starts = [Plan.from_order(each, plan.order.tolist(), limit) for plan in known]
        starts += [Plan.from_order(each, order, limit) for order in captured["starts"]]
        try:
            solution = _solved(each, limit, job, job.time_limit_s / (1 + len(LESS)), starts)
        except remat.InvalidInput as error:
            failed = failed or str(error)
            continue
        assert solution.plan is not None, "find_plan raises without a plan"
        found.append((each, solution.plan))
    if not found:
        return {"failed": failed}
    orders = [plan.order.tolist() for _, plan in found]
    write_text(job.case.plan_file(job.share), json.dumps(orders))
    overhead = remat.simulate(*found[0]).cost / found[0][0].total_cost - 1
    return {"found": f"{len(orders)} orders of groups, {overhead:.2%} overhead"}
