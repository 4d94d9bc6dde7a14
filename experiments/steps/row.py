"""The one row of executed steps: a method on a model, its predictions and measurements, and their provenance."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from experiments.store import write_json
from remat.errors import InvalidInput
from remat.files import read_json, read_lines, write_lines

FORMAT = "remat-steps/1"
PLAIN, PORTFOLIO, OFFERED = "plain", "portfolio", "offered"


@dataclass(frozen=True, slots=True)
class StepRow:
    """One method on one model and device; None for a value that was not measured.

    Bytes are totals, fixed bytes included. Times are of one step.

    Attributes:
        method: ``plain``, ``portfolio``, or a peer, e.g. ``torch_mincut``; ``offered`` holds no measurement.
        parameter: which of the method's points, e.g. the budget as a fraction of the activation memory.
        implementations: which implementations the plan chooses from.
        fixed_bytes: resident before, during and after every step.
        plain_bytes: peak of the framework's own step.
        measured_ratio, ratio_quartiles: step time over the plain step's in the same rounds.
        as_written_s, as_written_cpu_s: of the plain `tf.function` without grappler, the base of predicted overheads.
        plain_cpu_s, measured_cpu_s: of all threads.
        same_as: steps that leave the same bits as this one, e.g. ``eager, tf.function``; '' for none. None if the
            plain step differs from itself.
        gradient_error: largest error of a gradient over the largest gradient; of the plain step the error by rounding.
        recomputed: computations beyond one of each operation.
        chosen: [implementation] number of computations with it.
        held: [implementation] see `experiments.steps.offers.held_by_those_who_offer`.
        offered: [implementation] `experiments.steps.offers.Offer` as JSON.
        note: why there is no measurement, or a remark.
        versions: a JSON object.
        finished_at: ISO 8601, UTC; of rows before 2026-11-23 the date.
    """

    framework: str
    model: str
    device: str
    method: str
    parameter: str
    implementations: str = "default"
    batch: int | None = None
    operations: int | None = None
    budget_bytes: int | None = None
    fixed_bytes: int | None = None
    plain_bytes: int | None = None
    predicted_peak_bytes: int | None = None
    predicted_ns: int | None = None
    predicted_overhead: float | None = None
    measured_peak_bytes: int | None = None
    plain_s: float | None = None
    measured_s: float | None = None
    measured_ratio: float | None = None
    ratio_quartiles: list[float] | None = None
    as_written_s: float | None = None
    plain_cpu_s: float | None = None
    as_written_cpu_s: float | None = None
    measured_cpu_s: float | None = None
    same_as: str | None = None
    gradient_error: float | None = None
    recomputed: int | None = None
    planning_s: float | None = None
    chosen: dict[str, int] | None = None
    held: dict[str, float] | None = None
    offered: dict[str, dict[str, Any]] | None = None
    note: str = ""
    cost: str | None = None
    time_limit_s: float | None = None
    rounds: int | None = None
    seed: int | None = None
    threads: int | None = None
    git_commit: str | None = None
    git_dirty: bool | None = None
    versions: str = ""
    cpu: str = ""
    finished_at: str = ""

    @property
    def key(self) -> tuple[str, ...]:
        """Distinguishes the rows of one model and device."""
        choice = (self.implementations,) if self.method in (PORTFOLIO, OFFERED) else ()
        return (self.method, self.parameter, *choice)

    @property
    def peak_bytes(self) -> int | None:
        """The predicted peak, or else the measured one."""
        return self.predicted_peak_bytes or self.measured_peak_bytes


class StepLog:
    """The rows of one job; its file has each row at once, so that a stopped job can continue."""

    def __init__(self, path: Path):
        self.path = path
        self.rows = [StepRow(**row) for row in read_lines(path)]

    def of(self, key: tuple[str, ...]) -> StepRow | None:
        """The row of that key, see `StepRow.key`."""
        return next((row for row in self.rows if row.key == key), None)

    def add(self, row: StepRow) -> None:
        """Add a row and write the file."""
        self.rows.append(row)
        write_lines(self.path, map(asdict, self.rows))


def write_rows(path: Path, rows: Iterable[StepRow]) -> None:
    """Write rows as JSON for `read_rows`."""
    write_json(path, {"format": FORMAT, "rows": as_json(rows)})


def as_json(rows: Iterable[StepRow]) -> list[dict[str, Any]]:
    """Rows as JSON objects, without the columns that were not measured."""
    return [{name: value for name, value in asdict(row).items() if value is not None} for row in rows]


def read_rows(path: Path) -> list[StepRow]:
    """The rows of a file.

    Raises:
        InvalidInput: it holds no rows of this format, or damaged ones.
    """
    document = read_json(path)
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        raise InvalidInput(f"{path}: holds no rows of the format {FORMAT}; measure again with --out")
    try:
        return [StepRow(**row) for row in document["rows"]]
    except (KeyError, TypeError) as error:
        raise InvalidInput(f"{path}: holds damaged rows ({error})") from None
