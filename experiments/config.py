"""Structured configuration: every key and its type. `settings` checks the values."""

import hashlib
import json
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from hydra.core.config_store import ConfigStore
from omegaconf import MISSING, DictConfig, OmegaConf

from experiments.registry import COMMON, experiments
from remat.cost.gpu import describe_gpu, gpu_names
from remat.errors import InvalidInput
from remat.incumbent import GAP_TOLERANCE

CONF_FOLDER = Path(__file__).resolve().parents[1] / "conf"
GROUPS = ("model", "gpu", "cost", "experiment", "benchmark", "engine", "logger")
_NOT_IN_NAME = ("hydra", "benchmark", "engine", "logger")  # they do not change the results of a run


@dataclass
class ModelConfig:
    """conf/model: a network to extract; see `remat.frontends.spec.ModelSpec`."""

    name: str = MISSING
    framework: str = MISSING
    target: str | None = None
    batch_size: int = 1
    input_size: list[int] = field(default_factory=list)
    granularity: str = "operation"
    options: dict[str, Any] = field(default_factory=dict)
    description: str = ""


@dataclass
class CostConfig:
    """conf/cost: flops, roofline or profile."""

    name: str = MISSING


@dataclass
class EngineConfig:
    """conf/engine: where solves run, number of `jobs` at once (None: cores / threads), `address` of a Ray cluster."""

    name: str = MISSING
    jobs: int | None = None
    address: str | None = None


@dataclass
class LoggerConfig:
    """conf/logger: another place that gets a copy of the run."""

    name: str = MISSING
    mode: str = "offline"
    project: str = "remat"


@dataclass
class InstanceConfig:
    """One graph of a benchmark: a file, or a model of conf/model with other values.

    Attributes:
        family: e.g. ``cnn``; tables of the leaderboard have a column for each.
        batch_size, input_size, options: null or empty: those of the model.
        shares: of the budgets, if they differ from the benchmark's.
        is_long: whether it is also solved with the benchmark's long time limit.
        held_out: no strategy was developed or tuned on it, so that it shows how results carry over.
    """

    family: str = MISSING
    graph: str | None = None
    model: str | None = None
    batch_size: int | None = None
    input_size: list[int] | None = None
    options: dict[str, Any] = field(default_factory=dict)
    gpu: str = "v100"
    shares: list[float] | None = None
    is_long: bool = False
    held_out: bool = False


@dataclass
class BenchmarkConfig:
    """conf/benchmark: the instances that experiment=benchmark solves.

    Attributes:
        shares: each is a budget: the share of the way from the largest working set of an operation to the plain peak.
        long_time_limit: seconds of a solve on the instances with `is_long`.
    """

    name: str = MISSING
    shares: list[float] = field(default_factory=list)
    long_time_limit: float = 60.0
    instances: dict[str, InstanceConfig] = field(default_factory=dict)


@dataclass
class Config:
    """Every key of the command line; conf/config.yaml has the defaults and their meaning."""

    model: ModelConfig = field(default_factory=ModelConfig)
    gpu: dict[str, Any] = field(default_factory=dict)
    cost: CostConfig = field(default_factory=CostConfig)
    benchmark: BenchmarkConfig = field(default_factory=BenchmarkConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
    logger: LoggerConfig = field(default_factory=LoggerConfig)
    graph: str | None = None
    instances: str | None = None
    batch_size: int | None = None
    input_size: list[int] | None = None
    granularity: str | None = None
    target: str | None = None
    dtype: str | None = None
    device: str | None = None
    budget: Any = "sweep"
    points: int = 16
    strategies: Any = "default"
    scope: str = "staged"
    accounting: str = "exact"
    link: Any = None
    offload: bool = False
    scale: str = "full"
    time_limit: float = 60.0
    work_limit: int | None = None
    seed: int = 0
    threads: int = 1
    deterministic: bool = False
    solver: str | None = None
    formulation: str | None = None
    target_gap: float = GAP_TOLERANCE
    options: dict[str, Any] = field(default_factory=dict)
    parts: list[str] | None = None
    networks: list[str] | None = None
    levels: list[str] | None = None
    draw: bool = False
    keep: bool = False
    again: bool = False
    keys: dict[str, Any] = field(default_factory=dict)


def register() -> None:
    """Register the schema, the GPUs and the `run_name` resolver with Hydra; repeated calls are fine.

    Raises:
        InvalidInput: a key of an experiment has the name of a group, or of a key of every experiment.
    """
    store = ConfigStore.instance()
    store.store(name="schema", node=Config)
    for name in gpu_names():
        store.store(group="gpu", name=name, node=describe_gpu(name))
    for name, listed in experiments().items():
        for key, default in listed.keys.items():
            if key in (*COMMON, "keys", "hydra") or (key in GROUPS and not isinstance(default, dict)):
                raise InvalidInput(f"{listed.file}: experiment '{name}' cannot have a key '{key}', because run.py "
                                   "has one; give the argument another name")  # fmt: skip
        if (CONF_FOLDER / "experiment" / f"{name}.yaml").exists():
            continue
        defaults = {key: value for key, value in listed.keys.items() if key in Config.__dataclass_fields__}
        store.store(group="experiment", name=name, node=defaults, package="_global_")
    OmegaConf.register_new_resolver(
        "run_name", lambda *, _root_: run_name(_root_, _root_.hydra.runtime.choices.get("experiment")), replace=True
    )


def read_conf(name: str) -> Any:
    """The content of ``conf/NAME.yaml``."""
    return yaml.safe_load((CONF_FOLDER / f"{name}.yaml").read_text(encoding="utf-8"))


def group_options(group: str) -> list[str]:
    """The names in a group, e.g. ``vgg19``."""
    if group == "gpu":  # the library has them, not conf/
        return gpu_names()
    folder = CONF_FOLDER / group
    files = (str(path.relative_to(folder).with_suffix("")) for path in folder.rglob("*.yaml"))
    return sorted({*files, *(experiments() if group == "experiment" else ())})


def run_name(cfg: DictConfig, experiment: str | None) -> str:
    """Name of a run's folder: readable, and the same for equal configurations, so that a run is redrawn in place."""
    if experiment in experiments():
        return str(experiment)
    content = {key: value for key, value in as_dict(cfg).items() if key not in _NOT_IN_NAME}
    digest = hashlib.sha256(json.dumps(content, sort_keys=True, default=str).encode()).hexdigest()[:8]
    file = Path(cfg.graph).name.removesuffix(".gz").removesuffix(".json").removesuffix(".log") if cfg.graph else ""
    subject = file or cfg.target or cfg.model.name
    has_costs = cfg.graph or cfg.model.framework == "synthetic"
    parts = [subject] if has_costs else [subject, cfg.gpu.get("name", "gpu"), cfg.cost.name]
    return re.sub(r"[^A-Za-z0-9_.-]+", "-", "_".join(map(str, [*parts, cfg.budget, digest])))


def keys_of(cfg: DictConfig) -> dict[str, Any]:
    """The values of all keys, those of an experiment's own included."""
    values = as_dict(cfg)
    return values | values["keys"]


def as_dict(cfg: DictConfig) -> dict[str, Any]:
    """A configuration, or a part of it, as plain values without the key ``hydra``."""
    plain = {str(k): cfg[k] for k in cfg if k != "hydra"}
    return {k: OmegaConf.to_container(v) if OmegaConf.is_config(v) else v for k, v in plain.items()}
