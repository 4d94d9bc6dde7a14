"""The command line: ``python run.py model=vgg19 budget=sweep``; ``python run.py --help`` lists all names and keys."""

import sys

try:
    from experiments.cli import main
except ModuleNotFoundError as error:
    if (error.name or "").partition(".")[0] in ("", "analysis", "baselines", "experiments", "remat"):
        raise
    sys.exit(
        f"error: {error.name} is not installed in {sys.executable}; after `make setup`, .venv/bin/python has everything"
    )

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
