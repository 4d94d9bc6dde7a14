"""Graph files: what is read back, and what is refused with which words."""

from __future__ import annotations

import gzip
import json
import os
from functools import partial

import pytest
from brute_force import small_graphs
from helpers import DIAMOND, refused
from hypothesis import HealthCheck, given, settings

from experiments.solver_cases import graph_files
from remat import (
    BoundCertificate,
    Graph,
    InvalidGraph,
    InvalidInput,
    InvalidPlan,
    Work,
    load_graph,
    save_graph,
    simulate,
)
from remat.frontends.json import graph_from_dict, graph_to_dict
from remat.plan import Plan


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(graph=small_graphs())
def test_every_graph_comes_back(graph, tmp_path):
    path = tmp_path / "graph.json"
    save_graph(graph, path)
    assert load_graph(path) == graph


def test_the_simpler_format_is_written_where_it_loses_nothing():
    plain = Graph.from_nodes("g", [[], [0]], [1, 2], [3, 4], workspace_bytes=[0, 9], loss=1, source="a test")
    document = graph_to_dict(plain)
    assert document["format"] == "remat-graph/1"
    assert document["edges"] == [[0, 1]]
    assert graph_from_dict(document) == plain
    worked = Graph.from_nodes("g", [[]], [1], [3], works=[Work(5, 6, "float16", "{}", 7, True)])
    for rich in (worked, Graph.from_nodes("g", [[]], [1], [3], keep=[0])):
        assert graph_to_dict(rich)["format"] == "remat-graph/2"
        assert graph_from_dict(json.loads(json.dumps(graph_to_dict(rich)))) == rich


def nodes(**changes):
    return {
        "format": "remat-graph/1", "name": "g", "cost_unit": "ns", "fixed_bytes": 0, "loss": None,
        "nodes": [{"name": "a", "op": "x", "bytes": 1, "cost": 1, "backward": False} for _ in range(3)],
        "edges": [[0, 1], [1, 2]],
    } | changes  # fmt: skip


def node(**changes):
    good = {"name": "a", "op": "x", "bytes": 1, "cost": 1, "backward": False}
    return nodes(nodes=[good, good, good | changes])


def lacking(key):
    document = nodes()
    del document[key]
    return document


def two(**changes):
    row = {"name": "a", "op": "", "inputs": [], "outputs": [0], "cost": 1}
    return {
        "format": "remat-graph/2", "name": "g", "cost_unit": "ns", "values": [{"name": "v", "bytes": 1}],
        "operations": [row | changes],
    }  # fmt: skip


@pytest.mark.parametrize(
    ("document", "words"),
    [
        ([], "must be a JSON object"),
        (nodes(format="remat-graph/7"), "'format' must be"),
        (lacking("cost_unit"), "lacks 'cost_unit'"),
        (node(bytes=-1), "node 2: 'bytes' must not be negative, but is -1"),
        (node(bytes=1.5), "node 2: 'bytes' must be an integer, not 1.5"),
        (node(cost=2**70), "node 2: 'cost' must be at most"),
        (nodes(edges=[[0, 3]]), r"edge 0 is \[0, 3\], but there are 3 nodes"),
        (nodes(edges=[[0, 1], [2, 1]]), "edge 1 goes from node 2 to node 1"),
        (nodes(edges=[[1, 1]]), "no cycles"),
        (nodes(edges=[[0, 1], [1, 2], [0, 1]]), r"edge 2 is \[0, 1\] a second time"),
        (nodes(loss=3), "loss is 3"),
        (nodes(name="\ud800"), "half a character"),
        (nodes(name="a\x1b[31m"), r"'name' holds a control character: 'a\\x1b"),
        (nodes(source="a\nb"), "'source' holds a control character"),
        (node(name="a\u202eb"), "node 2: 'name' holds a control character"),
        (node(op="a\x00"), "node 2: 'op' holds a control character"),
        (lacking("name") | {"nmae": "g"}, "the graph lacks 'name'; did you mean 'name' by 'nmae'"),
        (two(inputs=[0]), "before it is produced"),
        (two(outputs=[1]), "value 1, which does not exist"),
        (two(outputs=[]), "no producer"),
        (two(work={"flops": "many"}), "operation 0.work: 'flops'"),
    ],
)
def test_malformed_graph_files_name_the_file_and_the_place(tmp_path, document, words):
    path = tmp_path / "broken.json"
    path.write_text(json.dumps(document))
    with refused(words, InvalidGraph, path):
        load_graph(path)


@pytest.mark.filterwarnings("error")
def test_published_instances_load(instances):
    paths = graph_files(instances)
    assert len(paths) >= 8
    for path in paths:
        graph = load_graph(path)
        document = json.loads(path.read_text())
        assert (len(graph), graph.n_edges) == (len(document["nodes"]), len({tuple(e) for e in document["edges"]}))
        assert graph.total_cost == sum(row["cost"] for row in document["nodes"])
        trace = simulate(graph, Plan.from_order(graph, range(len(graph))))
        assert trace.cost == graph.total_cost
        assert trace.peak_bytes >= graph.largest_working_set()[0]


DIAMOND_PLAN = partial(Plan.load, graph=DIAMOND)
LOADERS = [(load_graph, InvalidGraph), (DIAMOND_PLAN, InvalidPlan), (BoundCertificate.load, InvalidInput)]
of_every_format = pytest.mark.parametrize(("load", "refusal"), LOADERS, ids=["graph", "plan", "bound"])
BROKEN = [
    (b'{"name": "a", "name": "b"}', "has the key 'name' twice in one object"),
    (b'{"a": {"b": 1, "b": 1}}', "has the key 'b' twice"),
    (b'{"a": NaN}', "holds NaN"),
    (b'{"a": -Infinity}', "holds -Infinity"),
    (b'{"a": 1', r"at line 1, column 8 and the file ends there; is it cut short\?"),
    (b'{\n"a" 1}', r"cannot be read as JSON: Expecting ':' delimiter at line 2, column 5$"),
    (b"", "cannot be read as JSON: it is empty"),
    (b"  \n", "cannot be read as JSON: it is empty"),
    (b"[1, 2]", "must be a JSON object|'format' must be|is not"),
    (b'{"a": ' + b"9" * 5000 + b"}", "integer of thousands of digits"),
    (b'{"a": ' + b"[" * 100_000, "nested too deeply"),
    (b'{"name": "\xff"}', r"cannot be read as JSON: it is not UTF-8 text \(byte 10\)$"),
    (gzip.compress(b'{"a": 1}' * 9, mtime=0)[:-9], "is compressed with gzip, but damaged or cut short"),
]


@of_every_format
@pytest.mark.parametrize(("content", "words"), BROKEN)
def test_what_is_no_plain_json_is_named_in_a_line_without_codec_words(tmp_path, load, refusal, content, words):
    path = tmp_path / "g.json"
    path.write_bytes(content)
    with refused(words, refusal, path):
        load(path)


@of_every_format
def test_what_is_no_file_is_neither_read_nor_waited_for(tmp_path, load, refusal):
    pipe = tmp_path / "pipe.json"
    os.mkfifo(pipe)
    wrong = {tmp_path / "absent.json": "absent.json: no such file", tmp_path: "cannot be read"}
    for path, words in (wrong | dict.fromkeys((pipe, "/dev/zero"), "not a regular file")).items():
        with pytest.raises(refusal, match=words):
            load(path)


def test_compressed_files_are_read_and_cut_ones_named(tmp_path):
    path = tmp_path / "g.json.gz"
    whole = gzip.compress(json.dumps(nodes()).encode())
    path.write_bytes(whole)
    assert load_graph(path) == graph_from_dict(nodes())
    path.write_bytes(whole[:15] + b"\0\0\0" + whole[18:])
    with pytest.raises(InvalidGraph, match=r"g\.json\.gz: is compressed with gzip, but damaged or cut short"):
        load_graph(path)


def test_unknown_keys_are_warned_of_once_with_the_nearest_name(tmp_path):
    path = tmp_path / "g.json"
    document = nodes(colour="red")
    for row in document["nodes"]:
        row["workspace_byte"] = 7
    path.write_text(json.dumps(document))
    with pytest.warns(UserWarning, match="unknown keys") as caught:
        load_graph(path)
    (warning,) = caught
    assert str(warning.message) == (
        f"{path}: unknown keys are not read: 'colour' in the graph; "
        "'workspace_byte' in 3 nodes, did you mean 'workspace_bytes'?"
    )
    assert warning.filename == __file__


def test_a_graph_that_exists_can_be_saved_and_loaded():
    """What a file must not hold, a graph does not hold either."""
    for wrong in ({"names": ["a\tb"]}, {"kinds": ["\x7f"]}, {"source": "x\u2028"}):
        with pytest.raises(InvalidGraph, match="control character"):
            Graph.from_nodes("g", [[]], [1], [3], **wrong)
    assert Graph.from_nodes("naïve 図 👩‍🔬 <b> $x$", [[]], [1], [3]).name
