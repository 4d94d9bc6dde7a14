"""Which implementation each operation runs with, decided together with what to keep (MONeT, ICLR 2021)."""

from remat.joint.choose import Chosen, choose
from remat.joint.lift import lift_default, solve_default
from remat.joint.search import solve_chosen

__all__ = ["Chosen", "choose", "lift_default", "solve_chosen", "solve_default"]
