"""Compiled local search over retention intervals: the engine of the `search` strategy."""

from remat.search.anneal import Annealer, Best, is_warm, minimise_cost

__all__ = ["Annealer", "Best", "is_warm", "minimise_cost"]
