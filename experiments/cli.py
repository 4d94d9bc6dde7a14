"""The command line: finds every typing mistake before Hydra and any framework start; then Hydra runs."""

import argparse
import contextlib
import importlib.util
import os
import shutil
import sys
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import NoReturn

import hydra
from hydra import compose, initialize_config_dir
from hydra._internal.utils import get_args_parser  # the flags of Hydra 1.3; checked with 1.3.8
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException

from experiments.arguments import complain, exit_code, one_of
from experiments.config import CONF_FOLDER, GROUPS, Config, group_options, keys_of, register
from experiments.registry import COMMON, experiments, listed
from experiments.settings import OF_A_MODEL, RUNS_FOLDER, Settings, read_settings
from remat.errors import InvalidInput, MissingPackage, RematError, plain, shortened, unknown_name

_KEYS = tuple(Config.__dataclass_fields__)
_ONLY_IN = ("networks", "levels", "parts")  # keys that only some experiments read
_OF_A_GRAPH = {"model", "graph", *OF_A_MODEL}
SLURM_LOGS = RUNS_FOLDER / ".submitit"  # where hydra-submitit-launcher writes them


def main(argv: Sequence[str]) -> int:
    """Run the command line `argv` (without the program's name); returns the exit code."""
    return exit_code(lambda: _main(list(argv)))


def _main(argv: list[str]) -> int:
    register()
    arguments = _parse_flags(argv)
    if arguments.help:
        from experiments.help import help_text

        print(help_text())
        return 0
    own = _own_keys(arguments.overrides)
    overrides = [_as_hydra(text, own) for text in arguments.overrides]
    argv = [_as_hydra(text, own) for text in argv]
    if arguments.overrides or not (arguments.hydra_help or arguments.info or arguments.shell_completion):
        check(overrides, multirun=arguments.multirun)
    codes: list[int] = []

    def task(cfg: DictConfig) -> None:
        codes.append(_run_one(cfg))
        if codes[-1] and cfg.engine.name == "slurm":  # this is another process: `main` does not see its `codes`
            raise RematError(f"a run failed; its output is under {SLURM_LOGS}, job {HydraConfig.get().job.id}")

    os.environ["HYDRA_FULL_ERROR"] = "1"  # errors come here; otherwise Hydra prints them, most with a traceback
    if "engine=slurm" in overrides:
        print(f"one SLURM job for each run; their output is under {SLURM_LOGS}")
    sys.argv = [sys.argv[0], *argv]
    try:
        hydra.main(version_base="1.3", config_path=str(CONF_FOLDER), config_name="config")(task)()
    except (HydraException, OmegaConfBaseException) as error:
        raise _as_line(error) from None
    except Exception as error:
        if not type(error).__module__.startswith("submitit"):
            raise
        raise RematError(f"engine=slurm: {shortened(error, 500)}") from None  # refused, killed, or out of time
    return max(codes, default=0)


def _as_line(error: Exception) -> InvalidInput:
    """The first line of an error of Hydra, with the key if it is known; of a group's values, the lines behind it."""
    cause = error.__cause__ if isinstance(error.__cause__, OmegaConfBaseException) else error
    key = getattr(cause, "full_key", None)
    lines = [line.strip() for line in str(cause).strip().splitlines() or [""]]
    line = plain(" ".join(lines[:3] if lines[0].endswith("composing config:") else lines[:1]), 300)
    return InvalidInput(f"{key}: {line}" if key else line)


def _as_hydra(text: str, own: Collection[str]) -> str:
    """An override in Hydra's form: options of strategies, factories and experiments need ``++``, because the schema
    lacks them.

    Args:
        own: keys of the experiment's own.
    """
    if text.partition("=")[0] in own:
        return f"++keys.{text}"
    return f"++{text}" if text.startswith(("options.", "model.options.")) else text


def _own_keys(overrides: Sequence[str]) -> set[str]:
    """Keys of the registered experiment that `overrides` choose, as far as the schema lacks them."""
    chosen = {value for key, _, value in (text.partition("=") for text in overrides) if key == "experiment"}
    return {key for name in chosen & experiments().keys() for key in experiments()[name].keys} - {*_KEYS}


def _run_one(cfg: DictConfig) -> int:
    """Run one configuration; an error ends this run, not the others of a multirun."""
    try:
        from experiments.running import run

        experiment = str(HydraConfig.get().runtime.choices.get("experiment"))
        return run(cfg, read_settings(cfg, solves=_solves([experiment])), experiment)
    except (RematError, OSError) as error:
        return complain(error)
    except ModuleNotFoundError as error:  # e.g. plotly: only drawing needs it
        return complain(MissingPackage(f"{error}; install it, or use .venv/bin/python after `make setup`"))
    finally:
        with contextlib.suppress(OSError):  # Hydra made the folder; it stays if the run wrote something
            Path(HydraConfig.get().runtime.output_dir).rmdir()


def _parse_flags(argv: list[str]) -> argparse.Namespace:
    parser = get_args_parser()

    def refuse(message: str) -> NoReturn:
        raise InvalidInput(f"{message}; see run.py --help")

    parser.error = refuse  # type: ignore[method-assign]
    arguments = parser.parse_args(argv)
    for flag in ("config_name", "config_path", "config_dir", "package", "experimental_rerun"):
        if getattr(arguments, flag) is not None:
            refuse(f"--{flag.replace('_', '-')}: run.py has one configuration; write KEY=VALUE")
    return arguments


def check(overrides: Sequence[str], *, multirun: bool) -> list[Settings]:
    """Check every value on the command line; returns the settings of each checked configuration.

    A multirun has lists of values. Each value is checked once, together with the first value of every other list, not
    in all combinations.

    Raises:
        InvalidInput: one line; for an unknown name it gives the nearest known ones.
    """
    parsed = [_parse(text) for text in overrides]
    variants: list[list[str]] = []
    chosen = [text for override in parsed if override.key_or_group == "experiment" for text in _values(override)]
    for text in chosen:  # first: a wrong name makes its keys unknown, too
        _check_option(_parse(text), text)
    known = _known_keys(chosen)
    for override in parsed:
        _check_key(override, known)
        key, texts = override.key_or_group, _values(override)
        if len(texts) > 1 and not multirun:
            as_list = f"; for one run with all of them write '{key}=[{','.join(t.partition('=')[2] for t in texts)}]'"
            raise InvalidInput(
                f"{override.input_line}: several values need -m (one run each){as_list if key == 'strategies' else ''}"
            )
        variants.append(texts)
    for override, texts in zip(parsed, variants, strict=True):
        for text in texts:
            _check_option(override, text)
    _check_experiments(parsed)
    if "engine=slurm" in overrides:
        _check_slurm(parsed, multirun=multirun)
    first = [texts[0] for texts in variants]
    settings = [_compose(first)]
    for i, texts in enumerate(variants):
        settings += [_compose([*first[:i], text, *first[i + 1 :]]) for text in texts[1:]]
    for one in settings:
        _check_applies(parsed, one)
    _check_runs_folder()
    return settings


def _parse(text: str) -> Override:
    try:
        return OverridesParser.create().parse_override(text)
    except HydraException as error:
        reason = str(error).splitlines()[0]
        raise InvalidInput(f"cannot read '{plain(text)}' ({plain(reason, 200)}); values with special characters need "
                           f"quotes: 'key=\"value\"'") from None  # fmt: skip
    except ValueError:  # the one left: Python refuses integers of thousands of digits
        raise InvalidInput(f"cannot read '{plain(text)} ...': an integer of thousands of digits") from None


def _known_keys(chosen: Sequence[str]) -> set[str]:
    """Keys to offer in place of an unknown one: what the chosen experiments read."""
    listed = [each for name, each in experiments().items() if f"experiment={name}" in chosen]
    own = {key for each in listed for key in each.keys}
    if listed and not any(each.takes_settings for each in listed):
        return {*own, *COMMON, "engine"}
    return {*_KEYS, *GROUPS, *own}


def _check_key(override: Override, known: Collection[str]) -> None:
    key = override.key_or_group
    top = key.split(".")[0]
    if (top.split("/")[0] == "hydra" and key != "hydra") or top in _KEYS or top in GROUPS:
        return
    if key not in known and (readers := _readers(key)):
        raise InvalidInput(f"{key} is for experiment={' or '.join(readers)}; leave it out")
    raise unknown_name("option", key, known)


def _readers(key: str) -> list[str]:
    """The experiments that read a key."""
    return [name for name, each in experiments().items() if key in each.keys]


def _values(override: Override) -> list[str]:
    """The override with each value that a multirun would give it."""
    if not override.is_sweep_override():
        return [override.input_line or ""]
    prefix = (override.input_line or "").partition("=")[0]
    try:
        return [f"{prefix}={value}" for value in override.sweep_string_iterator()]
    except HydraException:  # of glob(*): which names there are depends on Hydra's files, not on ours
        raise InvalidInput(f"{override.input_line}: write the values one by one, e.g. {prefix}=A,B") from None


def _check_option(override: Override, text: str) -> None:
    group = override.key_or_group
    if group not in GROUPS:
        return
    if override.is_delete() or override.is_add():
        raise InvalidInput(f"{text}: write {group}=NAME, without + or ~")
    choice, known = text.partition("=")[2].strip("'\""), group_options(group)
    if not choice:
        raise InvalidInput(f"{group}= needs a name: {', '.join(known)}")
    one_of(group, choice, known)


def _check_experiments(parsed: Sequence[Override]) -> None:
    """Reject a key that an experiment would not read: its whole sweep would start as if the key were not there."""
    given = {override.key_or_group.partition(".")[0] for override in parsed if override.value() is not None}
    chosen = [_values(override) for override in parsed if override.key_or_group == "experiment"]
    for experiment in (text.partition("=")[2].strip("'\"") for text in (chosen[-1] if chosen else ["experiment="])):
        listed = experiments().get(experiment)
        has_graphs = listed is not None and listed.has_graphs
        if listed is not None and not listed.takes_settings:
            known = {"experiment", "engine", "keys", *COMMON, *listed.keys}
            for key in sorted(key for key in given - known if not key.startswith("hydra")):
                keys = ", ".join([*listed.keys, *COMMON])
                raise InvalidInput(f"experiment={experiment} does not read {key}; its keys: {keys}")
            continue
        if listed is None and (unread := given & {"draw", "keep", "again", "keys"}):
            raise InvalidInput(f"{min(unread)} is for experiment={' or '.join(experiments())}; leave it out")
        for key in _ONLY_IN:
            readers = _readers(key)
            if key in given and experiment not in readers:
                raise InvalidInput(f"{key} is for experiment={' or '.join(readers)}; leave it out")
        if has_graphs and (unread := sorted(given & _OF_A_GRAPH)):
            raise InvalidInput(f"experiment={experiment} has graphs of its own; leave out {unread[0]}")
        if "instances" in given and "graph" not in given and not has_graphs:
            raise InvalidInput("instances is a folder to look for a graph in; name the file with graph=")


def _check_applies(parsed: Sequence[Override], settings: Settings) -> None:
    """Reject a cost or an option of a factory that would have no effect."""
    for override in parsed:
        line, is_cost = override.input_line or "", override.key_or_group == "cost"
        if is_cost and settings.spec is None:
            raise InvalidInput(f"{line}: a graph file keeps the costs in it; leave cost out")
        if is_cost and settings.spec is not None and settings.spec.framework == "synthetic":
            raise InvalidInput(f"{line}: synthetic graphs come with their costs; leave cost out")
        if override.key_or_group.startswith("model.options") and settings.spec is None:
            raise InvalidInput(f"{line.lstrip('+')} does not apply to a graph file, whose content is fixed")


def _check_slurm(parsed: Sequence[Override], *, multirun: bool) -> None:
    """Reject what the launcher would answer with a traceback or, without -m, ignore."""
    if not multirun:
        raise InvalidInput("engine=slurm needs -m: each run becomes a job of its own")
    packages = ("submitit", "hydra_plugins", "hydra_plugins.hydra_submitit_launcher")
    if not all(map(importlib.util.find_spec, packages)):
        raise MissingPackage("engine=slurm needs submitit: pip install hydra-submitit-launcher")
    chosen = any(override.key_or_group == "hydra/launcher" for override in parsed)  # e.g. submitit_local, for a trial
    if not chosen and shutil.which("srun") is None:
        raise InvalidInput(
            "engine=slurm: there is no srun here; run the command on a machine of the SLURM cluster "
            "(or try it on this one: hydra/launcher=submitit_local)"
        )


def _solves(chosen: Collection[str]) -> bool:
    """Whether a run with these experiments, or none, reads the strategies."""
    known = [experiments()[name] for name in chosen if name in experiments()]
    return not known or any(each.takes_settings for each in known)


def _compose(overrides: list[str]) -> Settings:
    try:
        with initialize_config_dir(str(CONF_FOLDER), version_base="1.3"):
            cfg = compose("config", [text for text in overrides if not text.lstrip("+~").startswith("hydra")])
        chosen = experiments().keys() & {text.removeprefix("experiment=") for text in overrides}
        settings = read_settings(cfg, solves=_solves(chosen))
        for name in chosen:
            listed(name).arguments(keys_of(cfg))
        return settings
    except (HydraException, OmegaConfBaseException) as error:
        raise _as_line(error) from None


def _check_runs_folder() -> None:
    try:
        RUNS_FOLDER.mkdir(exist_ok=True)
    except OSError as error:
        where = RUNS_FOLDER.resolve()
        raise InvalidInput(f"cannot make {where}: {error.strerror}; run from a folder you own") from None
    if not os.access(RUNS_FOLDER, os.W_OK):
        raise InvalidInput(f"cannot write into {RUNS_FOLDER.resolve()}; run from a folder you own")
