"""``python -m experiments.steps.measure JOB ROWS CACHE``: predict and measure the methods of one model.

It runs in a process of its own. Each method becomes a row of the file ROWS as soon as it is measured. A row that the
file already has is neither planned nor measured again.
"""

from __future__ import annotations

import json
import sys
import time
import warnings
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

from experiments.provenance import provenance
from experiments.steps.job import WIDEST_FIRST, Candidate, Job, Subject
from experiments.steps.offers import offered
from experiments.steps.row import OFFERED, PLAIN, PORTFOLIO, StepLog, StepRow
from remat.cost import CostWarning
from remat.errors import InvalidInput, InvalidPlan


def main(job_path: str, rows_path: str, cache: str) -> None:
    job = Job(**json.loads(Path(job_path).read_text()))
    warnings.simplefilter("ignore", CostWarning)
    for row in rows_of(job, StepLog(Path(rows_path)), Path(cache)):
        print("row", row.method, row.parameter, flush=True)


def rows_of(job: Job, log: StepLog, cache: Path) -> Iterator[StepRow]:
    """Measure the rows that the log lacks; yield each after the log has it."""
    for row in _methods(job, _about(job), log, cache):
        finished = replace(row, finished_at=datetime.now(UTC).isoformat(timespec="seconds"))
        log.add(finished)
        yield finished


def _about(job: Job) -> StepRow:
    """A row with the columns that all rows of a job share."""
    where = provenance()
    return StepRow(
        framework="torch" if job.subject == "torch" else "tensorflow", model=job.model, batch=job.batch,
        device=job.device, method="", parameter="", cost=job.cost, time_limit_s=job.time_limit_s, rounds=job.rounds,
        seed=job.seed, threads=job.threads, git_commit=where.git_commit, git_dirty=where.git_dirty,
        versions=where.versions, cpu=where.cpu,
    )  # fmt: skip


def _methods(job: Job, about: StepRow, log: StepLog, cache: Path) -> Iterator[StepRow]:
    """Rows for each set of implementations that the job wants."""
    for implementations in sorted(job.implementations, key=WIDEST_FIRST.index):
        labels = [f"{fraction:g}" for fraction in job.fractions]  # of `fractions_of_activations`: the last rows
        if not labels or not all(log.of((PORTFOLIO, label, implementations)) for label in labels):
            yield from _rows_of_subject(job, implementations, about, log, cache)


def _rows_of_subject(job: Job, implementations: str, about: StepRow, log: StepLog, cache: Path) -> Iterator[StepRow]:
    """The plain step, the offers of implementations, the peers, and the portfolio at every budget.

    Nothing refers to the subject afterwards, because the next one needs its memory.
    """
    subject = _subject(job, implementations, cache)
    about = replace(about, batch=subject.batch, operations=len(subject.graph), fixed_bytes=subject.fixed_bytes)
    for candidate in _candidates(subject, job, log):
        row = replace(
            about, method=candidate.method, parameter=candidate.parameter, budget_bytes=candidate.budget_bytes,
            implementations=implementations if candidate.method in (PORTFOLIO, OFFERED) else "default",
        )  # fmt: skip
        if log.of(row.key) is None:
            row = replace(row, **_columns(subject, candidate))
            plain = log.of((PLAIN, "")) or row
            yield replace(row, plain_bytes=plain.measured_peak_bytes)


def _subject(job: Job, implementations: str, cache: Path) -> Subject:
    """The model in its framework; this imports only that framework."""
    if job.subject == "torch":
        from experiments.steps.torch_steps import TorchSteps

        return TorchSteps(job, implementations, cache)
    if job.subject == "keras":
        from experiments.steps.keras_steps import KerasSteps

        return KerasSteps(job)
    from experiments.steps.keras_fit import KerasFit

    return KerasFit(job)


def _candidates(subject: Subject, job: Job, log: StepLog) -> Iterator[Candidate]:
    """Every row of a subject; each follows the rows that it depends on."""
    yield Candidate(PLAIN, "", subject.plain)
    if subject.graph.has_implementations:
        yield Candidate(OFFERED, "")
    if job.peers:
        yield from subject.peers()
    for label, budget in subject.budgets(log.rows):
        yield Candidate(PORTFOLIO, label, partial(subject.best_within, budget), budget)


def _columns(subject: Subject, candidate: Candidate) -> dict[str, Any]:
    """A candidate's predictions and measurements; if there is no plan within its budget, the reason as a note."""
    if candidate.make is None:
        return {"offered": offered(subject.graph)}
    began = time.perf_counter()
    try:
        method = candidate.make()
        return {
            "planning_s": time.perf_counter() - began, "predicted_peak_bytes": method.peak_bytes,
            "predicted_ns": method.ns, "predicted_overhead": method.overhead, "recomputed": method.recomputed,
            "note": method.note, "same_as": subject.same_as(method), "measured_peak_bytes": subject.peak_bytes(method),
            **subject.measured(method),
        }  # fmt: skip
    except InvalidInput as error:
        if candidate.method == PLAIN or isinstance(error, InvalidPlan):
            raise  # a defect, not a budget without a plan
        return {"planning_s": time.perf_counter() - began, "note": str(error).splitlines()[0]}


if __name__ == "__main__":
    main(*sys.argv[1:])
