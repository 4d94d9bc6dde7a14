"""Cost = floating-point operations: the published experiments' device-independent cost."""

from __future__ import annotations

from remat.graph import Graph, Operation, Work


def flop_costs(graph: Graph) -> tuple[list[int], set[str]]:
    """(cost of each operation in FLOPs [N], kinds without a rule).

    Layer graphs carry the count of Checkmate's artifact (1 per multiply-add), which takes precedence;
    elsewhere a multiply-add counts 2. An operation without a rule costs the bytes that it moves.
    """
    costs, unknown = [], set()
    for op in graph.operations:
        work = work_of(graph, op)
        flops = work.flops if work.published_flops is None else work.published_flops
        if work.is_free:
            flops = 0
        elif flops is None:
            unknown.add(op.kind)
            flops = work.bytes_moved
        costs.append(flops)
    return costs, unknown


def work_of(graph: Graph, op: Operation) -> Work:
    """The work of `op`; if its frontend gave none, to move its inputs and outputs."""
    return op.work or Work(bytes_moved=sum(graph.values[v].bytes for v in (*op.inputs, *op.outputs)))
