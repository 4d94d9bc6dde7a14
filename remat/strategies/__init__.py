"""Exact and approximate solvers, one file each; found through the registry."""
