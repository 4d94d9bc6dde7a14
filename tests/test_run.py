"""The command line as users meet it: every mistake is one line, every run says where its results are."""

from __future__ import annotations

import base64
import copy
import json
import re
import signal
from dataclasses import replace
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from helpers import ROOT, hide_package, processes_in, refused, run_py, run_python, start_run_py, wait_for
from hydra import compose, initialize_config_dir
from omegaconf import DictConfig, OmegaConf
from sweep_helpers import MIRROR, settings

import analysis
import remat
from experiments import cli
from experiments.build import Subject
from experiments.config import CONF_FOLDER, register
from experiments.settings import read_settings
from experiments.solving import GraphRun
from remat.errors import RematError
from remat.extraction import extract, extract_in_child
from remat.frontends.spec import ModelSpec

PIXEL = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="


@pytest.fixture
def here(here: Path) -> Path:
    """A folder of one's own, with a small training graph in it."""
    remat.save_graph(MIRROR, here / "mirror.json")
    return here


@pytest.fixture
def undrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Figures take seconds and have tests of their own."""

    def draw_run(folder: Path) -> list[Path]:
        (folder / "page.html").write_text("")
        figure = folder / "overhead.png"
        figure.write_bytes(base64.b64decode(PIXEL))
        return [figure, folder / "page.html"]

    monkeypatch.setattr(analysis, "draw_run", draw_run)


@pytest.fixture(scope="module")
def configuration() -> DictConfig:
    """What run.py composes without arguments."""
    register()
    with initialize_config_dir(str(CONF_FOLDER), version_base="1.3"):
        return compose("config")


def complaint(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The one line that a wrong command line is answered with."""
    assert cli.main(arguments) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("error: ")
    assert captured.err.count("\n") == 1
    return captured.err


MISTAKES = [
    (["model=vgg91"], r"unknown model 'vgg91'; did you mean vgg19"),
    (["model=pspnet"], r"did you mean pspnet_mobilenet or pspnet_resnet50"),
    (["strategies=[chen_sqrt]"], r"unknown strategy 'chen_sqrt'; did you mean chen_sqrtn"),
    (["experiment=max_batch_siz"], r"did you mean max_batch_size"),
    (["engine=slurm"], r"engine=slurm needs -m"),
    (["-m", "engine=slurm", "model=vgg16,vgg19"], r"pip install hydra-submitit-launcher|there is no srun here"),
    (["budgett=4GB"], r"unknown option 'budgett'; did you mean budget"),
    (["model.option.width=3"], r"model\.option: Key 'option' not in"),
    (["model=chain", "dtype=float32"], r"dtype=float32: synthetic graphs have no types"),
    (["graph=mirror.json", "dtype=float32"], r"dtype does not apply to graph=mirror\.json"),
    (["points=many"], r"points: .*'many'"),
    (["solver=highs", "strategies=chen_sqrtn"], r"none of the strategies chen_sqrtn takes it"),
    (["strategies=a,b"], r"need -m .*'strategies=\[a,b\]'"),
    (["-m", "model=vgg16", "budget=4GB,4XB"], r"cannot read '4XB'"),
    (["graph=a(b).json"], r"quotes"),
    (["graph=mirror.json", "cost=flops"], r"cost=flops: a graph file keeps the costs in it"),
    (["graph=mirror.json", "model.options.n=3"], r"model\.options\.n=3 does not apply to a graph file"),
    (["model=chain", "cost=flops"], r"synthetic graphs come with their costs"),
    (["model=torch"], r"needs target=package\.module:factory"),
    (["model=torch_vgg16", "granularity=layer"], r"layer granularity is for Keras"),
    (["logger=wandb", "logger.mode=on"], r"did you mean online"),
    (["--modle"], r"unrecognized arguments: --modle"),
    (["--config-name=x"], r"--config-name: run\.py has one configuration"),
    (["hydra=3"], r"unknown option 'hydra'"),
    (["hydra.mode=x"], r"hydra\.mode: Invalid value 'x'"),
    (["graph=mirror.json", "budget=5", "hydra.run.dir=/proc/x"], r"No such file or directory: /proc/x"),
    (["networks=[x]"], r"networks is for experiment=.*paper"),
    (["-m", "experiment=paper,budget_sweep", "networks=[vgg16]"], r"networks is for experiment=.*paper"),
    (["experiment=max_batch_size", "model=chain", "batch_size=8"], r"leave batch_size out"),
    (["experiment=max_batch_size", "graph=mirror.json"], r"runs models"),
    (["experiment=benchmark", "graph=mirror.json"], r"experiment=benchmark has graphs of its own; leave out graph"),
    (["instances=/"], r"name the file with graph="),
    (["scope=glob(*)"], r"scope=glob\(\*\): write the values one by one"),
    ([f"budget={'8' * 5000}"], r"^error: cannot read 'budget=8{53} \.\.\.': an integer of thousands of digits$"),
    ([f"seed='{'8' * 5000}'"], r"^error: seed: .{,300}$"),
    (["graph=mirror.json", f"instances='{'8' * 5000}'"], r"File name too long"),
]


@pytest.mark.parametrize(("arguments", "expected"), MISTAKES, ids=[" ".join(m[0])[:60] for m in MISTAKES])
def test_a_mistake_is_one_line(
    here: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], expected: str
) -> None:
    assert re.search(expected, complaint(capsys, *arguments))
    assert not list(here.glob("runs/*"))


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("engine.name", "loca", r"did you mean local"),
        ("engine.jobs", 0, r"engine\.jobs must be at least 1"),
        ("gpu.optins", {"width": 3}, r"gpu.*optins"),
        ("dtype", "bfloat17", r"unknown dtype 'bfloat17'; did you mean bfloat16"),
        ("budget", "4XB", r"budget: cannot read '4XB' as a size"),
        ("budget", True, r"budget: cannot read True"),
        ("budget", "8" * 5000, r"budget: a size cannot be larger than"),
        ("points", 1, r"points must be at least 2"),
        ("threads", 0, r"threads must be at least 1"),
        ("threads", 2000, r"threads must be at most 1,024"),
        ("time_limit", float("nan"), r"time_limit must be a positive"),
        ("batch_size", 0, r"batch_size must be at least 1"),
        ("scope", "stagd", r"did you mean staged"),
        ("accounting", "exat", r"did you mean exact"),
        ("granularity", "layr", r"did you mean layer"),
        ("solver", "higs", r"did you mean highs"),
        ("strategies", [], r"the list is empty; name at least one strategy"),
        ("device", "moon", r"unknown device 'moon'; known: cpu, cuda"),
        ("target", "package", r"must look like package\.module:factory"),
        ("graph", "none.json", r"none\.json: no such file"),
        ("instances", "/nonexistent", r"instances=/nonexistent: no such folder"),
        ("input_size", [[1]], r"input_size must be positive numbers"),
    ],
)
def test_a_wrong_value_is_one_line(configuration: DictConfig, key: str, value: object, expected: str) -> None:
    changed = copy.deepcopy(configuration)
    OmegaConf.update(changed, key, value, force_add=True)
    with refused(expected, RematError):
        read_settings(changed)


def test_mistakes_are_met_before_frameworks_and_solvers_are_imported(here: Path) -> None:
    script = """
        import sys
        from experiments.cli import main
        assert main(["model=vgg19", "strategies=[chen_sqrt]"]) == 1
        heavy = {"torch", "tensorflow", "keras", "cvxpy", "matplotlib", "pandas", "plotly", "wandb"} & {*sys.modules}
        assert not heavy, heavy
        assert len(sys.modules) < 1200, len(sys.modules)  # 1,058 today; with TensorFlow 4,000
    """
    run_python(script, PYTHONPATH=str(ROOT))


def test_help_lists_models_gpus_and_strategies(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--help"]) == 0
    text, known = capsys.readouterr().out, "vgg19 torch_gpt2 v100_32gb checkmate_milp chen_sqrtn max_batch_size"
    assert not [name for name in known.split() if f"{name} " not in text]
    assert "budget: sweep" in text
    assert "VGG19" in text  # the description, not only the name


@pytest.mark.usefixtures("undrawn")
def test_a_run_writes_its_results_and_repeated_it_solves_nothing_and_redraws(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    names = ["checkpoint_all", "chen_sqrtn", "checkpoint_last"]
    for solved in (3, 0):
        assert cli.main(["graph=mirror.json", "budget=4", f"strategies=[{','.join(names)}]"]) == 0
        assert f"{solved} solved now" in capsys.readouterr().out
        (page,) = here.glob("runs/*/page.html")
        page.unlink()
    run = json.loads((page.parent / "run.json").read_text())
    assert (page.parent / run["store"] / "graphs" / f"{run['graph_sha256']}.json").is_file()
    rows = [pq.read_table(here / "runs/store/rows" / f"{key}.parquet").to_pylist()[0] for key in run["keys"]]
    assert sorted((row["strategy"], row["budget_bytes"]) for row in rows) == [(name, 4) for name in sorted(names)]
    assert {path.name for path in here.iterdir()} == {"mirror.json", "runs"}  # nothing else is left behind


def test_a_budget_below_one_operation_is_refused_before_any_solver(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    said = complaint(capsys, "graph=mirror.json", "budget=2")
    # A gradient reads a layer and the gradient before it; that much is also enough.
    assert said.count("alone needs 3 B") == 1
    assert "smallest budget known feasible is 3 B" in said
    assert list((here / "runs").iterdir()) == []  # nothing was made, not even the run's folder


@pytest.mark.long
@pytest.mark.usefixtures("undrawn")
def test_no_plan_is_an_error_for_the_shell_but_in_a_sweep_and_costs_no_other_run(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = here / "elsewhere"
    folder.mkdir()
    (here / "mirror.json").rename(folder / "mirror.json")
    arguments = ["graph=mirror.json", f"instances={folder}", "points=2", "strategies=checkpoint_all"]
    assert cli.main(["-m", "budget=3,4", *arguments]) == 1  # both would need 5
    out = capsys.readouterr().out
    assert "NO_PLAN" in out
    assert out.count("page.html") == len(list(here.glob("runs/*/run.json"))) == 2
    assert cli.main(["budget=sweep", *arguments]) == 0


def test_a_folder_that_cannot_be_written_is_one_line(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (here / "runs").write_text("a file")
    assert "cannot make" in complaint(capsys, "graph=mirror.json", "budget=5")


# A run whose heuristic ends at once and whose exact solves do not.
HARD = ["model=layered", "points=3", "time_limit=100", "strategies=[checkpoint_all,checkmate_milp]", "engine.jobs=1",
        "model.options.n=150"]  # fmt: skip


@pytest.mark.long
@pytest.mark.parametrize("how", [signal.SIGINT, pytest.param(signal.SIGKILL, marks=pytest.mark.slow)])
@pytest.mark.usefixtures("undrawn")
def test_what_is_finished_outlives_an_interrupted_run(
    here: Path, how: signal.Signals, capsys: pytest.CaptureFixture[str]
) -> None:
    run = start_run_py(here, *HARD)
    rows = here / "runs/store/rows"
    is_solving = lambda: any("remat.solving._worker" in command for command in processes_in(here))  # noqa: E731
    wait_for(lambda: len(list(rows.glob("*.parquet"))) >= 3 and is_solving(), patience_s=60)  # an exact solve
    run.send_signal(how)
    _, errors = run.communicate(timeout=30)
    assert run.returncode == (130 if how is signal.SIGINT else -signal.SIGKILL)
    if how is signal.SIGINT:
        assert errors.strip().count("\n") == 0
        assert "finished results are kept" in errors
    kept = sorted(rows.glob("*.parquet"))
    assert len(kept) >= 3
    assert not list((here / "runs").rglob("*.part"))
    wait_for(lambda: not processes_in(here))  # the kernel ends a worker with its parent
    assert cli.main([a.replace(",checkmate_milp", "") for a in HARD]) == 0
    assert "0 solved now" in capsys.readouterr().out


@pytest.mark.long
@pytest.mark.usefixtures("undrawn")
def test_wandb_gets_a_copy_offline(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("wandb")
    arguments = ["graph=mirror.json", "budget=5", "strategies=checkpoint_all", "logger=wandb"]
    assert cli.main(arguments) == 0
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("wandb")]
    (log,) = here.glob("runs/*/wandb/offline-run-*/*.wandb")
    assert log.stat().st_size > 0
    assert "offline-run" in line
    media = [path.name for path in here.glob("runs/*/wandb/offline-run-*/files/media/**/*")]
    assert any(name.startswith("overhead") and name.endswith(".png") for name in media)
    assert any(name.startswith("rows") for name in media)
    assert {path.name for path in here.iterdir()} == {"mirror.json", "runs"}


def test_wandb_that_is_not_installed_is_named_with_its_command(
    here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    hide_package(monkeypatch, "wandb")
    said = complaint(capsys, "graph=mirror.json", "budget=5", "strategies=checkpoint_all", "logger=wandb")
    assert "pip install wandb" in said


def test_extraction_in_a_child_is_cached_by_what_determines_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = ModelSpec("chain", "synthetic", "remat.frontends.synthetic:chain", 2, options={"n": 3})
    graph = extract_in_child(spec, tmp_path)
    assert len(graph) == 7
    monkeypatch.setattr("remat.extraction._run", lambda command: pytest.fail("extracted again"))
    assert extract_in_child(spec, tmp_path).sha256() == graph.sha256()
    with pytest.raises(BaseException, match="extracted again"):
        extract_in_child(replace(spec, batch_size=3), tmp_path)


OWN = """
import torch

def factory(width=8, half=False, batch_size=1):
    kind = torch.bfloat16 if half else torch.float32
    return torch.nn.Linear(4, width, dtype=kind), (torch.empty(batch_size, 4, dtype=kind),)
"""


@pytest.mark.long
@pytest.mark.usefixtures("undrawn")
def test_an_own_model_is_run_as_its_factory_made_it_and_called_by_its_name(
    here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second question is about other types: it is not answered with the first one's rows."""
    pytest.importorskip("torch")
    (here / "my_models.py").write_text(OWN)
    monkeypatch.syspath_prepend(here)
    monkeypatch.setattr("remat.extraction._extract", extract)  # a child imports PyTorch each time
    own = ["model=torch", "target=my_models:factory", "batch_size=4", "budget=1MB", "strategies=checkpoint_all"]
    for option, types in (("half=true", "bfloat16"), ("half=false", "float32")):
        assert cli.main([*own, f"model.options.{option}"]) == 0
        out = capsys.readouterr().out
        assert out.startswith("my_models:factory, batch 4: ")
        assert f"v100, {types})" in out
        assert "1 solved now, 0 taken from the store" in out
    rows = [pq.read_table(path).to_pylist()[0] for path in here.glob("runs/store/rows/*.parquet")]
    assert sorted((row["dtype"], row["model"]) for row in rows) == [
        ("bfloat16", "my_models:factory"), ("float32", "my_models:factory"),
    ]  # fmt: skip
    said = complaint(capsys, *own, "model.options.widht=16")
    assert "options of the factory (of a run: model.options.NAME): width=8, half=False" in said


def test_equal_graphs_of_other_types_have_rows_of_their_own() -> None:
    """Same bytes and costs, other types: only the key can tell them apart."""
    graphs = [
        remat.Graph.from_nodes("g", [[]], [8], [1], works=[remat.Work(1, 8, kind)]) for kind in ("float16", "bfloat16")
    ]
    assert graphs[0].sha256() == graphs[1].sha256()
    keys = {
        GraphRun(subject, settings(), "x", None, None, None, 1).key("checkpoint_all", 8)
        for subject in (Subject(graph, "m", "torch", "operation", 1, "flops", "modelled") for graph in graphs)
    }  # fmt: skip
    assert len(keys) == 2


MISTAKEN = """
import os

def aborts(**options):
    os.write(2, b"out of luck\\n")
    os.abort()

def boom(**options):
    raise KeyError("nothing here")

def calls_boom(**options):
    return boom()
"""


def test_a_mistake_in_the_users_module_is_one_line_with_its_place(here: Path) -> None:
    (here / "mistaken.py").write_text(MISTAKEN)
    (here / "unimportable.py").write_text("import json\n\nprint(undefined_name)\n")
    (here / "unreadable.py").write_text("def net(:\n")
    for target, said in (
        ("mistaken:aborts", r"mine \(synthetic\) was killed by signal 6: out of luck"),
        ("mistaken:calls_boom", r"target 'mistaken:calls_boom' .*nothing here.* \(mistaken\.py, line 9\)$"),
        ("absent:net", r"no module named 'absent'"),
        ("unimportable:net", r"cannot be imported: NameError: .*undefined_name.* \(unimportable\.py, line 3\)$"),
        ("unreadable:net", r"cannot be imported: SyntaxError: .*\(unreadable\.py, line 1\)$"),
    ):
        with refused(said, RematError):
            extract_in_child(ModelSpec("mine", "synthetic", target, 1), here / "cache")
    assert not (here / "cache").exists()


@pytest.mark.long
@pytest.mark.parametrize("name", ["hydra", "plotly"])
def test_a_missing_package_is_one_line(here: Path, name: str) -> None:
    """Whether it is needed at the start (a Python that `make setup` did not make) or only to draw."""
    (here / "absent" / name).mkdir(parents=True)
    code = f'raise ModuleNotFoundError("No module named {name}", name="{name}")'
    (here / "absent" / name / "__init__.py").write_text(code)
    arguments = ["graph=mirror.json", "budget=5", "strategies=checkpoint_all"]
    done = run_py(here, *arguments, PYTHONPATH=str(here / "absent"))
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert re.search(rf"^error: .*{name}.*make setup.*$\Z", done.stderr.strip(), re.MULTILINE), done.stderr
