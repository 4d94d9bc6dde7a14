"""PyTorch's private interfaces lie in one package; a PyTorch that was not tested is checked or refused."""

from __future__ import annotations

import ast
import importlib
import re
import subprocess
import sys
import warnings
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


def test_private_interfaces_are_used_in_the_adapter_only() -> None:
    """But for operators (``aten._softmax``), and for a file that is written, which imports what its users do."""
    texts = {
        str(p.relative_to(ROOM)): p.read_text(encoding="utf-8")
        for p in sorted(set(ROOM.rglob("*.py")) - set(ADAPTER.iterdir()))
    }
    defined = r"(?:\bdef |\bclass |\bself\.|^ *(?=_\w+(?:: | = ))|__dict__\[\")(_\w+)"
    own = {name for text in texts.values() for name in re.findall(defined, text, re.M)}
    found = [
        f"{file}:{node.lineno} {name}"
        for file, text in texts.items()
        for node in ast.walk(ast.parse(text))
        for name in names_in(node)
        if name not in own and re.search(r"(^|\.)_(?!_)|^functorch\b|^torch\.fx\.experimental", name)
        if not name.endswith(".checkpoint_wrapper")
    ]
    assert not found, "\n".join(found)
    for form in (
        "import torch._dynamo", "from torch._guards import Guard", "x._cdata", "x._version", "getattr(x, '_cdata')",
        "node.meta['desc']", "node.meta.get('desc')", "import functorch",
    ):  # fmt: skip
        names = [name for node in ast.walk(ast.parse(form)) for name in names_in(node) if name not in own]
        assert any(re.search(r"(^|\.)_(?!_)|^functorch\b", name) for name in names), form


def names_in(node: Any) -> list[str]:
    """What a node imports from elsewhere or looks up; keys of `meta`, which the compiler writes, as private names."""
    match node:
        case ast.Import(names):
            return [alias.name for alias in names]
        case ast.ImportFrom(str(module), names) if not module.startswith("remat"):
            return [f"{module}.{alias.name}" for alias in names]
        case ast.Attribute(value, name) if not re.search(r"(^|\.)aten(\.|$)", ast.unparse(value)):
            return [name]
        case ast.Call(ast.Name("getattr"), [_, ast.Constant(name), *_]):
            return [str(name)]
        case ast.Call(ast.Attribute(ast.Attribute(attr="meta"), "get"), [ast.Constant(key), *_]) | ast.Subscript(
            ast.Attribute(attr="meta"), ast.Constant(key)
        ) if key != "val":
            return [f"_meta_{key}"]
    return []


def test_an_old_pytorch_is_refused_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", "2.10.2+cpu")
    with pytest.raises(
        MissingPackage, match=r"PyTorch 2\.10\.2\+cpu is older than 2\.11, .*: pip install 'torch>=2\.11'$"
    ):
        importlib.reload(rt)


def test_a_newer_pytorch_is_checked_once_and_a_tested_one_never(monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    def quiet(version: str) -> None:
        monkeypatch.setattr(torch, "__version__", version)
        _version.refuse_old()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            self_check.check_untested_version("cpu")

    for version in ("2.11.0", "2.15.1+cu132"):
        quiet(version)
    assert not cache.exists()
    monkeypatch.setattr(torch, "__version__", "2.16.0")
    before = torch.get_rng_state()
    with pytest.warns(UserWarning, match=r"PyTorch 2\.16\.0 is newer than 2\.15, the newest .* the bits of the plain"):
        self_check.check_untested_version("cpu")
    assert torch.equal(torch.get_rng_state(), before)
    monkeypatch.setattr(self_check, "differing_results", None)
    quiet("2.16.0")  # the verdict is remembered
    assert len(list((cache / "torch").iterdir())) == 1
    monkeypatch.setattr(torch, "__version__", "2.16.1")
    with pytest.raises(MissingPackage, match="a step under a plan fails"):  # but not for another version
        self_check.check_untested_version("cpu")


def test_a_newer_pytorch_that_changes_results_is_refused(monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    monkeypatch.setattr(torch, "__version__", "2.16.0")
    refused = r"newer than 2\.15.* gives other results than the plain step \(gradient of .*: pip install 'torch<2\.16'$"
    with monkeypatch.context() as patch:
        # of a PyTorch in which states are not set
        patch.setattr(_random, "with_random_state", lambda _state, target, *args, **kwargs: target(*args, **kwargs))
        with pytest.raises(MissingPackage, match=refused):
            rt.rematerialize(torch.nn.Linear(2, 2), (torch.randn(3, 2),), "1MB")
    with pytest.raises(MissingPackage, match=refused):  # the verdict is remembered
        rt.rematerialize(torch.nn.Linear(2, 2), (torch.randn(3, 2),), "1MB")


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


def test_the_check_repeats_dropout_and_batch_norm() -> None:
    layers = torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4), torch.nn.Dropout(0.5), torch.nn.Linear(4, 4)
    model = torch.nn.Sequential(*layers)
    plan = self_check._recomputing(model, torch.randn(4, 4), "cpu").plan
    assert {"addmm", "_native_batch_norm_legit_functional", "native_dropout"} <= set(plan.recomputed)
