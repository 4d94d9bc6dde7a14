"""The work of a Keras layer: floating-point operations, bytes moved and a signature to rebuild it from.

There are two separate counts of operations:

- *published*: that of Checkmate's artifact (Jain et al., MLSys 2020). A convolution or dense layer counts 1 per
  multiply-add (a transposed convolution its input channels only, as there), batch norm 4 and an activation layer 1
  per element, Add the elements of its inputs, upsampling 1 (nearest) or 5 (bilinear) per output element. Biases,
  fused activations, pooling, padding, concatenation, reshape and dropout count nothing. Backward is twice forward.
  Layers that the artifact does not know follow the same spirit.
- *honest*: 2 per multiply-add, bias adds, activations (`_ACTIVATION`), pooling windows, normalisation in training
  mode. Backward: the gradient of the weights and, unless nothing before the layer is trainable, of the inputs.

A layer without a rule has None; cost models charge it by the bytes that it moves.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from typing import Any

from remat.graph import Work

Shape = tuple[int, ...]

# Operations per element of an elementwise function; a transcendental function counts as a few.
_ACTIVATION = {"linear": 0, "relu": 1, "relu6": 2, "leaky_relu": 2, "softmax": 5, "hard_sigmoid": 3}
_ACTIVATION_OTHER = 4
_NORMALIZATIONS = ("BatchNormalization", "LayerNormalization", "GroupNormalization", "RMSNormalization")
_NORMALIZATION_FORWARD, _NORMALIZATION_BACKWARD = 8, 10
_MERGES = ("Add", "Subtract", "Multiply", "Average", "Maximum", "Minimum")
_COPIES = ("Concatenate", "Permute", "RepeatVector", "Masking", "Embedding")
_ALIASES = ("Reshape", "Flatten", "Identity", "ActivityRegularization", "InputLayer")
_PER_OUTPUT = {
    "ReLU": 2, "LeakyReLU": 2, "ELU": 2, "PReLU": 2, "Softmax": _ACTIVATION["softmax"], "Rescaling": 2,
    "Normalization": 2, **dict.fromkeys((*_COPIES, *_ALIASES), 0),
}  # fmt: skip
_READS_OUTPUT = ("Activation", "ReLU", "LeakyReLU", "ELU", "Softmax", "PReLU", "Dropout", "SpatialDropout2D")


@dataclass(frozen=True, slots=True)
class Call:
    """One call of one layer with concrete shapes.

    Attributes:
        layer: the Keras layer or operation.
        inputs, outputs: shapes with the batch in front.
        input_bytes, output_bytes: of all inputs, of all outputs.
        weight_bytes: of all variables of the layer.
        trainable_bytes: of the trainable ones.
        needs_input_gradient: whether anything before it is trainable.
        dtype: of the output.
    """

    layer: Any
    inputs: tuple[Shape, ...]
    outputs: tuple[Shape, ...]
    input_bytes: int
    output_bytes: int
    weight_bytes: int
    trainable_bytes: int
    needs_input_gradient: bool
    dtype: str

    @property
    def kind(self) -> str:
        return type(self.layer).__name__

    @property
    def rule(self) -> str:
        """Keras' own class that the layer is, or derives from most closely; the rules look it up."""
        own = (base for base in type(self.layer).__mro__ if base.__module__.startswith("keras."))
        return next(own).__name__

    @property
    def n_in(self) -> int:
        """Elements of all inputs."""
        return sum(map(prod, self.inputs))

    @property
    def n_out(self) -> int:
        """Elements of all outputs."""
        return sum(map(prod, self.outputs))


def forward_work(call: Call) -> Work:
    """Work of the layer itself; it moves inputs, outputs and weights once each."""
    macs, extra = multiply_adds(call), _elementwise(call)
    flops = None if macs is None and extra is None else 2 * (macs or 0) + (extra or 0)
    alias = is_alias(call)
    return Work(
        flops=0 if alias else flops,
        bytes_moved=0 if alias else call.input_bytes + call.output_bytes + call.weight_bytes,
        dtype=call.dtype,
        signature=signature(call, backward=False),
        published_flops=published_flops(call),
        is_free=alias,
    )


def backward_work(call: Call) -> Work:
    """Work of the layer's gradient.

    It reads the upstream gradient (as large as the outputs), the weights and values of the forward pass (inputs of
    layers with weights, pools and products; outputs of activations). It writes the gradients of the inputs and of the
    trainable weights. Nothing moves where nothing before or in the layer is trainable.
    """
    macs, extra = multiply_adds(call), _elementwise_backward(call)
    wants_weights = call.trainable_bytes > 0
    alias = is_alias(call)
    idle = not wants_weights and not call.needs_input_gradient
    flops = None if macs is None and extra is None else 2 * (macs or 0) * (wants_weights + call.needs_input_gradient)
    moved = call.output_bytes + call.weight_bytes + call.trainable_bytes + _saved_bytes(call)
    if call.needs_input_gradient:
        moved += call.input_bytes
    published = published_flops(call)
    return Work(
        flops=0 if alias or idle else None if flops is None else flops + (extra or 0),
        bytes_moved=0 if alias or idle else moved,
        dtype=call.dtype,
        signature=signature(call, backward=True),
        published_flops=None if published is None else 2 * published,
        is_free=alias,
    )


def loss_work(outputs: tuple[Shape, ...], output_bytes: int, loss_bytes: int, dtype: str) -> Work:
    """Work of a cross entropy over the model's outputs: about 4 operations per element; 0 in the published count."""
    return Work(
        flops=4 * sum(map(prod, outputs)),
        bytes_moved=output_bytes + loss_bytes,
        dtype=dtype,
        signature=_signature("__loss__", {}, outputs, backward=False),
        published_flops=0,
    )


def is_alias(call: Call) -> bool:
    """Whether the layer only renames its input's storage (as published, it still is an operation with bytes)."""
    return call.rule in _ALIASES or (call.rule == "Activation" and _activation(call) == "linear")


def multiply_adds(call: Call) -> int | None:
    """Multiply-adds of the forward pass; None for layers without any."""
    rule = _MULTIPLY_ADDS.get(call.rule)
    return rule(call) if rule else None


def published_flops(call: Call) -> int | None:
    """The published count (see above); None for layers without a rule."""
    kind = call.rule
    if kind == "Conv2DTranspose":
        return call.layer.kernel.shape[-1] * call.n_out
    macs = multiply_adds(call)
    if macs is not None:
        return macs
    if kind in _NORMALIZATIONS:
        return 4 * call.n_in
    if kind in (*_MERGES, "Activation", "ReLU", "LeakyReLU", "ELU", "PReLU", "Softmax", "Rescaling", "Normalization"):
        return call.n_in
    if "UpSampling" in kind:
        return call.n_out * (1 if _is_nearest(call) else 5)
    uncounted = any(part in kind for part in ("Dropout", "Pooling", "Padding", "Cropping"))
    return 0 if uncounted or kind in (*_COPIES, *_ALIASES) else None


def signature(call: Call, *, backward: bool) -> str:
    """Canonical JSON from which the layer can be rebuilt and timed; '' for layers that are not Keras' own."""
    layer = call.layer
    if not type(layer).__module__.startswith("keras.") or call.rule == "Lambda" or not hasattr(layer, "weights"):
        return ""
    try:
        config = dict(layer.get_config())
        config.pop("name", None)
        return _signature(call.kind, config, call.inputs, backward)
    except (NotImplementedError, TypeError):
        return ""  # the configuration is not plain data, so a profiler cannot rebuild the layer


def _signature(kind: str, config: dict[str, Any], inputs: tuple[Shape, ...], backward: bool) -> str:
    content = {"fw": "keras", "class": kind, "config": config, "inputs": inputs, "backward": backward}
    return json.dumps(content, sort_keys=True, separators=(",", ":"))


def _convolution(call: Call) -> int:
    return prod(call.layer.kernel.shape[:-1]) * call.n_out


def _transposed(call: Call) -> int:
    # Every input element meets every kernel position and output channel.
    return prod(call.layer.kernel.shape[:-1]) * call.n_in


def _separable(call: Call) -> int:
    depthwise, pointwise = call.layer.depthwise_kernel.shape, call.layer.pointwise_kernel.shape
    middle, filters = pointwise[-2:]
    positions = call.n_out // filters
    return positions * middle * (prod(depthwise[:-2]) + filters)


def _recurrent(call: Call) -> int:
    batch, steps = call.inputs[0][:2]
    cell = call.layer.cell
    return batch * steps * (prod(cell.kernel.shape) + prod(cell.recurrent_kernel.shape))


_MULTIPLY_ADDS: dict[str, Callable[[Call], int]] = {
    **dict.fromkeys(("Conv1D", "Conv2D", "Conv3D", "Dense"), _convolution),
    **dict.fromkeys(("Conv1DTranspose", "Conv2DTranspose", "Conv3DTranspose"), _transposed),
    **dict.fromkeys(("DepthwiseConv1D", "DepthwiseConv2D"), lambda x: prod(x.layer.kernel.shape[:-2]) * x.n_out),
    **dict.fromkeys(("SeparableConv1D", "SeparableConv2D"), _separable),
    **dict.fromkeys(("SimpleRNN", "GRU", "LSTM"), _recurrent),
}


def _activation(call: Call) -> str:
    return getattr(getattr(call.layer, "activation", None), "__name__", "linear")


def _fused(call: Call) -> int:
    """Operations of the bias add and the fused activation of a layer with multiply-adds."""
    per_element = _ACTIVATION.get(_activation(call), _ACTIVATION_OTHER) + bool(getattr(call.layer, "use_bias", False))
    return per_element * call.n_out


def _window(call: Call) -> int:
    """Elements of all pooling windows together."""
    window = getattr(call.layer, "pool_size", None)  # global and adaptive pools read each input once
    return call.n_in if window is None else prod(window) * call.n_out


def _is_nearest(call: Call) -> bool:
    return getattr(call.layer, "interpolation", "nearest") == "nearest"


def _elementwise(call: Call) -> int | None:
    """Operations other than multiply-adds, forward; None without a rule."""
    kind = call.rule
    if kind in _MULTIPLY_ADDS:
        return _fused(call)
    if kind in _NORMALIZATIONS:
        return _NORMALIZATION_FORWARD * call.n_in
    if kind == "Activation":
        return _ACTIVATION.get(_activation(call), _ACTIVATION_OTHER) * call.n_out
    if kind in _PER_OUTPUT:
        return _PER_OUTPUT[kind] * call.n_out
    if kind in _MERGES:
        return (len(call.inputs) - 1 + (kind == "Average")) * call.n_out
    if "Pooling" in kind:
        return _window(call)
    if "Dropout" in kind:
        return 2 * call.n_out
    if "UpSampling" in kind:
        return 0 if _is_nearest(call) else 8 * call.n_out
    return 0 if "Padding" in kind or "Cropping" in kind else None


def _elementwise_backward(call: Call) -> int | None:
    """Operations of the gradient other than multiply-adds; None without a rule."""
    kind = call.rule
    if kind in _NORMALIZATIONS:
        return _NORMALIZATION_BACKWARD * call.n_in
    if "MaxPooling" in kind:
        return call.n_out
    if kind in ("Add", "Subtract"):
        return 0
    if kind == "Multiply":
        return len(call.inputs) * call.n_out
    if "UpSampling" in kind and _is_nearest(call):
        return call.n_out
    return _elementwise(call)


def _saved_bytes(call: Call) -> int:
    """Bytes of the forward pass's values that the gradient reads."""
    kind, inputs, outputs = call.rule, call.input_bytes, call.output_bytes
    if kind in _MULTIPLY_ADDS:
        reads_output = _activation(call) != "linear"
        return inputs * (call.trainable_bytes > 0) + outputs * reads_output
    if kind in _NORMALIZATIONS or kind in ("Multiply", "Maximum", "Minimum"):
        return inputs
    if "MaxPooling" in kind:
        return inputs + outputs
    if kind in _READS_OUTPUT:
        return outputs
    return 0 if _elementwise(call) is not None else inputs
