"""Whatever is damaged, killed or crashes, the run mends it and says so: each kind of file, of damage, each worker."""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import resource
import shutil
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from helpers import ROOT, install_package, run_py, start_run_py, wait_for
from sweep_helpers import MIRROR, make_row, sweep

import remat
from experiments import cli
from experiments.store import Row, Store
from remat.cost.records import read_record, write_record
from remat.errors import InvalidInput, RematError
from remat.extraction import extract_in_child
from remat.files import read_lines, write_lines
from remat.frontends.spec import ModelSpec
from remat.implementation import Implementation
from remat.simulator import load_and_simulate
from remat.solution import Family, Status
from remat.solving.here import run_family, solve_here

# One strategy that ignores the budget and one that does not.
CHEAP = {"strategies": ("checkpoint_all", "search"), "options": {"checkpoint_all": {}, "search": {}}, "work_limit": 50}


def outcome(rows: list[Row]) -> list[tuple[object, ...]]:
    return [(row.key, row.status, row.cost, row.bound, row.peak_bytes, row.budget_bytes) for row in rows]


@contextlib.contextmanager
def said() -> Iterator[list[str]]:
    """The messages of all warnings inside, once it is left."""
    told: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield told
    told += [str(warning.message) for warning in caught]


@pytest.fixture
def in_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Solves without worker processes, whose start takes seconds."""
    monkeypatch.setattr(
        "experiments.engine.run_family_isolated",
        lambda context, name, options, spec: run_family(context, name, options),
    )
    monkeypatch.setattr("experiments.engine.solve_isolated", lambda *asked, known=None: solve_here(*asked))


@pytest.fixture(scope="module")
def solved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Row]]:
    """A store with the rows of a finished sweep, its graph and a remembered result."""
    folder = tmp_path_factory.mktemp("solved")
    rows, _, _ = sweep(folder, **CHEAP)
    _graph_and_paper(folder)
    return folder, rows


def _graph_and_paper(folder: Path) -> None:
    Store(folder).write_graph(MIRROR)
    assert Store(folder).remember("paper", {"question": 1}, lambda: {"answer": 42}) == {"answer": 42}


def searched(rows: list[Row]) -> list[Row]:
    """The rows with a plan of their own, by budget."""
    found = [row for row in rows if row.strategy == "search" and row.plan_file and row.plan_from is None]
    return sorted(found, key=lambda row: row.budget_bytes)


def altered(path: Path) -> None:
    """Change one field so that the file is still of its format."""
    if path.suffix == ".parquet":
        table = pq.ParquetFile(path).read()
        rows = table.to_pylist()
        rows[0] |= {"cost": (rows[0]["cost"] or 0) + 1} if "cost" in rows[0] else {"found": '{"answer": 43}'}
        changed = table.from_pylist(rows, schema=table.schema)
        pq.write_table(changed.replace_schema_metadata(table.schema.metadata), path)
        return
    document = json.loads(path.read_text())
    if "steps" in document:
        document["steps"][1][1] += 1
    else:
        document["nodes"][0]["bytes"] += 1
    path.write_text(json.dumps(document))


DAMAGE: dict[str, Callable[[Path], object]] = {
    "truncated": lambda path: path.write_bytes(path.read_bytes()[: path.stat().st_size // 2]),
    "empty": lambda path: path.write_bytes(b""),
    "garbage": lambda path: path.write_bytes(b"\x00\xff\x1f\x8b\x80garbage" * 20),
    "another_document": lambda path: path.write_text("[1, 2]"),
    "altered": altered,
    "deleted": lambda path: path.unlink(),
}


@pytest.mark.usefixtures("in_process")
@pytest.mark.parametrize("damage", DAMAGE)
def test_damaged_files_of_the_store_are_made_again_and_named(
    tmp_path: Path, solved: tuple[Path, list[Row]], damage: str
) -> None:
    """A row, the plan of another one, a family, a graph and a remembered result at once."""
    folder, rows = shutil.copytree(solved[0], tmp_path, dirs_exist_ok=True), solved[1]
    one, *_, other = searched(rows)
    paths = [folder / "rows" / f"{one.key}.parquet", folder / str(other.plan_file)]
    paths += [next((folder / kind).iterdir()) for kind in ("families", "graphs", "paper")]
    for path in paths:
        DAMAGE[damage](path)
    with said() as told:
        again, _, graph_run = sweep(folder, **CHEAP)
        _graph_and_paper(folder)
    assert outcome(again) == outcome(rows)
    assert graph_run.solved == 3
    # What is not there is no damage; but a row whose plan is gone is.
    named = paths[1:2] if damage == "deleted" else paths
    assert sorted(next(str(path) for path in paths if str(path) in line) for line in told) == sorted(map(str, named))
    assert not any("\n" in line for line in told)
    with warnings.catch_warnings(action="error"):
        once_more, _, graph_run = sweep(folder, **CHEAP)
        _graph_and_paper(folder)
    assert (outcome(once_more), graph_run.solved) == (outcome(rows), 0)


@pytest.mark.usefixtures("in_process")
def test_a_plan_of_another_row_is_not_taken_for_this_one(tmp_path: Path, solved: tuple[Path, list[Row]]) -> None:
    """A valid plan in the wrong place: the judge tells it from the row's."""
    folder, rows = shutil.copytree(solved[0], tmp_path, dirs_exist_ok=True), solved[1]
    tight, *_, wide = searched(rows)
    (folder / str(wide.plan_file)).write_bytes((folder / str(tight.plan_file)).read_bytes())
    with pytest.warns(UserWarning, match=rf"{wide.plan_file}: costs .* its row says .*computing it again"):
        again, _, graph_run = sweep(folder, **CHEAP)
    assert (outcome(again), graph_run.solved) == (outcome(rows), 1)


def test_plans_that_differ_in_implementations_have_files_of_their_own(tmp_path: Path) -> None:
    op = replace(MIRROR.operations[0], implementations=(Implementation("fast", (), (0,), 1),))
    graph, store = replace(MIRROR, operations=(op, *MIRROR.operations[1:])), Store(tmp_path)
    plain = remat.Plan.from_order(graph, range(len(graph)))
    other = remat.Plan.from_order(graph, range(len(graph)), implementations=["fast", *[""] * (len(graph) - 1)])
    assert store.write_plan("k", plain) == store.write_plan("k", plain) != store.write_plan("k", other)


def test_lines_of_measurements_heal_one_by_one(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    rows = [{"method": name, "ns": i} for i, name in enumerate("abcd")]
    write_lines(path, rows)
    assert read_lines(path) == rows
    lines = path.read_text().splitlines()
    lines[0], lines[2] = lines[0].replace('"ns": 0', '"ns": 9'), lines[2][:9]
    path.write_text("\n".join([*lines, json.dumps({"method": "without a seal"})]))
    with pytest.warns(UserWarning, match=r"rows\.jsonl: line \d is damaged") as caught:
        assert read_lines(path) == [rows[1], rows[3]]
    assert len(caught) == 3


CHAIN = ModelSpec("chain", "synthetic", "remat.frontends.synthetic:chain", 2, options={"n": 3})


@pytest.mark.parametrize("damage", ["truncated", "altered", "deleted"])
def test_a_damaged_graph_in_the_cache_is_extracted_again(
    tmp_path: Path, damage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    graph, extracted = remat.Graph.from_nodes("g", [[], [0]], [1, 2], [3, 4]), []
    monkeypatch.setattr("remat.extraction._extract", lambda spec: extracted.append(spec) or graph)
    assert extract_in_child(CHAIN, tmp_path) == graph
    (cached,) = tmp_path.iterdir()
    DAMAGE[damage](cached)
    with said() as told:
        assert extract_in_child(CHAIN, tmp_path) == extract_in_child(CHAIN, tmp_path) == graph
    assert len(extracted) == 2
    named = [str(cached) in text and "extracting the graph again" in text for text in told]
    assert named == ([] if damage == "deleted" else [True])


# ---- what is drawn


def test_everything_that_a_run_draws_is_drawn_again_also_after_a_full_disk(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A limit on the size of files stands for the disk: the page, which holds a script of megabytes, is above it."""
    remat.save_graph(MIRROR, here / "mirror.json")
    asked = ["graph=mirror.json", "budget=5", "strategies=checkpoint_all"]
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10**6, before[1]))
    try:
        assert cli.main(asked) == 1
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert re.fullmatch(
        r"error: no space left on the disk to write runs/\S+/page\.html \(File too large\); what was finished "
        r"before is kept: make room and give the same command again\n", capsys.readouterr().err,
    )  # fmt: skip
    assert not list(here.rglob("*.part"))
    (folder,) = (path.parent for path in here.glob("runs/*/run.json"))
    written = {path: path.read_bytes() for path in folder.rglob("*.*")}
    assert {path.suffix for path in written} >= {".json", ".csv", ".png", ".pdf"}
    for damage, path in zip(["truncated", "empty", "garbage", "deleted"] * len(written), written, strict=False):
        DAMAGE[damage](path)
    assert cli.main(asked) == 0
    said = capsys.readouterr()
    assert (said.err, "0 solved now" in said.out) == ("", True)
    now = {path: path.read_bytes() for path in folder.rglob("*.*")}
    assert now.keys() - written == {folder / "page.html"}
    assert [path.name for path in written if now[path] != written[path]] == []


# ---- workers


@pytest.fixture
def killing(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """``kill -9`` every process of a module in this list as soon as it has started."""
    modules: list[str] = []

    class Killed(subprocess.Popen):
        def __init__(self, command, **how):
            super().__init__(command, **how)
            if set(modules) & set(command):
                self.kill()  # at once: a worker may need less time than any pause gives it

    monkeypatch.setattr(subprocess, "Popen", Killed)
    return modules


def test_what_killed_workers_left_is_solved_by_the_next_run(
    tmp_path: Path, solved: tuple[Path, list[Row]], killing: list[str]
) -> None:
    """Those of a family and those of a budget."""
    killing.append("remat.solving._worker")
    lost, _, _ = sweep(tmp_path, **CHEAP)
    assert {(row.strategy, row.status) for row in lost} == {(name, "FAILED") for name in CHEAP["strategies"]}
    assert all("SIGKILL" in row.message for row in lost)
    killing.clear()
    again, _, graph_run = sweep(tmp_path, **CHEAP)
    assert outcome(again) == outcome(solved[1])
    assert graph_run.solved > 1


def test_a_killed_frontend_is_one_line_and_the_next_run_extracts(tmp_path: Path, killing: list[str]) -> None:
    killing.append("remat._extract")
    with pytest.raises(RematError, match=r"extracting chain .* was killed by signal 9") as caught:
        extract_in_child(CHAIN, tmp_path)
    assert "\n" not in str(caught.value)
    assert not list(tmp_path.iterdir())
    killing.clear()
    assert len(extract_in_child(CHAIN, tmp_path)) == 7


# A child that never returns to Python: `PyDLL` holds the interpreter's lock while it sleeps.
HELD = "import ctypes, pathlib, time; pathlib.Path('alive').touch(); {sleep}(60)"
PARENT = """
import os, subprocess, sys, time
from remat import child
watching = "import remat.child as c, runpy, os; c._kernel_kills_us_too = lambda: False; " \\
    "c.end_with_parent(os.getppid()); runpy.run_module('held')"
command = child.command("held") if sys.argv[1] == "kernel" else [sys.executable, "-c", watching]
print(subprocess.Popen(command, env=child.environment({}, here=True), start_new_session=True).pid, flush=True)
time.sleep(60)
"""


@pytest.mark.parametrize(
    ("moment", "who", "patience_s"), [("at once", "kernel", 5.0), ("at work", "kernel", 1.0), ("at work", "child", 3.0)]
)
def test_a_child_ends_at_once_when_its_parent_is_killed(
    tmp_path: Path, moment: str, who: str, patience_s: float
) -> None:
    """By the kernel, which only Linux's does; or because it watches its parent."""
    if who == "kernel" and sys.platform != "linux":
        pytest.skip("only Linux ends a process that does not return to Python")
    sleep = "ctypes.PyDLL(None).sleep" if who == "kernel" else "time.sleep"
    (tmp_path / "held.py").write_text(HELD.format(sleep=sleep))
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, who], cwd=tmp_path, stdout=subprocess.PIPE, text=True,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    pid = int(parent.stdout.readline())
    if moment == "at work":
        wait_for((tmp_path / "alive").exists)
    parent.kill()
    parent.wait()
    assert wait_for(lambda: not _is_alive(pid)) < patience_s


def _is_alive(pid: int) -> bool:
    """Whether a process runs; one that has ended and waits to be reaped does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


# ---- bits that a fault of the disk has changed

N_MUTATIONS = 120  # of each file
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


KINDS = (_row, _lines, _record, _graph, _plan)


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
        with said() as told:
            found = read()
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
        with pytest.warns(UserWarning, match=rf"rows/{key}\.parquet: holds what belongs to [ab]; computing it again"):
            assert store.read_row(key) is None
        with pytest.warns(UserWarning, match=rf"families/{key}\.parquet: holds what belongs to [ab]; computing"):
            assert store.read_family(key, "f", MIRROR) is None
        with pytest.warns(UserWarning, match=r"paper/.*: holds what belongs to .*; computing it again"):
            assert store.remember("paper", {"question": key}, lambda: None) is None


# ---- solvers that crash, and runs beside each other

PLUGIN = """
import ctypes, os, signal, sys, time
from remat.registry import strategy

@strategy("breaks_memory")
def breaks_memory(problem):
    ctypes.string_at(0)

@strategy("breaks_as_family", ignores_budget=True)
def breaks_as_family(problem):
    ctypes.string_at(0)

@strategy("is_killed")
def is_killed(problem):
    print("out of luck", file=sys.stderr, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)  # as the system does when memory runs out

@strategy("never_ends")
def never_ends(problem):
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    while True:
        time.sleep(1)
"""
# How each ends, and words of the reason.
ENDS = {
    "breaks_memory": ("FAILED", "SIGSEGV"),
    "breaks_as_family": ("FAILED", "SIGSEGV"),
    "is_killed": ("FAILED", "memory runs out: out of luck"),
    "never_ends": ("TIMEOUT", "did not stop by itself; killed after"),
    "checkpoint_all": ("OPTIMAL", ""),
}


@pytest.mark.parametrize("engine", ["local", pytest.param("ray", marks=pytest.mark.slow)])
def test_solvers_that_crash_and_hang_cost_their_rows(tmp_path: Path, engine: str) -> None:
    plugin, here = tmp_path / "plugin", tmp_path / "here"
    plugin.mkdir()
    here.mkdir()
    install_package(plugin, PLUGIN)
    remat.save_graph(MIRROR, here / "mirror.json")
    asked = ["graph=mirror.json", "points=2", "time_limit=2", f"strategies=[{','.join(ENDS)}]", "engine.jobs=2"]
    asked += [f"engine={engine}"]
    run = run_py(here, *asked, PYTHONPATH=os.pathsep.join(map(str, [plugin, ROOT])))
    assert run.returncode == 0, run.stdout + run.stderr
    assert "Traceback" not in run.stdout + run.stderr
    assert "6 of 10 solves failed or were cut short, the first of them breaks_as_family at" in run.stdout
    rows = [row for path in (here / "runs/store/rows").glob("*.parquet") for row in pq.read_table(path).to_pylist()]
    largest = max(row["budget_bytes"] for row in rows)
    assert len(rows) == 2 * len(ENDS)
    for row in rows:
        status, words = ENDS[row["strategy"]]
        if row["strategy"] != "checkpoint_all" or row["budget_bytes"] == largest:
            assert row["status"] == status, row
            assert words in row["message"], row


def test_two_runs_of_one_store_at_once(tmp_path: Path) -> None:
    """The same question twice, at the same time: each row once, whole, and with its own plan."""
    remat.save_graph(MIRROR, tmp_path / "mirror.json")
    asked = ["graph=mirror.json", "points=4", "strategies=[checkpoint_all,chen_sqrtn]", "engine.jobs=2"]
    runs = [start_run_py(tmp_path, *asked) for _ in range(2)]
    for run in runs:
        out, errors = run.communicate(timeout=300)
        assert run.returncode == 0, out + errors
        assert "warning" not in out
    store = Store(tmp_path / "runs/store")
    keys = [path.stem for path in (store.folder / "rows").iterdir()]
    found = [store.read_row(key) for key in keys]
    assert all(found)
    solved = [row for row in found if row is not None and row.plan_from is None]
    budgets = {row.budget_bytes for row in solved}
    assert len(budgets) >= 3
    assert len({(row.strategy, row.budget_bytes) for row in solved}) == len(solved) == 2 * len(budgets)
    for row in solved:
        if row.plan_file is not None:
            trace = remat.simulate(MIRROR, store.read_plan(row, MIRROR))
            assert (trace.cost, trace.peak_bytes) == (row.cost, row.peak_bytes)
    assert not list(tmp_path.rglob("*.part"))
