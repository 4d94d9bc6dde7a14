"""Modelled costs: floating-point operations as in the published experiments, or time by the roofline.

The roofline is the slower of arithmetic and memory traffic, plus the launch.

S. Williams, A. Waterman, D. Patterson: Roofline, CACM 52(4), 2009. Peaks are scaled by achieved
fractions (`Gpu.efficiency`). Caches, occupancy, choice of algorithm and overlap are not modelled;
docs/results/roofline.md gives the resulting errors.
"""

from __future__ import annotations

from remat.cost.gpu import Gpu, matrix_dtype, operation_class
from remat.graph import Graph, Operation, Work

TRAFFIC_KEYS = ("normalization", "pooling", "pooling_backward")


def operation_ns(kind: str, work: Work, gpu: Gpu, is_backward: bool = False) -> int:
    """Nanoseconds of one operation on `gpu`; without a FLOP rule only its memory traffic counts."""
    if work.is_free:
        return 0
    arithmetic, traffic = efficiency_keys(kind, is_backward)
    rate = gpu.peak_flops[matrix_dtype(kind, work.dtype, gpu)] * (gpu.efficiency[arithmetic] if arithmetic else 1.0)
    arithmetic_s = (work.flops or 0) / rate
    traffic_s = work.bytes_moved / (gpu.bandwidth_bytes_per_s * gpu.efficiency[traffic])
    return max(1, round((max(arithmetic_s, traffic_s) + gpu.launch_overhead_s) * 1e9))


def efficiency_keys(kind: str, is_backward: bool) -> tuple[str | None, str]:
    """Keys of `Gpu.efficiency` for the arithmetic rate (None: not scaled) and the bandwidth of an operation."""
    name = operation_class(kind)
    if name == "pooling" and is_backward:
        name = "pooling_backward"  # scatters: per byte several times slower than the forward operation
    is_matrix_work = name in ("convolution", "matmul")
    return name if is_matrix_work else None, name if name in TRAFFIC_KEYS else "memory"


def modelled_costs(graph: Graph, gpu: Gpu | None) -> tuple[list[int], set[str]]:
    """([N] cost of each operation, kinds without a FLOP rule): nanoseconds on a device, or without one FLOPs.

    Layer graphs carry the count of Checkmate's artifact (1 FLOP per multiply-add), which takes precedence; elsewhere a
    multiply-add counts 2. An operation without a rule costs a FLOP for each byte that it moves.
    """
    costs, unknown = [], set[str]()
    for op in graph.operations:
        work = work_of(graph, op)
        flops = work.flops if gpu is not None or work.published_flops is None else work.published_flops
        if flops is None and not work.is_free:
            unknown.add(op.kind)
        if gpu is not None:
            costs.append(operation_ns(op.kind, work, gpu, op.is_backward))
        else:
            costs.append(0 if work.is_free else work.bytes_moved if flops is None else flops)
    return costs, unknown


def work_of(graph: Graph, op: Operation) -> Work:
    """The work of `op`; if its frontend gave none, to move its inputs and outputs."""
    return op.work or Work(bytes_moved=sum(graph.values[v].bytes for v in (*op.inputs, *op.outputs)))
