"""The work of an operation, and its implementations (MONeT, Shah et al., ICLR 2021, section 4)."""

from __future__ import annotations

from dataclasses import dataclass

DEFAULT = "default"  # the implementation that an operation's own fields describe


@dataclass(frozen=True, slots=True)
class Work:
    """Work of an operation, from which a cost model derives its cost.

    Attributes:
        flops: floating-point operations, 2 per multiply-add; None if no rule is known.
        bytes_moved: bytes read plus bytes written, each tensor once.
        dtype: element type that sets the arithmetic rate, e.g. ``float32``.
        signature: canonical JSON from which a profiler can rebuild and time the operation; '' if
            it cannot.
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
    """One of several implementations of an operation: other costs, other inputs, extra outputs, or in place.

    Attributes:
        name: unique within the operation, not ``default``, e.g. ``mask`` or ``im2col``.
        inputs: ids of the values read, each once, ascending.
        outputs: ids of the values produced: some of the operation's own, and extra values (a packed mask, small
            indices) that no default implementation produces. Extra values come last in `Graph.values`.
        cost: in the graph's `cost_unit`, non-negative.
        workspace_bytes: scratch memory held only while it runs.
        overwrites: the input whose storage the first output, of the same size, takes, or None. The input is gone
            when the operation ends; the two count once.
        is_lossy: its results differ by more than rounding; solvers use it only if the caller asks for it.
        work: input of cost models.
    """

    name: str
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    cost: int = 0
    workspace_bytes: int = 0
    overwrites: int | None = None
    is_lossy: bool = False
    work: Work | None = None
