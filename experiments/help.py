"""The text of `run.py --help`: usage, and every name that the command line takes."""

import textwrap

from experiments.config import CONF_FOLDER, group_options, read_conf
from experiments.registry import experiments
from remat.cost.gpu import gpu_names, load_gpu
from remat.registry import get_strategy, strategies

_USAGE = """\
Rematerialization plans for a network, a GPU and a memory budget, by every published method.

  python run.py model=vgg19 budget=sweep                        all strategies over a range of budgets
  python run.py model=resnet50 gpu=v100 budget=8GB 'strategies=[checkmate_milp,chen_sqrtn]' time_limit=60
  python run.py graph=path/to/instance.json budget=5GiB         a graph file (remat-graph/1 or /2)
  python run.py model=torch target=my_models:factory budget=8GB   a model of your own (docs/how-to/bring-your-own.md)
  python run.py -m model=vgg16,vgg19 gpu=v100,h100              one run for each combination

Every option has the form key=value; results go into ./runs of the current folder.
"""


def help_text() -> str:
    """The help, from the files of conf/ and the registry."""
    parts = [
        _USAGE,
        _section("Models (model=)", {name: _model(name) for name in group_options("model")}),
        _section("GPUs (gpu=)", {name: _gpu(name) for name in gpu_names()}),
        _section("Strategies (strategies=)", {name: get_strategy(name).summary for name in strategies()}),
    ]
    for title in ("Costs", "Experiments", "Benchmarks", "Engines", "Loggers"):
        group = title.lower().removesuffix("s")
        comments = {name: _comment(group, name) for name in group_options(group)}
        parts.append(_section(f"{title} ({group}=)", comments))
    values = (CONF_FOLDER / "config.yaml").read_text().split("\n\n", 1)[1].split("hydra:\n")[0]
    parts.append("Values and their defaults\n" + textwrap.indent(values.strip(), "  ") + "\n")
    return "\n".join(parts)


def _section(title: str, rows: dict[str, str]) -> str:
    width = max((len(name) for name in rows), default=0)
    lines = [f"  {name:<{width}}  {text}".rstrip()[:140] for name, text in rows.items()]
    return "\n".join([title, *lines, ""])


def _model(model: str) -> str:
    return str(read_conf(f"model/{model}").get("description", ""))


def _gpu(name: str) -> str:
    gpu = load_gpu(name)
    return f"{gpu.memory_bytes / 1e9:.1f} GB, {gpu.bandwidth_bytes_per_s / 1e9:.0f} GB/s"


def _comment(group: str, name: str) -> str:
    """The first comment of a file that is not Hydra's package line; the first line of an experiment's docstring."""
    if group == "experiment" and name in experiments():
        return experiments()[name].summary
    for line in (CONF_FOLDER / group / f"{name}.yaml").read_text().splitlines():
        if line.startswith("# ") and "@package" not in line:
            return line[2:]
    return ""
