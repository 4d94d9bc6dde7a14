"""Read and write files: read whole, plain JSON; write each file atomically, or not at all.

remat reads all JSON through `read_json` and writes all files through `replacing`, so that one place reports each
defect of a file, and each full disk, with the path.
"""

from __future__ import annotations

import errno
import gzip
import hashlib
import io
import json
import os
import secrets
import sys
import tempfile
import zlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from remat.errors import DiskFull, InvalidInput, nearest, plain, shown, warn

if TYPE_CHECKING:
    import pyarrow as pa

MAX_FILE_BYTES = 512 * 1024**2
MAX_JSON_VALUES = 30_000_000  # about 2 GB of Python objects; a file of the size above may hold ten times as many
MAX_JSON_LINES = 10_000_000
MOST_PROBLEMS = 1000  # of a file that are listed
NO_MORE = f"has more than {MOST_PROBLEMS} problems; the others are not listed"
SEAL = "content_sha256"
_GZIP = b"\x1f\x8b"
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)  # EFBIG: above the limit of the user or the file system


def read_json(path: str | os.PathLike[str], refused: type[InvalidInput] = InvalidInput) -> Any:
    """The JSON value in a file, UTF-8, compressed with gzip or not.

    Args:
        refused: the class of the error.

    Raises:
        InvalidInput: one line with the path and, if known, the place. Also refused: an object that has a key twice,
            NaN, and a file above `MAX_FILE_BYTES`.
    """
    if not isinstance(path, (str, os.PathLike)):
        raise refused(f"a file's path is needed, not {shown(path)}")
    try:
        return _parsed(_read_bytes(Path(path)))
    except _Unreadable as error:
        raise refused(f"{os.fspath(path)}: {error}") from None
    except MemoryError:
        raise refused(f"{os.fspath(path)}: cannot be read: it needs more memory than there is") from None


def read_text(path: str | os.PathLike[str]) -> str:
    """The UTF-8 text in a file, compressed with gzip or not; raises `InvalidInput` with the path."""
    try:
        return _read_bytes(Path(path)).decode("utf-8-sig")
    except _Unreadable as error:
        raise InvalidInput(f"{os.fspath(path)}: {error}") from None
    except UnicodeDecodeError as error:
        raise InvalidInput(f"{os.fspath(path)}: is not UTF-8 text (byte {error.start})") from None


class _Unreadable(Exception):
    """Why a file cannot be read, without its path."""


def read_json_lines(path: str | os.PathLike[str], refused: type[InvalidInput]) -> Iterator[tuple[int, Any]]:
    """(line number, JSON value) of each line that is not blank; the file may be compressed with gzip.

    Args:
        refused: the class of the error.

    Raises:
        InvalidInput: one line with the path and the line; the same defects as `read_json` refuses.
    """
    n, left = 0, MAX_FILE_BYTES
    try:
        with _opened(Path(path)) as file:
            while line := file.readline(left + 1):
                n, left = n + 1, left - len(line)
                if left < 0:
                    raise _Unreadable(f"is larger than {MAX_FILE_BYTES} bytes")
                if n > MAX_JSON_LINES:
                    raise _Unreadable(f"comes after {MAX_JSON_LINES:,} lines, the most that are read")
                if line.strip():
                    yield n, _parsed(line, is_line=True)
    except _Unreadable as error:
        where = f"line {n}: " if n else ""
        raise refused(f"{os.fspath(path)}: {where}{error}") from None


def _read_bytes(path: Path) -> bytes:
    with _opened(path) as file:
        content = file.read(MAX_FILE_BYTES + 1)
    if len(content) > MAX_FILE_BYTES:
        raise _Unreadable(f"is larger than {MAX_FILE_BYTES} bytes")
    return content


@contextmanager
def _opened(path: Path) -> Iterator[BinaryIO | gzip.GzipFile]:
    """The bytes of a file, without its compression; what goes wrong while they are read is `_Unreadable`."""
    try:
        if path.is_dir():
            raise _Unreadable("cannot be read: it is a folder; name a file in it")
        if path.exists() and not path.is_file():
            raise _Unreadable("not a regular file")  # a device or a pipe may never end
        with path.open("rb") as file:
            is_compressed = file.read(len(_GZIP)) == _GZIP
            file.seek(0)
            yield gzip.GzipFile(fileobj=file) if is_compressed else file
    except FileNotFoundError:
        raise _Unreadable("no such file") from None
    except (EOFError, gzip.BadGzipFile, zlib.error):
        raise _Unreadable("is compressed with gzip, but damaged or cut short") from None
    except (OSError, ValueError) as error:  # ValueError: a null character in the path
        raise _Unreadable(f"cannot be read: {getattr(error, 'strerror', None) or error}") from None


def _parsed(content: bytes, *, is_line: bool = False) -> Any:
    """The JSON value; `is_line` is for the words of an error."""
    if not content.strip():
        raise _Unreadable("cannot be read as JSON: it is empty")
    if len(content) > MAX_JSON_VALUES and sum(map(content.count, (b",", b"[", b"{"))) > MAX_JSON_VALUES:
        raise _Unreadable(f"cannot be read as JSON: it holds more than {MAX_JSON_VALUES:,} values")
    try:
        text = content.decode("utf-8-sig")
        return _DECODER.decode(text)
    except UnicodeDecodeError as error:
        raise _Unreadable(f"cannot be read as JSON: it is not UTF-8 text (byte {error.start})") from None
    except json.JSONDecodeError as error:
        at = f"column {error.colno}" if is_line else f"line {error.lineno}, column {error.colno}"
        whole = "line" if is_line else "file"
        ends = f" and the {whole} ends there; is it cut short?" if error.pos >= len(error.doc.rstrip()) else ""
        raise _Unreadable(f"cannot be read as JSON: {error.msg.removesuffix(' at')} at {at}{ends}") from None
    except RecursionError:
        raise _Unreadable("cannot be read as JSON: it is nested too deeply") from None
    except ValueError:  # the only one left: Python refuses integers of thousands of digits
        raise _Unreadable("cannot be read as JSON: it holds an integer of thousands of digits") from None


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))
        raise _Unreadable(f"has the key {twice!r:.60} twice in one object")
    return found


def _refuse_constant(name: str) -> Any:
    raise _Unreadable(f"cannot be read as JSON: it holds {name}, which is no number there")


_DECODER = json.JSONDecoder(object_pairs_hook=_without_repeats, parse_constant=_refuse_constant)


class UnknownKeys:
    """Keys of a document that remat does not read: one warning for a file, however many there are."""

    def __init__(self) -> None:
        self._found: dict[tuple[str, str], tuple[int, str, tuple[str, ...]]] = {}  # [what, key] (number, first, known)

    def look(self, record: Mapping[str, Any], known: tuple[str, ...], what: str, where: str) -> None:
        """Note the keys of `record` that are not in `known`.

        Args:
            what: kind of the record, e.g. ``node``.
            where: its place, e.g. ``node 3``.
        """
        for key in record.keys() - set(known):
            n, first, _ = self._found.get((what, key), (0, where, known))
            self._found[what, key] = (n + 1, first, known)

    def tell(self, where: str | os.PathLike[str]) -> None:
        """Warn of the noted keys, if there are any; `where` names the file."""
        parts = []
        for (what, key), (n, first, known) in sorted(self._found.items())[:5]:
            near = nearest(key, known, 1, alike=0.6)
            hint = f", did you mean '{near[0]}'?" if near else ""
            parts.append(f"'{plain(key)}' in {first if n == 1 else f'{n} {what}s'}{hint}")
        more = f"; and {len(self._found) - 5} others" if len(self._found) > 5 else ""
        if parts:
            warn(f"{os.fspath(where)}: unknown keys are not read: {'; '.join(parts)}{more}")


@contextmanager
def replacing(path: str | os.PathLike[str]) -> Iterator[Path]:
    """A scratch file beside `path` to write to; it replaces `path` when the block ends without an error.

    A missing folder is made; a block that raises leaves nothing behind. Several writers of one path, even on several
    machines of a shared file system, do not disturb each other; the last file stays.

    Raises:
        InvalidInput: the path can name no file, e.g. it is empty, or a folder's.
        DiskFull: there is no room for the file.
        OSError: any other error of the system, with the path.
    """
    if not _can_name_a_file(path):
        raise InvalidInput(f"the path of a file to write is needed, not {shown(path)}")
    path = Path(path)
    if path.is_dir():
        raise InvalidInput(f"{path}: cannot be written: it is a folder; name a file in it")
    if (file := next(filter(Path.is_file, path.parents), None)) is not None:
        raise InvalidInput(f"{path}: cannot be written: {file} is a file; name a folder")
    scratch = path.with_name(f".{path.name}.{os.getpid()}-{secrets.token_hex(4)}.part")
    try:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            yield scratch
            os.replace(scratch, path)
        finally:
            scratch.unlink(missing_ok=True)
    except OSError as error:
        if error.errno in _FULL or "No space left" in str(error):  # pyarrow gives no error number
            raise DiskFull(_no_room(path, error)) from None
        if error.errno is not None and error.filename in (None, str(scratch)):  # users do not know the scratch file
            raise type(error)(error.errno, error.strerror, str(path)) from None
        raise


def _can_name_a_file(path: object) -> bool:
    try:
        return isinstance(path, (str, os.PathLike)) and bool(Path(path).name) and b"\0" not in os.fsencode(path)
    except (TypeError, UnicodeEncodeError):  # bytes; half a character
        return False


def _no_room(path: Path, error: OSError) -> str:
    what = f"no space left on the disk to write {path} ({error.strerror or os.strerror(errno.ENOSPC)})"
    if Path(tempfile.gettempdir()) in path.parents:
        return f"{what}: make room, or let TMPDIR name a folder that has some"
    return f"{what}; what was finished before is kept: make room and give the same command again"


def show_any_text() -> None:
    """Let a terminal without a character show its escape; otherwise a name that it cannot show raises an error."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def write_text(path: str | os.PathLike[str], text: str) -> None:
    """Write UTF-8 text atomically, compressed if the name ends with ``.gz``; raises as `replacing`."""
    content = text.encode()
    if isinstance(path, (str, os.PathLike)) and os.fspath(path).endswith(".gz"):
        content = gzip.compress(content, mtime=0)  # without the time, so that equal texts give equal files
    write_bytes(path, content)


def write_bytes(path: str | os.PathLike[str], content: bytes) -> None:
    """Write a file atomically; raises as `replacing`."""
    with replacing(path) as scratch:
        scratch.write_bytes(content)


def sealed(document: Mapping[str, Any]) -> dict[str, Any]:
    """The document with a hash of its content, so that `unsealed` sees any later change."""
    return {**document, SEAL: digest_of(document)}


def unsealed(document: Any, path: str | os.PathLike[str]) -> dict[str, Any]:
    """The document without its seal.

    Raises:
        InvalidInput: it is no JSON object, has no seal, or its content does not match its seal.
    """
    if not isinstance(document, dict):
        raise InvalidInput(f"{os.fspath(path)}: must hold a JSON object")
    content = {key: value for key, value in document.items() if key != SEAL}
    _check_seal(document.get(SEAL), digest_of(content), path)
    return content


def _check_seal(seal: object, digest: str, path: str | os.PathLike[str]) -> None:
    """Refuse also a file without a seal, because damage may have hit the seal."""
    if seal != digest:
        what = "was altered after it was written" if seal else f"has no seal ('{SEAL}')"
        raise InvalidInput(f"{os.fspath(path)}: {what}")


def digest_of(content: Any) -> str:
    """Hash of JSON-ready content; the order of keys does not matter."""
    return hashlib.sha256(json.dumps(content, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def digest_of_source(package: Path, patterns: Iterable[str] = ("**/*.py",)) -> str:
    """Hash of the names and contents of a package's files that match the patterns."""
    digest = hashlib.sha256()
    for path in sorted({path for pattern in patterns for path in package.glob(pattern)}):
        digest.update(f"{path.relative_to(package).as_posix()}\0".encode() + path.read_bytes())
    return digest.hexdigest()


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The objects in a file from `write_lines`; [] if there is no file. Warns of damaged lines."""
    if not path.exists():
        return []
    rows = []
    try:
        lines = _read_bytes(path).splitlines()
    except _Unreadable as error:
        raise InvalidInput(f"{path}: {error}") from None
    for n, line in enumerate(lines, 1):
        try:
            rows.append(unsealed(_parsed(line), path))
        except (_Unreadable, InvalidInput):
            warn(f"{path}: line {n} is damaged; it will be made again")
    return rows


def write_lines(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Write each row as a sealed line of JSON; all atomically."""
    write_text(path, "".join(json.dumps(sealed(row)) + "\n" for row in rows))


def read_table(path: str | os.PathLike[str]) -> pa.Table:
    """The table in a parquet file.

    Raises:
        InvalidInput: names the file: it cannot be read, has no seal, or its content does not match its seal.
    """
    import pyarrow.parquet as pq

    try:
        table = pq.ParquetFile(path).read()
        seal, digest = (table.schema.metadata or {}).get(SEAL.encode(), b"").decode(), _seal_of(table)
    except Exception as error:  # damage decides what fails: the decoder, the text of a cell, the type of a column
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise InvalidInput(f"{os.fspath(path)}: cannot be read as parquet: {reason}") from None
    _check_seal(seal, digest, path)
    return table


def write_table(path: str | os.PathLike[str], table: pa.Table) -> None:
    """Write a sealed parquet file atomically; raises as `replacing`."""
    import pyarrow.parquet as pq

    metadata = {**(table.schema.metadata or {}), SEAL.encode(): _seal_of(table).encode()}
    with replacing(path) as scratch:
        pq.write_table(table.replace_schema_metadata(metadata), scratch, compression="zstd")


def _seal_of(table: pa.Table) -> str:
    """Hash of the column names, then hash of the content."""
    metadata = {key.decode(): value.decode() for key, value in (table.schema.metadata or {}).items()}
    metadata = {key: value for key, value in metadata.items() if key not in (SEAL, "ARROW:schema", "pandas")}
    return f"{digest_of(table.column_names)}-{digest_of([table.to_pylist(), metadata])}"
