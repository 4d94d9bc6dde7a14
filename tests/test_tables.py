"""The registry of tables: pages say what the commands print, CSVs are those on record, other schemas are noticed."""

from __future__ import annotations

import csv
import json
import re
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fake_run import full_run

from analysis.paper import draw_paper
from experiments import documents, models_table, run_documents, solvers, tables
from experiments.documents import DOCS, ROOT, TABLES, Document, Drawing, LongTable, between_marks, marks

MARK = re.compile(r"^<!-- tables: (.*) -->$", re.MULTILINE)
RESULTS = ("checkmate", "monet", "largest-batch", "solvers", "roofline", "executed-steps", "implementations")


def linked_tables(text: str) -> set[str]:
    """Names of tables under results/tables in the links of a page."""
    return set(re.findall(r"\]\([./]*results/tables/(\w+)\.csv\)", text))


def csv_of(name: str) -> list[list[str]]:
    with (TABLES / f"{name}.csv").open(newline="", encoding="utf-8") as file:
        return list(csv.reader(file))


def test_every_mark_of_every_page_belongs_to_a_command() -> None:
    pages = [ROOT / "README.md", *DOCS.rglob("*.md")]
    found = {(page, command) for page in pages for command in MARK.findall(page.read_text())}
    registered = {(document.page, document.command) for document in tables.DOCUMENTS.values()}
    assert registered == found


def test_every_page_is_on_record_and_its_tables_are_those_it_links_to() -> None:
    records = documents.records()
    assert set(records) == set(tables.DOCUMENTS)
    for name, document in tables.DOCUMENTS.items():
        assert records[name]["page"] == document.page.relative_to(ROOT).as_posix()
        linked = linked_tables(between_marks(document.page, document.command))
        assert linked == set(records[name]["tables"]), name
    named = [table for record in records.values() for table in record["tables"]]
    assert sorted(named) == sorted(path.stem for path in TABLES.glob("*.csv"))
    for name in named:
        heads, *rows = csv_of(name)
        assert rows, name
        assert all(len(row) == len(heads) for row in rows), name


@pytest.mark.parametrize("name", tables.DOCUMENTS)
def test_no_page_is_drawn_from_rows_of_another_schema(name: str) -> None:
    document = tables.DOCUMENTS[name]
    lacking = documents.other_schema(document, documents.records()[name])
    assert not lacking, f"{document.page}: its rows lack {', '.join(lacking)}; draw it again: {document.command}"


DRAWN_FROM_ROWS = (
    "solvers", "dtr", "rivals", "largest_batch", "executed_steps", "implementations", "strategies",
    "checkpoints", "coverage", "explain", "large", "lengths", "shard",
)  # fmt: skip


@pytest.mark.parametrize("name", DRAWN_FROM_ROWS)
def test_pages_with_committed_rows_are_what_their_command_draws(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("table", "dtr"):
        monkeypatch.setattr(f"experiments.{module}.RUNS_FOLDER", tmp_path)
    monkeypatch.setattr("experiments.largest_batch_table.FOLDER", tmp_path / "run")
    document = tables.DOCUMENTS[name]
    drawing = document.draw([])
    assert between_marks(document.page, document.command) == drawing.text
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


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Document:
    """A document in a folder of its own, drawn like the page of Checkmate."""
    for name, path in {"ROOT": tmp_path, "DOCS": tmp_path / "docs", "TABLES": tmp_path / "results" / "tables",
                       "RECORDS": tmp_path / "results" / "tables" / "index.json"}.items():  # fmt: skip
        monkeypatch.setattr(documents, name, path)
    page = tmp_path / "docs" / "results" / "page.md"
    page.parent.mkdir(parents=True)
    (tmp_path / "docs" / "figures").mkdir()
    paper = replace(run_documents.CHECKMATE_RUN, page=page, figures=("fig5_chain",))
    document = Document("checkmate", page, paper.draw, "RUN", run_documents.RUN_COLUMNS)
    page.write_text("\n".join(["# Page", *marks(document.command), "after\n"]))
    return document


def fake_paper_run(folder: Path) -> Path:
    """A finished run of the part fig5 on a small chain, drawn."""
    panel = full_run(folder)
    made = {"at": "2026-11-20T10:00:00+00:00", "seconds": 90.0, "solved": 12, "git_commit": None, "git_dirty": None}
    run = folder / "paper"
    run.mkdir()
    head = {"scale": {"points": 5, "time_limit_s": 3.0, "samples": 9}, "cores": 2,
            "config": {"scale": "quick", "gpu": {"name": "v100"}},
            "provenance": {"git_commit": None, "git_dirty": None, "versions": "{}", "cpu": "a CPU"}}  # fmt: skip
    (run / "paper.json").write_text(json.dumps(head))
    panels = [{"network": "chain", "label": "Chain", "source": "ours", "folder": str(panel.resolve())}]
    (run / "fig5.json").write_text(json.dumps({"panels": panels, "made": made}))
    draw_paper(run)
    return run


def test_a_run_becomes_a_page_its_tables_and_a_record(fake: Document, tmp_path: Path) -> None:
    run = fake_paper_run(tmp_path)
    documents.write_document(fake, fake.draw([str(run)]))
    text = fake.page.read_text()
    assert text.startswith("# Page\n")
    assert text.endswith("after\n")
    assert "2026-11-20; 12 solves, which take 2 minutes one after another" in text
    assert "<summary>Overhead against budget (Figure 5)</summary>" in text
    assert "![Chain: compute overhead against memory budget](../figures/paper_fig5_chain.png)" in text
    assert (tmp_path / "docs" / "figures" / "paper_fig5_chain.png").is_file()
    written = (tmp_path / "results" / "tables" / "paper_fig5_best.csv").read_text().splitlines()
    assert f"[paper_fig5_best.csv](../../results/tables/paper_fig5_best.csv) ({len(written) - 1} rows)" in text
    assert written == (run / "tables" / "fig5_best.csv").read_text().splitlines()
    assert written[0].split(",") == csv_of("paper_fig5_best")[0], "the committed table has other columns"
    (record,) = documents.records().values()
    assert record["tables"] == ["paper_fig5_best"]
    assert documents.other_schema(fake, record) == []
    again = fake.page.read_text()
    documents.write_document(fake, fake.draw([str(run)]))
    assert fake.page.read_text() == again


def test_rows_of_another_schema_are_noticed(fake: Document, tmp_path: Path) -> None:
    documents.write_document(fake, fake.draw([str(fake_paper_run(tmp_path))]))
    (record,) = documents.records().values()
    renamed = replace(fake, columns=(*fake.columns, "seconds"))
    assert documents.other_schema(renamed, record) == ["seconds"]
    assert "rows of another schema (without seconds); python -m" in tables.state(renamed, record)


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
    document = Document("x", tmp_path / "page.md", lambda _: Drawing(""))
    record = {"drawn": "2026-11-20", "columns": [], "tables": [], "commit": commit}
    assert tables.state(document, None).startswith("never drawn")
    (tmp_path / "page.md").write_text("a page is no code\n")
    assert "rows of this version of the code" in tables.state(document, record)
    (tmp_path / "remat" / "solve.py").write_text("x = 2\n")
    assert "rows of an older version of the code" in tables.state(document, record)
    assert "rows of an unknown version" in tables.state(document, record | {"commit": "0" * 40})
    assert "rows of an unknown version" in tables.state(document, record | {"commit": None})


def test_the_command_lists_draws_and_refuses(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert tables.main([]) == 0
    listed = capsys.readouterr().out
    assert all(re.search(rf"^{name} +\S+\.md$", listed, re.MULTILINE) for name in tables.DOCUMENTS)
    assert tables.main(["solvers"]) == 0
    drawn = capsys.readouterr().out
    assert "p100, scope staged" in drawn
    assert "solvers_time_limit.csv:\n\n| instance |" in drawn
    for arguments, words in {
        ("solver",): "did you mean solvers", ("checkmate", "a", "b"): "or none for the study",
        ("readme", str(tmp_path)): "give the folder of a finished run", ("roofline", "x"): "takes no arguments",
        ("solvers", "x"): "takes no arguments",
    }.items():  # fmt: skip
        assert tables.main(list(arguments)) == 1, arguments
        error = capsys.readouterr().err
        assert words in error
        assert error.count("\n") == 1


def test_a_part_of_a_page_is_not_written(fake: Document) -> None:
    with pytest.raises(documents.InvalidInput, match="written as a whole"):
        documents.write_document(fake, Drawing("", whole=False))
    assert not documents.RECORDS.exists()


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


def test_models_are_summed_up_by_framework_and_granularity() -> None:
    heads, *rows = csv_of("models")
    assert tuple(heads) == models_table.HEADS
    document = models_table.DOCUMENT
    assert models_table.summary(LongTable("models", heads, rows)) == between_marks(document.page, document.command)
    failed = [["a", "torch", "operation", "1", "FAILED", "", "", "", "2.0"]]
    assert "- **torch, by operation** (FAILED): `a`" in models_table.summary(LongTable("models", heads, failed))
