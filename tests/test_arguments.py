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
    (["--device", "moon"], "unknown device 'moon'; known: cpu, cuda"),
    (["--memory", "8XB"], "cannot read '8XB' as a size; write e.g. 8GB"),
    (["--time-limit", "nan"], "'nan' is no positive number; write seconds"),
    (["--budgets", "0.8,-1"], "'-1' is no positive number; write fractions, e.g. 0.8,0.6"),
    (["--rounds", "-3"], "'-3' is not a positive integer"),
    (["--models", ","], "the list is empty; name at least one model"),
    (["--modle", "gpt2"], "unrecognized arguments: --modle; see python -m experiments"),
    (["nowhere", "--keep"], "nowhere holds no rows"),
]


def test_a_mistake_is_one_line(here: Path) -> None:
    for given, message in MISTAKES:
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
UNREAD = "from experiments import arguments\ndef main(): raise BrokenPipeError\narguments.run(main)"


def test_an_interrupted_result_is_not_kept_and_a_reader_that_ends_early_hears_no_word(tmp_path: Path) -> None:
    """A solve returns the best plan after Ctrl-C; a command must not keep it as a finished one, nor go on."""
    out = tmp_path / "results.json"
    ends = ((SWALLOWED, arguments.EXIT_INTERRUPTED, f"\n{arguments.STOPPED}\n"), (UNREAD, 1, ""))
    for code, status, said in ends:
        done = subprocess.run([sys.executable, "-c", code, str(out)], cwd=ROOT, capture_output=True, text=True)
        assert (done.returncode, done.stdout, done.stderr) == (status, "", said)
    assert '"finished": 1' in out.read_text()
