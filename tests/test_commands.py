"""Commands and names of files in pages: every one works in this checkout."""

from __future__ import annotations

import functools
import importlib.util
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers import ROOT

from experiments import cli
from experiments.config import register
from experiments.settings import Settings

PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
FOLDERS = ("analysis", "baselines", "conf", "examples", "experiments", "remat", "results", "tests", "tools")
# In place of a name that the reader chooses; experiments that a page lets its reader write; what needs a cluster.
STAND_INS = {"NAME": "dtr", "EXPERIMENT": "dtr", "FOLDER": str(ROOT), "mine": "search", "keep_every_kth": "search",
             "path/to/instance.json": "GRAPH", "path/to/unet.log.gz": "GRAPH"}  # fmt: skip
ELSEWHERE = ("experiment=chains", "engine=slurm", "key=value")


def commands(page: Path, of: str) -> Iterator[list[str]]:
    """The arguments of each command in the code of a page; lines that go on are one."""
    text = page.read_text().replace("\\\n", " ")
    for line in re.findall(rf"(?:^|^    |`|tables: ){of}(?: ([^`\n]*?))?(?:`| -->|  |$)", text, re.MULTILINE):
        yield shlex.split(line, comments=True)


@pytest.fixture(scope="module")
def graph(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("graphs") / "chain.json"
    path.write_text("{}")
    return str(path)


@functools.cache
def settings_of(keys: str, multirun: bool) -> list[Settings]:
    """What a command of `run.py` is checked to mean; several pages have the same ones."""
    own = cli._own_keys(keys.split())
    return cli.check([cli._as_hydra(key, own) for key in keys.split()], multirun=multirun)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_command_of_a_page_is_one(page: Path, graph: str, here: Path) -> None:
    register()
    for arguments in commands(page, r"python run\.py"):
        if {"--help", *ELSEWHERE} & {*arguments}:
            continue
        keys = " ".join(each for each in arguments if "=" in each)
        for name, stands_for in STAND_INS.items():
            keys = re.sub(rf"\b{re.escape(name)}\b", stands_for.replace("GRAPH", graph), keys)
        assert settings_of(keys, "-m" in arguments)
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert {word for found in commands(page, "make") for word in found[:1] if "=" not in word} <= targets
    for package in FOLDERS:
        for module in re.findall(rf"python -m ({package}[\w.]*)", page.read_text()):
            assert importlib.util.find_spec(module), module


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_file_that_a_page_names_exists(page: Path) -> None:
    named = re.findall(rf"`((?:{'|'.join(FOLDERS)})/[\w/.-]+)`", page.read_text())
    named = [name for name in named if not any(stand_in in name for stand_in in ("chains", *STAND_INS))]
    assert not [name for name in named if not (ROOT / name).exists()]
