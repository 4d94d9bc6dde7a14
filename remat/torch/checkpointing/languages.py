"""The languages of checkpoints: what a plan may choose in each, and which code runs it."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from types import ModuleType
from typing import Any

from torch import nn

from remat.errors import InvalidInput, check_name
from remat.torch.checkpointing import checkpointed, for_fsdp2, for_torch_remat, for_torchtitan, for_transformers

Kept = Mapping[str, tuple[tuple[Any, ...], bool]]


@dataclass(frozen=True, slots=True)
class Language:
    """One of the languages.

    Attributes:
        code: the module whose `apply` makes the checkpoints; its source is the file that `Checkpoints.save` writes.
        keeps: what a checkpoint may keep: results of ``calls`` or of ``operators``, what ``regions`` save, or nothing.
        layers: name of the class of modules that may be checkpoints; any module if it is empty.
        stops_early: a repetition ends when everything that the backward pass needs is there.
        is_alike: all blocks are checkpoints that keep the same, or none is one.
        every_second: of these operators every second call is not kept.
        package: that must be there.
        undoes: how `apply` is undone; by default it gets a copy of the model.
        keeps_statistics: a repetition leaves the statistics of batch norms alone.
        is_real: its code does not run on tensors without contents, so that its step is followed while it runs.
        text: of the file, if it is not the source of `code`.
    """

    name: str
    code: ModuleType
    keeps: str = ""
    layers: str = ""
    stops_early: bool = True
    is_alike: bool = False
    every_second: tuple[str, ...] = ()
    package: str = ""
    undoes: Callable[[nn.Module], None] | None = None
    keeps_statistics: bool = False
    is_real: bool = False
    text: Callable[[str, Kept], str] | None = None

    def file(self, about: str, kept: Kept) -> str:
        """Text of the file that makes these checkpoints."""
        if self.text is not None:
            return self.text(about, kept)
        title, rest = inspect.getsource(self.code).split("\n", 1)
        lines = [f"    {name!r}: {of_block!r},\n" for name, of_block in kept.items()]
        empty = next(line for line in rest.splitlines(keepends=True) if line.startswith("CHECKPOINTS"))
        filled = f"{empty.rstrip()[:-1]}\n{''.join(lines)}}}\n" if lines else empty
        return f'"""{about}\n\n{title.strip(chr(34))}\n"""\n{rest.replace(empty, filled)}'


_OURS: dict[str, Any] = {"code": checkpointed, "undoes": checkpointed.undo, "keeps_statistics": True}
LANGUAGES = {
    language.name: language
    for language in (
        Language("blocks", **_OURS),
        Language("selective", keeps="calls", **_OURS),
        Language("transformers", for_transformers, layers="GradientCheckpointingLayer"),
        Language("fsdp2", for_fsdp2, "operators"),
        Language("torchtitan", for_torchtitan, "operators", stops_early=False, is_alike=True,
                 every_second=for_torchtitan.EVERY_SECOND, text=for_torchtitan.text),
        Language("torch_remat", for_torch_remat, "regions", stops_early=False, package="torch_remat",
                 is_real=True),
    )
}  # fmt: skip


def language_named(name: str) -> Language:
    """The language; raises `InvalidInput` if it is unknown, or its package is missing."""
    check_name("language", name, LANGUAGES)
    package = LANGUAGES[name].package
    if package and find_spec(package) is None:
        raise InvalidInput(f"language='{name}' needs the package {package}: pip install {package}")
    return LANGUAGES[name]
