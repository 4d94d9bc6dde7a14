"""``make dtr`` goes on where it was stopped, and its page shows what is stored."""

from __future__ import annotations

import gzip
from pathlib import Path
from typing import Any

import pytest

from experiments import dtr
from experiments.store import code_of
from remat import Graph
from remat.files import read_json
from remat.frontends.dtr_log import DtrLog


@pytest.fixture
def asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Budgets that were solved; the first run stops before its third one."""
    solved_budgets = list[int]()

    def solved(_graph: object, budget_bytes: int, _seconds: float) -> dict[str, Any]:
        if len(solved_budgets) == 2 and not (tmp_path / "again").exists():
            raise KeyboardInterrupt
        solved_budgets.append(budget_bytes)
        online = dict.fromkeys(dtr.HEURISTICS, 1.2) | {"lru": None}
        code = code_of("dtr", "portfolio")
        return {"code": code, "online": online, "offline": 1.1, "bound": 1.05, "status": "FEASIBLE", "offline_s": 1.0}

    graph = Graph.from_nodes("small", [[], [0]], [10, 10], [1, 1], loss=0)
    monkeypatch.setattr(dtr, "RESULTS", tmp_path / "dtr.json")
    monkeypatch.setattr(dtr, "RUNS_FOLDER", tmp_path)
    monkeypatch.setattr(dtr, "solved", solved)
    monkeypatch.setattr(dtr, "compile_search", lambda: None)
    monkeypatch.setattr(dtr, "load_dtr_log", lambda _: DtrLog(graph, 8400))
    (tmp_path / "unet.log.gz").write_bytes(gzip.compress(b""))
    return solved_budgets


def test_a_stopped_run_makes_what_is_missing(tmp_path: Path, asked: list[int]) -> None:
    arguments = ["--networks", "U-Net", "--logs", str(tmp_path)]
    with pytest.raises(KeyboardInterrupt):
        dtr.main(arguments)
    (tmp_path / "again").touch()
    dtr.main(arguments)
    dtr.main(arguments)
    assert asked == [8000, 6999, 6000, 4000]
    rows = read_json(dtr.RESULTS)["networks"]["U-Net"]["rows"]
    assert [row["published"] for row in rows] == [1.066, 1.088, 1.141, 1.269]
    dtr.main([*arguments, "--seconds", "60"])
    assert asked[4:] == asked[:4]

    drawn = dtr.draw([])
    assert "| U-Net | 0.95 | 1.066 | 1.2000 | 1.2000 | -0.134 | 1.1000 | 1.0500 | 4.55% | 9.1 to 14.3% |" in drawn.text
    assert "| U-Net | 0.48 | 1.2000 | 1.2000 | 1.2000 | thrashes | 1.2000 | 1.2000 |" in drawn.text
    assert drawn.figures["dtr"].is_file()


def test_a_small_graph_is_solved() -> None:
    graph = Graph.from_nodes("chain", [[], [0], [1], [2], [1, 3], [0, 4]], [4, 4, 4, 4, 4, 4], [1] * 6, loss=3)
    found = dtr.solved(graph, 12, 2.0)
    assert set(found["online"]) == set(dtr.HEURISTICS)
    assert 1 < found["bound"] <= found["offline"] <= found["online"]["exact"]
