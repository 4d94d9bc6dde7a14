"""The registry of tables: pages say what the commands print, CSVs are those on record, other schemas are noticed."""

from __future__ import annotations

import csv
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from matplotlib.figure import Figure

from experiments import documents, tables
from experiments.documents import DOCS, ROOT, TABLES, Drawing, LongTable, command_of, marks
from remat.errors import InvalidInput
from remat.files import read_table

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


def test_the_function_that_measured_a_kept_row_is_still_there() -> None:
    """Keys of rows contain its name: a function that is renamed or moved would measure everything again."""
    for file in (ROOT / "results").glob("*/rows.parquet"):
        for name in set(read_table(file).column("measure").to_pylist()):
            module, _, function = name.rpartition(".")
            source = (ROOT / module.replace(".", "/")).with_suffix(".py").read_text()
            assert f"\ndef {function}(" in source, f"{file}: {name}"
