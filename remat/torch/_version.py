"""Versions of PyTorch: the oldest that remat works with, and the newest that it was tested with."""

from __future__ import annotations

import re

import torch

from remat.errors import MissingPackage

# The tests of PyTorch passed with 2.11.0, 2.13.0 and 2.15.0 (``make test-torch TORCH=...``).
OLDEST, NEWEST = (2, 11), (2, 15)


def is_untested() -> bool:
    """Whether this PyTorch is newer than any tested one."""
    return _installed() > NEWEST


def refuse_old() -> None:
    """Raise a `MissingPackage` of one line where this PyTorch is older than `OLDEST`."""
    if _installed() < OLDEST:
        raise MissingPackage(
            f"PyTorch {torch.__version__} is older than {_name(OLDEST)}, the oldest that remat works with: "
            f"pip install 'torch>={_name(OLDEST)}'"
        )


def newer_fails(how: str) -> MissingPackage:
    """The error for a PyTorch that is newer than any tested one and does not work; `how` says how it fails."""
    return MissingPackage(f"{newer()}, and {how}: pip install 'torch<{NEWEST[0]}.{NEWEST[1] + 1}'")


def newer() -> str:
    """The beginning of messages about such a PyTorch."""
    return f"PyTorch {torch.__version__} is newer than {_name(NEWEST)}, the newest that remat was tested with"


def _installed() -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", torch.__version__)[:2])


def _name(version: tuple[int, int]) -> str:
    return ".".join(map(str, version))
