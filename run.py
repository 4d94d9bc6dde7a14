"""The one entry: ``python run.py model=vgg19 budget=sweep``; ``python run.py --help`` lists what may be written."""

import sys

from experiments.cli import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
