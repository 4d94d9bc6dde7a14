"""Logs of DTR's simulator: what becomes of each instruction, what is refused, and published logs."""

from __future__ import annotations

import gzip
import itertools
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers import refused

import remat
from remat import Graph, InvalidGraph
from remat.check import check_file
from remat.frontends import dtr_log
from remat.frontends.dtr_log import load_dtr_log
from remat.simulator import plain_peak

START, BACKWARD = ({"INSTRUCTION": "ANNOTATE", "ANNOTATION": text} for text in ("START", "BACKWARD"))

Line = dict[str, Any]


def constant(name: str, size: object) -> list[Line]:
    return [{"INSTRUCTION": "CONSTANT", "NAME": name}, {"INSTRUCTION": "MEMORY", "NAME": name, "MEMORY": str(size)}]


def call(kind: str, reads: list[str], made: dict[str, tuple[object, int]], time: object = 1) -> list[Line]:
    """A call; `made` has bytes and the argument whose storage is shared (-1: none) of each result."""
    lines: list[Line] = [{"INSTRUCTION": "CALL", "NAME": kind, "ARGS": reads, "RESULT": [*made], "TIME": str(time)}]
    for name, (size, alias) in made.items():
        lines += [{"INSTRUCTION": "MEMORY", "NAME": name, "MEMORY": str(size)},
                  {"INSTRUCTION": "ALIAS", "NAME": name, "ALIAS": str(alias)}]  # fmt: skip
    return lines


def copy(source: str, target: str) -> Line:
    return {"INSTRUCTION": "COPY", "SRC": source, "DST": target}


def mutate(kind: str, reads: list[str], places: list[Any], time: int = 1) -> Line:
    return {"INSTRUCTION": "MUTATE", "NAME": kind, "ARGS": reads, "MUTATE": places, "TIME": str(time)}


def release(*names: str) -> list[Line]:
    return [{"INSTRUCTION": "RELEASE", "NAME": name} for name in names]


def text_of(*lines: Line | list[Line]) -> str:
    flat = itertools.chain.from_iterable([line] if isinstance(line, dict) else line for line in lines)
    return "".join(json.dumps(line) + "\n" for line in flat)


def read(folder: Path, *lines: Line | list[Line]) -> Graph:
    (folder / "step.log").write_text(text_of(START, *lines))
    return remat.load_graph(folder / "step.log")


# A step of two layers: x, a = mm(x, w), b = relu(a), loss = sum(b), then gradients.
STEP = [
    *constant("w", 10), *constant("x", 4), *call("mm", ["x", "w"], {"a": (8, -1)}, 5), *call("relu", ["a"],
    {"b": (8, -1)}, 3), *call("sum", ["b"], {"l": (1, -1)}), BACKWARD, *call("relu_backward", ["b", "l"],
    {"db": (8, -1)}, 2), *release("a", "b"), *call("mm", ["x", "db"], {"dw": (10, -1)}, 6), *release("db", "l", "x"),
]  # fmt: skip


def test_a_step(tmp_path: Path) -> None:
    graph = read(tmp_path, STEP)
    assert (graph.name, graph.fixed_bytes, graph.cost_unit, graph.loss) == ("step", 14, "ns", 2)
    assert [(op.kind, op.inputs, op.outputs, op.cost, op.is_backward) for op in graph.operations] == [
        ("mm", (), (0,), 5, False), ("relu", (0,), (1,), 3, False), ("sum", (1,), (2,), 1, False),
        ("relu_backward", (1, 2), (3,), 2, True), ("mm", (3,), (4,), 6, True),
    ]  # fmt: skip
    assert [(value.name, value.bytes, value.keep) for value in graph.values] == [
        ("a", 8, False), ("b", 8, False), ("l", 1, False), ("db", 8, False), ("dw", 10, True),
    ]  # fmt: skip
    assert plain_peak(graph) == 14 + 18  # b, l and db, or db and dw
    assert load_dtr_log(tmp_path / "step.log").program_peak_bytes == 14 + 25  # a is released late


def test_a_view_is_its_storage(tmp_path: Path) -> None:
    """Its time is part of the operation that made the storage; a view of a constant costs nothing."""
    views = [*call("t", ["w"], {"wt": (10, 0)}, 7), *call("mm", ["wt"], {"a": (8, -1)}, 5),
             *call("split", ["a", "w"], {"a1": (8, 0), "a2": (8, 0)}, 2), *call("view", ["a1"], {"a3": (8, 0)}, 1),
             *release("a", "a1", "a2")]  # fmt: skip
    graph = read(tmp_path, constant("w", 10), views, call("sum", ["a3", "a3"], {"l": (1, -1)}), release("a3", "l"))
    assert [(op.kind, op.inputs, op.cost) for op in graph.operations] == [("mm", (), 8), ("sum", (0,), 1)]
    assert not any(value.keep for value in graph.values)
    mixed = call("both", ["a"], {"a1": (8, 0), "n": (3, -1)}, 4)
    graph = read(
        tmp_path, call("mm", [], {"a": (8, -1)}), mixed, release("a", "n"), call("sum", ["a1"], {"l": (1, -1)})
    )
    calls = [(op.inputs, op.outputs, op.cost) for op in graph.operations]
    assert calls == [((), (0,), 1), ((0,), (1,), 4), ((0,), (2,), 1)]
    assert [value.keep for value in graph.values] == [True, False, True]  # a by the name of its view


def test_a_copy_keeps_a_value(tmp_path: Path) -> None:
    made = call("mm", [], {"a": (8, -1)})
    graph = read(tmp_path, made, copy("a", "c"), release("a"))
    assert graph.values[0].keep
    graph = read(tmp_path, made, copy("a", "c"), release("a"), call("sum", ["c"], {"l": (1, -1)}), release("c"))
    assert graph.operations[1].inputs == (0,)
    assert [value.keep for value in graph.values] == [False, True]
    given = {"INSTRUCTION": "COPY_FROM", "SRC": "b", "DST": "a"}
    graph = read(tmp_path, made, call("mm", [], {"b": (8, -1)}), given, release("b"))
    assert [value.keep for value in graph.values] == [False, True]
    read(tmp_path, made, given | {"SRC": "a"}, call("mm", ["a"], {"b": (8, -1)}))  # onto itself
    assert load_dtr_log(tmp_path / "step.log").program_peak_bytes == 16


def test_what_is_written_over_is_copied(tmp_path: Path) -> None:
    """Every name of the storage has the new content afterwards, and the old one may be needed for a repetition."""
    lines = [*call("mm", [], {"a": (8, -1)}, 5), copy("a", "c"), *call("view", ["a"], {"v": (8, 0)}, 0),
             mutate("add_", ["v", "w", "c"], [0, 2], 3), *release("v")]  # fmt: skip
    graph = read(tmp_path, constant("w", 2), lines, call("sum", ["a", "c"], {"l": (1, -1)}), release("a", "c"))
    assert [(op.kind, op.inputs, op.outputs, op.cost) for op in graph.operations] == [
        ("mm", (), (0,), 5), ("add_", (0,), (1,), 3), ("sum", (1,), (2,), 1)
    ]  # fmt: skip
    assert [(value.bytes, value.keep) for value in graph.values] == [(8, False), (8, False), (1, True)]
    assert load_dtr_log(tmp_path / "step.log").program_peak_bytes == plain_peak(graph) == 2 + 16
    graph = read(tmp_path, constant("w", 2), mutate("add_", ["w"], [0]), call("sum", ["w"], {"l": (1, -1)}))
    assert [op.inputs for op in graph.operations] == [(), (0,)]
    assert [(value.bytes, value.keep) for value in graph.values] == [(2, True), (1, True)]


def test_where_the_step_and_its_backward_pass_begin(tmp_path: Path) -> None:
    step = [line for line in STEP if line != BACKWARD]
    assert read(tmp_path, step).loss == 2
    first = [*call("pool_backward", [], {"p": (1, -1)}), *STEP]  # a name alone does not count beside the annotation
    assert read(tmp_path, first).loss == 3
    assert read(tmp_path, call("mm", [], {"a": (1, -1)})).loss is None
    path = tmp_path / "s.log"
    path.write_text(text_of(constant("old", 3), call("mm", ["old"], {"o": (1, -1)}), START, STEP, release("o", "old")))
    graph = remat.load_graph(path)
    assert (len(graph), graph.fixed_bytes) == (5, 14)  # lines before the step do not count


def test_a_compressed_log_is_checked_and_solved(tmp_path: Path) -> None:
    graph, packed = read(tmp_path, STEP), tmp_path / "a.log.gz"
    packed.write_bytes(gzip.compress((tmp_path / "step.log").read_bytes()))
    assert graph.sha256() == remat.load_graph(packed).sha256()
    line, remarks = check_file(packed)
    assert line.startswith(f"{packed}: DTR's operator log, graph 'a': 5 operations, 5 values of 35 B")
    assert not remarks
    assert remat.solve(graph, 14 + 18, "dtr", "fixed_order", isolate=False).cost == 17


MADE = call("mm", [], {"a": (8, -1)})
REFUSED = [
    (constant("w", -1), "line 3: 'MEMORY' must be 0 or more, but is -1"),
    (constant("w", 1.5), "line 3: 'MEMORY' must be a whole number, not '1.5'"),
    ([*constant("w", 1), *constant("w", 1)], "line 4: 'w' is declared a second time"),
    ([{"INSTRUCTION": "CONSTANT", "NAME": 3}], "line 2: 'NAME' must be a name, not 3"),
    ([constant("w", 1)[0], constant("v", 1)[1]], "line 3: MEMORY of 'w' must come here, not of 'v'"),
    ([constant("w", 1)[0]], "ends before the MEMORY and ALIAS of its last call or constant; is it cut short?"),
    ([constant("w", 1)[1]], "line 2: MEMORY of 'w' follows neither CONSTANT nor CALL"),
    ([*MADE[:2], *STEP], "line 4: MEMORY and ALIAS of 1 results must follow CALL"),
    ([MADE[0], MADE[2]], "line 3: ALIAS of 'a' does not follow its MEMORY"),
    (call("mm", [], {"a": (8, 0)}), "line 4: ALIAS of 'a' is argument 0, but there are 0"),
    (call("mm", ["b"], {"a": (8, -1)}), "line 2: 'b' was not declared, or is released"),
    ([{**MADE[0], "ARGS": "a"}], "line 2: 'ARGS' must be a list of names, not 'a'"),
    ([{"INSTRUCTION": "JUMP"}], "line 2: unknown instruction 'JUMP'; known: ANNOTATE, CONSTANT"),
    ([*MADE, *release("a", "a")], "line 6: 'a' was not declared, or is released"),
    ([*MADE, mutate("add_", ["a"], [1])], "line 5: 'MUTATE' must list places in ARGS, not [1]"),
    (call("m\nm", [], {"a": (8, -1)}), "the name of operation 0 holds a control character"),
    (call("mm", [], {"a": (10**18, -1), "b": (10**18, -1)}), "total bytes or cost exceed"),
    (constant("w", 1), "has no operations"),
]  # fmt: skip


@pytest.mark.parametrize(("lines", "message"), REFUSED, ids=[message for _, message in REFUSED])
def test_what_is_refused(lines: list[Line], message: str, tmp_path: Path) -> None:
    with refused(re.escape(message), InvalidGraph, tmp_path / "step.log"):
        read(tmp_path, lines)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (text_of(STEP).encode(), "has no line with ANNOTATE START"), (b"[1]\n", "line 1: must be an object, not [1]"),
        (b'{"a": 1}\n\n{"a": \n', "line 3: cannot be read as JSON"),
        (b'{"a": 1, "a": 2}\n', "line 1: has the key 'a' twice"), (b'{"a": NaN}\n', "line 1: cannot be read as JSON"),
        (b"\xff\n", "line 1: cannot be read as JSON: it is not UTF-8"), (b"[" * 100_000, "nested too deeply"),
        (gzip.compress(text_of(START, STEP).encode(), mtime=0)[:-20], "gzip, but damaged or cut short"),
    ],
)  # fmt: skip
def test_broken_files(content: bytes, message: str, tmp_path: Path) -> None:
    path = tmp_path / "broken.log"
    path.write_bytes(content)
    with refused(re.escape(message), InvalidGraph, path):
        remat.load_graph(path)


def test_limits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A small file that holds a gigantic text is not read to its end, and lines have no limit of their own."""
    monkeypatch.setattr(dtr_log, "MAX_OPERATIONS", 4)
    with pytest.raises(InvalidGraph, match="has more than 4 calls"):
        read(tmp_path, STEP)
    for path, words in ((tmp_path, "it is a folder"), (tmp_path / "none.log.gz", "no such file")):
        with pytest.raises(InvalidGraph, match=words):
            load_dtr_log(path)
    monkeypatch.setattr("remat.files.MAX_FILE_BYTES", 100_000)
    for blown in (b" ", b"\n"):
        path = tmp_path / "bomb.log.gz"
        path.write_bytes(gzip.compress(blown * 10**7))
        with pytest.raises(InvalidGraph, match="is larger than 100000 bytes"):
            remat.load_graph(path)


def test_a_log_that_is_cut_off_or_altered(tmp_path: Path) -> None:
    """It is a sound graph or refused in a line, never anything else."""
    text = text_of(START, STEP, copy("dw", "e"), mutate("add_", ["e"], [0]))
    random, path = np.random.default_rng(0), tmp_path / "cut.log"
    sound, refused = 0, list[str]()
    lines = text.splitlines(keepends=True)
    changed = ["".join(random.permutation(lines)[: random.integers(len(lines) + 1)]) for _ in range(60)]
    for i in range(120):
        at, other = sorted(random.integers(len(text), size=2).tolist())
        changed.append(text[:at] + (text[other:] if i % 2 else chr(random.integers(32, 127)) + text[at + 1 :]))
    cuts = range(0, len(text), 7)
    for content in [*(text[:i] for i in cuts), *changed, *("".join(lines[:i]) for i in range(len(lines)))]:
        path.write_text(content)
        try:
            graph = remat.load_graph(path)
        except InvalidGraph as error:
            refused.append(str(error))
            continue
        sound += 1
        assert plain_peak(graph) <= load_dtr_log(path).program_peak_bytes
    assert sound > 10
    assert all(message.startswith(f"{path}: ") and "\n" not in message for message in refused)


@pytest.mark.parametrize("name", ["resnet32", "transformer", "treelstm", "unet"])
def test_published_logs(name: str, instances: Path) -> None:
    path = instances / "dtr" / f"{name}.log.gz"
    log, lines = load_dtr_log(path), [json.loads(line) for line in gzip.decompress(path.read_bytes()).splitlines()]
    constants = {line["NAME"] for line in lines if line["INSTRUCTION"] == "CONSTANT"}
    sizes = {line["NAME"]: int(line["MEMORY"]) for line in lines if line["INSTRUCTION"] == "MEMORY"}
    assert log.graph.fixed_bytes == sum(sizes[name] for name in constants)
    assert log.graph.fixed_bytes < plain_peak(log.graph) <= log.program_peak_bytes
    assert log.graph.loss is not None
    times = sum(int(line.get("TIME", 0)) for line in lines)
    assert 0.99 * times < log.graph.total_cost <= times  # without views of constants
