"""Buffers of anybody's: MiniMalloc's CSV files."""

from __future__ import annotations

import csv
import io
import os
from collections.abc import Sequence

import numpy as np

from remat.errors import InvalidInput, shown
from remat.files import read_text, write_text

COLUMNS = ("id", "lower", "upper", "size")
LARGEST = 1 << 62


def read_buffers(
    path: str | os.PathLike[str], *, is_inclusive: bool = False
) -> tuple[list[str], np.ndarray, np.ndarray, np.ndarray]:
    """(ids, lower, upper, size) of the buffers in a CSV file with a line ``id,lower,upper,size`` first.

    A buffer is live in [lower, upper), or with `is_inclusive` in [lower, upper]. The file may be compressed with gzip.

    Raises:
        InvalidInput: names the file and the line.
    """
    where = os.fspath(path)
    rows = csv.reader(io.StringIO(read_text(path)))
    head = [name.strip() for name in next(rows, [])]
    if not set(COLUMNS) <= set(head):
        raise InvalidInput(f"{where}: the first line must name the columns {','.join(COLUMNS)}, not {shown(head)}")
    places = [head.index(name) for name in COLUMNS]
    ids, numbers = list[str](), list[list[int]]()
    for row in rows:
        if not row:
            continue
        try:
            ids.append(row[places[0]])
            numbers.append([_number(row[place]) for place in places[1:]])
        except (IndexError, ValueError):
            wrong = ",".join(row)
            raise InvalidInput(f"{where}: line {rows.line_num}: {shown(wrong)} is no id and three integers") from None
    lower, upper, size = np.array(numbers, dtype=np.int64).reshape(-1, 3).T
    return ids, lower, upper + is_inclusive, size


def _number(text: str) -> int:
    number = int(text)
    if abs(number) > LARGEST:
        raise ValueError
    return number


def write_buffers(
    path: str | os.PathLike[str], ids: Sequence[str], lower: np.ndarray, upper: np.ndarray, size: np.ndarray,
    offsets: np.ndarray,
) -> None:  # fmt: skip
    """Write the buffers with a column ``offset``, as MiniMalloc does."""
    text = io.StringIO()
    table = csv.writer(text, lineterminator="\n")
    table.writerow([*COLUMNS, "offset"])
    table.writerows(zip(ids, lower.tolist(), upper.tolist(), size.tolist(), offsets.tolist(), strict=True))
    write_text(path, text.getvalue())
