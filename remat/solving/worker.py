"""Solves in worker processes with a hard limit, so that a solver that crashes fails only one row.

The parent starts ``remat.solving._worker JOB RESULT EVENTS`` through `remat.child`: a plain subprocess, because spawned
pools need an importable main module, which standard input and notebooks do not have. It reads two files of the worker:
EVENTS, a line of JSON for each plan and bound that it finds, which survives a killed worker, and RESULT at the end.
The parent judges these plans again. The start of the process counts as time of a solve, but not of a family, whose
plans need no clock.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from remat import child
from remat.certificate import BoundCertificate
from remat.compiled import is_compiled
from remat.context import Context
from remat.errors import DiskFull, InvalidInput, InvalidPlan
from remat.files import write_text
from remat.frontends.json import graph_to_dict
from remat.frontends.spec import ModelSpec
from remat.graph import Graph
from remat.incumbent import is_proven
from remat.plan import Plan, Scope
from remat.problem import SolveOptions
from remat.registry import get_strategy
from remat.search.greedy import SHORT_S, greedy_plans
from remat.simulator import simulate
from remat.solution import Ending, Family, Member, Solution, Status
from remat.solving.judgement import conclude_early, cut_after

_running: set[subprocess.Popen[bytes]] = set()
_interrupted: set[subprocess.Popen[bytes]] = set()  # running workers that were asked to end

POLL_S = 0.1  # seconds between two readings of a worker's events
START_S = 60.0  # most time for the start of a family's process, before the clock starts
PREPARE_S = 300.0  # most time for `Strategy.prepare`, before the clock starts
GRACE_S = 2.0  # for an interrupted worker to write its result

# BLAS gets one thread: solvers have threads of their own, and BLAS's spin while they wait.
THREAD_VARIABLES = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")


def hard_limit_s(time_limit_s: float) -> float:
    """Seconds after which a worker is killed: inside the allowed overrun of 2 s plus 5 %."""
    return time_limit_s * 1.03 + 1.5


@dataclass(frozen=True, slots=True)
class Known:
    """A proof by another strategy for the same problem, or for one with a larger budget.

    Attributes:
        who: the strategy.
        bound: lower bound on the cost of every plan; None for a proof that there is no plan.
        message: of the strategy, one line.
        by: what proves the bound, see `Solution.proven_by`.
    """

    who: str
    bound: int | None
    message: str = ""
    by: str = ""

    def decides(self, context: Context) -> bool:
        """Whether a solve can end, because its plan meets the bound or no plan exists."""
        incumbent = context.incumbent
        if self.bound is None or incumbent.cost is None:
            return self.bound is None and incumbent.cost is None
        is_enough = is_proven(incumbent.cost, self.bound, self.by, context.options.target_gap)
        return incumbent.exact_bound < self.bound <= incumbent.cost and is_enough

    def solution(self, context: Context, strategy: str) -> Solution:
        """The solution of a solve that this proof decides."""
        if self.bound is not None:
            context.incumbent.offer_bound(self.bound, self.who, self.by)
        proof = f"proven by {self.who}"
        ended = conclude_early(context, strategy, Ending.DECIDED, proof, status=Status.INFEASIBLE)
        if self.bound is None:
            return replace(ended, bound=None, message=f"{proof}: {self.message}", proof_from=self.who)
        return replace(ended, message=f"its plan meets the bound {proof}", proof_from=self.who)


def solve_isolated(
    context: Context, strategy: str, options: Mapping[str, Any], should_stop: Callable[[], bool] = lambda: False,
    known: Callable[[], Known | None] = lambda: None,
) -> Solution:  # fmt: skip
    """Run one strategy on one problem in a subprocess; a failure there is a FAILED solution, never an exception.

    The context's incumbent gets the worker's plans and bounds at once. Ctrl-C, `should_stop` and a proof from `known`
    that decides the solve end the worker; its best plan is returned.

    Raises:
        KeyboardInterrupt: interrupted before any plan was found.
    """
    started, asked_at = time.monotonic(), time.time()
    # The context's incumbent may belong to another budget, so that this solve needs one of its own.
    own = context.about(context.problem)
    events = _Events(own, context, should_stop, known)
    row, status, message = _ask(own, strategy, options, events)
    solution = None if row is None else _take_result(row, own, context, strategy, asked_at)
    interrupted = Ending.INTERRUPTED in (events.ended, solution and solution.ended)
    if events.decided is not None and not own.incumbent.contradiction:
        solution = events.decided.solution(own, strategy)
    elif solution is None or own.incumbent.contradiction:
        ended = events.ended or Ending.CRASHED
        solution = conclude_early(own, strategy, ended, message or own.incumbent.contradiction, status=status)
    elif solution.plan is None and solution.status is Status.TIMEOUT and own.incumbent.plan is not None:
        solution = conclude_early(own, strategy, solution.ended, solution.message)
    if interrupted and events.raised and solution.plan is None and solution.status is not Status.FAILED:
        raise KeyboardInterrupt
    stats = {**solution.stats, **own.incumbent.stats()}  # the parent's times, which include the start of the process
    memory = solution.solver_memory_bytes or events.peak_memory_bytes
    if memory:
        stats["solver_peak_memory_bytes"] = memory
    return replace(solution, stats=stats, solver_memory_bytes=memory, wall_s=time.monotonic() - started)


def _take_result(row: dict[str, Any], own: Context, outer: Context, strategy: str, asked_at: float) -> Solution | None:
    """Judge and offer the worker's result; None if its plan is wrong. `asked_at`: when the worker was asked for."""
    try:
        solution = _from_row(own.problem.graph, row["solution"])
    except InvalidPlan as error:
        own.incumbent.contradict(f"the worker returned a wrong plan: {error}")
        return None
    if solution.bound is not None and solution.status is not Status.FAILED:
        outer.offer_bound(solution.bound, strategy, solution.proven_by)
    if solution.plan is not None and solution.cost is not None and solution.peak_bytes is not None:
        who = str(solution.parameters.get("from", strategy))
        for incumbent in (own.incumbent, outer.incumbent):
            incumbent.take(solution.plan, solution.cost, solution.peak_bytes, who)
    return _with_start(solution, round(row["began"] - asked_at, 3), outer.options.time_limit_s)


def _with_start(solution: Solution, start_s: float, time_limit_s: float) -> Solution:
    """The solution with ``stats["start_s"]``, the seconds that its process took to start; a late start is named."""
    message = solution.message
    if solution.plan is None and start_s >= time_limit_s:
        late = f"the time limit was over before the solver began (starting took {start_s:.1f} s)"
        message = f"{late}; {message}" if message else late
    return replace(solution, stats={**solution.stats, "start_s": start_s}, message=message)


class _Events:
    """Read a worker's file of events as it grows; judge and offer its plans and bounds.

    Attributes:
        start_s: most time for the start of a family's process; 0 for a solve, whose clock runs from the beginning.
        asked_at: time (monotonic) at which the worker was asked for.
        began: time (monotonic) at which the worker was seen to begin, after its start; None before.
        ended: how the worker ended, if not by itself.
        decided: the proof of another strategy that ended the worker, if one did.
        raised: Ctrl-C interrupted this thread.
        should_stop: called several times a second: whether to end the worker.
        known: called as often: the best proof of other strategies.
        peak_memory_bytes: largest resident set that the worker reported.
        members: of a family, in a JSON-ready form.
    """

    def __init__(
        self, own: Context, outer: Context, should_stop: Callable[[], bool] = lambda: False,
        known: Callable[[], Known | None] = lambda: None, start_s: float = 0.0,
    ) -> None:  # fmt: skip
        self.own, self.outer, self.should_stop, self.known, self.start_s = own, outer, should_stop, known, start_s
        self.asked_at = time.monotonic()
        self.began: float | None = None
        self.ended, self.raised, self.peak_memory_bytes = Ending.RETURNED, False, 0
        self.decided: Known | None = None
        self.members: list[dict[str, Any]] = []
        self.path: Path | None = None
        self._at = 0

    def offer_greedy(self) -> None:
        """Offer plans of greedy eviction, which needs no worker, while the worker starts."""
        problem = self.own.problem
        default = problem.graph.default()
        for plan in greedy_plans(default, problem.budget_bytes, deadline=time.monotonic() + SHORT_S):
            again = Plan.from_order(problem.graph, plan.order.tolist(), problem.budget_bytes)
            for context in (self.own, self.outer):
                context.offer(again, "greedy eviction")

    def ends_at(self, limit_s: float) -> float:
        """The time (monotonic) at which the worker is killed."""
        if not self.start_s:  # what came before the worker, e.g. imports of strategies, may have taken all of the time
            return self.own.deadline + hard_limit_s(limit_s) - limit_s
        return self.asked_at + self.start_s if self.began is None else self.began + hard_limit_s(limit_s)

    def is_over(self) -> bool:
        """Whether the worker should end now: it was asked to, or another strategy decided its problem."""
        known = self.known()
        if known is not None and known.decides(self.own):
            self.decided = known
        elif self.should_stop():
            self.ended = Ending.INTERRUPTED
        return self.decided is not None or bool(self.ended)

    def read(self) -> None:
        """Read every new complete line."""
        if self.path is None or not self.path.exists():
            return
        with self.path.open("rb") as file:
            file.seek(self._at)
            new = file.read()
        lines, _, _ = new.rpartition(b"\n")  # the last line may be half written
        self._at += len(lines) + (1 if lines else 0)
        for line in lines.splitlines():
            self._offer(json.loads(line))

    def _offer(self, event: Mapping[str, Any]) -> None:
        best, outer, problem = self.own.incumbent, self.outer, self.own.problem
        self.peak_memory_bytes = max(self.peak_memory_bytes, event.get("peak_memory_bytes", 0))
        if "began" in event:
            self.began = time.monotonic()
        if "member" in event:
            self.members.append(event["member"])
        if "bound" in event:
            best.offer_bound(event["bound"], event["who"], event["by"], at=event["at"])
            outer.offer_bound(event["bound"], event["who"], event["by"])
        if not event.keys() & {"order", "steps"}:
            return
        try:
            if "steps" in event:
                plan = Plan.from_steps(problem.graph, event["steps"], problem.budget_bytes, problem.link)
            else:
                plan = Plan.from_order(problem.graph, event["order"], problem.budget_bytes, event["implementations"])
            trace = simulate(problem.graph, plan)
        except InvalidPlan as error:
            best.contradict(f"{event['who']} reported a wrong plan: {error}")
            return
        if trace.cost != event["cost"]:
            best.contradict(f"{event['who']} claims the cost {event['cost']}, but its plan costs {trace.cost}")
        best.take(plan, trace.cost, trace.peak_bytes, event["who"], at=event["at"])
        outer.incumbent.take(plan, trace.cost, trace.peak_bytes, event["who"], at=event["at"])


def run_family_isolated(
    context: Context, strategy: str, options: Mapping[str, Any], spec: ModelSpec | None = None, *,
    start_counts: bool = False,
) -> Family:  # fmt: skip
    """`remat.solving.here.run_family` in a subprocess; the parent judges every returned plan again.

    Args:
        spec: the PyTorch network behind the graph, for a strategy with `prepare`.
        start_counts: the start of the process counts as time of the family.
    """
    started = time.monotonic()
    events = _Events(context, context, start_s=0.0 if start_counts else START_S + (PREPARE_S if spec else 0))
    row, status, message = _ask(context, strategy, options, events, family=True, spec=spec)
    if events.raised:
        raise KeyboardInterrupt
    if row is None and events.members and events.ended is Ending.KILLED:
        row = {"members": events.members, "status": None, "message": "", "wall_s": time.monotonic() - started}
    if row is None:
        return Family(strategy, status=status, message=message, wall_s=time.monotonic() - started)
    graph, members = context.problem.graph, list[Member]()
    try:
        for member in row["members"]:
            plan = Plan.from_document(member["plan"], graph, "a plan")
            trace = simulate(graph, plan)
            members.append(Member(plan, trace.cost, trace.peak_bytes, member["parameters"]))
    except InvalidPlan as error:
        message = f"the worker's plan is invalid: {error}"
        return Family(strategy, status=Status.FAILED, message=message, wall_s=time.monotonic() - started)
    status = Status(row["status"]) if row["status"] else None
    rejected = row.get("rejected", cut_after(members))
    return Family(strategy, tuple(members), rejected, status, row["message"], row["wall_s"])


def stop_workers() -> None:
    """Kill every running worker; for a caller that was interrupted."""
    for process in list(_running):
        _kill_group(process)


def interrupt_workers() -> None:
    """Ask every running worker to return its best plan; one that does not end within `GRACE_S` is killed."""
    _interrupted.update(_running)


def _ask(
    context: Context, strategy: str, options: Mapping[str, Any], events: _Events, *, family: bool = False,
    spec: ModelSpec | None = None,
) -> tuple[dict[str, Any] | None, Status, str]:  # fmt: skip
    """(the worker's result, or None with the status and message that say why)."""
    try:
        return _exchange(context, strategy, options, events, family, spec)
    except (OSError, DiskFull) as error:  # OSError: e.g. no memory for a process
        return None, Status.FAILED, f"could not run the solver process: {error}"


def _exchange(
    context: Context,
    strategy: str,
    options: Mapping[str, Any],
    events: _Events,
    family: bool,
    spec: ModelSpec | None,
) -> tuple[dict[str, Any] | None, Status, str]:
    limit_s = context.remaining_s()
    try:
        json.dumps(dict(options))
    except (TypeError, ValueError):
        raise InvalidInput(f"options of strategy '{strategy}' must be plain, not {dict(options)!r:.80}") from None
    with tempfile.TemporaryDirectory(prefix="remat-") as folder:
        job, result, events_file = (Path(folder, name) for name in ("job.json", "result.json", "events.jsonl"))
        question, warm_start = context.problem, context.options.warm_start
        request = {
            "graph": graph_to_dict(question.graph),
            "problem": {
                "budget_bytes": int(question.budget_bytes),
                "scope": str(question.scope),
                "accounting": question.accounting,
                "cost_cap": question.cost_cap,
                "link": None if question.link is None else question.link.document(),
            },
            "options_of_solve": {
                field.name: getattr(context.options, field.name)
                for field in fields(SolveOptions) if field.name not in ("warm_start", "progress")
            },
            "warm_start": None if warm_start is None else warm_start.document(),
            "limit_s": limit_s,
            "ends_at": None if events.start_s else time.time() + limit_s,
            "strategy": strategy,
            "options": dict(options),
            "family": family,
            "spec": None if spec is None else spec.to_json(),
        }  # fmt: skip
        chosen = get_strategy(strategy)
        if chosen.is_installed and not chosen.members:  # members are strategies, too
            request["module"] = chosen.run.__module__
        write_text(job, json.dumps(request))
        command = child.command("remat.solving._worker", str(job), str(result), str(events_file))
        events.path = events_file
        begins_greedily = chosen.begins_greedily and not context.repeats
        meanwhile = events.offer_greedy if begins_greedily else lambda: None
        code, complaint = _run(command, limit_s, events, meanwhile, is_here=spec is not None)
        events.read()
        if result.exists():
            return json.loads(result.read_text()), Status.FAILED, ""
    if events.ended is Ending.INTERRUPTED or events.decided is not None:
        return None, Status.TIMEOUT, "interrupted"
    if code is None:
        events.ended = Ending.KILLED
        if events.began is None:
            waited_s = time.monotonic() - events.asked_at
            return None, Status.TIMEOUT, f"its process was still starting after {waited_s:.1f} s, and was ended"
        asked_s = context.options.time_limit_s  # of which what came before the worker has taken a part
        return None, Status.TIMEOUT, f"did not stop by itself; killed after {asked_s:.1f} s{_compiling(strategy)}"
    how = f"signal {-code} ({signal.Signals(-code).name})" if code < 0 else f"exit code {code}"
    if code == -signal.SIGKILL:
        how += ", as the system does when memory runs out"
    return None, Status.FAILED, f"the solver process died with {how}: {complaint or 'it printed nothing'}"


def _compiling(strategy: str) -> str:
    """Words for a worker that was killed while Numba compiled the strategy; '' if it is compiled."""
    function = get_strategy(strategy).compiles
    if function is None or is_compiled(function):
        return ""
    return "; it was being compiled, which takes up to a minute: give it more time once"


def _run(
    command: Sequence[str], limit_s: float, events: _Events,
    meanwhile: Callable[[], None] = lambda: None, *, is_here: bool = False,
) -> tuple[int | None, str]:  # fmt: skip
    """(exit code or None if killed at the limit, last line of standard error).

    Args:
        meanwhile: called while the process starts.
        is_here: as in `child.environment`.
    """
    with tempfile.TemporaryFile() as errors:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=errors,
            env=child.environment(dict.fromkeys(THREAD_VARIABLES, "1"), here=is_here),
            start_new_session=True,  # so that Ctrl-C reaches only the parent
        )
        _running.add(process)
        try:
            meanwhile()
            code = _wait(process, limit_s, events)
        except KeyboardInterrupt:
            events.ended, events.raised = Ending.INTERRUPTED, True
            code = _end_gently(process)
        finally:
            _running.discard(process)
            _interrupted.discard(process)
            if process.poll() is None:
                _kill_group(process)
        return code, child.last_line(errors)


def _wait(process: subprocess.Popen[bytes], limit_s: float, events: _Events) -> int | None:
    """The exit code, None at the limit; meanwhile the worker's events are read."""
    while (left := events.ends_at(limit_s) - time.monotonic()) > 0:
        try:
            return process.wait(timeout=min(POLL_S, left))
        except subprocess.TimeoutExpired:
            pass
        events.read()
        if process in _interrupted:
            events.ended = Ending.INTERRUPTED
            return _end_gently(process)
        if events.is_over():
            return _end_gently(process, min(GRACE_S, left))
    return None


def _end_gently(process: subprocess.Popen[bytes], wait_s: float = GRACE_S) -> int | None:
    """Send SIGINT and wait for the result; the exit code, None if the process still runs."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGINT)
    try:
        return process.wait(timeout=wait_s)
    except subprocess.TimeoutExpired:
        return None


def _kill_group(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError):  # the process may end just before the kill
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def solution_to_row(solution: Solution) -> dict[str, Any]:
    """A JSON-ready form of a solution."""
    row = {name: getattr(solution, name) for name in Solution.__slots__ if name not in ("plan", "certificate")}
    row["plan"] = None if solution.plan is None else solution.plan.document()
    row["certificate"] = None if solution.certificate is None else solution.certificate.to_dict()
    return row


def family_to_row(family: Family) -> dict[str, Any]:
    """A JSON-ready form of a family."""
    return {
        "status": family.status,
        "message": family.message,
        "rejected": family.rejected,
        "wall_s": family.wall_s,
        "members": [member_to_row(member) for member in family.members],
    }


def member_to_row(member: Member) -> dict[str, Any]:
    """A JSON-ready form of a plan of a family."""
    return {"plan": member.plan.document(), "parameters": dict(member.parameters)}


def _from_row(graph: Graph, row: dict[str, Any]) -> Solution:
    plan = row.pop("plan")
    proof = row.pop("certificate")
    certificate = None if proof is None else BoundCertificate.from_dict(proof, "the worker's certificate")
    if plan is not None:
        plan = Plan.from_document(plan, graph, "the plan")
        trace = simulate(graph, plan)
        if (trace.cost, trace.peak_bytes) != (row["cost"], row["peak_bytes"]):
            raise InvalidPlan(f"cost {row['cost']} was reported, but it costs {trace.cost}")
    return Solution(
        plan=plan,
        certificate=certificate,
        **row | {"status": Status(row["status"]), "scope": Scope(row["scope"]), "ended": Ending(row["ended"])},
    )
