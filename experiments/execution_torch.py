"""``python -m experiments.execution_torch JOB``: every method on one PyTorch model, predicted and measured.

Runs in a process of its own, with nothing else in it. Each method is a row of the job's file as soon as it is
measured; a row that is there is neither planned nor measured again.
"""

from __future__ import annotations

import functools
import json
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import remat
from experiments.execution_peers import blocks, checkpointed
from experiments.execution_subject import Method, Subject, measure
from remat.cost import CostWarning
from remat.files import read_lines, write_lines

SHARES = (0.6, 0.8, 0.45, 0.9, 0.7, 0.5)  # a quick run takes the first of them


@dataclass(frozen=True, slots=True)
class Candidate:
    """A row to be: its method, which of the method's points, and what makes it."""

    name: str
    parameter: str
    make: Callable[[], Method]


def peers(subject: Subject) -> Iterator[Candidate]:
    """What others offer, the framework's own step first."""
    module = subject.module

    def by_hand(name: str, parameter: str, every: int, selective: bool) -> Candidate:
        def make() -> Method:
            kinds = (checkpointed(module, every, selective=selective, replays_random=r) for r in (True, False))
            return subject.followed(name, parameter, *kinds)

        return Candidate(name, parameter, make)

    yield Candidate("plain", "", lambda: subject.followed("plain", "", module, module))
    if any(True for _ in blocks(module)):
        yield by_hand("checkpoint_blocks", "1 of 1", 1, False)
        yield by_hand("checkpoint_blocks", "1 of 2", 2, False)
        yield by_hand("selective_checkpoint", "products kept", 1, True)
    for share, plan in subject.mincut.items():
        make = functools.partial(subject.planned, "torch_mincut", f"{share:g}", plan.order.tolist(), None)
        yield Candidate("torch_mincut", f"{share:g}", make)


def ours(subject: Subject, peaks: Iterable[int], plain_bytes: int) -> Iterator[Candidate]:
    """`portfolio` at the peak of every peer and at shares of the plain step; the peers' plans are known to it."""
    budgets = [(f"as {peak / 1e6:.1f} MB", peak) for peak in sorted(set(peaks), reverse=True)]
    budgets += [(f"{share:g} of plain", int(share * plain_bytes)) for share in SHARES[: subject.job["shares"]]]
    known = list(subject.mincut.values())

    def make(label: str, budget: int) -> Method:
        method = subject.best_within(budget, label, known)
        assert method.plan is not None
        known.append(method.plan)
        return method

    for label, budget in budgets:
        yield Candidate("portfolio", label, functools.partial(make, label, budget))


class Rows:
    """The rows of a job, in its file as soon as there are any."""

    def __init__(self, path: Path):
        self.path = path
        self.known = read_lines(path)

    def __call__(self, subject: Subject, candidate: Candidate) -> None:
        """Measure what is not there yet; that there is no plan within a budget is a row too."""
        what = {"method": candidate.name, "parameter": candidate.parameter}
        if any(row.items() >= what.items() for row in self.known):
            return
        try:
            row = measure(subject, candidate.make(), subject.job["rounds"])
        except remat.InvalidInput as error:
            row = what | {"note": str(error)}
        self.known.append(row)
        write_lines(self.path, self.known)
        print("row", json.dumps(row), flush=True)


def main(job_path: str) -> None:
    job = json.loads(Path(job_path).read_text())
    warnings.simplefilter("ignore", CostWarning)
    subject, rows = Subject(job), Rows(Path(job["rows"]))
    for candidate in peers(subject):
        rows(subject, candidate)
    peaks = {
        (row["method"], row["parameter"]): row["predicted_peak_bytes"] or row["measured_peak_bytes"]
        for row in rows.known if row["method"] != "portfolio" and "note" not in row
    }  # fmt: skip
    for candidate in ours(subject, peaks.values(), peaks["plain", ""]):
        rows(subject, candidate)


if __name__ == "__main__":
    main(sys.argv[1])
