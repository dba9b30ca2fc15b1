"""ImageNet-1k at any size: vision transformers and ToST with any attention, for many devices.

Data: imagenet2012 prepared for TFDS, 1,281,167 training and 50,000 validation images.
Recipe: 300 epochs of AdamW, batch 1,024, learning rate 1e-3 (scaled with the batch size), 20 epochs
of warm-up, weight decay 0.05, label smoothing 0.1, mixup 0.8, cutmix 1.0, drop path 0.1, as DeiT
(arXiv 2012.12877, table 9) has it, but for its random augmentations and erasing, which are not here
yet: expect less accuracy than published. It has not been run to the end: no figure is claimed.

    python -m experiments.train --config configs/imagenet2012.py:model=vit_b16,attention=cumulant3 \
        --directory runs/imagenet-vit-b
    python -m experiments.plan --config configs/imagenet2012.py:model=vit_b16,attention=cumulant3 \
        --topology v5e:4x8 --batch-sizes 1024,2048

Arguments: model (vit_s16, vit_b16, tost_small_12, …), attention (any kind, or kinds by layer joined
by "+"), size (of the images in pixels), seed.
"""

from cumulant_jax.training import config_arguments, default_config_dict


def get_config(arg: str = ""):
    """Returns the config; `arg` is a string such as "model=vit_b16,attention=cumulant3"."""
    arguments = config_arguments(arg, model="vit_s16", attention="cumulant3", size=224, seed=0)
    config = default_config_dict()
    config.seed = arguments.seed
    config.batch_size = 1024
    config.total = "300 epochs"
    config.evaluate_every = "5 epochs"
    config.checkpoint_every = "5 epochs"
    config.log_every = "100 steps"
    config.ema_decay = 0.9999
    config.mesh = "fsdp=-1"

    config.model.name = arguments.model
    config.model.attention = arguments.attention
    config.model.dtype = "bfloat16"
    config.model.options.drop_path = 0.1
    if arguments.model.startswith("vit"):
        config.model.options.pool = "mean"
        config.model.options.class_token = False  # tokens that a mesh can split evenly

    config.data.name = "imagenet2012"
    config.data.image_size = arguments.size
    config.data.augment = ("flip",)
    config.data.cache = "none"

    # Follows the batch size, also where the command line changes that.
    config.optimizer.learning_rate = config.get_ref("batch_size").to_float() * (1e-3 / 1024)
    config.optimizer.warmup = "20 epochs"
    config.optimizer.weight_decay = 0.05

    config.mixing.label_smoothing = 0.1
    config.mixing.mixup = 0.8
    config.mixing.cutmix = 1.0
    return config
