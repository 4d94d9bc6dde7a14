"""From a composed configuration to checked settings, so that a user's mistakes fail early."""

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from experiments.arguments import names_of, one_of
from experiments.config import as_dict, read_conf
from remat.cost.gpu import Gpu, link_of
from remat.cost.profile import DEVICES
from remat.errors import InvalidInput
from remat.frontends.spec import DTYPES, FRAMEWORKS, GRANULARITIES, ModelSpec
from remat.incumbent import GAP_TOLERANCE
from remat.link import Link
from remat.plan import parse_scope
from remat.problem import ACCOUNTINGS, SolveOptions
from remat.registry import get_strategy, strategies
from remat.units import parse_size

RUNS_FOLDER = Path("runs")
STORE_FOLDER = RUNS_FOLDER / "store"
COSTS = ("flops", "roofline", "profile")
SCALES = ("full", "study", "quick")
QUICK_POINTS, QUICK_TIME_LIMIT_S = 6, 10.0
ENGINES = ("local", "ray", "slurm")
WANDB_MODES = ("offline", "online", "disabled")
AS_GIVEN = (  # keys whose values are settings
    "device", "scope", "accounting", "work_limit", "seed", "threads", "deterministic", "target_gap", "instances",
)  # fmt: skip
OF_A_MODEL = ("batch_size", "input_size", "granularity", "target", "dtype")


@dataclass(frozen=True, slots=True)
class Settings:
    """The checked settings of a run.

    Attributes:
        spec: the network, or None with a `graph_file`.
        graph_file: a remat-graph file, or None with a `spec`.
        cost: ``flops``, ``roofline``, ``profile``; ``file`` with a graph file.
        budget_bytes: a single budget; None for a sweep of `points` budgets.
        budgets_bytes: a list of budgets; only some experiments take one.
        instances: another folder of graph files, or None.
        strategies: names, each once.
        options: [strategy] keyword options of that strategy.
        target_gap: a solve may end once its gap is at or below it.
        engine: name of the engine that runs the solves.
        jobs: solves at once; None for as many as the engine has cores for.
        address: of a Ray cluster, or None.
        link: to the host's memory, for plans that copy; None for none.
        time_limits: [strategy] seconds of a solve, where they are not `time_limit_s`.
    """

    spec: ModelSpec | None
    graph_file: Path | None
    cost: str
    gpu: Gpu
    device: str | None
    budget_bytes: int | None
    points: int
    strategies: tuple[str, ...]
    options: dict[str, dict[str, Any]]
    scope: str
    accounting: str
    time_limit_s: float
    work_limit: int | None
    seed: int
    threads: int
    deterministic: bool
    jobs: int | None
    logger: str
    wandb_mode: str
    wandb_project: str
    target_gap: float = GAP_TOLERANCE
    engine: str = "local"
    address: str | None = None
    budgets_bytes: tuple[int, ...] = ()
    instances: str | None = None
    link: Link | None = None
    time_limits: Mapping[str, float] = field(default_factory=dict)

    def limit_of(self, strategy: str) -> float:
        """Seconds of a solve of a strategy."""
        return self.time_limits.get(strategy, self.time_limit_s)

    def determining(self) -> dict[str, Any]:
        """What determines results, JSON-ready: all but where solves run and where a copy goes."""
        others = ("jobs", "engine", "address", "logger", "wandb_mode", "wandb_project", "instances")
        found = {name: value for name, value in asdict(self).items() if name not in others}
        found["gpu"].pop("link")  # `link` says whether it is used
        if self.link is None:  # rows of runs without one keep their keys
            del found["link"]
        return json.loads(json.dumps(found, default=str))


def read_settings(cfg: DictConfig, *, solves: bool = True) -> Settings:
    """Check a composed configuration.

    Args:
        solves: false for an experiment that does not read the strategies, whose import takes longest.

    Raises:
        RematError: one line with the wrong value and the valid ones.
    """
    one_of("scale", cfg.scale, SCALES)
    one_of("accounting", cfg.accounting, ACCOUNTINGS)
    parse_scope(cfg.scope)
    budget = cfg.budget
    is_sweep = isinstance(budget, str) and budget.strip().lower() == "sweep"
    several = tuple(map(_budget, budget)) if OmegaConf.is_list(budget) else ()
    if OmegaConf.is_list(budget) and not several:
        raise InvalidInput("budget is an empty list; write sizes, or budget=sweep")
    budget_bytes = None if is_sweep or several else _budget(budget)
    for key, least in {"points": 2, "seed": 0, "threads": 1, "work_limit": 1}.items():
        _at_least(key, cfg[key], least)
    _at_least("engine.jobs", cfg.engine.jobs, 1)
    if not 0 < cfg.time_limit < float("inf"):
        raise InvalidInput(f"time_limit must be a positive number of seconds, not {cfg.time_limit:g}")
    if not 0 <= cfg.target_gap <= 1:
        raise InvalidInput(f"target_gap must be from 0 to 1 (0.01 is 1 %), not {cfg.target_gap:g}")
    SolveOptions(cfg.time_limit, threads=cfg.threads, work_limit=cfg.work_limit).checked()  # not too many either
    if cfg.device is not None:
        one_of("device", cfg.device, DEVICES)
    if cfg.logger.name == "wandb":
        one_of("logger.mode", cfg.logger.mode, WANDB_MODES)
    if cfg.instances is not None and not Path(cfg.instances).is_dir():
        raise InvalidInput(f"instances={cfg.instances}: no such folder")
    try:
        gpu = Gpu(**as_dict(cfg.gpu))
    except TypeError as error:
        raise InvalidInput(f"gpu: {error}") from None
    quick = cfg.scale == "quick"
    link = _link(cfg, gpu)
    solves = solves or cfg.strategies != "default" or bool(cfg.options)  # wrong names are refused everywhere
    names = _strategies(cfg.strategies, link is not None) if solves else ()
    spec, graph_file = (None, _graph_file(cfg)) if cfg.graph is not None else (_spec(cfg), None)
    return Settings(
        spec=spec,
        graph_file=graph_file,
        cost="file" if graph_file else one_of("cost", cfg.cost.name, COSTS),
        gpu=gpu,
        budget_bytes=budget_bytes,
        points=min(cfg.points, QUICK_POINTS) if quick else cfg.points,
        strategies=names,
        options=_options(cfg, names),
        time_limit_s=min(cfg.time_limit, QUICK_TIME_LIMIT_S) if quick else cfg.time_limit,
        jobs=cfg.engine.jobs,
        logger=cfg.logger.name,
        wandb_mode=cfg.logger.mode,
        wandb_project=cfg.logger.project,
        engine=one_of("engine", cfg.engine.name, ENGINES),
        address=cfg.engine.address,
        budgets_bytes=several,
        link=link,
        **{name: cfg[name] for name in AS_GIVEN},
    )


def configured_model(name: str) -> ModelSpec:
    """The model in conf/model/NAME.yaml; its target is empty where the command line must give one."""
    data = read_conf(f"model/{name}")
    return ModelSpec(
        data["name"], data["framework"], data["target"] or "", data["batch_size"], tuple(data["input_size"]),
        data["granularity"], options=data["options"],
    )  # fmt: skip


def _at_least(what: str, value: int | None, least: int) -> None:
    if value is not None and value < least:
        raise InvalidInput(f"{what} must be at least {least}, not {value}")


def _budget(budget: Any) -> int:
    try:
        return parse_size(budget)
    except InvalidInput as error:
        raise InvalidInput(f"budget: {error}; or budget=sweep") from None


def _without_copies(has_link: bool) -> list[str]:
    """Every strategy; without a link none that does nothing but copy."""
    return [name for name in strategies() if has_link or get_strategy(name).copies != "own"]


def _strategies(given: Any, has_link: bool) -> tuple[str, ...]:
    if OmegaConf.is_list(given):
        wanted = names_of("strategy", given, strategies())
    elif given == "default":  # for graphs with implementations, `for_implementations` adds the others
        wanted = [name for name in _without_copies(has_link) if get_strategy(name).implementations != "own"]
    elif given == "all":
        wanted = strategies()
    elif isinstance(given, str):
        wanted = [one_of("strategy", given, [*strategies(), "default", "all"])]
    else:
        raise InvalidInput(
            f"strategies must be 'default', 'all', a name or a list like 'strategies=[a,b]', not {given!r}"
        )
    return tuple(wanted)


def for_implementations(cfg: DictConfig, settings: Settings) -> Settings:
    """Settings for a graph whose operations have several implementations: ``default`` means every strategy there."""
    if cfg.strategies != "default":
        return settings
    names = tuple(_without_copies(settings.link is not None))
    return replace(settings, strategies=names, options=_options(cfg, names))


def _options(cfg: DictConfig, names: tuple[str, ...]) -> dict[str, dict[str, Any]]:
    """The options of each strategy; an option that no strategy takes is an error."""
    options: dict[str, dict[str, Any]] = {name: {} for name in names}
    for key in ("solver", "formulation"):
        value = cfg[key]
        if value is None:
            continue
        takers = [name for name in names if key in get_strategy(name).options]
        if not takers:
            raise InvalidInput(f"{key}={value}: none of the strategies {', '.join(names)} takes it")
        for name in takers:
            options[name][key] = value
    for name, given in cfg.options.items():
        one_of("strategy in options", name, strategies())
        if name not in options:
            raise InvalidInput(f"options.{name}: strategy '{name}' is not among the run's: {', '.join(names)}")
        if not OmegaConf.is_dict(given):
            raise InvalidInput(f"options.{name}: write options.{name}.OPTION=VALUE")
        options[name] |= as_dict(given)
    for name in names:
        get_strategy(name).check_options(options[name])
    return options


def _link(cfg: DictConfig, gpu: Gpu) -> Link | None:
    if cfg.link is not None and not isinstance(cfg.link, str):
        raise InvalidInput(f"link={cfg.link} has no unit; write e.g. link=12GB/s")
    link = link_of(gpu, "auto" if cfg.link is None and cfg.offload else cfg.link)
    if link is not None and cfg.cost.name == "flops" and cfg.graph is None:
        raise InvalidInput("a link needs costs in ns: cost=roofline or cost=profile")
    return link


def _graph_file(cfg: DictConfig) -> Path:
    for key in OF_A_MODEL:
        if cfg[key] is not None:
            raise InvalidInput(f"{key} does not apply to graph={cfg.graph}: the content of a graph file is fixed")
    return find_graph(cfg.graph, cfg.instances)


def find_graph(name: str, instances: str | None) -> Path:
    """The file of a graph, here or in a folder of instances.

    Raises:
        InvalidInput: there is none, or it is a folder.
    """
    folders = [Path()] + [Path(f) for f in (instances, os.environ.get("REMAT_INSTANCES")) if f]
    for folder in folders:
        if (folder / name).is_file():
            return folder / name
    if any((folder / name).is_dir() for folder in folders):
        raise InvalidInput(f"graph={name}: a folder; name one of the graph files in it")
    where = f" (nor under {', '.join(map(str, folders[1:]))})" if len(folders) > 1 else ""
    raise InvalidInput(f"graph={name}: no such file{where}")


def _spec(cfg: DictConfig) -> ModelSpec:
    model = cfg.model
    framework = one_of("framework", model.framework, tuple(FRAMEWORKS))
    granularity = one_of("granularity", cfg.granularity or model.granularity, GRANULARITIES)
    target = cfg.target or model.target
    if not target:
        raise InvalidInput(f"model={model.name} needs target=package.module:factory")
    if not all(part for part in target.partition(":")):
        raise InvalidInput(f"target '{target}' must look like package.module:factory")
    if granularity == "layer" and framework == "torch":
        raise InvalidInput(f"model={model.name}: layer granularity is for Keras models; write granularity=operation")
    batch_size = cfg.batch_size if cfg.batch_size is not None else model.batch_size
    _at_least("batch_size", batch_size, 1)
    input_size = tuple(cfg.input_size if cfg.input_size is not None else model.input_size)
    if not all(type(size) is int and size >= 1 for size in input_size):
        raise InvalidInput(f"input_size must be positive numbers, not {list(input_size)}")
    if cfg.dtype is not None:
        one_of("dtype", cfg.dtype, DTYPES)
        if framework == "synthetic":
            raise InvalidInput(f"dtype={cfg.dtype}: synthetic graphs have no types; leave dtype out")
    return ModelSpec(
        name=model.name if target == model.target else target,
        framework=framework,
        target=target,
        batch_size=batch_size,
        input_size=input_size,
        granularity=granularity,
        accounting=cfg.accounting,
        dtype=cfg.dtype,
        options=as_dict(model.options),
    )
