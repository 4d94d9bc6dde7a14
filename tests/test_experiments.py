"""An experiment is one file: it is found in the help, runs, resumes after it was stopped, and is drawn."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from helpers import ROOT, blocks_of, run_py, start_run_py

from experiments import cli, documents, runner, store
from experiments.registry import Case, experiments, listed, module_of
from remat.errors import InvalidInput, UnknownName

HOW_TO = ROOT / "docs" / "how-to" / "add-an-experiment.md"
TOY = '''
"""A file of an experiment."""
import time
from experiments.documents import Drawing, markdown_table
from experiments.registry import Case, experiment
from remat.errors import InvalidInput

def power(n, exponent, seconds):
    if n == 13:
        raise InvalidInput("13 has no power here")
    began = time.time()
    time.sleep(seconds)
    yield {"began": began, "ended": time.time(), "power": n**exponent, "half": n / 2, "factors": [n] * exponent}

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
    return here


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return run_py(Path.cwd(), *arguments)


def test_a_file_adds_an_experiment_to_the_help_to_runs_and_to_pages(folder: Path) -> None:
    assert "powers" in run("--help").stdout
    first = run("experiment=powers", "numbers=[4,5]")
    assert (first.returncode, first.stderr) == (0, "")
    assert "2 cases measured now" in first.stdout
    assert "| 5 | 25 |" in (folder / "runs" / "powers" / "powers.md").read_text()
    again = run("experiment=powers", "numbers=[4,5,6]")
    assert "1 cases measured now, 2 taken from" in again.stdout
    drawn = run("experiment=powers", "draw=true")
    assert "measured" not in drawn.stdout
    assert "| 6 | 36 |" in drawn.stdout
    rows = pq.read_table(folder / "runs" / "powers" / "rows.parquet").to_pylist()
    assert [row["half"] for row in rows] == [2.0, 2.5, 3.0]
    assert [row["factors"] for row in store.Table("powers").rows()] == [[4, 4], [5, 5], [6, 6]]


@pytest.mark.long
def test_the_documented_experiment_runs_as_written(folder: Path) -> None:
    code, *others = blocks_of(HOW_TO)
    assert not others
    (folder / "more" / "chains.py").write_text(code)
    first, second = (shlex.split(line) for line in re.findall(r"^    python run\.py (.*)$", HOW_TO.read_text(), re.M))
    assert "| 8 | 70% | " in run(*first).stdout
    done = run(*second)
    assert (done.returncode, done.stderr) == (0, "")
    assert "3 cases measured now, 0 taken" in done.stdout
    assert "| 32 | 80% | " in done.stdout


@pytest.mark.long
def test_a_stopped_run_keeps_what_was_finished_and_goes_on(folder: Path) -> None:
    arguments = ["experiment=powers", "numbers=[1,2,3,4,5,6,7,8]", "seconds=0.5"]
    path = folder / "runs" / "powers" / "rows.parquet"
    with start_run_py(folder, *arguments) as running:
        while not path.exists():
            time.sleep(0.05)
        running.send_signal(signal.SIGINT)
        assert running.stderr is not None
        assert "finished results are kept" in running.stderr.read()
    assert running.returncode == 130
    finished = pq.read_table(path).num_rows
    assert 0 < finished < 8
    assert f"{8 - finished} cases measured now, {finished} taken" in run(*arguments).stdout


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


@pytest.mark.long
def test_cases_run_side_by_side_if_asked(folder: Path) -> None:
    done = run("experiment=powers", "numbers=[1,2,3,4]", "seconds=4", "engine.jobs=4")
    assert "4 cases measured now" in done.stdout
    rows = sorted(store.Table("powers").rows(), key=lambda row: row["began"])
    assert sorted(row["n"] for row in rows) == [1, 2, 3, 4]
    assert any(later["began"] < earlier["ended"] for earlier, later in pairwise(rows))


def test_a_case_that_cannot_be_measured_is_named_and_costs_no_other(folder: Path) -> None:
    done = run("experiment=powers", "numbers=[12,13,14]")
    assert done.returncode == 1
    assert done.stderr == "error: powers, n=13, exponent=2, seconds=0.0: 13 has no power here\n"
    assert [row["n"] for row in store.Table("powers").rows()] == [12, 14]
    assert "nothing is drawn, because cases failed" in done.stdout
    assert not (folder / "runs" / "powers" / "powers.md").exists()


@pytest.mark.long
def test_rows_before_an_error_are_kept_and_the_case_is_measured_again(folder: Path) -> None:
    file, gone = folder / "more" / "powers.py", folder / "gone"
    fails = f"    if not Path({str(gone)!r}).exists():\n        raise InvalidInput('half')\n\n@experiment()"
    file.write_text("from pathlib import Path\n" + TOY.replace("\n@experiment()", fails))
    done = run("experiment=powers", "numbers=[4,5]")
    assert done.returncode == 1
    assert done.stderr.count("half") == 2
    rows = store.Table("powers").rows()
    assert [(row["power"], row["unfinished"]) for row in rows] == [(16, True), (25, True)]
    gone.touch()
    assert "2 cases measured now, 0 taken" in run("experiment=powers", "numbers=[4,5]").stdout
    assert [row.get("unfinished") for row in store.Table("powers").rows()] == [None, None]
    gone.unlink()
    assert run("experiment=powers", "numbers=[4]", "again=true").returncode == 1
    assert [row.get("unfinished") for row in store.Table("powers").rows()] == [None, None]  # whole rows stay


def test_rows_before_an_error_do_not_hide_kept_ones(folder: Path) -> None:
    case = Case("module.power", {"n": 4})
    store.Table("powers", keep=True).put(case, [{"power": 16}], 1.0)
    store.Table("powers").put(case, [{"power": 15}], 1.0, is_whole=False)
    assert [row["power"] for row in store.Table("powers").rows()] == [16]


def test_rows_of_a_run_can_be_kept_later_and_do_not_hide_what_is_kept_after_them(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran, other = Case("module.power", {"n": 4}), Case("module.power", {"n": 5})
    store.Table("powers", keep=True).put(ran, [{"power": 15}], 1.0)
    for case, power in ((ran, 16), (other, 25)):
        store.Table("powers").put(case, [{"power": power}], 1.0)
    with monkeypatch.context() as unread:
        unread.setattr(store, "_read", None)  # nothing is to be kept, so that nothing is read
        store.Table("powers").keep([ran])  # of a run without keep=true
    assert [row["power"] for row in store.Table("powers").rows(kept_only=True)] == [15]
    store.Table("powers", keep=True).keep([ran])
    assert [row["power"] for row in store.Table("powers").rows(kept_only=True)] == [16]
    store.Table("powers", keep=True, again=True).put(other, [{"power": 26}], 1.0)
    assert [row["power"] for row in store.Table("powers").rows()] == [16, 26]


def test_the_traceback_of_a_case_that_crashes_is_kept(folder: Path) -> None:
    done = run("experiment=powers", "numbers=[12]", "seconds=1e300")
    assert done.stderr.startswith("error: powers, n=12, exponent=2, seconds=1e+300: its process ended with 1: ")
    kept = folder / done.stderr.rpartition("its output: ")[2].strip()
    assert "Traceback" in kept.read_text()
    assert "time.sleep(seconds)" in kept.read_text()


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["experiment=powers", "exponnt=3"], "unknown option 'exponnt'; did you mean exponent"),
        (["experiment=powers", "model=vgg19"], "experiment=powers does not read model; its keys: numbers, exponent"),
        (["model=vgg19", "draw=true"], "draw is for experiment="),
        (["experiment=powers", "draw=true"], "run it without draw=true"),
        (["experiment=powers", "exponent=two"], "exponent=two: write a whole number"),
        (["experiment=powers", "numbers=3"], "numbers=3: write a list"),
        (["experiment=powers", "numbers=[3,x]"], "numbers=x: write a whole number"),
        (["experiment=powers", "numbers=[]"], "numbers: the list is empty; write at least one, e.g. [1]"),
        (["experiment=powers", "seconds=inf"], "seconds=inf: write a finite number"),
        (["experiment=powers", "exponent=0"], "exponent=0: write a whole number above 0"),
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


def test_rows_of_older_code_are_replaced(folder: Path) -> None:
    def measure(n: int) -> list[dict[str, int]]:
        return [{"n2": n * n}]

    rows, old, new = store.Table("powers"), Case(measure, {"n": 3}, ["1"]), Case(measure, {"n": 3}, ["2"])
    rows.put(old, measure(3), 0.1)
    rows.put(Case(measure, {"n": 4}, ["1"]), measure(4), 0.1)
    assert rows.missing([old, new]) == [new]
    rows.put(new, measure(3), 0.1)
    assert [(row["n"], row["n2"]) for row in rows.rows()] == [(4, 16), (3, 9)]
    for _ in range(2):
        rows.put(Case(measure, {"n": (5,)}), [{"n2": 25}], 0.1)  # a tuple is read as a list
    assert [row["n2"] for row in rows.rows()] == [16, 9, 25]


def test_a_run_replaces_kept_rows_of_the_same_case(folder: Path) -> None:
    case = Case(len, {"n": 1})
    store.Table("powers", keep=True).put(case, [{"x": 1}], 0.1)
    assert [row["x"] for row in store.Table("powers").rows()] == [1]
    store.Table("powers").put(case, [{"x": 2}], 0.1)
    assert [row["x"] for row in store.Table("powers").rows()] == [2]
    store.Table("powers").put(Case(len, {"n": 1, "message": "does not fit"}), [{}], 0.1)
    store.Table("powers", keep=True).put(Case(len, {"n": 2}), [{"y": 3}], 0.1)
    assert [(row["x"], row["y"], row["message"]) for row in store.Table("powers").rows()] == [
        (None, 3, None), (2, None, None), (None, None, "does not fit"),
    ]  # fmt: skip


@pytest.mark.long
def test_a_damaged_table_is_named_and_measured_again(folder: Path) -> None:
    run("experiment=powers")
    path = folder / "runs" / "powers" / "rows.parquet"
    path.write_bytes(path.read_bytes()[:-40])
    with pytest.warns(UserWarning, match=r"rows\.parquet"):
        assert store.Table("powers").rows() == []
    assert "3 cases measured now" in run("experiment=powers").stdout


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


def test_an_unknown_experiment_is_named_with_the_nearest(folder: Path) -> None:
    with pytest.raises(UnknownName, match="powers"):
        listed("power")


def test_a_function_may_be_named_so_that_only_its_process_imports_it(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "more" / "heavy.py").write_text("def measure(n):\n    yield {'n2': n * n}\n")
    monkeypatch.setenv("PYTHONPATH", str(folder / "more"))
    assert runner.CaseJob(folder / "more" / "powers.py", Case("heavy.measure", {"n": 4})).measured() == [{"n2": 16}]
    sent = runner.CaseJob(folder / "more" / "powers.py", Case("heavy.measure", {"n": 5})).sent()
    rows = sent.run_on("node 7", "its processor")
    assert isinstance(rows, list)
    row = rows[0]
    assert (row["n2"], row["node"], row["cpu"]) == (25, "node 7", "its processor")
    assert row["case_s"] > 0
    assert "heavy" not in sys.modules


def test_rows_of_several_machines_and_days_are_all_named() -> None:
    rows = [{"date": f"2026-11-0{day}", "versions": '{"torch": "2.13"}', "cpu": cpu, "threads": day} 
            for day, cpu in ((2, "a"), (1, "b"))]  # fmt: skip
    assert documents.made(rows, "torch") == "2026-11-01 to 2026-11-02, PyTorch 2.13, a and b"
    assert documents.made(rows[:1]) == "2026-11-02, a"
    assert documents.values_of(rows, "threads") == "2 and 1"


def test_a_process_that_dies_is_a_failed_case(folder: Path) -> None:
    file = folder / "more" / "dies.py"
    file.write_text("import os\n\ndef measure():\n    os._exit(7)\n")
    with pytest.raises(runner.Unfinished, match="ended with 7"):
        runner.CaseJob(file, Case(module_of(file).measure, {})).measured()


def test_rows_before_an_error_say_on_which_node_they_were_made(folder: Path) -> None:
    file = folder / "more" / "breaks.py"
    file.write_text("def measure():\n    yield {'n': 1}\n    raise ValueError('no two')\n")
    result = runner.CaseJob(file, Case(module_of(file).measure, {})).run_on("node 7", "its processor")
    assert isinstance(result, runner.Unfinished)
    assert [(row["n"], row["node"], row["cpu"]) for row in result.rows] == [(1, "node 7", "its processor")]


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
