"""Selective activation checkpointing by the kind of operation: keep what costs much."""

from __future__ import annotations

from baselines._segments import blocks_of, checkpoint_blocks
from remat import Candidate, Problem, Skip, strategy
from remat.cost.gpu import operation_class


@strategy("selective", baseline=True, ignores_budget=True)
def selective(problem: Problem) -> Candidate:
    """Checkpoint every block, but keep every second matrix product and all attention outputs in it.

    The policy that trainers of large models set with PyTorch's selective checkpointing: products and attention cost
    much, all else is rebuilt. The blocks are the row of equal ones in the graph. Matrix products count within a block;
    the first one is kept.
    """
    graph, blocks = problem.graph, blocks_of(problem.graph)
    kept = set[int]()
    for block in blocks:
        products = 0
        for k in block:
            kind = graph.operations[k].kind
            is_product = operation_class(kind) == "matmul"
            if "attention" in kind or (is_product and products % 2 == 0):
                kept.update(graph.operations[k].outputs)
            products += is_product
    if not kept:
        raise Skip("its blocks have no matrix product and no attention")
    return checkpoint_blocks(problem, blocks, kept, {"kept": len(kept)})
