"""The text and tables of every page are what the committed rows draw today, so that no page keeps an old number."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import pytest

from experiments.documents import DOCS, TABLES, Drawing, command_of, marks, write_tables
from experiments.registry import experiments, listed
from experiments.runner import drawing_of

SLOW = "paper"  # a minute of figures
WITHOUT_ROWS = {"logits", "roofline"}  # not measured yet; needs the published files


def differing(name: str, page: Path, drawing: Drawing, folder: Path) -> list[str]:
    """The holes of a page and the tables that differ from a drawing; `folder` is for scratch files."""
    text, found = page.read_text(encoding="utf-8"), []
    for hole, drawn in (drawing.holes or {"": drawing.text}).items():
        first, last = marks(f"{command_of(name)} # {hole}" if hole else command_of(name))
        if text.partition(first)[2].partition(last)[0].strip() != drawn.strip():
            found.append(f"{page.name} {hole}".strip())
    for path in write_tables(drawing, folder):
        kept = TABLES / path.name
        if not kept.exists() or kept.read_bytes() != path.read_bytes():
            found.append(path.name)
    return found


def stale(names: Iterable[str], folder: Path) -> dict[str, list[str]]:
    """[command that draws] what differs from the committed rows."""
    found = {}
    for name in names:
        experiment = listed(name).load()
        if experiment.page:
            found[command_of(name)] = differing(name, DOCS / experiment.page, drawing_of(name, experiment), folder)
    return {command: parts for command, parts in found.items() if parts}


@pytest.mark.long
def test_pages_are_what_their_rows_draw(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # a folder runs/ of this checkout may hold other rows
    assert not stale(experiments().keys() - {SLOW} - WITHOUT_ROWS, tmp_path)


@pytest.mark.slow
def test_the_study_of_checkmate_is_what_its_rows_draw(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert not stale([SLOW], tmp_path)


def test_a_page_with_an_old_number_is_seen(tmp_path: Path) -> None:
    page, drawing = tmp_path / "page.md", Drawing("| 2 |")
    first, last = marks(command_of("toy"))
    page.write_text(f"{first}\n\n| 1 |\n\n{last}")
    assert differing("toy", page, drawing, tmp_path) == ["page.md"]
    page.write_text(f"{first}\n\n| 2 |\n\n{last}")
    assert not differing("toy", page, drawing, tmp_path)
