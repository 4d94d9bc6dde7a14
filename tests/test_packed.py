"""Pieces of a run: what is packed is unpacked elsewhere; a piece of another version or place is refused."""

from __future__ import annotations

import sys
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from sweep_helpers import make_row

import remat
from experiments import cli
from experiments.config import register
from experiments.packed import FILES, Pack
from experiments.parts import Paper
from experiments.run_documents import CHECKMATE_RUN
from experiments.store import Store, write_json
from remat.errors import InvalidInput
from remat.files import read_json, write_table
from remat.solution import Family, Member


def test_a_piece_brings_rows_plans_families_and_documents_to_another_checkout(tmp_path: Path) -> None:
    graph = remat.Graph.from_nodes("chain", [[], [0], [1]], [4, 5, 6], [1, 2, 3])
    plan = remat.Plan.from_order(graph, [0, 1, 2])
    here = Pack(tmp_path / "pieces", tmp_path / "a" / "run", Store(tmp_path / "a" / "store"), "paper.json")
    row = make_row("k", plan_file=here.store.write_plan("k", plan), cost=15, peak_bytes=6)
    write_json(here.run / "fig5" / "unet" / "run.json", {"keys": ["k"]})
    write_json(here.run / "other.json", {})
    here.store.write_row(make_row("of another part"))

    def interrupted() -> None:
        with here.packing("fig5", whole=True):
            here.store.write_row(row)
            here.store.write_family("f", Family("x", (Member(plan, 15, 6, {"k": 1}),), message="why"), graph, "exact")
            here.store.remember("paper", {"a": 1}, lambda: [1, 2])
            write_json(here.run / "fig5.json", {"panels": []})
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    there = Pack(here.folder, tmp_path / "b" / "run", Store(tmp_path / "b" / "store"), "paper.json")
    there.unpack()
    there.unpack()  # what is there stays
    assert there.store.read_row("k") == row
    assert row.plan_file is not None
    assert (there.store.folder / row.plan_file).read_text() == (here.store.folder / row.plan_file).read_text()
    assert there.store.read_row("of another part") is None
    family = there.store.read_family("f", "x", graph)
    assert family is not None
    assert family.members[0].plan.steps == plan.steps
    assert (family.members[0].parameters, family.message) == ({"k": 1}, "why")
    assert there.store.remember("paper", {"a": 1}, lambda: [0]) == [1, 2]
    assert sorted(path.relative_to(there.run).as_posix() for path in there.run.rglob("*.json")) == [
        "fig5.json", "fig5/unet/run.json"
    ]  # fmt: skip


def test_a_piece_loses_nothing_until_its_part_has_ended_whole(tmp_path: Path) -> None:
    pack = Pack(tmp_path / "pieces", tmp_path / "run", Store(tmp_path / "store"), "paper.json")

    def keys() -> list[str]:
        return pq.read_table(pack.folder / "fig5.parquet")["key"].to_pylist()

    def run(names: str, *, whole: bool, stop: bool = False) -> None:
        with pack.packing("fig5", whole=whole):
            for name in names:
                pack.store.write_row(make_row(name))
            if stop:
                raise KeyboardInterrupt

    run("abc", whole=True)
    with pytest.raises(KeyboardInterrupt):
        run("a", whole=True, stop=True)
    assert keys() == ["a", "b", "c"]
    run("d", whole=False)
    assert keys() == ["a", "b", "c", "d"]
    run("bd", whole=True)
    assert keys() == ["b", "d"]


def test_a_finished_row_of_a_piece_replaces_an_interrupted_one(tmp_path: Path) -> None:
    here, there = (Pack(tmp_path / "pieces", tmp_path / name, Store(tmp_path / name), "paper.json") for name in "ab")
    with here.packing("fig5", whole=True):
        here.store.write_row(make_row("k", status="FEASIBLE"))
    there.store.write_row(make_row("k", status="FEASIBLE", ended="interrupted"))
    there.unpack()
    row = there.store.read_row("k")
    assert row is not None
    assert row.ended == ""


def test_a_piece_of_another_version_or_place_is_refused(tmp_path: Path) -> None:
    pack = Pack(tmp_path / "pieces", tmp_path / "run", Store(tmp_path / "store"), "paper.json")
    pack.pack("fig5")
    path = pack.folder / "fig5.parquet"
    write_table(path, pq.read_table(path).drop_columns(["peak_bytes"]))
    with pytest.raises(InvalidInput, match=r"fig5\.parquet: has other columns"):
        pack.unpack()
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(InvalidInput, match=r"fig5\.parquet: cannot be read"):
        pack.unpack()
    path.unlink()
    for name in ("run/../../x", "elsewhere/x", "run//x", "run/"):
        table = FILES.empty_table().from_pylist([{"path": name, "content": "x"}], schema=FILES)
        write_table(pack.folder / "fig5.files.parquet", table)
        with pytest.raises(InvalidInput, match="of another place"):
            pack.unpack()
    assert not (tmp_path / "x").exists()


def test_a_study_goes_on_and_is_drawn_in_another_checkout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fast = [
        "scale=study",
        "networks=[chain]",
        "points=3",
        "time_limit=2",
        "parts=[fig5,memory]",
        "strategies=[checkpoint_all,search]",
    ]
    monkeypatch.setattr(sys, "argv", ["run.py"])
    register()
    amounts = []
    for checkout in ("a", "b"):
        (tmp_path / checkout).mkdir()
        monkeypatch.chdir(tmp_path / checkout)
        if checkout == "b":
            (tmp_path / "a" / "results").rename(tmp_path / "b" / "results")
        assert cli.main(["experiment=paper", *fast]) == 0
        out = capsys.readouterr().out
        assert ("\n0 solved now" in out) == (checkout == "b")
        (document,) = (read_json(path)["made"] for path in Path("runs").glob("paper_study_*/fig5.json"))
        amounts.append({name: document[name] for name in ("at", "seconds", "solved")})
    assert amounts[0] == amounts[1]  # however often it went on
    assert amounts[0]["solved"] == 3  # of the search; the baseline's family is no solve
    drawing = CHECKMATE_RUN.draw([])
    assert drawing.text.startswith("`scale=study`: 3 budgets of a sweep")
    assert any(table.name.endswith("fig5_best") for table in drawing.tables)
    assert "paper_memory_over_time" in drawing.figures  # it replays plans on their graph


def test_a_page_without_a_study_says_how_to_make_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InvalidInput, match="scale=study"):
        CHECKMATE_RUN.draw([])


def test_only_a_paper_has_a_study(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["run.py"])
    register()
    assert cli.main(["model=chain", "scale=study"]) == 1
    assert "scale=study is for experiment=paper" in capsys.readouterr().err


def test_a_full_run_rounds_within_the_time_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["run.py"])
    register()
    scales = []
    monkeypatch.setattr(Paper, "run", lambda self, cfg, settings, scale, *rest: scales.append(scale) or 0)
    for asked in (["time_limit=7"], ["scale=study"], ["scale=study", "time_limit=60"]):
        assert cli.main(["experiment=paper", "networks=[chain]", *asked]) == 0
    assert [(scale.time_limit_s, scale.rounding_s) for scale in scales] == [(7, 7), (30, 300), (30, 60)]
