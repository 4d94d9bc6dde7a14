"""The registry of strategies, apart from everything else so that it can be imported anywhere.

A strategy is one decorated function. It is found because its file lies in a package that is named
under the entry-point group ``remat.strategies``; `remat` itself imports none of them by name.
"""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib.metadata import entry_points
from types import ModuleType
from typing import Any

from remat.errors import InvalidInput, unknown_name, warn

GROUP = "remat.strategies"


@dataclass(frozen=True, slots=True)
class Strategy:
    """A registered strategy.

    Attributes:
        name: as users write it, e.g. ``chen_sqrtn``.
        run: ``run(problem, **options)``: yields `Candidate`s or plans, returns one, or returns an
            `Outcome`; raises `Skip` where it does not apply.
        summary: first line of the docstring.
        options: names of the keyword options it takes, with their defaults.
        ignores_budget: its candidates do not depend on the budget, so one run serves a whole sweep.
        isolated: may overrun its time limit or crash; runs in a process of its own.
        check: called with the options given, before anything runs; raises `InvalidInput` for a bad value.
        must_isolate: whether this process cannot run it now, whatever the caller asked for.
        implementations: what it does with a graph whose operations have several: ``default`` sees the graph with
            the default ones, ``search`` is run on graphs with one of each that a search chooses, ``own`` sees all.
        members: strategies that it combines: in a run, it takes a plan of theirs that is cheaper than its own.
    """

    name: str
    run: Callable[..., Any]
    summary: str
    options: dict[str, Any] = field(default_factory=dict)
    ignores_budget: bool = False
    isolated: bool = False
    check: Callable[[dict[str, Any]], None] | None = None
    must_isolate: Callable[[], bool] | None = None
    implementations: str = "default"
    members: tuple[str, ...] = ()

    def in_own_process(self, asked: bool | None) -> bool:
        """Whether to run in a process of its own, given what the caller asked for (None: nothing)."""
        if self.must_isolate is not None and self.must_isolate():
            return True
        return self.isolated if asked is None else asked

    @property
    def is_baseline(self) -> bool:
        """Whether it is a published baseline: its results are its own, never shared between budgets."""
        return self.run.__module__.partition(".")[0] == "baselines"

    def check_options(self, options: dict[str, Any]) -> None:
        """Raise `InvalidInput` for an option, or a value of one, that this strategy does not take."""
        for key in options:
            if key not in self.options:
                if not self.options:
                    raise InvalidInput(f"strategy '{self.name}' takes no options, but got '{key}'")
                raise unknown_name(f"option of strategy '{self.name}'", key, self.options)
        if self.check is not None:
            self.check(options)


_REGISTRY: dict[str, Strategy] = {}
_discovered = False
_discovering = threading.RLock()


def strategy(
    name: str,
    *,
    ignores_budget: bool = False,
    isolated: bool = False,
    check: Callable[[dict[str, Any]], None] | None = None,
    must_isolate: Callable[[], bool] | None = None,
    implementations: str = "default",
    members: tuple[str, ...] = (),
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register the decorated function under `name`; its keyword-only parameters are its options."""

    def register(run: Callable[..., Any]) -> Callable[..., Any]:
        known = _REGISTRY.get(name)
        if known is not None and (known.run.__module__, known.run.__qualname__) != (run.__module__, run.__qualname__):
            raise InvalidInput(
                f"two strategies are named '{name}': {known.run.__module__}.{known.run.__qualname__} "
                f"and {run.__module__}.{run.__qualname__}"
            )
        parameters = inspect.signature(run).parameters.values()
        options = {p.name: p.default for p in parameters if p.kind is inspect.Parameter.KEYWORD_ONLY}
        summary = (inspect.getdoc(run) or "").partition("\n")[0]
        _REGISTRY[name] = Strategy(
            name, run, summary, options, ignores_budget, isolated, check, must_isolate, implementations, members
        )  # fmt: skip
        return run

    return register


def strategies() -> list[str]:
    """Every registered name, sorted."""
    _discover()
    return sorted(_REGISTRY)


def get_strategy(name: str) -> Strategy:
    """The strategy of that name; raises `UnknownName` with the nearest names."""
    _discover()
    if not isinstance(name, str) or name not in _REGISTRY:
        raise unknown_name("strategy", name, _REGISTRY)
    return _REGISTRY[name]


def _discover() -> None:
    global _discovered
    with _discovering:  # another thread waits until all are there
        if _discovered:
            return
        _discovered = True  # first: a plugin may ask for the list while it is imported
        for point in entry_points(group=GROUP):
            package = _import(point.module)
            for module in pkgutil.iter_modules(getattr(package, "__path__", [])):
                if not module.name.startswith("_"):
                    _import(f"{point.module}.{module.name}")


def _import(name: str) -> ModuleType | None:
    """The module, or None with a warning: one broken plugin must not take the other strategies away."""
    try:
        return importlib.import_module(name)
    except Exception as error:
        warn(f"the strategies of '{name}' are missing, because it cannot be imported: {type(error).__name__}: {error}")
        return None
