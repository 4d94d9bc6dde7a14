"""Buffers of anybody's: MiniMalloc's CSV files."""

from __future__ import annotations

import csv
import io
import os
import re
from collections.abc import Sequence

import numpy as np

from remat.errors import InvalidInput, shown, warn
from remat.files import read_text, write_text

COLUMNS = ("id", "lower", "upper", "size")
# MiniMalloc's other names of these columns, and its columns that are not read.
ALSO = {"buffer": "id", "buffer_id": "id", "begin": "lower", "start": "lower", "end": "upper"}
END = "end"  # upper ends of this name are inclusive there
LARGEST = 1 << 62
_NUMBER = re.compile(r"[+-]?[0-9]{1,20}")


def read_buffers(
    path: str | os.PathLike[str], *, is_inclusive: bool = False
) -> tuple[list[str], np.ndarray, np.ndarray, np.ndarray]:
    """(ids, lower, upper, size) of the buffers in a CSV file with a line ``id,lower,upper,size`` first.

    A buffer is live in [lower, upper), or in [lower, upper] with `is_inclusive` or if the column is called ``end``, as
    MiniMalloc has it. A warning says that a column ``offset`` is not read. The file may be compressed with gzip.

    Raises:
        InvalidInput: names the file and the line; also if a buffer has an alignment or gaps, which no search knows.
    """
    where = os.fspath(path)
    rows = csv.reader(io.StringIO(read_text(path), newline=None))
    try:
        head = [name.strip() for name in next(rows, [])]
        known = [ALSO.get(name, name) for name in head]
        if not set(COLUMNS) <= set(known):
            raise InvalidInput(f"{where}: the first line must name the columns {','.join(COLUMNS)}, not {shown(head)}")
        if len(set(known)) != len(known):
            raise InvalidInput(f"{where}: the first line names a column twice: {shown(head)}")
        ids, numbers = list[str](), list[list[int]]()
        for row in rows:
            if not "".join(row).strip():
                continue
            at = f"{where}: line {rows.line_num}: {shown(','.join(row))}"
            if len(row) != len(head):
                raise InvalidInput(f"{at} has {len(row)} entries, but the first line {len(head)}")
            entries = dict(zip(known, map(str.strip, row), strict=True))
            if entries.get("alignment", "1") != "1" or entries.get("gaps"):
                raise InvalidInput(f"{at} has an alignment or gaps, which are not known here; leave these columns out")
            ids.append(row[known.index("id")])
            numbers.append([_number(entries[name], at) for name in COLUMNS[1:]])
    except csv.Error as error:
        raise InvalidInput(f"{where}: line {rows.line_num}: cannot be read as CSV: {error}") from None
    if "offset" in known:
        warn(f"{where}: the offsets in it are not read; all buffers are placed anew")
    lower, upper, size = np.array(numbers, dtype=np.int64).reshape(-1, 3).T
    return ids, lower, upper + (is_inclusive or END in head), size


def _number(text: str, at: str) -> int:
    if _NUMBER.fullmatch(text) is None or abs(int(text)) > LARGEST:
        raise InvalidInput(f"{at} is no id and three integers")
    return int(text)


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
