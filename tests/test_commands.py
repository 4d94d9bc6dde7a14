"""Commands and names of files in pages: every one works in this checkout."""

from __future__ import annotations

import importlib.util
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

from helpers import ROOT

from experiments import cli
from experiments.config import register
from experiments.registry import experiments

PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
FOLDERS = ("analysis", "baselines", "conf", "examples", "experiments", "remat", "results", "tests", "tools")
# In place of a name that the reader chooses; experiments that a page lets its reader write; what needs a cluster.
STAND_INS = {"NAME": "dtr", "EXPERIMENT": "dtr", "FOLDER": str(ROOT), "mine": "search", "keep_every_kth": "search",
             "path/to/instance.json": "chain.json", "path/to/unet.log.gz": "chain.json"}  # fmt: skip
ELSEWHERE = ("experiment=chains", "engine=slurm", "key=value")


def commands(page: Path, of: str) -> Iterator[list[str]]:
    """The arguments of each command in the code of a page; lines that go on are one."""
    text = page.read_text().replace("\\\n", " ")
    for line in re.findall(rf"(?:^|^    |`|tables: ){of}(?: ([^`\n]*?))?(?:`| -->|  |$)", text, re.MULTILINE):
        yield shlex.split(line, comments=True)


def test_every_command_of_the_pages_is_one(here: Path) -> None:
    register()
    (here / "chain.json").write_text("{}")
    asked = set[tuple[frozenset[str], bool]]()
    for page in PAGES:
        for arguments in commands(page, r"python run\.py"):
            keys = " ".join(each for each in arguments if "=" in each)
            for name, stands_for in STAND_INS.items():
                keys = re.sub(rf"\b{re.escape(name)}\b", stands_for, keys)
            if not {"--help", *ELSEWHERE} & {*arguments}:
                asked.add((frozenset(keys.split()), "-m" in arguments))
    assert len(asked) > 80
    drawn = {frozenset({f"experiment={name}", "draw=true", "keep=true"}) for name in experiments()}  # see test_configs
    for keys, multirun in asked:
        larger = (each for each, several in asked if keys < each and several == multirun)
        if keys not in drawn and not any(experiment_of(each) == experiment_of(keys) for each in larger):
            own = cli._own_keys(list(keys))
            assert cli.check([cli._as_hydra(key, own) for key in keys], multirun=multirun)


def experiment_of(keys: frozenset[str]) -> list[str]:
    return [key for key in keys if key.startswith("experiment=")]


def test_every_target_and_module_of_the_pages_exists() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for page in PAGES:
        assert {word for found in commands(page, "make") for word in found[:1] if "=" not in word} <= targets, page
        for module in re.findall(rf"python -m ((?:{'|'.join(FOLDERS)})[\w.]*)", page.read_text()):
            assert importlib.util.find_spec(module), module


def test_every_file_that_a_page_names_exists() -> None:
    for page in PAGES:
        named = re.findall(rf"`((?:{'|'.join(FOLDERS)})/[\w/.-]+)`", page.read_text())
        named = [name for name in named if not any(stand_in in name for stand_in in ("chains", *STAND_INS))]
        assert not [name for name in named if not (ROOT / name).exists()], page
