"""Steps that were executed and measured, from the rows under results/cpu, for docs/results/executed-steps.md."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path

from analysis.charts import save_in_run
from analysis.execution import figure
from experiments import keras_applications
from experiments.documents import DOCS, ROOT, Document, Drawing, LongTable, link_to, markdown_table
from experiments.settings import RUNS_FOLDER
from experiments.steps import table
from experiments.steps.row import OFFERED, PORTFOLIO, StepRow, read_rows
from experiments.steps.table import cells
from remat.errors import InvalidInput
from remat.files import read_json

ROWS = ROOT / "results" / "cpu"
STEPS = {  # [end of the file's name] (label, name of the long table, its columns)
    "torch_execution": ("PyTorch, {} networks", "steps_torch", table.STEPS),
    "tensorflow_execution": ("TensorFlow, {} networks", "steps_tensorflow", table.STEPS),
    "keras_applications": (
        "{} networks of keras.applications, `fit_within`", "steps_keras_applications", keras_applications.COLUMNS,
    ),
}  # fmt: skip
BESIDE_PEERS = {"gpt2": "GPT-2", "resnet50": "ResNet50"}  # [network] its label; of experiment=execution
HEADS = (
    "steps", "plans", "budgets without a plan", "above the budget", "measured / predicted peak",
    "bits of the plain step", "measured minus predicted overhead, median",
)  # fmt: skip
COLUMNS = (
    "framework", "model", "device", "method", "parameter", "operations", "budget_bytes", "plain_bytes",
    "predicted_peak_bytes", "measured_peak_bytes", "predicted_overhead", "same_as",
)  # fmt: skip


def newest(kind: str) -> Path:
    """The newest file of rows of a kind: names begin with the date.

    Raises:
        InvalidInput: there is none.
    """
    found = sorted(ROWS.glob(f"*_{kind}.json"))
    if not found:
        raise InvalidInput(f"{ROWS}: holds no file *_{kind}.json")
    return found[-1]


def draw(arguments: Sequence[str]) -> Drawing:
    """The newest rows of each kind.

    Raises:
        InvalidInput: a file is missing or damaged, or an argument is given.
    """
    if arguments:
        raise InvalidInput("'executed_steps' takes no arguments: it draws the newest rows under results/cpu")
    summary, long = list[list[str]](), list[LongTable]()
    for kind, (label, name, columns) in STEPS.items():
        rows = read_rows(newest(kind))
        summary.append([label.format(len({row.model for row in rows})), *_summary(rows)])
        long.append(LongTable(name, columns, [cells(row, columns) for row in rows if row.method != OFFERED]))
    beside, figures = _beside_peers()
    links = ", ".join(link_to(table, DOCUMENT.page) for table in long)
    text = [markdown_table(HEADS, summary), *beside, f"Tables: {links}."]
    return Drawing("\n\n".join(text), long, figures, sorted(StepRow.__dataclass_fields__))


def _beside_peers() -> tuple[list[str], dict[str, Path]]:
    """A table for each network of `BESIDE_PEERS`, and its figure."""
    text, figures = list[str](), dict[str, Path]()
    for network, label in BESIDE_PEERS.items():
        path = newest(f"torch_{network}_peers")
        rows, run = read_rows(path), read_json(path)
        name = f"execution_{network}"
        figures[name] = save_in_run(RUNS_FOLDER / "execution", name, figure, run)[0]
        text += [f"{label}: step times over plain PyTorch's ({path.name[:10]}, {rows[0].cpu}, {run['job']['rounds']} "
                 "rounds):", markdown_table(table.BESIDE, table.beside(rows))]  # fmt: skip
    return text, figures


def _summary(rows: Sequence[StepRow]) -> list[str]:
    """How well plans kept their promises, in the order of `HEADS` after the first."""
    asked = [row for row in rows if row.method == PORTFOLIO]
    plans = [row for row in asked if row.measured_peak_bytes is not None]
    over = sum((row.measured_peak_bytes or 0) > (row.budget_bytes or 0) for row in plans)
    peaks = [row.measured_peak_bytes / row.predicted_peak_bytes for row in plans
             if row.measured_peak_bytes and row.predicted_peak_bytes]  # fmt: skip
    same = sum(bool(row.same_as) for row in plans)
    missed = [100 * points for row in plans if (points := _missed_overhead(row)) is not None]
    return [
        str(len(plans)), str(len(asked) - len(plans)), str(over), f"{min(peaks):.3f} to {max(peaks):.3f}",
        f"{same} of {len(plans)}", f"{statistics.median(missed):+.1f} points" if missed else "not timed",
    ]  # fmt: skip


def _missed_overhead(row: StepRow) -> float | None:
    """Measured minus predicted overhead; None if the step was not timed. Of TensorFlow, over the step as written."""
    ratio = row.measured_ratio
    if row.as_written_s and row.measured_s:
        ratio = row.measured_s / row.as_written_s
    return None if ratio is None or row.predicted_overhead is None else ratio - 1 - row.predicted_overhead


DOCUMENT = Document("executed_steps", DOCS / "results" / "executed-steps.md", draw, "", COLUMNS)
