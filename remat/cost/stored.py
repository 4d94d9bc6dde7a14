"""Stored measurements for machines that lack the device: one table per device, under ``results/<gpu>``.

``python -m experiments.device --keep`` writes the tables; ``cost=profile gpu=<gpu>`` reads them.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from remat.cost.records import TIME_FIELDS, cache_key, read_fields, read_record
from remat.errors import InvalidInput, MissingPackage
from remat.files import read_table, write_table

RESULTS_FOLDER = Path(__file__).resolve().parents[2] / "results"
FILE = "profile.parquet"


@dataclass(frozen=True, slots=True)
class StoredProfile:
    """Measurements of operations on one device.

    Attributes:
        path: of the table.
        device: its name in the framework, e.g. ``NVIDIA H200``.
        versions: of the frameworks that ran the operations.
        date: of the table, in ISO format.
        ns: {signature of the operation: median nanoseconds}.
    """

    path: Path
    device: str
    versions: Mapping[str, str]
    date: str
    ns: Mapping[str, int]


def load_stored(gpu: str, folder: Path | None = None) -> StoredProfile | None:
    """The table of a device by its name in `remat.cost.gpu_names()`; None if there is none.

    Raises:
        InvalidInput: the file is not such a table.
        MissingPackage: it needs pyarrow.
    """
    path = (folder or RESULTS_FOLDER) / gpu / FILE
    if not path.is_file():
        return None
    again = "write it again with python -m experiments.device --keep"
    try:
        table = read_table(path)
        metadata = {key.decode(): value.decode() for key, value in (table.schema.metadata or {}).items()}
        ns = dict(zip(table["signature"].to_pylist(), table["ns"].to_pylist(), strict=True))
        return StoredProfile(path, metadata["device"], json.loads(metadata["versions"]), metadata["date"], ns)
    except ImportError:
        raise MissingPackage(f"reading {path} needs pyarrow: pip install 'remat[harness]'") from None
    except InvalidInput as error:
        raise InvalidInput(f"{error}; {again}") from None
    except (KeyError, json.JSONDecodeError) as error:
        raise InvalidInput(f"{path} is no table of measured costs: {error}; {again}") from None


def store(cache: Path, gpu: str, provenance: Mapping[str, Any], folder: Path | None = None) -> Path:
    """Write the times of a device in the cache of `profile_costs` as the table of that device.

    Args:
        gpu: a name in `remat.cost.gpu_names()`.
        provenance: device, versions and conditions of the times, as in the records (`profile.provenance_of`).
            Times of another provenance and times that are not steady are left out.

    Raises:
        InvalidInput: no times are left.
    """
    import pyarrow as pa

    found = [(path, read_record(path)) for path in sorted(cache.glob("*.json"))]
    records = [
        record for path, record in found
        if read_fields(path, TIME_FIELDS) and path.stem == cache_key(record["signature"], provenance)
    ]  # fmt: skip
    if not records:
        raise InvalidInput(f"nothing was measured on {provenance['device']} into {cache}")
    table = pa.table({
        "signature": [record["signature"] for record in records],
        "ns": pa.array([record["ns"] for record in records], pa.int64()),
        "best_ns": pa.array([record["best_ns"] for record in records], pa.int64()),
    })  # fmt: skip
    metadata = {"device": provenance["device"], "versions": json.dumps(dict(provenance["versions"])),
            "date": datetime.date.today().isoformat()}  # fmt: skip
    path = (folder or RESULTS_FOLDER) / gpu / FILE
    write_table(path, table.replace_schema_metadata(metadata))
    return path
