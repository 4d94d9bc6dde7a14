"""The registry of tables: pages say what the commands print, CSVs are those on record, other schemas are noticed."""

from __future__ import annotations

import csv
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from experiments import documents, models_table, solvers, tables
from experiments.documents import DOCS, ROOT, TABLES, Drawing, LongTable, command_of, marks
from experiments.runner import drawing_of

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


def test_every_mark_of_every_page_belongs_to_an_experiment() -> None:
    pages = [ROOT / "README.md", *DOCS.rglob("*.md")]
    found = {(page, command) for page in pages for command in MARK.findall(page.read_text())}
    assert {(page.resolve(), command_of(name)) for name, (_, page) in tables.drawn_pages().items()} == found


def test_pages_link_to_every_table_and_no_table_is_empty() -> None:
    pages = [drawn_text(page, name) for name, (_, page) in tables.drawn_pages().items()]
    linked = [name for text in pages for name in linked_tables(text)]
    assert sorted(linked) == sorted(path.stem for path in TABLES.iterdir())
    for name in linked:
        heads, *rows = csv_of(name)
        assert rows, name
        assert all(len(row) == len(heads) for row in rows), name


DRAWN_FROM_ROWS = (
    "solvers", "dtr", "rivals", "largest_batch", "executed_steps", "implementations", "strategies",
    "checkpoints", "compiled", "coverage", "explain", "languages", "large", "lengths", "models", "readme", "shard",
)  # fmt: skip


@pytest.mark.parametrize("name", DRAWN_FROM_ROWS)
def test_pages_with_committed_rows_are_what_their_command_draws(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("table", "dtr", "checkmate", "largest_batch_table"):
        monkeypatch.setattr(f"experiments.{module}.RUNS_FOLDER", tmp_path)
    experiment, page = tables.drawn_pages()[name]
    drawing = drawing_of(name, experiment)
    assert drawn_text(page, name) == drawing.text
    for table in drawing.tables:
        assert csv_of(table.name) == [list(table.heads), *map(list, table.rows)]


@pytest.mark.parametrize("page", RESULTS)
def test_the_numbers_that_a_page_claims_are_in_its_tables(page: str) -> None:
    """Bold numbers above the marks are copied by hand; each must stand in what the command wrote."""
    text = (DOCS / "results" / f"{page}.md").read_text()
    above, _, rest = text.partition("<!-- tables: ")
    written = rest.rpartition("<!-- end of tables -->")[0]
    written += "\n".join(",".join(row) for name in linked_tables(written) for row in csv_of(name))
    bold = re.findall(r"\*\*(-?[\d][\d.,]*(?: of \d+)?(?:x| %)?)\*\*", above)
    assert len(bold) >= 2, page
    for number in bold:
        assert re.search(rf"(?<![\d.]){re.escape(number)}(?![\d])", written), f"{page}: {number}"


def test_a_drawing_becomes_a_page_its_tables_and_figures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("DOCS", "TABLES"):
        monkeypatch.setattr(documents, name, tmp_path)
    (tmp_path / "figures").mkdir()
    (tmp_path / "drawn").write_bytes(b"png")
    page = tmp_path / "page.md"
    page.write_text("\n".join(["# Page", *marks(command_of("x")), "after\n"]))
    drawing = Drawing("text", [LongTable("t", ["a", "b"], [["1", "2"]])], {"f": tmp_path / "drawn"})
    for _ in range(2):
        documents.write_drawing("x", page, drawing)
        assert page.read_text() == f"# Page\n{marks(command_of('x'))[0]}\n\ntext\n\n<!-- end of tables -->\nafter\n"
    page.write_text("".join("\n".join(["prose", *marks(f"{command_of('x')} # {hole}"), ""]) for hole in "ab"))
    documents.write_drawing("x", page, Drawing("1\n\n2", holes={"a": "1", "b": "2"}))
    assert drawn_text(page, "x") == "1\n\n2"
    assert page.read_text().count("prose") == 2
    assert (tmp_path / "t.csv").read_text() == "a,b\n1,2\n"
    assert (tmp_path / "figures" / "f.png").read_bytes() == b"png"


def test_the_age_of_rows_is_that_of_the_code_that_makes_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    git = shutil.which("git")
    if git is None:
        pytest.skip("git is not installed: no commit to compare with")
    monkeypatch.setattr(tables, "ROOT", tmp_path)

    def run(*arguments: str) -> str:
        identity = ["-c", "user.name=a", "-c", "user.email=a@example.org"]
        done = subprocess.run([git, "-C", str(tmp_path), *identity, *arguments], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    (tmp_path / "remat").mkdir()
    (tmp_path / "baselines").mkdir()
    (tmp_path / "remat" / "solve.py").write_text("x = 1\n")
    run("init", "-q")
    run("add", "-A")
    run("commit", "-q", "-m", "first")
    commit = run("rev-parse", "HEAD")
    (tmp_path / "page.md").write_text("a page is no code\n")
    assert tables.changed_since(commit) is False
    (tmp_path / "remat" / "solve.py").write_text("x = 2\n")
    assert tables.changed_since(commit) is True
    assert tables.changed_since("0" * 40) is None


def test_every_page_is_listed() -> None:
    assert re.findall(r"^(\w+) +\S+\.md$", tables.listing(), re.MULTILINE) == [*tables.drawn_pages()]


@pytest.mark.parametrize(
    ("row", "good"),
    [
        ({"cost": 100_010, "record_cost": 100_000, "record_proven": True}, True),
        ({"cost": 100_011, "record_cost": 100_000, "record_proven": True}, False),
        ({"cost": 100_000, "record_cost": 100_000, "record_proven": False}, False),
        ({"cost": None, "record_cost": 100_000, "record_proven": True}, False),
        ({"cost": 1, "record_cost": None, "record_proven": False}, None),
        ({"published_overhead": 2.3, "overhead": 0.0234}, True),
        ({"published_overhead": 2.3, "overhead": 0.0236}, False),
    ],
)
def test_a_solve_is_as_good_as_what_is_recorded(row: dict, good: bool | None) -> None:
    assert solvers.as_good({"published_overhead": None, "overhead": None} | row) is good


def test_a_longer_solve_is_stale_if_a_newer_one_has_a_smaller_gap_in_less_time() -> None:
    def row(seconds: float, gap: float | None, day: int, budget: str = "80%") -> dict[str, Any]:
        return {"instance": "one", "scope": "free", "budget": budget, "time_limit_s": seconds, "gap": gap,
                "date": f"2026-11-{day}"}  # fmt: skip

    short, long = row(60, 0.2, 26), row(600, 0.3, 24)
    shown, words = solvers._without_stale([short, long])
    assert shown == [short]
    assert "1 older solves of 600 s" in words
    for other in (row(600, 0.1, 24), row(600, 0.3, 27), row(600, None, 24), row(600, 0.3, 24, "90%")):
        assert solvers._without_stale([short, other]) == ([short, other], "")


def test_a_link_leads_from_the_page_to_the_table() -> None:
    table = LongTable("t", ["a"], [["1"]])
    assert documents.link_to(table, DOCS / "results" / "x.md") == "[t.csv](../../results/tables/t.csv) (1 rows)"
    assert "](results/tables/t.csv)" in documents.link_to(table, ROOT / "README.md")


def test_a_model_that_cannot_be_extracted_is_a_line() -> None:
    failed = {"model": "a", "framework": "torch", "granularity": "operation", "batch": 1, "error": "why", "seconds": 2}
    drawing = models_table.page([failed])
    assert "- **torch, by operation** (FAILED): `a`" in drawing.text
    assert drawing.tables[0].rows == [["a", "torch", "operation", "1", "FAILED", "", "", "", "2.0"]]
