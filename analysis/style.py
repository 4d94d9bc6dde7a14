"""Label, colour, marker and line of each strategy, by name.

Each strategy has a colour of its own: Okabe and Ito's (safe for the colour-blind), Tol's muted set, and those that are
furthest from these in CIELAB. Markers and line styles differ too, so that figures can be read in black-and-white print.
"""

import hashlib
from dataclasses import dataclass

BLACK, ORANGE, SKY, GREEN, BLUE, VERMILLION, PURPLE = (
    "#000000", "#E69F00", "#56B4E9", "#009E73", "#0072B2", "#D55E00", "#CC79A7",
)  # fmt: skip
GREY, LIGHT_GREY, PALE = "#666666", "#999999", "#DDDDDD"
INDIGO, WINE, OLIVE, FOREST = "#332288", "#882255", "#999933", "#117733"

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

# Legends and tables have this order: plain training, heuristics by age, exact, approximate, combined.
STYLES: dict[str, Style] = {
    "checkpoint_all": Style("Checkpoint all", BLACK, "s"),
    "checkpoint_all_ap": Style("Checkpoint all APs", GREY, "D", "--"),
    "checkpoint_last": Style("Checkpoint last node", LIGHT_GREY, "v", ":"),
    "griewank": Style("Griewank & Walther log n", SKY, "P", "-."),
    "chen_sqrtn": Style("Chen √n", ORANGE, "o"),
    "chen_greedy": Style("Chen greedy", VERMILLION, "^"),
    "ap_sqrtn": Style("AP √n", "#663300", ">", "--"),
    "ap_greedy": Style("AP greedy", "#FF5566", "<", "--"),
    "rotor": Style("Rotor", FOREST, "D", "-."),
    "hierarchical": Style("Hierarchical", "#66CC55", "s", "--"),
    "dtr": Style("DTR", "#9988FF", "v", ":"),
    "fastsa": Style("FastSA", "#55CCCC", "o", ":"),
    "full": Style("Checkpoint every block", "#334411", "P", ":"),
    "every_n": Style("Checkpoint every n-th block", "#AA6655", "p", "-."),
    "selective": Style("Selective checkpoints", "#FFAA88", "h", ":"),
    "xla_greedy": Style("XLA greedy", "#990011", "X", "-."),
    "offload_all": Style("Offload all", "#5577AA", "v", "-."),
    "offload_greedy": Style("Offload, greedy", "#225544", "^", ":"),
    "offload_checkpoints": Style("Offload checkpoints", "#CCAA22", "s", ":"),
    "capuchin": Style("Capuchin", "#AA44FF", "<", "--"),
    "torchtitan": Style("torchtitan", "#0055AA", ">", "-."),
    "gist": Style("Gist", "#99BB88", "X", ":"),
    "torch_mincut": Style("PyTorch min-cut", "#996600", "d", "-."),
    "torch_budget": Style("PyTorch memory budget", "#EE4499", "d", ":"),
    "monet": Style("MONeT", "#116655", "p", "--"),
    "checkmate_milp": Style("Checkmate MILP, trimmed, HiGHS", BLUE, "o", "-", 2.0),
    "moccasin": Style("MOCCASIN", OLIVE, "h", "-."),
    "lp_rounding": Style("LP rounding (two-phase)", PURPLE, "d"),
    "lp_rounding_search": Style("LP rounding + search", "#CC77DD", "*", "--"),
    "lp_rounding_random": Style("LP rounding (randomized)", "#FF99FF", "X", ":"),
    "interval_cp": Style("Interval CP", INDIGO, "h", "-", 1.8),
    "search": Style("Eviction search", GREEN, "^", "--", 1.8),
    "portfolio": Style("Portfolio", WINE, "*", "-", 2.0),
    "max_batch_milp": Style("Direct MILP (batch as variable)", "#443355", "s"),
}

NETWORKS = {  # [network] its name for people
    "gpt2": "GPT-2", "llama": "Llama", "llama_32": "Llama, 32 layers", "vit": "ViT", "resnet50": "ResNet50",
    "unet": "U-Net", "vgg16": "VGG16", "vgg19": "VGG19", "googlenet": "GoogLeNet", "mobilenet": "MobileNet",
    "mobilenet_v2": "MobileNetV2", "fcn8": "FCN8", "fcn8_plain": "FCN8, plain encoder", "segnet": "SegNet",
}  # fmt: skip
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
