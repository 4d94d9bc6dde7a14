"""The command ``remat``; also ``python -m remat``."""

from __future__ import annotations

import argparse
import ast
import inspect
import sys
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from remat import zoo
from remat.arena import allocator_in_words, find_arena, intervals_of, place, read_buffers, write_buffers
from remat.check import check_file
from remat.cost import gpu_names
from remat.errors import InvalidInput, RematError
from remat.files import show_any_text
from remat.frontends.json import load_graph, save_graph
from remat.frontends.monet_schedules import import_clone
from remat.simulator import load_and_simulate
from remat.units import parse_size


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a subcommand and return the exit code."""
    show_any_text()
    parser = _Parser(prog="remat", description="tools beside the library; experiments: python run.py")
    commands = parser.add_subparsers(title="commands", dest="command", metavar="COMMAND", required=True)
    check = commands.add_parser("check", help="describe graph, plan, bound and arena files, or say what is wrong")
    check.add_argument("files", type=Path, nargs="+", metavar="FILE", help="graph, plan, bound or arena as JSON")
    check.add_argument("--graph", type=Path, help="the graph that plans, bounds and arenas are checked against")
    check.set_defaults(run=_check)
    monet = commands.add_parser("import-monet", help="graphs, and plans of solutions_*.json, of monet-schedules")
    monet.add_argument("path", type=Path, help="a clone, or a solution_*.pkl, cost_*.pkl or solutions_*.json[.gz]")
    monet.add_argument("--out", type=Path, default=Path("monet-graphs"), help="folder for them (default: %(default)s)")
    monet.set_defaults(run=_import_monet)
    zoo = commands.add_parser("zoo", help="the solved plans that come with remat")
    zoo.set_defaults(run=_zoo)
    _add_arena(commands)
    _add_explain(commands)
    given, others = parser.parse_known_args(arguments)
    for text in others:  # NAME=VALUE may stand behind options
        if given.command != "explain" or text.startswith("-"):
            parser.error(f"unrecognized argument: {text}")
        given.options.append(text)
    try:
        with warnings.catch_warnings():
            if given.command != "explain":  # which runs a framework, with warnings of its own
                warnings.showwarning = _note
            return given.run(given)
    except (RematError, OSError) as error:
        print(f"remat {given.command}: {' '.join(str(error).split())}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


def _note(message: Warning | str, *_: Any) -> None:
    print(f"note: {message}", file=sys.stderr)


def _add_explain(commands: Any) -> None:
    explain = commands.add_parser("explain", help="whether a PyTorch step fits a GPU, and what less memory costs")

    def once(name: str, text: str, **options: Any) -> None:
        explain.add_argument(name, action=_Once, help=text, **options)

    target = {"nargs": "?", "metavar": "PACKAGE.MODULE:FACTORY"}
    explain.add_argument("target", **target, help="makes a module, or (module, sample_args)")
    explain.add_argument("options", nargs="*", metavar="NAME=VALUE", help="arguments of the factory")
    once("--config", "instead: transformers' config.json, or its folder", type=Path)
    once("--batch", "as batch_size=N", type=int, metavar="N")
    once("--length", "as length=TOKENS", type=int, metavar="TOKENS")
    once("--precision", "bf16, fp32, or mixed: float32 under autocast to bfloat16")
    once("--lora", "train adapters beside the blocks' linear layers only", type=int, metavar="RANK")
    once("--gpu", f"for its costs and memory: {', '.join(gpu_names())}")
    once("--gpus", "a table of several: all, or e.g. h100,l40s", metavar="NAMES")
    price = {"action": "append", "default": [], "metavar": "GPU=N/h"}
    explain.add_argument("--price", **price, help="with --gpus: what an hour costs, e.g. h100=2.5/h")
    once("--budget", "instead of the GPU's memory, e.g. 24GB; without a GPU, costs are an h100's")
    once("--optimizer", "for its state (default: %(default)s)", default="adamw")
    once("--shard", "the answer is for one of so many ranks of FSDP2", type=int, metavar="RANKS")
    once("--link", "what copies to the host change: pcie5, 50GB/s, or auto for the GPU's own link")
    chunks = "joint: also the largest sizes at each overhead with the logits in chunks"
    once("--implementations", chunks, default="default", metavar="joint")
    seconds = "seconds of search for each budget (default: %(default)s)"
    explain.add_argument("--time-limit", type=float, default=2.0, help=seconds)
    explain.add_argument("--out", type=Path, help="also write a page of HTML, with who holds what over the step")
    memory = "also write a file for PyTorch's memory visualizer"
    explain.add_argument("--snapshot", type=Path, metavar="FILE", help=memory)
    explain.set_defaults(run=_explain)


def _add_arena(commands: Any) -> None:
    arena = commands.add_parser("arena", help="a place in one block for every byte of a plan, or for buffers of a CSV")
    arena.add_argument("path", type=Path, metavar="PLAN.json | BUFFERS.csv", help="columns id,lower,upper,size")
    arena.add_argument("--graph", type=Path, help="of the plan")
    arena.add_argument("--budget", help="of a plan: stop at so many bytes, fixed bytes included")
    arena.add_argument("--capacity", help="of buffers: stop at a block of so many bytes")
    arena.add_argument("--inclusive", action="store_true", help="buffers are live at their upper end, too")
    arena.add_argument("--alignment", type=int, default=1, help="of a plan's offsets (default: %(default)s)")
    arena.add_argument("--time-limit", type=float, default=10.0, help="seconds (default: %(default)s)")
    arena.add_argument("--seed", type=int, default=0)
    arena.add_argument("--out", type=Path, help="write the arena (remat-arena/1), or the CSV with a column offset")
    arena.set_defaults(run=_arena)


def _arena(given: argparse.Namespace) -> int:
    """Print the arena; 1 if it is above the budget or the capacity."""
    if ".csv" in map(str.lower, given.path.suffixes):
        return _arena_of_buffers(given)
    if given.graph is None:
        raise InvalidInput("name the plan's graph, e.g. --graph graph.json; buffers of a file *.csv need none")
    if given.capacity is not None or given.inclusive:
        raise InvalidInput("--capacity and --inclusive are for buffers; a plan's limit is --budget")
    graph = load_graph(given.graph)
    plan, _ = load_and_simulate(given.path, graph)
    arena = find_arena(graph, plan, given.budget, given.time_limit, alignment=given.alignment, seed=given.seed)
    print(f"{given.path}: arena of {arena.summary()}")
    print(f"  PyTorch's CUDA allocator, {allocator_in_words(intervals_of(graph, plan), graph.fixed_bytes)}")
    if given.out is not None:
        arena.save(given.out)
    return 1 if arena.excess_bytes else 0


def _arena_of_buffers(given: argparse.Namespace) -> int:
    if given.graph is not None or given.budget is not None or given.alignment != 1:
        raise InvalidInput("--graph, --budget and --alignment are for plans; the limit of buffers is --capacity")
    ids, lower, upper, size = read_buffers(given.path, is_inclusive=given.inclusive)
    placed = place(lower, upper, size, given.capacity, given.time_limit, seed=given.seed)
    if given.out is not None:
        write_buffers(given.out, ids, lower, upper - given.inclusive, size, placed.offsets)
    size_of = f"{placed.bytes} bytes, {placed.ratio:.4f} of their load"
    print(f"{given.path}: {len(ids)} buffers in {size_of}; no block is below {placed.bound} bytes")
    return 0 if given.capacity is None or placed.bytes <= parse_size(given.capacity) else 1


def _check(given: argparse.Namespace) -> int:
    """Print a line for each file, or all its problems; 1 if any file has one."""
    refused = 0
    for path in given.files:
        try:
            line, remarks = check_file(path, given.graph)
        except RematError as error:
            print(error, file=sys.stderr)
            refused += 1
            continue
        print(line, flush=True)
        for remark in remarks:
            print(f"note: {remark}", file=sys.stderr)
    return 1 if refused else 0


def _import_monet(given: argparse.Namespace) -> int:
    """Write graph files into a folder, plans into one for each graph; 1 if a file was refused or had no graph."""
    written = refused = 0
    for each in import_clone(given.path):
        if each.graph is None:
            print(f"{'refused' if each.is_error else 'skipped'}: {each.note}", file=sys.stderr)
            refused += each.is_error
            continue
        graph = each.graph
        target = given.out / f"{_file_name(graph.name)}.json"
        save_graph(graph, target)
        written += 1
        for name, plan in each.plans.items():
            plan.save(target.with_suffix("") / f"{_file_name(name)}.json")
        others = sum(len(op.implementations) for op in graph.operations)
        held = f"{len(graph)} operations, {others} other implementations, {len(each.plans)} plans"
        print(f"{target}: {held}, from {each.path.name}", flush=True)
    if not written:
        print(f"no graph in {given.path}", file=sys.stderr)
    return 1 if refused or not written else 0


def _file_name(name: str) -> str:
    """A safe file name for a graph, because its name comes from a file that anybody may have written."""
    return "".join(c if c.isascii() and (c.isalnum() or c in "._-") else "_" for c in name).lstrip(".")[:120] or "graph"


def _explain(given: argparse.Namespace) -> int:
    sys.path.insert(0, "")  # as for `python -m`: the factory may lie in this folder
    from remat.torch import explain, from_config  # imports PyTorch

    for path in filter(None, (given.out, given.snapshot)):
        if path.is_dir() or not path.parent.is_dir():
            raise InvalidInput(f"{path} cannot be written: name a file in a folder that exists")
    factory = given.target
    if given.config is not None:
        given.options += [] if given.target is None else [given.target]  # there is no factory: it is NAME=VALUE
        factory = from_config(given.config)
    elif factory is None:
        raise InvalidInput("name a factory, e.g. my_package.models:factory, or give --config config.json")
    sizes = {"batch_size": given.batch, "length": given.length}
    options = _options(given.options, explain)
    for name, n in sizes.items():
        if n is not None and options.setdefault(name, n) is not n:
            raise InvalidInput(f"{name} is given twice; give it once")
    if given.gpus is not None or given.price:
        return _compare(given, factory, options)
    if given.gpu is None and given.budget is None:
        raise InvalidInput("name a GPU or a budget, e.g. --gpu h100 or --budget 24GB")
    explained = explain(
        factory, gpu=given.gpu, budget=given.budget, optimizer=given.optimizer, shard=given.shard,
        precision=given.precision, lora=given.lora, link=given.link, implementations=given.implementations,
        time_limit_s=given.time_limit, **options,
    )  # fmt: skip
    print(explained)
    if given.out is not None:
        explained.save(given.out)
    if given.snapshot is not None:
        explained.save_snapshot(given.snapshot)
    return 0


def _compare(given: argparse.Namespace, factory: Any, options: dict[str, Any]) -> int:
    """Print a table of several GPUs."""
    from remat.torch import compare

    if given.gpus is None:
        raise InvalidInput("--price goes with --gpus, e.g. --gpus all")
    for name in ("gpu", "budget", "out", "snapshot"):
        if getattr(given, name) is not None:
            raise InvalidInput(f"--{name} is for one GPU; leave it out, or leave --gpus out")
    if given.implementations != "default":
        raise InvalidInput("--implementations is for one GPU; leave it out, or leave --gpus out")
    prices = dict[str, str]()
    for text in given.price:
        name, equals, price = text.partition("=")
        if not equals or name in prices:
            raise InvalidInput(
                f"'{text}' is no price, or a second one; write one for each GPU, e.g. --price h100=2.5/h"
            )
        prices[name] = price
    names = [] if given.gpus == "all" else given.gpus.split(",")
    table = compare(
        factory, names, prices=prices, optimizer=given.optimizer, shard=given.shard, precision=given.precision,
        lora=given.lora, link=given.link, time_limit_s=given.time_limit, **options,
    )  # fmt: skip
    print(table)
    return 0


class _Parser(argparse.ArgumentParser):
    """Says what is wrong in one line, without its usage."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}; see {self.prog} --help\n")


class _Once(argparse.Action):
    """An option that may be given once: of two budgets one would be forgotten."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        given = namespace.__dict__.setdefault("given_once", set())
        if self.dest in given:
            parser.error(f"{option_string} was given twice; give one")
        given.add(self.dest)
        setattr(namespace, self.dest, values)


def _options(texts: Sequence[str], explain: Callable[..., Any]) -> dict[str, Any]:
    """Arguments of the factory."""
    own = inspect.signature(explain).parameters
    options = dict(map(_option, texts))
    for name in options.keys() & own.keys() - {"batch_size"}:
        raise InvalidInput(
            f"{name} is an option of remat explain; write it as --{name.removesuffix('_s').replace('_', '-')}"
        )
    return options


def _option(text: str) -> tuple[str, Any]:
    """An argument of the factory: a Python literal, or text."""
    name, equals, value = text.partition("=")
    if not equals or not name.isidentifier():
        raise InvalidInput(f"'{text}' is no option; write NAME=VALUE, e.g. batch_size=8")
    try:
        return name, ast.literal_eval(value)
    except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):  # as `ast` says
        return name, value


def _zoo(_: argparse.Namespace) -> int:
    print("\n".join(zoo.table()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
