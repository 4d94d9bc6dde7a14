"""The store as others read it: one schema for every strategy, and the documented queries."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pyarrow.dataset as ds
import pytest
from helpers import blocks_of

from experiments import cli
from experiments.store import ROW_SCHEMA

DOCUMENT = Path(__file__).parents[1] / "docs" / "how-to" / "read-a-result.md"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where a run of strategies of every kind was made: with and without bound, options and plans."""
    root = tmp_path_factory.mktemp("queries")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(root)
        patch.setattr(sys, "argv", ["run.py"])
        patch.setattr("analysis.draw_run", lambda folder: [])
        run = ["model=chain", "model.options.n=4", "points=3", "time_limit=3",
               "strategies=[checkpoint_all,torch_mincut,lp_rounding,checkmate_milp]",
               "options.lp_rounding.improve=false"]  # fmt: skip
        assert cli.main(run) == 0
    return root


def test_every_row_has_the_same_columns(folder: Path) -> None:
    data = ds.dataset(folder / "runs" / "store" / "rows", format="parquet")
    schemas = {fragment.path: fragment.physical_schema for fragment in data.get_fragments()}
    assert len(schemas) >= 12
    assert all(schema.equals(ROW_SCHEMA) for schema in schemas.values())
    table = data.to_table()
    assert len(set(table["strategy"].to_pylist())) == 4
    assert {"OPTIMAL", "SKIPPED", "NO_PLAN"} <= set(table["status"].to_pylist())
    assert 0 < table["cost"].null_count < len(table)
    options = {row["strategy"]: json.loads(row["options"]) for row in table.to_pylist()}
    assert options["lp_rounding"] == {"improve": False}
    assert options["checkmate_milp"] == {}


def test_the_documented_queries_run(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    duckdb = pytest.importorskip("duckdb", reason="DuckDB is not installed: the documented queries were not run")
    queries = blocks_of(DOCUMENT, "sql")
    assert len(queries) == 4
    monkeypatch.chdir(folder)
    for query in queries:
        assert duckdb.sql(query).fetchall(), query
