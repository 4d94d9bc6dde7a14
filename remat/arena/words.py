"""What printed plans say of places: the arena over the load, and what PyTorch's allocator would need."""

from __future__ import annotations

from remat.arena.allocators import simulate_allocator
from remat.arena.intervals import Intervals, intervals_of
from remat.arena.placing import place
from remat.graph import Graph
from remat.plan import Plan
from remat.simulator import Sharing
from remat.units import format_size

MOST_BUFFERS = 5_000  # of a plan: more would take seconds
LIMIT_S = 1.0  # for the arena


def places_in_words(graph: Graph, plan: Plan, sharing: Sharing = (), *, is_cuda: bool = True) -> dict[str, str]:
    """[label] the arena of a second's search over the load, and for CUDA the allocator; empty for long plans."""
    buffers = intervals_of(graph, plan, sharing)
    if len(buffers.size) > MOST_BUFFERS:
        return {}
    placed = place(buffers.lower, buffers.upper, buffers.size, time_limit_s=LIMIT_S)
    proof = "the smallest" if placed.is_optimal else f"in {LIMIT_S:g} s"
    words = {"places": f"one block of {placed.ratio:.4f} of the load, {proof}"}
    return words | ({"CUDA allocator": allocator_in_words(buffers, graph.fixed_bytes)} if is_cuda else {})


def allocator_in_words(buffers: Intervals, fixed_bytes: int) -> str:
    """The smallest limits that steps survive in simulations of PyTorch's allocator."""
    if len(buffers.size) > MOST_BUFFERS:
        return "not simulated: the plan is too long"
    lower, upper, size, load = buffers.lower, buffers.upper, buffers.size, buffers.load
    native, expandable = (simulate_allocator(lower, upper, size, is_expandable=each) for each in (False, True))

    def needs(n_bytes: int) -> str:
        ratio = f", {n_bytes / load:.3f} of the load" if load else ""
        return f"{format_size(fixed_bytes + n_bytes, up=True)}{ratio}"

    return f"simulated: needs {needs(native.limit_bytes)}; with expandable segments {needs(expandable.limit_bytes)}"
