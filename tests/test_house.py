"""Rules of the checkout that no linter checks."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from helpers import ROOT

import remat

# Also in programs that a test writes for another process.
IMPORT = re.compile(r"^\s*(?:from|import)\s+(?:tests\.)?(test_\w+)", re.MULTILINE)


def test_no_test_module_is_imported() -> None:
    """What tests share is in a module that is no test: an import would run its fixtures and move with its changes."""
    lines = ["import test_a", "    from test_b import c", "from tests.test_d import e", "from latest_test import f"]
    assert IMPORT.findall("\n".join(lines)) == ["test_a", "test_b", "test_d"]
    files = sorted(Path(__file__).parent.glob("*.py"))
    assert len(files) > 80
    found = {path.name: IMPORT.findall(path.read_text()) for path in files if path != Path(__file__)}
    assert not {name: imported for name, imported in found.items() if imported}


def bound_names(package: str, source: str) -> Iterator[str]:
    """Names that the source of a package binds at its top, without its own submodules."""
    for node in ast.parse(source).body:
        if isinstance(node, ast.ImportFrom):
            for alias in node.names:
                name = alias.asname or alias.name
                if (node.module, alias.name) != (package, name):
                    yield name
        elif isinstance(node, ast.Import):
            yield from (a.asname or a.name.partition(".")[0] for a in node.names)
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            yield from (target.id for target in targets if isinstance(target, ast.Name))


def hidden_modules(package: str, init: Path) -> set[str]:
    """Submodules, folders included, whose name the package gives to something else."""
    inside = {path.stem for path in init.parent.iterdir() if path.suffix == ".py" or path.is_dir()}
    return inside & set(bound_names(package, init.read_text()))


def test_a_name_of_a_package_is_not_also_a_module_of_it(tmp_path: Path) -> None:
    """`import remat.x as m` would give a function, or the import of a module would replace the function."""
    (tmp_path / "data").mkdir()
    for name in ("one", "two", "three", "four", "five"):
        (tmp_path / f"{name}.py").touch()
    lines = ["from a import one", "from a.two import two", "from b import four as five", "def data(): ...", "three = 3"]
    (tmp_path / "__init__.py").write_text("\n".join(lines))
    assert hidden_modules("a", tmp_path / "__init__.py") == {"two", "three", "five", "data"}
    inits = [path for room in ("remat", "baselines", "analysis", "experiments", "tools")
             for path in sorted((ROOT / room).rglob("__init__.py"))]  # fmt: skip
    assert len(inits) > 15
    found = {path: hidden_modules(".".join(path.parent.relative_to(ROOT).parts), path) for path in inits}
    assert not {path: names for path, names in found.items() if names}


def compared_names(source: str) -> Iterator[str]:
    """Comparisons with the name of a strategy; those with an ability of that name, as ``implementations``, are fine."""
    names, others = set(remat.strategies()), (".implementations == ", "language == ")  # have values of the same names
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Compare):
            texts = {one.value for one in ast.walk(node) if isinstance(one, ast.Constant)}
            if names & texts and not any(other in ast.unparse(node) for other in others):
                yield ast.unparse(node)
        elif isinstance(node, ast.MatchValue) and isinstance(node.value, ast.Constant) and node.value.value in names:
            yield f"case {ast.unparse(node)}"


def test_no_behaviour_hangs_on_the_name_of_a_strategy() -> None:
    """Code asks what a strategy declares (`remat.registry.Strategy`), or an experiment names what it compares."""
    for line in ("x == 'portfolio'", "'monet' != s.name", "x in ('a', 'search')", "(a, b) == ('gist', 1)"):
        assert list(compared_names(line)) == [line]
    assert list(compared_names("match x:\n    case 'monet':\n        pass")) == ["case 'monet'"]
    assert not list(compared_names("strategy.implementations == 'search'\nx == OURS\nx == 'other'"))
    rooms = ("remat", "baselines", "experiments", "analysis")
    files = [path for room in rooms for path in (ROOT / room).rglob("*.py")]
    assert len(files) > 250
    assert not {path.name: found for path in files if (found := list(compared_names(path.read_text())))}


def test_every_public_name_of_the_pytorch_room_is_imported_at_its_first_use() -> None:
    tree = ast.parse((ROOT / "remat" / "torch" / "__init__.py").read_text())
    named = {
        target.id: ast.literal_eval(node.value)
        for node in tree.body if isinstance(node, ast.Assign)
        for target in node.targets if isinstance(target, ast.Name) and target.id in ("_HOMES", "__all__")
    }  # fmt: skip
    assert set(named["_HOMES"]) == set(named["__all__"])


def test_decision_records_name_files_that_exist() -> None:
    files = [f"/{path.relative_to(ROOT)}" for path in (*ROOT.glob("*.py"), *ROOT.glob("[a-z]*/**/*.py"))]
    for record in sorted((ROOT / "docs" / "decisions").glob("*.md")):
        for name in re.findall(r"`([\w/]+\.py)`", record.read_text(encoding="utf-8")):
            assert any(file.endswith(f"/{name}") for file in files), f"{record.name} names {name}"
