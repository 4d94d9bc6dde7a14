"""The words between the harness and a framework's adapter: jobs, subjects, methods and candidates for a row."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import remat
from experiments.steps.row import PLAIN, PORTFOLIO, StepRow

FRACTIONS = (0.8, 0.6, 0.45)  # usual budgets, as shares of the activation memory
# What plans may choose from. In this order all implementations of an operation are timed in the same passes: on a
# machine with other load, times of different minutes cannot be compared.
WIDEST_FIRST = ("joint", "exact", "default")


@dataclass(frozen=True, slots=True)
class Job:
    """A model to measure: everything that its rows depend on beside code, versions and machine.

    Attributes:
        subject: which adapter: ``torch``, ``keras`` (loss and gradients), ``keras_fit`` (`fit_within`).
        spec: `ModelSpec` of a PyTorch model, as JSON; None for a Keras model, which `model` names.
        rounds: timed steps of each method; 0 for none.
        fractions: budgets, as shares of the activation memory, see `fractions_of_activations`.
        peers: measure the methods of others too; in PyTorch also plans at the peak of each.
        gradient_errors: measure them too; this needs memory for two copies of the gradients.
    """

    subject: str
    model: str
    batch: int | None = None
    spec: dict[str, Any] | None = None
    device: str = "cpu"
    cost: str = "profile"
    time_limit_s: float = 30.0
    seed: int = 0
    threads: int = 2
    rounds: int = 7
    implementations: Sequence[str] = ("default",)
    fractions: Sequence[float] = ()
    peers: bool = False
    gradient_errors: bool = False


@dataclass(frozen=True, slots=True)
class Method:
    """A method to train, ready to run.

    Attributes:
        run: the object that the framework's adapter runs.
        peak_bytes, ns: predicted; None where nothing can predict them without computing.
        overhead: predicted, over every operation once.
        recomputed: number of computations beyond one of each operation.
        plan: of a method that executes one.
    """

    run: Any
    peak_bytes: int | None = None
    ns: int | None = None
    overhead: float | None = None
    recomputed: int | None = None
    plan: remat.Plan | None = None
    note: str = ""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A row to be measured.

    Attributes:
        parameter: see `StepRow`.
        make: makes the method ready to run; None for a row about the graph alone.
    """

    method: str
    parameter: str
    make: Callable[[], Method] | None = None
    budget_bytes: int | None = None


class Subject(Protocol):
    """A model in its framework, built and captured: it makes methods and measures them.

    Attributes:
        batch: samples in a step.
        graph: of the step, with costs.
        fixed_bytes: see `StepRow`.
    """

    batch: int | None
    graph: remat.Graph
    fixed_bytes: int

    def plain(self) -> Method:
        """The framework's own step."""
        ...

    def peers(self) -> Iterable[Candidate]:
        """The methods of others."""
        ...

    def budgets(self, known: Sequence[StepRow]) -> Iterable[tuple[str, int]]:
        """(label, bytes) of the budgets that need plans; `known` are the rows of the plain step and the peers."""
        ...

    def best_within(self, budget_bytes: int) -> Method:
        """The best plan of the portfolio; raises `InvalidInput` if it finds none."""
        ...

    def peak_bytes(self, method: Method) -> int:
        """Most bytes held in a step, fixed bytes included; measured."""
        ...

    def same_as(self, method: Method) -> str | None:
        """See `StepRow.same_as`."""
        ...

    def measured(self, method: Method) -> dict[str, Any]:
        """Other columns of a row: times, in turns with the plain step, and columns of this framework only."""
        ...


def peaks_of_others(known: Sequence[StepRow]) -> Iterator[tuple[str, int]]:
    """(label, bytes) of the peaks of the plain step and of every peer, the largest first."""
    for peak in sorted({row.peak_bytes for row in known if row.method != PORTFOLIO and row.peak_bytes}, reverse=True):
        yield f"as {peak / 1e6:.1f} MB", peak


def plain_peak_of(known: Sequence[StepRow]) -> int:
    """Bytes of the plain step's peak."""
    plain = next(row.peak_bytes for row in known if row.method == PLAIN)
    assert plain is not None
    return plain


def fractions_of_activations(job: Job, fixed_bytes: int, peak_bytes: int) -> Iterator[tuple[str, int]]:
    """(label, bytes) of the job's fractions, see `share_of_activations`."""
    for fraction in job.fractions:
        yield f"{fraction:g}", share_of_activations(fraction, fixed_bytes, peak_bytes)


def share_of_activations(fraction: float, fixed_bytes: int, peak_bytes: int) -> int:
    """Bytes that lie `fraction` of the way from the bytes that are always there to the plain peak.

    Shares of the peak itself would ask little of a network with many parameters, or more than there is.
    """
    return int(fixed_bytes + fraction * (peak_bytes - fixed_bytes))
