"""Gist (Jain et al., ISCA 2018): nothing is recomputed, what the backward pass reads is kept encoded."""

from __future__ import annotations

from remat import Candidate, Graph, Plan, Problem, Skip, strategy

_LOSSLESS = ("sparse", "mask", "indices")  # an operation takes the first that it has
_LOSSY = ("half",)
_LEFT_ALONE = ("aten::dropout",)  # its mask is MONeT's


@strategy("gist", baseline=True, ignores_budget=True, implementations="own")
def gist(problem: Problem, *, lossy: bool = False) -> Candidate:
    """Encode what the backward pass reads and recompute nothing (Jain et al., ISCA 2018).

    A ReLU read by a convolution keeps a sparse copy of its output (sparse storage, dense compute), any other ReLU a bit
    per element (binarisation), max pooling its place in the window; ReLU and additions are written in place. One plan,
    whatever the budget; what its encodings weigh and cost is `remat.frontends.monet.with_gist`'s model.

    Deviations: the paper binarises ReLU before pooling only, and a place in the window takes four bits, not a byte;
    ReLU6 is treated like ReLU.

    Args:
        lossy: delayed precision reduction: float16 copies of what else the backward pass reads, if the graph has such.

    @inproceedings{jain2018gist, title={Gist: Efficient Data Encoding for Deep Neural Network Training}, author={Jain,
    Animesh and Phanishayee, Amar and Mars, Jason and Tang, Lingjia and Pekhimenko, Gennady}, booktitle={ISCA},
    year={2018}}
    """
    graph = problem.graph
    if not any(implementation.name == "sparse" for op in graph.operations for implementation in op.implementations):
        raise Skip("it needs a graph with encodings: monet_graph(..., gist=True) or with_gist of remat.frontends.monet")
    implementations = _implementations(graph, _LOSSLESS + (_LOSSY if lossy else ()))
    return Candidate(Plan.from_order(graph, range(len(graph)), implementations=implementations), {"lossy": lossy})


def _implementations(graph: Graph, encodings: tuple[str, ...]) -> list[str]:
    """[N] the way of each operation."""
    names = [""] * len(graph)
    decoders: dict[int, list[int]] = {}  # encoded copy -> backward operations with a way that reads it
    for k, op in enumerate(graph.operations):
        for implementation in op.implementations if op.is_backward else ():
            for v in implementation.inputs if implementation.name in encodings else ():
                decoders.setdefault(v, []).append(k)
    for k, op in enumerate(graph.operations):
        if op.is_backward or op.kind in _LEFT_ALONE:
            continue
        known = {implementation.name: implementation for implementation in op.implementations}
        encoding = next((name for name in encodings if name in known), None)
        if encoding is not None:
            for user in (k, *decoders.get(known[encoding].outputs[-1], ())):
                names[user] = encoding
    read = {
        v for k, op in enumerate(graph.operations) if op.is_backward for v in graph.implementation(k, names[k]).inputs
    }
    for k, op in enumerate(graph.operations):
        in_place = f"in_place_{names[k]}".removesuffix("_")
        implementations = () if op.kind in _LEFT_ALONE else op.implementations
        if any(
            implementation.name == in_place and implementation.overwrites not in read
            for implementation in implementations
        ):
            names[k] = in_place
    return names
