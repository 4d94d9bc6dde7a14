"""Errors and warnings for users: one line that names the problem and the remedy."""

from __future__ import annotations

import difflib
import sys
import warnings
from collections.abc import Callable, Iterable, Sequence

# Frames of a framework (a module's call, its compiler) or of Python may lie between a user's line and ours.
_NOT_THE_USER = {"remat", "torch", "tensorflow", "keras"} | sys.stdlib_module_names

MOST_NAMES = 60  # that one line lists


class RematError(Exception):
    """Base of every error that users see as one line, without a traceback."""


class InvalidInput(RematError, ValueError):
    """A value given by the user (size, option, file) cannot be used."""


class InvalidGraph(InvalidInput):
    """A graph is malformed: cyclic, dangling, negative, out of order.

    Attributes:
        problems: every problem found, a line each; the message is the first one.
    """

    def __init__(self, message: str, problems: Sequence[str] = ()):
        super().__init__(message)
        self.problems = tuple(problems) or (message,)


class InvalidPlan(InvalidInput):
    """A plan cannot be executed on its graph.

    Attributes:
        step: index of the offending step in ``plan.steps``; None if the plan as a whole is wrong.
    """

    def __init__(self, message: str, step: int | None = None):
        super().__init__(message if step is None else f"step {step}: {message}")
        self.step = step

    def of_file(self, path: object, more: str = "") -> InvalidPlan:
        """This error with the file before the step, and `more` at the end."""
        named = InvalidPlan(f"{path}: {self}{more}")
        named.step = self.step
        return named


class HostFull(InvalidPlan):
    """A plan that could be executed over a link to a host with more memory."""


class UnknownName(InvalidInput):
    """A model, strategy, GPU or option of that name does not exist."""


class CostWarning(UserWarning):
    """Some costs do not come from the chosen cost model; the message says which and why."""


class BudgetTooSmall(InvalidInput):
    """No plan is known within a budget.

    Attributes:
        known_bytes: the smallest budget known to suffice.
    """

    def __init__(self, message: str, known_bytes: int):
        super().__init__(message)
        self.known_bytes = known_bytes


class MissingPackage(RematError, ImportError):
    """An optional package is not installed; the message holds the command that installs it."""


class DiskFull(RematError):
    """The disk has no room for a file; files written before are kept."""


class Skip(Exception):
    """Raised by a strategy that does not apply to a problem; the reason is the message."""


def shortened(text: object, most: int = 200) -> str:
    """A text in one line of at most `most` characters, cut between words."""
    line = " ".join(str(text).split())
    if len(line) <= most:
        return line
    kept = line[: most - 4]
    return f"{kept.rpartition(' ')[0] or kept} ..."


def headline(error: BaseException, most: int = 200) -> str:
    """The first line of an error's text, or its class where it has none; see `shortened`."""
    lines = (line for line in str(error).splitlines() if line.strip())
    return shortened(next(lines, type(error).__name__), most)


def first_line(error: BaseException) -> str:
    """Type and first line of an exception, for a message of one line."""
    text = headline(error)
    return f"{type(error).__name__}: {text}" if str(error).strip() else text


def unknown_name(what: str, name: object, known: Iterable[str]) -> UnknownName:
    """An `UnknownName` that offers the nearest of the known names."""
    known = sorted(known)
    near = nearest(name, known)
    more = f" and {len(known) - MOST_NAMES} more" if len(known) > MOST_NAMES else ""
    hint = f"did you mean {' or '.join(near)}?" if near else f"known: {', '.join(known[:MOST_NAMES])}{more}"
    return UnknownName(f"unknown {what} '{plain(name)}'; {hint}")


def check_name(what: str, name: object, known: Iterable[str]) -> None:
    """Raise `UnknownName` for anything but one of the known names."""
    known = list(known)
    if not isinstance(name, str) or name not in known:
        raise unknown_name(what, name, known)


def plain(text: object, most: int = 60) -> str:
    """At most `most` characters of a text that anyone may have written, for a line: control characters as escapes."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in _text(text)[:most])


def shown(given: object) -> str:
    """A value of the wrong kind, for a line."""
    return plain(_text(given, repr))


def _text(given: object, show: Callable[[object], str] = str) -> str:
    try:
        return show(given)
    except ValueError:  # Python shows no integer of thousands of digits
        return "an integer of thousands of digits"


def nearest(name: object, known: Iterable[str], most: int = 3, alike: float = 0.5) -> list[str]:
    """Up to `most` known names that `name` may be a misspelling of; `alike`: least similarity, from 0 to 1."""
    name, known = _text(name)[:200].lower(), list(known)
    longer = [each for each in known if len(name) > 1 and each.startswith(name)]
    return [*dict.fromkeys([*longer, *difflib.get_close_matches(name, known, n=most, cutoff=alike)])][:most]


def warn(message: str, category: type[Warning] = UserWarning) -> None:
    """Warn at the user's line: the innermost line outside remat, the frameworks and Python itself.

    Where there is none, as in a thread of ours, warn at the outermost line.
    """
    frame = sys._getframe()
    while frame.f_globals.get("__name__", "").partition(".")[0] in _NOT_THE_USER and frame.f_back is not None:
        frame = frame.f_back
    registry = frame.f_globals.setdefault("__warningregistry__", {})
    module = frame.f_globals.get("__name__", "")
    warnings.warn_explicit(message, category, frame.f_code.co_filename, frame.f_lineno, module, registry)
