"""Label, colour, marker and line of each strategy, by name; ``styles.yaml`` has those that are chosen by hand."""

import hashlib
from dataclasses import dataclass
from pathlib import Path

import yaml

BLACK, ORANGE, SKY, GREEN, BLUE, VERMILLION, PURPLE = (
    "#000000", "#E69F00", "#56B4E9", "#009E73", "#0072B2", "#D55E00", "#CC79A7",
)  # fmt: skip
GREY, LIGHT_GREY, PALE = "#666666", "#999999", "#DDDDDD"
WINE = "#882255"

FORWARD, BACKWARD = BLUE, ORANGE
FIRST, AGAIN, HELD, HELD_FULL = "#1F3A5F", VERMILLION, "#BFD7EA", "#2B6CB0"


@dataclass(frozen=True, slots=True)
class Style:
    """How a strategy is drawn.

    Attributes:
        label: its name for people.
        colour: hex.
        marker, line: matplotlib's codes.
        width: of the line, in points.
    """

    label: str
    colour: str
    marker: str
    line: str = "-"
    width: float = 1.3

    @property
    def symbol(self) -> str:
        """Plotly's name of the marker."""
        return _SYMBOLS[self.marker]

    @property
    def dash(self) -> str:
        """Plotly's name of the line style."""
        return _DASHES[self.line]


_SYMBOLS = {
    "o": "circle", "s": "square", "D": "diamond", "^": "triangle-up", "v": "triangle-down", "<": "triangle-left",
    ">": "triangle-right", "P": "cross", "X": "x", "p": "pentagon", "h": "hexagon", "d": "diamond-tall", "*": "star",
}  # fmt: skip
_DASHES = {"-": "solid", "--": "dash", ":": "dot", "-.": "dashdot"}


OURS = "portfolio"  # the strategy that executed steps and the other strategies are compared with
COPY_ONLY = "offload_greedy"  # copies and never recomputes

_NAMED = yaml.safe_load(Path(__file__).with_name("styles.yaml").read_text(encoding="utf-8"))
STYLES = {name: Style(**looks) for name, looks in _NAMED["strategies"].items()}
NETWORKS: dict[str, str] = _NAMED["networks"]  # [network] its name for people
SPARE_COLOURS = ("#775599", "#BBAAEE", "#992299")
_SPARE_MARKERS = ("p", "h", "X", "d", ">", "v")
_SPARE_LINES = ("-", "--", "-.", ":")


def style_of(strategy: str) -> Style:
    """The style of a strategy; that of an unknown strategy depends on its name alone."""
    if strategy in STYLES:
        return STYLES[strategy]
    digest = hashlib.sha256(strategy.encode()).digest()
    return Style(
        strategy.replace("_", " "),
        SPARE_COLOURS[digest[0] % len(SPARE_COLOURS)],
        _SPARE_MARKERS[digest[1] % len(_SPARE_MARKERS)],
        _SPARE_LINES[digest[2] % len(_SPARE_LINES)],
    )


def label_of(network: str) -> str:
    """The name of a network for people."""
    return NETWORKS.get(network, network)


def order_of(strategy: str) -> tuple[int, str]:
    """Sort key: known strategies in the order of `STYLES`, then others by name."""
    known = list(STYLES)
    return (known.index(strategy) if strategy in STYLES else len(known), strategy)
