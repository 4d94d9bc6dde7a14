"""The rows of an experiment: one parquet table under ``runs/NAME``, and one that is kept under ``results/NAME``.

A row has the arguments of its case, what was measured, and facts: ``case_key``, ``measure``, ``date``, ``case_s`` (of
the whole case), ``load`` (of the machine when it began) and the columns of `Provenance`. ``unfinished`` is true in rows
of a case that failed after them: it is measured again.
"""

from __future__ import annotations

import datetime
import fcntl
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pyarrow as pa

from experiments.provenance import provenance
from experiments.registry import Case, Row
from experiments.settings import RUNS_FOLDER
from experiments.store import row_key, warn_damaged
from remat.errors import InvalidInput
from remat.files import read_json, read_table, write_table, write_text

KEPT_FOLDER = Path(__file__).resolve().parents[1] / "results"
JSON_COLUMNS = b"json_columns"  # names the columns whose values are no plain numbers, texts or truth values


class Table:
    """Rows of an experiment, as finished cases wrote them; each write is one atomic step.

    Args:
        name: of the experiment.
        keep: write to ``results/`` instead of ``runs/``.
        again: measure finished cases, too; each once, also if that is interrupted.
    """

    def __init__(self, name: str, *, keep: bool = False, again: bool = False):
        self.kept, self.run = KEPT_FOLDER / name / "rows.parquet", RUNS_FOLDER / name / "rows.parquet"
        self.path = self.kept if keep else self.run
        self.again = self.run.with_name("again.json") if again else None  # keys of cases that were measured again

    def rows(self, *, kept_only: bool = False) -> list[dict[str, Any]]:
        """All rows, with the same columns; those of a run replace kept rows of the same case."""
        kept, ran = _read(self.kept), [] if kept_only else _read(self.run)
        keys = {row["case_key"] for row in ran}
        rows = [*(row for row in kept if row["case_key"] not in keys), *ran]
        columns = dict.fromkeys(name for row in rows for name in row)
        return [{**columns, **row} for row in rows]

    def missing(self, cases: Sequence[Case]) -> list[Case]:
        """The cases that are not finished."""
        whole = {row["case_key"] for row in self.rows() if not row.get("unfinished")}
        finished = whole if self.again is None else self._measured_again()
        return [case for case in cases if key_of(case) not in finished]

    def finish(self) -> None:
        """Note that no case is missing, so that ``again=true`` measures all of them next time."""
        if self.again is not None:
            self.again.unlink(missing_ok=True)

    def _measured_again(self) -> set[str]:
        return set(read_json(self.again)) if self.again is not None and self.again.exists() else set()

    def put(
        self, case: Case, rows: Iterable[Row], wall_s: float, load: float | None = None, *, is_whole: bool = True
    ) -> None:
        """Add the rows of a case in place of earlier ones; also of those with the same arguments and older code.

        Rows of a case that failed after them do not replace those of a whole one.
        """
        facts: Row = {"case_key": key_of(case), "measure": case.function, "date": datetime.date.today().isoformat()}
        facts |= {"case_s": round(wall_s, 3), "load": load, **asdict(provenance())}
        facts |= {} if is_whole else {"unfinished": True}

        with self._alone():
            if not is_whole and any(_is_of(case, row) and not row.get("unfinished") for row in self.rows()):
                return
            self._replace([case], [{**case.what, **facts, **row} for row in rows])
            if is_whole and self.again is not None:
                write_text(self.again, json.dumps(sorted({*self._measured_again(), facts["case_key"]})))

    def keep(self, cases: Sequence[Case]) -> None:
        """Move what runs without ``keep`` have measured of these cases to the kept rows."""
        with self._alone():
            whole = {row["case_key"]: row for row in _read(self.run) if not row.get("unfinished")}
            ran = {key: case for case in cases if (key := key_of(case)) in whole}
            if ran and self.path == self.kept:
                self._replace([*ran.values()], [row for row in _read(self.run) if row["case_key"] in ran])

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Several runs may change the table."""
        self.run.parent.mkdir(parents=True, exist_ok=True)
        with (self.run.parent / ".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield

    def _replace(self, cases: Sequence[Case], rows: Sequence[Row]) -> None:
        """Let these be the rows of the cases."""

        def others(path: Path) -> list[Row]:
            return [row for row in _read(path) if not any(_is_of(case, row) for case in cases)]

        write_rows(self.path, [*others(self.path), *rows])
        if self.path == self.kept and len(left := others(self.run)) < len(_read(self.run)):
            write_rows(self.run, left)  # or they would stand for the kept ones


def key_of(case: Case) -> str:
    """Hash of everything that determines a case's rows."""
    determines: dict[str, Any] = {"measure": case.function, "what": dict(case.what), "code": list(case.code)}
    if case.on_this_machine:
        versions = json.loads(provenance().versions)
        determines |= {"cpu": provenance().cpu, "torch": versions.get("torch")}
    return row_key(determines)


def made(rows: Sequence[Row], *packages: str) -> str:
    """Dates of rows, versions of packages and processors, e.g. ``2026-11-25, PyTorch 2.13.0, AMD EPYC``."""
    dates, versions = sorted(row["date"] for row in rows), [json.loads(row["versions"]) for row in rows]
    parts = [" to ".join(dict.fromkeys((dates[0], dates[-1])))]
    for package in packages:
        found = dict.fromkeys(str(each.get(package, "unknown")) for each in versions)
        parts.append(f"{'PyTorch' if package == 'torch' else package} {' and '.join(found)}")
    return ", ".join([*parts, values_of(rows, "cpu")])


def values_of(rows: Sequence[Row], column: str) -> str:
    """The values of a column, e.g. ``2`` or ``2 and 4``."""
    found = dict.fromkeys(row[column] for row in rows if row[column] is not None)
    return " and ".join(each if isinstance(each, str) else f"{each:g}" for each in found)


def write_rows(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Write a table. A column with lists, objects or several types holds JSON."""
    columns: dict[str, list[Any]] = {}
    for name in dict.fromkeys(name for row in rows for name in row):
        columns[name] = [row.get(name) for row in rows]
    as_json = [name for name, values in columns.items() if not _is_plain(values)]
    for name in as_json:
        columns[name] = [None if value is None else json.dumps(value) for value in columns[name]]
    table = pa.table({name: pa.array(values) for name, values in columns.items()})
    write_table(path, table.replace_schema_metadata({JSON_COLUMNS: json.dumps(as_json)}))


def _is_plain(values: Iterable[Any]) -> bool:
    kinds = {type(value) for value in values if value is not None}
    return kinds <= {int, float} or (len(kinds) == 1 and kinds <= {str, bool})


def _read(path: Path) -> list[dict[str, Any]]:
    if not path.exists():
        return []
    try:
        table = read_table(path)
        as_json = json.loads((table.schema.metadata or {}).get(JSON_COLUMNS, b"[]"))
        rows = table.to_pylist()
        for row in rows:
            row |= {name: json.loads(row[name]) for name in as_json if row[name] is not None}
    except (InvalidInput, KeyError, TypeError, ValueError) as error:
        warn_damaged(f"{path}: {error}")
        return []
    return rows


def _is_of(case: Case, row: Mapping[str, Any]) -> bool:
    """Whether a row is of this case, perhaps of older code."""
    if row["case_key"] == key_of(case):
        return True
    return row["measure"] == case.function and all(row.get(key) == value for key, value in case.what.items())
