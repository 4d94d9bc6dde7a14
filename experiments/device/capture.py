"""The first command: on the device. Captures each step, measures its operations, and runs the plain step."""

from __future__ import annotations

import time
import warnings
from dataclasses import asdict
from typing import Any

from experiments.device.folder import OUT_OF_MEMORY, PLAIN, Case, Folder, Row, write_document
from experiments.device.models import spec_of
from experiments.device.subject import Subject, is_out_of_memory
from remat.errors import CostWarning
from remat.frontends.json import save_graph
from remat.plan import Plan

ROUNDS = 5


def capture(folder: Folder, case: Case, device: str, size: str, cost: str) -> None:
    """Write graphs with costs and ``capture.json``, which is written last."""
    began = time.monotonic()
    spec = spec_of(case.model, size)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always", CostWarning)
        subject = Subject(spec, case.backend, device, folder.costs, cost)
        predicted = subject.predicted_plain_bytes()
        described = (_eager if case.backend == "eager" else _compiled)(subject, case)
    row = Row(PLAIN, batch=spec.batch_size, predicted_peak_bytes=predicted)
    try:
        subject.measure_memory(row, subject.plain)
        subject.measure_alone(row, subject.plain, ROUNDS)
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        row.outcome = OUT_OF_MEMORY
    plain = row.measured_peak_bytes or predicted
    write_document(case.capture_file, {
        "model": case.model, "backend": case.backend, "batch": spec.batch_size, "cost": cost,
        "fingerprint": asdict(subject.fingerprint), "fixed": subject.fixed, "plain_bytes": plain,
        "plain": asdict(row), "costs_not_measured": [str(each.message) for each in told], **described,
        "seconds": time.monotonic() - began,
    })  # fmt: skip
    print(f"  {plain / 1e6:.1f} MB at the plain step's peak, {row.measured_s or 0:.4f} s")


def _eager(subject: Subject, case: Case) -> dict[str, Any]:
    """The graph of calls; and the workspaces of operations that a plan does not repeat."""
    graph = subject.planner.weigh(subject.graph, subject.step)
    nothing_twice = Plan.from_order(graph, range(len(graph)), None)
    once = subject.planner.with_workspaces(subject.graph, subject.step, nothing_twice)
    save_graph(graph, case.graph_file("graph"))
    return {"workspaces_once": [op.workspace_bytes for op in once.operations]}


def _compiled(subject: Subject, case: Case) -> dict[str, Any]:
    """The graphs of groups, the bytes to add to a budget for them, and PyTorch's own cuts to start from."""
    compiled = subject.planner.compiled(subject.step)
    weighed = compiled.weighed(subject.cost, subject.planner.options.gpu)
    save_graph(weighed.graph, case.graph_file("graph"))
    save_graph(weighed.cautious, case.graph_file("cautious"))
    starts = [groups for _, groups in compiled.cuts(subject.planner.options.gpu)]
    return {"shift_bytes": weighed.shift, "starts": starts}
