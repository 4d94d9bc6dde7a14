"""Exact and approximate solvers, one strategy a file; the registry finds them."""

# Of the results of every strategy of this project, baselines included. Raise it when one may return another plan, bound
# or status than before: stored rows of other versions are then solved again. A comment or a docstring leaves it alone.
VERSION = 1
