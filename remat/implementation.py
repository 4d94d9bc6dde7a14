"""Implementations: several ways to run one operation (MONeT, Shah et al., ICLR 2021, section 4)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from remat.graph import Work

DEFAULT = "default"  # what an operation's own fields describe


@dataclass(frozen=True, slots=True)
class Implementation:
    """Another way to run an operation: with other costs, other inputs, extra outputs, or in place.

    Attributes:
        name: unique within the operation, not ``default``, e.g. ``mask`` or ``im2col``.
        inputs: ids of the values read, each once, ascending.
        outputs: ids of the values produced: of the operation's own, and of extra ones (a packed mask, small indices)
            that only implementations produce. Extra values come after all others in `Graph.values`.
        cost: in the graph's `cost_unit`, non-negative.
        workspace_bytes: scratch memory held only while it runs.
        overwrites: the input in whose storage the first output is written, of the same size, or None. It is gone
            when the operation ends, and the two count once.
        is_lossy: its results differ by more than rounding; solvers take it only where they are told to.
        work: what it does, for cost models.
    """

    name: str
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    cost: int = 0
    workspace_bytes: int = 0
    overwrites: int | None = None
    is_lossy: bool = False
    work: Work | None = None
