"""``python -m experiments.execution_tf``: plans that run in TensorFlow, measured: memory, time, and bits.

Every model of `MODELS` at several budgets: what the plain `tf.function` of the step needs, what was promised, predicted
and measured (each in a fresh process), overheads, and whose loss, gradients and variables it has bit for bit: those of
the eager step, or of the plain `tf.function` with its graph optimizers off. Prints a Markdown table; ``--out`` also
writes the rows as JSON.
"""

from __future__ import annotations

import argparse
import datetime
import json
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from experiments.provenance import cpu_name, versions
from experiments.tf_models import MODELS, Sample, build

FRACTIONS = (0.8, 0.6, 0.45)


@dataclass(frozen=True, slots=True)
class Row:
    """One model at one budget; bytes in all, seconds of a step, overheads as fractions."""

    model: str
    operations: int
    fraction: float
    plain_bytes: int
    budget_bytes: int
    predicted_bytes: int | None
    measured_bytes: int | None
    predicted_overhead: float | None
    measured_overhead: float | None
    plain_s: float
    step_s: float | None
    recomputed: int | None
    identical_to: str | None
    planning_s: float
    note: str = ""


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m experiments.execution_tf", description="plans that run in TensorFlow, measured"
    )
    parser.add_argument("--models", default=",".join(MODELS), help="comma-separated; all by default")
    parser.add_argument("--budgets", default=",".join(map(str, FRACTIONS)), help="fractions of the plain peak")
    parser.add_argument("--time-limit", type=float, default=30.0, help="seconds per plan")
    parser.add_argument("--cost", default="profile")
    parser.add_argument("--out", type=Path, help="JSON file for the rows")
    given = parser.parse_args(arguments)
    rows = []
    print(HEADER)
    for name in given.models.split(","):
        for row in rows_of(name, [float(f) for f in given.budgets.split(",")], given.time_limit, given.cost):
            print(line(row), flush=True)
            rows.append(row)
            if given.out:
                document = {
                    "date": datetime.date.today().isoformat(), "cpu": cpu_name(), "versions": versions(),
                    "time_limit_s": given.time_limit, "cost": given.cost, "rows": [asdict(r) for r in rows],
                }  # fmt: skip
                given.out.parent.mkdir(parents=True, exist_ok=True)
                given.out.write_text(json.dumps(document, indent=1) + "\n")


def rows_of(name: str, fractions: list[float], time_limit_s: float, cost: str) -> list[Row]:
    """Plan and measure one model."""
    import remat.tf as rtf
    from remat.errors import InvalidInput

    sample = build(name)
    # a budget of 1 EB: the plan is the trace itself, from which the plain step is measured
    whole = rtf.rematerialize(sample.model, sample.specs, "1000TB", loss=sample.loss, cost="flops", verify=False)
    plain = whole.measure_plain(runs=9)
    expected = {"eager": eager_step(sample), "tf.function": plain_step(sample)}
    rows = []
    for fraction in fractions:
        budget = int(fraction * plain.peak_bytes)
        start = time.perf_counter()
        n = len(whole.plan.graph)
        try:
            step = rtf.rematerialize(
                sample.model, sample.specs, budget, loss=sample.loss, time_limit_s=time_limit_s, cost=cost
            )
        except InvalidInput as error:
            rows.append(Row(name, n, fraction, plain.peak_bytes, budget, None, None, None, None, plain.median_s, None,
                            None, None, time.perf_counter() - start, str(error).splitlines()[0][:160]))  # fmt: skip
            continue
        took = time.perf_counter() - start
        measured = step.measure(runs=9)
        rows.append(
            Row(
                name, n, fraction, plain.peak_bytes, budget, step.predicted_peak_bytes, measured.peak_bytes,
                step.overhead, measured.median_s / plain.median_s - 1, plain.median_s, measured.median_s,
                step.plan.plan.n_computations - n, _same(sample, step, expected), took,
            )
        )  # fmt: skip
    return rows


def eager_step(sample: Sample) -> list[bytes]:
    """Loss, gradients and variables after one eager step, as bytes; the variables are put back."""
    import tensorflow as tf

    from remat.tf._api import Objective

    before = sample.state()
    objective = Objective(sample.model, sample.loss)
    tf.config.run_functions_eagerly(True)
    try:
        results = objective.step(*sample.batch)
    finally:
        tf.config.run_functions_eagerly(False)
    return _bits(sample, results, before)


def plain_step(sample: Sample) -> list[bytes]:
    """The same by the plain `tf.function` with its optimizers off."""
    from remat.tf._api import Objective
    from remat.tf._capture import trace
    from remat.tf._tensorflow import executed_as_written

    function = trace(Objective(sample.model, sample.loss).step, sample.specs)
    before = sample.state()
    with executed_as_written():
        return _bits(sample, function(*sample.batch), before)


def _same(sample: Sample, step: Any, expected: dict[str, list[bytes]]) -> str:
    """Whose bits the plan has, e.g. ``eager, tf.function``; '' if nobody's."""
    ours = planned_step(sample, step)
    return ", ".join(name for name, bits in expected.items() if bits == ours)


def planned_step(sample: Sample, step: Any) -> list[bytes]:
    """The same under the plan."""
    before = sample.state()
    return _bits(sample, step(*sample.batch), before)


def _bits(sample: Sample, results: Any, before: list[Any]) -> list[bytes]:
    import tensorflow as tf

    bits = [t.numpy().tobytes() for t in tf.nest.flatten(results, expand_composites=True) if t is not None]
    bits += [value.tobytes() for value in sample.state()]
    sample.restore(before)
    return bits


HEADER = """
| model (operations) | plain MB | budget MB | predicted MB | measured MB | measured / predicted | predicted overhead \
| measured step time | repeats | bits of |
|---|---|---|---|---|---|---|---|---|---|""".strip()


def line(row: Row) -> str:
    """A row of the table."""
    head = (
        f"| {row.model} ({row.operations}) | {row.plain_bytes / 1e6:.1f} | {row.budget_bytes / 1e6:.1f} "
        f"({row.fraction:g}) "
    )
    if row.measured_bytes is None or row.predicted_bytes is None or row.measured_overhead is None:
        return f"{head}| no plan: {row.note} | | | | | | |"
    return (
        f"{head}| {row.predicted_bytes / 1e6:.1f} | {row.measured_bytes / 1e6:.1f} "
        f"| {row.measured_bytes / row.predicted_bytes:.4f} | {row.predicted_overhead:.1%} "
        f"| {row.measured_overhead:+.0%} ({row.plain_s * 1e3:.0f} to {(row.step_s or 0) * 1e3:.0f} ms) "
        f"| {row.recomputed} | {row.identical_to or 'DIFFERENT'} |"
    )


if __name__ == "__main__":
    main(sys.argv[1:])
