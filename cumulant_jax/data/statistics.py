"""Channel means and standard deviations: published ones, or computed from the training split."""

import numpy as np

from cumulant_jax.data.source import ArraySource, ImageSource

_IMAGENET = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
# Means and standard deviations for pixels in 0..1, in the values that the field's recipes use.
PUBLISHED: dict[str, tuple[tuple[float, ...], tuple[float, ...]]] = {
    "cifar10": ((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)),
    "cifar100": ((0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762)),
    "imagenet2012": _IMAGENET,
    "imagenette": _IMAGENET,
}
_SAMPLE = 2048
_CHUNK = 4096


def channel_statistics(source: ImageSource) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Computes the mean and standard deviation of every channel, for pixels in 0..1.

    Every image in memory is used; of a source that decodes on demand, 2,048 images at equal
    distances. A constant channel gets the standard deviation 1.

    Args:
      source: the training split.

    Returns:
      (means, standard deviations), one number per channel, rounded to 4 digits.

    >>> white = ArraySource(np.full((2, 4, 4, 1), 255, np.uint8), np.zeros(2, np.int32))
    >>> channel_statistics(white)
    ((1.0,), (1.0,))
    """
    count = len(source)
    if isinstance(source, ArraySource) or count <= _SAMPLE:
        indices = np.arange(count)
    else:
        indices = np.arange(_SAMPLE) * count // _SAMPLE
    channels = source.image_shape[2]
    histogram = np.zeros((channels, 256))
    for start in range(0, len(indices), _CHUNK):
        images, _ = source.gather(indices[start : start + _CHUNK])
        for channel in range(channels):
            histogram[channel] += np.bincount(images[..., channel].ravel(), minlength=256)
    values = np.arange(256) / 255
    weights = histogram / histogram.sum(axis=1, keepdims=True)
    mean = weights @ values
    std = np.sqrt((weights * (values - mean[:, None]) ** 2).sum(axis=1))
    std = np.where(std > 1e-4, std, 1.0)
    return _rounded(mean), _rounded(std)


def _rounded(values: np.ndarray) -> tuple[float, ...]:
    return tuple(round(float(value), 4) for value in values)
