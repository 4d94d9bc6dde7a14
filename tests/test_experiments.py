"""An experiment is one file: it is found in the help, runs, resumes after it was stopped, and is drawn."""

from __future__ import annotations

import os
import re
import shlex
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from helpers import ROOT, blocks_of, start_run_py, wait_for

from experiments import cli, runner, store
from experiments.registry import Case, experiments, listed
from remat.errors import InvalidInput

HOW_TO = ROOT / "docs" / "how-to" / "add-an-experiment.md"
TOY = '''
"""A file of an experiment."""
import time
from pathlib import Path
from experiments.documents import Drawing, markdown_table
from experiments.registry import Case, experiment
from remat.errors import InvalidInput

def power(n, exponent, seconds):
    if n == 13:
        raise InvalidInput("13 has no power here")
    began = time.time()
    time.sleep(seconds)
    yield {"began": began, "ended": time.time(), "power": n**exponent, "half": n / 2, "factors": [n] * exponent}
    if n == 14 and not Path("mended").exists():
        raise InvalidInput("only half of 14")

@experiment()
def powers(numbers: list[int] = [1, 2, 3], exponent: int = 2, seconds: float = 0.0):
    """Powers of numbers."""
    for n in numbers:
        yield Case(power, {"n": n, "exponent": exponent, "seconds": seconds})

@powers.draws
def page(rows):
    return Drawing(markdown_table(["n", "power"], [[str(row["n"]), str(row["power"])] for row in rows]))
'''


@pytest.fixture
def folder(here: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder, and an experiment in another one."""
    (here / "more").mkdir()
    (here / "more" / "powers.py").write_text(TOY)
    monkeypatch.setenv("REMAT_EXPERIMENTS", str(here / "more"))
    monkeypatch.setattr(store, "KEPT_FOLDER", here / "results")
    for name in ("powers", "chains"):
        monkeypatch.delitem(sys.modules, f"remat_experiment_{name}", raising=False)
    return here


def test_a_file_adds_an_experiment_to_the_help_to_runs_and_to_pages(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["--help"]) == 0
    assert "powers" in capsys.readouterr().out
    assert cli.main(["experiment=powers", "numbers=[4,5]"]) == 0
    told = capsys.readouterr()
    assert "2 cases measured now" in told.out
    assert told.err == ""
    assert "| 5 | 25 |" in (folder / "runs" / "powers" / "powers.md").read_text()
    assert cli.main(["experiment=powers", "numbers=[4,5,6]"]) == 0
    assert "1 cases measured now, 2 taken from" in capsys.readouterr().out
    assert cli.main(["experiment=powers", "draw=true"]) == 0
    out = capsys.readouterr().out
    assert "measured" not in out
    assert "| 6 | 36 |" in out
    path = folder / "runs" / "powers" / "rows.parquet"
    assert [row["half"] for row in pq.read_table(path).to_pylist()] == [2.0, 2.5, 3.0]
    assert [row["factors"] for row in store.Table("powers").rows()] == [[4, 4], [5, 5], [6, 6]]
    path.write_bytes(path.read_bytes()[:-40])
    assert cli.main(["experiment=powers", "numbers=[4]"]) == 0
    out = capsys.readouterr().out
    assert "warning: runs/powers/rows.parquet: cannot be read" in out
    assert "1 cases measured now" in out


@pytest.mark.long
def test_the_documented_experiment_runs_as_written(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, *others = blocks_of(HOW_TO)
    assert not others
    (folder / "more" / "chains.py").write_text(code)
    first, second = re.findall(r"^    python run\.py (.*)$", HOW_TO.read_text(), re.MULTILINE)
    for command, line in ((first, "| 8 | 70% | "), (second, "| 32 | 80% | ")):
        assert cli.main(shlex.split(command)) == 0
        told = capsys.readouterr()
        assert line in told.out
        assert told.err == ""
    assert "3 cases measured now, 0 taken" in told.out


@pytest.mark.long
def test_a_stopped_run_keeps_what_was_finished_and_goes_on(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["experiment=powers", "numbers=[1,2,3,4,5]", "seconds=0.5"]
    path = folder / "runs" / "powers" / "rows.parquet"
    with start_run_py(folder, *arguments) as running:
        wait_for(path.exists, patience_s=60)
        running.send_signal(signal.SIGINT)
        assert running.stderr is not None
        assert "finished results are kept" in running.stderr.read()
    assert running.returncode == 130
    finished = pq.read_table(path).num_rows
    assert 0 < finished < 5
    assert cli.main(arguments) == 0
    assert f"{5 - finished} cases measured now, {finished} taken" in capsys.readouterr().out


@pytest.mark.long
def test_cases_run_side_by_side_if_asked(folder: Path) -> None:
    assert cli.main(["experiment=powers", "numbers=[1,2]", "seconds=4", "engine.jobs=2"]) == 0
    earlier, later = sorted(store.Table("powers").rows(), key=lambda row: row["began"])
    assert {earlier["n"], later["n"]} == {1, 2}
    assert later["began"] < earlier["ended"]


@pytest.mark.long
def test_a_case_that_fails_is_named_costs_no_other_and_is_measured_again_with_the_rows_that_it_had_kept(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["experiment=powers", "numbers=[12,13,14,15]"]) == 1
    told = capsys.readouterr()
    assert sorted(told.err.splitlines()) == [
        "error: powers, n=13, exponent=2, seconds=0.0: 13 has no power here",
        "error: powers, n=14, exponent=2, seconds=0.0: only half of 14",
    ]
    assert [(row["n"], row["unfinished"]) for row in store.Table("powers").rows()] == [
        (12, None), (14, True), (15, None),
    ]  # fmt: skip
    assert "nothing is drawn, because cases failed" in told.out
    assert not (folder / "runs" / "powers" / "powers.md").exists()
    (folder / "mended").touch()
    assert cli.main(["experiment=powers", "numbers=[12,14]"]) == 0
    assert "1 cases measured now, 1 taken" in capsys.readouterr().out
    (folder / "mended").unlink()
    assert cli.main(["experiment=powers", "numbers=[14]", "again=true"]) == 1
    assert not any(row.get("unfinished") for row in store.Table("powers").rows())  # whole rows stay


def test_the_traceback_of_a_case_that_crashes_is_kept(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["experiment=powers", "numbers=[12]", "seconds=1e300"]) == 1
    told = capsys.readouterr().err
    assert told.startswith("error: powers, n=12, exponent=2, seconds=1e+300: its process ended with 1: ")
    kept = (folder / told.rpartition("its output: ")[2].strip()).read_text()
    assert "Traceback" in kept
    assert "time.sleep(seconds)" in kept


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["experiment=powers", "exponnt=3"], "unknown option 'exponnt'; did you mean exponent"),
        (["experiment=powers", "model=vgg19"], "experiment=powers does not read model; its keys: numbers, exponent"),
        (["model=vgg19", "draw=true"], "draw is for experiment="),
        (["experiment=powers", "draw=true"], "run it without draw=true"),
        (["experiment=powers", "exponent=two"], "exponent=two: write a whole number"),
        (["experiment=powers", "rounds=0"], "rounds is for experiment=checkpoints or compiled or"),
        (["experiment=coverage", "costs=flop"], "unknown cost model 'flop'; did you mean flops"),
        (["experiment=lengths", "engine=ray"], "lengths measures this machine; leave engine=ray out"),
        (["experiment=large", "steps=[dense23]"], "unknown step 'dense23'; did you mean dense32"),
    ],
)
def test_a_wrong_key_is_one_line(
    folder: Path, arguments: list[str], line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(arguments) == 1
    told = capsys.readouterr().err
    assert line in told
    assert told.count("\n") == 1


@pytest.mark.parametrize(
    ("key", "value", "line"),
    [
        ("numbers", 3, "numbers=3: write a list"),
        ("numbers", [3, "x"], "numbers=x: write a whole number"),
        ("numbers", [], r"numbers: the list is empty; write at least one, e\.g\. \[1\]"),
        ("seconds", float("inf"), "seconds=inf: write a finite number"),
        ("exponent", 0, "exponent=0: write a whole number above 0"),
    ],
)
def test_a_wrong_value_is_named(folder: Path, key: str, value: object, line: str) -> None:
    with pytest.raises(InvalidInput, match=line):
        listed("powers").arguments({key: value})


def test_measuring_again_goes_on_where_it_was_stopped(folder: Path) -> None:
    cases = [Case(len, {"n": n}) for n in range(3)]
    for again in (False, True):
        rows = store.Table("powers", again=again)
        assert rows.missing(cases) == cases
        for case in cases[:2]:
            rows.put(case, [{"again": again}], 0.1)
        assert store.Table("powers", again=again).missing(cases) == cases[2:]
    store.Table("powers", again=True).finish()
    assert store.Table("powers", again=True).missing(cases) == cases


def test_rows_of_a_run_can_be_kept_later_and_do_not_hide_what_is_kept_after_them(folder: Path) -> None:
    ran, other = Case("module.power", {"n": 4}), Case("module.power", {"n": 5})
    store.Table("powers", keep=True).put(ran, [{"power": 15}], 1.0)
    for case, power in ((ran, 16), (other, 25)):
        store.Table("powers").put(case, [{"power": power}], 1.0)
    store.Table("powers").keep([ran])  # of a run without keep=true
    assert [row["power"] for row in store.Table("powers").rows(kept_only=True)] == [15]
    store.Table("powers", keep=True).keep([ran])
    assert [row["power"] for row in store.Table("powers").rows(kept_only=True)] == [16]
    store.Table("powers", keep=True, again=True).put(other, [{"power": 26}], 1.0)
    assert [row["power"] for row in store.Table("powers").rows()] == [16, 26]


def test_rows_of_older_code_are_replaced(folder: Path) -> None:
    rows, old, new = store.Table("powers"), Case(len, {"n": 3}, ["1"]), Case(len, {"n": 3}, ["2"])
    rows.put(old, [{"n2": 8}], 0.1)
    rows.put(Case(len, {"n": 4}, ["1"]), [{"n2": 16}], 0.1)
    assert rows.missing([old, new]) == [new]
    rows.put(new, [{"n2": 9}], 0.1)
    for _ in range(2):
        rows.put(Case(len, {"n": (5,)}), [{"n2": 25}], 0.1)  # a tuple is read as a list
    assert [row["n2"] for row in rows.rows()] == [16, 9, 25]


def test_whole_rows_of_a_run_replace_kept_ones_of_the_same_case(folder: Path) -> None:
    kept, ran, case = store.Table("powers", keep=True), store.Table("powers"), Case(len, {"n": 1})
    kept.put(case, [{"x": 1}], 0.1)
    ran.put(case, [{"x": 3}], 0.1, is_whole=False)
    assert [row["x"] for row in ran.rows()] == [1]
    ran.put(case, [{"x": 2}], 0.1)
    ran.put(Case(len, {"n": 1, "message": "does not fit"}), [{}], 0.1)
    kept.put(Case(len, {"n": 2}), [{"y": 3}], 0.1)
    assert [(row["x"], row["y"], row["message"]) for row in ran.rows()] == [
        (None, 3, None), (2, None, None), (None, None, "does not fit"),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("def f(:\n", "line 3"),
        ("def f(n):\n    pass\n", "needs a default"),
        ("def f(n=len):\n    pass\n", "must be literals"),
    ],
)
def test_a_file_that_cannot_be_read_is_named(folder: Path, text: str, line: str) -> None:
    (folder / "more" / "broken.py").write_text(f"\n@experiment()\n{text}")
    os.environ["REMAT_EXPERIMENTS"] += os.pathsep  # read it anew
    with pytest.raises(InvalidInput, match=rf"broken\.py.*{line}"):
        experiments()


HEAVY = """
import os

def measure(n):
    yield {"n2": n * n}
    if n == 7:
        os._exit(7)
    if n > 9:
        raise ValueError("too large")
"""


def test_a_function_may_be_named_so_that_only_its_process_imports_it_and_rows_say_on_which_node_they_were_made(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "more" / "heavy.py").write_text(HEAVY)
    monkeypatch.setenv("PYTHONPATH", str(folder / "more"))
    file = folder / "more" / "powers.py"
    whole, dies, breaks = (runner.CaseJob(file, Case("heavy.measure", {"n": n})) for n in (5, 7, 10))
    (row,) = whole.sent().run_on("node 7", "its processor")
    assert (row["n2"], row["node"], row["cpu"]) == (25, "node 7", "its processor")
    assert row["case_s"] > 0
    with pytest.raises(runner.Unfinished, match="ended with 7"):
        dies.measured()
    result = breaks.run_on("node 7", "its processor")
    assert isinstance(result, runner.Unfinished)
    assert [(row["n2"], row["node"], row["cpu"]) for row in result.rows] == [(100, "node 7", "its processor")]
    assert "heavy" not in sys.modules


@pytest.mark.parametrize(("error", "output"), [(InvalidInput("no two"), ""), (ValueError("no two"), "Traceback")])
def test_a_case_that_asks_for_solves_keeps_its_rows_before_an_error(error: Exception, output: str) -> None:
    def measure(_solves: object) -> Iterator[dict[str, int]]:
        yield {"n": 1}
        raise error

    result = runner.CaseJob(Path("here.py"), Case(measure, {})).run_here(None)  # pyright: ignore[reportArgumentType]
    assert isinstance(result, runner.Unfinished)
    assert result.rows == [{"n": 1}]
    assert "no two" in str(result)
    assert result.output.startswith(output)
    assert bool(result.output) == bool(output)
