"""``make large`` goes on where it was stopped."""

import pytest

pytest.importorskip("torch")

from experiments import large
from remat.files import read_json


def test_a_stopped_run_solves_what_is_missing(tmp_path, monkeypatch) -> None:
    asked = list[tuple[int, int]]()

    def solved(_graph: object, budget_bytes: int, limit_s: int) -> dict[str, int]:
        if len(asked) == 2 and not (tmp_path / "again").exists():
            raise KeyboardInterrupt
        asked.append((budget_bytes, limit_s))
        return {"budget_bytes": budget_bytes, "limit_s": limit_s}

    monkeypatch.setattr(large, "RESULTS", tmp_path / "large.json")
    monkeypatch.setattr(large, "facts_of", lambda _: (None, {"plain_bytes": 400, "least_bytes": 0}))
    monkeypatch.setattr(large, "solved", solved)
    arguments = ["--steps", "dense32", "--limits", "10"]
    with pytest.raises(KeyboardInterrupt):
        large.main(arguments)
    (tmp_path / "again").touch()
    large.main(arguments)
    large.main(arguments)
    assert asked == [(300, 10), (200, 10), (100, 10)]
    assert len(read_json(tmp_path / "large.json")["steps"]["dense32"]["solves"]) == 3
