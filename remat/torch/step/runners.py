"""What runs the two halves of a step: PyTorch's own kernels, one by one, or what Inductor compiles."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import fx

from remat.torch._random import bernoulli, bernoulli_like, rrelu, rrelu_
from remat.torch.internals import aot, dynamo, inductor, operators
from remat.torch.internals.notes import is_in_backward
from remat.torch.internals.operators import OpOverload, schema_of
from remat.torch.step.aot import boxed
from remat.torch.step.recurrent import gru_cell

aten = torch.ops.aten


class Eager:
    """Runs the calls of both halves one by one."""

    def of(self, graph: fx.GraphModule, example_inputs: Sequence[Any]) -> Runner:
        """The runner of a graph that Dynamo hands over now."""
        return self

    def halfway(
        self, graph: fx.GraphModule, example_inputs: Sequence[Any], begin: Callable[[inductor.Finish], Any]
    ) -> Any:
        """The graph as a function that is compiled only as far as the training graph.

        Args:
            begin: gets the rest of the compilation, a function of a partition, and returns what runs the graph. A
                partition is (training graph, number of forward outputs) -> (forward half, backward half).
        """

        def begin_boxed(finish: Callable[[aot.PartitionFn], aot.Boxed]) -> aot.Boxed:
            return begin(lambda partition: finish(_partition_fn(partition)))

        # Operators that eager mode differentiates as a whole stay whole: PyTorch registers other formulas for tracing.
        # Others, which it builds from in-place operations, are built from operations that give the same layouts.
        instead = {**dict.fromkeys(_whole_operators()), **_LAID_OUT}
        with operators.kernels_instead(instead), aot.second_stage_later(begin_boxed):
            return dynamo.aot_autograd(fw_compiler=boxed, bw_compiler=boxed, decompositions=_AS_IN_EAGER_MODE)(
                graph, example_inputs
            )

    def complete(self, module: fx.GraphModule) -> None:
        """Change a training graph as the runner does before it runs it."""

    def belongs_to_backward(self, node: fx.Node) -> bool:
        """Whether a call without a mark, on which no forward output depends, is of the backward pass."""
        return True  # PyTorch has marked all calls of the forward pass

    def keeps_order(self, node: fx.Node) -> bool:
        """Whether a call draws random numbers, so that it keeps its place among such calls."""
        return is_random(node)

    def is_replayed(self, node: fx.Node) -> bool:
        """Whether a repetition of a call needs the state of the random generator before the first run."""
        return is_random(node)

    def name_of(self, name: str | None, taken: Collection[str], group: int | None) -> str | None:
        """The name of a call in a half, None for any; `name` is that in the training graph."""
        return None


def _partition_fn(partition: inductor.Partition) -> aot.PartitionFn:
    def partition_fn(module: fx.GraphModule, _inputs: Any, *, num_fwd_outputs: int, **_: Any) -> Any:
        with operators.outside_modes():  # measurements must see real tensors
            return partition(module, num_fwd_outputs)

    return partition_fn


@dataclass(slots=True, eq=False)
class Inductor:
    """Lets Inductor compile both halves; for the methods see `Eager`.

    Attributes:
        finish: the rest of the compilation of the graph that it is of.
    """

    finish: inductor.Finish | None = None

    def of(self, graph: fx.GraphModule, example_inputs: Sequence[Any]) -> Runner:
        return Inductor()

    def halfway(
        self, graph: fx.GraphModule, example_inputs: Sequence[Any], begin: Callable[[inductor.Finish], Any]
    ) -> Any:  # fmt: skip
        def begin_noted(finish: inductor.Finish) -> Any:
            self.finish = finish
            return begin(finish)

        return inductor.halfway(graph, example_inputs, begin_noted)

    def shown(self, halves: inductor.Halves, *, whole: bool) -> tuple[inductor.LoweredHalf, inductor.LoweredHalf]:
        """What Inductor generates for two halves of the graph, see `inductor.shown`."""
        assert self.finish is not None
        return inductor.shown(self.finish, halves, whole=whole)

    def complete(self, module: fx.GraphModule) -> None:
        aot.merge_equal_calls(module)

    def belongs_to_backward(self, node: fx.Node) -> bool:
        return any(map(is_in_backward, node.all_input_nodes))  # Inductor's passes make calls without a mark

    def keeps_order(self, node: fx.Node) -> bool:
        return draws(node)

    def is_replayed(self, node: fx.Node) -> bool:
        return False  # what draws runs once

    def name_of(self, name: str | None, taken: Collection[str], group: int | None) -> str | None:
        if name in taken:
            name = f"again_{name}"  # else its new name may be that of another call
        return name if group is None else inductor.name_in_group(name or "call", group)


Runner = Eager | Inductor
EAGER = Eager()


@functools.cache
def _whole_operators() -> tuple[OpOverload, ...]:
    names = ("linear1d", "bilinear2d", "trilinear3d", "bicubic2d", "nearest1d", "nearest2d", "nearest3d",
             "bilinear2d_aa", "bicubic2d_aa", "nearest_exact1d", "nearest_exact2d", "nearest_exact3d")  # fmt: skip
    packets = [getattr(aten, f"{prefix}upsample_{name}", None) for name in names for prefix in ("", "_")]
    packets += [aten.softshrink, aten.hardshrink, aten.multi_margin_loss, aten.multilabel_margin_loss_forward]
    return tuple(getattr(packet, overload) for packet in packets if packet for overload in packet.overloads()
                 if overload in ("default", "vec"))  # fmt: skip


def _dropout(x: torch.Tensor, p: float, train: bool | None) -> Any:
    """Dropout as eager mode computes it on a CPU, where its rounding differs from the fused operator's."""
    if x.device.type != "cpu" or not train or p == 0:
        return NotImplemented
    if p == 1:  # no draw
        nothing = aten.zeros.default([], dtype=x.dtype, device=x.device)
        return aten.mul.Tensor(x, nothing), nothing
    exact = np.float32 if x.dtype is torch.float32 else np.float64
    if x.dtype in (torch.float32, torch.float64) and exact(1) / exact(1 - p) == exact(1 / (1 - p)):
        return NotImplemented  # one operation gives the same bits
    noise = aten.div.Scalar(bernoulli_like(x, 1 - p), 1 - p)
    return aten.mul.Tensor(x, noise), noise


def _dropout_backward(gradient: torch.Tensor, mask: torch.Tensor, scale: float) -> Any:
    return NotImplemented if mask.dtype is torch.bool else aten.mul.Tensor(gradient, mask)


def _bernoulli(x: torch.Tensor, p: float = 0.5, generator: torch.Generator | None = None) -> Any:
    """The functional form of `Tensor.bernoulli_`."""
    return NotImplemented if x.is_contiguous() or generator is not None else bernoulli_like(x, p)


_AS_IN_EAGER_MODE = {
    aten.native_dropout.default: _dropout, aten.native_dropout_backward.default: _dropout_backward,
    aten.bernoulli.p: _bernoulli,
}  # fmt: skip
_LAID_OUT = {
    aten.gru_cell.default: gru_cell, aten.bernoulli.p: bernoulli,
    aten.rrelu.default: rrelu, aten.rrelu_.default: rrelu_,
}  # fmt: skip


def is_random(node: fx.Node) -> bool:
    """Whether the call draws from the device's default generator."""
    return torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())


def draws(node: fx.Node) -> bool:
    """Whether the call draws, given its arguments: attention without dropout does not."""
    schema = schema_of(node.target)
    at = {argument.name: i for i, argument in enumerate(schema.arguments)} if is_random(node) else {}
    if "dropout_p" not in at:
        return is_random(node)
    i = at["dropout_p"]
    given = node.args[i] if i < len(node.args) else node.kwargs.get("dropout_p", schema.arguments[i].default_value)
    return bool(given != 0)
