"""Exact and approximate solvers, one strategy in each file; the registry finds them."""

# Version of the results of all strategies of this project, baselines included. Raise it when a strategy may return
# another plan, bound or status than before: stored rows of other versions are then solved again. If only some change,
# raise theirs (``@strategy(version=)``). A changed comment or docstring needs no new version.
VERSION = 5
COPIES_VERSION = 2  # of what `remat.solvers.offload` finds: raised as above, and only rows of solves with a link go
