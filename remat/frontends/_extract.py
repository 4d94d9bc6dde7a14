"""``python -m remat.frontends._extract SPEC OUT``: the other side of `remat.frontends.subprocess`."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from remat.errors import RematError
from remat.frontends.json import save_graph
from remat.frontends.spec import ModelSpec, extract


def main(spec_file: str, out: str) -> int:
    """Extract and save; an error meant for users goes to ``OUT.error`` as JSON."""
    os.environ.setdefault("KERAS_BACKEND", "tensorflow")
    try:
        save_graph(extract(ModelSpec.from_json(Path(spec_file).read_text())), out)
    except RematError as error:
        Path(f"{out}.error").write_text(json.dumps({"kind": type(error).__name__, "message": str(error)}))
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
