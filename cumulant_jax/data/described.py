"""Descriptions of data sets that are not there, for compiling a training step without its data."""

from cumulant_jax.data.config import DataConfig
from cumulant_jax.data.dataset import DatasetInfo, load
from cumulant_jax.data.statistics import PUBLISHED
from cumulant_jax.naming import unknown_name

# Name to (classes, training images, evaluation images, side in pixels where all have one), as the
# data sets' publications give them.
_PUBLISHED_SIZES: dict[str, tuple[int, int, int, int | None]] = {
    "imagenet2012": (1000, 1_281_167, 50_000, None),
    "cifar10": (10, 50_000, 10_000, 32),
    "cifar100": (100, 50_000, 10_000, 32),
    "imagenette": (10, 9_469, 3_925, None),
    "oxford_flowers102": (102, 1_020, 6_149, None),
    "oxford_iiit_pet": (37, 3_680, 3_669, None),
    "food101": (101, 75_750, 25_250, None),
    "svhn_cropped": (10, 73_257, 26_032, 32),
}


def describe(config: DataConfig) -> DatasetInfo:
    """Describes a data set, from its files where they are there, else as it was published.

    Args:
      config: which data set, and the size of its images.

    Raises:
      FileNotFoundError: it is not prepared, and nothing is known of it.
      ValueError: images of different sizes, and no `image_size`.

    >>> describe(DataConfig(name="imagenet2012", image_size=224, data_dir="nowhere")).num_classes
    1000
    """
    try:
        return load(config).info
    except FileNotFoundError as error:
        name = config.name.partition("/")[0].partition(":")[0]
        if name not in _PUBLISHED_SIZES:
            known = unknown_name("data set", name, _PUBLISHED_SIZES)
            raise FileNotFoundError(f"{error} Without its files it is an {known}") from None
    classes, num_train, num_eval, side = _PUBLISHED_SIZES[name]
    size = config.image_size or (None if side is None else (side, side))
    if size is None:
        raise ValueError(
            f"config key data.image_size: got None, expected a size: the images of {name} differ."
        )
    height, width = size
    zeros, ones = (0.0,) * 3, (1.0,) * 3
    mean, std = PUBLISHED.get(name, (zeros, ones))
    return DatasetInfo(
        name=name,
        version="published",
        num_classes=classes,
        class_names=tuple(map(str, range(classes))),
        image_shape=(height, width, 3),
        mean=config.mean or mean,
        std=config.std or std,
        num_train=num_train,
        num_eval=num_eval,
    )
