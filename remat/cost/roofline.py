"""Cost = time by the roofline: the slower of arithmetic and memory traffic, plus the launch.

S. Williams, A. Waterman, D. Patterson: Roofline, CACM 52(4), 2009. Peaks are scaled by achieved
fractions (`Gpu.efficiency`). Caches, occupancy, choice of algorithm and overlap are not modelled;
docs/results/roofline.md gives the resulting errors.
"""

from __future__ import annotations

from remat.cost.flops import work_of
from remat.cost.gpu import Gpu, matrix_dtype, operation_class
from remat.graph import Graph, Work

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


def roofline_costs(graph: Graph, gpu: Gpu) -> tuple[list[int], set[str]]:
    """(cost of each operation in ns [N], kinds without a FLOP rule)."""
    costs, unknown = [], set()
    for op in graph.operations:
        work = work_of(graph, op)
        if work.flops is None and not work.is_free:
            unknown.add(op.kind)
        costs.append(operation_ns(op.kind, work, gpu, op.is_backward))
    return costs, unknown
