"""The price of memory: the slope of the proven lower bound in the budget, from the multipliers that prove it."""

from __future__ import annotations

import time
from dataclasses import dataclass

from remat.bounds.windows import WindowBound
from remat.certificate import BoundCertificate
from remat.errors import RematError
from remat.graph import Graph
from remat.plan import parse_scope
from remat.problem import Problem

GIB = 2**30


@dataclass(frozen=True, slots=True)
class ShadowPrice:
    """The price of memory at one budget.

    Attributes:
        cost_per_byte: decrease of the bound for each further byte, in the graph's cost unit; never negative.
        bound: proven lower bound on cost at this budget, without cuts.
        certificate: proof of the bound; its rows of memory give the price.
    """

    budget_bytes: int
    cost_per_byte: float
    bound: int
    certificate: BoundCertificate

    @property
    def per_gib(self) -> float:
        """Cost units for each GiB."""
        return self.cost_per_byte * GIB


def price_of(certificate: BoundCertificate) -> float:
    """Cost units for each byte of budget, for the bound that a certificate without knapsack rows proves.

    The bound of fixed multipliers is linear in the budget, as long as the same values fit beside each operation.
    With each further byte of budget, the right side of each row of memory falls by a byte (LP duality: the multipliers
    of the optimum are the bound's slope). A knapsack row holds for one budget only, so it has no slope.

    Raises:
        RematError: the certificate uses knapsack rows.
    """
    if certificate.multipliers.get("knapsack"):
        raise RematError("a bound with knapsack rows holds for its own budget only and has no price")
    rows = [row for kind in ("memory", "slot") for row in certificate.multipliers.get(kind, ())]
    return sum(row[-1] for row in rows) / certificate.denominator


def shadow_price(graph: Graph, budget_bytes: int, *, scope: str = "staged", time_limit_s: float = 60.0) -> ShadowPrice:
    """The slope of the bound of the window relaxation (`remat.programs.windows`) at a budget.

    This is the price of the relaxation. The cost of the integer optimum falls in steps as the budget grows; between two
    budgets it may fall by more or by less.

    Raises:
        RematError: the relaxation was not solved in time, or no plan fits.
    """
    windows = WindowBound(Problem(graph, budget_bytes, parse_scope(scope)), with_cuts=False)
    windows.run(time.monotonic() + time_limit_s)
    if not windows.rounds:
        raise RematError(f"no LP bound of '{graph.name}' at {budget_bytes} bytes within {time_limit_s:g} s")
    nothing = BoundCertificate(graph.name, graph.sha256(), budget_bytes, parse_scope(scope), graph.least_cost, 1, {})
    proof = windows.best or nothing
    return ShadowPrice(budget_bytes, price_of(proof), proof.bound, proof)
