"""Finished pieces of a run as a few files under ``results/``: enough to draw it, and to continue it in any checkout.

Each part has two tables. ``<part>.parquet`` has a row for each solve: the columns of a row, and its plan.
``<part>.files.parquet`` has the other files of the run: documents, families, graphs that are ours, remembered results.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import pyarrow as pa

from experiments.row import Row
from experiments.solving import is_final
from experiments.store import FAMILY_SCHEMA, ROW_SCHEMA, Store
from remat.errors import InvalidInput
from remat.files import read_table, write_table, write_text

EVERY_S = 300.0  # between two packings while a part runs
SOLVES = ROW_SCHEMA.append(pa.field("plan", pa.string()))
FILES = pa.schema({"path": pa.string(), "content": pa.string()})
RUN, STORE = "run", "store"  # first part of a file's path


@dataclass(frozen=True, slots=True)
class Pack:
    """The pieces of a run: of a paper, whose parts have documents and folders of their names.

    Attributes:
        folder: where they are, e.g. ``results/study/paper``.
        run: the run's folder.
        head: the run's main file.
    """

    folder: Path
    run: Path
    store: Store
    head: str

    def unpack(self) -> None:
        """Write what the pieces hold into the run's folder and the store, except what is there.

        Raises:
            InvalidInput: a piece cannot be read, or has the columns of another version.
        """
        for path in sorted(self.folder.glob("*.parquet")):
            is_files = path.name.endswith(".files.parquet")
            table = read_table(path)
            if not table.schema.equals(FILES if is_files else SOLVES):
                raise InvalidInput(f"{path}: has other columns than this version writes; remove it to solve it again")
            for record in table.to_pylist():
                if is_files:
                    self._write_file(record["path"], record["content"], path)
                else:
                    self._write_solve(record)

    @contextmanager
    def packing(self, part: str, *, whole: bool) -> Iterator[None]:
        """Pack what the part uses, every few minutes and at its end, also if an error or Ctrl-C ends it.

        What was packed before stays, until the part ends and is `whole`, i.e. has every network: it has then used all.
        """
        self.store.used.clear()
        over = threading.Event()

        def keep() -> None:
            while not over.wait(EVERY_S):
                self.pack(part)

        keeper = threading.Thread(target=keep, daemon=True)
        keeper.start()
        is_over = False
        try:
            yield
            is_over = True
        finally:
            over.set()
            keeper.join()
            self.pack(part, anew=whole and is_over)

    def pack(self, part: str, *, anew: bool = False) -> None:
        """Write the part's two tables from what it has used so far, and, unless `anew`, from the tables before."""
        used = sorted(self.store.used)
        solves = [solve for key in self.store.used_rows() if (solve := self._solve(key)) is not None]
        kept = {f"{STORE}/{name}": self.store.folder / name for name in used if not name.startswith("rows/")}
        own = (self.run / self.head, self.run / f"{part}.json", *self.run.glob(f"{part}/**/*.json"))
        kept |= {f"{RUN}/{path.relative_to(self.run).as_posix()}": path for path in own}
        others = [{"path": name, "content": _text_of(path)} for name, path in kept.items() if path.is_file()]
        self._write(f"{part}.parquet", "key", solves, SOLVES, anew)
        self._write(f"{part}.files.parquet", "path", others, FILES, anew)

    def _write(self, name: str, key: str, records: Sequence[Mapping[str, Any]], schema: pa.Schema, anew: bool) -> None:
        """Write a table; unless `anew`, with the records of the one before whose keys are not among these."""
        path = self.folder / name
        if not anew and path.is_file() and (before := read_table(path)).schema.equals(schema):
            known = {record[key] for record in records}
            records = [*records, *(record for record in before.to_pylist() if record[key] not in known)]
        write_table(path, pa.Table.from_pylist(sorted(records, key=lambda record: record[key]), schema=schema))

    def _solve(self, key: str) -> dict[str, Any] | None:
        """The row of that key, with its plan; None if it is damaged."""
        row = self.store.read_row(key)
        if row is None:
            return None
        plan = None if row.plan_file is None else (self.store.folder / row.plan_file).read_text()
        return {**asdict(row), "plan": plan}

    def _write_solve(self, record: dict[str, Any]) -> None:
        plan = record.pop("plan")
        row = Row(**record)
        known = self.store.read_row(row.key)
        if known is not None and (is_final(known) or not is_final(row)):
            return
        if row.plan_file is not None and plan is not None:
            write_text(self.store.folder / row.plan_file, plan)
        self.store.write_row(row)

    def _write_file(self, name: str, content: str, source: Path) -> None:
        place, _, rest = name.partition("/")
        folder = {RUN: self.run, STORE: self.store.folder}.get(place)
        if folder is None or not rest or ".." in PurePosixPath(rest).parts or PurePosixPath(rest).is_absolute():
            raise InvalidInput(f"{source}: holds a file of another place, {name!r}")
        path = folder / rest
        if path.exists():
            return
        if path.suffix == ".parquet":
            family = json.loads(content)
            table = pa.Table.from_pylist(family["members"], schema=FAMILY_SCHEMA)
            write_table(path, table.replace_schema_metadata(family["metadata"]))
        else:
            write_text(path, content)


def _text_of(path: Path) -> str:
    """The text of a file; of a family's table its members as JSON, because many small tables pack badly."""
    if path.suffix != ".parquet":
        return path.read_text()
    table = read_table(path)
    metadata = {key.decode(): value.decode() for key, value in (table.schema.metadata or {}).items()}
    return json.dumps({"metadata": metadata, "members": table.to_pylist()})
