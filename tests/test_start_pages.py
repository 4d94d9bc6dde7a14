"""The pages of docs/start: every command and code block of theirs runs as a reader would type it.

The blocks of the page about Keras run in test_keras_guide.py.
"""

from __future__ import annotations

import re
import shlex
import tomllib
from pathlib import Path

import pytest
from helpers import ROOT, blocks_of, run_blocks, run_py

from experiments import cli
from experiments.config import register

START = ROOT / "docs" / "start"


def text_of(page: str) -> str:
    return (START / f"{page}.md").read_text(encoding="utf-8")


@pytest.fixture
def folder(here: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("REMAT_CACHE", str(here / "cache"))
    return here


def test_install_names_what_there_is(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = text_of("install")
    targets = set(re.findall(r"^(\w[\w-]*):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert set(re.findall(r"^    make ([\w-]+)", text, re.MULTILINE)) <= targets
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert set(re.findall(r"^\| `(\w+)` \|", text, re.MULTILINE)) == set(extras)
    assert set(re.findall(r'"\.\[(\w+)\]"', text)) <= set(extras)
    run_blocks(START / "install.md")
    assert capsys.readouterr().out.startswith("OPTIMAL overhead ")


@pytest.mark.long
def test_the_first_sweep_runs(folder: Path) -> None:
    commands = [shlex.split(line, comments=True) for block in blocks_of(START / "first-sweep.md", "bash")
                for line in block.splitlines()]  # fmt: skip
    assert len(commands) == 6
    assert all(command[:2] == ["python", "run.py"] for command in commands)
    done = run_py(folder, *commands[0][2:])
    assert done.returncode == 0, done.stderr
    assert "no plan" in done.stdout
    assert re.search(r"portfolio( +\d+(\.\d+)? %\*){4}", done.stdout), done.stdout
    (page,) = re.findall(r"^page +(.*)$", done.stdout, re.MULTILINE)
    assert (folder / page).is_file()
    register()
    for command in commands[1:-1]:  # the same check as before a run; the runs themselves take minutes
        overrides = [argument for argument in command[2:] if argument != "-m"]
        cli.check(overrides, multirun="-m" in command)


def test_the_sweep_from_python_runs(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_blocks(START / "first-sweep.md")
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["12000", "16000"]


def test_the_pytorch_page_runs(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("torch", reason="torch is not installed: pip install 'remat[torch]'")
    model = run_blocks(START / "pytorch.md")["model"]
    printed = capsys.readouterr().out
    assert printed.startswith("Net: ")
    example = re.findall(r"^    (Net: |  \w+(?: \w+)?  )", text_of("pytorch"), re.MULTILINE)
    assert example == re.findall(r"^(Net: |  \w+(?: \w+)?  )", printed, re.MULTILINE)
    assert len(re.findall(r"^loss ", printed, re.MULTILINE)) == 3
    assert (folder / "plan.json").is_file()
    assert any(model.plan.recomputed)  # pyright: ignore[reportAttributeAccessIssue]
