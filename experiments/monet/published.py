"""Published numbers of MONeT (Shah et al., ICLR 2021): PyTorch's memory, and overhead on a P100 at memory budgets.

Memory is in GiB though the tables say GB: the authors' stored solver results have the budgets 10 * 2^30, ... bytes, and
the simulated peak of plain training agrees with their PyTorch column only in GiB.
"""

from __future__ import annotations

from dataclasses import dataclass

GIB = 2**30


@dataclass(frozen=True, slots=True)
class Network:
    """A network of MONeT's tables.

    Attributes:
        name: of `remat.frontends.monet_networks.NETWORKS`.
        batch: as published.
        pytorch_gib: memory of plain training.
        budgets_gib: descending.
        overheads_percent: measured at each budget, against PyTorch.
        instance: the published training graph with its P100 costs, relative to the folder of instances; or None.
    """

    name: str
    label: str
    batch: int
    pytorch_gib: float
    budgets_gib: tuple[float, ...]
    overheads_percent: tuple[float, ...]
    instance: str | None = None

    @property
    def budgets_bytes(self) -> tuple[int, ...]:
        return tuple(round(gib * GIB) for gib in self.budgets_gib)


_BUDGETS = (10, 9, 8, 7, 6, 5)
NETWORKS = {
    network.name: network
    for network in (
        Network("resnet50", "ResNet-50", 184, 15.06, _BUDGETS, (3.22, 4.68, 5.56, 7.28, 9.31, 11.95),
                "p100/resnet50_b184.json"),
        Network("googlenet", "GoogLeNet", 320, 14.93, _BUDGETS, (7.13, 7.87, 8.44, 9.71, 12.14, 15.77)),
        Network("unet", "U-Net", 11, 14.32, _BUDGETS, (-4.10, -2.07, -0.09, 1.39, 4.95, 11.51), "p100/unet_b11.json"),
        Network("mobilenet_v2", "MobileNet-V2", 272, 14.46, _BUDGETS, (2.40, 3.10, 4.77, 5.53, 7.55, 8.72)),
        Network("vgg16", "VGG-16", 176, 14.12, (10, 9, 8, 7, 6, 5.51), (-5.30, -4.64, -2.18, 1.99, 5.44, 9.11),
                "p100/vgg16_b176.json"),
    )
}  # fmt: skip
RECORDS = "records.json"  # Checkmate's MILP on the published graphs, in the folder of instances
