"""The category of this package's warnings."""

from __future__ import annotations


class CostWarning(UserWarning):
    """Some costs are not what the cost model promises; the message says which and why."""
