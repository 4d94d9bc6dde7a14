"""Tables, figures and the page from stored results; never runs a solver.

import analysis
analysis.draw_run(Path("runs/vgg19"))          # figures/, table.csv, page.html
analysis.terminal_table(Path("runs/vgg19"))    # for rich's console
"""

from pathlib import Path

from analysis.table import terminal_table

__all__ = ["draw_run", "terminal_table"]


def draw_run(run_folder: Path) -> list[Path]:
    """Draw everything about a run: ``table.csv``, ``figures/*.png``, ``figures/*.pdf``, ``page.html``.

    Reads stored results only and overwrites earlier drawings. The same results give the same files.

    Returns:
        The files written, the page last.

    Raises:
        InvalidInput: the folder is not a run, or one of its files cannot be read.
    """
    from analysis.page import draw_run as draw  # matplotlib and plotly take a second to import

    return draw(Path(run_folder))
