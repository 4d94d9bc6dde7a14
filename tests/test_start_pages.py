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

START = ROOT / "docs" / "start"


def text_of(page: str) -> str:
    return (START / f"{page}.md").read_text(encoding="utf-8")


def test_install_names_what_there_is(capsys: pytest.CaptureFixture[str]) -> None:
    text = text_of("install")
    targets = set(re.findall(r"^(\w[\w-]*):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert set(re.findall(r"^    make ([\w-]+)", text, re.MULTILINE)) <= targets
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert set(re.findall(r"^\| `(\w+)` \|", text, re.MULTILINE)) == set(extras)
    assert set(re.findall(r'"\.\[(\w+)\]"', text)) <= set(extras)
    run_blocks(START / "install.md")
    assert capsys.readouterr().out.startswith("OPTIMAL overhead ")


@pytest.mark.long
def test_the_first_sweep_runs(here: Path) -> None:
    first, *others = [shlex.split(line, comments=True) for block in blocks_of(START / "first-sweep.md", "bash")
                      for line in block.splitlines()]  # fmt: skip
    assert len(others) == 5  # their runs take minutes; test_commands checks what they say
    assert all(command[:2] == ["python", "run.py"] for command in (first, *others))
    done = run_py(here, *first[2:], REMAT_CACHE=str(here / "cache"))
    assert done.returncode == 0, done.stderr
    assert "no plan" in done.stdout
    assert re.search(r"portfolio( +\d+(\.\d+)? %\*){4}", done.stdout), done.stdout
    for what in ("table.csv", "figures", "page.html"):
        (line,) = [line for line in done.stdout.splitlines() if line.endswith(what)]
        assert (here / line.split(maxsplit=1)[1]).exists()


def test_the_sweep_from_python_runs(capsys: pytest.CaptureFixture[str]) -> None:
    run_blocks(START / "first-sweep.md")
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["12000", "16000"]


def test_the_pytorch_page_runs(here: Path, torch_cache: None, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("torch", reason="torch is not installed: pip install 'remat[torch]'")
    model = run_blocks(START / "pytorch.md")["model"]
    printed = capsys.readouterr().out
    assert printed.startswith("Net: ")
    example = re.findall(r"^    (Net: |  \w+(?: \w+)?  )", text_of("pytorch"), re.MULTILINE)
    assert example == re.findall(r"^(Net: |  \w+(?: \w+)?  )", printed, re.MULTILINE)
    assert len(re.findall(r"^loss ", printed, re.MULTILINE)) == 3
    assert (here / "plan.json").is_file()
    assert any(model.plan.recomputed)  # pyright: ignore[reportAttributeAccessIssue]
