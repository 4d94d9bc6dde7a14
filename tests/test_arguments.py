"""A wrong name or number for any command under experiments/ is one line that says what to do."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from helpers import ROOT, refused

from experiments import arguments, device
from remat.errors import InvalidInput

MISTAKES = [
    (["nowhere", "--models", "gpt2_medum"], "unknown model 'gpt2_medum'; did you mean gpt2_medium"),
    (["nowhere", "--backends", "eagre"], "unknown backend 'eagre'; did you mean eager"),
    (["--device", "moon"], "unknown device 'moon'; known: cpu, cuda"),
    (["--size", "huge"], "unknown size 'huge'; known: cpu, gpu, tiny"),
    (["--memory", "8XB"], "cannot read '8XB' as a size; write e.g. 8GB"),
    (["--time-limit", "nan"], "'nan' is no positive number; write seconds"),
    (["--budgets", "0.8,-1"], "'-1' is no positive number; write fractions, e.g. 0.8,0.6"),
    (["--rounds", "-3"], "'-3' is not a positive integer"),
    (["--models", ","], "the list is empty; name at least one model"),
    (["--modle", "gpt2"], "unrecognized arguments: --modle; see python -m experiments"),
    (["nowhere", "--keep"], "nowhere holds no rows"),
]


@pytest.mark.parametrize(("given", "message"), MISTAKES, ids=[" ".join(given) for given, _ in MISTAKES])
def test_a_mistake_is_one_line(given: list[str], message: str, here: Path) -> None:
    with refused(re.escape(message)):
        device.main(given)
    assert not [path for path in here.rglob("*") if path.is_file()]


def test_the_shell_gets_a_line_and_a_code(capsys: pytest.CaptureFixture[str]) -> None:
    def main() -> int:
        raise InvalidInput("a mistake\nof two lines")

    with pytest.raises(SystemExit) as caught:
        arguments.run(main)
    assert caught.value.code == 1
    assert capsys.readouterr().err == "error: a mistake of two lines\n"
    with pytest.raises(SystemExit) as caught:
        arguments.run(lambda: 3)
    assert caught.value.code == 3


SWALLOWED = """
import signal, sys
from pathlib import Path
from experiments import arguments, store

def main():
    store.write_json(Path(sys.argv[1]), {"finished": 1})
    try:
        signal.raise_signal(signal.SIGINT)
    except KeyboardInterrupt:
        pass  # as a solve does, which returns its best plan
    store.write_json(Path(sys.argv[1]), {"finished": 2})

arguments.run(main)
"""


def test_a_result_that_was_interrupted_is_not_kept(tmp_path: Path) -> None:
    """A solve returns the best plan after Ctrl-C; a command must not keep it as a finished one, nor go on."""
    out = tmp_path / "results.json"
    done = subprocess.run([sys.executable, "-c", SWALLOWED, str(out)], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == arguments.EXIT_INTERRUPTED
    assert done.stderr.split("\n") == ["", arguments.STOPPED, ""]
    assert '"finished": 1' in out.read_text()


def test_a_reader_that_ends_early_ends_the_command_without_a_word() -> None:
    code = "from experiments import arguments\ndef main(): raise BrokenPipeError\narguments.run(main)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (1, "", "")
