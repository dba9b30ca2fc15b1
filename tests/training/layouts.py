"""Run by test_layouts.py in a process of its own: training steps on meshes of eight CPU devices.

Arguments: "losses" or "program", a model of `MODELS`, an attention kind, then meshes ("data=1" is
one device). Prints, as JSON on the last line, for each mesh the layouts of the state, what the
compiled step sends between devices, and the losses where they are asked for.
"""

import json
import sys

import jax

from cumulant_jax.costs.collectives import collectives
from cumulant_jax.training import ExperimentConfig
from cumulant_jax.training.config import OptimizerConfig
from cumulant_jax.training.experiment import build
from cumulant_jax.training.mesh import batch_sharding, path_name, to_devices

VIT = {"dim": 32, "depth": 2, "heads": 4, "pool": "mean", "class_token": False}
MODELS = {
    "vit": ("vit_nano2", VIT),
    "vit of 16 tokens": ("vit_nano2", VIT | {"position": "sincos2d"}),
    "vit of 64 tokens": ("vit_nano2", VIT | {"position": "sincos2d", "patch_size": 1}),
    "tost": (
        "tost_small_12",
        {"patch_size": 2, "dim": 32, "depth": 2, "heads": 4, "class_depth": 1},
    ),
}
STEPS = 4


def experiment(model: str, attention: str, mesh: str):
    name, options = MODELS[model]
    config = ExperimentConfig(
        batch_size=32,
        total=f"{STEPS} steps",
        mesh=mesh,
        ema_decay=0.9,
        optimizer=OptimizerConfig(learning_rate=3e-3, warmup="2 steps"),
    )
    config = config.replace(
        model__name=name, model__attention=attention, model__options=options, data__name="digits"
    )
    return build(config, devices=jax.devices()[:1] if mesh == "data=1" else None)


def losses(parts, step) -> list[float]:
    with jax.set_mesh(parts.mesh):
        state, batches = parts.create_state(), parts.train_iterator()
        found = []
        for _ in range(STEPS):
            state, metrics = step(state, to_devices(next(batches), batch_sharding(parts.mesh)))
            found.append(float(metrics["loss"]))
        scores = parts.evaluate(parts.eval_step(), state)
        batches.close()
    return [*found, scores["loss"]]


def layouts(parts) -> dict[str, str]:
    flat = jax.tree_util.tree_flatten_with_path(parts.shapes)[0]
    return {path_name(path): str(tuple(leaf.sharding.spec)) for path, leaf in flat}


def compiled(parts):
    with jax.set_mesh(parts.mesh):
        return parts.compile_train_step().call


def main():
    what, model, attention, *meshes = sys.argv[1:]
    found = {}
    for mesh in meshes:
        parts = experiment(model, attention, mesh)
        step = compiled(parts)
        found[mesh] = {
            "losses": losses(parts, step) if what == "losses" else None,
            "layouts": layouts(parts),
            "collectives": [
                [c.kind, c.size_bytes, len(c.group)] for c in collectives(step.as_text())
            ],
        }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
