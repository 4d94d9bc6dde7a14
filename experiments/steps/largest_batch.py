"""The largest batch that trains in PyTorch, plain and rematerialized.

Bisection on predicted peaks finds a batch; then it is trained, so that every reported batch ran within the memory. The
rule for rematerialized batches is Checkmate's: recomputation costs at most one more forward pass.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import torch

import remat
from experiments.batch_search import SizeSearch
from experiments.steps.job import Job, Method
from experiments.steps.row import PLAIN, PORTFOLIO, StepLog, StepRow
from experiments.steps.torch_steps import TorchSteps

LABEL = "largest batch"
MARGIN = 0.97  # of the device's free memory; the rest is left to fragmentation
TRIES = 6  # batches to train, each SHRINK of the one before, if memory runs out
SHRINK = 0.97

Maker = Callable[[TorchSteps, int], Method | None]


def largest_batches(job: Job, about: StepRow, log: StepLog, cache: Path) -> Iterator[StepRow]:
    """A row for each of `MAKERS` that the log lacks; its note says if no batch trains."""
    capacity = job.capacity_bytes or int(MARGIN * torch.cuda.mem_get_info()[0])
    assert job.batch is not None
    for name, make in MAKERS.items():
        row = replace(about, method=name, parameter=LABEL, budget_bytes=capacity)
        if log.of(row.key) is not None:
            continue
        search = SizeSearch(job.batch)
        while (batch := search.next_size()) is not None:
            fits = make(_steps(job, batch, cache), capacity) is not None
            search.learn(batch, fits=fits, impossible=not fits)
        batch, trained = search.found, None
        for _ in range(TRIES if batch else 0):
            trained = _trained(_steps(job, batch, cache), make, replace(row, batch=batch))
            if trained is not None:
                break
            batch = max(1, int(SHRINK * batch))
        yield trained or replace(row, batch=None, note=f"no batch trains within {capacity} bytes")


def _steps(job: Job, batch: int, cache: Path) -> TorchSteps:
    """The model at this batch."""
    assert job.spec is not None
    return TorchSteps(replace(job, spec=job.spec | {"batch_size": batch}, cost="flops"), "default", cache)


def _plain(subject: TorchSteps, capacity: int) -> Method | None:
    plain = subject.plain()
    return plain if plain.peak_bytes is not None and plain.peak_bytes <= capacity else None


def _planned(subject: TorchSteps, capacity: int) -> Method | None:
    subject.known += subject.mincut.values()
    try:
        method = subject.best_within(capacity)
    except remat.InvalidInput:
        return None
    assert method.ns is not None
    forward = sum(op.cost for op in subject.graph.operations if not op.is_backward)
    return method if method.ns <= subject.graph.total_cost + forward else None


MAKERS: dict[str, Maker] = {PLAIN: _plain, PORTFOLIO: _planned}


def _trained(subject: TorchSteps, make: Maker, row: StepRow) -> StepRow | None:
    """The row with its measurements; None if the step does not stay within the memory."""
    assert row.budget_bytes is not None
    method = make(subject, row.budget_bytes)
    if method is None:
        return None
    try:
        peak = subject.peak_bytes(method)
        seconds = statistics.median(subject.seconds(method.run) for _ in range(subject.job.rounds))
    except torch.OutOfMemoryError:
        return None
    return None if peak > row.budget_bytes else replace(
        row, operations=len(subject.graph), fixed_bytes=subject.fixed_bytes, predicted_peak_bytes=method.peak_bytes,
        measured_peak_bytes=peak, measured_s=seconds, recomputed=method.recomputed,
    )  # fmt: skip
