"""``make large`` goes on where it was stopped."""

import pytest

pytest.importorskip("torch")

from experiments import large
from experiments.store import code_of
from remat.files import read_json


def test_a_stopped_run_solves_what_is_missing(tmp_path, monkeypatch) -> None:
    asked = list[tuple[int, int]]()

    def solved(_graph: object, budget_bytes: int, limit_s: int) -> dict[str, object]:
        if len(asked) == 2 and not (tmp_path / "again").exists():
            raise KeyboardInterrupt
        asked.append((budget_bytes, limit_s))
        return {"code": code_of("portfolio"), "budget_bytes": budget_bytes, "limit_s": limit_s}

    monkeypatch.setattr(large, "RESULTS", tmp_path / "large.json")
    monkeypatch.setattr(large, "facts_of", lambda _: (None, {"plain_bytes": 400, "least_bytes": 0}))
    monkeypatch.setattr(large, "solved", solved)
    monkeypatch.setattr(large, "compile_search", lambda: None)
    arguments = ["--steps", "dense32", "--limits", "10"]
    with pytest.raises(KeyboardInterrupt):
        large.main(arguments)
    (tmp_path / "again").touch()
    large.main(arguments)
    large.main(arguments)
    assert asked == [(300, 10), (200, 10), (100, 10)]
    assert len(read_json(tmp_path / "large.json")["steps"]["dense32"]["solves"]) == 3
    monkeypatch.setattr(large, "code_of", lambda _: "newer")  # rows of older solvers do not count, and stay until then
    large.main(arguments)
    assert len(asked) == 6
    assert len(read_json(tmp_path / "large.json")["steps"]["dense32"]["solves"]) == 3
