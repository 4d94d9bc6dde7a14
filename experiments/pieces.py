"""Finished pieces of a measuring command in one JSON file, so that the command goes on with those that are missing.

A piece is the rows that are measured together, e.g. those of one model. Each row says what it was ``made`` from:
settings, versions, processor. A piece that was made from anything else is missing. It is replaced when the new one is
there, not before.
"""

from __future__ import annotations

import datetime
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from experiments.provenance import torch_and_cpu
from experiments.store import write_json
from remat.errors import InvalidInput
from remat.files import read_json

MADE = "made"


@dataclass(frozen=True, slots=True)
class Pieces:
    """The file of a command.

    Attributes:
        by: field of a row that names its piece.
        made: what this run makes its rows from; JSON-ready.
    """

    path: Path
    by: str
    made: Mapping[str, Any]

    def rows(self) -> list[dict[str, Any]]:
        """Those of the file. Rows of older files have no `MADE` of their own: the head of the file tells it."""
        if not self.path.exists():
            return []
        stored = read_json(self.path)
        of_head = {key: stored.get(key) for key in self.made}
        return [{MADE: of_head, **row} for row in stored["rows"]]

    def has(self, piece: object) -> bool:
        """Whether the file has the piece, made from the same."""
        made = [row[MADE] for row in self.rows() if row[self.by] == piece]
        return bool(made) and all(each == self.made for each in made)

    def put(self, piece: object, rows: Iterable[Mapping[str, Any]]) -> None:
        """Write the file with these rows in place of the piece's."""
        before, new = self.rows(), [{**row, MADE: dict(self.made)} for row in rows]
        at = next((i for i, row in enumerate(before) if row[self.by] == piece), len(before))
        others = [[row for row in part if row[self.by] != piece] for part in (before[:at], before[at:])]
        today = datetime.date.today().isoformat()
        write_json(self.path, {"date": today, **self.made, "rows": [*others[0], *new, *others[1]]})


def pieces_of(path: Path, by: str, settings: Mapping[str, Any]) -> Pieces:
    """The file of a command that runs PyTorch, with its version and the processor beside the settings."""
    return Pieces(path, by, {**torch_and_cpu(), **settings})


def read_pieces(path: Path, command: str) -> dict[str, Any]:
    """The file, whose head holds for all of its rows.

    Raises:
        InvalidInput: there is no file, or its rows were made from different settings, by different versions or
            processors.
    """
    stored = read_json(path)
    if any(row[MADE] != {key: stored.get(key) for key in row[MADE]} for row in stored["rows"] if MADE in row):
        raise InvalidInput(f"{path}: its rows have different settings, versions or processors; run {command}")
    return stored
