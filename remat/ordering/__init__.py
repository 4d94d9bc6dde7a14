"""Topological orders with a low peak, and plans on a reordered graph: the free scope."""

from remat.ordering.anneal import Order, anneal_orders
from remat.ordering.construct import constructive_orders
from remat.ordering.relabel import plan_in_original, reordered

__all__ = ["Order", "anneal_orders", "constructive_orders", "plan_in_original", "reordered"]
