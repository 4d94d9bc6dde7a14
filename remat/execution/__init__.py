"""What executing a plan needs in any framework: budgets, the plan a module carries, its file."""

from remat.execution.planning import Peaks, find_plan, parse_budget
from remat.execution.step_plan import Fingerprint, StepPlan, fingerprint_of

__all__ = ["Fingerprint", "Peaks", "StepPlan", "find_plan", "fingerprint_of", "parse_budget"]
