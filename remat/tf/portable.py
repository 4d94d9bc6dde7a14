"""An emitted step in a folder; another process runs it with variables and batches of the same shapes."""

from __future__ import annotations

import json
import math
import statistics
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from remat.errors import InvalidInput, RematError
from remat.tf._heap import run_child, why_it_failed
from remat.tf._nodes import PYTHON_CALLS, variable_shape
from remat.tf.emit import EmittedStep


@dataclass(frozen=True, slots=True)
class StepMeasurement:
    """Memory and time of a step in its own process.

    Attributes:
        peak_bytes: highest peak of all runs, without the bytes held before the step, or in all (see `above`).
        spread_bytes: peak_bytes less the median peak; peaks vary because a workspace depends on how many threads run a
            kernel.
        median_s, best_s: seconds of a step under the heap counter, which slows allocation down (see `time_steps`).
    """

    peak_bytes: int
    spread_bytes: int
    median_s: float
    best_s: float

    def above(self, fixed_bytes: int) -> StepMeasurement:
        """The same measurement in all, with the bytes held before the step."""
        return replace(self, peak_bytes=self.peak_bytes + fixed_bytes)


def measure_step(step: EmittedStep, *, as_written: bool, runs: int = 5) -> StepMeasurement:
    """Run a step in a fresh process.

    Args:
        as_written: run every node as it stands, which a plan needs; else as TensorFlow optimises a `tf.function`.

    Raises:
        MissingPackage: no C compiler for the heap counter.
        InvalidInput: the step reads a state that is neither a variable nor a tensor.
        RematError: the process failed, e.g. because memory ran out.
    """
    with tempfile.TemporaryDirectory(prefix="remat-step-") as folder:
        save_step(step, Path(folder))
        job = {"kind": "step", "folder": folder, "as_written": as_written, "runs": runs}
        record = _record(run_child(job))
    peak, usual = max(record["peaks"]), int(statistics.median(record["peaks"]))
    return StepMeasurement(peak, peak - usual, record["median_s"], record["best_s"])


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Seconds of one of several steps timed in turns: median and best wall time, median CPU time of all threads."""

    wall_s: float
    best_s: float
    cpu_s: float


def time_steps(steps: Sequence[tuple[EmittedStep, bool]], rounds: int = 9) -> list[StepTimes]:
    """Time steps in turns in one fresh process, with the allocators of this process.

    Args:
        steps: each with whether it runs as written (see `measure_step`).
        rounds: number of rounds; every step runs once in each.

    Raises: as `measure_step`.
    """
    with tempfile.TemporaryDirectory(prefix="remat-steps-") as parent:
        entries = []
        for i, (step, as_written) in enumerate(steps):
            folder = Path(parent, str(i))
            folder.mkdir()
            save_step(step, folder)
            entries.append({"folder": str(folder), "as_written": as_written})
        record = _record(run_child({"kind": "times", "steps": entries, "rounds": rounds}, counted=False))
    return [
        StepTimes(statistics.median(wall), min(wall), statistics.median(cpu))
        for wall, cpu in zip(record["wall_s"], record["cpu_s"], strict=True)
    ]


def _record(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    """The last line that the child printed.

    Raises:
        RematError: the child failed; the message says why.
    """
    if done.returncode:
        raise RematError(f"measuring the step failed: {why_it_failed(done)}")
    return json.loads(done.stdout.strip().splitlines()[-1])


def save_step(step: EmittedStep, folder: Path) -> None:
    """Write the graph and the tensors that it captures; the contents of variables are not written."""
    calls = [node.name for node in step.graph_def.node if node.op in PYTHON_CALLS]
    if calls:
        raise InvalidInput(
            f"the step calls Python ('{calls[0]}': py_function or numpy_function), so it cannot be measured in another "
            "process: give the budget as a size, and verify=False"
        )
    (folder / "graph.pb").write_bytes(step.graph_def.SerializeToString())
    captures = []
    for i, (name, tensor) in enumerate(step.captures):
        if tensor.dtype.name == "resource":
            shape, dtype = variable_shape(tensor)
            if shape.num_elements() is None:
                raise InvalidInput(
                    f"the step reads a state that is no variable of static shape ('{name}', e.g. a table), so it "
                    "cannot be measured in another process: give the budget as a size, and verify=False"
                )
            captures.append({"name": name, "shape": shape.as_list(), "dtype": dtype})
        else:
            tf.io.write_file(str(folder / f"tensor_{i}"), tf.io.serialize_tensor(tensor))
            captures.append({"name": name, "file": f"tensor_{i}", "dtype": tensor.dtype.name})
    arguments = [{"name": name, "shape": s.shape.as_list(), "dtype": s.dtype.name} for name, s in step.arguments]
    document = {
        "arguments": arguments, "captures": captures, "results": list(step.results), "is_plan": step.is_plan,
    }  # fmt: skip
    (folder / "step.json").write_text(json.dumps(document))


def load_step(folder: Path) -> tuple[Callable[..., Any], list[Any]]:
    """(function, arguments): the step with variables of small random numbers, random inputs and zero labels."""
    document = json.loads((folder / "step.json").read_text())
    graph_def = tf.compat.v1.GraphDef.FromString((folder / "graph.pb").read_bytes())
    variables, captures = [], []
    for entry in document["captures"]:
        if "file" in entry:
            content = tf.io.read_file(str(folder / entry["file"]))
            captures.append((entry["name"], tf.io.parse_tensor(content, entry["dtype"])))
        else:
            variables.append(tf.Variable(_filler(entry, 0.05), trainable=False))
            captures.append((entry["name"], variables[-1].handle))
    arguments = [_filler(entry, 1.0) for entry in document["arguments"]]
    specs = tuple((e["name"], tf.TensorSpec(e["shape"], e["dtype"])) for e in document["arguments"])
    step = EmittedStep(graph_def, specs, tuple(captures), tuple(document["results"]), document["is_plan"])
    function = step.function()

    def call(*values: Any, _held: Any = variables) -> Any:  # the function holds only the variables' handles
        return function(*values)

    return call, arguments


def _filler(entry: dict[str, Any], scale: float) -> Any:
    shape, dtype = entry["shape"], tf.as_dtype(entry["dtype"])
    if dtype.is_floating:
        values = np.random.default_rng(math.prod(shape)).random(shape, np.float32)
        return tf.cast(scale * (0.1 + values), dtype)
    return tf.zeros(shape, dtype)
