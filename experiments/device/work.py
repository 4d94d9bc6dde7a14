"""``python -m experiments.device.work``: one step of the first or the third command for one case.

It is a process of its own, because an error of CUDA leaves a process that cannot go on, and so that each case begins
with an empty device.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from experiments.device.folder import CAPTURE, EXECUTE, Folder
from remat.errors import RematError


def main(given: str) -> None:
    """Do the work that the JSON object `given` describes."""
    job = json.loads(given)
    if job["work"] == "describe":
        from experiments.device.subject import describe_device

        print(json.dumps(describe_device(job["device"], job["size"])))
        return
    folder = Folder(Path(job["folder"]))
    case = folder.case(job["model"], job["backend"])
    if job["work"] == CAPTURE:
        from experiments.device.capture import capture

        capture(folder, case, job["device"], job["size"], job["cost"])
        return
    from experiments.device.execute import execute, largest_batches

    if job["work"] == EXECUTE:
        execute(folder, case, job["device"], job["size"], job["rounds"], job["run"])
    else:
        within = job["memory_bytes"], job["tries"]
        largest_batches(folder, case, job["device"], job["size"], job["rounds"], *within, job["run"])


if __name__ == "__main__":
    try:
        main(sys.argv[1])
    except RematError as refused:
        sys.exit(" ".join(str(refused).split()))  # the last line of stderr, which the command shows
