"""The cache of measurements: a file for each operation and quantity, whole or absent."""

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
    """Name of the file of an operation, measured on the device and in the way that `provenance` says."""
    return hashlib.sha256(json.dumps([signature, provenance], sort_keys=True).encode()).hexdigest()[:40]


def read_record(path: Path) -> dict[str, Any]:
    """What a file holds; nothing where there is none of ours, with a warning if it is damaged."""
    try:
        return unsealed(read_json(path), path) if path.exists() else {}
    except OSError:  # of a folder that may not be read
        return {}
    except InvalidInput as error:
        warn(f"{error}; measuring again")
        return {}


def read_fields(path: Path, fields: Sequence[str]) -> tuple[int, ...] | None:
    """Fields of a file; None, which means to measure, where there is no finished file of ours.

    A time that other processes disturbed is not finished: it is measured again.
    """
    record = read_record(path)
    found = tuple(record.get(field) for field in fields)
    if not all(map(is_measurement, found)):
        return None
    is_time = tuple(fields) == TIME_FIELDS
    return None if is_time and not is_steady(*found) else found  # pyright: ignore[reportArgumentType, reportReturnType]


def read_samples(path: Path) -> list[tuple[int, int]]:
    """(median, shortest) ns of each pass over an operation so far; what is damaged is left out."""
    record = read_record(path)
    samples = record.get("samples", [[record.get(field) for field in TIME_FIELDS]])  # earlier versions kept the result
    if not isinstance(samples, list):
        return []
    return [
        (sample[0], sample[1]) for sample in samples
        if isinstance(sample, list) and len(sample) == 2 and all(map(is_measurement, sample))
    ]  # fmt: skip


def write_record(path: Path, record: Mapping[str, Any]) -> None:
    """Write `record` as JSON so that a reader finds all of it or nothing."""
    write_text(path, json.dumps(sealed(record)))


def is_measurement(x: Any) -> bool:
    """Whether a field can be nanoseconds or bytes."""
    return type(x) is int and x >= 0
