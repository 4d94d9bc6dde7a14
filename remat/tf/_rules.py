"""Floating-point operations of TensorFlow operations, from shapes and attributes alone (no TensorFlow import).

A multiply-add counts 2. Elementwise arithmetic counts 1 per output element whatever the function. A reduction
counts 1 per input element. An operation that only moves or compares bytes by position counts 0.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class TensorFacts:
    """Shape, element type and, for small constants, the value (nested lists) of one operand."""

    shape: tuple[int, ...]
    dtype: str
    constant: Any = None

    @property
    def size(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class OperationFacts:
    """The facts about an operation that a FLOP rule reads."""

    kind: str
    inputs: tuple[TensorFacts, ...]
    outputs: tuple[TensorFacts, ...]
    attrs: dict[str, Any] = field(default_factory=dict)


def flops(op: OperationFacts) -> int | None:
    """FLOPs of `op` (2 per multiply-add), or None if no rule is known for its kind."""
    rule = _RULES.get(op.kind)
    return None if rule is None else int(rule(op))


def _elements(op: OperationFacts, at: int) -> int:
    """Elements of input `at`; of the first output where `at` is -1."""
    return (op.outputs[0] if at < 0 else op.inputs[at]).size


def _per_output(factor: int) -> Callable[[OperationFacts], int]:
    return lambda op: factor * _elements(op, -1)


def _per_input(factor: int, at: int = 0) -> Callable[[OperationFacts], int]:
    return lambda op: factor * _elements(op, at)


def _convolution(filter_at: int, result_at: int) -> Callable[[OperationFacts], int]:
    """2 x result x (kernel area x channels per group); index -1 is the operation's own output."""

    def rule(op: OperationFacts) -> int:
        kernel = (op.outputs[0] if filter_at < 0 else op.inputs[filter_at]).shape
        # the last filter axis counts output channels; in a depthwise filter so does the third
        per_result = kernel[:2] if "Depthwise" in op.kind else kernel[:-1]
        return 2 * _elements(op, result_at) * math.prod(per_result)

    return rule


def _matmul(transposed: str) -> Callable[[OperationFacts], int]:
    """2 x result x inner extent; `transposed` names the attribute that says whether the first matrix is transposed."""
    return lambda op: 2 * _elements(op, -1) * op.inputs[0].shape[-2 if op.attrs.get(transposed) else -1]


def _einsum(op: OperationFacts) -> int:
    equation = op.attrs["equation"].replace(" ", "").replace("...", "")
    terms = equation.split("->")[0].split(",")
    extents: dict[str, int] = {}
    for labels, operand in zip(terms, op.inputs, strict=True):
        extents |= dict(zip(labels, operand.shape[len(operand.shape) - len(labels) :], strict=True))
    named = math.prod(extents.values())
    # an ellipsis stands for leading axes; take them from the operand of the highest rank
    if "..." in op.attrs["equation"]:
        broadcast = max((operand.shape for operand in op.inputs), key=len)
        named *= math.prod(broadcast[: len(broadcast) - max(map(len, terms))])
    return (2 if len(op.inputs) > 1 else 1) * named


def _pool(at: int) -> Callable[[OperationFacts], int]:
    """Elements of all windows; each element of input `at` (-1: of the output) has one window."""
    return lambda op: _elements(op, at) * math.prod(op.attrs["ksize"])


_MOVEMENT = """
    Reshape Squeeze ExpandDims Identity IdentityN StopGradient Snapshot Transpose ConjugateTranspose ConcatV2 Concat
    Pad PadV2 MirrorPad Slice StridedSlice StridedSliceGrad Split SplitV Pack Unpack Tile BroadcastTo Fill ZerosLike
    OnesLike GatherV2 Gather GatherNd ResourceGather ResourceGatherNd ReverseV2 Reverse Roll SpaceToDepth DepthToSpace
    SpaceToBatchND BatchToSpaceND ResizeNearestNeighbor Cast Bitcast Where InvertPermutation Range Shape ShapeN Size
    Rank BroadcastGradientArgs BroadcastArgs ConcatOffset OneHot MatrixDiagV3 MatrixBandPart
    AssignVariableOp ReadVariableOp
    StatelessRandomGetKeyCounter StatelessRandomGetAlg EmptyTensorList TensorListReserve TensorListFromTensor
    TensorListStack TensorListGetItem TensorListSetItem TensorListPushBack TensorListPopBack TensorListLength
    TensorListElementShape VariableShape NoOp Assert TopKV2 DynamicPartition DynamicStitch ScatterNd EnsureShape
"""
_ELEMENTWISE = """
    Add AddV2 Sub Mul MulNoNan RealDiv Div DivNoNan FloorDiv FloorMod Mod TruncateDiv TruncateMod Maximum Minimum Pow
    SquaredDifference Neg Abs Sign Square Sqrt Rsqrt Reciprocal Inv Exp Expm1 Log Log1p Sin Cos Tan Tanh Sigmoid Erf
    Erfc Erfinv Round Rint Floor Ceil Relu Relu6 ReluGrad Relu6Grad LeakyRelu LeakyReluGrad Selu Select SelectV2
    ClipByValue BiasAdd BiasAddV1 Equal
    NotEqual Less LessEqual Greater GreaterEqual LogicalAnd LogicalOr LogicalNot IsFinite IsNan IsInf Cumsum Cumprod
    Xlogy Xdivy BitwiseAnd BitwiseOr BitwiseXor LeftShift RightShift
"""
_KINDS: tuple[tuple[str, Callable[[OperationFacts], int]], ...] = (
    (_MOVEMENT, lambda _: 0),
    (_ELEMENTWISE, _per_output(1)),
    ("AssignAddVariableOp AssignSubVariableOp", _per_input(1, at=1)),
    # y * (1 - y) * dy and the like: more than one operation per element
    ("Elu Softsign SqrtGrad InvGrad ReciprocalGrad", _per_output(2)),
    ("SigmoidGrad TanhGrad EluGrad SeluGrad SoftplusGrad SoftsignGrad RsqrtGrad Softplus", _per_output(3)),
    ("Sum Mean Prod Max Min All Any ArgMax ArgMin EuclideanNorm BiasAddGrad", _per_input(1)),
    ("Conv2D Conv3D DepthwiseConv2dNative", _convolution(1, -1)),
    ("Conv2DBackpropInput Conv3DBackpropInputV2 DepthwiseConv2dNativeBackpropInput", _convolution(1, 2)),
    ("Conv2DBackpropFilter Conv3DBackpropFilterV2 DepthwiseConv2dNativeBackpropFilter", _convolution(-1, 2)),
    ("MatMul", _matmul("transpose_a")),
    ("BatchMatMul BatchMatMulV2 BatchMatMulV3", _matmul("adj_x")),
    ("Einsum", _einsum),
    ("MaxPool MaxPoolWithArgmax MaxPool3D AvgPool AvgPool3D", _pool(-1)),
    ("MaxPoolV2", lambda op: _elements(op, -1) * math.prod(op.inputs[1].constant)),
    # the gradient of a pool reads every element of every window again
    ("MaxPoolGrad MaxPool3DGrad", _pool(2)),
    ("AvgPoolGrad AvgPool3DGrad", _pool(1)),
    ("MaxPoolGradWithArgmax", _per_input(1, at=1)),
    # mean 1, variance 3, normalise and scale 3 per element
    ("FusedBatchNormV3", _per_input(7)),
    # two reductions of dy and dy * x_hat (1 + 3), then scale * (dy - mean - x_hat * mean) (5)
    ("FusedBatchNormGradV3", _per_input(9)),
    ("AddN AccumulateNV2", lambda op: max(0, len(op.inputs) - 1) * _elements(op, -1)),
    ("Softmax LogSoftmax", _per_output(5)),
    # max, subtract, exp, sum, log, product with the label; and exp/sum - label for the gradient
    ("SoftmaxCrossEntropyWithLogits SparseSoftmaxCrossEntropyWithLogits", _per_input(8)),
    ("L2Loss", _per_input(3)),
    ("LRN", _per_output(12)),
    ("LRNGrad", _per_output(24)),
    # three linear interpolations (subtract, multiply, add) per output element
    ("ResizeBilinear", _per_output(9)),
    ("ResizeBilinearGrad", _per_input(9)),
    ("ResizeBicubic", _per_output(40)),
    ("ResizeBicubicGrad", _per_input(40)),
    ("ResizeNearestNeighborGrad", _per_input(1)),
    ("CumulativeLogsumexp", _per_output(4)),
    # counter-based generators: ten rounds of Philox make four numbers, about 20 integer operations each
    ("StatelessRandomUniformV2 StatelessRandomUniformIntV2 StatelessRandomUniformFullIntV2 RandomUniform",
     _per_output(20)),
    ("StatelessRandomNormalV2 StatelessTruncatedNormalV2 RandomStandardNormal TruncatedNormal", _per_output(30)),
    # scattered additions
    ("UnsortedSegmentSum SegmentSum", _per_input(1)),
    ("TensorScatterAdd ResourceScatterAdd", _per_input(1, at=2)),
)  # fmt: skip
_RULES = {kind: rule for kinds, rule in _KINDS for kind in kinds.split()}
