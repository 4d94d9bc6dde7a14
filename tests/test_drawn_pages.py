"""The text and tables of every page are what the committed rows draw today, so that no page keeps an old number."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import pytest

from experiments.documents import TABLES, Drawing, command_of, marks, write_tables
from experiments.runner import drawing_of
from experiments.tables import drawn_pages

SLOW = "paper"  # a minute of figures
PUBLISHED = "roofline"  # drawn from published files


def differing(name: str, page: Path, drawing: Drawing, folder: Path) -> list[str]:
    """The holes of a page and the tables that differ from a drawing; `folder` is for scratch files."""
    text, found = page.read_text(encoding="utf-8"), []
    for hole, drawn in (drawing.holes or {"": drawing.text}).items():
        first, last = marks(command_of(name, hole))
        if text.partition(first)[2].partition(last)[0].strip() != drawn.strip():
            found.append(f"{page.name} {hole}".strip())
    for path in write_tables(drawing, folder):
        kept = TABLES / path.name
        if not kept.exists() or kept.read_bytes() != path.read_bytes():
            found.append(path.name)
    return found


def stale(names: Iterable[str], folder: Path) -> dict[str, list[str]]:
    """[command that draws] what differs from the committed rows."""
    pages = drawn_pages()
    found = {name: differing(name, pages[name][1], drawing_of(name, pages[name][0]), folder) for name in names}
    return {command_of(name): parts for name, parts in found.items() if parts}


@pytest.mark.long
def test_pages_are_what_their_rows_draw(here: Path) -> None:  # a folder runs/ of this checkout may hold other rows
    assert not stale(drawn_pages().keys() - {SLOW, PUBLISHED}, here)


@pytest.mark.slow
def test_the_study_of_checkmate_is_what_its_rows_draw(here: Path) -> None:
    assert not stale([SLOW], here)


@pytest.mark.slow
def test_the_roofline_is_what_the_published_files_draw(
    instances: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not (instances / "monet").is_dir():
        pytest.skip("MONeT's published costs are absent: set REMAT_INSTANCES to their folder")
    monkeypatch.setenv("REMAT_INSTANCES", str(instances))
    assert not stale([PUBLISHED], tmp_path)


def test_a_page_with_an_old_number_is_seen(tmp_path: Path) -> None:
    page, drawing = tmp_path / "page.md", Drawing("| 2 |")
    first, last = marks(command_of("toy"))
    page.write_text(f"{first}\n\n| 1 |\n\n{last}")
    assert differing("toy", page, drawing, tmp_path) == ["page.md"]
    page.write_text(f"{first}\n\n| 2 |\n\n{last}")
    assert not differing("toy", page, drawing, tmp_path)
