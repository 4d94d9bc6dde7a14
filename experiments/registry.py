"""The experiments: functions of cases, registered as strategies are. A new one is one file and no edit elsewhere.

    @experiment(page="results/lengths.md")
    def lengths(shares: list[float] = [0.8, 0.6], rounds: int = 11) -> Iterator[Case]:
        \"""One line for `python run.py --help`.\"""
        for share in shares:
            yield Case(measure, {"share": share, "rounds": rounds})

    @lengths.draws
    def page(rows: Sequence[Row]) -> Drawing: ...

``python run.py experiment=lengths rounds=5`` runs it. Its keys are the arguments of the function, each with a literal
default. A first argument ``settings``, without a default, is the checked configuration, whose keys it reads, too.
What a command line needs is read from the file's text, because importing all experiments takes seconds.
"""

import ast
import importlib.util
import math
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from remat.errors import InvalidInput, check_name

FOLDER = Path(__file__).resolve().parent
OTHER_FOLDERS = "REMAT_EXPERIMENTS"  # variable: folders of experiments outside of the checkout
COMMON = ("draw", "keep", "again")  # keys of every experiment, see `experiments.runner`

Row = Mapping[str, Any]
Measure = Callable[..., Iterable[Row]] | str


@dataclass(frozen=True, slots=True)
class Case:
    """One thing that an experiment measures, in a process of its own.

    Attributes:
        measure: (**what) -> rows; a function of a module, or its dotted name, so that only its process imports it. With
            `solves`, (run, **what) -> rows, called in this process: `experiments.solving.Solves` is the run.
        what: its arguments, JSON-ready; rows have them as columns.
        code: versions of the code that determines the rows, see `experiments.store.code_of`.
        on_this_machine: whether rows depend on this processor and on PyTorch's version, as measured ones do.
        name: for lines on the terminal; '' for all arguments.
        solves: settings of the solves that the case sends to the engine; None for a case without.
    """

    measure: Measure
    what: Mapping[str, Any]
    code: Sequence[str] = ()
    on_this_machine: bool = False
    name: str = ""
    solves: Any = None

    @property
    def function(self) -> str:
        """The dotted name of `measure`."""
        own = self.measure
        return own if isinstance(own, str) else f"{own.__module__}.{own.__qualname__}"

    @property
    def label(self) -> str:
        return self.name or ", ".join(f"{key}={value}" for key, value in self.what.items() if value is not None)


@dataclass(slots=True)
class Experiment:
    """A registered function of cases.

    Attributes:
        cases: (**keys) -> cases; without `measures`, () -> `experiments.documents.Drawing`.
        page: of docs/, between whose marks the drawing is written; None for none.
        measures: false for one that has no cases, and draws rows of others or what it computes.
        draw: (rows) -> `experiments.documents.Drawing`.
    """

    cases: Callable[..., Any]
    page: str | None = None
    measures: bool = True
    draw: Callable[[Sequence[Row]], Any] | None = None

    def draws(self, function: Callable[[Sequence[Row]], Any]) -> Callable[[Sequence[Row]], Any]:
        """Register the function that draws the stored rows."""
        self.draw = function
        return function


def experiment(
    *, page: str | None = None, measures: bool = True, has_graphs: bool = False
) -> Callable[[Any], Experiment]:
    """Register a function of cases, or without `measures` a drawing, see the module and `Listed.has_graphs`."""
    return lambda made: Experiment(made, page, measures, draw=None if measures else lambda _: made())


@dataclass(frozen=True, slots=True)
class Listed:
    """What is known of an experiment without importing it.

    Attributes:
        summary: the first line of its docstring.
        keys: its keys and their defaults.
        takes_settings: whether its first argument is ``settings``, the checked keys of the configuration.
        has_graphs: whether it has graphs of its own, so that it reads none of the keys that name one.
    """

    name: str
    file: Path
    summary: str
    keys: Mapping[str, Any]
    takes_settings: bool
    has_graphs: bool

    def load(self) -> Experiment:
        """Import the file."""
        return getattr(module_of(self.file), self.name)

    def arguments(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """The keys with their values, or their defaults.

        Raises:
            InvalidInput: a value is of another type than the default.
        """
        return {key: _like(key, values.get(key, default), default) for key, default in self.keys.items()}


def listed(name: str) -> Listed:
    """The experiment of that name.

    Raises:
        UnknownName: there is none.
    """
    known = experiments()
    check_name("experiment", name, known)
    return known[name]


def experiments() -> dict[str, Listed]:
    """[name] every registered experiment; of the environment's folders, too."""
    return _read(os.environ.get(OTHER_FOLDERS, ""))


_KINDS = {int: "a whole number", float: "a number", bool: "true or false", tuple: "a list, e.g. [a,b]"}


def _like(key: str, value: Any, default: Any) -> Any:
    """The value, in the type of the default: 20 and 20.0 seconds are one case. Elements of lists are checked, too."""
    value = tuple(value) if isinstance(value, list) else value
    default = tuple(default) if isinstance(default, list) else default
    if {type(value), type(default)} == {int, float} and value == int(value):
        value = type(default)(value)
    if isinstance(default, str) and isinstance(value, (int, float)):
        value = str(value)
    if default is not None and type(value) is not type(default):
        raise InvalidInput(f"{key}={value}: write {_KINDS.get(type(default), 'a text')}")
    if isinstance(default, tuple) and default:
        if not value:
            raise InvalidInput(f"{key}: the list is empty; write at least one, e.g. [{default[0]}]")
        return tuple(_like(key, each, default[0]) for each in value)
    if isinstance(default, (int, float)) and not isinstance(default, bool):
        if not math.isfinite(value):
            raise InvalidInput(f"{key}={value}: write a finite number")
        if default > 0 and (value < 0 or (value == 0 and default >= 1)):
            raise InvalidInput(f"{key}={value}: write {_KINDS[type(default)]} above 0")
    return value


@cache
def _read(others: str) -> dict[str, Listed]:
    found: dict[str, Listed] = {}
    for folder in (FOLDER, *map(Path, filter(None, others.split(os.pathsep)))):
        for file in sorted(folder.glob("*.py")):
            text = file.read_text(encoding="utf-8")
            for each in _in_file(file, text) if "\n@experiment(" in text else ():
                if each.name in found:
                    raise InvalidInput(f"{file}: experiment '{each.name}' is also in {found[each.name].file}")
                found[each.name] = each
    return found


def _in_file(file: Path, text: str) -> Iterator[Listed]:
    try:
        tree = ast.parse(text)
    except SyntaxError as error:
        raise InvalidInput(f"{file}, line {error.lineno}: {error.msg}") from None
    for node in tree.body:
        marks = [
            each for each in (node.decorator_list if isinstance(node, ast.FunctionDef) else ())
            if isinstance(each, ast.Call) and isinstance(each.func, ast.Name) and each.func.id == "experiment"
        ]  # fmt: skip
        if isinstance(node, ast.FunctionDef) and marks:
            takes_settings = node.args.args[:1] and node.args.args[0].arg == "settings"
            arguments = node.args.args[1 if takes_settings else 0 :]
            if len(node.args.defaults) != len(arguments):
                raise InvalidInput(f"{file}: each argument of experiment '{node.name}' needs a default")
            try:
                defaults = map(ast.literal_eval, node.args.defaults)
                keys = {each.arg: default for each, default in zip(arguments, defaults, strict=True)}
            except ValueError:
                raise InvalidInput(f"{file}: defaults of experiment '{node.name}' must be literals") from None
            summary = (ast.get_docstring(node) or "").partition("\n")[0]
            has_graphs = any(keyword.arg == "has_graphs" for keyword in marks[0].keywords)
            yield Listed(node.name, file, summary, keys, bool(takes_settings), has_graphs)


def module_of(file: Path) -> Any:
    """The module of a file of experiments, imported once."""
    if file.parent == FOLDER:
        return importlib.import_module(f"experiments.{file.stem}")
    name = f"remat_experiment_{file.stem}"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, file)
        assert spec is not None
        assert spec.loader is not None
        module = sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    return sys.modules[name]
