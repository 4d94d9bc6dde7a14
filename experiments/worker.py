"""The process of one case: ``python -m experiments.worker case.json rows.json``. It imports what the case needs."""

import importlib
import json
import sys
from pathlib import Path

from experiments.registry import FOLDER, Row, module_of
from remat.errors import RematError
from remat.files import read_json, write_text

REFUSED = 3  # exit code where the case cannot be measured, for a reason of one line


def work(asked: Path, made: Path) -> int:
    """Measure the case of a file; its rows become another file."""
    case = read_json(asked)
    if Path(case["file"]).parent != FOLDER:
        module_of(Path(case["file"]))  # it is no module of a package
    measure = getattr(importlib.import_module(case["module"]), case["function"])
    rows = list[Row]()
    try:
        for row in measure(**case["what"]):
            rows += [row]  # one by one: those before an error are kept
    except RematError as error:
        print(" ".join(str(error).split()), file=sys.stderr)
        return REFUSED
    finally:
        write_text(made, json.dumps(rows))
    return 0


if __name__ == "__main__":
    sys.exit(work(*map(Path, sys.argv[1:])))
