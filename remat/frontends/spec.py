"""What to extract a graph from, as plain data: the interface between configuration and frontends."""

from __future__ import annotations

import importlib
import json
import sys
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from remat.errors import InvalidInput, unknown_name
from remat.graph import Graph

FRAMEWORKS = {
    "keras": "remat.frontends.keras",
    "torch": "remat.frontends.torch",
    "synthetic": "remat.frontends.synthetic",
}
GRANULARITIES = ("layer", "operation")


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """A network to extract; everything is JSON-ready, so that extraction can run in a child process.

    Attributes:
        name: of the network, e.g. ``vgg19``.
        framework: ``keras``, ``torch`` or ``synthetic``.
        target: ``package.module:factory``; called with `options`.
        batch_size: samples per step.
        input_size: shape of one sample; () lets the factory decide.
        granularity: ``layer`` (Keras only, the paper's) or ``operation``.
        accounting: ``exact`` or ``published``; under exact a layer graph's input batch is fixed.
        dtype: of parameters and activations.
        options: keyword arguments of the factory.
    """

    name: str
    framework: str
    target: str
    batch_size: int
    input_size: tuple[int, ...] = ()
    granularity: str = "operation"
    accounting: str = "exact"
    dtype: str = "float32"
    options: dict[str, Any] = field(default_factory=dict)

    def to_json(self) -> str:
        return json.dumps(asdict(self), sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> ModelSpec:
        data = json.loads(text)
        return cls(**data | {"input_size": tuple(data["input_size"])})


def load_target(target: str) -> Any:
    """The object that ``package.module:name`` names; raises `InvalidInput` with what is missing."""
    module_name, colon, attribute = target.partition(":")
    if not colon or not module_name or not attribute:
        raise InvalidInput(f"target '{target}' must look like package.module:factory")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        raise InvalidInput(f"target '{target}': no module named '{error.name}'") from None
    except (Exception, SystemExit) as error:  # the user's own module: anything can happen in it
        at = "" if isinstance(error, SyntaxError) else _place(error, lambda file: "importlib" not in file)
        raise InvalidInput(f"target '{target}' cannot be imported: {first_line(error)}{at}") from error
    if not hasattr(module, attribute):
        raise InvalidInput(f"target '{target}': module '{module_name}' has no '{attribute}'")
    return getattr(module, attribute)


def first_line(error: BaseException) -> str:
    """Kind and first line of an exception, for a message of one line."""
    text = (str(error).strip().splitlines() or [""])[0][:200]
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def place_in_target(error: BaseException, target: str) -> str:
    """`` (file.py, line 12)``: the innermost line of the target's own module that `error` came through, or nothing."""
    own = getattr(sys.modules.get(target.partition(":")[0]), "__file__", None)
    return _place(error, lambda file: file == own) if own else ""


def _place(error: BaseException, is_own: Callable[[str], bool]) -> str:
    frames = [f for f in traceback.extract_tb(error.__traceback__) if is_own(f.filename)]
    return f" ({Path(frames[-1].filename).name}, line {frames[-1].lineno})" if frames else ""


def extract(spec: ModelSpec) -> Graph:
    """The uncosted graph of `spec` (every cost 0, `Operation.work` filled), in this process.

    Raises:
        InvalidInput: unknown framework or granularity, or a network that cannot be built.
        MissingPackage: the framework is not installed.
    """
    if spec.framework not in FRAMEWORKS:
        raise unknown_name("framework", spec.framework, FRAMEWORKS)
    if spec.granularity not in GRANULARITIES:
        raise unknown_name("granularity", spec.granularity, GRANULARITIES)
    return importlib.import_module(FRAMEWORKS[spec.framework]).extract(spec)
