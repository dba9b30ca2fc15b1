"""The initialisers of the models, in one place so that the models agree.

They follow timm's ViT: weights of linear layers are drawn from a normal of standard deviation
0.02, biases are zero, the class token starts at (almost) nothing and the patch embedding is LeCun
normal, its fan-in being the pixels of one patch. timm cuts its normal at an absolute plus or minus
2, which is 100 standard deviations and therefore no cut at all; here the cut is at 2 standard
deviations, which makes the standard deviation of the drawn numbers 0.0176.
"""

import jax

#: Weights of linear layers and learned position embeddings.
weight_init = jax.nn.initializers.truncated_normal(stddev=0.02)

#: Biases.
bias_init = jax.nn.initializers.zeros

#: The class token. A learned position embedding is added to it, which is what sets it apart at the
#: start.
class_token_init = jax.nn.initializers.normal(stddev=1e-6)

#: The patch embedding, a kernel of [patch height, patch width, channels, dim].
patch_init = jax.nn.initializers.lecun_normal(in_axis=(0, 1, 2), out_axis=3)

#: Convolutions, as PyTorch starts them: uniform within 1 / sqrt(fan-in) of zero.
conv_init = jax.nn.initializers.variance_scaling(1 / 3, "fan_in", "uniform")

#: Tables of a language model's tokens and positions, as in GPT-2.
embedding_init = jax.nn.initializers.normal(stddev=0.02)
