"""Sizes in bytes: read what users write, and print sizes, costs and limits."""

from __future__ import annotations

import math
import operator
import re
from numbers import Real
from typing import Any

import numpy as np

from remat.errors import InvalidInput, plain, shown

_FACTORS = {"": 1, "B": 1}
_FACTORS |= {f"{p}B": 10 ** (3 * (i + 1)) for i, p in enumerate("KMGT")}
_FACTORS |= {f"{p}IB": 2 ** (10 * (i + 1)) for i, p in enumerate("KMGT")}
_SIZE = re.compile(r"\s*([+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?)\s*([A-Za-z]*)\s*")
MAX_BYTES = 2**60  # so that sums of sizes stay far below the limit of int64


def parse_size(size: int | float | str) -> int:
    """Bytes from ``8GB`` (8e9), ``8GiB`` (8 * 2**30), ``1.5e9`` or an integer number of bytes.

    Raises:
        InvalidInput: negative, unparsable, fractional bytes without a unit, or absurdly large.
    """
    if isinstance(size, np.integer):
        size = int(size)
    if isinstance(size, bool) or not isinstance(size, (int, float, str)):
        raise InvalidInput(f"cannot read {shown(size)} as a size; write an integer or e.g. 8GB or 7.5GiB")
    if isinstance(size, str):
        match = _SIZE.fullmatch(size)
        factor = _FACTORS.get(match[2].upper()) if match else None
        if match is None or factor is None:
            raise InvalidInput(f"cannot read '{plain(size)}' as a size; write e.g. 8GB, 7.5GiB, 500MB or bytes")
        number = float(match[1])
        is_whole = match[1].lstrip("+-").isdecimal() and abs(number) <= MAX_BYTES  # Python reads no longer ones
        exact = int(match[1]) * factor if is_whole else number * factor
        if not match[2] and math.isfinite(number) and number != int(number):
            raise InvalidInput(f"'{size:.60}' is a fraction of a byte; give a unit, e.g. {size:.60}GB")
    else:
        exact = size
        if isinstance(size, float) and not math.isfinite(size):
            raise InvalidInput(f"a size must be a finite number, not {size}")
        if isinstance(size, float) and not size.is_integer():
            raise InvalidInput(f"{size} is a fraction of a byte; write e.g. '{size}GB'")
    if exact < 0:
        raise InvalidInput("a size cannot be negative" + (f": {size}" if exact >= -MAX_BYTES else ""))
    if exact > MAX_BYTES:  # the number itself may have thousands of digits
        raise InvalidInput(f"a size cannot be larger than {MAX_BYTES} bytes; check the unit")
    return round(exact)


def format_size(size_bytes: int, digits: int = 2, *, up: bool = False) -> str:
    """A size in both units, e.g. ``16.00 GB (14.90 GiB)``, with `digits` decimals; `up` rounds a budget up."""
    for power, decimal, binary in ((3, "GB", "GiB"), (2, "MB", "MiB"), (1, "kB", "KiB")):
        if abs(size_bytes) >= 1000**power:
            readings = []
            for factor, unit in ((1000**power, decimal), (1024**power, binary)):
                size = -(-size_bytes * 10**digits // factor) / 10**digits if up else size_bytes / factor
                readings.append(f"{size:.{digits}f} {unit}")
            return f"{readings[0]} ({readings[1]})"
    return f"{size_bytes} B"


def format_cost(cost: int | float, unit: str) -> str:
    """A cost for people: milliseconds if the unit is ``ns``, GFLOP if it is flop, else the number with its unit."""
    if unit == "ns":
        return f"{cost / 1e6:.2f} ms"
    if unit.lower().startswith("flop"):
        return f"{cost / 1e9:.3f} GFLOP"
    return f"{cost:g} {unit}"


def check_time_limit(seconds: object, *, may_be_zero: bool = False) -> None:
    """Raise `InvalidInput` if `seconds` is no positive number (or 0, if it may be)."""
    try:
        number = float(seconds) if isinstance(seconds, Real) and not isinstance(seconds, bool) else math.nan
    except OverflowError:
        number = math.nan
    if not (number > 0 or (may_be_zero and number == 0)):
        raise InvalidInput(f"time limit must be a positive number of seconds, not {shown(seconds)}")


def parse_seed(seed: Any) -> int:
    """The integer; raises `InvalidInput` for anything else."""
    try:
        return operator.index(seed)  # NumPy's integers too
    except TypeError:
        raise InvalidInput(f"seed must be an integer, not {shown(seed)}") from None
