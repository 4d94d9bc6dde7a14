"""``python -m experiments.step_costs``: times of operations within a step and alone, with cold and warm caches.

A PyTorch model's captured step runs on the CPU in its own order, and PyTorch's profiler times each call. Beside it
every call is measured alone, as `remat.cost.profile` does. The methods take turns, because the speed of a machine
drifts. Prints Markdown; ``--write`` puts it into docs/execution.md.
"""

from __future__ import annotations

import argparse
import collections
import datetime
import json
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from experiments.documents import DOCS, markdown_table, write_between_marks
from experiments.provenance import cpu_name, versions
from experiments.steps.job import Job
from experiments.steps.torch_sizes import for_a_cpu, torch_model
from experiments.steps.torch_steps import TorchSteps
from remat.cost.timing import Timing, measure, measure_as_in_step
from remat.errors import RematError
from remat.graph import Graph
from remat.torch import timing

COMMAND = "python -m experiments.step_costs --write"
DOCUMENT = DOCS / "execution.md"
MODELS = ("mobilenet_v2", "resnet50", "gpt2")
N_KINDS = 8  # kinds of operations shown for each model: those with the longest times
HOW = ("in the step", "alone, as profiled", "alone, cold", "alone, warm")


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="python -m experiments.step_costs", description="operations in a step")
    parser.add_argument("--models", default=",".join(MODELS), help="comma-separated")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--write", action="store_true", help=f"into docs/{DOCUMENT.name}")
    given = parser.parse_args()
    text = "\n\n".join([
        f"Milliseconds of a step, medians of {given.rounds} rounds; {cpu_name()}, {given.threads} threads, "
        f"torch {versions()['torch']}, {datetime.date.today().isoformat()}.",
        *(_section(name, given.rounds, given.threads) for name in given.models.split(",")),
    ])  # fmt: skip
    if given.write:
        write_between_marks(DOCUMENT, COMMAND, text)
    print(text)


def _section(name: str, rounds: int, threads: int) -> str:
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
    rows.append(_row("all", sum(n[kind] for kind in kinds), [sum(ms[how].get(k, 0.0) for k in kinds) for how in HOW]))
    return f"{name}, batch {spec.batch_size}:\n\n" + markdown_table(("operation", "calls", *HOW), rows)


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
        return timing._call(description, "cpu")[0]

    return [
        lambda: by_kind(lambda description: timing.time(description, "cpu")),
        lambda: by_kind(lambda description: measure_as_in_step(call_of(description), lambda: None)),
        lambda: by_kind(lambda description: measure(call_of(description))),
    ]


if __name__ == "__main__":
    try:
        main()
    except RematError as error:
        sys.exit(str(error))
