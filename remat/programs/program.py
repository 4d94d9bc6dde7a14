"""Linear and integer programs and the limits of their solves: collect their rows, scale their numbers for a solver."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import scipy.sparse as sp

SCALED = 1000.0  # a budget, or a sum of costs, becomes at most this: a solver's tolerance of 1e-6 is then 1e-9 of it
TOLERANCE = 1e-6  # relative tolerance of a solver; proven results leave this much room
ABSOLUTE_TOLERANCE = 1e-5  # of an objective in scaled numbers


@dataclass(frozen=True, slots=True, eq=False)
class Program:
    """Minimise ``cost x + offset`` where ``row_lower <= matrix x <= row_upper`` and ``lower <= x <= upper``.

    Attributes:
        matrix: [rows, n] sparse, compressed by rows, float64.
        cost, upper: [n].
        row_lower: [rows].
        is_integer: [n] bool; None for a linear program.
        row_upper: [rows], or one number for all.
        lower: [n], or one number for all.
    """

    matrix: sp.csr_array
    cost: np.ndarray
    upper: np.ndarray
    row_lower: np.ndarray
    is_integer: np.ndarray | None = None
    offset: float = 0.0
    row_upper: np.ndarray | float = np.inf
    lower: np.ndarray | float = 0.0


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of one solve; `nodes` is None for no limit."""

    time_s: float
    threads: int = 1
    seed: int = 0
    gap: float = 1e-4
    nodes: int | None = None


class Rows:
    """Rows ``terms >= lower`` under construction; a kind and a key identify each row."""

    def __init__(self) -> None:
        self._row: list[int] = []
        self._column: list[int] = []
        self._factor: list[float] = []
        self.lower: list[float] = []
        self.kind: list[int] = []
        self.key: list[Sequence[int]] = []

    def add(
        self, terms: Iterable[tuple[int, float]], lower: float, kind: int = 0, key: Sequence[int] = (-1, -1, -1)
    ) -> None:
        """Add one row. Terms are (column, factor); factors of the same column add up."""
        row = len(self.lower)
        for column, factor in terms:
            self._row.append(row)
            self._column.append(column)
            self._factor.append(factor)
        self.lower.append(lower)
        self.kind.append(kind)
        self.key.append(key)

    def add_each(self, terms: Sequence[tuple[np.ndarray, int]], lower: int, kind: int, keys: np.ndarray) -> None:
        """Add a row for each of `keys` [rows, width]. A term is ([rows] columns, factor); column -1 means none."""
        rows = np.arange(len(self.lower), len(self.lower) + len(keys))
        for columns, factor in terms:
            there = columns >= 0
            self._row += rows[there].tolist()
            self._column += columns[there].tolist()
            self._factor += [factor] * int(there.sum())
        self.lower += [lower] * len(keys)
        self.kind += [kind] * len(keys)
        self.key += keys.tolist()

    def matrix(self, n_columns: int, dtype: type = np.float64) -> sp.csr_array:
        """[rows, n_columns]."""
        factors = np.array(self._factor, dtype=dtype)
        return sparse_matrix((len(self.lower), n_columns), (self._row, self._column, factors))


def sparse_matrix(shape: tuple[int, int], *parts: tuple) -> sp.csr_array:
    """A matrix from ``(rows, columns, factors)`` parts, or one factor for a whole part; equal places add up."""
    rows = np.concatenate([np.asarray(part[0], dtype=np.int64) for part in parts])
    columns = np.concatenate([np.asarray(part[1], dtype=np.int64) for part in parts])
    factors = np.concatenate([np.broadcast_to(np.asarray(part[2]), len(part[0])) for part in parts])
    return sp.csr_array((factors, (rows, columns)), shape=shape)


def scale_of(total: float) -> float:
    """Factor that scales `total` (a budget in units, or a sum of costs) down to `SCALED`; 1 if it is smaller."""
    return min(1.0, SCALED / max(total, 1.0))


def least_whole(bound: float, scale: float) -> int:
    """Least whole number that a solver's `bound` proves; `scale` is the `scale_of` the total in the same units."""
    return math.ceil(bound - max(abs(bound) * TOLERANCE, ABSOLUTE_TOLERANCE / scale))


def half_unit_is_lost(units: float) -> bool:
    """Whether half a unit of a budget of `units` is too close to the solver's tolerance to be trusted."""
    return 0.5 * scale_of(units) < 100 * TOLERANCE
