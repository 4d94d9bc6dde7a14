"""Solved plans that come with remat, by name: no solver, no network, no framework.

    plan = remat.zoo.load("resnet50_b184_6GB")      # of the training graph remat.zoo.graph("resnet50_b184_6GB")
    remat.torch.rematerialize(model, sample_args, plan="zoo:resnet50_b184_6GB")

There are two kinds, and two plans of different kinds may share a name. ``graph`` plans are for MONeT's training graphs
(`remat.frontends.monet`), ``torch`` plans for a PyTorch model's step as `remat.torch.rematerialize` captures it. In
names, GB means 2^30 bytes, as for MONeT, a fraction is one of the plain step's peak, and ``_p100`` stands for published
costs of a P100, without Winograd. The other graph plans have a roofline's costs, and Winograd's are far too good.
``python run.py experiment=zoo keep=true`` makes the plans.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any, Literal

from remat.errors import InvalidInput, InvalidPlan, check_name, shown, unknown_name
from remat.files import read_json
from remat.frontends.json import load_graph
from remat.graph import Graph
from remat.plan import Plan
from remat.units import format_size

FOLDER = Path(__file__).parent / "plans"
INDEX = "index.json"
FORMAT = "remat-zoo/1"
PREFIX = "zoo:"
Kind = Literal["graph", "torch"]
KINDS: tuple[Kind, ...] = ("graph", "torch")


def names(kind: Kind | None = None) -> tuple[str, ...]:
    """Names of all plans of a kind; of both kinds, for None."""
    kinds = KINDS if kind is None else (_checked(kind),)
    return tuple(dict.fromkeys(name for k in kinds for name, entry in _index()[k].items() if "file" in entry))


def load(name: str) -> Plan:
    """The ``graph`` plan of that name, with or without ``zoo:`` before it.

    Raises:
        UnknownName: names the nearest ones.
        InvalidInput: there is only a ``torch`` plan of that name.
    """
    return Plan.load(FOLDER / describe(name)["file"], graph(name))


def graph(name: str) -> Graph:
    """The graph of the ``graph`` plan of that name; raises as `load` does."""
    return _graph(describe(name)["graph"])


def describe(name: str, kind: Kind = "graph") -> dict[str, Any]:
    """A plan's entry in the index: file, budget, peak, cost, bound, how and when it was made; raises as `load`."""
    bare = name.removeprefix(PREFIX) if isinstance(name, str) else shown(name)
    entry = _index()[_checked(kind)].get(bare, {})
    if "file" in entry:
        return dict(entry)
    if entry:
        raise InvalidInput(f"{PREFIX}{bare}: there is no such plan: {entry['note']}")
    if bare not in names():
        raise unknown_name(f"{kind} plan in the zoo", bare, names(kind))
    if kind == "torch":
        raise InvalidInput(f"{PREFIX}{bare}: is a plan of MONeT's graph, not of a PyTorch step; see remat.zoo.load")
    raise InvalidInput(f"{PREFIX}{bare}: is a plan of a PyTorch step: remat.torch.rematerialize(plan='{PREFIX}{bare}')")


def _checked(kind: Kind) -> Kind:
    check_name("kind of plan", kind, KINDS)
    return kind


def resolved(plan: Any) -> Any:
    """The file of the ``torch`` plan for ``zoo:NAME``; anything else unchanged. Raises as `load` does."""
    if not isinstance(plan, str) or not plan.startswith(PREFIX):
        return plan
    return FOLDER / describe(plan, "torch")["file"]


def named(error: InvalidPlan, plan: Any) -> InvalidPlan:
    """An error about the file of ``zoo:NAME``, in one line with this name; any other error unchanged."""
    if not isinstance(plan, str) or not plan.startswith(PREFIX):
        return error
    reason = str(error).splitlines()[0].removeprefix(f"{resolved(plan)}: ")
    model = describe(plan, "torch")["model"]
    return InvalidPlan(f"{plan}: {reason}; it is of {model['target']} with {model['inputs']}", error.step)


def table() -> list[str]:
    """A head line, then a line for every plan."""
    lines = [f"{'kind':<6} {'name':<26} {'budget':>24} {'peak':>24} overhead"]
    for kind in KINDS:
        for name in names(kind):
            entry = describe(name, kind)
            budget, peak = (format_size(entry[key]) for key in ("budget_bytes", "peak_bytes"))
            lines.append(f"{kind:<6} {name:<26} {budget:>24} {peak:>24} {entry['overhead']:>8.2%}")
    return lines


@functools.cache
def _index() -> dict[str, dict[str, Any]]:
    document = read_json(FOLDER / INDEX)
    if document.get("format") != FORMAT:
        raise InvalidInput(f"{FOLDER / INDEX}: 'format' must be '{FORMAT}'")
    return document


@functools.cache
def _graph(file: str) -> Graph:
    return load_graph(FOLDER / file)
