"""remat: plan which activations to keep and which to recompute.

    import remat
    graph = remat.load_graph("instance.json")
    solution = remat.solve(graph, budget="5GiB", strategy="checkmate_milp")
    trace = remat.simulate(graph, solution.plan)

Frameworks are imported only by the frontends and executors that need them.
"""

from remat import arena, zoo
from remat.arena import Arena
from remat.bounds.certificate import verify_bound
from remat.bounds.min_budget import MinBudget, min_budget
from remat.certificate import BoundCertificate
from remat.context import Context
from remat.errors import InvalidGraph, InvalidInput, InvalidPlan, MissingPackage, RematError, Skip, UnknownName
from remat.frontends.json import load_graph, save_graph
from remat.graph import Graph, Operation, Value, Work
from remat.incumbent import Incumbent, Progress
from remat.link import Link
from remat.plan import Plan, Scope
from remat.problem import Problem, SolveOptions
from remat.registry import strategies, strategy
from remat.simulator import Trace, simulate
from remat.solution import Candidate, Ending, Member, Outcome, Solution, Status
from remat.solving.api import family, solve, solve_sweep

__version__ = "0.1.0"

__all__ = [
    "Arena", "BoundCertificate", "Candidate", "Context", "Ending", "Graph", "Incumbent", "InvalidGraph", "InvalidInput",
    "InvalidPlan", "Link", "Member", "MinBudget", "MissingPackage", "Operation", "Outcome", "Plan", "Problem",
    "Progress", "RematError", "Scope", "Skip", "Solution", "SolveOptions", "Status", "Trace", "UnknownName", "Value",
    "Work", "arena", "family", "load_graph", "min_budget", "save_graph", "simulate", "solve", "solve_sweep",
    "strategies", "strategy", "verify_bound", "zoo",
]  # fmt: skip
