"""Arenas: a place for every byte of a plan, and places for intervals of anybody's.

`place` finds offsets for live intervals. `Plan.arena` finds an `Arena` for a plan; `remat check` verifies its file
(remat-arena/1) without a solver. Greedy orders come first, then a local search and a complete one, which proves optima.
`simulate_allocator` says what PyTorch's own allocator would need, by a simulation.
"""

from remat.arena.allocators import SimulatedNeed, simulate_allocator
from remat.arena.buffers import read_buffers, write_buffers
from remat.arena.certificate import ARENA_FORMAT, Arena, arena_of_document, check_form, find_arena
from remat.arena.intervals import Intervals, intervals_of, load_of
from remat.arena.placing import Placement, compile_places, place
from remat.arena.words import allocator_in_words, places_in_words

__all__ = [
    "ARENA_FORMAT", "Arena", "Intervals", "Placement", "SimulatedNeed", "allocator_in_words", "arena_of_document",
    "check_form", "compile_places", "find_arena", "intervals_of", "load_of", "place", "places_in_words", "read_buffers",
    "simulate_allocator", "write_buffers",
]  # fmt: skip
