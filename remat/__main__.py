"""``python -m remat``: the command ``remat``."""

import sys

from remat.cli import main

sys.exit(main())
