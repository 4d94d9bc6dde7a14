"""Finished pieces of a measuring command: kept with what they were made from, replaced only by new ones."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from experiments.pieces import Pieces, read_pieces
from experiments.store import write_json
from remat.errors import InvalidInput
from remat.files import read_json


@pytest.fixture
def pieces(tmp_path: Path) -> Pieces:
    return Pieces(tmp_path / "rows.json", "model", {"rounds": 7, "cpu": "a"})


def test_a_piece_counts_for_its_own_settings_only(pieces: Pieces) -> None:
    assert not pieces.has("gpt2")
    pieces.put("gpt2", [{"model": "gpt2", "ms": 1}, {"model": "gpt2", "ms": 2}])
    assert pieces.has("gpt2")
    assert not pieces.has("vit")
    assert not replace(pieces, made={"rounds": 9, "cpu": "a"}).has("gpt2")
    assert read_json(pieces.path)["rounds"] == 7


def test_a_new_piece_takes_the_place_of_the_old_one_and_leaves_the_others(pieces: Pieces) -> None:
    for name in ("gpt2", "vit", "unet"):
        pieces.put(name, [{"model": name, "ms": 1}])
    pieces.put("vit", [{"model": "vit", "ms": 2}])
    assert [(row["model"], row["ms"]) for row in pieces.rows()] == [("gpt2", 1), ("vit", 2), ("unet", 1)]


def test_a_head_that_does_not_hold_for_all_rows_is_refused(pieces: Pieces) -> None:
    pieces.put("gpt2", [{"model": "gpt2", "ms": 1}])
    assert read_pieces(pieces.path, "make it")["rounds"] == 7
    replace(pieces, made={"rounds": 9, "cpu": "a"}).put("vit", [{"model": "vit", "ms": 1}])
    with pytest.raises(InvalidInput, match="different settings, versions or processors; run make it"):
        read_pieces(pieces.path, "make it")


def test_rows_of_older_files_were_made_as_their_head_says(pieces: Pieces) -> None:
    write_json(pieces.path, {"rounds": 7, "cpu": "a", "rows": [{"model": "gpt2"}]})
    assert pieces.has("gpt2")
    write_json(pieces.path, {"cpu": "a", "rows": [{"model": "gpt2"}]})
    assert not pieces.has("gpt2")


def test_a_compiled_model_is_measured_again_for_other_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = pytest.importorskip("experiments.compiled")
    asked = list[int]()

    def measure(_name: str, _threads: int, rounds: int, *_rest: object) -> dict[str, object]:
        asked.append(rounds)
        return {"rounds": rounds, "rows": []}

    monkeypatch.setattr(compiled, "measure", measure)
    monkeypatch.setattr(compiled, "dropout", list)
    for rounds in ("3", "3", "5"):
        compiled.main(["--models", "gpt2", "--rounds", rounds, "--out", str(tmp_path)])
    assert asked == [3, 5]
