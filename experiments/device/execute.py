"""The third command: on the device, without a solver. Follows every plan, and looks for the largest batches."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from experiments.device.folder import (
    BATCHES,
    EXECUTE,
    LARGEST,
    LARGEST_PLANNED,
    OUT_OF_MEMORY,
    PLAIN,
    SMALLEST,
    Case,
    Folder,
    Row,
)
from experiments.device.models import spec_of
from experiments.device.subject import Find, Subject, is_out_of_memory
from remat.errors import BudgetTooSmall, InvalidInput, first_line
from remat.execution import StepPlan, cheapest_fitting
from remat.files import read_json
from remat.graph import Graph
from remat.plan import Plan, Scope
from remat.solution import Solution, Status

MARGIN = 0.97  # of the memory that is free; the rest is left to fragmentation
STEP = 0.06  # from one batch to the next, as a part of it; it doubles until a batch fails
BATCH_ROUNDS = 3  # timed steps of each
NEAR = 0.02  # of the largest batch: the search ends when it is known so well


def execute(folder: Folder, case: Case, device: str, size: str, rounds: int, run: str) -> None:
    """Measure the rows of the plain step and of each plan that the case lacks."""
    captured = case.captured()
    assert captured is not None, "only captured cases are executed"
    spec, cost = spec_of(case.model, size), captured["cost"]
    subject = Subject(spec, case.backend, device, folder.costs, cost, _in_files(case))
    for method, share in case.missing(EXECUTE, run):
        row = Row(method, share, captured["batch"], run=run)
        with _kept(case, row, device):
            if method == PLAIN:
                row.predicted_peak_bytes = captured["plain"]["predicted_peak_bytes"]
            else:
                row.budget_bytes = case.outcomes()[share]["budget_bytes"]
            module = subject.plain if method == PLAIN else subject.planned(_plan_of(subject, case, row))
            _measure(subject, row, module, rounds)


@contextmanager
def _kept(case: Case, row: Row, device: str) -> Iterator[None]:
    """Write the row when the block ends, with the error that ended it; memory is released.

    It is written before too, because the process may end within the block.
    """
    case.add(replace(row, error="its process ended"))
    try:
        yield
    except Exception as error:  # of any class: one failing plan is one row
        if is_out_of_memory(error):
            row.outcome = OUT_OF_MEMORY
        else:
            row.error = " ".join(first_line(error).split())
    case.add(row)
    print(f"  {describe(row)}", flush=True)
    gc.collect()
    torch.compiler.reset()
    if device == "cuda":
        torch.cuda.synchronize()  # raises for ever after an error of CUDA; another process does the other rows
        torch.cuda.empty_cache()


def describe(row: Row) -> str:
    """A row as a line of text."""
    head = f"{row.method} {row.share}".strip()
    if row.error or row.outcome:
        return f"{head}: {row.error or row.outcome}"
    peak = f"{(row.measured_peak_bytes or 0) / 1e6:.1f} MB"
    peak += f", {row.predicted_peak_bytes / 1e6:.1f} predicted" if row.predicted_peak_bytes else ""
    return f"{head}: batch {row.batch}, {peak}, {row.measured_s or 0:.4f} s"


def _plan_of(subject: Subject, case: Case, row: Row) -> StepPlan:
    """The plan to follow within a budget, and what the row says of it."""
    assert row.budget_bytes is not None
    if case.backend == "eager":
        plan = subject.planner.take(case.plan_file(row.share), subject.step, subject.inputs)
    else:
        plan = _compiled_plan(subject, row)
    _note(row, plan)
    return plan


def _compiled_plan(subject: Subject, row: Row) -> StepPlan:
    """The plan within the budget of a row; the smallest budget is raised to what the generated code needs."""
    assert row.budget_bytes is not None
    subject.planner.budget_bytes = row.budget_bytes
    try:
        plan = subject.planner.plan(subject.step, subject.inputs)
    except BudgetTooSmall as error:
        if row.share != SMALLEST:
            raise
        subject.planner.budget_bytes = row.budget_bytes = error.known_bytes
        plan = subject.planner.plan(subject.step, subject.inputs)
    subject.planner.plans.clear()  # of another budget
    return plan


def _note(row: Row, plan: StepPlan) -> None:
    row.predicted_peak_bytes, row.predicted_overhead = plan.peak_bytes, plan.overhead
    row.recomputed = len(plan.recomputed)


def _measure(subject: Subject, row: Row, module: nn.Module, rounds: int) -> None:
    """Memory first; then times beside the plain step, or alone where that does not fit; then bits."""
    subject.measure_memory(row, module)
    if not _has_room(subject, lambda: subject.measure_beside_plain(row, module, rounds)):
        subject.measure_alone(row, module, rounds)
    if not _has_room(subject, lambda: subject.measure_bits(row, module)):
        row.outcome = "no memory to compare the bits"


def _has_room(subject: Subject, measure: Callable[[], None]) -> bool:
    """Measure; whether the memory was enough."""
    try:
        measure()
        return True
    except Exception as error:
        if not is_out_of_memory(error):
            raise
    gc.collect()  # only now: the error's traceback holds the tensors of the step
    subject.release()
    return False


def _in_files(case: Case) -> Find:
    """Finds, in place of a solver, the cheapest order of groups that fits, of all orders in the files of the case."""

    def find(groups: Graph, limit: int, known: Sequence[Plan]) -> Solution:
        orders = [order for share in case.planned_shares() for order in read_json(case.plan_file(share))]
        plans = [*known, *(plan for order in orders if (plan := _plan_on(groups, order, limit)) is not None)]
        best = cheapest_fitting(groups, plans, limit)
        status = Status.NO_PLAN if best is None else Status.FEASIBLE
        return Solution(status, "portfolio", groups.name, limit, Scope.FREE, "exact", best)

    return find


def _plan_on(groups: Graph, order: list[int], limit: int) -> Plan | None:
    """The plan of that order; None if the step of this batch is fused into other groups."""
    if set(order) != set(range(len(groups))):
        return None
    try:
        return Plan.from_order(groups, order, limit)
    except InvalidInput:
        return None


@dataclass(slots=True)
class Batches:
    """Search for the largest batch that trains: from an estimate, in steps that double, then by halves.

    Attributes:
        step: to the next batch, as a part of it.
        found: the largest batch that trained; 0 without any.
        failed: the smallest one that did not.
    """

    estimate: int
    found: int = 0
    failed: int | None = None
    step: float = STEP

    def learn(self, batch: int, *, trains: bool) -> None:
        """Record a trial."""
        self.step *= 2
        if trains:
            self.found = batch
        else:
            self.failed = batch

    def next_batch(self) -> int | None:
        """The batch to try; None at the end."""
        if self.failed is None:
            return max(self.found + 1, int((1 + self.step) * self.found)) if self.found else max(1, self.estimate)
        if not self.found:
            return max(1, int(self.failed / (1 + self.step))) if self.failed > 1 else None
        near = self.failed - self.found <= max(1, NEAR * self.found)
        return None if near else (self.found + self.failed) // 2


def largest_batches(
    folder: Folder, case: Case, device: str, size: str, rounds: int, memory_bytes: int | None, tries: int, run: str
) -> None:  # fmt: skip
    """Measure the rows of the largest batches that the case lacks: of the plain step and under a plan."""
    captured = case.captured()
    assert captured is not None, "only captured cases are executed"
    spec = spec_of(case.model, size)
    for method, _ in case.missing(BATCHES, run):
        # Costs of a roofline: to time the kernels of every batch would take longer than all trials.
        subject = Subject(spec, case.backend, device, folder.costs, "roofline", _in_files(case))
        row = Row(method, batch=spec.batch_size, budget_bytes=memory_bytes or _capacity(), run=run)
        with _kept(case, row, device):
            _search(subject, case, row, _held_bytes(case, captured, method, subject), tries, rounds)


def _capacity() -> int:
    """Bytes of the device that a step of this process can take, resident tensors included."""
    return int(MARGIN * (torch.cuda.mem_get_info()[0] + torch.cuda.memory_reserved()))


def _held_bytes(case: Case, captured: dict[str, Any], method: str, subject: Subject) -> int:
    """Bytes that a step adds at the captured batch: of the plain step, or of the plan that needs the least."""
    if method == LARGEST:
        return captured["plain_bytes"] - subject.fixed_bytes
    budgets = [case.outcomes()[share]["budget_bytes"] for share in case.planned_shares()]
    return min(budgets) - subject.fixed_bytes


def _search(subject: Subject, case: Case, row: Row, held_bytes: int, tries: int, rounds: int) -> None:
    """Write the largest batch that trains within the row's memory into the row."""
    assert row.budget_bytes is not None
    if case.backend == "eager" and row.method == LARGEST_PLANNED:
        for share in case.planned_shares():
            path: Path = case.plan_file(share)
            subject.planner.plans[share] = StepPlan.load(path, subject.graph, subject.fingerprint, subject.fixed)
    subject.planner.budget_bytes = row.budget_bytes
    room = row.budget_bytes - subject.fixed_bytes
    search = Batches(subject.spec.batch_size * room // max(1, held_bytes))
    known, best = dict(subject.planner.plans), row
    for _ in range(tries):
        batch = search.next_batch()
        if batch is None:
            break
        subject.planner.plans.clear()
        subject.planner.plans.update(known)
        try:
            trial = _trained(subject, replace(row, batch=batch), rounds)
        except Exception as error:  # e.g. a kernel's limit on indices: what trained before it remains
            if not search.found:
                raise
            search.failed, best = batch, replace(best, outcome=f"{batch}: {' '.join(first_line(error).split())}")
            break
        print(f"  {row.method}: {batch} {'trains' if trial is not None else 'does not'}", flush=True)
        search.learn(batch, trains=trial is not None)
        best = trial or best
    for name in Row.__slots__:
        setattr(row, name, getattr(best, name))
    row.failed_batch = search.failed
    if not search.found:
        row.batch, row.outcome = None, "no batch that was tried trains"


def _trained(subject: Subject, row: Row, rounds: int) -> Row | None:
    """The row with its measurements; None if the step does not stay within the memory."""
    assert row.batch is not None
    assert row.budget_bytes is not None
    try:
        subject.resize(row.batch)
        module = _module_at(subject, row)
        if module is None:
            return None
        subject.measure_memory(row, module)
        subject.measure_alone(row, module, min(rounds, BATCH_ROUNDS))
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        return None
    finally:
        gc.collect()
        torch.compiler.reset()
        subject.release()
    assert row.measured_peak_bytes is not None
    return row if row.measured_peak_bytes <= row.budget_bytes else None


def _module_at(subject: Subject, row: Row) -> nn.Module | None:
    """What trains at the batch of the row; None if no known order fits the memory."""
    if row.method == LARGEST:
        return subject.plain
    make: Callable[..., StepPlan | None] = subject.planner.carried
    if subject.backend == "inductor":
        make = subject.planner.plan
    try:
        plan = make(subject.step, subject.inputs)
    except InvalidInput:  # the code that Inductor makes of each order needs more
        return None
    if plan is None:
        return None
    _note(row, plan)
    return subject.planned(plan)
