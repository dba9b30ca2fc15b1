"""Compiles training steps for devices that are not there; `experiments.plan` starts it.

    python -m experiments.compile_step --platform tpu --topology v5p:8x8x4 < requests

Runs in an environment with that chip's compiler. Standard input has one JSON object per line: a
config, and the description of its data set. Standard output answers each with what the compiler
says, or with an "error".
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import re
import sys
import time
import traceback
from typing import Any

from experiments import compiler_targets

# What XLA says where a program needs more memory than a device has.
_TOO_LARGE = re.compile(r"RESOURCE_EXHAUSTED|out of memory|Ran out of memory", re.IGNORECASE)


def main(argv: list[str] | None = None) -> int:
    """Answers every request on standard input."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--platform", choices=("gpu", "tpu"), required=True)
    parser.add_argument("--topology", required=True)
    args = parser.parse_args(argv)
    compiler_targets.prepare(args.platform)
    devices = compiler_targets.devices(args.platform, args.topology)
    print(json.dumps({"devices": len(devices)}), flush=True)
    for line in sys.stdin:
        try:
            answer = compile_step(json.loads(line), devices)
        except Exception as error:  # whatever the compiler says of one mesh, the others go on
            traceback.print_exc()
            first = (str(error).strip().splitlines() or [""])[0]
            is_known = isinstance(error, ValueError | NotImplementedError)
            kind = "" if is_known else f"{type(error).__name__}: "
            answer = {"error": f"{kind}{first[:400]}"}
        print(json.dumps(answer), flush=True)
    return 0


def compile_step(request: dict[str, Any], devices: list[Any]) -> dict[str, Any]:
    """Compiles the training step of one config, and reports."""
    import jax

    from cumulant_jax.costs.collectives import collectives
    from cumulant_jax.data import DatasetInfo
    from cumulant_jax.kernels import assume_device
    from cumulant_jax.training import ExperimentConfig
    from cumulant_jax.training.experiment import build
    from cumulant_jax.training.tasks import create_task

    config = ExperimentConfig.from_dict(request["config"])
    info = DatasetInfo(**request["info"])
    began = time.perf_counter()
    with assume_device(compiler_targets.assumed(devices)):
        parts = build(config, devices=devices, task=create_task(config, info=info))
        with jax.set_mesh(parts.mesh):
            lowered = parts.trace_train_step().lower()
            shape = dict(parts.mesh.shape)
            try:
                compiled = lowered.compile()
            except jax.errors.JaxRuntimeError as error:
                if not _TOO_LARGE.search(str(error)):
                    raise
                return {"mesh": shape, "too_large": str(error).splitlines()[0][:400]}
    memory = compiled.memory_analysis()
    costs = compiled.cost_analysis() or {}
    # The compiler for GPUs does not tell: at least all arguments and results, and what is in
    # memory at one time between them, written and read.
    least = (
        memory.argument_size_in_bytes + memory.output_size_in_bytes + 2 * memory.temp_size_in_bytes
    )
    return {
        "mesh": shape,
        "memory_bytes": memory.argument_size_in_bytes
        + memory.temp_size_in_bytes
        + memory.output_size_in_bytes
        - memory.alias_size_in_bytes
        + memory.generated_code_size_in_bytes,
        "traffic_bytes": costs.get("bytes accessed", least),
        "collectives": [dataclasses.asdict(c) for c in collectives(compiled.as_text() or "")],
        "seconds": time.perf_counter() - began,
    }


if __name__ == "__main__":
    sys.exit(main())
