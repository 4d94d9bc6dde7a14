"""Full activation checkpointing: a checkpoint around every block, the usual advice for large models."""

from __future__ import annotations

from baselines._segments import blocks_of, checkpoint_blocks
from remat import Candidate, Problem, strategy


@strategy("full", baseline=True, ignores_budget=True)
def full(problem: Problem) -> Candidate:
    """Keep the input of every block and rebuild the block when the backward pass enters it.

    What trainers of large models call full activation checkpointing: `torch.utils.checkpoint` around each block. The
    blocks are the row of equal ones in the graph. Deviation: values that are read outside of their block stay, and the
    block's last operations are not rebuilt if nothing reads them; `torch.utils.checkpoint` also stops early.
    """
    blocks = blocks_of(problem.graph)
    return checkpoint_blocks(problem, blocks, parameters={"blocks": len(blocks)})
