"""Execution of plans in any framework: budgets, the plan that a module carries, its file."""

from remat.execution.planning import (
    UNKNOWN,
    Peaks,
    PlanOptions,
    announce_pause,
    cheapest_fitting,
    check_options,
    default_cache,
    find_plan,
    is_fraction,
    parse_budget,
)
from remat.execution.step_plan import (
    Fingerprint,
    Generated,
    Planned,
    StepPlan,
    copies_of,
    fingerprint_of,
    implementations_of,
)

# Version of step measurements. Raise it when the same plan may take another time or peak, so that stored measurements
# are repeated.
VERSION = 1

__all__ = [
    "UNKNOWN", "Fingerprint", "Generated", "Peaks", "PlanOptions", "Planned", "StepPlan", "announce_pause",
    "cheapest_fitting", "check_options", "copies_of", "default_cache", "find_plan", "fingerprint_of",
    "implementations_of", "is_fraction", "parse_budget",
]  # fmt: skip
