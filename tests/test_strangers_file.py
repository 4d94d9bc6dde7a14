"""Files that anyone may have written: they neither fill the memory nor reach the terminal or a spreadsheet as code."""

from __future__ import annotations

import gzip
import io
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import fake_run
import pandas as pd
import pytest
from helpers import rich_graph, run_python

import remat
from analysis.results import load_run
from analysis.table import write_csv, write_frame
from experiments import cli as run_py
from remat import files
from remat.cli import main
from remat.frontends.json import graph_to_dict

NASTY = "\x1b[2J\nfile.json: all is well\r\u202eok\u2028\ud800é"
TINY = remat.Graph.from_nodes("tiny", [[], [0], [1], [0, 2]], [2, 2, 3, 2], [1, 5, 1, 1], cost_unit="unit")


def bound(**changes: Any) -> dict[str, Any]:
    return {
        "format": "remat-bound/1", "graph": "tiny", "graph_sha256": TINY.sha256(), "budget_bytes": 7, "scope": "staged",
        "bound": 0, "denominator": 1, "multipliers": {"edge": [[0, 0, 1, 1]]},
    } | changes  # fmt: skip


LOG: list[Any] = [
    {"INSTRUCTION": "ANNOTATE", "ANNOTATION": "START"},
    {"INSTRUCTION": "CONSTANT", "NAME": "w"},
    {"INSTRUCTION": "MEMORY", "NAME": "w", "MEMORY": "4"},
    {"INSTRUCTION": "CALL", "NAME": "f", "TIME": "3", "ARGS": ["w"], "RESULT": ["x"]},
    {"INSTRUCTION": "MEMORY", "NAME": "x", "MEMORY": "8"},
    {"INSTRUCTION": "ALIAS", "NAME": "x", "ALIAS": "-1"},
    {"INSTRUCTION": "RELEASE", "NAME": "x"},
]
DOCUMENTS: dict[str, Callable[[], Any]] = {
    "nodes.json": lambda: graph_to_dict(TINY) | {"more": {"a": 1}},
    "values.json": lambda: json.loads(json.dumps(graph_to_dict(rich_graph()))),
    "plan.json": lambda: json.loads(
        json.dumps(remat.Plan.from_order(TINY, range(4), 9).document() | {"more": [[]], "execution": {"a": "b"}})
    ),
    "named.json": lambda: remat.Plan.from_order(TINY, range(4)).document() | {"steps": [["compute", 0, "fast"]]},
    "bound.json": bound,
    "windows.json": lambda: bound(
        format="remat-bound/2", boundaries=[1], multipliers={},
        tree=[{"denominator": 1, "multipliers": {}, "column": ["S", 0, 0, 0], "zero": 1, "one": 1},
              {"denominator": 1, "multipliers": {"need": [[0, 0, 0, 1]]}}],
    ),
    "step.log": lambda: LOG,
}  # fmt: skip


def variants(document: Any) -> Iterator[Any]:
    """The document with one text or key of it replaced by `NASTY`, or a key of that name added."""
    if isinstance(document, str):
        yield NASTY
        yield document + NASTY
    elif isinstance(document, list):
        for i, item in enumerate(document):
            yield from ([*document[:i], other, *document[i + 1 :]] for other in variants(item))
    elif isinstance(document, dict):
        yield document | {NASTY: NASTY}
        for key, value in document.items():
            others = {name: item for name, item in document.items() if name != key}
            yield others | {NASTY: value}
            yield others | {key + NASTY: value}
            yield document | {key: NASTY}
            yield from (document | {key: other} for other in variants(value))


@pytest.mark.parametrize("name", DOCUMENTS)
def test_no_text_of_a_file_reaches_the_terminal_as_code(
    name: str, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    remat.save_graph(TINY, "tiny.json")
    document = DOCUMENTS[name]()
    n_shown = 0
    for changed in variants(document):
        lines = [json.dumps(line) for line in changed] if name.endswith(".log") else [json.dumps(changed)]
        Path(name).write_text("\n".join(lines))
        for arguments in ([], ["--graph", "tiny.json"], ["--graph", name]):
            main(["check", name, *arguments])
            said = capsys.readouterr()
            for line in (said.out + said.err).splitlines():  # splits at every character that ends a line
                assert line.startswith((f"{name}: ", f"note: {name}: ", f"--graph {name}: ")), changed
                assert line.isprintable(), changed
            n_shown += "all is well" in said.out + said.err
    assert n_shown > 0  # as text


def test_a_terminal_without_a_character_gets_its_escape(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    remat.save_graph(remat.Graph.from_nodes("naïve 図", [[], [0]], [1, 1], [1, 1]), "g.json")
    code = "import sys; from remat.cli import main; sys.exit(main(['check', 'g.json']))"
    printed = run_python(code, PYTHONIOENCODING="ascii", PYTHONPATH=str(Path(remat.__file__).parents[1]))
    assert r"graph 'na\xefve \u56f3': 2 operations" in printed
    written = io.BytesIO()
    monkeypatch.setattr(
        sys, "stderr", io.TextIOWrapper(written, encoding="ascii", errors="strict", line_buffering=True)
    )
    assert run_py.main(["graph=naïve.json"]) == 1
    assert written.getvalue().startswith(b"error: cannot read 'graph=na\\xefve.json' (")


def test_a_file_of_too_many_values_is_refused_before_they_are_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "MAX_JSON_VALUES", 5000)
    path, log = tmp_path / "g.json", tmp_path / "step.log"
    text = b"[" + b"{}," * 4000 + b"{}]"
    for content in (text, gzip.compress(text)):
        path.write_bytes(content)
        with pytest.raises(remat.InvalidGraph, match=r"g\.json: .* more than 5,000 values$"):
            remat.load_graph(path)
    path.write_bytes(b"[" + b"{}," * 1000 + b"{}]" + b" " * 5000)
    with pytest.raises(remat.InvalidGraph, match="must be a JSON object"):
        remat.load_graph(path)
    monkeypatch.setattr(files, "MAX_JSON_LINES", 50)
    log.write_text("{}\n" * 60)
    with pytest.raises(remat.InvalidGraph, match=r"step\.log: line 51: comes after 50 lines"):
        remat.load_graph(log)

    def full(_: str) -> None:
        raise MemoryError

    monkeypatch.setattr(files, "_DECODER", SimpleNamespace(decode=full))
    with pytest.raises(remat.InvalidGraph, match=r"g\.json: cannot be read: it needs more memory than there is$"):
        remat.load_graph(path)


def test_no_more_than_a_thousand_problems_are_listed(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for document in (
        graph_to_dict(TINY) | {"edges": [{}] * 3000},
        graph_to_dict(TINY) | {"nodes": [{"nam": 1}] * 3000},
        remat.Plan.from_order(TINY, range(4)).document() | {"steps": [{}] * 3000},
    ):
        Path("file.json").write_text(json.dumps(document))
        assert main(["check", "file.json"]) == 1
        *_, last = lines = capsys.readouterr().err.splitlines()
        assert len(lines) == files.MOST_PROBLEMS + 1
        assert last.endswith("has more than 1000 problems; the others are not listed")


def test_the_graph_that_is_named_is_read_also_beside_a_graph(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    remat.save_graph(TINY, "tiny.json")
    assert main(["check", "tiny.json", "--graph", "nofile"]) == 1
    assert capsys.readouterr().err == "--graph nofile: no such file\n"
    assert main(["check", "tiny.json", "--graph", "tiny.json"]) == 0
    assert capsys.readouterr().err == ""


FORMULAS = ('=HYPERLINK("http://x")', "+1+cmd|' /C calc'!A0", "-2+3", "@SUM(A1)", " =1", "\t=1", "＝1")
TEXTS = ("a=b", "-", "+3.2 %", "-0.5", "–", "checkpoint_all", "")


def test_no_cell_of_a_table_begins_as_a_formula(tmp_path: Path) -> None:
    path = write_frame(pd.DataFrame({"name": [*FORMULAS, *TEXTS], "cost": -1.5}), tmp_path / "table.csv")
    back = pd.read_csv(path, keep_default_na=False)
    assert back["name"].tolist() == [*(f"'{text}" for text in FORMULAS), *TEXTS]
    assert set(back["cost"]) == {-1.5}
    graph = remat.Graph.from_nodes(FORMULAS[0], [[], [0]], [1, 1], [1, 1])
    plan = remat.Plan.from_order(graph, range(2))
    folder = fake_run.write_run(tmp_path, graph, [(fake_run.row(graph, "checkpoint_all", 4, "OPTIMAL", plan), plan)])
    of_a_run = pd.read_csv(write_csv(load_run(folder), tmp_path / "table.csv"))
    assert of_a_run["graph_name"].tolist() == [f"'{FORMULAS[0]}"]
