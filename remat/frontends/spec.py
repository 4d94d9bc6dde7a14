"""The network to extract a graph from, as plain data: the interface between configuration and frontends."""

from __future__ import annotations

import importlib
import inspect
import json
import sys
import traceback
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from remat.errors import InvalidInput, first_line, plain

FRAMEWORKS = ("keras", "torch", "synthetic")
GRANULARITIES = ("layer", "operation")
DTYPES = ("bfloat16", "float16", "float32", "float64")


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """A network to extract; all fields fit JSON, so that extraction can run in a child process.

    Attributes:
        name: of the network, e.g. ``vgg19``; for a user's own model its target.
        framework: ``keras``, ``torch`` or ``synthetic``.
        target: ``package.module:factory``; called with `options`.
        batch_size: samples per step.
        input_size: shape of one sample; () lets the factory decide.
        granularity: ``layer`` (Keras only, the paper's) or ``operation``.
        accounting: ``exact`` or ``published``; under ``exact`` the input batch of a layer graph is in the fixed bytes.
        dtype: cast parameters and activations to it, one of `DTYPES`; None leaves them as the factory made them.
        options: keyword arguments of the factory.
    """

    name: str
    framework: str
    target: str
    batch_size: int
    input_size: tuple[int, ...] = ()
    granularity: str = "operation"
    accounting: str = "exact"
    dtype: str | None = None
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def graph_name(self) -> str:
        """Name of the network's graph."""
        return graph_name(self.name, self.batch_size)

    def to_json(self) -> str:
        return json.dumps(asdict(self), sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> ModelSpec:
        data = json.loads(text)
        return cls(**data | {"input_size": tuple(data["input_size"])})


def graph_name(model: str, batch_size: int) -> str:
    """``vgg19_b256`` for a configured network, ``my_models:factory, batch 4`` for one named by its target."""
    return f"{model}, batch {batch_size}" if ":" in model else f"{model}_b{batch_size}"


def check_options(spec: ModelSpec, factory: Callable[..., Any], arguments: Mapping[str, Any]) -> dict[str, Any]:
    """All arguments of ``factory(**arguments)``, defaults included; {} where Python cannot tell.

    Raises:
        InvalidInput: an option that the factory does not take, or one that it needs.
    """
    try:
        signature = inspect.signature(factory)
    except ValueError:  # the factory is not written in Python
        return {}
    try:
        bound = signature.bind(**arguments)
    except TypeError as error:
        raise InvalidInput(f"target '{spec.target}': {error}; {_options_of(signature)}") from error
    bound.apply_defaults()
    return bound.arguments


def _options_of(signature: inspect.Signature) -> str:
    """The options that a user can set on the command line, with their defaults."""
    settable = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    given = ("batch_size", "input_size", "input_shape", "weights", "name")  # frontends set these
    options = [p for p in signature.parameters.values() if p.kind in settable and p.name not in given]
    shown = [f"{p.name}={'...' if p.default is p.empty else p.default!s:.30}" for p in options]
    return (
        f"options of the factory (of a run: model.options.NAME): {', '.join(shown)}"
        if shown
        else "the factory takes no options"
    )


def load_target(target: str) -> Any:
    """The object that ``package.module:name`` names; raises `InvalidInput`, naming the missing part."""
    module_name, colon, attribute = target.partition(":")
    if not colon or not module_name or not attribute:
        raise InvalidInput(f"target '{plain(target)}' must look like package.module:factory")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        raise InvalidInput(f"target '{target}': no module named '{error.name}'") from None
    except (Exception, SystemExit) as error:  # the user's own module can raise anything
        at = "" if isinstance(error, SyntaxError) else _place(error, lambda file: "importlib" not in file)
        raise InvalidInput(f"target '{target}' cannot be imported: {first_line(error)}{at}") from error
    if not hasattr(module, attribute):
        raise InvalidInput(f"target '{target}': module '{module_name}' has no '{attribute}'")
    return getattr(module, attribute)


def place_in_target(error: BaseException, target: str) -> str:
    """`` (file.py, line 12)``: the innermost line of the target's own module in the traceback of `error`, or ''."""
    own = getattr(sys.modules.get(target.partition(":")[0]), "__file__", None)
    return _place(error, lambda file: file == own) if own else ""


def _place(error: BaseException, is_own: Callable[[str], bool]) -> str:
    frames = [f for f in traceback.extract_tb(error.__traceback__) if is_own(f.filename)]
    return f" ({Path(frames[-1].filename).name}, line {frames[-1].lineno})" if frames else ""
