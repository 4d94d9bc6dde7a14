"""PyTorch's private interfaces lie in one package; a PyTorch that was not tested is checked or refused."""

from __future__ import annotations

import ast
import importlib
import re
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import remat.torch as rt
from remat.errors import MissingPackage
from remat.torch import _random, _version
from remat.torch.following import self_check

ROOM = Path(__file__).parents[1] / "remat" / "torch"
ADAPTER = ROOM / "internals"


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache of the user's."""
    monkeypatch.setenv("REMAT_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


# A file that `rt.checkpoints` writes runs without remat, and imports FSDP2's wrapper from where its users do.
WRITTEN = "torch.distributed.algorithms._checkpoint.checkpoint_wrapper.checkpoint_wrapper"


def test_private_interfaces_are_used_in_the_adapter_only() -> None:
    files = sorted(set(ROOM.rglob("*.py")) - set(ADAPTER.iterdir()))
    trees = {path.relative_to(ROOM): ast.parse(path.read_text(encoding="utf-8")) for path in files}
    own = {name for tree in trees.values() for name in defined_names(tree)}
    found = [f"{path}:{line} {name}" for path, tree in trees.items() for line, name in private_names(tree, own)
             if (path.as_posix(), name) != ("checkpointing/for_fsdp2.py", WRITTEN)]  # fmt: skip
    assert not found, "\n".join(found)


def test_the_rule_finds_each_form() -> None:
    forms = (
        "import torch._dynamo", "from torch.fx.graph import _Code", "from torch._guards import Guard", "x._base",
        "torch._C.f()", "getattr(x, '_cdata')", "f(node)[0].meta['desc']", "node.meta.get('desc')", "import functorch",
    )  # fmt: skip
    others = ("self._own", "aten._softmax.default", "torch.ops.aten._softmax", "x.__dict__", "node.meta['val']")
    for source in forms:
        assert list(private_names(ast.parse(source), {"_own"})), source
    for source in others:
        assert not list(private_names(ast.parse(source), {"_own"})), source


OPERATOR = re.compile(r"(^|\.)aten(\.|$)")


def private_names(tree: ast.AST, own: set[str]) -> Iterator[tuple[int, str]]:
    """(line, name) of everything that begins with an underscore and is not the package's own.

    Operators (``aten._softmax``) are not meant. What the compiler notes in a node's `meta` is, but for ``val``.
    """
    for node in ast.walk(tree):
        for name in names_in(node):
            private = any(re.match("_(?!_)", part) and part not in own for part in name.split("."))
            if private or re.match(r"functorch\b|torch\.fx\.experimental", name):
                yield node.lineno, name  # pyright: ignore[reportAttributeAccessIssue]


def names_in(node: ast.AST) -> Iterator[str]:
    """What a node imports or looks up; a key of `meta` as ``_meta_<key>``."""
    match node:
        case ast.Import(names):
            yield from (alias.name for alias in names)
        case ast.ImportFrom(module, names):
            yield from (f"{module}.{alias.name}" for alias in names)
        case ast.Attribute(value, name) if not OPERATOR.search(ast.unparse(value)):
            yield name
        case ast.Call(ast.Name("getattr"), [_, ast.Constant(name), *_]):
            yield str(name)
        case ast.Call(ast.Attribute(ast.Attribute(attr="meta"), "get"), [ast.Constant(key), *_]) | ast.Subscript(
            ast.Attribute(attr="meta"), ast.Constant(key)
        ) if key != "val":
            yield f"_meta_{key}"


def defined_names(tree: ast.AST) -> Iterator[str]:
    """Functions, classes, imported modules of remat, keywords, and attributes that are assigned, by `__dict__` too."""
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef(name) | ast.ClassDef(name) | ast.keyword(str(name)):
                yield name
            case ast.Attribute(_, name, ast.Store()):
                yield name
            case ast.ImportFrom(str(module), names) if module.startswith("remat"):
                yield from (*module.split("."), *(alias.name for alias in names))
            case ast.Subscript(ast.Attribute(attr="__dict__"), ast.Constant(name)):
                yield str(name)


def test_an_old_pytorch_is_refused_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", "2.10.2+cpu")
    with pytest.raises(
        MissingPackage, match=r"PyTorch 2\.10\.2\+cpu is older than 2\.11, .*: pip install 'torch>=2\.11'$"
    ):
        importlib.reload(rt)


@pytest.mark.parametrize("version", ["2.11.0", "2.13.0+cpu", "2.15.1+cu132"])
def test_a_tested_pytorch_is_not_checked(version: str, monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    monkeypatch.setattr(torch, "__version__", version)
    _version.refuse_old()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        self_check.check_untested_version("cpu")
    assert not cache.exists()


def test_a_newer_pytorch_is_checked_once(monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    monkeypatch.setattr(torch, "__version__", "2.16.0")
    before = torch.get_rng_state()
    with pytest.warns(UserWarning, match=r"PyTorch 2\.16\.0 is newer than 2\.15, the newest .* the bits of the plain"):
        self_check.check_untested_version("cpu")
    assert torch.equal(torch.get_rng_state(), before)
    monkeypatch.setattr(self_check, "differing_results", None)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        self_check.check_untested_version("cpu")  # the verdict is remembered
    assert len(list((cache / "torch").iterdir())) == 1
    monkeypatch.setattr(torch, "__version__", "2.16.1")
    with pytest.raises(MissingPackage, match="a step under a plan fails"):  # but not for another version
        self_check.check_untested_version("cpu")


def draws_anew(_state: Any, target: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """`_random.with_random_state` of a PyTorch in which states are not set."""
    return target(*args, **kwargs)


def test_a_newer_pytorch_that_changes_results_is_refused(monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    monkeypatch.setattr(torch, "__version__", "2.16.0")
    refused = r"newer than 2\.15.* gives other results than the plain step \(gradient of .*: pip install 'torch<2\.16'$"
    with monkeypatch.context() as patch:
        patch.setattr(_random, "with_random_state", draws_anew)
        with pytest.raises(MissingPackage, match=refused):
            rt.rematerialize(torch.nn.Linear(2, 2), (torch.randn(3, 2),), "1MB")
    with pytest.raises(MissingPackage, match=refused):  # the verdict is remembered
        rt.rematerialize(torch.nn.Linear(2, 2), (torch.randn(3, 2),), "1MB")


def test_the_check_repeats_dropout_and_batch_norm() -> None:
    layers = torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4), torch.nn.Dropout(0.5), torch.nn.Linear(4, 4)
    model = torch.nn.Sequential(*layers)
    plan = self_check._recomputing(model, torch.randn(4, 4), "cpu").plan
    assert {"addmm", "_native_batch_norm_legit_functional", "native_dropout"} <= set(plan.recomputed)


def test_a_newer_pytorch_without_what_is_needed_is_refused_in_one_line() -> None:
    script = (
        "import torch, torch._prims_common as module\n"
        "torch.__version__ = '2.16.0'\n"
        "del module.suggest_memory_format\n"
        "import remat.torch\n"
    )
    done = subprocess.run([sys.executable, "-c", script], text=True, capture_output=True, check=False)
    last = done.stderr.strip().splitlines()[-1]
    assert done.returncode
    assert "MissingPackage: PyTorch 2.16.0 is newer than 2.15" in last
    assert "suggest_memory_format" in last
