"""The registry of strategies.

A strategy is one decorated function, in a package that the entry-point group ``remat.strategies``
names; `remat` itself imports no strategy by name, so that every module can import the registry.
"""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib.metadata import entry_points
from types import ModuleType
from typing import Any

from remat.compiled import is_compiled
from remat.context import Context
from remat.errors import InvalidInput, UnknownName, check_name, shown, unknown_name, warn
from remat.graph import Graph

GROUP = "remat.strategies"
LARGEST_WITHOUT_CLOCK = 5000  # operations: a baseline takes a fraction of a second for one plan
POSITIVE, SHARE = range(1, sys.maxsize), "share"  # values that an option may have, see `Strategy.allowed`
WHERE_BASELINES_ARE = "published baselines are not in the wheel: pip install -e baselines, in a checkout of remat"


@dataclass(frozen=True, slots=True)
class Strategy:
    """A registered strategy and its abilities; other code asks for these, never for its name.

    Attributes:
        name: as users write it, e.g. ``chen_sqrtn``.
        run: ``run(problem, **options)``, or with the solve's `Context` as second argument. It yields `Candidate`s
            or plans, returns one, or returns an `Outcome`; it raises `Skip` if it does not apply.
        summary: first line of the docstring.
        options: names of its keyword options, with their defaults.
        takes_context: whether `run` has a second positional argument without a default.
        is_baseline: a published heuristic; its results are never shared between budgets.
        ignores_budget: its candidates do not depend on the budget, so that one run serves a whole sweep.
        proves: it may return a bound or INFEASIBLE.
        isolated: it may overrun its time limit or crash, and runs in a separate process.
        allowed: values of options: names, a range of integers, `POSITIVE`, `SHARE` (from 0 to below 1), or ``bool``.
        check: called with the given options before anything runs; raises `InvalidInput` for a bad combination.
        must_isolate: whether this process cannot run it now, even if the caller asks for that.
        implementations: which implementations it sees: ``default`` only the default ones, ``search`` one of each
            operation, which a search chooses, ``own`` all.
        members: strategies that it combines: it takes a member's plan that is cheaper than its own. If it has members,
            the search over implementations also gives it a bound and, on small graphs, an exact answer.
        version: raised by hand when its results alone may change, also because a member's do; see
            `remat.solvers.VERSION`.
        prepare: called by the worker of a run before the clock starts, with the `ModelSpec` of the network and its
            graph, if a network is behind the graph; the worker keeps what it returns.
        compiles: a Numba function that its first call compiles for many seconds. Until it is compiled, the strategy
            runs in a separate process; runs call it once before any clock starts. None without one, and where the
            strategy waits for ``python -m remat.search`` (`remat.search.ready`).
        gives_starts: within seconds it finds plans of a kind that annealing misses on graphs of a few hundred
            operations; there `portfolio` begins from them.
        copies: what it makes of a link: nothing (``none``), plans with copies that are ``annealed`` around it, or
            copies by its ``own`` rules.
        begins_greedily: its first plans are those of greedy eviction. Where it runs in a separate process, the caller's
            process finds them while that one starts.
    """

    name: str
    run: Callable[..., Any]
    summary: str
    options: dict[str, Any] = field(default_factory=dict)
    takes_context: bool = False
    is_baseline: bool = False
    ignores_budget: bool = False
    proves: bool = False
    isolated: bool = False
    allowed: Mapping[str, Any] = field(default_factory=dict)
    check: Callable[[dict[str, Any]], None] | None = None
    must_isolate: Callable[[], bool] | None = None
    implementations: str = "default"
    members: tuple[str, ...] = ()
    version: int = 0
    prepare: Callable[[Any, Graph], Any] | None = None
    compiles: Any = None
    gives_starts: bool = False
    copies: str = "none"
    begins_greedily: bool = False

    def __call__(self, context: Context, options: Mapping[str, Any]) -> Any:
        """Run it on the problem of a context; its result is not judged yet."""
        if self.takes_context:
            return self.run(context.problem, context, **options)
        return self.run(context.problem, **options)

    def in_own_process(self, asked: bool | None, n_operations: int) -> bool:
        """Whether to run in a separate process; `asked` is the caller's wish (None: as the strategy declares).

        What nothing could interrupt at the time limit always does: a strategy without the clock on a large graph, and
        one that has to be compiled.
        """
        if self.must_isolate is not None and self.must_isolate():
            return True
        if n_operations > LARGEST_WITHOUT_CLOCK and not self.takes_context and self.is_installed:
            return True
        if self.compiles is not None and not is_compiled(self.compiles):
            return True
        return self.isolated if asked is None else asked

    @property
    def is_installed(self) -> bool:
        """Whether another process finds it; it does not find a strategy that a user's script has registered."""
        package = self.run.__module__.partition(".")[0]
        return any(point.module.partition(".")[0] == package for point in entry_points(group=GROUP))

    def check_options(self, options: dict[str, Any]) -> None:
        """Raise `InvalidInput` for an option, or a value of one, that this strategy does not take."""
        for key, value in options.items():
            if key not in self.options:
                if not self.options:
                    raise InvalidInput(f"strategy '{self.name}' takes no options, but got '{key}'")
                raise unknown_name(f"option of strategy '{self.name}'", key, self.options)
            if key in self.allowed and value is not self.options[key]:
                _check_value(key, value, self.allowed[key])
        if self.check is not None:
            self.check(options)


def _check_value(name: str, value: Any, allowed: Any) -> None:
    """Raise `InvalidInput` for a value outside of `allowed`, see `Strategy`."""
    if allowed is bool:
        is_allowed, kind = isinstance(value, bool), "true or false"
    elif allowed is SHARE:
        is_allowed, kind = type(value) in (int, float) and 0 <= value < 1, "in [0, 1)"
    elif isinstance(allowed, range):
        is_allowed = type(value) is int and value in allowed
        kind = "a positive integer" if allowed == POSITIVE else f"an integer from {allowed[0]} to {allowed[-1]:,}"
    else:
        return check_name(name, value, allowed)
    if not is_allowed:
        raise InvalidInput(f"{name} must be {kind}, not {value!r}")


_REGISTRY: dict[str, Strategy] = {}
_discovered = False
_alone: set[str] = set()  # strategies that `import_alone` has found
_discovering = threading.RLock()


def strategy(
    name: str, *, baseline: bool = False, **abilities: Any
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register the decorated function under `name`; its keyword-only parameters are its options.

    Args:
        abilities: fields of `Strategy`, e.g. ``proves=True``.
    """

    if not isinstance(name, str) or not name.isidentifier():
        raise InvalidInput(f"a strategy's name must be an identifier, e.g. 'keep_every_kth', not {shown(name)}")

    def register(run: Callable[..., Any]) -> Callable[..., Any]:
        known = _REGISTRY.get(name)
        if known is not None and (known.run.__module__, known.run.__qualname__) != (run.__module__, run.__qualname__):
            raise InvalidInput(
                f"two strategies are named '{name}': {known.run.__module__}.{known.run.__qualname__} "
                f"and {run.__module__}.{run.__qualname__}"
            )
        parameters = inspect.signature(run).parameters.values()
        required = [p for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD and p.default is p.empty]
        _REGISTRY[name] = Strategy(
            name=name,
            run=run,
            summary=(inspect.getdoc(run) or "").partition("\n")[0],
            options={p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY},
            takes_context=len(required) > 1,
            is_baseline=baseline,
            **abilities,
        )
        return run

    return register


def strategies() -> list[str]:
    """Every registered name, sorted."""
    _discover()
    return sorted(_REGISTRY)


def import_alone(name: str, module: str) -> None:
    """Import the module of one strategy and no others; for a process that runs that strategy."""
    with _discovering:
        if not _discovered and _import(module) is not None and name in _REGISTRY:
            _alone.add(name)


def get_strategy(name: str) -> Strategy:
    """The strategy of that name; raises `UnknownName` with the nearest names."""
    if not isinstance(name, str) or name not in _alone:
        _discover()
    if not isinstance(name, str) or name not in _REGISTRY:
        error = unknown_name("strategy", name, _REGISTRY)
        has_baselines = any(point.module == "baselines" for point in entry_points(group=GROUP))
        raise error if has_baselines else UnknownName(f"{error}; {WHERE_BASELINES_ARE}")
    return _REGISTRY[name]


def _discover() -> None:
    global _discovered
    with _discovering:  # another thread waits until all strategies are registered
        if _discovered:
            return
        _discovered = True  # set first, because a plugin may ask for the list while it is imported
        for point in entry_points(group=GROUP):
            package = _import(point.module)
            for module in pkgutil.iter_modules(getattr(package, "__path__", [])):
                if not module.name.startswith("_"):
                    _import(f"{point.module}.{module.name}")


def _import(name: str) -> ModuleType | None:
    """The module, or None with a warning, so that one broken plugin does not remove the other strategies."""
    try:
        return importlib.import_module(name)
    except Exception as error:
        warn(f"the strategies of '{name}' are missing, because it cannot be imported: {type(error).__name__}: {error}")
        return None
