"""Numbers as others published them, from ``conf/published.yaml``, which describes them."""

from pathlib import Path
from typing import Any

import yaml

FILE = Path(__file__).resolve().parents[1] / "conf" / "published.yaml"
PUBLISHED: dict[str, Any] = yaml.safe_load(FILE.read_text(encoding="utf-8"))
