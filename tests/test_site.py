"""The site: it builds without a warning, and loads nothing from another host."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest
import yaml
from helpers import ROOT

import remat
from experiments.config import Config

LOADED = {"script": "src", "img": "src", "iframe": "src", "source": "src", "video": "src", "audio": "src",
          "embed": "src", "object": "data", "link": "href"}  # fmt: skip
ELSEWHERE = re.compile(r"^\s*(\w+:)?//")
NO_REQUEST = ("canonical", "next", "prev")  # rel= of a <link> that a browser does not fetch


class Loads(HTMLParser):
    """What a browser asks for when it opens a page, and the classes of its elements."""

    def __init__(self, page: Path) -> None:
        super().__init__()
        self.addresses: list[str] = []
        self.classes: set[str] = set()
        self.feed(page.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        self.classes |= set(given.get("class", "").split())
        if tag in LOADED and not (tag == "link" and given.get("rel") in NO_REQUEST):
            self.addresses.append(given.get(LOADED[tag], ""))


@pytest.mark.long
def test_the_site_builds_without_a_warning_loads_nothing_from_another_host_and_has_the_files_it_links(
    tmp_path: Path,
) -> None:
    pytest.importorskip("mkdocs", reason="mkdocs is not installed: run make setup")
    site = tmp_path / "site"
    done = subprocess.run(  # a warning, a dead link or anchor among them, is an error
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(site)], cwd=ROOT,
        capture_output=True, text=True, timeout=300, env=os.environ | {"NO_MKDOCS_2_WARNING": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    pages = [path for path in site.rglob("*.html") if "files" not in path.relative_to(site).parts]
    assert len(pages) > 40
    for path in pages:
        found = Loads(path)
        is_themed = path.name != "leaderboard-page.html"  # which is one file
        assert any("bundle" in address for address in found.addresses) is is_themed, path
        assert not [address for address in found.addresses if ELSEWHERE.match(address)], path
        assert "mermaid" not in found.classes, f"{path}: the theme would load mermaid from another host"
    sheets = list(site.rglob("*.css"))
    assert len(sheets) >= 3
    for path in sheets:
        asked = re.findall(r"url\(\s*[\"']?([^\"')]+)|@import\s+[\"']([^\"']+)", path.read_text(encoding="utf-8"))
        assert not [one for pair in asked for one in pair if ELSEWHERE.match(one)], path
    schemas = {path.name for path in (ROOT / "remat" / "schemas").glob("*.json")}
    assert schemas <= {path.name for path in (site / "files" / "remat" / "schemas").iterdir()}


def test_every_key_of_the_configuration_is_documented_with_its_default() -> None:
    page = (ROOT / "docs" / "reference" / "configuration.md").read_text()
    documented = dict(re.findall(r"^\| `(\w+)` \| `([^`]*)` \|", page, re.MULTILINE))
    content = yaml.safe_load((ROOT / "conf" / "config.yaml").read_text())
    groups = {}
    for entry in content.pop("defaults"):
        if isinstance(entry, dict):
            groups |= {group: name for group, name in entry.items() if " " not in group}
    del content["hydra"]
    assert set(documented) == set(Config.__dataclass_fields__) | set(groups)
    assert {key: yaml.safe_load(value) for key, value in documented.items()} == groups | content


def test_the_reference_lists_every_public_name() -> None:
    page = (ROOT / "docs" / "reference" / "python.md").read_text()
    named = set(re.findall(r"^::: remat\.(\w+)$", page, re.MULTILINE))
    assert named == set(remat.__all__) - {"arena", "zoo"}  # modules, with sections of their own
    headings = set(re.findall(r"heading: remat\.tf\.(\w+)", page))
    public = re.search(r"^__all__ = (\[.*\])$", (ROOT / "remat" / "tf" / "__init__.py").read_text(), re.MULTILINE)
    assert headings == set(yaml.safe_load(public[1]))
