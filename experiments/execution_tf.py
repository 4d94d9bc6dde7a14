"""``python -m experiments.execution_tf``: plans that run in TensorFlow, measured: memory, time, and bits.

Every model of `MODELS` at several budgets: what the plain `tf.function` of the step needs, what was promised, predicted
and measured (each in a fresh process), overheads, and whose loss, gradients and variables it has bit for bit: those of
the eager step, or of the plain `tf.function` with its graph optimizers off. `tf.recompute_grad` over about sqrt(n)
blocks of the same model is a row of the same run. Prints a Markdown table; ``--out`` also writes the rows as JSON.

Times of a model's steps are taken in turns in one process, with the allocators of this one: on a machine that does
something else too, times of different minutes do not compare. Overheads are over the plain `tf.function`, and over
that one run as written (without grappler), which is what plans are and what predicted overheads are over; CPU time is
of all threads.
"""

from __future__ import annotations

import argparse
import datetime
import gc
import math
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from experiments.provenance import cpu_name, versions
from experiments.store import rows_of_other_models, write_json
from experiments.tf_models import MODELS, Sample, build
from remat.files import read_json

FRACTIONS = (0.8, 0.6, 0.45)
ROUNDS = 7


@dataclass(frozen=True, slots=True)
class Row:
    """One method on one model at one budget; bytes in all, seconds of a step, overheads as fractions.

    Attributes:
        plain_s, plain_cpu_s: of the plain `tf.function`; as_written_s, as_written_cpu_s: of the same without grappler.
    """

    model: str
    method: str
    operations: int
    plain_bytes: int
    fraction: float | None = None
    budget_bytes: int | None = None
    predicted_bytes: int | None = None
    measured_bytes: int | None = None
    predicted_overhead: float | None = None
    recomputed: int | None = None
    identical_to: str | None = None
    planning_s: float | None = None
    plain_s: float | None = None
    plain_cpu_s: float | None = None
    as_written_s: float | None = None
    as_written_cpu_s: float | None = None
    step_s: float | None = None
    step_cpu_s: float | None = None
    note: str = ""


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m experiments.execution_tf", description="plans that run in TensorFlow, measured"
    )
    parser.add_argument("--models", default=",".join(MODELS), help="comma-separated; all by default")
    parser.add_argument("--budgets", default=",".join(map(str, FRACTIONS)), help="fractions of the plain peak")
    parser.add_argument("--time-limit", type=float, default=30.0, help="seconds per plan")
    parser.add_argument("--cost", default="profile")
    parser.add_argument("--out", type=Path, help="JSON file for the rows; those of other models that it has stay")
    parser.add_argument("--show", type=Path, help="only print the table of rows that --out wrote")
    given = parser.parse_args(arguments)
    if given.show:
        written = read_json(given.show)["rows"]
        print("\n".join([HEADER, *(line(Row(**row)) for row in written)]))
        return
    rows = rows_of_other_models(given.out, given.models.split(","))
    print(HEADER)
    for name in given.models.split(","):
        for row in rows_of(name, [float(f) for f in given.budgets.split(",")], given.time_limit, given.cost):
            print(line(row), flush=True)
            rows.append(asdict(row))
        if given.out:
            document = {
                "date": datetime.date.today().isoformat(), "cpu": cpu_name(), "versions": versions(),
                "time_limit_s": given.time_limit, "cost": given.cost, "rounds": ROUNDS,
                "rows": rows,
            }  # fmt: skip
            write_json(given.out, document)


def rows_of(name: str, fractions: Sequence[float], time_limit_s: float, cost: str, timed: bool = True) -> list[Row]:
    """Plan and measure one model; the last row is the peer's. Not `timed`: memory and bits only."""
    import remat.tf as rtf
    from experiments.tf_peers import cut_points, recompute_grad_step
    from remat.errors import InvalidInput, RematError
    from remat.tf.emit import emit, emit_plain
    from remat.tf.portable import measure_step, time_steps

    sample = build(name)
    # a budget of 1 EB: the plan is the trace itself, from which the plain step is measured
    whole = rtf.rematerialize(sample.model, sample.specs, "1000TB", loss=sample.loss, cost="flops", verify=False)
    function, fixed, n = whole._step.function, whole._step.graph.fixed_bytes, len(whole.plan.graph)
    plain_bytes = whole.measure_plain().peak_bytes
    expected = {"eager": eager_step(sample), "tf.function": traced_step(sample, function)}
    rows: list[dict[str, Any]] = []
    runs: dict[int, tuple[Any, bool]] = {}  # by row
    for fraction in fractions:
        budget = int(fraction * plain_bytes)
        row: dict[str, Any] = {"method": "remat", "fraction": fraction, "budget_bytes": budget}
        rows.append(row)
        start = time.perf_counter()
        try:
            step = rtf.rematerialize(
                sample.model, sample.specs, budget, loss=sample.loss, time_limit_s=time_limit_s, cost=cost
            )
        except InvalidInput as error:
            row |= {"note": str(error).splitlines()[0][:160], "planning_s": time.perf_counter() - start}
            continue
        row |= {
            "planning_s": time.perf_counter() - start, "predicted_bytes": step.predicted_peak_bytes,
            "measured_bytes": step.measure().peak_bytes, "predicted_overhead": step.overhead,
            "recomputed": step.plan.plan.n_computations - n,
            "identical_to": _same(planned_step(sample, step), expected),
        }  # fmt: skip
        runs[len(rows) - 1] = emit(step._step, step.plan.order.tolist()), True
        del step
        gc.collect()
    segments = max(2, math.isqrt(len(cut_points(sample.model))))
    row = {"method": "tf.recompute_grad", "note": f"{segments} blocks"}
    rows.append(row)
    try:
        peer = recompute_grad_step(sample, segments)
        emitted = emit_plain(peer)
        row["measured_bytes"] = measure_step(emitted, as_written=False).peak_bytes + fixed
        row["identical_to"] = _same(traced_step(sample, peer), expected)
        runs[len(rows) - 1] = emitted, False
    except (RematError, ValueError) as error:
        row["note"] += f": {str(error).splitlines()[0][:160]}"
    if timed:
        plain = emit_plain(function)
        first, as_written, *others = time_steps([(plain, False), (plain, True), *runs.values()], ROUNDS)
        for row in rows:
            row |= {"plain_s": first.wall_s, "plain_cpu_s": first.cpu_s}
            row |= {"as_written_s": as_written.wall_s, "as_written_cpu_s": as_written.cpu_s}
        for i, times in zip(runs, others, strict=True):
            rows[i] |= {"step_s": times.wall_s, "step_cpu_s": times.cpu_s}
    return [Row(model=name, operations=n, plain_bytes=plain_bytes, **row) for row in rows]


def eager_step(sample: Sample) -> list[bytes]:
    """Loss, gradients and variables after one eager step, as bytes; the variables are put back."""
    import tensorflow as tf

    from remat.tf.api import Objective

    before = sample.state()
    objective = Objective(sample.model, sample.loss)
    tf.config.run_functions_eagerly(True)
    try:
        results = objective.step(*sample.batch)
    finally:
        tf.config.run_functions_eagerly(False)
    return _bits(sample, results, before)


def traced_step(sample: Sample, function: Any) -> list[bytes]:
    """The same by a traced function with grappler off."""
    from remat.tf.adapter import executed_as_written

    before = sample.state()
    with executed_as_written():
        return _bits(sample, function(*sample.batch), before)


def _same(ours: list[bytes], expected: dict[str, list[bytes]]) -> str:
    """Whose bits these are, e.g. ``eager, tf.function``; '' if nobody's."""
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
| model (operations) | method | plain MB | budget MB | predicted MB | measured MB | measured / predicted \
| predicted overhead | wall over as written | wall over plain \
| CPU over as written | CPU over plain | repeats | bits of |
|---|---|---|---|---|---|---|---|---|---|---|---|---|---|""".strip()


def line(row: Row) -> str:
    """A row of the table."""
    budget = f"{_mb(row.budget_bytes)} ({row.fraction:g})" if row.fraction else ""
    head = f"| {row.model} ({row.operations}) | {row.method} | {_mb(row.plain_bytes)} | {budget} "
    if row.measured_bytes is None:
        return f"{head}| no plan: {row.note} | | | | | | | | | |"
    ratio = f"{row.measured_bytes / row.predicted_bytes:.4f}" if row.predicted_bytes else ""
    predicted = "" if row.predicted_overhead is None else f"{row.predicted_overhead:.1%}"
    wall = _over(row.step_s, row.as_written_s, " ms"), _over(row.step_s, row.plain_s, " ms")
    cpu = _over(row.step_cpu_s, row.as_written_cpu_s), _over(row.step_cpu_s, row.plain_cpu_s)
    repeats = row.note if row.recomputed is None else row.recomputed
    return (
        f"{head}| {_mb(row.predicted_bytes)} | {_mb(row.measured_bytes)} | {ratio} | {predicted} "
        f"| {wall[0]} | {wall[1]} | {cpu[0]} | {cpu[1]} | {repeats} | {row.identical_to or 'nobody'} |"
    )


def _mb(size: int | None) -> str:
    return "" if size is None else f"{size / 1e6:.1f}"


def _over(ours: float | None, theirs: float | None, unit: str = "") -> str:
    if ours is None or theirs is None:
        return ""
    return f"{ours / theirs - 1:+.1%}" + (f" ({theirs * 1e3:.0f} to {ours * 1e3:.0f}{unit})" if unit else "")


if __name__ == "__main__":
    main(sys.argv[1:])
