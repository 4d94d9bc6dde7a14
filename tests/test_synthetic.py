"""Synthetic graphs against hand-made ones and against the published instances."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers import refused

from remat.extraction import extract
from remat.frontends.spec import ModelSpec
from remat.frontends.synthetic import chain, layered, skip
from remat.graph import Graph


def deps(graph: Graph) -> list[list[int]]:
    return [list(graph.predecessors(k)) for k in range(len(graph))]


def test_a_chain_of_two_and_a_skip_of_depth_one_by_hand() -> None:
    graph = chain(n=2, bytes=10, cost=3, batch_size=2)
    # layer0, layer1, loss, gradient of layer1, gradient of layer0
    assert deps(graph) == [[], [0], [1], [1, 2], [0, 1, 3]]
    assert graph.value_bytes.tolist() == [20, 20, 8, 20, 20]
    assert graph.costs.tolist() == [6, 6, 0, 12, 12]
    assert graph.loss == 2
    assert [op.is_backward for op in graph.operations] == [False, False, False, True, True]
    graph = skip(depth=1, bytes=8, cost=1)
    # down0, bottom, up0 (reads both), loss, gradients of up0, bottom, down0
    assert deps(graph) == [[], [0], [0, 1], [2], [2, 3], [1, 2, 4], [0, 1, 2, 4, 5]]
    assert graph.value_bytes.tolist() == [8, 4, 8, 4, 8, 4, 8]


def test_chain_has_the_edges_of_the_published_vgg16(instances: Path) -> None:
    published = json.loads((instances / "v100" / "vgg16_b256.json").read_text())
    graph = chain(n=22)
    assert {(u, v) for v in range(len(graph)) for u in graph.predecessors(v)} == {tuple(e) for e in published["edges"]}


@pytest.mark.parametrize(("n", "width"), [(100, 0.27), (250, 0.43)])
def test_layered_resembles_the_published_ones(instances: Path, n: int, width: float) -> None:
    """Mean edges within 15 %, mean bytes within 10 % and layers within 3 of the published graph, over ten seeds."""
    published = json.loads((instances / "layered" / f"layered_n{n}.json").read_text())
    graphs = [layered(n=n, width=width, seed=seed) for seed in range(10)]
    assert np.mean([g.n_edges for g in graphs]) == pytest.approx(len(published["edges"]), rel=0.15)
    size = np.mean([node["bytes"] for node in published["nodes"]])
    assert np.mean([g.value_bytes.mean() for g in graphs]) == pytest.approx(size, rel=0.1)
    longest = _levels([[u for u, v in published["edges"] if v == k] for k in range(n)])
    assert all(abs(max(_levels(deps(g))) - max(longest)) <= 3 for g in graphs)


def _levels(dep: list[list[int]]) -> list[int]:
    level: list[int] = []
    for inputs in dep:
        level.append(1 + max((level[u] for u in inputs), default=-1))
    return level


@pytest.mark.parametrize("make", [layered, partial(chain, varied=True)])
def test_every_integer_is_a_seed(make: Callable[..., Graph]) -> None:
    assert make(n=10, seed=-1).sha256() == make(n=10, seed=-1).sha256() != make(n=10, seed=2).sha256()


def test_layered_is_connected_and_keeps_its_share_of_skips() -> None:
    graph = layered(n=400, width=0.4, skips=0.3, seed=1)
    assert [k for k in range(400) if not graph.operations[k].inputs] == [0]
    assert [v for v in range(400) if not graph.users[v]] == [399]
    level = _levels(deps(graph))
    longer = sum(level[v] - level[u] > 1 for v in range(400) for u in graph.predecessors(v))
    assert longer / graph.n_edges == pytest.approx(0.3, abs=0.02)


def spec(**changes: Any) -> ModelSpec:
    fields = {"name": "chain", "framework": "synthetic", "target": "remat.frontends.synthetic:chain", "batch_size": 2}
    return ModelSpec(**(fields | changes))


def test_extract_scales_by_the_batch_and_names_the_graph() -> None:
    graph = extract(spec(options={"n": 3, "bytes": 5}))
    assert (graph.name, graph.value_bytes[0], len(graph)) == ("chain_b2", 10, 7)


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"options": {"n": 0}}, "n must be"),
        ({"options": {"n": 10**9}}, "limit"),
        ({"options": {"length": 3}}, "length"),
        ({"batch_size": 0}, "batch_size"),
        ({"input_size": (224, 224, 3)}, "input_size"),
        ({"target": "remat.frontends.synthetic:layered", "options": {"n": 2}}, "at least 3"),
        ({"target": "remat.frontends.synthetic:layered", "options": {"seed": 0.5}}, "seed must be an integer"),
        ({"target": "remat.frontends.synthetic:nothing"}, "nothing"),
    ],
)
def test_bad_options_are_one_line(changes: dict[str, object], word: str) -> None:
    with refused(word):
        extract(spec(**changes))
