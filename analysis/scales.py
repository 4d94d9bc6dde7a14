"""Units on axes and in tables: one scale per axis, chosen by its largest number."""

import json
import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import pandas as pd


@dataclass(frozen=True, slots=True)
class Scale:
    """An axis divides its numbers by `factor` and is labelled `unit`; bytes are shown with `digits` decimals."""

    factor: float
    unit: str
    digits: int = 2


def byte_scale(largest_bytes: float) -> Scale:
    """Decimal bytes: GB from half a GB on, else MB, kB or B."""
    for factor, unit in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if largest_bytes >= factor / 2:
            return Scale(factor, unit)
    return Scale(1.0, "B")


def budget_scale(budgets: Iterable[int]) -> Scale:
    """`byte_scale` with enough decimals to tell the budgets apart, at least 2."""
    ordered = sorted({int(budget) for budget in budgets})
    scale = byte_scale(float(ordered[-1]) if ordered else 0.0)
    step = min((b - a for a, b in pairwise(ordered)), default=0)
    digits = math.ceil(-math.log10(step / scale.factor)) if step else 0
    return replace(scale, digits=min(max(digits, 2), 9))


def binary_scale(scale: Scale) -> Scale:
    """The binary unit beside a decimal one: GiB for GB."""
    units = {"GB": (2.0**30, "GiB"), "MB": (2.0**20, "MiB"), "kB": (2.0**10, "KiB")}
    return Scale(*units.get(scale.unit, (1.0, "B")))


def cost_scale(largest_cost: float, unit: str) -> Scale:
    """The largest unit that fits into the cost twice: ns to s, FLOP to TFLOP, any other times 1, 10⁶ or 10⁹."""
    if unit == "ns":
        steps = ((1e9, "s"), (1e6, "ms"), (1e3, "µs"), (1.0, "ns"))
    elif unit.lower().startswith("flop"):
        steps = ((1e12, "TFLOP"), (1e9, "GFLOP"), (1e6, "MFLOP"), (1e3, "kFLOP"), (1.0, "FLOP"))
    else:
        name = unit or "units"
        steps = ((1e9, f"10⁹ {name}"), (1e6, f"10⁶ {name}"), (1.0, name))
    for factor, label in steps:
        if largest_cost >= 2 * factor:
            return Scale(factor, label)
    return Scale(*steps[-1])


def show_cost(cost: float | None, unit: str) -> str:
    """A cost with its unit; ``–`` if there is none."""
    if cost is None or pd.isna(cost):
        return "–"
    scale = cost_scale(cost, unit)
    digits = 0 if scale.factor == 1 else 2
    return f"{cost / scale.factor:,.{digits}f} {scale.unit}"


def show_bytes(size: float | None, unit: Scale) -> str:
    """Bytes in the given scale, without the unit; ``–`` if there are none."""
    if size is None or pd.isna(size):
        return "–"
    return f"{size / unit.factor:,.{unit.digits}f}" if unit.factor > 1 else f"{size:,.0f}"


def show_percent(share: float | None) -> str:
    """A share in percent, with fewer decimals if it is large; ``–`` if there is none."""
    if share is None or pd.isna(share):
        return "–"
    if share == 0:
        return "0 %"
    percent = 100 * share
    digits = 2 if abs(percent) < 10 else 1 if abs(percent) < 100 else 0
    return f"{percent:,.{digits}f} %"


def show_seconds(seconds: float | None) -> str:
    """Wall time; ``–`` if there is none."""
    if seconds is None or pd.isna(seconds):
        return "–"
    return f"{seconds:.0f} s" if seconds >= 100 else f"{seconds:.1f} s" if seconds >= 1 else f"{seconds * 1e3:.0f} ms"


def show_mapping(text: Any, between: str) -> str:
    """The names and values of a JSON object, sorted, `between` each name and its value; any other text as it is."""
    try:
        values = json.loads(text)
    except (TypeError, ValueError):
        return str(text)
    return ", ".join(f"{k}{between}{v}" for k, v in sorted(values.items())) if isinstance(values, dict) else str(text)


def show_count(number: int, noun: str) -> str:
    """``1 plan``, ``2 plans``, ``3 strategies``."""
    if number != 1:
        noun = noun[:-1] + "ies" if noun.endswith("y") else noun + "s"
    return f"{number} {noun}"
