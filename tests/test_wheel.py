"""The wheel: built, installed and used where there is no checkout."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import textwrap
import venv
import zipfile
from pathlib import Path

import pytest
from helpers import ROOT

SOLVE = """
    import remat
    from remat.bounds.price import shadow_price
    from remat.cost import load_gpu
    from remat.frontends import synthetic

    graph = synthetic.layered(n=40)
    budget = int(1.2 * remat.min_budget(graph, time_limit_s=5).bytes)
    found = remat.solve(graph, budget, time_limit_s=20)
    assert found.plan is not None, found
    proof = shadow_price(graph, budget).certificate
    assert remat.verify_bound(graph, proof) == proof.bound <= found.cost
    assert remat.simulate(graph, found.plan).cost == found.cost
    assert load_gpu("cpu").name == "cpu"
    known = remat.zoo.graph("unet_b11_10GB")
    assert remat.simulate(known, remat.zoo.load("unet_b11_10GB")).peak_bytes <= 10 * 2**30
    try:
        remat.solve(graph, budget, "chen_sqrtn")
    except remat.UnknownName as error:
        assert "pip install -e baselines, in a checkout" in str(error), error
    else:
        raise AssertionError("baselines without the checkout")
"""
TRAIN = """
    import torch
    import remat.torch as rt
    from remat import zoo
    from remat.frontends.spec import ModelSpec, load_target
    from remat.torch.frontend import build

    spec = ModelSpec(**zoo.describe("vit_b16_0.6", "torch")["made_from"]["spec"])
    model, (x,), _ = build.build(spec, load_target(spec.target), "cpu")
    torch.manual_seed(0)
    x = torch.randn(x.shape)
    module = rt.rematerialize(model.train(), (x,), plan="zoo:vit_b16_0.6")
    assert any(module.plan.recomputed)
    loss = module(x).square().mean()
    loss.backward()
    assert all(p.grad is not None for p in model.parameters())
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of this checkout."""
    source, folder = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for name in ("pyproject.toml", "README.md", "LICENSE"):  # a copy: the build writes beside them
        shutil.copy(ROOT / name, source)
    shutil.copytree(ROOT / "remat", source / "remat", ignore=shutil.ignore_patterns("__pycache__"))
    pip(sys.executable, "wheel", "--no-deps", "--wheel-dir", str(folder), str(source))
    return next(folder.glob("remat-*.whl"))


def pip(python: str | Path, *arguments: str) -> None:
    done = subprocess.run(
        [str(python), "-m", "pip", "--quiet", *arguments], text=True, capture_output=True, check=False, cwd="/"
    )
    assert done.returncode == 0, done.stderr


def run(python: str | Path, script: str, folder: Path, *flags: str, **variables: str) -> None:
    """Run a script outside of the checkout."""
    inherited = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [str(python), *flags, "-W", "ignore", "-c", textwrap.dedent(script)], text=True, capture_output=True,
        cwd=folder, env=inherited | variables, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]


def test_the_wheel_holds_one_package(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.partition("/")[0] for name in names if ".dist-info" not in name} == {"remat"}
    for file in ("cost/gpus/v100.json", "schemas/remat-graph-1.json", "tf/_heap.c", "zoo/plans/index.json"):
        assert f"remat/{file}" in names


def test_the_wheel_works_beside_the_packages_of_the_environment(wheel: Path, tmp_path: Path) -> None:
    """Site-packages of the environment, less the editable checkout, plus the installed wheel."""
    installed, packages = tmp_path / "installed", tmp_path / "packages"
    pip(sys.executable, "install", "--no-deps", "--target", str(installed), str(wheel))
    packages.mkdir()
    for entry in Path(sysconfig.get_path("purelib")).iterdir():
        if not entry.name.lower().startswith(("remat", "__editable__")) and entry.suffix != ".pth":
            (packages / entry.name).symlink_to(entry)
    path = f"{installed}{os.pathsep}{packages}"
    guard = f"import remat\nassert remat.__file__.startswith({str(installed)!r}), remat.__file__\n"
    for script in (SOLVE, TRAIN):
        run(sys.executable, guard + textwrap.dedent(script), tmp_path, "-S", PYTHONPATH=path)


@pytest.mark.slow
def test_the_wheel_resolves_and_solves_from_nothing_and_numpy_and_torch_alone_follow_a_plan(
    wheel: Path, tmp_path: Path
) -> None:
    for packages, script in (([str(wheel)], SOLVE), (["numpy", "torch"], TRAIN)):
        environment = tmp_path / packages[-1].rpartition("/")[2]
        venv.create(environment, with_pip=True)
        python = environment / "bin" / "python"
        pip(python, "install", "--constraint", str(ROOT / "requirements.txt"), *packages)
        if script is TRAIN:
            pip(python, "install", "--no-deps", str(wheel))
        listed = subprocess.run([python, "-m", "pip", "list"], text=True, capture_output=True, check=True).stdout
        absent = ("hydra", "matplotlib", "plotly", "cvxpy", "pyarrow", "highspy" if script is TRAIN else "torch")
        assert not [name for name in absent if name in listed.lower()]
        run(python, script, tmp_path)
