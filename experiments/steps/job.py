"""The words between `experiments.steps.measure` and a framework's adapter: jobs, subjects, methods and candidates."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import remat
from experiments.registry import Case, Row
from experiments.store import code_of
from remat.execution.planning import DEFAULT_STRATEGY

FRACTIONS = (0.8, 0.6, 0.45)  # usual budgets, as shares of the activation memory
PLAIN, PORTFOLIO, OFFERED = "plain", "portfolio", "offered"
# What plans may choose from. In this order all implementations of an operation are timed in the same passes: on a
# machine with other load, times of different minutes cannot be compared.
WIDEST_FIRST = ("joint", "exact", "default")


@dataclass(frozen=True, slots=True)
class Job:
    """A model to measure; one case of an experiment.

    Attributes:
        steps: ``torch``; ``offload``: with copies to the host over `link`; ``peers``: with the methods of others and
            plans at the peak of each; ``keras`` (loss and gradients); ``keras_applications`` (`fit_within`).
        rounds: timed steps of each method; 0 for none.
        fractions: budgets, as shares of the activation memory, see `share_of_activations`.
        choices: what plans may choose from; with more than the default, errors of gradients are measured, too.
    """

    steps: str
    model: str
    device: str = "cpu"
    cost: str = "profile"
    time_limit_s: float = 30.0
    threads: int = 2
    rounds: int = 7
    fractions: Sequence[float] = FRACTIONS
    choices: Sequence[str] = ("default",)
    link: str = ""

    @property
    def case(self) -> Case:
        """What measures it in a process of its own."""
        what = asdict(self) | {"fractions": list(self.fractions), "choices": list(self.choices)}
        if not self.link:
            del what["link"]
        code = code_of(DEFAULT_STRATEGY, "torch_mincut", whole=True)
        name = f"{self.steps}, {self.model} on {self.device}" + f", {self.link}" * bool(self.link)
        return Case("experiments.steps.measure.measured", what, code, on_this_machine=True, name=name)


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
        parameter: see `experiments.steps.measure`.
        make: makes the method ready to run; None for a row about the graph alone.
    """

    method: str
    parameter: str
    make: Callable[[], Method] | None = None
    budget_bytes: int | None = None


class Subject(ABC):
    """A model in its framework, built and captured: it makes methods and measures them.

    Attributes:
        batch: samples in a step.
        graph: of the step, with costs.
        fixed_bytes: see `experiments.steps.measure`.
    """

    job: Job
    batch: int | None
    graph: remat.Graph
    fixed_bytes: int

    @abstractmethod
    def plain(self) -> Method:
        """The framework's own step."""

    def peers(self) -> Iterable[Candidate]:
        """The methods of others."""
        return ()

    def budgets(self, known: Sequence[Row]) -> Iterator[tuple[str, int]]:
        """(label, bytes) of the budgets that need plans; `known` are the rows of the plain step and the peers."""
        return self.fractions(peak_of(next(row for row in known if row["method"] == PLAIN)))

    def fractions(self, peak_bytes: int) -> Iterator[tuple[str, int]]:
        """(label, bytes) of the job's fractions of the activation memory, see `share_of_activations`."""
        for fraction in self.job.fractions:
            yield f"{fraction:g}", share_of_activations(fraction, self.fixed_bytes, peak_bytes)

    @abstractmethod
    def best_within(self, budget_bytes: int) -> Method:
        """The best plan of the portfolio; raises `InvalidInput` if it finds none."""

    @abstractmethod
    def peak_bytes(self, method: Method) -> int:
        """Most bytes held in a step, fixed bytes included; measured."""

    @abstractmethod
    def same_as(self, method: Method) -> str | None:
        """See `experiments.steps.measure`."""

    def measured(self, method: Method) -> dict[str, Any]:
        """Other columns of a row: times, in turns with the plain step, and columns of this framework only."""
        return {}


def peak_of(row: Row) -> Any:
    """The predicted peak, or else the measured one."""
    return row["predicted_peak_bytes"] or row["measured_peak_bytes"]


def share_of_activations(fraction: float, fixed_bytes: int, peak_bytes: int) -> int:
    """Bytes that lie `fraction` of the way from the bytes that are always there to the plain peak.

    Shares of the peak itself would ask little of a network with many parameters, or more than there is.
    """
    return int(fixed_bytes + fraction * (peak_bytes - fixed_bytes))
