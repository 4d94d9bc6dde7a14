"""The cache of measurements: one file for each operation and quantity, complete or absent."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from remat.cost.timing import is_steady
from remat.errors import InvalidInput, warn
from remat.files import read_json, sealed, unsealed, write_text

TIME_FIELDS = ("ns", "best_ns")


def cache_key(signature: str, provenance: Mapping[str, Any]) -> str:
    """File name of an operation's measurement on the device, and under the conditions, of `provenance`."""
    return hashlib.sha256(json.dumps([signature, provenance], sort_keys=True).encode()).hexdigest()[:40]


def read_record(path: Path) -> dict[str, Any]:
    """The content of a file; {} if it is absent, unreadable or damaged, which gives a warning."""
    try:
        return unsealed(read_json(path), path) if path.exists() else {}
    except OSError:  # no permission to read the folder
        return {}
    except InvalidInput as error:
        warn(f"{error}; measuring again")
        return {}


def read_fields(path: Path, fields: Sequence[str]) -> tuple[int, ...] | None:
    """Fields of a file; None if the quantity must be measured.

    A time that other processes disturbed must be measured again.
    """
    record = read_record(path)
    found = tuple(record.get(field) for field in fields)
    if not all(map(is_measurement, found)):
        return None
    is_time = tuple(fields) == TIME_FIELDS
    return None if is_time and not is_steady(*found) else found  # pyright: ignore[reportArgumentType, reportReturnType]


def read_samples(path: Path) -> list[tuple[int, int]]:
    """(median, shortest) ns of each pass over an operation so far, without damaged ones."""
    record = read_record(path)
    samples = record.get("samples", [[record.get(field) for field in TIME_FIELDS]])  # earlier versions stored no passes
    if not isinstance(samples, list):
        return []
    return [
        (sample[0], sample[1]) for sample in samples
        if isinstance(sample, list) and len(sample) == 2 and all(map(is_measurement, sample))
    ]  # fmt: skip


def write_record(path: Path, record: Mapping[str, Any]) -> None:
    """Write `record` as JSON; a reader finds all of it or nothing."""
    write_text(path, json.dumps(sealed(record)))


def is_measurement(x: Any) -> bool:
    """Whether a field can be nanoseconds or bytes."""
    return type(x) is int and x >= 0
