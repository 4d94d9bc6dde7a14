"""Hooks of mkdocs: the leaderboard's page, and links from pages to the repository's files outside docs/.

Readers of the repository need a link such as ``../../results/tables/x.csv``. The site gets a copy of each linked file,
under ``files/``, and the link leads there. A link to a missing file stays unchanged and fails the strict build.
"""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[1]
LINK = re.compile(r"(?<=\]\()(?!\w+:|#|/)([^)\s#]+)(?=[)#])")


def on_files(files: Files, /, *, config: Any) -> Files:
    """Add the leaderboard's page, drawn from the committed rows."""
    sys.path.insert(0, str(ROOT))
    from analysis.leaderboard import leaderboard, page
    from experiments.store import Table

    content = page(leaderboard(Table("benchmark").rows(kept_only=True)), "Leaderboard")
    files.append(File.generated(config, "results/leaderboard-page.html", content=content))
    return files


def on_page_markdown(markdown: str, /, *, page: Page, config: Any, files: Files) -> str:
    """Point links that leave docs/ at copies inside the site, and make those copies."""
    folder = Path(config["docs_dir"]) / os.path.dirname(page.file.src_uri)

    def inside(link: re.Match[str]) -> str:
        target = Path(os.path.normpath(folder / link[1]))
        if target.is_relative_to(config["docs_dir"]) or not target.is_file():
            return link[0]
        copy = f"files/{target.relative_to(ROOT).as_posix()}"
        if files.get_file_from_path(copy) is None:
            files.append(File.generated(config, copy, abs_src_path=str(target)))
        return os.path.relpath(copy, os.path.dirname(page.file.src_uri) or ".")

    return LINK.sub(inside, markdown)
