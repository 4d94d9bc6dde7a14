"""What an operation does, and the implementations it can run with (MONeT, Shah et al., ICLR 2021, section 4)."""

from __future__ import annotations

from dataclasses import dataclass

DEFAULT = "default"  # what an operation's own fields describe


@dataclass(frozen=True, slots=True)
class Work:
    """What an operation does, from which a cost model derives its cost.

    Attributes:
        flops: floating-point operations, 2 per multiply-add; None when no rule is known.
        bytes_moved: bytes read plus bytes written, each tensor once.
        dtype: element type that sets the arithmetic rate, e.g. ``float32``.
        signature: canonical JSON from which a profiler can rebuild and time the operation; '' if
            it cannot be rebuilt.
        published_flops: the count of Checkmate's artifact (1 per multiply-add), for layer graphs.
        is_free: costs nothing on any device (constants, variable reads, aliases).
    """

    flops: int | None = None
    bytes_moved: int = 0
    dtype: str = "float32"
    signature: str = ""
    published_flops: int | None = None
    is_free: bool = False


@dataclass(frozen=True, slots=True)
class Implementation:
    """One of several ways to run an operation: with other costs, other inputs, extra outputs, or in place.

    Attributes:
        name: unique within the operation, not ``default``, e.g. ``mask`` or ``im2col``.
        inputs: ids of the values read, each once, ascending.
        outputs: ids of the values produced: of the operation's own, and of extra ones (a packed mask, small indices)
            that only implementations produce. Extra values come after all others in `Graph.values`.
        cost: in the graph's `cost_unit`, non-negative.
        workspace_bytes: scratch memory held only while it runs.
        overwrites: the input in whose storage the first output is written, of the same size, or None. It is gone
            when the operation ends, and the two count once.
        is_lossy: its results differ by more than rounding; solvers use it only where the caller asks for it.
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
