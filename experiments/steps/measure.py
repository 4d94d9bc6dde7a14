"""Predict and measure the methods of one model; each is a row.

Bytes are totals, fixed bytes included. Times are of one step. Columns, None where nothing was measured:

    method: ``plain``, ``portfolio``, or a peer, e.g. ``torch_mincut``; ``offered`` holds no measurement.
    parameter: which of the method's points, e.g. the budget as a fraction of the activation memory.
    implementations: which implementations the plan chooses from.
    fixed_bytes: resident before, during and after every step.
    plain_bytes: peak of the framework's own step.
    measured_ratio, ratio_quartiles: step time over the plain step's in the same rounds.
    as_written_s, as_written_cpu_s: of the plain `tf.function` without grappler, the base of predicted overheads.
    plain_cpu_s, measured_cpu_s: of all threads.
    same_as: steps that leave the same bits as this one, e.g. ``eager, tf.function``; '' for none. None if the plain
        step differs from itself.
    gradient_error: largest error of a gradient over the largest gradient; of the plain step the error by rounding.
    recomputed: computations beyond one of each operation.
    chosen: [implementation] number of computations with it.
    held: [implementation] see `experiments.steps.offers.held_by_those_who_offer`.
    offered: [implementation] `experiments.steps.offers.Offer` as JSON.
    note: why there is no measurement, or a remark.
"""

import time
import warnings
from collections.abc import Iterator, Mapping
from functools import partial
from importlib import import_module
from typing import Any

from experiments.registry import Row
from experiments.steps.job import OFFERED, PLAIN, PORTFOLIO, WIDEST_FIRST, Candidate, Job, Subject
from experiments.steps.offers import offered
from remat.cost import CostWarning
from remat.errors import InvalidInput, InvalidPlan

ADAPTERS = {"keras": ("keras_steps", "KerasSteps"), "keras_applications": ("keras_fit", "KerasFit")}
NOTHING: Mapping[str, Any] = dict.fromkeys((
    "predicted_peak_bytes", "predicted_ns", "predicted_overhead", "measured_peak_bytes", "plain_s", "measured_s",
    "measured_ratio", "ratio_quartiles", "as_written_s", "plain_cpu_s", "as_written_cpu_s", "measured_cpu_s",
    "same_as", "gradient_error", "recomputed", "planning_s", "chosen", "held", "offered",
)) | {"note": ""}  # fmt: skip


def measured(**job: Any) -> list[Row]:
    """The rows of a `Job`."""
    warnings.simplefilter("ignore", CostWarning)
    wanted, rows = Job(**job), list[Row]()
    for implementations in sorted(wanted.choices, key=WIDEST_FIRST.index):
        _add_rows(wanted, implementations, rows)
    return rows


def _add_rows(job: Job, implementations: str, rows: list[Row]) -> None:
    """The plain step, the offers of implementations, the peers, and the portfolio at every budget, each once.

    Nothing refers to the subject afterwards, because the next one needs its memory.
    """
    module, name = ADAPTERS.get(job.steps, ("torch_steps", "TorchSteps"))
    # This imports only the framework of the model.
    subject: Subject = getattr(import_module(f"experiments.steps.{module}"), name)(job, implementations)
    about = {"batch": subject.batch, "operations": len(subject.graph), "fixed_bytes": subject.fixed_bytes}
    for candidate in _candidates(subject, rows):
        chooses = candidate.method in (PORTFOLIO, OFFERED)
        key = {"method": candidate.method, "parameter": candidate.parameter,
               "implementations": implementations if chooses else "default"}  # fmt: skip
        if any(key.items() <= row.items() for row in rows):
            continue
        row = {**key, "budget_bytes": candidate.budget_bytes, **about, **NOTHING, **_columns(subject, candidate)}
        plain = next((known for known in rows if known["method"] == PLAIN), row)
        rows.append(row | {"plain_bytes": plain["measured_peak_bytes"]})


def _candidates(subject: Subject, rows: list[Row]) -> Iterator[Candidate]:
    """Every row of a subject; each follows the rows that it depends on."""
    yield Candidate(PLAIN, "", subject.plain)
    if subject.graph.has_implementations:
        yield Candidate(OFFERED, "")
    yield from subject.peers()
    for label, budget in subject.budgets(rows):
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
