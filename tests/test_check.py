"""`remat check`, the schemas of the file formats, and their documents: examples are run as they are written."""

from __future__ import annotations

import gzip
import json
import re
import warnings
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from helpers import blocks_of, rich_graph, run_blocks, schema_of

import remat
from experiments.solver_cases import graph_files
from remat.check import check_file
from remat.cli import main
from remat.extraction import extract_in_child
from remat.frontends.json import graph_from_dict, graph_to_dict
from remat.frontends.spec import ModelSpec

DOCS = Path(__file__).parents[1] / "docs"
NAMES = ("graph", "plan", "bound")


@pytest.fixture
def here(here: Path) -> Path:
    """A folder with the documented graph.json, plan.json and bound.json, which is the current one."""
    for name, text in zip(NAMES, blocks_of(DOCS / "reference/files.md", "json"), strict=True):
        Path(f"{name}.json").write_text(text)
    return here


def test_the_documented_files_and_python_do_what_the_pages_say(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    reference, guide = DOCS / "reference/files.md", DOCS / "how-to/check-a-file.md"
    (command,) = re.findall(r"^    remat (check .*)$", reference.read_text(), re.MULTILINE)
    assert main(command.split()) == 0
    assert capsys.readouterr() == (blocks_of(reference, "text")[0], "")
    (shown,) = re.findall(r"^    (graph\.json: .*)$", guide.read_text(), re.MULTILINE)
    assert main(["check", "graph.json"]) == 0
    assert capsys.readouterr().out == shown + "\n"
    (together,) = re.findall(r"^    remat (check plan.*)$", guide.read_text(), re.MULTILINE)
    assert main(together.split()) == 0
    capsys.readouterr()
    (broken,) = blocks_of(guide, "json")
    Path("broken.json").write_text(broken)
    assert complaints(capsys, "broken.json") == blocks_of(guide, "text")[0].splitlines()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        names = run_blocks(reference, {"remat": remat})
    assert capsys.readouterr().out == "11\n"
    assert (names["trace"].cost, names["trace"].peak_bytes) == (11, 8)
    assert remat.load_graph("copy.json") == remat.load_graph("graph.json")


def altered(name: str, **changes: Any) -> Path:
    path = Path(f"{name}.json")
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    return path


def complaints(capsys: pytest.CaptureFixture[str], *arguments: str) -> list[str]:
    assert main(["check", *arguments]) == 1
    said = capsys.readouterr()
    assert said.out == ""
    return said.err.splitlines()


def test_plans_and_bounds_are_read_as_strictly_as_graphs(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("plan", "bound"):
        path = str(altered(name, graph="a\x1b"))
        (line,) = complaints(capsys, path, "--graph", "graph.json")
        assert line.startswith(f"{path}: ")
        assert "holds a control character: 'a\\x1b'" in line
        altered(name, graph="tiny", budget=5)
        unknown = f"{path}: unknown keys are not read: 'budget' in the {name}, did you mean 'budget_bytes'?"
        assert check_file(path, "graph.json")[1] == [unknown]
    (line,) = complaints(capsys, str(altered("bound", budget_bytes=-1)), "--graph", "graph.json")
    assert line.endswith("budget_bytes must be 0 or more")
    (line,) = complaints(capsys, "bound.json", "--graph", "plan.json")
    assert line.startswith("--graph plan.json: 'format' must be 'remat-graph/1'")
    steps = json.loads(Path("plan.json").read_text())["steps"]
    altered("plan", graph="other", steps=[[*step, "fast"] if step == ["compute", 2] else step for step in steps])
    assert check_file("plan.json", "graph.json")[1][-2:] == [
        "plan.json: names implementations, but the graph has none: each operation runs as it is",
        "plan.json: names graph 'other', though it was made for 'tiny'",
    ]


def test_every_problem_of_a_graph_has_a_line(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    node = {"name": "a", "bytes": 1, "cost": 1}
    altered("graph", nodes=[node, node | {"bytes": -1}, {"name": "a\x07", "cost": 1}], edges=[[0, 1], [0, 1], [1, 1]])
    assert complaints(capsys, "graph.json") == [
        "graph.json: edge 1 is [0, 1] a second time",
        "graph.json: edge 2 goes from node 1 to node 1: nodes must be in execution order, no cycles",
        "graph.json: node 1: 'bytes' must not be negative, but is -1",
        "graph.json: node 2 lacks 'bytes'",
        "graph.json: node 2: 'name' holds a control character: 'a\\x07'",
    ]
    with pytest.raises(remat.InvalidGraph, match=r"^graph.json: edge 1 .* \(and 4 more; see remat check\)$") as caught:
        remat.load_graph("graph.json")
    assert len(caught.value.problems) == 5


def test_every_problem_of_a_plan_has_a_line(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    altered("plan", steps=[["compute", 0], ["compute", 9], ["free"], ["free", 0, "fast"]], budget_bytes=-1)
    lines = [
        "plan.json: 'budget_bytes' must be an integer from 0 to 1152921504606846976 or null",
        "plan.json: step 1: operation 9 does not exist (the graph has 4)",
        "plan.json: step 2: not a ['compute', operation] or ['free', value] pair: ['free']",
        "plan.json: step 3: a free has no implementation, but 'fast' is given",
    ]
    assert complaints(capsys, "plan.json", "--graph", "graph.json") == lines
    assert complaints(capsys, "plan.json") == [line for line in lines if "does not exist" not in line]


def test_what_a_file_claims_is_checked_against_its_graph(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, changes, words in [
        ("plan", {"steps": [["compute", 1]]}, "step 0: computes operation 1 (relu), whose input 0"),
        ("plan", {"scope": "free"}, "says scope free, but its steps are staged"),
        ("plan", {"budget_bytes": 7}, "peaks at 8 B, above its budget 7 B"),
        ("plan", {"graph_sha256": "0" * 64}, "was made for graph 'tiny', not for this 'tiny'"),
        ("bound", {"bound": 12}, "the certificate claims a bound of 12, but proves only 11"),
        ("bound", {"graph_sha256": "0" * 64}, "the bound is about another graph"),
        ("bound", {"bound": "11"}, "bound must be an integer"), ("bound", {"format": "remat-bound/99"}, ""),
        ("bound", {"format": None}, "'format' must be one of remat-graph/1"),
    ]:  # fmt: skip
        text = Path(f"{name}.json").read_text()
        (line,) = complaints(capsys, str(altered(name, **changes)), "--graph", "graph.json")
        assert line.startswith(f"{name}.json: {words}")
        Path(f"{name}.json").write_text(text)


def test_a_plan_that_names_no_graph_is_told_of(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    document = json.loads(Path("plan.json").read_text())
    del document["graph_sha256"]
    Path("plan.json").write_text(json.dumps(document))
    for arguments in ([], ["--graph", "graph.json"]):
        assert main(["check", "plan.json", *arguments]) == 0
        assert "note: plan.json: has no 'graph_sha256'" in capsys.readouterr().err
    with pytest.warns(UserWarning, match=r"plan\.json: has no 'graph_sha256'") as caught:
        remat.Plan.load("plan.json", remat.load_graph("graph.json"))
    assert len(caught) == 1


def test_names_twice_and_unknown_keys_are_notes(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    nodes = json.loads(Path("graph.json").read_text())["nodes"]
    nodes[1]["name"], nodes[3]["bytez"] = "conv", 3
    altered("graph", nodes=nodes)
    assert main(["check", "graph.json"]) == 0
    assert capsys.readouterr().err.splitlines() == [
        "note: graph.json: unknown keys are not read: 'bytez' in node 3, did you mean 'bytes'?",
        "note: graph.json: 2 operations share a name with another; names are labels, plans use ids",
    ]


def test_several_files_are_checked_and_one_wrong_one_is_enough(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("packed.json.gz").write_bytes(gzip.compress(Path("graph.json").read_bytes()))
    assert main(["check", "packed.json.gz", "absent.json", ".", "graph.json"]) == 1
    said = capsys.readouterr()
    assert [line.partition(":")[0] for line in said.out.splitlines()] == ["packed.json.gz", "graph.json"]
    assert said.err.splitlines() == [
        "absent.json: no such file", ".: cannot be read: it is a folder; name a file in it"
    ]  # fmt: skip


WRONG: tuple[Any, ...] = (None, -1, 1.5, True, "x", [], [1.5], {})


def changed(document: Any) -> Iterator[Any]:
    """The document with something of another kind in one place, or without one key."""
    if isinstance(document, dict):
        for key, value in document.items():
            yield {k: v for k, v in document.items() if k != key}
            yield from (document | {key: one} for one in (*WRONG, *changed(value)))
    elif isinstance(document, list):
        for i, value in enumerate(document):
            yield from ([*document[:i], one, *document[i + 1 :]] for one in (*WRONG, *changed(value)))


@pytest.mark.parametrize("name", [*NAMES, "windows"])
def test_the_schemas_and_the_readers_of_files_refuse_the_same(here: Path, name: str) -> None:
    document = json.loads(Path(f"{'bound' if name == 'windows' else name}.json").read_text())
    if name == "windows":  # the same bound in the form of the window relaxation
        node = {"denominator": 1, "multipliers": {}}
        tree = [node | {"column": ["S", 0, 0, 0], "zero": 1, "one": 2}, node, node]
        document |= {"format": "remat-bound/2", "boundaries": [1], "multipliers": {}, "tree": tree}
    graph, schema, told = remat.load_graph("graph.json"), schema_of(document["format"]), list[str]()
    schema.validate(document)
    assert not schema.is_valid(document | {"colour": "red"})
    read = {"graph": remat.load_graph, "plan": partial(remat.Plan.load, graph=graph)}.get(name)
    for one in changed(document):
        Path("changed.json").write_text(json.dumps(one))
        fits = schema.is_valid(one)  # a denominator of -1 and a hash that is none are found by the checker
        load = read or (remat.BoundCertificate.load if fits else partial(remat.verify_bound, graph))
        try:
            load("changed.json")
        except remat.InvalidInput as error:
            told.append(str(error))
            assert not fits, one
        else:
            assert fits, one
    assert len(told) > 100
    assert all("\n" not in line for line in told)


def test_graphs_with_everything_fit_their_schema() -> None:
    graph = rich_graph()
    document = json.loads(json.dumps(graph_to_dict(graph)))
    assert document["format"] == "remat-graph/2"
    schema_of(document["format"]).validate(document)
    assert graph_from_dict(document) == graph
    plan = remat.Plan.from_order(graph, [0], implementations=["fast"]).document()
    schema_of(plan["format"]).validate(json.loads(json.dumps(plan)))


def test_published_instances_and_the_zoo_fit_their_schemas_and_pass_the_check(instances: Path) -> None:
    paths = graph_files(instances)
    assert paths
    for path in paths:
        document = json.loads(path.read_text())
        schema_of(document["format"]).validate(document)
        line, remarks = check_file(path)
        assert line.startswith(f"{path}: remat-graph/1, graph '")
        assert remarks == []
    for name in remat.zoo.names("graph")[:3]:
        for document in (json.loads((remat.zoo.FOLDER / remat.zoo.describe(name)["file"]).read_text()),
                         json.loads(json.dumps(graph_to_dict(remat.zoo.graph(name))))):  # fmt: skip
            schema_of(document["format"]).validate(document)


@pytest.mark.long
def test_the_documented_factory_is_extracted(here: Path) -> None:
    pytest.importorskip("torch")
    module, use = blocks_of(DOCS / "how-to/bring-your-own.md", "python")
    (here / "my_models.py").write_text(module)
    spec = ModelSpec("my_models:factory", "torch", "my_models:factory", batch_size=4, options={"width": 64})
    assert repr(spec.target) in use.replace('"', "'")
    assert 'options={"width": 64}' in use
    graph = extract_in_child(spec, None)
    assert graph.name == "my_models:factory, batch 4"
    hidden = max(value.bytes for value in graph.values if not value.keep)
    assert hidden == 4 * 64 * 4  # batch, width, float32
