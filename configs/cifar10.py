"""CIFAR-10: attention kinds in small ViTs on 32x32 photographs.

Data: CIFAR-10 prepared for TFDS, 50,000 training and 10,000 test images; flips and crops.
Model: ViT on patches of 4x4 pixels (64 tokens), mean pooling, learned positions.

    python -m experiments.train --config configs/cifar10.py:attention=cumulant3 \
        --directory runs/cifar10-cumulant3
    python -m experiments.train --config configs/cifar10.py:attention=cumulant3,variant=ti4 \
        --config.batch_size=256 --directory runs/cifar10-ti4

Expected after 1,200 steps of 64 images of the default variant, mean of seeds 0 to 2: softmax 48.9,
linear 48.5, cumulant2 49.5, cumulant3 50.0, tssa 44.4 % test accuracy (docs/benchmarks.md).
Time: about 2 minutes a kind on two CPU cores, the first run decodes the images for 10 s more.

Arguments: attention (any kind, or kinds by layer joined by "+"), variant (nano4, ti4, s4, …), seed.
"""

from cumulant_jax.training import config_arguments, default_config_dict


def get_config(arg: str = ""):
    """Returns the config; `arg` is a string such as "attention=cumulant3,variant=ti4"."""
    arguments = config_arguments(arg, attention="softmax", variant="nano4", seed=0)
    config = default_config_dict()
    config.seed = arguments.seed
    config.batch_size = 64
    config.total = "1200 steps"
    config.evaluate_every = "300 steps"
    config.checkpoint_every = "300 steps"
    config.log_every = "50 steps"
    config.eval_batch_size = 250

    config.model.name = f"vit_{arguments.variant}"
    config.model.attention = arguments.attention
    config.model.options.pool = "mean"
    config.model.options.position = "learned"

    config.data.name = "cifar10"
    config.data.augment = ("flip", "crop")

    config.optimizer.learning_rate = 1.5e-3
    config.optimizer.warmup = "100 steps"
    config.optimizer.weight_decay = 0.05
    return config
