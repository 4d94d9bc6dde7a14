"""What several test modules share: nothing here is a test."""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from decimal import Decimal
from fractions import Fraction
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from remat.context import Context
from remat.errors import InvalidInput
from remat.graph import Graph, Operation, Value, Work
from remat.implementation import Implementation
from remat.plan import Plan
from remat.problem import Problem, SolveOptions
from remat.solving.dispatch import new_context

ROOT = Path(__file__).parents[1]


class Odd:
    def __repr__(self) -> str:
        return "two\nlines"


OF_ANY_KIND: tuple[Any, ...] = (  # wrong for most arguments
    None, True, False, 0, -1, 7, 1.5, float("nan"), float("inf"), -float("inf"), 10**400, -(10**400), 10**5000,
    2**31, 2**63, 2**64, "", "x", "\ud800", "\0", "\x1b[31m\n", "5GiB", "8" * 5000, b"x", [], [1], [-1], ["a"], [True],
    [1.5], [None], [[0, 1]], [(0, 0)], [(0, 1, 2)], [(7, 0)], [10**30], (), {}, {"a": 1}, set(), range(3), object(),
    Odd(), len, int, np.int64(3), np.float64(2), np.bool_(True), np.array([1, 2]), np.array(3), Fraction(1, 3),
    Decimal(2), 1j, Path("x"), "/", "..",
)  # fmt: skip


@contextlib.contextmanager
def refused(
    match: str = ".", kind: type[Exception] = InvalidInput, file: Path | None = None
) -> Iterator[pytest.ExceptionInfo[Exception]]:  # fmt: skip
    """What happens inside is refused in one line that says `match`, a regular expression, and begins with the file."""
    with pytest.raises(kind, match=match) as caught:
        yield caught
    assert "\n" not in str(caught.value)
    assert str(caught.value).startswith("" if file is None else f"{file}: ")


def context_of(graph: Graph, budget_bytes: int, *, seconds: float = 60.0, **more: Any) -> Context:
    """A solve that starts now; `more` are fields of the `Problem` or of the `SolveOptions`."""
    question = {name: more.pop(name) for name in ("scope", "accounting", "cost_cap") if name in more}
    return new_context(Problem(graph, budget_bytes, **question), SolveOptions(time_limit_s=seconds, **more))


def install_package(folder: Path, code: str, entry_points: str = "[remat.strategies]\nmine = my_package\n") -> None:
    """Leave in `folder` what pip leaves there: `my_package`, whose module `heuristics` holds `code`."""
    package = folder / "my_package"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "heuristics.py").write_text(textwrap.dedent(code))
    metadata = folder / "my_package-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: my-package\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text(entry_points)


def run_python(code: str, *arguments: str, cwd: Path | None = None, **variables: str) -> str:
    """What another process prints that runs `code`; an AssertionError with its errors where it fails."""
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code), *arguments], cwd=cwd, env=os.environ | variables, text=True,
        capture_output=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def run_py(folder: Path, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """`run.py` of the checkout as a command in another folder."""
    return subprocess.run(
        [sys.executable, str(ROOT / "run.py"), *arguments], cwd=folder, text=True, capture_output=True, timeout=300,
        env=os.environ | {"PYTHONPATH": str(ROOT)} | variables, check=False,
    )  # fmt: skip


def start_run_py(folder: Path, *arguments: str, **variables: str) -> subprocess.Popen[str]:
    """`run_py` that has begun."""
    return subprocess.Popen(
        [sys.executable, str(ROOT / "run.py"), *arguments], cwd=folder, text=True, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, env=os.environ | {"PYTHONPATH": str(ROOT)} | variables,
    )  # fmt: skip


def processes_in(folder: Path) -> list[str]:
    """Command lines of the other processes whose folder is this one: those of other runs do not count."""
    found = []
    for entry in Path("/proc").glob("[0-9]*") if Path("/proc/self").exists() else ():
        with contextlib.suppress(OSError):  # it ended meanwhile, or is another user's
            if os.readlink(entry / "cwd") == str(folder) and int(entry.name) != os.getpid():
                found.append((entry / "cmdline").read_bytes().decode().replace("\0", " "))
    return [command for command in found if command]  # without a command line: a zombie


def hide_package(monkeypatch: pytest.MonkeyPatch, package: str) -> None:
    """Imports of the package fail as where it is not installed."""

    class Absent:
        def find_spec(self, name: str, *_: object) -> None:
            if name == package:
                raise ModuleNotFoundError(f"No module named '{name}'", name=name)

    monkeypatch.delitem(sys.modules, package, raising=False)
    monkeypatch.setattr(sys, "meta_path", [Absent(), *sys.meta_path])


def schema_of(file_format: str) -> Any:
    """A validator of the files of a format, as ``remat-arena/1``."""
    validator = pytest.importorskip("jsonschema").Draft202012Validator
    file = resources.files("remat") / "schemas" / f"{file_format.replace('/', '-')}.json"
    schema = json.loads(file.read_text(encoding="utf-8"))
    validator.check_schema(schema)
    return validator(schema)


def blocks_of(page: Path, language: str = "python") -> list[str]:
    """The blocks of a language in a page of the documentation."""
    return re.findall(rf"^```{language}\n(.*?)^```$", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)


def run_blocks(page: Path, names: dict[str, Any] | None = None) -> dict[str, Any]:
    """Run the Python blocks of a page one after the other, as a reader would; the names that there are then."""
    names = {} if names is None else names
    for i, block in enumerate(blocks_of(page)):
        exec(compile(block, f"{page.name}, block {i + 1}", "exec"), names)
    return names


def wait_for(condition: Callable[[], object], patience_s: float = 20.0) -> float:
    """Seconds until `condition` holds; an AssertionError where it does not hold in time."""
    began = time.monotonic()
    while not condition():
        assert time.monotonic() - began < patience_s, f"waited {patience_s} s in vain"
        time.sleep(0.02)
    return time.monotonic() - began


DIAMOND = Graph.from_nodes("diamond", [[], [0], [1], [1], [0, 2]], [2, 2, 3, 2, 1], [1] * 5)
ALL = Plan.from_order(DIAMOND, range(5))  # cost 5, peak 9
FEWER = Plan.from_order(DIAMOND, [0, 1, 2, 3, 2, 0, 4])  # cost 7, peak 6, fixed_order

SIZES = (40, 40, 20, 30)  # of a block's forward values; the last one is its output
COSTS = (5, 1, 9, 2)


def step_of(n_blocks: int, n_forward: int = 4, weights: int = 3) -> Graph:
    """A training step of equal blocks after one operation, with a loss; each block keeps a gradient of its weights."""
    operations, values = list[Operation](), list[Value]()

    def add(kind: str, inputs: list[int], size: int, cost: int, backward: bool = False, keep: bool = False) -> int:
        values.append(Value(f"{kind}_{len(values)}", size, keep))
        inputs = sorted(set(inputs))
        operations.append(
            Operation(values[-1].name, kind, tuple(inputs), (len(values) - 1,), cost, 7, is_backward=backward)
        )
        return len(values) - 1

    x = add("embed", [], 30, 4)
    blocks = []
    for _ in range(n_blocks):
        own = [x]
        for i in range(n_forward):
            inputs = [own[-1], x] if i == n_forward - 1 else [own[-1]]
            own.append(add(f"forward_{i}", inputs, SIZES[i % 4], COSTS[i % 4]))
        blocks.append(own)
        x = own[-1]
    loss = add("loss", [x], 1, 3)
    gradient = add("loss_backward", [x, loss], 30, 3, backward=True)
    for own in reversed(blocks):
        for i in reversed(range(n_forward)):
            gradient_in = gradient
            gradient = add(f"backward_{i}", [own[i], own[i + 1], gradient_in], 30, 2 * COSTS[i % 4], backward=True)
        add("weights", [own[0], gradient], weights, 6, backward=True, keep=True)
    add("embed_backward", [gradient], 5, 4, backward=True, keep=True)
    return Graph("blocks", tuple(operations), tuple(values), fixed_bytes=100)


def rich_graph() -> Graph:
    """A graph with every kind of record that a file may hold."""
    way = Implementation("fast", (), (0,), 1, 2, is_lossy=True, work=Work(1, 2, signature="{}"))
    operation = Operation("a", "x", (), (0,), 5, 1, True, True, Work(3, 4), (way,))
    return Graph("g", (operation,), (Value("v", 2, True),))


def conv_relu() -> Graph:
    """x -> conv y -> relu z -> loss -> relu backward -> conv backward; the mask of relu is an extra value.

    Values: 0 x, 1 y, 2 z, 3 loss, 4 grad y, 5 grad x, 6 mask. By default relu's backward reads y.
    """
    operations = (
        Operation("x", "input", (), (0,), 1),
        Operation(
            "conv", "conv", (0,), (1,), 10,
            implementations=(Implementation("fast", (0,), (1,), 6, workspace_bytes=30),),
        ),
        Operation(
            "relu", "relu", (1,), (2,), 2,
            implementations=(
                Implementation("mask", (1,), (2, 6), 3),
                Implementation("in_place", (1,), (2,), 2, overwrites=1),
            ),
        ),
        Operation("loss", "loss", (2,), (3,), 1),
        Operation(
            "relu_back", "relu_back", (1, 3), (4,), 2, is_backward=True,
            implementations=(Implementation("mask", (3, 6), (4,), 2), Implementation("output", (2, 3), (4,), 2)),
        ),
        Operation("conv_back", "conv_back", (0, 4), (5,), 10, is_backward=True),
    )  # fmt: skip
    sizes = {"x": 16, "y": 32, "z": 32, "loss": 32, "gy": 32, "gx": 16, "mask": 1}
    values = tuple(Value(name, size, keep=name == "gx") for name, size in sizes.items())
    return Graph("conv_relu", operations, values, fixed_bytes=5, loss=3)
