import jax
import jax.numpy as jnp
import numpy as np
import pytest

from cumulant_jax.training import MixingConfig
from cumulant_jax.training.mixing import cutmix, mix, mixup, soft_labels


@pytest.fixture
def batch():
    rng = np.random.default_rng(11)
    images = rng.normal(size=(6, 8, 10, 3)).astype(np.float32)
    targets = np.eye(5, dtype=np.float32)[rng.integers(0, 5, 6)]
    return images, targets


def test_soft_labels():
    labels = soft_labels(jnp.array([2, 0]), num_classes=4, smoothing=0.1)
    expected = [[0.025, 0.025, 0.925, 0.025], [0.925, 0.025, 0.025, 0.025]]
    np.testing.assert_allclose(labels, expected, rtol=1e-6)
    hard = soft_labels(jnp.array([2, 0]), num_classes=4)
    np.testing.assert_array_equal(hard, np.eye(4)[[2, 0]])


def test_mixup_blends_each_example_with_the_one_before(batch):
    images, targets = batch
    mixed, soft = mixup(images, targets, share=jnp.float32(0.3))
    for i in range(6):
        np.testing.assert_allclose(mixed[i], 0.3 * images[i] + 0.7 * images[i - 1], rtol=1e-5)
        np.testing.assert_allclose(soft[i], 0.3 * targets[i] + 0.7 * targets[i - 1], rtol=1e-5)


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("share", [0.0, 0.2, 0.75, 1.0])
def test_cutmix_pastes_one_box_and_weighs_the_labels_by_its_area(batch, seed, share):
    images, targets = batch
    mixed, soft = cutmix(images, targets, share=jnp.float32(share), rng=jax.random.key(seed))
    mixed, soft = np.asarray(mixed), np.asarray(soft)
    pasted = (mixed == np.roll(images, 1, axis=0)).all(axis=-1)
    kept = (mixed == images).all(axis=-1)
    assert (pasted ^ kept).all()
    assert (pasted == pasted[:1]).all()
    rows, columns = np.nonzero(pasted[0])
    if len(rows):
        box = pasted[0, rows.min() : rows.max() + 1, columns.min() : columns.max() + 1]
        assert box.all()
        # A box cut off at a border is smaller than its share, and may be rounded up a pixel.
        side = np.sqrt(1 - share)
        assert box.shape[0] <= np.ceil(side * 8) + 1
        assert box.shape[1] <= np.ceil(side * 10) + 1
    area = pasted[0].mean()
    np.testing.assert_allclose(
        soft, (1 - area) * targets + area * np.roll(targets, 1, axis=0), rtol=1e-5, atol=1e-6
    )


def test_whole_and_empty_boxes(batch):
    images, targets = batch
    mixed, soft = cutmix(images, targets, share=jnp.float32(1.0), rng=jax.random.key(0))
    np.testing.assert_array_equal(mixed, images)
    np.testing.assert_array_equal(soft, targets)


def test_mix_draws_between_both_kinds_and_none(batch):
    images, targets = batch
    config = MixingConfig(mixup=0.4, cutmix=1.0, probability=0.5)
    run = jax.jit(lambda key: mix(images, targets, rng=key, config=config))
    counts = {"none": 0, "box": 0, "blend": 0}
    for seed in range(200):
        mixed, soft = map(np.asarray, run(jax.random.key(seed)))
        np.testing.assert_allclose(soft.sum(axis=-1), 1.0, rtol=1e-5)
        if (mixed == images).all():
            counts["none"] += 1
        elif ((mixed == images) | (mixed == np.roll(images, 1, axis=0))).all():
            counts["box"] += 1
        else:
            counts["blend"] += 1
    # 100, 50, 50 expected; a box or a share may come out as nothing, or a share as everything.
    assert 75 <= counts["none"] <= 140, counts
    assert 20 <= counts["box"] <= 80, counts
    assert 20 <= counts["blend"] <= 75, counts


@pytest.mark.parametrize(
    "config", [MixingConfig(), MixingConfig(mixup=0.4, probability=0.0)], ids=str
)
def test_mixing_that_is_off_returns_what_came(batch, config):
    images, targets = batch
    mixed, soft = mix(images, targets, rng=jax.random.key(0), config=config)
    assert mixed is images
    assert soft is targets
