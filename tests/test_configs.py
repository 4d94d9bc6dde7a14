"""Every file of conf/: it composes, its values pass the checks, and every experiment runs in a fast form."""

from __future__ import annotations

from pathlib import Path

import pytest
from omegaconf import OmegaConf

from experiments import cli
from experiments.config import CONF_FOLDER, Config, ModelConfig, group_options, register
from experiments.models_table import specs
from experiments.registry import experiments
from remat.cost.gpu import load_gpu
from remat.frontends.spec import FRAMEWORKS, GRANULARITIES


@pytest.fixture(autouse=True)
def _here(here: Path) -> None:
    register()


def test_every_registered_experiment_composes_and_loads() -> None:
    composed = set[str]()
    for name, each in experiments().items():
        assert each.summary.endswith(".")
        assert each.load().cases.__name__ == name
        defaults = str({key: each.keys[key] for key in each.keys if key in Config.__dataclass_fields__})
        if defaults not in composed:  # for others it composes the same
            assert cli.check([f"experiment={name}", "draw=true", "keep=true"], multirun=False)
        composed.add(defaults)


def test_every_file_of_a_group_composes() -> None:
    groups = {group: group_options(group) for group in ("cost", "benchmark", "engine", "logger")}
    groups["engine"].remove("slurm")  # that needs a launcher: see test_engine
    for i in range(max(map(len, groups.values()))):
        assert cli.check([f"{group}={names[i % len(names)]}" for group, names in groups.items()], multirun=False)
    for name in group_options("gpu"):
        assert load_gpu(name).name == name


def test_every_model_has_the_keys_of_the_schema_and_is_described() -> None:
    schema = OmegaConf.structured(ModelConfig)
    for name in group_options("model"):
        written = OmegaConf.load(CONF_FOLDER / "model" / f"{name}.yaml")
        assert set(written) == set(schema), name
        model = OmegaConf.merge(schema, written)  # raises for a value of another type
        assert model.name == name
        assert model.description
        assert model.framework in FRAMEWORKS
        assert model.granularity in GRANULARITIES
        assert model.batch_size >= 1


def test_the_table_of_models_has_both_granularities_of_keras() -> None:
    rows = [(spec.name, spec.granularity) for spec in specs(["vgg19", "torch_vgg16", "torch", "chain"])]
    assert rows == [("vgg19", "layer"), ("vgg19", "operation"), ("torch_vgg16", "operation"), ("chain", "layer")]


def test_the_command_line_wins_over_an_experiment_and_quick_is_fewer_points_and_shorter_limits() -> None:
    asked = ["experiment=throughput", "model=vgg16", "batch_size=8", "gpu=h100", "budget=1e9"]
    full, quick = cli.check([*asked, "scale=full,quick"], multirun=True)
    assert (full.spec.name, full.spec.batch_size, full.gpu.name) == ("vgg16", 8, "h100")
    assert full.budget_bytes == 1_000_000_000  # a number written as a float
    assert quick.points < full.points == 16
    assert quick.time_limit_s < full.time_limit_s
    assert quick.spec == full.spec
