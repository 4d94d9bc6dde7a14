"""Checkpoint every n-th block and keep the others."""

from __future__ import annotations

from collections.abc import Iterator

from baselines._segments import blocks_of, checkpoint_blocks
from remat import Candidate, Problem, strategy


@strategy("every_n", baseline=True, ignores_budget=True)
def every_n(problem: Problem) -> Iterator[Candidate]:
    """One plan for each n: the blocks n, 2 n, ... are rebuilt for the backward pass, the others are kept.

    What people set by hand where memory is short by a little (torchtitan's ``selective`` with a number, for example).
    The blocks are the row of equal ones in the graph; n = 1 is `full`.
    """
    blocks = blocks_of(problem.graph)
    for n in range(2, len(blocks) + 1):
        yield checkpoint_blocks(problem, blocks[n - 1 :: n], parameters={"n": n})
