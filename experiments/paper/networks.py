"""The networks of Checkmate's figures, each with the file of its published graph, if there is one."""

from __future__ import annotations

from dataclasses import dataclass

from experiments.max_batch_size import PUBLISHED


@dataclass(frozen=True, slots=True)
class Network:
    """A network of the paper.

    Attributes:
        name: of conf/model.
        label: for figures and tables.
        instance: the published graph with its V100 costs, relative to the folder of instances; None if there is none.
        has_slow_lp: the linear relaxation takes minutes.
    """

    name: str
    label: str
    instance: str | None = None
    has_slow_lp: bool = False


NETWORKS = {
    network.name: network
    for network in (
        Network("vgg16", "VGG16", "v100/vgg16_b256.json"),
        Network("mobilenet", "MobileNet", "v100/mobilenet_b512.json", has_slow_lp=True),
        Network("unet", "U-Net", "v100/unet_b32.json"),
        Network("resnet50", "ResNet50", has_slow_lp=True),
        Network("fcn8", "FCN8"),
        Network("segnet", "SegNet"),
        Network("vgg19", "VGG19"),
    )
}


def in_figure_6(network: Network) -> bool:
    """Whether it has a bar in Figure 6. A network from outside the paper gets one, because the user named it."""
    return network.name in PUBLISHED or network.name not in NETWORKS


def network(name: str) -> Network:
    """The network of that name in conf/model; one from outside the paper has its name as its label."""
    return NETWORKS.get(name) or Network(name, name)
