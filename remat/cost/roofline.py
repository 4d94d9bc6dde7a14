"""Cost = time by the roofline: the slower of arithmetic and memory traffic, plus the launch.

S. Williams, A. Waterman, D. Patterson: Roofline, CACM 52(4), 2009. Peaks are scaled by achieved
fractions (`Gpu.efficiency`). Caches, occupancy, algorithm choice and overlap are not modelled;
docs/roofline.md shows how far that carries.
"""

from __future__ import annotations

from remat.cost.gpu import Gpu, matrix_dtype, operation_class
from remat.graph import Graph, Work


def operation_ns(kind: str, work: Work, gpu: Gpu) -> int:
    """Nanoseconds of one operation on `gpu`; an operation without a FLOP rule moves bytes only."""
    if work.is_free:
        return 0
    name = operation_class(kind)
    rate = gpu.peak_flops[matrix_dtype(kind, work.dtype, gpu)]
    arithmetic_s = (work.flops or 0) / (
        rate * gpu.efficiency.get(name if name in ("convolution", "matmul") else "", 1.0)
    )
    of_bandwidth = gpu.efficiency[name if name in ("normalization", "pooling") else "memory"]
    traffic_s = work.bytes_moved / (gpu.bandwidth_bytes_per_s * of_bandwidth)
    return max(1, round((max(arithmetic_s, traffic_s) + gpu.launch_overhead_s) * 1e9))


def roofline(graph: Graph, gpu: Gpu) -> tuple[list[int], set[str]]:
    """(cost of each operation in ns [N], kinds without a FLOP rule)."""
    costs, unknown = [], set()
    for op in graph.operations:
        work = op.work
        if work is None:
            work = Work(bytes_moved=sum(graph.values[v].bytes for v in (*op.inputs, *op.outputs)))
        if work.flops is None and not work.is_free:
            unknown.add(op.kind)
        costs.append(operation_ns(op.kind, work, gpu))
    return costs, unknown
