"""Exact and approximate solvers, one strategy a file; the registry finds them."""
