"""Floating-point operations of TensorFlow operations, from shapes and attributes alone (no TensorFlow import).

A multiply-add counts 2. Elementwise arithmetic counts 1 per output element whatever the function;
reductions 1 per input element; what only moves or compares bytes by position counts 0.
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
    """What a FLOP rule sees of an operation."""

    kind: str
    inputs: tuple[TensorFacts, ...]
    outputs: tuple[TensorFacts, ...]
    attrs: dict[str, Any] = field(default_factory=dict)


def flops(op: OperationFacts) -> int | None:
    """FLOPs of `op` (2 per multiply-add), or None if no rule is known for its kind."""
    if op.kind in _MOVEMENT:
        return 0
    rule = _RULES.get(op.kind)
    return None if rule is None else int(rule(op))


def _kinds(names: str) -> frozenset[str]:
    return frozenset(names.split())


# --- helpers -------------------------------------------------------------------------------------


def _out(op: OperationFacts) -> int:
    return op.outputs[0].size


def _in(op: OperationFacts) -> int:
    return op.inputs[0].size


def _per_output(factor: int) -> Callable[[OperationFacts], int]:
    return lambda op: factor * _out(op)


def _per_input(factor: int) -> Callable[[OperationFacts], int]:
    return lambda op: factor * _in(op)


def _convolution(filter_at: int, result_at: int) -> Callable[[OperationFacts], int]:
    """2 x result x (kernel area x channels per group); index -1 means the operation's own output."""

    def rule(op: OperationFacts) -> int:
        kernel = op.outputs[0].shape if filter_at < 0 else op.inputs[filter_at].shape
        result = op.outputs[0] if result_at < 0 else op.inputs[result_at]
        # the last filter axis counts output channels; in a depthwise filter so does the third
        per_result = kernel[:2] if "Depthwise" in op.kind else kernel[:-1]
        return 2 * result.size * math.prod(per_result)

    return rule


def _matmul(transposed: str, axis: int, transposed_axis: int) -> Callable[[OperationFacts], int]:
    def rule(op: OperationFacts) -> int:
        inner = op.inputs[0].shape[transposed_axis if op.attrs.get(transposed) else axis]
        return 2 * _out(op) * inner

    return rule


def _einsum(op: OperationFacts) -> int:
    equation = op.attrs["equation"].replace(" ", "").replace("...", "")
    extents: dict[str, int] = {}
    for labels, operand in zip(equation.split("->")[0].split(","), op.inputs, strict=True):
        extents |= dict(zip(labels, operand.shape[len(operand.shape) - len(labels) :], strict=True))
    broadcast = max((operand.shape for operand in op.inputs), key=len)
    named = math.prod(extents.values())
    # an ellipsis stands for leading axes; take them from the operand of the highest rank
    if "..." in op.attrs["equation"]:
        n_named = max(len(labels) for labels in equation.split("->")[0].split(","))
        named *= math.prod(broadcast[: len(broadcast) - n_named])
    return (2 if len(op.inputs) > 1 else 1) * named


def _window(op: OperationFacts) -> int:
    return math.prod(op.attrs["ksize"])


def _cross_entropy(op: OperationFacts) -> int:
    # max, subtract, exp, sum, log, product with the label; and exp/sum - label for the gradient
    return 8 * _in(op)


# --- tables --------------------------------------------------------------------------------------

_MOVEMENT = _kinds(
    """
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
)

_RULES: dict[str, Callable[[OperationFacts], int]] = {
    "Conv2D": _convolution(1, -1),
    "Conv2DBackpropInput": _convolution(1, 2),
    "Conv2DBackpropFilter": _convolution(-1, 2),
    "Conv3D": _convolution(1, -1),
    "Conv3DBackpropInputV2": _convolution(1, 2),
    "Conv3DBackpropFilterV2": _convolution(-1, 2),
    "DepthwiseConv2dNative": _convolution(1, -1),
    "DepthwiseConv2dNativeBackpropInput": _convolution(1, 2),
    "DepthwiseConv2dNativeBackpropFilter": _convolution(-1, 2),
    "MatMul": _matmul("transpose_a", -1, -2),
    "BatchMatMul": _matmul("adj_x", -1, -2),
    "BatchMatMulV2": _matmul("adj_x", -1, -2),
    "BatchMatMulV3": _matmul("adj_x", -1, -2),
    "Einsum": _einsum,
    "MaxPool": lambda op: _out(op) * _window(op),
    "MaxPoolV2": lambda op: _out(op) * math.prod(op.inputs[1].constant),
    "MaxPoolWithArgmax": lambda op: _out(op) * _window(op),
    "MaxPool3D": lambda op: _out(op) * _window(op),
    "AvgPool": lambda op: _out(op) * _window(op),
    "AvgPool3D": lambda op: _out(op) * _window(op),
    # the gradient of a pool looks at every element of every window again
    "MaxPoolGrad": lambda op: op.inputs[2].size * _window(op),
    "MaxPoolGradWithArgmax": lambda op: op.inputs[1].size,
    "MaxPool3DGrad": lambda op: op.inputs[2].size * _window(op),
    "AvgPoolGrad": lambda op: op.inputs[1].size * _window(op),
    "AvgPool3DGrad": lambda op: op.inputs[1].size * _window(op),
    # mean 1, variance 3, normalise and scale 3 per element
    "FusedBatchNormV3": _per_input(7),
    # two reductions of dy and dy * x_hat (1 + 3), then scale * (dy - mean - x_hat * mean) (5)
    "FusedBatchNormGradV3": _per_input(9),
    "BiasAddGrad": _per_input(1),
    "AddN": lambda op: max(0, len(op.inputs) - 1) * _out(op),
    "AccumulateNV2": lambda op: max(0, len(op.inputs) - 1) * _out(op),
    "Softmax": _per_output(5),
    "LogSoftmax": _per_output(5),
    "SoftmaxCrossEntropyWithLogits": _cross_entropy,
    "SparseSoftmaxCrossEntropyWithLogits": _cross_entropy,
    "L2Loss": lambda op: 3 * _in(op),
    "LRN": _per_output(12),
    "LRNGrad": _per_output(24),
    # three linear interpolations (subtract, multiply, add) per output element
    "ResizeBilinear": _per_output(9),
    "ResizeBilinearGrad": _per_input(9),
    "ResizeBicubic": _per_output(40),
    "ResizeBicubicGrad": _per_input(40),
    "ResizeNearestNeighborGrad": _per_input(1),
    "CumulativeLogsumexp": _per_output(4),
    # counter-based generators: ten rounds of Philox make four numbers, about 20 integer operations each
    "StatelessRandomUniformV2": _per_output(20),
    "StatelessRandomUniformIntV2": _per_output(20),
    "StatelessRandomUniformFullIntV2": _per_output(20),
    "StatelessRandomNormalV2": _per_output(30),
    "StatelessTruncatedNormalV2": _per_output(30),
    "RandomUniform": _per_output(20),
    "RandomStandardNormal": _per_output(30),
    "TruncatedNormal": _per_output(30),
    # scattered additions
    "UnsortedSegmentSum": _per_input(1),
    "SegmentSum": _per_input(1),
    "TensorScatterAdd": lambda op: op.inputs[2].size,
    "ResourceScatterAdd": lambda op: op.inputs[2].size,
}
_RULES |= dict.fromkeys(_kinds("Sum Mean Prod Max Min All Any ArgMax ArgMin EuclideanNorm"), _per_input(1))
_RULES |= dict.fromkeys(
    _kinds("""
    Add AddV2 Sub Mul MulNoNan RealDiv Div DivNoNan FloorDiv FloorMod Mod TruncateDiv TruncateMod Maximum Minimum Pow
    SquaredDifference Neg Abs Sign Square Sqrt Rsqrt Reciprocal Inv Exp Expm1 Log Log1p Sin Cos Tan Tanh Sigmoid Erf
    Erfc Erfinv Round Rint Floor Ceil Relu Relu6 ReluGrad Relu6Grad LeakyRelu LeakyReluGrad Selu Select SelectV2
    ClipByValue BiasAdd BiasAddV1 Equal
    NotEqual Less LessEqual Greater GreaterEqual LogicalAnd LogicalOr LogicalNot IsFinite IsNan IsInf Cumsum Cumprod
    Xlogy Xdivy BitwiseAnd BitwiseOr BitwiseXor LeftShift RightShift AssignAddVariableOp AssignSubVariableOp
    """),
    _per_output(1),
)
for _kind in ("AssignAddVariableOp", "AssignSubVariableOp"):
    _RULES[_kind] = lambda op: op.inputs[1].size
# y * (1 - y) * dy and the like: more than one operation per element
_RULES |= dict.fromkeys(_kinds("Elu Softsign SqrtGrad InvGrad ReciprocalGrad"), _per_output(2))
_RULES |= dict.fromkeys(
    _kinds("SigmoidGrad TanhGrad EluGrad SeluGrad SoftplusGrad SoftsignGrad RsqrtGrad Softplus"), _per_output(3)
)
