"""What printed plans say of places: the arena over the load, and what PyTorch's allocator would need."""

from __future__ import annotations

from remat.arena.allocators import simulate_allocator
from remat.arena.certificate import find_arena
from remat.arena.intervals import intervals_of
from remat.graph import Graph
from remat.plan import Plan
from remat.simulator import Sharing
from remat.units import format_size

MOST_STEPS = 10_000  # of a plan: more would take seconds
LIMIT_S = 1.0  # for the arena


def arena_in_words(graph: Graph, plan: Plan, sharing: Sharing = ()) -> str | None:
    """The arena of a second's search over the load; None for long plans."""
    if len(plan.kinds) > MOST_STEPS:
        return None
    arena = find_arena(graph, plan, time_limit_s=LIMIT_S, sharing=sharing)
    proof = "the smallest" if arena.is_optimal else f"in {LIMIT_S:g} s"
    return f"one block of {arena.ratio:.4f} of the load, {proof}"


def allocator_in_words(graph: Graph, plan: Plan, sharing: Sharing = ()) -> str | None:
    """The smallest limits that steps survive in simulations of PyTorch's allocator; None for long plans."""
    if len(plan.kinds) > MOST_STEPS:
        return None
    buffers = intervals_of(graph, plan, sharing)
    lower, upper, size, load = buffers.lower, buffers.upper, buffers.size, buffers.load
    native, expandable = (simulate_allocator(lower, upper, size, is_expandable=each) for each in (False, True))

    def needs(n_bytes: int) -> str:
        ratio = f", {n_bytes / load:.3f} of the load" if load else ""
        return f"{format_size(graph.fixed_bytes + n_bytes, up=True)}{ratio}"

    return f"simulated: needs {needs(native.limit_bytes)}; with expandable segments {needs(expandable.limit_bytes)}"
