"""The document's example is executed as written, in a package of its own, without edits elsewhere."""

from __future__ import annotations

import os
import re
import shlex
from pathlib import Path

import pytest
from helpers import ROOT, blocks_of, install_package, run_python

DOCUMENT = ROOT / "docs" / "how-to" / "add-a-strategy.md"

USE = """
import warnings, remat
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    assert {"keep_every_kth", "checkpoint_all"} <= {*remat.strategies()}, remat.strategies()
assert len(caught) == 1, caught
assert "my_package.broken" in str(caught[0].message) and "no_such_module" in str(caught[0].message)
# Five unit layers with mirrored gradients: deps as in Checkmate's layer graphs.
n = 5
deps = [[i - 1] if i else [] for i in range(n)] + [[n - 1]]
for i in range(n - 1, -1, -1):
    deps.append([i, n] if i == n - 1 else [i, i + 1, 2 * n - i - 1])
size = [10] * n + [0] + [10] * n
graph = remat.Graph.from_nodes("chain5", deps, size, [1] * (2 * n + 1), loss=n,
                               backward=[False] * (n + 1) + [True] * n)
members = remat.family(graph, "keep_every_kth")
assert [m.parameters["k"] for m in members] == list(range(1, 9))
assert members[0].cost == 11, "k=1 keeps everything"
assert members[1].cost == 13, "k=2 drops layers 1 and 3 and rebuilds each once"
assert remat.solve(graph, 10**6, "keep_every_kth", largest=1).cost == 11
# k=1 needs 70 bytes: outputs 0 to 4 and gradients 4 and 3 while gradient 3 runs; k=2 has dropped output 1.
assert remat.solve(graph, 70, "keep_every_kth").cost == 11
tight = remat.solve(graph, 69, "keep_every_kth")
assert (tight.cost, tight.peak_bytes) == (13, 60), tight
"""

ONE = """
import sys
from remat.registry import get_strategy, import_alone
import_alone("chen_sqrtn", "baselines.chen_sqrtn")
assert get_strategy("chen_sqrtn").is_installed
assert "remat.solvers.search" not in sys.modules
import_alone("griewank", "baselines.chen_sqrtn")
assert get_strategy("griewank").name == "griewank", "not there: all are imported"
assert "remat.solvers.search" in sys.modules
"""

# An experiment without the committed rows, which take seconds to draw.
ALONE = """
import sys
from pathlib import Path
from experiments import cli, store
store.KEPT_FOLDER = Path("results")
(times, *arguments), sys.argv = sys.argv[1:], ["run.py"]
for _ in range(int(times)):
    assert cli.main(arguments) == 0
"""


def test_a_process_that_runs_one_strategy_imports_no_other(tmp_path: Path) -> None:
    run_python(ONE, cwd=tmp_path)


def test_documented_strategy_is_found_and_runs_beside_a_broken_plugin_that_is_named(tmp_path: Path) -> None:
    code = blocks_of(DOCUMENT)[0]
    assert len([line for line in code.splitlines() if line.strip()]) < 40
    toml = re.search(r'```toml\n\[project.entry-points."(.*?)"\]\n(\w+) = "(.*?)"\n```', DOCUMENT.read_text())
    install_package(tmp_path, code, f"[{toml[1]}]\n{toml[2]} = {toml[3]}\nbroken = my_package.broken\n")
    (tmp_path / "my_package" / "broken.py").write_text("import no_such_module\n")
    run_python(USE, cwd=tmp_path)


@pytest.mark.long
def test_an_outside_strategy_is_in_the_leaderboard(tmp_path: Path) -> None:
    install_package(tmp_path, blocks_of(DOCUMENT)[0], "[remat.strategies]\nmine = my_package.heuristics\n")
    path = os.pathsep.join(filter(None, (str(tmp_path), str(ROOT), os.environ.get("PYTHONPATH"))))

    (command,) = re.findall(r"python run.py (experiment=benchmark.*)", DOCUMENT.read_text())
    small = [*shlex.split(command), "benchmark=quick", "networks=[chain_n12]"]
    out = run_python(ALONE, "1", *small, cwd=tmp_path, PYTHONPATH=path)
    assert "1 cases measured now" in out
    assert re.search(r"^\| \d+ \| keep_every_kth \| ", out, re.MULTILINE), out
    # Its file changes: what it said before is out of date, and no other strategy runs again.
    heuristics = tmp_path / "my_package" / "heuristics.py"
    heuristics.write_text(heuristics.read_text().replace("largest: int = 8", "largest: int = 1"))
    out = run_python(ALONE, "2", *small, cwd=tmp_path, PYTHONPATH=path)
    assert re.findall(r"^(\d) cases measured now", out, re.MULTILINE) == ["1", "0"]
