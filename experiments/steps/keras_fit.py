"""The harness's adapter for `remat.tf.fit_within`: a network of keras.applications, trained by Keras's own ``fit``.

Each network has the smallest input that it accepts, random weights, and a budget below the peak of its plan without
recomputation. That peak is below the plain `tf.function`'s.
"""

import gc
import inspect
from collections.abc import Iterator, Sequence
from typing import Any

import keras
import numpy as np

import remat.tf as rtf
from experiments.registry import Row
from experiments.steps.job import Job, Method, Subject
from experiments.steps.keras_models import CLASSES, LOSS
from remat.tf.adapter import executed_as_written
from remat.tf.operation_graph import nested_functions_inlined

SMALLEST = 32  # pixels; the smallest input of most networks
LARGER = {"InceptionResNetV2": 75, "InceptionV3": 75, "Xception": 71}
STEPS = 2
BATCH = 8


def names() -> list[str]:
    """Names of the networks of keras.applications."""
    return [n for n, builder in vars(keras.applications).items() if n[0].isupper() and inspect.isfunction(builder)]


def built(name: str, **compiled: Any) -> Any:
    """The compiled network; its random weights are the same in every call."""
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
    """(losses of an epoch, bytes of every variable after it); the batches are in the order of `data`."""
    history = model.fit(*data, batch_size=samples, shuffle=False, verbose=0).history
    return history["loss"], [v.numpy().tobytes() for v in (*model.variables, *model.optimizer.variables)]


class KerasFit(Subject):
    """A network in ``fit``; `Method.run` measures its step."""

    def __init__(self, job: Job, _implementations: str):
        self.job = job
        self.batch = BATCH
        self.model, self.data = built(job.model), batch_of(job.model, BATCH)
        whole = self._planned("1TB", verify=False)
        self.graph, self.fixed_bytes = whole.plan.graph, whole.plan.graph.fixed_bytes
        self.whole_peak_bytes = whole.predicted_peak_bytes
        self._plain = Method(whole.measure_plain, note=f"{self.data[0].shape[1]} pixels")

    def _planned(self, budget: int | str, **options: Any) -> Any:
        rtf.fit_within(self.model, budget, cost=self.job.cost, time_limit_s=self.job.time_limit_s, **options)
        rtf.prepare(self.model, (self.data[0][:BATCH], self.data[1][:BATCH]))
        return self.model.remat

    def plain(self) -> Method:
        return self._plain

    def budgets(self, known: Sequence[Row]) -> Iterator[tuple[str, int]]:
        """Of the peak without recomputation, because the plain step's is measured only."""
        return self.fractions(self.whole_peak_bytes)

    def best_within(self, budget_bytes: int) -> Method:
        self.model = built(self.job.model)  # again, because `same_as` trained the last one
        step = self._planned(budget_bytes)
        repeats = len(step.plan.order) - len(step.plan.graph)
        return Method(step.measure, step.predicted_peak_bytes, None, step.overhead, repeats, note=self._plain.note)

    def peak_bytes(self, method: Method) -> int:
        return method.run().peak_bytes

    def same_as(self, method: Method) -> str | None:
        """Which plain training leaves the bits of the plan's losses, weights, moving averages and seeds.

        ``eager``, or else ``graph``: Keras's compiled step without TensorFlow's rewriting, which adds three gradients
        of one value in another order than eager mode. None for the plain step, '' if neither does.
        """
        if method is self._plain:
            return None
        ours = trained(self.model, self.data, BATCH)
        gc.collect()
        with nested_functions_inlined():  # XLA, with which Keras compiles grouped convolutions, changes last bits
            eager = trained(built(self.job.model, run_eagerly=True), self.data, BATCH)
        if ours == eager:
            return "eager"
        with executed_as_written():
            return "graph" if ours == trained(built(self.job.model, jit_compile=False), self.data, BATCH) else ""
