"""The command line as users meet it: every mistake is one line, every run says where its results are."""

from __future__ import annotations

import base64
import json
import re
import signal
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from helpers import ROOT, hide_package, processes_in, run_py, run_python, start_run_py, wait_for
from sweep_helpers import settings

import analysis
import remat
from experiments import cli
from experiments.build import Subject
from experiments.solving import GraphRun
from remat.errors import RematError
from remat.extraction import extract, extract_in_child
from remat.frontends.spec import ModelSpec

N = 6
PIXEL = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="


@pytest.fixture
def here(here: Path) -> Path:
    """A folder of one's own, with a small training graph in it."""
    deps = [[i - 1] if i else [] for i in range(N)] + [[N - 1 - i] + ([N + i - 1] if i else []) for i in range(N)]
    names = [f"layer{i}" for i in range(N)] + [f"grad{N - 1 - i}" for i in range(N)]
    graph = remat.Graph.from_nodes("mirror", deps, [1000] * 2 * N, [1] * 2 * N, names=names, cost_unit="unit",
                                   backward=[i >= N for i in range(2 * N)])  # fmt: skip
    remat.save_graph(graph, here / "mirror.json")
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
    (["model=vit"], r"unknown model 'vit'; did you mean torch_vit"),
    (["model=pspnet"], r"did you mean pspnet_mobilenet or pspnet_resnet50"),
    (["gpu=v10"], r"unknown gpu 'v10'; did you mean v100"),
    (["strategies=[chen_sqrt]"], r"unknown strategy 'chen_sqrt'; did you mean chen_sqrtn"),
    (["experiment=max_batch_siz"], r"did you mean max_batch_size"),
    (["engine=locl"], r"did you mean local"),
    (["engine.name=loca"], r"did you mean local"),
    (["engine=slurm"], r"engine=slurm needs -m"),
    (["-m", "engine=slurm", "model=vgg16,vgg19"], r"pip install hydra-submitit-launcher|there is no srun here"),
    (["engine=ray", "engine.jobs=0"], r"engine\.jobs must be at least 1"),
    (["budgett=4GB"], r"unknown option 'budgett'; did you mean budget"),
    (["+points=4", "foo=1"], r"unknown option 'foo'"),
    (["model.bach=3"], r"model\.bach"),
    (["model.option.width=3"], r"model\.option: Key 'option' not in"),
    (["gpu.optins.width=3"], r"gpu.*optins"),
    (["dtype=bfloat17"], r"unknown dtype 'bfloat17'; did you mean bfloat16"),
    (["model=chain", "dtype=float32"], r"dtype=float32: synthetic graphs have no types"),
    (["graph=mirror.json", "dtype=float32"], r"dtype does not apply to graph=mirror\.json"),
    (["budget=-4"], r"budget: a size cannot be negative"),
    (["budget=4XB"], r"budget: cannot read '4XB' as a size"),
    (["budget=0.5"], r"budget: .*fraction of a byte"),
    (["budget=true"], r"budget: cannot read True"),
    (["points=1"], r"points must be at least 2"),
    (["points=many"], r"points: .*'many'"),
    (["threads=0"], r"threads must be at least 1"),
    (["threads=2000"], r"threads must be at most 1,024"),
    (["time_limit=0"], r"time_limit must be a positive"),
    (["time_limit=nan"], r"time_limit must be a positive"),
    (["batch_size=0"], r"batch_size must be at least 1"),
    (["scope=stagd"], r"did you mean staged"),
    (["accounting=exat"], r"did you mean exact"),
    (["granularity=layr"], r"did you mean layer"),
    (["solver=higs"], r"did you mean highs"),
    (["solver=highs", "strategies=chen_sqrtn"], r"none of the strategies chen_sqrtn takes it"),
    (["strategies=[]"], r"the list is empty; name at least one strategy"),
    (["device=moon"], r"unknown device 'moon'; known: cpu, cuda"),
    (["strategies=a,b"], r"need -m .*'strategies=\[a,b\]'"),
    (["model=vgg16,vgg19"], r"need -m"),
    (["-m", "model=vgg16,vgg91"], r"unknown model 'vgg91'"),
    (["-m", "model=vgg16", "budget=4GB,4XB"], r"cannot read '4XB'"),
    (["graph=none.json"], r"none\.json: no such file"),
    (["graph=a(b).json"], r"quotes"),
    (["graph=mirror.json", "cost=flops"], r"cost=flops: a graph file keeps the costs in it"),
    (["graph=mirror.json", "batch_size=3"], r"batch_size does not apply"),
    (["graph=mirror.json", "model.options.n=3"], r"model\.options\.n=3 does not apply to a graph file"),
    (["model=chain", "cost=flops"], r"synthetic graphs come with their costs"),
    (["model=torch"], r"needs target=package\.module:factory"),
    (["model=torch", "target=package"], r"must look like package\.module:factory"),
    (["model=torch_vgg16", "granularity=layer"], r"layer granularity is for Keras"),
    (["logger=wandb", "logger.mode=on"], r"did you mean online"),
    (["--modle"], r"unrecognized arguments: --modle"),
    (["nonsense"], r"cannot read 'nonsense'"),
    (["--config-name=x"], r"--config-name: run\.py has one configuration"),
    (["-m", "--config-dir", "/tmp"], r"--config-dir: run\.py has one configuration"),
    (["hydra=3"], r"unknown option 'hydra'"),
    (["hydra.mode=x"], r"hydra\.mode: Invalid value 'x'"),
    (["hydra/launcher=x"], r"Could not find 'hydra/launcher/x'"),
    (["graph=mirror.json", "budget=5000", "hydra.run.dir=/proc/x"], r"No such file or directory: /proc/x"),
    (["networks=[x]"], r"networks is for experiment=.*paper"),
    (["experiment=max_batch_size", "networks=[unet]"], r"networks is for experiment=.*paper"),
    (["levels=[x]"], r"levels is for experiment=monet"),
    (["experiment=max_batch_size", "model=chain", "batch_size=8"], r"leave batch_size out"),
    (["experiment=max_batch_size", "graph=mirror.json"], r"runs models"),
    (["experiment=paper", "levels=[none]"], r"levels is for experiment=monet"),
    (["parts=[x]"], r"parts is for experiment=.*paper"),
    (["-m", "experiment=paper,budget_sweep", "networks=[vgg16]"], r"networks is for experiment=.*paper"),
    (["experiment=benchmark", "graph=mirror.json"], r"experiment=benchmark has graphs of its own; leave out graph"),
    (["experiment=paper", "model=vgg16"], r"experiment=paper has graphs of its own; leave out model"),
    (["graph=mirror.json", "instances=/nonexistent"], r"instances=/nonexistent: no such folder"),
    (["instances=/"], r"name the file with graph="),
    (["scope=glob(*)"], r"scope=glob\(\*\): write the values one by one"),
    (["++input_size=[[1]]"], r"input_size must be positive numbers"),
    ([f"budget={'8' * 5000}"], r"^error: cannot read 'budget=8{53} \.\.\.': an integer of thousands of digits$"),
    ([f"budget='{'8' * 5000}'"], r"budget: a size cannot be larger than"),
    ([f"seed='{'8' * 5000}'"], r"^error: seed: .{,300}$"),
    (["graph=mirror.json", f"instances='{'8' * 5000}'"], r"File name too long"),
]


@pytest.mark.parametrize(("arguments", "expected"), MISTAKES, ids=[" ".join(m[0])[:60] for m in MISTAKES])
def test_a_mistake_is_one_line(
    here: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], expected: str
) -> None:
    assert re.search(expected, complaint(capsys, *arguments))
    assert not list(here.glob("runs/*"))


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


def test_a_single_budget(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["graph=mirror.json", "budget=5kB", "strategies=[checkpoint_all,chen_sqrtn,checkpoint_last]"]
    assert cli.main(arguments) == 0
    out = capsys.readouterr().out
    assert "3 solved now" in out
    for what in ("table.csv", "figures", "page.html"):
        (line,) = [line for line in out.splitlines() if line.endswith(what)]
        assert (here / line.split()[-1]).exists()
    (document,) = here.glob("runs/*/run.json")
    run = json.loads(document.read_text())
    assert len(run["keys"]) == 3
    assert (document.parent / run["store"] / "graphs" / f"{run['graph_sha256']}.json").is_file()
    rows = [pq.read_table(here / "runs/store/rows" / f"{key}.parquet").to_pylist()[0] for key in run["keys"]]
    assert {row["strategy"]: row["budget_bytes"] for row in rows} == dict.fromkeys(
        ("checkpoint_all", "chen_sqrtn", "checkpoint_last"), 5000
    )
    assert {path.name for path in here.iterdir()} == {"mirror.json", "runs"}  # nothing else is left behind


@pytest.mark.usefixtures("undrawn")
def test_a_repeated_run_solves_nothing_and_redraws(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for solved in (2, 0):
        assert cli.main(["graph=mirror.json", "budget=5kB", "strategies=[checkpoint_all,checkpoint_last]"]) == 0
        assert f"{solved} solved now" in capsys.readouterr().out
        (page,) = here.glob("runs/*/page.html")
        page.unlink()


def test_a_budget_below_one_operation_is_refused_before_any_solver(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["graph=mirror.json", "budget=2500"]) == 1
    captured = capsys.readouterr()
    assert captured.err.count("\n") == 1
    # A gradient reads a layer and the gradient before it: 3 x 1000 bytes; that much is also enough.
    assert "(grad4) alone needs 3.00 kB" in captured.err
    assert "smallest budget known feasible is 3.00 kB" in captured.err
    assert captured.err.count("grad4") == 1  # said once
    assert list((here / "runs").iterdir()) == []  # nothing was made, not even the run's folder


@pytest.mark.usefixtures("undrawn")
def test_no_plan_at_a_single_budget_is_an_error_for_the_shell_and_none_in_a_sweep(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["graph=mirror.json", "budget=3000", "strategies=checkpoint_all"]) == 1
    assert "NO_PLAN" in capsys.readouterr().out
    assert cli.main(["graph=mirror.json", "budget=sweep", "points=2", "strategies=checkpoint_all"]) == 0


@pytest.mark.long
@pytest.mark.usefixtures("undrawn")
def test_several_runs_at_once_and_instances(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = here / "elsewhere"
    folder.mkdir()
    (here / "mirror.json").rename(folder / "mirror.json")
    arguments = ["-m", "graph=mirror.json", f"instances={folder}", "budget=5kB,6000", "strategies=checkpoint_all"]
    assert cli.main(arguments) == 1  # 5 kB has no plan, 6 kB would need 7 kB
    assert len(list(here.glob("runs/*/run.json"))) == 2
    assert capsys.readouterr().out.count("page.html") == 2


def test_a_graph_file_with_a_cycle_and_a_folder_that_cannot_be_written_are_one_line(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (here / "runs").write_text("a file")
    assert "cannot make" in complaint(capsys, "graph=mirror.json", "budget=5kB")
    (here / "runs").unlink()
    document = json.loads((here / "mirror.json").read_text())
    document["edges"].append([3, 1])
    (here / "cyclic.json").write_text(json.dumps(document))
    assert "cyclic.json: edge" in complaint(capsys, "graph=cyclic.json", "budget=5kB")


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
    for line in run.stdout:
        if line.startswith("[1/"):
            break
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
    for path in kept:
        pq.read_table(path)
    wait_for(lambda: not processes_in(here))  # the kernel ends a worker with its parent
    assert cli.main([a.replace(",checkmate_milp", "") for a in HARD]) == 0
    assert "0 solved now" in capsys.readouterr().out


@pytest.mark.long
@pytest.mark.usefixtures("undrawn")
def test_wandb_gets_a_copy_offline(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("wandb")
    arguments = ["graph=mirror.json", "budget=7kB", "strategies=checkpoint_all", "logger=wandb"]
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
    said = complaint(capsys, "graph=mirror.json", "budget=7kB", "strategies=checkpoint_all", "logger=wandb")
    assert "pip install wandb" in said


def test_extraction_in_a_child_is_cached_by_what_determines_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = ModelSpec("chain", "synthetic", "remat.frontends.synthetic:chain", 2, options={"n": 3})
    graph = extract_in_child(spec, tmp_path)
    assert len(graph) == 7
    monkeypatch.setattr("remat.extraction._run", lambda command: pytest.fail("extracted again"))
    assert extract_in_child(spec, tmp_path).sha256() == graph.sha256()
    other = ModelSpec("chain", "synthetic", "remat.frontends.synthetic:chain", 3, options={"n": 3})
    with pytest.raises(BaseException, match="extracted again"):
        extract_in_child(other, tmp_path)


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
    heads = [json.loads(path.read_text()) for path in here.glob("runs/my_models-factory_v100_*/run.json")]
    assert [head["title"].startswith("my_models:factory, batch 4, 1.00 MB") for head in heads] == [True, True]
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


def test_a_crash_during_extraction_is_one_line(here: Path) -> None:
    Path("broken.py").write_text("import os\ndef net(**_):\n    os.write(2, b'out of luck\\n')\n    os.abort()\n")
    for target, says in (("broken:net", r"mine \(synthetic\) was killed by signal 6: out of luck"),
                         ("absent:net", "no module named 'absent'")):  # fmt: skip
        with pytest.raises(RematError, match=says):
            extract_in_child(ModelSpec("mine", "synthetic", target, 1), here / "cache")
    assert not (here / "cache").exists()


def test_a_mistake_in_the_users_module_is_placed(here: Path) -> None:
    """One line with the file and line of their code, not of ours."""
    (here / "mistaken.py").write_text(
        "def boom(**options):\n    raise KeyError('nothing here')\n\n\ndef calls_boom(**options):\n    return boom()\n"
    )
    (here / "unimportable.py").write_text("import json\n\nprint(undefined_name)\n")
    (here / "unreadable.py").write_text("def net(:\n")
    for target, said in (
        ("mistaken:calls_boom", r"target 'mistaken:calls_boom' .*nothing here.* \(mistaken\.py, line 2\)$"),
        ("unimportable:net", r"cannot be imported: NameError: .*undefined_name.* \(unimportable\.py, line 3\)$"),
        ("unreadable:net", r"cannot be imported: SyntaxError: .*\(unreadable\.py, line 1\)$"),
    ):
        with pytest.raises(RematError, match=said):
            extract_in_child(ModelSpec("mine", "synthetic", target, 1), here / "cache")


@pytest.mark.long
@pytest.mark.parametrize("name", ["hydra", "plotly"])
def test_a_missing_package_is_one_line(here: Path, name: str) -> None:
    """Whether it is needed at the start (a Python that `make setup` did not make) or only to draw."""
    (here / "absent" / name).mkdir(parents=True)
    (here / "absent" / name / "__init__.py").write_text(
        f'raise ModuleNotFoundError("No module named {name}", name="{name}")'
    )
    done = run_py(
        here, "graph=mirror.json", "budget=12kB", "strategies=checkpoint_all", PYTHONPATH=str(here / "absent")
    )
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("error: ")
    assert name in last
    assert "make setup" in last
