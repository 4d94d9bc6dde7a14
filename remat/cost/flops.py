"""Cost = floating-point operations: the published experiments' device-independent cost."""

from __future__ import annotations

from remat.graph import Graph


def flop_costs(graph: Graph) -> tuple[list[int], set[str]]:
    """(cost of each operation in FLOPs [N], kinds without a rule).

    Layer graphs carry the count of Checkmate's artifact (1 per multiply-add), which is used where it
    is there; elsewhere a multiply-add counts 2. An operation without a rule costs the bytes it moves.
    """
    costs, unknown = [], set()
    for op in graph.operations:
        work = op.work
        if work is not None and work.is_free:
            costs.append(0)
        elif work is not None and work.published_flops is not None:
            costs.append(work.published_flops)
        elif work is not None and work.flops is not None:
            costs.append(work.flops)
        else:
            unknown.add(op.kind)
            touched = sum(graph.values[v].bytes for v in (*op.inputs, *op.outputs))
            costs.append(touched if work is None else work.bytes_moved)
    return costs, unknown
