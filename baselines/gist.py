"""Gist (Jain et al., ISCA 2018): recompute nothing, keep encoded copies of the values that the backward pass reads."""

from __future__ import annotations

from remat import Candidate, Graph, Plan, Problem, Skip, strategy

_LOSSLESS = ("sparse", "mask", "indices")  # an operation takes the first that it has
_LOSSY = ("half",)
_LEFT_ALONE = ("aten::dropout",)  # its mask is MONeT's


@strategy("gist", baseline=True, ignores_budget=True, implementations="own")
def gist(problem: Problem, *, lossy: bool = False) -> Candidate:
    """Encode the values that the backward pass reads and recompute nothing (Jain et al., ISCA 2018).

    A ReLU read by a convolution keeps a sparse copy of its output (sparse storage, dense compute), any other ReLU a bit
    per element (binarisation), max pooling the place in the window; ReLU and additions are written in place. There is
    one plan, whatever the budget. `remat.frontends.monet.with_gist` models the bytes and costs of the encodings.

    Deviations: the paper binarises ReLU before pooling only, and a place in the window takes four bits, not a byte;
    ReLU6 is treated like ReLU.

    Args:
        lossy: delayed precision reduction: float16 copies of the other values that the backward pass reads, if the
            graph has such copies.

    @inproceedings{jain2018gist, title={Gist: Efficient Data Encoding for Deep Neural Network Training}, author={Jain,
    Animesh and Phanishayee, Amar and Mars, Jason and Tang, Lingjia and Pekhimenko, Gennady}, booktitle={ISCA},
    year={2018}}
    """
    graph = problem.graph
    if not any(implementation.name == "sparse" for op in graph.operations for implementation in op.implementations):
        raise Skip("it needs a graph with encodings: with_gist of remat.frontends.monet")
    implementations = _implementations(graph, _LOSSLESS + (_LOSSY if lossy else ()))
    return Candidate(Plan.from_order(graph, range(len(graph)), implementations=implementations), {"lossy": lossy})


def _implementations(graph: Graph, encodings: tuple[str, ...]) -> list[str]:
    """[N] name of the implementation of each operation."""
    names = [""] * len(graph)
    backward = [k for k, op in enumerate(graph.operations) if op.is_backward]
    decoders: dict[int, list[int]] = {}  # encoded copy -> backward operations that can read it
    for k in backward:
        for implementation in graph.operations[k].implementations:
            if implementation.name in encodings:
                for v in implementation.inputs:
                    decoders.setdefault(v, []).append(k)
    for k, op in enumerate(graph.operations):
        if op.is_backward or op.kind in _LEFT_ALONE:
            continue
        by_name = {implementation.name: implementation for implementation in op.implementations}
        encoding = next((name for name in encodings if name in by_name), None)
        if encoding is not None:
            for user in (k, *decoders.get(by_name[encoding].outputs[-1], ())):
                names[user] = encoding
    read = {v for k in backward for v in graph.implementation(k, names[k]).inputs}
    for k, op in enumerate(graph.operations):
        in_place = f"in_place_{names[k]}".removesuffix("_")
        if op.kind not in _LEFT_ALONE and any(
            implementation.name == in_place and implementation.overwrites not in read
            for implementation in op.implementations
        ):
            names[k] = in_place
    return names
