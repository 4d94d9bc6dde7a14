"""Packages that only some engines and loggers need."""

from __future__ import annotations

import importlib
from types import ModuleType

from remat.errors import MissingPackage


def import_optional(package: str, wanted: str) -> ModuleType:
    """The package; `wanted` begins the error, e.g. ``engine=ray needs Ray``.

    Raises:
        MissingPackage: it is not installed; the message has the command that installs it.
    """
    try:
        return importlib.import_module(package)
    except ModuleNotFoundError as error:
        if error.name != package:
            raise
        raise MissingPackage(f"{wanted}: pip install {package} (or pip install 'remat[{package}]')") from None
