"""Every file of conf/: it composes, its values pass the checks, and every experiment runs in a fast form."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from omegaconf import OmegaConf

import analysis
from analysis.results import load_run
from analysis.table import write_csv
from experiments import cli
from experiments.config import CONF_FOLDER, GROUPS, ModelConfig, group_options, register
from experiments.models_table import specs
from experiments.registry import experiments, listed
from remat.frontends.spec import FRAMEWORKS, GRANULARITIES


@pytest.fixture(autouse=True)
def _here(here: Path) -> None:
    register()


FILES = [name for name in group_options("experiment") if (CONF_FOLDER / "experiment" / f"{name}.yaml").is_file()]


@pytest.mark.parametrize("name", sorted(experiments()))
def test_a_registered_experiment_composes_and_loads(name: str) -> None:
    assert cli.check([f"experiment={name}", "keep=true"], multirun=False)
    assert listed(name).summary.endswith(".")
    assert listed(name).load().cases.__name__ == name


@pytest.mark.parametrize("name", FILES)
def test_an_experiment_composes_as_it_is(name: str) -> None:
    (settings,) = cli.check([f"experiment={name}"], multirun=False)
    written = yaml.safe_load((CONF_FOLDER / "experiment" / f"{name}.yaml").read_text()) or {}
    spec = settings.spec
    assert spec.name == "vgg19"
    if "batch_size" in written:
        assert spec.batch_size == written["batch_size"]
    if "accounting" in written:
        assert settings.accounting == spec.accounting == written["accounting"]


@pytest.mark.long
@pytest.mark.parametrize("name", FILES)
def test_an_experiment_runs_in_its_fast_form(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # Figures take seconds and have tests of their own.
    monkeypatch.setattr(analysis, "draw_run", lambda folder: [write_csv(load_run(folder), folder / "table.csv")])
    fast = ["model=chain", "model.options.n=4", "input_size=null", "points=3", "scale=quick",
            "strategies=[checkpoint_all,chen_sqrtn]"]  # fmt: skip
    assert cli.main([f"experiment={name}", *fast]) == 0
    assert "table.csv" in capsys.readouterr().out
    assert list(tmp_path.glob("runs/*/table.csv"))


@pytest.mark.parametrize("group", [group for group in GROUPS if group not in ("model", "experiment")])
def test_every_file_of_a_group_composes(group: str) -> None:
    for name in {*group_options(group)} - {"slurm"}:  # that needs a launcher: see test_engine
        assert cli.check([f"{group}={name}"], multirun=False)


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


def test_the_command_line_wins_over_an_experiment() -> None:
    (settings,) = cli.check(["experiment=throughput", "model=vgg16", "batch_size=8", "gpu=h100"], multirun=False)
    assert (settings.spec.name, settings.spec.batch_size, settings.gpu.name) == ("vgg16", 8, "h100")


def test_a_number_written_as_a_float_is_a_size_in_bytes() -> None:
    for given, size in (("1e9", 1_000_000_000), ("7.5GiB", int(7.5 * 2**30)), ("sweep", None)):
        (settings,) = cli.check([f"budget={given}"], multirun=False)
        assert settings.budget_bytes == size


def test_quick_is_fewer_points_and_shorter_limits_of_the_same_network() -> None:
    (full,) = cli.check([], multirun=False)
    (quick,) = cli.check(["scale=quick"], multirun=False)
    assert full.points == 16
    assert quick.points < full.points
    assert quick.time_limit_s < full.time_limit_s
    assert quick.spec == full.spec
