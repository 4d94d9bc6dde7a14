"""Reads the pickles of monet-schedules without running any code that they name.

A pickle is a program that calls the objects that it names. Here it may name only the objects listed below, and each
name stands for something harmless of this module: MONeT's classes for records without methods, containers for plain
dicts, lists and sets, NumPy's scalars for Python numbers, its arrays and PyTorch's tensors for empty objects. NumPy,
PyTorch and MONeT are not imported, and no bytes of a tensor are decoded. The opcodes are checked before unpickling.
"""

from __future__ import annotations

import io
import pickle
import pickletools
import struct
from pathlib import Path
from typing import Any

from remat.errors import InvalidInput, shortened

MAX_FILE_BYTES = 256 * 1024**2
MAX_TUPLES = 50_000  # nested tuples are hashed recursively when they are keys; arguments of calls do not count

# The opcodes that Python 3 writes for containers, numbers, strings and objects: no extension registry, no persistent
# ids, no out-of-band buffers, no preallocated bytearrays, no instance opcodes of Python 2.
_OPCODES = frozenset(
    """
    PROTO FRAME STOP MARK POP POP_MARK DUP NONE NEWTRUE NEWFALSE INT LONG LONG1 BININT BININT1 BININT2 FLOAT BINFLOAT
    UNICODE BINUNICODE SHORT_BINUNICODE BINUNICODE8 SHORT_BINBYTES BINBYTES BINBYTES8 EMPTY_LIST APPEND APPENDS LIST
    EMPTY_TUPLE TUPLE TUPLE1 TUPLE2 TUPLE3 EMPTY_DICT DICT SETITEM SETITEMS EMPTY_SET ADDITEMS PUT BINPUT LONG_BINPUT
    GET BINGET LONG_BINGET MEMOIZE GLOBAL STACK_GLOBAL NEWOBJ REDUCE BUILD
    """.split()  # noqa: SIM905 - a column of 52 names
)
_PUTS = ("PUT", "BINPUT", "LONG_BINPUT", "MEMOIZE")  # the last has no argument
_TUPLES = ("TUPLE", "TUPLE1", "TUPLE2", "TUPLE3")
_CALLS = ("REDUCE", "NEWOBJ")


class Record:
    """An object of one of MONeT's classes; `fields` holds its stored attributes."""

    __slots__ = ("fields",)
    fields: dict[str, Any]

    def __new__(cls) -> Record:
        record = super().__new__(cls)
        record.fields = {}
        return record

    def __setstate__(self, state: Any) -> None:
        if not isinstance(state, dict) or not all(isinstance(key, str) for key in state):
            raise pickle.UnpicklingError(f"the state of a {type(self).__name__} must be a dict of attributes")
        self.fields = state


def _records(names: str) -> dict[str, type[Record]]:
    return {name: type(name, (Record,), {"__slots__": ()}) for name in names.split()}


_GRAPH = _records("Node Input Param ComputeNode Graph")
_GRAPH |= {f"ComputeNode.{name}": record for name, record in _records("Arg V D").items()}
_SOLVER = _records("SolverNode FwdNode BwdNode IntNode SolverInfo")
_PIPELINED = _records("PipelinedSolverInfo")
_SOLUTIONS = _records("Solution CheckmateSolution")

SolverInfo, PipelinedSolverInfo = _SOLVER["SolverInfo"], _PIPELINED["PipelinedSolverInfo"]
ComputeNode, FwdNode, BwdNode, IntNode = _GRAPH["ComputeNode"], *(_SOLVER[n] for n in ("FwdNode", "BwdNode", "IntNode"))


class Opaque:
    """An object that is not read: an array, a tensor or a part of one."""

    __slots__ = ()

    def __init__(self, *arguments: Any) -> None:
        del arguments

    def __setstate__(self, state: Any) -> None:
        del state

    def __setitem__(self, key: Any, value: Any) -> None:
        del key, value


class _Dtype:
    """Type of a NumPy scalar: its code, e.g. ``f4``, and its byte order, which comes later."""

    __slots__ = ("code", "order")

    def __init__(self, code: Any, *more: Any) -> None:
        del more
        self.code, self.order = code, "<"

    def __setstate__(self, state: Any) -> None:
        self.order = state[1] if isinstance(state, tuple) and len(state) > 1 else "?"


_STRUCT = {
    "b1": "?", "i1": "b", "u1": "B", "i2": "h", "u2": "H", "i4": "i", "u4": "I", "i8": "q", "u8": "Q", "f2": "e",
    "f4": "f", "f8": "d",
}  # fmt: skip


def _scalar(dtype: Any, data: Any = b"") -> int | float | bool:
    code = dtype.code if isinstance(dtype, _Dtype) else None
    if not isinstance(code, str) or code not in _STRUCT or dtype.order not in ("<", ">", "|", "="):
        raise pickle.UnpicklingError(f"a NumPy scalar of type {code!r:.20} where a number is wanted")
    order = ">" if dtype.order == ">" else "<"
    if not isinstance(data, bytes) or len(data) != int(code[1]):
        raise pickle.UnpicklingError(f"a NumPy scalar of type {code} without its {code[1]} bytes")
    return struct.unpack(order + _STRUCT[code], data)[0]


def _mapping(factory: Any = None) -> dict[Any, Any]:
    if factory is not None and factory is not _list:
        raise pickle.UnpicklingError("a mapping with a default that is no list")
    return {}


def _list(items: Any = ()) -> list[Any]:
    if not isinstance(items, (list, tuple)):
        raise pickle.UnpicklingError("a list of something that is no list")
    return [*items]


def _set(items: Any = ()) -> set[int]:
    if not isinstance(items, (list, tuple)) or not all(isinstance(item, int) for item in items):
        raise pickle.UnpicklingError("a set of something else than node ids")
    return set(items)


def _bytes(text: Any, encoding: Any = "latin1") -> bytes:
    if not isinstance(text, str) or encoding != "latin1":
        raise pickle.UnpicklingError("bytes that are no latin1 text")
    return text.encode("latin1")


def _nested(owner: Any, name: Any) -> type[Record]:
    """Replaces `getattr`, with which pickles of protocol 3 name a class within a class."""
    if owner is not ComputeNode or f"ComputeNode.{name}" not in _GRAPH:
        raise pickle.UnpicklingError("getattr of something else than a class within ComputeNode")
    return _GRAPH[f"ComputeNode.{name}"]


ALLOWED: dict[str, dict[str, Any]] = {
    "monet.graph": _GRAPH,
    "monet.solver_info": _SOLVER,
    "monet.pipelined_solver_info": _PIPELINED,
    # a module that was run as a script stores its classes as those of __main__
    **dict.fromkeys(
        ("__main__", "monet.cvxpy_solver", "monet.gurobi_solver", "checkmate.checkmate_solver"),
        _GRAPH | _SOLVER | _PIPELINED | _SOLUTIONS,
    ),
    "collections": {"defaultdict": _mapping, "OrderedDict": _mapping},
    **{name: {"list": _list, "set": _set, "getattr": _nested} for name in ("builtins", "__builtin__")},
    "_codecs": {"encode": _bytes},
    **{f"numpy.{name}.multiarray": {"_reconstruct": Opaque, "scalar": _scalar} for name in ("core", "_core")},
    "numpy": {"dtype": _Dtype, "ndarray": Opaque},
    "torch": dict.fromkeys(("Size", "device", "FloatStorage", "LongStorage", "float32", "int64"), Opaque),
    "torch._utils": dict.fromkeys(("_rebuild_tensor_v2", "_rebuild_parameter"), Opaque),
    "torch.storage": {"_load_from_bytes": Opaque},  # itself a pickle, which stays closed
}


class _Reader(pickle.Unpickler):
    def find_class(self, module: str, name: str, /) -> Any:
        found = ALLOWED.get(module, {}).get(name)
        if found is None:
            raise InvalidInput(f"it names {f'{module}.{name}':.100}, which is not among the classes that may be read")
        return found


def read_pickle(path: Path) -> Any:
    """The object in a file of monet-schedules, made of `Record`, dict, list, set, tuple, number, str and `Opaque`.

    Raises:
        InvalidInput: in one line, naming the file: unreadable, too large, damaged, or it needs anything else.
    """
    try:
        if not path.is_file():
            raise InvalidInput("not a regular file" if path.exists() else "no such file")
        if path.stat().st_size > MAX_FILE_BYTES:
            raise InvalidInput(f"larger than {MAX_FILE_BYTES} bytes")
        data = path.read_bytes()
        _check_opcodes(data)
        return _Reader(io.BytesIO(data)).load()
    except InvalidInput as error:
        raise InvalidInput(f"{path}: refused: {' '.join(str(error).split())}") from None
    except MemoryError:
        raise InvalidInput(f"{path}: refused: it needs more memory than there is") from None
    except Exception as error:  # a damaged pickle can fail in any way
        text = shortened(error, 160) or type(error).__name__
        raise InvalidInput(f"{path}: cannot be read as a pickle: {text}") from None


def _check_opcodes(data: bytes) -> None:
    """Refuse opcodes outside the list, memo places that would reserve memory, and too many tuples."""
    tuples, is_pending = 0, False
    for count, (opcode, argument, _) in enumerate(pickletools.genops(data), start=1):
        name = opcode.name
        if name not in _OPCODES:
            raise InvalidInput(f"it has the opcode {name}, which these files do not need")
        if name in _PUTS:
            if int(argument or 0) > count:
                raise InvalidInput("its memo has gaps")
            continue
        if is_pending and name not in _CALLS:
            tuples += 1
        is_pending = name in _TUPLES
    if tuples > MAX_TUPLES:
        raise InvalidInput(f"it has more than {MAX_TUPLES} tuples")
