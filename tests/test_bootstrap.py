"""`make setup`'s script: what it says when it cannot go on, and that a finished set-up is not repeated."""

from __future__ import annotations

import importlib.util
import sys
from collections import namedtuple
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

SCRIPT = Path(__file__).parents[1] / "tools" / "bootstrap.py"
Version = namedtuple("Version", "major minor micro releaselevel serial")


@pytest.fixture
def bootstrap(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The script, pointed at an empty folder, with every command it would run recorded instead."""
    spec = importlib.util.spec_from_file_location("bootstrap", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "VENV", tmp_path / ".venv")
    monkeypatch.setattr(module, "STAMP", tmp_path / ".venv" / "stamp")
    module.commands = []

    def run(command: list[str]) -> int:
        module.commands.append(command)
        (tmp_path / ".venv").mkdir(exist_ok=True)
        return 0

    monkeypatch.setattr(module, "run", run)
    module.ended = []

    def begin(command: list[str]) -> SimpleNamespace:
        code = module.run(command)
        return SimpleNamespace(wait=lambda: code, terminate=lambda: module.ended.append(command))

    monkeypatch.setattr(module, "begin", begin)
    return module


def test_a_finished_setup_is_not_repeated_but_changed_pins_are_installed(bootstrap, capsys, monkeypatch) -> None:
    assert bootstrap.main() == 0
    assert "GB" in capsys.readouterr().out
    assert [command[2] for command in bootstrap.commands] == ["venv", "pip", "remat.search", "pip"]
    bootstrap.commands.clear()
    assert bootstrap.main() == 0
    assert bootstrap.commands == []
    monkeypatch.setattr(bootstrap, "fingerprint", lambda: "another content")
    assert bootstrap.main() == 0
    assert bootstrap.commands


def test_interrupted_call_is_continued(bootstrap, monkeypatch) -> None:
    with monkeypatch.context() as fails:
        run = bootstrap.run
        fails.setattr(bootstrap, "run", lambda command: 1 if "-r" in command else run(command))
        assert bootstrap.main() == 1
    assert len(bootstrap.ended) == 1, "the compilation would go on for minutes after the message"
    bootstrap.commands.clear()
    assert bootstrap.main() == 0
    assert bootstrap.commands, "a failed installation must be tried again"


def test_a_search_that_was_not_compiled_beside_pip_is_compiled_after_it(bootstrap, monkeypatch) -> None:
    run, searches = bootstrap.run, []

    def fails_once(command: list[str]) -> int:
        searches.extend(["search"] if "remat.search" in command else [])
        return run(command) or int("remat.search" in command and len(searches) == 1)

    monkeypatch.setattr(bootstrap, "run", fails_once)
    assert bootstrap.main() == 0
    assert bootstrap.commands[-1][2] == "remat.search"
    assert len(searches) == 2


def test_missing_ensurepip_names_the_package(bootstrap, monkeypatch, capsys) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "ensurepip" else find(name))
    assert bootstrap.main() == 1
    message = capsys.readouterr().err
    assert f"python3.{sys.version_info[1]}-venv" in message
    assert message.count("\n") == 1


@pytest.mark.parametrize("version", [(3, 10), (3, 14)])
def test_wrong_python_is_refused(bootstrap, monkeypatch, capsys, version) -> None:
    monkeypatch.setattr(bootstrap.sys, "version_info", Version(*version, 0, "final", 0))
    assert bootstrap.main() == 1
    assert "3.11 to 3.13" in capsys.readouterr().err
    assert bootstrap.commands == []
