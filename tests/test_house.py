"""Rules of this folder that no linter checks."""

from __future__ import annotations

import re
from pathlib import Path

# Also in programs that a test writes for another process.
IMPORT = re.compile(r"^\s*(?:from|import)\s+(?:tests\.)?(test_\w+)", re.MULTILINE)


def imported_tests(source: str) -> list[str]:
    return IMPORT.findall(source)


def test_an_import_of_a_test_module_is_seen() -> None:
    lines = ["import test_a", "    from test_b import c", "from tests.test_d import e", "from latest_test import f"]
    assert imported_tests("\n".join(lines)) == ["test_a", "test_b", "test_d"]


def test_no_test_module_is_imported() -> None:
    """What tests share is in a module that is no test: an import would run its fixtures and move with its changes."""
    files = sorted(Path(__file__).parent.glob("*.py"))
    found = {path.name: imported_tests(path.read_text()) for path in files if path != Path(__file__)}
    assert len(found) > 80
    assert not {name: names for name, names in found.items() if names}
