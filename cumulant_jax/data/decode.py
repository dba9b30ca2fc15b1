"""Encoded image bytes to uint8 arrays with Pillow, resized to one size where asked."""

import io

import numpy as np
from PIL import Image

_MODES = {1: "L", 3: "RGB", 4: "RGBA"}


def decode_image(
    data: bytes, *, channels: int, image_size: tuple[int, int] | None = None
) -> np.ndarray:
    """Decodes a PNG, JPEG or other image that Pillow reads.

    Args:
      data: the encoded image.
      channels: 1 (grey), 3 (RGB) or 4 (RGBA); an image stored otherwise is converted.
      image_size: (height, width) to resize and crop to; None keeps the stored size.

    Returns:
      uint8 [H, W, channels].

    Raises:
      OSError: the bytes are no image or are damaged.
    """
    with Image.open(io.BytesIO(data)) as image:
        mode = _MODES[channels]
        pixels = image if image.mode == mode else image.convert(mode)
        if image_size is not None:
            pixels = resize_and_crop(pixels, image_size)
        return np.asarray(pixels).reshape(pixels.height, pixels.width, channels)


def resize_and_crop(image: Image.Image, image_size: tuple[int, int]) -> Image.Image:
    """Scales an image until it just covers `image_size` (height, width), then crops the centre.

    The scaling is bicubic and keeps the aspect ratio; an image of that size is returned as it is.
    """
    height, width = image_size
    scale = max(height / image.height, width / image.width)
    scaled = (max(width, round(image.width * scale)), max(height, round(image.height * scale)))
    if scaled != image.size:
        image = image.resize(scaled, Image.Resampling.BICUBIC)
    left, top = (image.width - width) // 2, (image.height - height) // 2
    if (left, top) == (0, 0) and image.size == (width, height):
        return image
    return image.crop((left, top, left + width, top + height))
