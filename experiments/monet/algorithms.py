"""VGG-16 with the algorithms that MONeT measured for its convolutions on a P100, and the results of MONeT's program.

Times and workspaces are read in the log of MONeT's program for VGG-16 at batch 176:
github.com/utsaslab/monet-schedules, monet_vgg16_176_24hr/monet_vgg16_icmn_176_10.out. Files beside it publish them for
all five networks; only VGG-16's are used so far. An algorithm is here if no other is both as fast and as small. Its
name has its number there. By the memory in that log, ReLU's backward operation writes over the gradient that it reads,
and pooling needs the workspaces below.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from experiments.monet.published import NETWORKS
from remat.graph import Graph, Operation
from remat.implementation import Implementation

NETWORK = "vgg16"
PUBLISHED = NETWORKS[NETWORK]
CONVOLUTION, RELU, POOLING = "aten::_convolution", "aten::relu_", "aten::max_pool2d"
POOLING_WORKSPACE = {"default": 2.0, "indices": 0.25}  # [implementation] times the bytes of the pooled value
_NAME = "algorithm_"


@dataclass(frozen=True, slots=True)
class Logged:
    """What the logs of MONeT's program say of one budget: its optimum, by Gurobi, and its plan's step, measured."""

    program_ms: float
    measured_ms: float


LOGGED = {  # [GiB of `PUBLISHED`] the log for 5.51 is that for 5.5
    10: Logged(1324.00, 1309.86), 9: Logged(1329.17, 1313.42), 8: Logged(1383.33, 1366.65),
    7: Logged(1438.66, 1420.53), 6: Logged(1491.29, 1475.25), 5.51: Logged(1540.23, 1520.15),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Pass:
    """One pass of a convolution.

    Attributes:
        default_ms: of the algorithm behind the published costs, which needs next to no workspace.
        faster: [number in the log] (ms, MiB of workspace).
    """

    default_ms: float
    faster: Mapping[int, tuple[float, float]]


@dataclass(frozen=True, slots=True)
class Convolution:
    """The passes of a convolution; `to_input` is None where no gradient is needed."""

    forward: Pass
    to_weights: Pass
    to_input: Pass | None


_128_TO_256 = Convolution(
    Pass(41.91, {6: (29.94, 4.13), 2: (20.43, 699.0), 7: (19.49, 1825.0)}),
    Pass(46.01, {4: (21.73, 1824.9)}),
    Pass(42.78, {4: (25.06, 3.63), 3: (16.81, 698.5), 5: (16.09, 1824.5)}),
)
_256 = Convolution(
    Pass(80.06, {6: (52.50, 7.25), 2: (32.27, 1021.05), 7: (30.73, 2435.5)}),
    Pass(88.98, {3: (88.48, 0.07), 4: (31.52, 2434.5)}),
    Pass(85.25, {4: (49.88, 7.25), 3: (29.81, 1021.05), 5: (27.93, 2435.5)}),
)
_256_TO_512 = Convolution(
    Pass(40.52, {6: (26.58, 13.0), 7: (14.74, 928.5)}),
    Pass(43.56, {4: (13.80, 928.0)}),
    Pass(42.59, {4: (23.63, 12.5), 5: (12.56, 928.0)}),
)
_512 = Convolution(
    Pass(79.16, {6: (48.35, 26.5), 7: (24.93, 1249.25)}),
    Pass(86.01, {4: (24.47, 1248.75)}),
    Pass(84.52, {4: (47.20, 25.5), 5: (23.39, 1249.25)}),
)
_512_SMALL = Convolution(
    Pass(20.39, {6: (12.32, 26.63), 7: (7.92, 432.63)}),
    Pass(21.72, {4: (7.81, 432.0)}),
    Pass(21.95, {4: (12.12, 25.63), 5: (7.54, 432.63)}),
)
CONVOLUTIONS = (  # in the order of the network
    Convolution(Pass(17.83, {}), Pass(29.32, {0: (25.45, 0.13)}), None),
    Convolution(
        Pass(95.05, {6: (70.81, 0.39), 7: (68.87, 9702.6)}),
        Pass(121.22, {3: (111.30, 0.13)}),
        Pass(85.65, {4: (60.97, 0.39), 5: (59.03, 9702.6)}),
    ),
    Convolution(
        Pass(45.33, {6: (34.51, 0.78), 2: (33.62, 314.55), 7: (29.04, 3640.0)}),
        Pass(52.63, {4: (45.32, 3640.0)}),
        Pass(42.32, {4: (26.11, 1.78), 3: (24.95, 315.55), 5: (22.77, 3641.0)}),
    ),
    Convolution(
        Pass(83.52, {6: (55.33, 2.0), 2: (46.82, 442.05), 7: (41.90, 4854.0)}),
        Pass(92.19, {4: (49.39, 4854.0)}),
        Pass(86.77, {4: (50.39, 2.0), 3: (41.90, 442.05), 5: (36.73, 4854.0)}),
    ),
    _128_TO_256, _256, _256, _256_TO_512, _512, _512, _512_SMALL, _512_SMALL, _512_SMALL,
)  # fmt: skip


def with_algorithms(graph: Graph) -> Graph:
    """VGG-16's training graph with what the log has; an algorithm costs the default's cost times the measured ratio."""
    passes = {k: one for k, one in _passes(graph.operations) if one is not None}
    operations, pooled = list(graph.operations), list[int]()
    for k, op in enumerate(operations):
        more = [*_algorithms(op, passes[k])] if k in passes else []
        if op.kind == f"{RELU}_ip_grad":
            more += _over_gradient(graph, op)
        elif op.kind == POOLING:
            pooled.append(graph.values[op.outputs[0]].bytes)
            op = _with_workspace(op, pooled[-1])
        elif op.kind == f"{POOLING}_ip_grad":
            op = _with_workspace(op, pooled.pop())  # the backward pass has them in reverse order
        operations[k] = replace(op, implementations=(*op.implementations, *more))
    return replace(graph, operations=tuple(operations))


def pytorch_ms() -> float:
    """PyTorch's own step, from the measured steps of the log and the published overheads: they agree within 1 %."""
    published = dict(zip(PUBLISHED.budgets_gib, PUBLISHED.overheads_percent, strict=True))
    return statistics.mean(logged.measured_ms / (1 + published[gib] / 100) for gib, logged in LOGGED.items())


def _passes(operations: Sequence[Operation]) -> list[tuple[int, Pass | None]]:
    """(operation, pass) of all convolutions; the backward pass has them in reverse order."""
    found = []
    for kind, own in (
        (CONVOLUTION, [one.forward for one in CONVOLUTIONS]),
        (f"{CONVOLUTION}_param_grad", [one.to_weights for one in reversed(CONVOLUTIONS)]),
        (f"{CONVOLUTION}_ip_grad", [one.to_input for one in reversed(CONVOLUTIONS)]),
    ):
        found += zip((k for k, op in enumerate(operations) if op.kind == kind), own, strict=True)
    return found


def _algorithms(op: Operation, own: Pass) -> list[Implementation]:
    return [
        Implementation(
            f"{_NAME}{number}", op.inputs, op.outputs, round(op.cost * ms / own.default_ms), round(mib * 2**20)
        )
        for number, (ms, mib) in own.faster.items()
    ]


def _over_gradient(graph: Graph, op: Operation) -> list[Implementation]:
    """Each way in which ReLU's backward operation can run, writing over the gradient, if nothing else reads that."""
    gradient = next(v for v in op.inputs if graph.operations[graph.producer[v]].is_backward)
    if len(graph.users[gradient]) > 1:
        return []
    return [
        Implementation(f"in_place_{one.name}", one.inputs, one.outputs, one.cost, 0, gradient)
        for one in op.all_implementations
    ]


def _with_workspace(op: Operation, pooled_bytes: int) -> Operation:
    def workspace(name: str) -> int:
        return round(POOLING_WORKSPACE.get(name, 0.0) * pooled_bytes)

    own = tuple(replace(one, workspace_bytes=workspace(one.name)) for one in op.implementations)
    return replace(op, workspace_bytes=workspace("default"), implementations=own)
