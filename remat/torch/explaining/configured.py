"""Language models from a configuration of transformers, without weights: `explain --config config.json`."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from remat.errors import InvalidInput, MissingPackage, shortened, unknown_name
from remat.files import read_json
from remat.frontends.spec import DTYPES
from remat.torch.explaining.training import Training

LENGTH = 2048  # tokens, where neither the caller nor the table of positions says otherwise
KINDS = ("CAUSAL_LM", "MASKED_LM", "SEQ_TO_SEQ_CAUSAL_LM")  # of transformers' tables of models


Made = tuple[nn.Module, tuple[Tensor, ...], Callable[[Tensor], Tensor]]  # model, sample arguments, loss


def from_config(path: str | PathLike[str]) -> Callable[..., Made]:
    """A factory of the language model that a configuration describes, for `explain`. Weights are not read.

    Its options are ``batch_size``, ``length`` (tokens), ``dtype`` (by default the configuration's) and ``lora``. The
    model computes transformers' own loss; it keeps no cache of keys and values.

    Args:
        path: of a ``config.json``, or of the folder with it.

    Raises:
        InvalidInput: no configuration of a language model that transformers knows.
    """
    path = Path(path)
    file = path / "config.json" if path.is_dir() else path
    content = read_json(file)
    if not isinstance(content, dict) or not isinstance(content.get("model_type"), str):
        raise InvalidInput(f'{file} is no configuration of transformers: it names no model_type, e.g. "llama"')
    kind = _class_of(content, file)
    dtype = content.get("dtype") or content.get("torch_dtype") or "float32"
    if dtype not in DTYPES:
        raise unknown_name("dtype", dtype, DTYPES)
    try:
        config = kind.config_class.from_dict(_unquantized(content))
        text = config.get_text_config()
        positions = getattr(text, "max_position_embeddings", None)
    except Exception as error:  # any value may be wrong in any way
        raise InvalidInput(f"{file} cannot be used: {shortened(error)}") from error
    length = min(LENGTH, positions) if isinstance(positions, int) and positions > 0 else LENGTH
    model_of = cache(partial(_model, kind, config, file))

    def language_model(batch_size: int, length: int, dtype: str, lora: int | None) -> Made:
        if dtype not in DTYPES:
            raise unknown_name("dtype", dtype, DTYPES)
        model = model_of(dtype, lora)
        if model.n_positions is not None and length > model.n_positions:
            raise InvalidInput(f"{file} has a table of {model.n_positions:,} positions; length={length:,} needs more")
        ids = torch.zeros(batch_size, length, dtype=torch.long)
        return model, (ids, ids.clone()), _its_output

    made = partial(language_model, batch_size=1, length=length, dtype=dtype, lora=None)
    made.__name__ = f"{kind.__name__} of {path.resolve().name}"  # pyright: ignore[reportAttributeAccessIssue]
    return made


class LanguageModel(nn.Module):
    """A model of transformers as a function of tokens and labels.

    Attributes:
        n_positions: the longest sequence for which it has positions; None: any.
    """

    def __init__(self, model: Any):
        super().__init__()
        self.model = model
        learned = [m for name, m in model.named_modules() if isinstance(m, nn.Embedding) and _names_positions(name)]
        most = getattr(model.config.get_text_config(), "max_position_embeddings", None)
        self.n_positions: int | None = most if learned else None

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        return self.model(input_ids=ids, labels=labels).loss


def _its_output(loss: Tensor) -> Tensor:
    return loss


def _names_positions(name: str) -> bool:
    last = name.rpartition(".")[2]
    return "position" in last or last == "wpe"


def _model(kind: Any, config: Any, file: Path, dtype: str, lora: int | None) -> LanguageModel:
    before = torch.get_default_dtype()
    config.use_cache = False
    try:
        torch.set_default_dtype(getattr(torch, dtype))
        with torch.device("meta"):
            model = LanguageModel(kind(config).train())
    except Exception as error:  # of sizes that do not go together, for example
        raise InvalidInput(f"{file} makes no {kind.__name__}: {shortened(error)}") from error
    finally:
        torch.set_default_dtype(before)
    Training(lora=lora).prepare(model)
    return model


def _class_of(content: dict[str, Any], file: Path) -> Any:
    """The class of the model: the one that the configuration names, or its type's language model."""
    try:
        import transformers
        from transformers.models.auto import modeling_auto

        transformers.logging.set_verbosity_error()  # it warns of token numbers that no step reads
    except ModuleNotFoundError as error:
        raise MissingPackage("transformers is not installed: pip install 'remat[torch]'") from error
    tables = [getattr(modeling_auto, f"MODEL_FOR_{kind}_MAPPING_NAMES") for kind in KINDS]
    kind = content["model_type"]
    known = [name for table in tables for name in _names(table.get(kind))]
    if not known:
        types = {name for table in tables for name in table}
        if kind in modeling_auto.MODEL_MAPPING_NAMES:
            raise InvalidInput(f"{file}: {kind} is no language model; write a factory that makes it with its inputs")
        raise unknown_name("model_type of a language model", kind, types)
    given = content.get("architectures")
    named = given if isinstance(given, list) else [given]
    found = next((name for name in named if name in known), known[0])
    return getattr(transformers, found)


def _names(found: str | tuple[str, ...] | None) -> tuple[str, ...]:
    return () if found is None else (found,) if isinstance(found, str) else found


def _unquantized(content: dict[str, Any]) -> dict[str, Any]:
    """Training counts the types of `precision`, not those in which weights are stored."""
    return {name: value for name, value in content.items() if name != "quantization_config"}
