"""Rebuild blocks from checkpoints that are on the host."""

from __future__ import annotations

from collections.abc import Iterator

from baselines._offload import offloaded
from baselines._segments import blocks_of, checkpoint_blocks
from remat import Candidate, Problem, strategy


@strategy("offload_checkpoints", baseline=True, copies="own")
def offload_checkpoints(problem: Problem) -> Iterator[Candidate]:
    """One plan for each n: the blocks n, 2 n, ... are rebuilt; all else that the backward pass reads is on the host.

    With n = 1 this is what Unsloth and axolotl do: full checkpointing, with the checkpoints on the host.
    """
    blocks = blocks_of(problem.graph)
    for n in range(1, len(blocks) + 1):
        plan = checkpoint_blocks(problem, blocks[n - 1 :: n]).plan
        yield Candidate(offloaded(problem, plan), {"n": n})
