"""Augmentations against cases worked out by hand, np.pad and plain slicing."""

import numpy as np
import pytest

from cumulant_jax.data import augment
from cumulant_jax.data.augment import Crop, Flip

HIGH = 2**64 - 1


def words_for(*rows):
    return np.array(rows, np.uint64)


def test_flip_mirrors_only_the_chosen_images():
    first = [[1, 2, 3], [4, 5, 6]]
    images = np.array([first, first], np.uint8)[..., None]
    out = Flip()(images.copy(), words_for([0], [HIGH]))
    assert out[0, ..., 0].tolist() == [[3, 2, 1], [6, 5, 4]]
    assert out[1, ..., 0].tolist() == first


def test_flip_keeps_the_channels_of_a_pixel_together():
    image = np.array([[[1, 2, 3], [4, 5, 6]]], np.uint8)[None]
    assert Flip(probability=1)(image, words_for([0]))[0].tolist() == [[[4, 5, 6], [1, 2, 3]]]


@pytest.mark.parametrize("probability", [0.0, 0.25, 0.5, 1.0])
def test_flip_probability(probability):
    rng = np.random.default_rng(0)
    images = np.tile(np.array([0, 1], np.uint8).reshape(1, 1, 2, 1), (4000, 1, 1, 1))
    words = rng.integers(0, 2**64, (4000, 1), np.uint64)
    share = Flip(probability=probability)(images, words)[:, 0, 0, 0].mean()
    assert abs(share - probability) <= 5 * np.sqrt(probability * (1 - probability) / 4000)


def test_crop_by_hand():
    image = np.array([[1, 2, 3], [4, 5, 6], [7, 8, 9]], np.uint8)[None, ..., None]
    zero = Crop(padding=1, mode="zero")
    assert zero(image, words_for([0, 0]))[0, ..., 0].tolist() == [[0, 0, 0], [0, 1, 2], [0, 4, 5]]
    assert zero(image, words_for([1, 1]))[0, ..., 0].tolist() == image[0, ..., 0].tolist()
    assert zero(image, words_for([2, 1]))[0, ..., 0].tolist() == [[4, 5, 6], [7, 8, 9], [0, 0, 0]]
    reflect = Crop(padding=1, mode="reflect")
    assert reflect(image, words_for([0, 0]))[0, ..., 0].tolist() == [
        [5, 4, 5],
        [2, 1, 2],
        [5, 4, 5],
    ]
    assert reflect(image, words_for([1, 2]))[0, ..., 0].tolist() == [
        [2, 3, 2],
        [5, 6, 5],
        [8, 9, 8],
    ]


@pytest.mark.parametrize("mode", ["reflect", "zero"])
@pytest.mark.parametrize(("shape", "padding"), [((9, 6), 1), ((9, 6), 5), ((8, 8), 4)])
@pytest.mark.parametrize("channels", [1, 3])
def test_crop_is_a_window_of_the_padded_image(mode, shape, padding, channels):
    rng = np.random.default_rng(1)
    images = rng.integers(0, 256, (20, *shape, channels), np.uint8)
    words = rng.integers(0, 2**64, (20, 2), np.uint64)
    out = Crop(padding=padding, mode=mode)(images, words)
    sides = [(0, 0), (padding, padding), (padding, padding), (0, 0)]
    padded = np.pad(images, sides, mode={"zero": "constant", "reflect": "reflect"}[mode])
    for i in range(20):
        top, left = (int(word) % (2 * padding + 1) for word in words[i])
        expected = padded[i, top : top + shape[0], left : left + shape[1]]
        np.testing.assert_array_equal(out[i], expected, err_msg=f"image {i}")


def test_default_padding_is_an_eighth():
    images = np.random.default_rng(2).integers(0, 256, (5, 16, 32, 1), np.uint8)
    words = np.random.default_rng(3).integers(0, 2**64, (5, 2), np.uint64)
    np.testing.assert_array_equal(Crop()(images, words), Crop(padding=2)(images, words))


def test_an_example_does_not_depend_on_the_rest_of_the_batch():
    rng = np.random.default_rng(4)
    images = rng.integers(0, 256, (6, 8, 8, 3), np.uint8)
    words = rng.integers(0, 2**64, (6, 2), np.uint64)
    for transform in (Flip(), Crop(padding=3)):
        whole = transform(images.copy(), words)
        for i in range(6):
            alone = transform(images[i : i + 1].copy(), words[i : i + 1])
            np.testing.assert_array_equal(alone[0], whole[i])


def test_reflecting_too_far_is_an_error():
    with pytest.raises(ValueError, match="padding=4 cannot be reflected in images of 4 pixels"):
        Crop(padding=4)(np.zeros((1, 4, 9, 1), np.uint8), words_for([0, 0]))


def test_parse_reads_options():
    assert augment.parse([" crop ( padding = 3 ) ", "flip(probability=0.1)"]) == (
        Crop(padding=3),
        Flip(probability=0.1),
    )


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("flap", "unknown augmentation 'flap'; did you mean 'flip'"),
        (
            "crop(pading=3)",
            "unknown option of augmentation 'crop' 'pading'; did you mean 'padding'",
        ),
        ("crop(3)", "option of augmentation 'crop'"),
        ("crop(mode=wrap)", "unknown crop mode 'wrap'"),
        ("crop(padding=0)", "padding must be a positive integer, got 0"),
        ("flip(probability=2)", "probability must be in 0 .. 1, got 2"),
        ("flip(", "expected 'name'"),
        (3, "expected 'name'"),
    ],
)
def test_bad_specs(spec, message):
    with pytest.raises(ValueError) as caught:
        augment.parse([spec])
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        (Flip, {"probability": True}, "probability must be in 0 .. 1, got True"),
        (Flip, {"probability": float("nan")}, "probability must be in 0 .. 1, got nan"),
        (Crop, {"padding": True}, "padding must be a positive integer, got True"),
        (Crop, {"mode": ["zero"]}, "unknown crop mode ['zero']"),
    ],
)
def test_values_of_the_wrong_kind(kind, options, message):
    with pytest.raises(ValueError) as caught:
        kind(**options)
    assert message in str(caught.value)
