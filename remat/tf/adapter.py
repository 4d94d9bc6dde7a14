"""The private TensorFlow and Keras calls that executing a plan needs, and nothing else.

Checked with TensorFlow 2.21.0 and Keras 3.15.1:

* `FuncGraph.capture` (semi-public): a graph imported into a `tf.function` reads the variables of the traced one.
* `eager.context.context().function_call_options`: the grappler configuration of one function's calls, without a
  change to global options. TensorFlow reads it on the first call of a concrete function.
* `Context.add_function_def`: registers the functions of a plan's branches, and those of a graph from a file.
* `Function._jit_compile`: to refuse a function that XLA compiles, and to name one that a step calls.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import tensorflow as tf


def capture(tensor: Any) -> Any:
    """An outer `tensor` as an argument of the function being traced."""
    graph: Any = tf.compat.v1.get_default_graph()
    return graph.capture(tensor)


@contextmanager
def executed_as_written(*, one_by_one: bool = False) -> Iterator[None]:
    """Functions first called in here run their operations as written: grappler and constant folding are off.

    Grappler would merge or fold recomputations, and fuse convolution, bias and activation, which changes the last
    bits of some results.

    Args:
        one_by_one: use the executor with one thread, which runs no loops. The usual executor hands a chain of
            operations from thread to thread, which takes a tenth of the step where operations are small.
    """
    from tensorflow.core.protobuf import config_pb2
    from tensorflow.python.eager import context

    config = config_pb2.ConfigProto()
    config.graph_options.rewrite_options.disable_meta_optimizer = True
    config.graph_options.optimizer_options.opt_level = config_pb2.OptimizerOptions.L0
    current: Any = context.context()
    before = current.function_call_options
    executor = "SINGLE_THREADED_EXECUTOR" if one_by_one else before.executor_type
    current.function_call_options = context.FunctionCallOptions(executor_type=executor, config_proto=config)
    try:
        yield
    finally:
        current.function_call_options = before


def is_jit_compiled(function: Any) -> bool:
    """Whether a `tf.function` was made with ``jit_compile=True``."""
    return bool(getattr(function, "_jit_compile", False))


@contextmanager
def jit_compiled_calls() -> Iterator[list[str]]:
    """Names of the `tf.function`s with ``jit_compile=True`` that are called in here."""
    kind: Any = type(tf.function(lambda: None))
    found: list[str] = []
    call = kind.__call__

    def noting(function: Any, *args: Any, **kwargs: Any) -> Any:
        if is_jit_compiled(function):
            found.append(getattr(function.python_function, "__name__", "a function"))
        return call(function, *args, **kwargs)

    kind.__call__ = noting
    try:
        yield found
    finally:
        kind.__call__ = call


def register_functions(graph_def: Any) -> None:
    """Make the functions of a GraphDef known to this process, which loops and branches need; traced ones are."""
    from tensorflow.python.eager import context

    current: Any = context.context()
    current.ensure_initialized()
    for definition in graph_def.library.function:
        if not current.has_function(definition.signature.name):
            current.add_function_def(definition)
