"""From a `ModelSpec` to its graph, in this process or in a child.

The child (``remat._extract SPEC OUT``) is there because frameworks print, change global state and take seconds to
import; its output is captured. Results are cached by the spec, the installed versions and the source of the frontends.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import tempfile
from importlib import metadata
from pathlib import Path

import remat.errors
from remat import child
from remat.errors import InvalidInput, RematError, check_name, warn
from remat.files import digest_of_source, read_json, sealed, unsealed, write_text
from remat.frontends import synthetic
from remat.frontends.json import graph_from_dict, graph_to_dict, load_graph
from remat.frontends.spec import FRAMEWORKS, GRANULARITIES, ModelSpec
from remat.graph import Graph

_PACKAGES = ("torch", "transformers", "tensorflow", "tensorflow-cpu", "keras", "numpy")
# The cache's key covers the source of these targets: installed packages and this one.
_KNOWN_TARGETS = ("remat.", "keras.", "torchvision.", "transformers.")


def extract(spec: ModelSpec) -> Graph:
    """The uncosted graph of `spec` (every cost 0, `Operation.work` filled), in this process.

    Raises:
        InvalidInput: unknown framework or granularity, or a network that cannot be built.
        MissingPackage: the framework is not installed.
    """
    check_name("framework", spec.framework, FRAMEWORKS)
    check_name("granularity", spec.granularity, GRANULARITIES)
    if spec.framework == "synthetic":
        return synthetic.extract(spec)
    if spec.framework == "keras":
        from remat.tf.models import extract as extract_keras  # imports TensorFlow

        return extract_keras(spec)
    from remat.torch.frontend.graphs import extract as extract_torch  # imports PyTorch

    return extract_torch(spec)


def extract_in_child(spec: ModelSpec, cache_folder: str | os.PathLike[str] | None) -> Graph:
    """The uncosted graph of `spec`, from the cache or from a child process.

    A target in the user's own code is never cached, because its imports are not known.

    Raises:
        RematError: the child's error, in one line.
    """
    if cache_folder is None or not spec.target.startswith(_KNOWN_TARGETS):
        return _extract(spec)
    cached = Path(cache_folder, f"{spec.name}_{cache_key(spec)}.json")
    if cached.exists():
        try:
            return graph_from_dict(unsealed(read_json(cached), cached))
        except InvalidInput as error:
            warn(f"{error}; extracting the graph again")
    graph = _extract(spec)
    write_text(cached, json.dumps(sealed(graph_to_dict(graph))))
    return graph


def cache_key(spec: ModelSpec) -> str:
    """Hash of the spec, the frameworks' versions and the source of the frontends."""
    digest = hashlib.sha256(spec.to_json().encode())
    for name in _PACKAGES:
        try:
            digest.update(f"\0{name}={metadata.version(name)}".encode())
        except metadata.PackageNotFoundError:
            continue
    rooms = ("graph.py", "frontends/*.py", "torch/**/*.py", "tf/**/*.py")
    digest.update(f"\0{digest_of_source(Path(__file__).resolve().parent, rooms)}".encode())
    return digest.hexdigest()[:24]


def _extract(spec: ModelSpec) -> Graph:
    with tempfile.TemporaryDirectory(prefix="remat-extract-") as folder:
        spec_file, out = Path(folder, "spec.json"), Path(folder, "graph.json")
        write_text(spec_file, spec.to_json())
        code, complaint = _run(child.command("remat._extract", str(spec_file), str(out)))
        if code == 0 and out.is_file():
            return load_graph(out)
        reported = Path(f"{out}.error")
        if reported.is_file():
            error = read_json(reported)
            raise getattr(remat.errors, error["kind"], RematError)(error["message"])
    how = f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
    raise RematError(f"extracting {spec.name} ({spec.framework}) {how}: {complaint or 'it printed nothing'}")


def _run(command: list[str]) -> tuple[int, str]:
    """(exit code, last line of standard error) of a command; its process never outlives this call."""
    environment = child.environment({"TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": ""}, here=True)
    with tempfile.TemporaryFile() as errors:
        process = subprocess.run(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=errors, env=environment,
            start_new_session=True, check=False,
        )  # fmt: skip
        return process.returncode, child.last_line(errors)
