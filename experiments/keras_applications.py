"""``python -m experiments.keras_applications``: every network of keras.applications, trained by `fit_within`.

Each has the smallest input that it accepts, random weights, and a budget below what its plan without recomputation
needs, which is below the plain `tf.function`'s peak. A row says what was promised, predicted and measured (in fresh
processes), and whether losses, weights, moving averages and seeds after some steps have the bits of the eager step.
Prints a Markdown table; ``--out`` also writes the rows as JSON.
"""

from __future__ import annotations

import argparse
import datetime
import gc
import inspect
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from experiments.provenance import cpu_name, versions
from experiments.store import rows_of_other_models, write_json

SMALLEST = 32  # pixels, where a network does not say otherwise
LARGER = {"InceptionResNetV2": 75, "InceptionV3": 75, "Xception": 71}
CLASSES = 10
STEPS = 2
SHARE = 0.85  # of the way from what is always there to the peak without recomputation
LOSS = "sparse_categorical_crossentropy"


@dataclass(frozen=True, slots=True)
class Row:
    """One network; bytes in all. `refusal` says why there was no plan."""

    model: str
    pixels: int
    batch: int
    operations: int
    always_bytes: int
    plain_bytes: int
    budget_bytes: int
    predicted_bytes: int | None = None
    measured_bytes: int | None = None
    predicted_overhead: float | None = None
    repeats: int | None = None
    same_bits: bool | None = None
    refusal: str = ""


def names() -> list[str]:
    """Networks of keras.applications."""
    import keras

    return [n for n, made in vars(keras.applications).items() if n[0].isupper() and inspect.isfunction(made)]


def built(name: str, **compiled: Any) -> Any:
    """The network with random weights, the same in every call, compiled."""
    import keras

    keras.backend.clear_session()
    keras.utils.set_random_seed(0)
    pixels = LARGER.get(name, SMALLEST)
    model = getattr(keras.applications, name)(weights=None, input_shape=(pixels, pixels, 3), classes=CLASSES)
    model.compile(keras.optimizers.SGD(1e-3, momentum=0.9), LOSS, **compiled)
    return model


def batch_of(name: str, samples: int) -> tuple[np.ndarray, np.ndarray]:
    """`STEPS` batches of images and their labels."""
    pixels = LARGER.get(name, SMALLEST)
    x = np.random.default_rng(0).uniform(0, 255, (STEPS * samples, pixels, pixels, 3)).astype("float32")
    return x, np.arange(STEPS * samples) % CLASSES


def trained(model: Any, data: tuple[np.ndarray, np.ndarray], samples: int) -> tuple[list[float], list[bytes]]:
    """Losses of an epoch, and the bytes of every variable after it; batches are in the order of `data`."""
    history = model.fit(*data, batch_size=samples, shuffle=False, verbose=0).history
    return history["loss"], [v.numpy().tobytes() for v in (*model.variables, *model.optimizer.variables)]


@contextmanager
def functions_run_eagerly() -> Iterator[None]:
    """Without it Keras compiles grouped convolutions (ConvNeXt) with XLA in eager mode too, which changes last bits."""
    import tensorflow as tf

    tf.config.run_functions_eagerly(True)
    try:
        yield
    finally:
        tf.config.run_functions_eagerly(False)


def row_of(name: str, samples: int = 8, time_limit_s: float = 20.0, share: float = SHARE) -> Row:
    """Plan, measure and train one network."""
    import remat.tf as rtf
    from remat.errors import InvalidInput

    model, data = built(name), batch_of(name, samples)
    rtf.fit_within(model, "1TB", cost="flops", time_limit_s=time_limit_s, verify=False)
    rtf.prepare(model, (data[0][:samples], data[1][:samples]))
    step, plain = model.remat, model.remat.measure_plain().peak_bytes
    always = step.plan.graph.fixed_bytes
    budget = int(always + share * (step.predicted_peak_bytes - always))
    row = Row(name, data[0].shape[1], samples, len(step.plan.graph), always, plain, budget)
    rtf.fit_within(model, budget, cost="flops", time_limit_s=time_limit_s)
    try:
        rtf.prepare(model, (data[0][:samples], data[1][:samples]))
    except InvalidInput as error:
        return replace(row, refusal=str(error))
    step = model.remat
    measured = step.measure()
    ours = trained(model, data, samples)
    del model
    gc.collect()
    with functions_run_eagerly():
        same = ours == trained(built(name, run_eagerly=True), data, samples)
    return replace(
        row, predicted_bytes=step.predicted_peak_bytes, measured_bytes=measured.peak_bytes, same_bits=same,
        predicted_overhead=step.overhead, repeats=len(step.plan.order) - len(step.plan.graph),
    )  # fmt: skip


HEADER = (
    "| network (operations) | pixels, batch | always there MB | plain MB | budget MB | predicted MB | measured MB | "
    "overhead | repeats | eager's bits |\n|---|---|--:|--:|--:|--:|--:|--:|--:|---|"
)


def line(row: Row) -> str:
    """A row of the table."""
    sizes = " | ".join(f"{size / 1e6:.1f}" for size in (row.always_bytes, row.plain_bytes, row.budget_bytes))
    start = f"| {row.model} ({row.operations}) | {row.pixels}, {row.batch} | {sizes} |"
    if row.predicted_bytes is None or row.measured_bytes is None or row.predicted_overhead is None:
        return f"{start} no plan: {row.refusal[:160]} | | | | |"
    return (
        f"{start} {row.predicted_bytes / 1e6:.1f} | {row.measured_bytes / 1e6:.1f} | {row.predicted_overhead:.1%} | "
        f"{row.repeats} | {'yes' if row.same_bits else 'no'} |"
    )


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m experiments.keras_applications", description="keras.applications trained within a budget"
    )
    parser.add_argument("--models", help="comma-separated; all by default")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--time-limit", type=float, default=20.0, help="seconds per plan")
    parser.add_argument("--out", type=Path, help="JSON file for the rows; those of other models that it has stay")
    parser.add_argument("--show", type=Path, help="only print the table of rows that --out wrote")
    given = parser.parse_args(arguments)
    print(HEADER)
    if given.show:
        print("\n".join(line(Row(**row)) for row in json.loads(given.show.read_text())["rows"]))
        return
    wanted = given.models.split(",") if given.models else names()
    rows = rows_of_other_models(given.out, wanted)
    for name in wanted:
        row = row_of(name, given.batch, given.time_limit)
        print(line(row), flush=True)
        rows.append(asdict(row))
        if given.out:
            about = {"date": datetime.date.today().isoformat(), "cpu": cpu_name(), "versions": versions()}
            write_json(given.out, about | {"time_limit_s": given.time_limit, "rows": rows})


if __name__ == "__main__":
    main()
