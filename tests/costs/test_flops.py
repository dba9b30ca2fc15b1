import jax
import jax.numpy as jnp
import numpy as np

from cumulant_jax.costs.flops import count_flops


def test_products_of_batches_and_their_gradients():
    x, w = np.ones((4, 10, 6), np.float32), np.ones((6, 8), np.float32)

    def loss(w, x):
        return jnp.sum(jnp.sin(x @ w))

    forward = 2 * 4 * 10 * 6 * 8
    assert count_flops(loss, w, x) == forward
    assert count_flops(jax.grad(loss), w, x) == 2 * forward
    assert count_flops(jax.jit(jax.grad(loss, argnums=(0, 1))), w, x) == 3 * forward


def test_loops_branches_and_recomputation():
    x = np.ones((6, 6), np.float32)

    def five(x):
        return jax.lax.scan(lambda y, _: (y @ y, None), x, None, length=5)[0]

    assert count_flops(five, x) == 5 * 2 * 6**3

    def branch(x):
        return jax.lax.cond(x[0, 0] > 0, lambda y: y @ y @ y, lambda y: y @ y, x)

    assert count_flops(branch, x) == 2 * 2 * 6**3
    again = jax.grad(lambda x: jnp.sum(jax.checkpoint(lambda y: jnp.sin(y @ y))(x)))
    assert count_flops(again, x) == 4 * 2 * 6**3


def test_a_convolution_is_the_product_of_its_patches():
    images, kernel = np.ones((2, 8, 8, 3), np.float32), np.ones((3, 3, 3, 5), np.float32)

    def convolve(images, kernel):
        return jax.lax.conv_general_dilated(
            images, kernel, (2, 2), ((1, 1), (1, 1)), dimension_numbers=("NHWC", "HWIO", "NHWC")
        )

    forward = 2 * (2 * 4 * 4) * 5 * (3 * 3 * 3)
    assert count_flops(convolve, images, kernel) == forward
    gradients = jax.grad(lambda *a: jnp.sum(convolve(*a) ** 2), argnums=(0, 1))
    # Edges: the transposed convolutions are counted with what they pad.
    assert 3 * forward <= count_flops(gradients, images, kernel) <= 3.6 * forward


def test_a_vit_has_its_published_flops():
    """ViT-S/16 at 224 px: 4.6 G multiply-adds (DeiT, arXiv 2012.12877, table 5)."""
    from flax import nnx

    from cumulant_jax import models

    model = nnx.eval_shape(lambda: models.create("vit_s16", num_classes=1000, rngs=nnx.Rngs(0)))
    graphdef, params = nnx.split(model)
    images = jax.ShapeDtypeStruct((1, 224, 224, 3), jnp.float32)
    flops = count_flops(lambda params, images: nnx.merge(graphdef, params)(images), params, images)
    np.testing.assert_allclose(flops / 2, 4.6e9, rtol=0.01)
