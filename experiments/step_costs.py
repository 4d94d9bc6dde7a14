"""``python -m experiments.step_costs``: times of operations within a step and alone, with cold and warm caches.

A PyTorch model's captured step runs on the CPU in its own order, and PyTorch's profiler times each call. Beside it
every call is measured alone, as `remat.cost.profile` does. The methods take turns, because the speed of a machine
drifts. Prints a table; ``--out`` also writes the rows as JSON, from which `experiments.step_tables` draws the page.
"""

from __future__ import annotations

import collections
import datetime
import json
import statistics
import tempfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from experiments.arguments import Parser, count, names, output_file, run
from experiments.documents import markdown_table
from experiments.provenance import cpu_name, versions
from experiments.steps.job import Job
from experiments.steps.torch_sizes import for_a_cpu, torch_model, torch_names
from experiments.steps.torch_steps import TorchSteps
from experiments.store import write_json
from remat.cost.timing import Timing, measure, measure_as_in_step
from remat.errors import InvalidInput
from remat.files import read_json
from remat.graph import Graph
from remat.torch import timing

MODELS = ("mobilenet_v2", "resnet50", "gpt2")
N_KINDS = 8  # kinds of operations shown for each model: those with the longest times
HOW = ("in the step", "alone, as profiled", "alone, cold", "alone, warm")
HEADS = ("model", "batch", "operation", "calls", *(f"{how}, ms" for how in HOW))
ALL = "all"  # of a model: its operations together
FORMAT = "remat-step-costs/1"


@dataclass(frozen=True, slots=True)
class StepCosts:
    """Milliseconds of operations.

    Attributes:
        rows: cells under `HEADS`; of each model the operations that take longest, then `ALL`.
        where: machine, threads, versions and date.
    """

    rows: list[list[str]]
    where: str

    @property
    def totals(self) -> str:
        """A Markdown table of whole models."""
        return markdown_table(
            ("network, batch", *(f"{how}, ms" for how in HOW)),
            ([f"{row[0]}, {row[1]}", *row[4:]] for row in self.rows if row[2] == ALL),
        )


def read_costs(path: Path) -> StepCosts:
    """The rows that ``--out`` wrote.

    Raises:
        InvalidInput: the file holds something else.
    """
    document = read_json(path)
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        raise InvalidInput(f"{path}: holds no rows of the format {FORMAT}; measure again with --out")
    return StepCosts(document["rows"], document["where"])


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and print."""
    parser = Parser(prog="python -m experiments.step_costs", description="operations in a step")
    parser.add_argument("--models", type=names("model", torch_names), default=MODELS, help="comma-separated")
    parser.add_argument("--rounds", type=count, metavar="N", default=5)
    parser.add_argument("--threads", type=count, default=2)
    parser.add_argument("--out", type=output_file, help="JSON file for the rows")
    given = parser.parse_args(arguments)
    where = (
        f"{datetime.date.today().isoformat()}, {cpu_name()}, {given.threads} threads, PyTorch {versions()['torch']}, "
        f"medians of {given.rounds} rounds"
    )
    rows = [row for name in given.models for row in _rows(name, given.rounds, given.threads)]
    if given.out:
        write_json(given.out, {"format": FORMAT, "where": where, "rows": rows})
    print(f"{where}\n\n{markdown_table(HEADS, rows)}")


def _rows(name: str, rounds: int, threads: int) -> list[list[str]]:
    spec = for_a_cpu(torch_model(name))
    with tempfile.TemporaryDirectory(prefix="remat-costs-") as cache:
        job = Job("torch", name, spec.batch_size, asdict(spec), cost="flops", threads=threads)
        subject = TorchSteps(job, "default", Path(cache))
    module = subject.planned("plain order", list(range(len(subject.graph))), None).run
    subject.seconds(module)
    found: dict[str, dict[str, list[float]]] = {how: collections.defaultdict(list) for how in HOW}
    measurements = dict(zip(HOW, (lambda: _in_step(subject, module), *_alone(subject.graph)), strict=True))
    for _ in range(rounds):
        for how, measured in measurements.items():
            for kind, ms in measured().items():
                found[how][kind].append(ms)
    ms = {how: {kind: statistics.median(values) for kind, values in by.items()} for how, by in found.items()}
    kinds = sorted(ms[HOW[1]], key=lambda kind: -ms[HOW[1]][kind])
    n = collections.Counter(op.kind for op in subject.graph.operations)
    rows = [_row(kind, n[kind], [ms[how].get(kind, 0.0) for how in HOW]) for kind in kinds[:N_KINDS]]
    rows.append(_row(ALL, sum(n[kind] for kind in kinds), [sum(ms[how].get(k, 0.0) for k in kinds) for how in HOW]))
    return [[name, str(spec.batch_size), *row] for row in rows]


def _row(kind: str, n: int, ms: Iterable[float]) -> list[str]:
    return [kind, str(n), *(f"{x:.1f}" for x in ms)]


def _in_step(subject: TorchSteps, module: torch.nn.Module) -> dict[str, float]:
    """Milliseconds of a step by kind, of ATen's calls that are not within another call."""

    def is_inner(event: Any) -> bool:
        outer = event.cpu_parent
        return outer is not None and (outer.name.startswith("aten::") or is_inner(outer))

    profiler: Any = torch.autograd.profiler.profile()
    with profiler:
        subject.seconds(module)
    ms: dict[str, float] = collections.defaultdict(float)
    for event in profiler.function_events:
        if not is_inner(event):
            ms[event.name.replace("::", ".")] += event.time_range.elapsed_us() / 1000
    return ms


def _alone(graph: Graph) -> list[Callable[[], dict[str, float]]]:
    """Three functions that measure every call alone (as in a profile, with cold caches, with warm caches).

    Each returns milliseconds of a step by kind.
    """
    calls = collections.Counter(
        (op.kind, op.work.signature) for op in graph.operations if op.work and op.work.signature and not op.work.is_free
    )

    def by_kind(timed: Callable[[dict[str, Any]], Timing]) -> dict[str, float]:
        ms: dict[str, float] = collections.defaultdict(float)
        with torch.no_grad():
            for (kind, signature), n in calls.items():
                ms[kind] += n * timed(json.loads(signature)).median_ns / 1e6
        return ms

    def call_of(description: dict[str, Any]) -> Callable[[], Any]:
        return timing.rebuilt_call(description, "cpu")[0]

    return [
        lambda: by_kind(lambda description: timing.time(description, "cpu")),
        lambda: by_kind(lambda description: measure_as_in_step(call_of(description), lambda: None)),
        lambda: by_kind(lambda description: measure(call_of(description))),
    ]


if __name__ == "__main__":
    run(main)
