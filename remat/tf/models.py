"""Keras 3 frontend: builds the model that a `ModelSpec` names and hands it to an extractor.

Checked with Keras 3.15 on TensorFlow 2.21. Only the functions import Keras.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from typing import Any

from remat.errors import InvalidInput, RematError, unknown_name
from remat.frontends.spec import DTYPES, ModelSpec, check_options, load_target
from remat.graph import Graph
from remat.tf._keras import import_keras
from remat.tf.layer_graph import layer_graph
from remat.tf.networks import segmentation
from remat.tf.operation_graph import operation_graph

# Smallest height and width that a network can be built for.
_SMALLEST = {"InceptionV3": 75, "Xception": 71}
_SMALLEST_OTHER = 32


def check_spec(spec: ModelSpec) -> None:
    """Refuse a spec that is wrong, as far as that can be known without importing a framework."""
    if isinstance(spec.batch_size, bool) or not isinstance(spec.batch_size, int) or spec.batch_size < 1:
        raise InvalidInput(f"batch_size must be a positive integer, not {spec.batch_size!r}")
    if any(isinstance(n, bool) or not isinstance(n, int) or n < 1 for n in spec.input_size):
        raise InvalidInput(f"input_size must be positive integers, e.g. [224, 224, 3], not {list(spec.input_size)}")
    if spec.dtype is not None and spec.dtype not in DTYPES:
        raise unknown_name("dtype", spec.dtype, DTYPES)
    module, _, factory = spec.target.partition(":")
    if not spec.input_size or module not in ("keras.applications", segmentation.__name__):
        return
    if len(spec.input_size) != 3:
        raise InvalidInput(f"{spec.name}: input_size must be [height, width, channels], not {list(spec.input_size)}")
    smallest = _SMALLEST.get(factory, _SMALLEST_OTHER)
    if min(spec.input_size[:2]) < smallest:
        height, width = spec.input_size[:2]
        raise InvalidInput(f"{spec.name}: input {height}x{width} is too small; it needs at least {smallest}x{smallest}")
    if module == segmentation.__name__:
        factory = load_target(spec.target)
        arguments = check_options(spec, factory, {"input_shape": spec.input_size, **spec.options})
        segmentation.check(arguments["input_shape"], arguments["classes"], arguments["encoder"])


def extract(spec: ModelSpec) -> Graph:
    """The uncosted graph of a Keras model, forward and backward.

    Raises:
        InvalidInput: a size, option or target that cannot be used.
        MissingPackage: Keras is not installed.
    """
    check_spec(spec)
    by_layer = spec.granularity == "layer"
    model = build_model(spec, allocate=not by_layer)
    name = spec.graph_name
    if by_layer:
        return layer_graph(model, batch_size=spec.batch_size, name=name, accounting=spec.accounting, dtype=spec.dtype)
    return operation_graph(model, spec.batch_size, name if ":" in name else f"{name}_ops", dtype=spec.dtype)


def build_model(spec: ModelSpec, *, allocate: bool = True) -> Any:
    """The Keras model that `spec` names, randomly initialised, nothing downloaded.

    Factories that take ``weights`` and ``input_shape`` get None and the input size; `options` go through unchanged.
    Automatic layer names always start afresh. Without ``spec.dtype`` the factory chooses types, mixed precision
    included. Without `allocate` parameters have shapes but no contents: the model can be inspected but not run.

    Raises:
        InvalidInput: the factory refuses its arguments, or does not return a Keras model of that input size.
    """
    keras = import_keras()
    factory = load_target(spec.target)

    def build() -> Any:
        if spec.dtype is not None:
            keras.config.set_dtype_policy(spec.dtype)
        with nullcontext() if allocate else keras.StatelessScope(initialize_variables=False):
            return _call_factory(keras, factory, spec)

    # Keras keeps its name counters, dtype policy and scopes per thread. A new thread starts clean and leaves the
    # caller's alone.
    with ThreadPoolExecutor(max_workers=1) as thread:
        return thread.submit(build).result()


def _call_factory(keras: Any, factory: Callable[..., Any], spec: ModelSpec) -> Any:
    options = dict(spec.options)
    try:
        parameters = inspect.signature(factory).parameters
    except ValueError:  # Python cannot tell
        parameters = {}
    if "weights" in parameters:
        options.setdefault("weights", None)
    if spec.input_size and "input_shape" in parameters:
        options["input_shape"] = tuple(spec.input_size)
    check_options(spec, factory, options)
    try:
        model = factory(**options)
    except RematError:
        raise
    except (TypeError, ValueError) as error:
        first_line = str(error).strip().partition("\n")[0] or type(error).__name__
        raise InvalidInput(f"{spec.name}: {spec.target} cannot be built: {first_line}") from error
    if not isinstance(model, keras.Model):
        raise InvalidInput(f"{spec.name}: {spec.target} returned {type(model).__name__}, not a keras.Model")
    if not model.built and spec.input_size:
        model.build((None, *spec.input_size))
    shapes = [tuple(tensor.shape[1:]) for tensor in getattr(model, "inputs", None) or ()]
    if spec.input_size and len(shapes) == 1 and shapes[0] != tuple(spec.input_size):
        raise InvalidInput(f"{spec.name}: the model takes inputs {list(shapes[0])}, not {list(spec.input_size)}")
    return model
