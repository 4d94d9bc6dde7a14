"""Segmentation networks in Keras: U-Net, FCN8, SegNet and PSPNet on VGG, ResNet50, MobileNet or plain encoders.

The code is our own, except VGG, which is Keras's. Shapes follow the public "image-segmentation-keras" networks that
Checkmate's artifact measured (FCN8 and U-Net on VGG, the plain SegNet), so that the layer graphs agree. Papers:
Ronneberger et al. 2015 (U-Net), Long et al. 2015 (FCN), Badrinarayanan et al. 2017 (SegNet), Zhao et al. 2017
(PSPNet). NHWC.

An encoder computes features f1 to f5 at 1/2, 1/4, 1/8, 1/16, 1/32 of the input. A decoder ends in per-pixel scores,
flattened to [batch, pixels, classes] and normalised.
"""

from __future__ import annotations

from typing import Any

from remat.errors import InvalidInput, unknown_name
from remat.tf._keras import import_keras

Features = tuple[Any, Any, Any, Any, Any]


def unet(input_shape: tuple[int, ...] = (416, 608, 3), classes: int = 19, encoder: str = "vgg") -> Any:
    """U-Net: up from f4, joining f3, f2 and f1; scores at half the input's resolution."""
    image, (f1, f2, f3, f4, _) = _encode(input_shape, classes, encoder)
    x = _padded_conv(f4, 512, activation="relu")
    for feature, filters in ((f3, 256), (f2, 128), (f1, 64)):
        x = _layers().UpSampling2D(2)(x)
        x = _layers().Concatenate()([x, feature])
        x = _padded_conv(x, filters, activation="relu")
    x = _layers().Conv2D(classes, 3, padding="same")(x)
    return _pixelwise(image, x, f"unet_{encoder}")


def segnet(input_shape: tuple[int, ...] = (416, 608, 3), classes: int = 19, encoder: str = "plain") -> Any:
    """SegNet without pooling indices: up from f4, no skips; scores at half the input's resolution."""
    image, (_, _, _, f4, _) = _encode(input_shape, classes, encoder)
    x = _padded_conv(f4, 512)
    for filters in (256, 128, 64):
        x = _layers().UpSampling2D(2)(x)
        x = _padded_conv(x, filters)
    x = _layers().Conv2D(classes, 3, padding="same")(x)
    return _pixelwise(image, x, f"segnet_{encoder}")


def fcn8(input_shape: tuple[int, ...] = (416, 608, 3), classes: int = 19, encoder: str = "vgg") -> Any:
    """FCN-8s: a convolutional classifier on f5, fused with scores of f4 and f3, upsampled 8 times."""
    layers = _layers()
    image, (_, _, f3, f4, f5) = _encode(input_shape, classes, encoder)
    x = layers.Conv2D(4096, 7, padding="same", activation="relu")(f5)
    x = layers.Dropout(0.5)(x)
    x = layers.Conv2D(4096, 1, padding="same", activation="relu")(x)
    x = layers.Dropout(0.5)(x)
    x = layers.Conv2D(classes, 1)(x)
    for feature in (f4, f3):
        x = layers.Conv2DTranspose(classes, 4, strides=2, use_bias=False)(x)
        scores = layers.Conv2D(classes, 1)(feature)
        x = layers.Add()(_cropped_alike(x, scores))
    x = layers.Conv2DTranspose(classes, 16, strides=8, use_bias=False)(x)
    return _pixelwise(image, x, f"fcn8_{encoder}")


def pspnet(input_shape: tuple[int, ...] = (416, 608, 3), classes: int = 19, encoder: str = "resnet50") -> Any:
    """PSPNet: f5 with its averages over 1, 2, 3 and 6 regions a side; scores at a quarter of the resolution.

    Where the size of f5 is no multiple of the regions, they are rounded up and the upsampled map is cropped.
    """
    layers = _layers()
    image, (_, _, _, _, f5) = _encode(input_shape, classes, encoder)
    x = layers.Concatenate()([f5, *(_pyramid_level(f5, regions) for regions in (1, 2, 3, 6))])
    x = layers.Conv2D(512, 1, use_bias=False)(x)
    x = _normalised(x)
    x = layers.Conv2D(classes, 3, padding="same")(x)
    x = layers.UpSampling2D(8, interpolation="bilinear")(x)
    return _pixelwise(image, x, f"pspnet_{encoder}")


def _layers() -> Any:
    return import_keras().layers


def check(input_shape: tuple[int, ...], classes: int, encoder: str) -> None:
    """Refuse arguments that no network here can use; needs no Keras."""
    if encoder not in _ENCODERS:
        raise unknown_name("encoder", str(encoder), _ENCODERS)
    shape = tuple(input_shape)
    if len(shape) != 3 or shape[0] % 32 or shape[1] % 32 or min(shape) < 1:
        raise InvalidInput(
            f"input_size must be [height, width, channels], height and width multiples of 32, not {list(shape)}"
        )
    if isinstance(classes, bool) or not isinstance(classes, int) or classes < 1:
        raise InvalidInput(f"classes must be a positive integer, not {classes!r}")


def _encode(input_shape: tuple[int, ...], classes: int, encoder: str) -> tuple[Any, Features]:
    check(input_shape, classes, encoder)
    image = _layers().Input(tuple(input_shape))
    return image, _ENCODERS[encoder](image)


def _pixelwise(image: Any, scores: Any, name: str) -> Any:
    keras = import_keras()
    height, width, classes = scores.shape[1:]
    x = keras.layers.Reshape((height * width, classes))(scores)
    x = keras.layers.Activation("softmax")(x)
    return keras.Model(image, x, name=name)


def _padded_conv(x: Any, filters: int, activation: str | None = None) -> Any:
    """Explicit padding, 3x3 convolution, batch norm."""
    layers = _layers()
    x = layers.ZeroPadding2D(1)(x)
    x = layers.Conv2D(filters, 3, activation=activation)(x)
    return layers.BatchNormalization()(x)


def _normalised(x: Any) -> Any:
    layers = _layers()
    return layers.Activation("relu")(layers.BatchNormalization()(x))


def _cropped_alike(a: Any, b: Any) -> tuple[Any, Any]:
    """Both maps cut at the bottom and right to the smaller size; one layer per axis, even if it cuts nothing."""
    for axis in (2, 1):
        excess = a.shape[axis] - b.shape[axis]
        cut = [(0, 0), (0, 0)]
        cut[axis - 1] = (0, abs(excess))
        crop = _layers().Cropping2D(tuple(cut))
        a, b = (crop(a), b) if excess > 0 else (a, crop(b))
    return a, b


def _pyramid_level(feature: Any, regions: int) -> Any:
    layers = _layers()
    height, width = feature.shape[1:3]
    window = (-(-height // regions), -(-width // regions))
    x = layers.AveragePooling2D(window, strides=window, padding="same")(feature)
    x = layers.Conv2D(512, 1, use_bias=False)(x)
    x = _normalised(x)
    x = layers.UpSampling2D(window, interpolation="bilinear")(x)
    excess = (x.shape[1] - height, x.shape[2] - width)
    return layers.Cropping2D(((0, excess[0]), (0, excess[1])))(x) if any(excess) else x


def _vgg(x: Any) -> Features:
    """The convolutional part of VGG16 (Simonyan and Zisserman 2015)."""
    network = import_keras().applications.VGG16(include_top=False, weights=None, input_tensor=x)
    return tuple(network.get_layer(f"block{block}_pool").output for block in range(1, 6))


def _plain(x: Any) -> Features:
    """Five blocks of padding, convolution, batch norm, ReLU and pooling."""
    layers, features = _layers(), []
    for filters in (64, 128, 256, 256, 256):
        x = _padded_conv(x, filters)
        x = layers.Activation("relu")(x)
        x = layers.MaxPooling2D(2)(x)
        features.append(x)
    return tuple(features)  # pyright: ignore[reportReturnType]


def _mobilenet(x: Any) -> Features:
    """MobileNet (Howard et al. 2017), every convolution with explicit padding."""
    layers = _layers()

    def normalised(x: Any, name: str) -> Any:
        return layers.ReLU(6.0, name=f"{name}_relu")(layers.BatchNormalization(name=f"{name}_bn")(x))

    x = layers.ZeroPadding2D(1, name="conv1_pad")(x)
    x = normalised(layers.Conv2D(32, 3, strides=2, use_bias=False, name="conv1")(x), "conv1")
    features = []
    plan = [(64, 1), (128, 2), (128, 1), (256, 2), (256, 1), (512, 2), *[(512, 1)] * 5, (1024, 2), (1024, 1)]
    for block, (filters, stride) in enumerate(plan, start=1):
        if stride == 2:
            features.append(x)
        x = layers.ZeroPadding2D(1, name=f"conv_pad_{block}")(x)
        x = layers.DepthwiseConv2D(3, strides=stride, use_bias=False, name=f"conv_dw_{block}")(x)
        x = normalised(x, f"conv_dw_{block}")
        x = layers.Conv2D(filters, 1, use_bias=False, name=f"conv_pw_{block}")(x)
        x = normalised(x, f"conv_pw_{block}")
    return (*features, x)


def _resnet50(x: Any) -> Features:
    """ResNet50 (He et al. 2016), stride in the first 1x1 convolution of a stage; f2 padded back to an even size."""
    layers = _layers()
    x = layers.ZeroPadding2D(3)(x)
    f1 = x = layers.Conv2D(64, 7, strides=2, name="conv1")(x)
    x = layers.Activation("relu")(layers.BatchNormalization(name="bn_conv1")(x))
    x = layers.MaxPooling2D(3, strides=2)(x)
    features = [f1]
    for stage, (filters, blocks) in enumerate(((64, 3), (128, 4), (256, 6), (512, 3)), start=2):
        for i in range(blocks):
            stride = 2 if i == 0 and stage > 2 else 1
            x = _bottleneck(x, filters, stride, f"{stage}{chr(ord('a') + i)}", project=i == 0)
        if stage == 2:
            features.append(layers.Cropping2D(((0, 1), (0, 1)))(layers.ZeroPadding2D(1)(x)))
        else:
            features.append(x)
    return tuple(features)  # pyright: ignore[reportReturnType]


def _bottleneck(x: Any, filters: int, stride: int, label: str, project: bool) -> Any:
    layers, shortcut = _layers(), x
    for part, (width, kernel) in zip("abc", ((filters, 1), (filters, 3), (4 * filters, 1)), strict=True):
        strides = stride if part == "a" else 1
        x = layers.Conv2D(width, kernel, strides=strides, padding="same", name=f"res{label}_branch2{part}")(x)
        x = layers.BatchNormalization(name=f"bn{label}_branch2{part}")(x)
        if part != "c":
            x = layers.Activation("relu")(x)
    if project:
        shortcut = layers.Conv2D(4 * filters, 1, strides=stride, name=f"res{label}_branch1")(shortcut)
        shortcut = layers.BatchNormalization(name=f"bn{label}_branch1")(shortcut)
    return layers.Activation("relu")(layers.Add()([x, shortcut]))


_ENCODERS = {"vgg": _vgg, "plain": _plain, "mobilenet": _mobilenet, "resnet50": _resnet50}
