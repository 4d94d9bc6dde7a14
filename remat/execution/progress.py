"""The line that a training loop prints before it pauses to plan a step."""

from __future__ import annotations

import logging

_log = logging.getLogger("remat")


def announce_pause(name: str, inputs: str, time_limit_s: float, instead: str) -> None:
    """Log a warning that a step is planned now, and how to plan it earlier.

    The warning goes to the logger ``remat``: to stderr, unless the program configures logging.

    Args:
        name: of the model.
        inputs: shapes and dtypes for which the step is planned.
        time_limit_s: of the solver.
        instead: the call that plans ahead, e.g. ``model.prepare(...)``.
    """
    _log.warning(
        "remat: the training loop pauses to plan '%s' for %s: up to %g s of search, and measurements of kernels that "
        "are new; %s before the loop avoids this", name, inputs, time_limit_s, instead,
    )  # fmt: skip
