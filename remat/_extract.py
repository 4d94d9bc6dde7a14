"""``python -m remat._extract SPEC OUT``: the child process of `remat.extraction`."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from remat.errors import RematError, first_line
from remat.extraction import extract
from remat.files import write_text
from remat.frontends.json import save_graph
from remat.frontends.spec import ModelSpec, place_in_target


def main(spec_file: str, out: str) -> int:
    """Extract and save; an error meant for users goes to ``OUT.error`` as JSON."""
    os.environ.setdefault("KERAS_BACKEND", "tensorflow")
    spec = ModelSpec.from_json(Path(spec_file).read_text())
    try:
        save_graph(extract(spec), out)
    except RematError as error:
        place = place_in_target(error.__cause__, spec.target) if error.__cause__ else ""
        return _report(out, type(error).__name__, f"{error}{place}")
    except Exception as error:
        place = place_in_target(error, spec.target)
        if not place:  # not from the user's code: a developer needs the traceback
            raise
        return _report(out, "InvalidInput", f"target '{spec.target}' raised {first_line(error)}{place}")
    return 0


def _report(out: str, kind: str, message: str) -> int:
    write_text(f"{out}.error", json.dumps({"kind": kind, "message": message}))
    return 1


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
