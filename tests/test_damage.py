"""Files that a fault of the disk has changed: each is read as it was written, or is named and made again."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from sweep_helpers import MIRROR, make_row

import remat
from experiments.store import Store
from remat.cost.records import read_record, write_record
from remat.errors import InvalidInput
from remat.files import read_lines, write_lines
from remat.simulator import load_and_simulate
from remat.solution import Family, Member, Status

N_MUTATIONS = 600  # of each file
PLAN = remat.Plan.from_order(MIRROR, range(len(MIRROR)))
TRACE = remat.simulate(MIRROR, PLAN)
RECORD = {"ns": 12, "best_ns": 11, "samples": [[12, 11], [13, 12]], "signature": "conv ünïcode"}


def mutated(content: bytes, chance: random.Random) -> bytes:
    """The content with a few bits flipped, its end or a part of it lost, or two parts exchanged."""
    n = len(content)
    kind = chance.choice(["flip", "flips", "cut", "lose", "exchange"])
    changed = bytearray(content)
    if kind in ("flip", "flips"):
        for _ in range(1 if kind == "flip" else chance.randint(2, 5)):
            changed[chance.randrange(n)] ^= 1 << chance.randrange(8)
    elif kind == "cut":
        del changed[chance.randrange(n) :]
    else:
        i, j = sorted(chance.sample(range(n), 2))
        width = min(chance.randint(1, 40), j - i)
        if kind == "lose":
            del changed[i : i + width]
        else:
            changed[i : i + width], changed[j : j + width] = content[j : j + width], content[i : i + width]
    return bytes(changed)


def _row(folder: Path) -> tuple[Path, Callable[[], Any]]:
    store = Store(folder)
    store.write_row(make_row())
    return folder / "rows" / "k.parquet", lambda: store.read_row("k")


def _family(folder: Path) -> tuple[Path, Callable[[], Any]]:
    store = Store(folder)
    members = tuple(Member(PLAN, TRACE.cost, TRACE.peak_bytes, {"slots": slots}) for slots in (3, 4))
    store.write_family("k", Family("f", members, "one rejected", Status.FEASIBLE, "ünïcode", 0.5), MIRROR, "exact")

    def read() -> Any:
        found = store.read_family("k", "f", MIRROR)
        if found is None:
            return None
        told = [(m.plan.steps, m.cost, m.peak_bytes, dict(m.parameters)) for m in found.members]
        return told, found.rejected, found.status, found.message, found.wall_s

    return folder / "families" / "k.parquet", read


def _remembered(folder: Path) -> tuple[Path, Callable[[], Any]]:
    store = Store(folder)
    answer = {"bytes": [1, 2, 3], "name": "ünïcode", "share": 0.25}
    store.remember("paper", {"question": 1}, lambda: answer)
    return next((folder / "paper").iterdir()), lambda: store.remember("paper", {"question": 1}, lambda: None)


def _lines(folder: Path) -> tuple[Path, Callable[[], Any]]:
    path = folder / "rows.jsonl"
    write_lines(path, [RECORD])
    return path, lambda: next(iter(read_lines(path)), None)


def _record(folder: Path) -> tuple[Path, Callable[[], Any]]:
    path = folder / "record.json"
    write_record(path, RECORD)
    return path, lambda: read_record(path) or None


def _graph(folder: Path) -> tuple[Path, Callable[[], Any]]:
    """Its hash holds all but the names, which are labels."""
    store, sha256 = Store(folder), MIRROR.sha256()
    store.write_graph(MIRROR)
    return folder / "graphs" / f"{sha256}.json", lambda: _or_told(lambda: store.read_graph(sha256).sha256())


def _plan(folder: Path) -> tuple[Path, Callable[[], Any]]:
    """The judge reads it: a plan of the same cost and peak is as good."""
    path = folder / "plan.json"
    PLAN.save(path)
    expected = TRACE.cost, TRACE.peak_bytes

    def read() -> Any:
        trace = _or_told(lambda: load_and_simulate(path, MIRROR)[1])
        return None if trace is None or (trace.cost, trace.peak_bytes) != expected else expected

    return path, read


def _or_told(read: Callable[[], Any]) -> Any:
    """What is read; None with a warning instead of the error that names the file."""
    try:
        return read()
    except InvalidInput as error:
        warnings.warn(str(error), stacklevel=2)
        return None


KINDS = (_row, _family, _remembered, _lines, _record, _graph, _plan)


@pytest.mark.parametrize("kind", KINDS, ids=[kind.__name__.strip("_") for kind in KINDS])
def test_no_change_of_a_file_is_read_as_another_content(
    tmp_path: Path, kind: Callable[[Path], tuple[Path, Callable[[], Any]]]
) -> None:
    path, read = kind(tmp_path)
    content, expected = path.read_bytes(), read()
    assert expected is not None
    chance, n_damaged = random.Random(1), 0
    for n in range(N_MUTATIONS):
        path.write_bytes(mutated(content, chance))
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            found = read()
        told = [str(warning.message) for warning in caught]
        assert all("\n" not in line for line in told), (n, told)
        if found is None:
            n_damaged += 1
            assert kind is _plan or any(str(path) in line for line in told) or not path.read_bytes().strip(), n
        else:
            assert found == expected, n
    assert n_damaged > N_MUTATIONS / 4
    path.write_bytes(content)
    assert read() == expected


def test_a_file_of_the_store_under_the_name_of_another_is_not_taken_for_it(tmp_path: Path) -> None:
    """Whole files that have changed places keep their seals."""
    store = Store(tmp_path)
    for key in "ab":
        store.write_row(make_row(key))
        store.write_family(key, Family("f", status=Status.SKIPPED, message=f"reason {key}"), MIRROR, "exact")
        store.remember("paper", {"question": key}, lambda key=key: key)
    for folder in ("rows", "families", "paper"):
        one, other = sorted((tmp_path / folder).iterdir())
        contents = one.read_bytes(), other.read_bytes()
        other.write_bytes(contents[0])
        one.write_bytes(contents[1])
    for key in "ab":
        with pytest.warns(UserWarning, match=rf"rows/{key}\.parquet: holds the row [ab]; computing it again"):
            assert store.read_row(key) is None
        with pytest.warns(UserWarning, match=rf"families/{key}\.parquet: holds the family [ab]; computing it again"):
            assert store.read_family(key, "f", MIRROR) is None
        with pytest.warns(UserWarning, match=r"paper/.*: holds another result; computing it again"):
            assert store.remember("paper", {"question": key}, lambda: None) is None
