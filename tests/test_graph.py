"""Graphs and their files: validation, derived properties, hashing, what is read back, what is refused."""

from __future__ import annotations

import gzip
import json
import os
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
from brute_force import random_graph, random_step, small_graphs, with_implementations
from helpers import DIAMOND, refused
from hypothesis import HealthCheck, given, settings

from experiments.solver_cases import graph_files
from remat import (
    BoundCertificate,
    Graph,
    InvalidGraph,
    InvalidInput,
    InvalidPlan,
    Operation,
    Plan,
    Value,
    Work,
    load_graph,
    save_graph,
    simulate,
)
from remat.frontends.json import graph_from_dict, graph_to_dict
from remat.search.greedy import greedy_eviction


def ops(*rows):
    return tuple(Operation(f"op{i}", "", inputs, outputs) for i, (inputs, outputs) in enumerate(rows))


def values(n):
    return tuple(Value(f"v{i}", 1) for i in range(n))


@pytest.mark.parametrize(
    ("operations", "n_values", "words"),
    [
        (ops(((1,), (0,)), ((), (1,))), 2, "topological order"),
        (ops(((), (0,)), ((5,), (1,))), 2, "reads value 5, which does not exist"),
        (ops(((), (0, 3))), 1, "produces value 3, which does not exist"),
        (ops(((), (0,)), ((), (0,))), 1, "two producers"),
        (ops(((), (0,))), 2, "value 1 .* no producer"),
        (ops(((), (0,)), ((0, 0), (1,))), 2, "lists an input twice"),
        (ops(((-1,), (0,))), 1, "does not exist"),
    ],
)
def test_malformed_graphs_are_refused(operations, n_values, words):
    with pytest.raises(InvalidGraph, match=words):
        Graph("g", operations, values(n_values))


@pytest.mark.parametrize(
    ("field", "words"),
    [
        ({"bytes": [-1]}, "bytes of value 0 .* negative"),
        ({"bytes": [1.5]}, "must be an integer"),
        ({"bytes": [True]}, "must be an integer"),
        ({"costs": [-3]}, "cost of operation 0"),
        ({"costs": [2**61]}, "beyond the limit"),
        ({"workspace_bytes": [-1]}, "workspace_bytes"),
        ({"fixed_bytes": -1}, "fixed_bytes"),
        ({"loss": 4}, "loss is 4"),
        ({"deps": [[]] * 3, "bytes": [2**59] * 3, "costs": [1] * 3}, "total bytes"),
    ],
)
def test_impossible_numbers_are_refused(field, words):
    with pytest.raises(InvalidGraph, match=words):
        Graph.from_nodes(**{"name": "g", "deps": [[]], "bytes": [1], "costs": [1]} | field)


def test_a_resized_graph_is_that_graph_made_anew() -> None:
    rng = np.random.default_rng(5)
    for graph in (with_implementations(random_step(rng, 8), rng), random_graph(rng, 9, keep=0.3)):
        graph.sha256()  # is kept, and must not be taken over
        operations = tuple(replace(op, cost=op.cost + 3, workspace_bytes=7) for op in graph.operations)
        values = tuple(replace(value, bytes=2 * value.bytes) for value in graph.values)
        anew = replace(graph, operations=operations, values=values, fixed_bytes=11, cost_unit="flop")
        resized = graph.resized(operations, values, 11, "flop")
        assert resized == anew
        assert resized.sha256() == anew.sha256() != graph.sha256()
        assert (resized.producer, resized.users, resized.n_extra) == (anew.producer, anew.users, anew.n_extra)
        with pytest.raises(InvalidGraph, match="must not be negative"):
            graph.resized(fixed_bytes=-1)


def test_numpy_integers_become_plain_ones():
    sizes, costs = np.array([200, 100, 50], dtype=np.uint8), np.array([2**30] * 3, dtype=np.int32)
    graph = Graph.from_nodes("g", [[], [0], np.array([0, 1])], sizes, costs, fixed_bytes=np.int16(7))
    plain = Graph.from_nodes("g", [[], [0], [0, 1]], [200, 100, 50], [2**30] * 3, fixed_bytes=7)
    assert graph == plain
    assert type(graph.values[0].bytes) is type(graph.operations[2].inputs[0]) is type(graph.fixed_bytes) is int


def test_derived_properties_by_hand():
    operations = (
        Operation("a", "", (), (0, 1), 3, 5), Operation("b", "", (0,), (2,), 4), Operation("c", "", (0, 1, 2), (3,), 5)
    )  # fmt: skip
    sizes = (Value("w", 10), Value("x", 20), Value("y", 40), Value("z", 80))
    graph = Graph("g", operations, sizes, fixed_bytes=1000)
    assert graph.producer == (0, 0, 1, 2)
    assert graph.users == ((1, 2), (2,), (2,), ())
    assert (graph.n_edges, graph.total_cost, len(graph)) == (4, 12, 3)
    assert [graph.working_set_bytes(k) for k in range(3)] == [1035, 1050, 1150]
    assert graph.largest_working_set() == (1150, 2)
    assert graph.predecessors(2) == (0, 1)
    assert not graph.is_single_output
    assert graph.with_costs([1, 1, 1], "flop").total_cost == 3


def test_hash_follows_what_matters_only():
    base = {"name": "g", "deps": [[], [0]], "bytes": [1, 2], "costs": [3, 4]}
    sha = Graph.from_nodes(**base).sha256()
    assert Graph.from_nodes(**base | {"name": "h", "names": ["a", "b"], "source": "x"}).sha256() == sha
    for change in ({"bytes": [1, 3]}, {"costs": [3, 5]}, {"deps": [[], []]}, {"keep": [1]}, {"fixed_bytes": 1},
                   {"workspace_bytes": [0, 1]}, {"cost_unit": "flop"}):  # fmt: skip
        assert Graph.from_nodes(**base | change).sha256() != sha


def test_greedy_eviction_keeps_its_promise():
    rng = np.random.default_rng(2)
    made = 0
    for _ in range(60):
        graph = random_graph(rng, 12, multi_output=0.2, workspace=2, keep=0.1, once=0.1)
        needed = graph.largest_working_set()[0]
        for budget in range(needed, needed + 8):
            plan = greedy_eviction(graph, budget)
            if plan is not None:
                made += 1
                assert simulate(graph, plan).peak_bytes <= budget
                assert str(plan.scope) == "staged"
    assert made > 200


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
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
        (node(cost=2**70), "node 2: 'cost' must be at most"),
        (nodes(edges=[[0, 3]]), r"edge 0 is \[0, 3\], but there are 3 nodes"),
        (nodes(edges=[[0, 1], [2, 1]]), "edge 1 goes from node 2 to node 1"),
        (nodes(edges=[[0, 1], [1, 2], [0, 1]]), r"edge 2 is \[0, 1\] a second time"),
        (nodes(loss=3), "loss is 3"),
        (nodes(name="\ud800"), "half a character"),
        (nodes(name="a\x1b[31m"), r"'name' holds a control character: 'a\\x1b"),
        (node(name="a\u202eb"), "node 2: 'name' holds a control character"),
        (lacking("name") | {"nmae": "g"}, "the graph lacks 'name'; did you mean 'name' by 'nmae'"),
        (two(inputs=[0]), "before it is produced"),
        (two(outputs=[1]), "value 1, which does not exist"),
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


DIAMOND_PLAN = partial(Plan.load, graph=DIAMOND)
LOADERS = [(load_graph, InvalidGraph), (DIAMOND_PLAN, InvalidPlan), (BoundCertificate.load, InvalidInput)]
of_every_format = pytest.mark.parametrize(("load", "refusal"), LOADERS, ids=["graph", "plan", "bound"])
BROKEN = [
    (b'{"name": "a", "name": "b"}', "has the key 'name' twice in one object"),
    (b'{"a": NaN}', "holds NaN"),
    (b'{"a": 1', r"at line 1, column 8 and the file ends there; is it cut short\?"),
    (b'{\n"a" 1}', r"cannot be read as JSON: Expecting ':' delimiter at line 2, column 5$"),
    (b"", "cannot be read as JSON: it is empty"),
    (b"[1, 2]", "must be a JSON object|'format' must be|is not"),
    (b'{"a": ' + b"9" * 5000 + b"}", "integer of thousands of digits"),
    (b'{"a": ' + b"[" * 100_000, "nested too deeply"),
    (b'{"name": "\xff"}', r"cannot be read as JSON: it is not UTF-8 text \(byte 10\)$"),
    (gzip.compress(b'{"a": 1}' * 9, mtime=0)[:-9], "is compressed with gzip, but damaged or cut short"),
    (gzip.compress(b'{"a": 1}' * 9, mtime=0)[:15] + b"\0\0\0", "is compressed with gzip, but damaged or cut short"),
]


@of_every_format
def test_what_is_no_plain_json_is_named_in_a_line_without_codec_words(tmp_path, load, refusal):
    path = tmp_path / "g.json"
    for content, words in BROKEN:
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


def test_compressed_files_are_read(tmp_path):
    path = tmp_path / "g.json.gz"
    path.write_bytes(gzip.compress(json.dumps(nodes()).encode()))
    assert load_graph(path) == graph_from_dict(nodes())


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
