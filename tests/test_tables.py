"""Pages and their tables say what the committed rows draw today, and CSVs are those on record."""

from __future__ import annotations

import csv
import re
import shutil
import subprocess
from collections.abc import Iterable
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from matplotlib.figure import Figure

from experiments import documents, tables
from experiments.documents import DOCS, ROOT, TABLES, Drawing, LongTable, command_of, marks, write_tables
from experiments.runner import drawing_of
from experiments.tables import drawn_pages
from remat.errors import InvalidInput

MARK = re.compile(r"^<!-- tables: (.*?)(?: # \w+)? -->$", re.MULTILINE)
RESULTS = ("checkmate", "monet", "largest-batch", "solvers", "roofline", "executed-steps", "implementations")


def linked_tables(text: str) -> set[str]:
    """Names of tables under results/tables in the links of a page."""
    return set(re.findall(r"\]\([./]*results/tables/(\w+)\.csv\)", text))


def csv_of(name: str) -> list[list[str]]:
    with (TABLES / f"{name}.csv").open(newline="", encoding="utf-8") as file:
        return list(csv.reader(file))


def drawn_text(page: Path, name: str) -> str:
    """What stands between the marks of an experiment, in all of its holes."""
    first, last = marks(f"{command_of(name)}HOLE")
    between = re.escape(first).replace("HOLE", r"(?: # \w+)?") + r"\n\n(.*?)\n\n" + re.escape(last)
    return "\n\n".join(filter(None, re.findall(between, page.read_text(), re.DOTALL)))


def test_every_mark_belongs_to_an_experiment_and_pages_link_to_every_table() -> None:
    texts = [(page, name, drawn_text(page, name)) for name, (_, page) in tables.drawn_pages().items()]
    pages = [ROOT / "README.md", *DOCS.rglob("*.md")]
    found = {(page, command) for page in pages for command in MARK.findall(page.read_text())}
    assert {(page.resolve(), command_of(name)) for page, name, _ in texts} == found
    linked = [name for _, _, text in texts for name in linked_tables(text)]
    assert sorted(linked) == sorted(path.stem for path in TABLES.iterdir())
    for name in linked:
        heads, *rows = csv_of(name)
        assert rows, name
        assert all(len(row) == len(heads) for row in rows), name


def test_the_numbers_that_a_page_claims_are_in_its_tables() -> None:
    """Bold numbers above the marks are copied by hand; each must stand in what the command wrote."""
    for page in RESULTS:
        above, _, rest = (DOCS / "results" / f"{page}.md").read_text().partition("<!-- tables: ")
        written = rest.rpartition("<!-- end of tables -->")[0]
        written += "\n".join(",".join(row) for name in linked_tables(written) for row in csv_of(name))
        bold = re.findall(r"\*\*(-?[\d][\d.,]*(?: of \d+)?(?:x| %)?)\*\*", above)
        assert len(bold) >= 2, page
        absent = [number for number in bold if not re.search(rf"(?<![\d.]){re.escape(number)}(?![\d])", written)]
        assert not absent, page


def test_columns_of_a_table_are_formats_with_units_or_functions() -> None:
    columns = {"of": "{name} {share:.0%}", "MB": "{size:.1f/MB}", "unit": "{size:.2f GB}", "more": lambda row: "x"}
    rows = [{"name": "a", "share": 0.25, "size": 2_500_000}, {"name": "b", "share": 0.5, "size": None}]
    assert documents.table_of(rows, columns).splitlines() == [
        "| of | MB | unit | more |", "| --- | --: | --: | --: |",
        "| a 25% | 2.5 | 0.00 GB | x |", "| b 50% |  |  | x |",
    ]  # fmt: skip
    twice = [("s", "{of[s]:.1f}"), ("s", "{of[t]:.1f}")]  # heads may be equal, and values nested
    assert documents.table_of([{"of": {"s": 1, "t": None}}], twice) == "| s | s |\n| --- | --: |\n| 1.0 |  |"
    assert documents.table_of([], columns) == documents.table_by_heads([]) == ""
    assert documents.table_by_heads([{"a": "1", "b": "2"}]) == "| a | b |\n| --- | --: |\n| 1 | 2 |"


def test_a_drawing_becomes_a_page_its_tables_and_figures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("DOCS", "TABLES"):
        monkeypatch.setattr(documents, name, tmp_path)
    monkeypatch.chdir(tmp_path)  # runs/ is here
    (tmp_path / "figures").mkdir()
    page = tmp_path / "page.md"
    page.write_text("\n".join(["# Page", *marks(command_of("x")), "after\n"]))
    drawing = Drawing("text", [LongTable("t", ["a", "b"], [["1", "2"]])], {"f": Figure((1.0, 1.0))})
    for _ in range(2):
        documents.write_drawing("x", page, drawing)
        assert page.read_text() == f"# Page\n{marks(command_of('x'))[0]}\n\ntext\n\n<!-- end of tables -->\nafter\n"
    page.write_text("".join("\n".join(["prose", *marks(f"{command_of('x')} # {hole}"), ""]) for hole in "ab"))
    documents.write_drawing("x", page, Drawing("1\n\n2", holes={"a": "1", "b": "2"}))
    assert drawn_text(page, "x") == "1\n\n2"
    assert page.read_text().count("prose") == 2
    with pytest.raises(InvalidInput, match="experiment=y"):
        documents.write_drawing("y", page, drawing)
    assert (tmp_path / "t.csv").read_text() == "a,b\n1,2\n"
    assert (tmp_path / "figures" / "f.png").read_bytes().startswith(b"\x89PNG")
    assert {path.name for path in (tmp_path / "runs" / "x" / "figures").iterdir()} == {"f.png", "f.pdf"}


@pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed: no commit to compare with")
def test_the_age_of_rows_is_that_of_the_code_that_makes_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables, "ROOT", tmp_path)

    def run(*arguments: str) -> str:
        command = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@example.org", *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    for room in ("remat", "baselines"):
        (tmp_path / room).mkdir()
    (tmp_path / "remat" / "solve.py").write_text("x = 1\n")
    for arguments in (["init", "-q"], ["add", "-A"], ["commit", "-q", "-m", "first"]):
        run(*arguments)
    commit = run("rev-parse", "HEAD")
    (tmp_path / "page.md").write_text("a page is no code\n")
    assert tables.changed_since(commit) is False
    (tmp_path / "remat" / "solve.py").write_text("x = 2\n")
    assert tables.changed_since(commit) is True
    assert tables.changed_since("0" * 40) is None


def test_the_function_that_measured_a_kept_row_is_still_there() -> None:
    """Keys of rows contain its name: a function that is renamed or moved would measure everything again."""
    for file in (ROOT / "results").glob("*/rows.parquet"):
        for name in pq.read_table(file, columns=["measure"]).column("measure").unique().to_pylist():
            module, _, function = name.rpartition(".")
            source = (ROOT / module.replace(".", "/")).with_suffix(".py").read_text()
            assert f"\ndef {function}(" in source, f"{file}: {name}"


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


def test_pages_are_what_their_rows_draw(here: Path) -> None:  # a folder runs/ of this checkout may hold other rows
    assert not stale(drawn_pages().keys() - {SLOW, PUBLISHED}, here)


@pytest.mark.slow
def test_the_study_of_checkmate_is_what_its_rows_and_the_roofline_what_the_published_files_draw(
    instances: Path, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("REMAT_INSTANCES", str(instances))
    assert not stale([SLOW, PUBLISHED], here)


@pytest.mark.short
def test_a_page_with_an_old_number_is_seen(tmp_path: Path) -> None:
    page, drawing = tmp_path / "page.md", Drawing("| 2 |")
    first, last = marks(command_of("toy"))
    page.write_text(f"{first}\n\n| 1 |\n\n{last}")
    assert differing("toy", page, drawing, tmp_path) == ["page.md"]
    page.write_text(f"{first}\n\n| 2 |\n\n{last}")
    assert not differing("toy", page, drawing, tmp_path)
