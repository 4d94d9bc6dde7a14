"""Writing files so that a reader finds all of one or nothing, whatever interrupts the writer."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def replacing(path: str | os.PathLike[str]) -> Iterator[Path]:
    """A scratch file beside `path` to write to; it takes the place of `path` when the block ends well.

    The folder is made if it is not there; a block that raises leaves nothing behind. Several writers of one path,
    on several machines of a shared file system too, do not meet: the last one's file stays.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.with_name(f".{path.name}.{os.getpid()}-{secrets.token_hex(4)}.part")
    try:
        yield scratch
        os.replace(scratch, path)
    finally:
        scratch.unlink(missing_ok=True)
