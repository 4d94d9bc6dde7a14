"""What a user gives on a command line, checked before anything runs: every mistake is one line."""

import argparse
import importlib
import math
import os
import re
import signal
import sys
import threading
from collections.abc import Callable, Iterable
from types import ModuleType
from typing import NoReturn, TypeVar

from remat.errors import InvalidInput, MissingPackage, RematError, check_name
from remat.files import show_any_text

T = TypeVar("T")
EXIT_ERROR, EXIT_INTERRUPTED = 1, 130
STOPPED = "stopped; finished results are kept, and the same command continues from there"
_interrupted = threading.Event()


class Parser(argparse.ArgumentParser):
    """The parser of a command; a mistake raises `InvalidInput` instead of printing the usage."""

    def error(self, message: str) -> NoReturn:
        raise InvalidInput(f"{message}; see {self.prog} --help")


def run(main: Callable[[], int | None]) -> NoReturn:
    """Run a command and exit with its code."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _interrupt)
    sys.exit(exit_code(main))


def exit_code(main: Callable[[], int | None]) -> int:
    """Run a command; returns its exit code, after a line about an error or about Ctrl-C."""
    show_any_text()
    try:
        return main() or 0
    except BrokenPipeError:
        return drop_output()
    except (RematError, OSError) as error:
        return complain(error)
    except KeyboardInterrupt:
        print(f"\n{STOPPED}", file=sys.stderr)
        return EXIT_INTERRUPTED


def complain(error: Exception) -> int:
    """Print an error as one line; returns its exit code."""
    if isinstance(error, OSError):
        error = InvalidInput(f"{error.strerror or error}{f': {error.filename}' if error.filename else ''}")
    print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
    return EXIT_ERROR


def drop_output() -> int:
    """Drop what is left to print, because its reader, e.g. ``head``, has ended; returns the exit code."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return EXIT_ERROR


def _interrupt(_number: int, _frame: object) -> NoReturn:
    _interrupted.set()
    raise KeyboardInterrupt


def stop_if_interrupted() -> None:
    """Raise KeyboardInterrupt after Ctrl-C: a solve that it ended returned a plan, which is no finished result."""
    if _interrupted.is_set():
        raise KeyboardInterrupt


def one_of(what: str, name: object, known: Iterable[str]) -> str:
    """The name.

    Raises:
        UnknownName: it is not known; the message has the nearest names.
    """
    check_name(what, name, known)
    return str(name)


def names_of(what: str, given: str | Iterable[object], known: Iterable[str]) -> list[str]:
    """The names of a list, or of comma-separated text, each once.

    Raises:
        UnknownName: one of them is not known; the message has the nearest names.
        InvalidInput: there is none.
    """
    parts = given.split(",") if isinstance(given, str) else map(str, given)
    names, known = list(dict.fromkeys(filter(None, (part.strip() for part in parts)))), list(known)
    if not names:
        raise InvalidInput(f"the list is empty; name at least one {what}; known: {', '.join(known)}")
    return [one_of(what, name, known) for name in names]


def argument(read: Callable[[str], T]) -> Callable[[str], T]:
    """`read` as the type of an argument: its `InvalidInput` is the message."""

    def checked(text: str) -> T:
        try:
            return read(text)
        except InvalidInput as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return checked


@argument
def count(text: str) -> int:
    """A positive integer."""
    if not text.isdecimal() or int(text) < 1:
        raise InvalidInput(f"'{text}' is not a positive integer")
    return int(text)


def pattern(text: str) -> str:
    """A regular expression.

    Raises:
        InvalidInput: it is none.
    """
    try:
        re.compile(text)
    except re.error as error:
        raise InvalidInput(f"'{text}' is no regular expression: {error}") from None
    return text


@argument
def seconds(text: str) -> float:
    """A positive number of seconds."""
    return _positive(text, "seconds, e.g. 30")


@argument
def fractions(text: str) -> list[float]:
    """Comma-separated positive numbers."""
    return [_positive(part, "fractions, e.g. 0.8,0.6") for part in text.split(",")]


def _positive(text: str, example: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 0 < number < math.inf:
        raise InvalidInput(f"'{text}' is no positive number; write {example}")
    return number


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
