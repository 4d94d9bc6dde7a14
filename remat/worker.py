"""Solves in a process of their own, with a hard limit: a solver that crashes costs one row.

The parent starts ``python -m remat._worker JOB RESULT`` (a plain subprocess: spawned pools need an
importable main module, which standard input and notebooks do not have) and reads what it wrote.
Plans that come back are judged again here.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from remat.errors import InvalidInput, InvalidPlan
from remat.frontends.json import graph_to_dict
from remat.plan import Plan, Scope
from remat.registry import get_strategy
from remat.simulator import simulate
from remat.solve import Family, Member, Problem, Solution, Status
from remat.units import parse_size

_running: set[subprocess.Popen[bytes]] = set()

THREAD_VARIABLES = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")


def hard_limit_s(time_limit_s: float) -> float:
    """When a worker is killed: inside the promised overrun of 2 s plus 5 %."""
    return time_limit_s * 1.03 + 1.5


def solve_isolated(problem: Problem, strategy: str, options: Mapping[str, Any]) -> Solution:
    """Run one strategy on one problem in a subprocess; never raises because of what happens there."""
    return solve_isolated_sweep(problem, [problem.budget_bytes], strategy, options)[0]


def solve_isolated_sweep(
    problem: Problem, budgets: Sequence[int | str], strategy: str, options: Mapping[str, Any]
) -> list[Solution]:
    """`solve_isolated` for several budgets in one process: for strategies that ignore the budget."""
    started = time.monotonic()
    rows, status, message = _ask(problem, budgets, strategy, options, family=False)
    if rows is not None:
        try:
            solutions = [_from_row(problem.graph, row) for row in rows]
        except InvalidPlan as error:
            status, message = Status.FAILED, f"the worker returned a wrong plan: {error}"
        else:
            if len(solutions) == 1:  # its own clock started after the process did
                return [replace(solutions[0], wall_s=time.monotonic() - started)]
            return solutions
    name = get_strategy(strategy).name
    failed = Solution(
        status, name, problem.graph.name, 0, problem.scope, problem.accounting,
        message=message, wall_s=time.monotonic() - started,
    )  # fmt: skip
    return [replace(failed, budget_bytes=parse_size(budget)) for budget in budgets]


def run_family_isolated(problem: Problem, strategy: str, options: Mapping[str, Any]) -> Family:
    """`remat.solve.run_family` in a subprocess; every plan that comes back is judged again here."""
    started = time.monotonic()
    rows, status, message = _ask(problem, [problem.budget_bytes], strategy, options, family=True)
    if rows is None:
        return Family(strategy, status=status, message=message, wall_s=time.monotonic() - started)
    row = rows[0]
    members = []
    try:
        for member in row["members"]:
            plan = Plan.from_steps(problem.graph, zip(member["kinds"], member["ids"], strict=True))
            trace = simulate(problem.graph, plan)
            members.append(Member(plan, trace.cost, trace.peak_bytes, member["parameters"]))
    except InvalidPlan as error:
        message = f"the worker's plan is invalid: {error}"
        return Family(strategy, status=Status.FAILED, message=message, wall_s=time.monotonic() - started)
    status = Status(row["status"]) if row["status"] else None
    return Family(strategy, tuple(members), row["rejected"], status, row["message"], row["wall_s"])


def stop_workers() -> None:
    """Kill every worker that runs now; for a caller that was interrupted."""
    for process in list(_running):
        _kill_group(process)


def _ask(
    problem: Problem, budgets: Sequence[int | str], strategy: str, options: Mapping[str, Any], *, family: bool
) -> tuple[list[dict[str, Any]] | None, Status, str]:
    """(what the worker wrote, or None with the status and message that say why)."""
    try:
        return _exchange(problem, budgets, strategy, options, family)
    except OSError as error:  # a full disk, no memory for a process
        return None, Status.FAILED, f"could not run the solver process: {error}"


def _exchange(
    problem: Problem, budgets: Sequence[int | str], strategy: str, options: Mapping[str, Any], family: bool
) -> tuple[list[dict[str, Any]] | None, Status, str]:
    limit_s = problem.remaining_s()
    try:
        json.dumps(dict(options))
    except (TypeError, ValueError):
        raise InvalidInput(f"options of strategy '{strategy}' must be plain, not {dict(options)!r:.80}") from None
    with tempfile.TemporaryDirectory(prefix="remat-") as folder:
        job, result = Path(folder, "job.json"), Path(folder, "result.json")
        warm_start = None
        if problem.warm_start is not None:
            warm_start = str(Path(folder, "warm_start.json"))
            problem.warm_start.save(warm_start)
        job.write_text(
            json.dumps(
                {
                    "graph": graph_to_dict(problem.graph),
                    "budgets": [parse_size(budget) for budget in budgets],
                    "strategy": strategy,
                    "scope": str(problem.scope),
                    "ends_at": time.time() + limit_s,
                    "seed": int(problem.seed),
                    "threads": problem.threads,
                    "accounting": problem.accounting,
                    "work_limit": problem.work_limit,
                    "deterministic": problem.deterministic,
                    "warm_start": warm_start,
                    "options": dict(options),
                    "family": family,
                }
            )
        )
        # -P: a file of the current folder must not shadow a module of the worker.
        command = [sys.executable, "-P", "-m", "remat._worker", str(job), str(result)]
        code, complaint = _run(command, limit_s, problem.threads)
        if result.exists():
            return json.loads(result.read_text()), Status.FAILED, ""
    if code is None:
        return None, Status.TIMEOUT, f"did not stop by itself; killed after {limit_s:.1f} s"
    how = f"signal {-code} ({signal.Signals(-code).name})" if code < 0 else f"exit code {code}"
    return None, Status.FAILED, f"the solver process died with {how}: {complaint or 'it printed nothing'}"


def _run(command: Sequence[str], limit_s: float, threads: int) -> tuple[int | None, str]:
    """(exit code or None if killed at the limit, last line of standard error)."""
    environment = os.environ | dict.fromkeys(THREAD_VARIABLES, str(threads))
    environment["PYTHONPATH"] = os.pathsep.join(os.path.abspath(folder) for folder in sys.path)  # as in this process
    with tempfile.TemporaryFile() as errors:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=errors,
            env=environment,
            start_new_session=True,  # Ctrl-C reaches the parent, which decides
        )
        _running.add(process)
        try:
            code = process.wait(timeout=hard_limit_s(limit_s))
        except subprocess.TimeoutExpired:
            code = None
        finally:
            _running.discard(process)
            if process.poll() is None:
                _kill_group(process)
        errors.seek(0)
        lines = errors.read().decode(errors="replace").strip().splitlines()
    return code, lines[-1][:300] if lines else ""


def _kill_group(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError):  # it may end between the poll and the kill
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def solution_to_row(solution: Solution) -> dict[str, Any]:
    """A JSON-ready form of a solution, its plan as steps."""
    row = {name: getattr(solution, name) for name in Solution.__slots__ if name != "plan"}
    row["plan"] = None
    if solution.plan is not None:
        row["plan"] = {"kinds": solution.plan.kinds.tolist(), "ids": solution.plan.ids.tolist()}
    return row


def family_to_row(family: Family) -> dict[str, Any]:
    """A JSON-ready form of a family, its plans as steps."""
    return {
        "status": family.status,
        "message": family.message,
        "rejected": family.rejected,
        "wall_s": family.wall_s,
        "members": [
            {"kinds": m.plan.kinds.tolist(), "ids": m.plan.ids.tolist(), "parameters": dict(m.parameters)}
            for m in family.members
        ],
    }


def _from_row(graph: Any, row: dict[str, Any]) -> Solution:
    plan = row.pop("plan")
    if plan is not None:
        plan = Plan.from_steps(graph, zip(plan["kinds"], plan["ids"], strict=True), row["budget_bytes"])
        trace = simulate(graph, plan)
        if (trace.cost, trace.peak_bytes) != (row["cost"], row["peak_bytes"]):
            raise InvalidPlan(f"cost {row['cost']} was reported, but it costs {trace.cost}")

    return Solution(plan=plan, **row | {"status": Status(row["status"]), "scope": Scope(row["scope"])})
