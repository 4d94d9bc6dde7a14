"""The store: what is written is read back, what is broken is solved again, what is full says so."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from helpers import refused
from sweep_helpers import make_row

import remat
from analysis.results import load_run
from experiments.engine import source_hash
from experiments.store import Store, code_version, write_json
from remat import files
from remat.errors import DiskFull
from remat.solution import Family, Member, Status


@pytest.fixture
def graph() -> remat.Graph:
    return remat.Graph.from_nodes("chain", [[], [0], [1]], [4, 5, 6], [1, 2, 3])


def test_a_row_comes_back_exactly(tmp_path: Path) -> None:
    store = Store(tmp_path)
    rows = [make_row("full"), make_row("empty", cost=None, bound=None, gap=None, overhead=None, peak_bytes=None)]
    for row in rows:
        store.write_row(row)
    assert [store.read_row(row.key) for row in rows] == rows
    assert store.read_row("absent") is None
    assert str(pq.read_table(tmp_path / "rows" / "empty.parquet").schema.field("cost").type) == "int64"


def test_a_run_of_an_older_version_is_drawn_and_its_rows_are_solved_again(tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.write_row(make_row("old"))
    path = tmp_path / "rows" / "old.parquet"
    files.write_table(path, pq.read_table(path).drop_columns(["ended", "contradicted", "cost_cap"]))
    (tmp_path / "run.json").write_text('{"store": ".", "keys": ["old"]}')
    assert load_run(tmp_path).rows["key"].tolist() == ["old"]
    with pytest.warns(UserWarning, match="other columns"):
        assert store.read_row("old") is None


def test_two_runs_that_solve_the_same_do_not_mix_their_plans_and_a_row_without_its_plan_is_solved_again(
    tmp_path: Path, graph: remat.Graph
) -> None:
    """The plan of one and the row of the other, in whichever order they are written."""
    store = Store(tmp_path)
    plans = [remat.Plan.from_order(graph, order) for order in ([0, 1, 2], [0, 1, 0, 2])]
    files_written = [store.write_plan("k", plan) for plan in plans]
    for plan, file in zip(reversed(plans), reversed(files_written), strict=True):
        store.write_row(make_row(plan_file=file, cost=remat.simulate(graph, plan).cost, peak_bytes=11))
        row = store.read_row("k")
        assert row is not None
        assert store.read_plan(row, graph).steps == plan.steps
    (tmp_path / files_written[0]).unlink()
    with pytest.warns(UserWarning, match="no such file; computing it again"):
        assert store.read_row("k") is None


def test_writers_of_one_file_do_not_share_a_scratch_file(tmp_path: Path) -> None:
    """Processes of two machines that share a file system may have the same number."""
    target = tmp_path / "x"
    with files.replacing(target) as one, files.replacing(target) as other:
        one.write_text("one")
        other.write_text("other")
    assert target.read_text() == "one"  # the outer block ended last
    assert [path.name for path in tmp_path.iterdir()] == ["x"]


def test_a_family_comes_back_with_its_plans_or_the_reason_for_none(tmp_path: Path, graph: remat.Graph) -> None:
    store = Store(tmp_path)
    plan = remat.Plan.from_order(graph, [0, 1, 2])
    family = Family("f", (Member(plan, 6, 11, {"slots": 3}),), "one rejected", wall_s=0.5)
    store.write_family("k", family, graph, "exact")
    back = store.read_family("k", "f", graph)
    assert back is not None
    assert (back.rejected, back.status, back.wall_s) == ("one rejected", None, 0.5)
    (member,) = back.members
    assert (member.cost, member.peak_bytes, dict(member.parameters)) == (6, 11, {"slots": 3})
    assert member.plan.steps == plan.steps
    store.write_family("k", Family("f", status=Status.SKIPPED, message="needs a chain"), graph, "exact")
    back = store.read_family("k", "f", graph)
    assert back is not None
    assert (back.members, back.status, back.message) == ((), Status.SKIPPED, "needs a chain")


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_is_one_line_and_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, graph: remat.Graph
) -> None:
    store = Store(tmp_path)
    store.write_row(make_row("before"))

    def full(*_: object) -> None:
        raise OSError(code, os.strerror(code))

    with monkeypatch.context() as broken:
        broken.setattr(files.os, "replace", full)
        for write in (
            lambda: store.write_row(make_row("after")),
            lambda: store.write_plan("after", remat.Plan.from_order(graph, [0, 1, 2])),
            lambda: store.write_graph(graph),
            lambda: write_json(tmp_path / "run.json", {}),
        ):
            with pytest.raises(DiskFull, match="no space left") as caught:
                write()
            assert "\n" not in str(caught.value)
    assert store.read_row("before") == make_row("before")
    assert store.read_row("after") is None
    assert [path.name for path in tmp_path.rglob("*") if path.is_file()] == ["before.parquet"]  # no scratch files


def test_other_errors_of_the_system_name_their_place(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="too long") as caught:
        files.write_text(path := tmp_path / ("x" * 300), "plan")
    assert caught.value.filename == str(path)
    (tmp_path / "rows").write_text("a file where a folder should be")
    with refused(f"cannot be written: {tmp_path}/rows is a file; name a folder"):
        Store(tmp_path).write_row(make_row())
    with refused("cannot be written: it is a folder; name a file in it", file=tmp_path):
        files.write_text(tmp_path, "plan")
    assert [path.name for path in tmp_path.iterdir()] == ["rows"]


def test_a_docstring_voids_no_row_and_a_raised_version_does(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import baselines
    from remat import execution, solvers

    (tmp_path / "one.py").write_text('"""Before."""')
    monkeypatch.setattr(baselines, "__path__", [str(tmp_path)])
    source_hash.cache_clear()
    before = code_version(), code_version(whole=True), source_hash()
    (tmp_path / "one.py").write_text('"""After."""')
    source_hash.cache_clear()
    assert (code_version(), code_version(whole=True)) == before[:2]
    assert source_hash() != before[2]  # nodes of a cluster must run the very same code
    source_hash.cache_clear()
    monkeypatch.setattr(execution, "VERSION", execution.VERSION + 1)
    assert (code_version(), code_version(whole=True)) == (before[0], f"{solvers.VERSION}.{execution.VERSION}")
    monkeypatch.setattr(solvers, "VERSION", solvers.VERSION + 1)
    assert code_version() != before[0]
