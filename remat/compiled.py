"""Whether a function is compiled already, or its first call would compile for half a minute."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def is_compiled(function: Any) -> bool:
    """Whether `function`, made by ``numba.njit(cache=True)``, is compiled, in this process or in the cache.

    Only Numba knows whether its cache is fresh: it compares the cache's stamp with the source file (the content, or in
    older versions the time), and a newer time alone does not make it compile again.
    """
    if function.signatures:
        return True
    cache: Any = getattr(getattr(function, "_cache", None), "_cache_file", None)
    if hasattr(cache, "_load_index"):
        here = function.targetctx.codegen().magic_tuple()  # the processor: a cache that came from another one is stale
        return any(key[1] == here for key in cache._load_index())
    # A Numba with other private names: any entry in the cache counts as fresh.
    module = function.py_func.__module__.rpartition(".")[2]
    return any(Path(function.stats.cache_path).glob(f"{module}.{function.py_func.__name__}-*.nbi"))
