"""Compiles kernels for a chip that is not there; `experiments.inspect_kernels` starts it.

    python -m experiments.compile_kernels --platform tpu --topology v5e:2x4 --directory DIR < cases

Runs in an environment with that chip's compiler, which has neither this project's data packages nor
its figures. Standard input has one JSON object per line: kind, is_causal, batch, tokens, heads, dim
and dtype. Each is traced as a program for the chip, forward and as a training step, and every
kernel in it is compiled by itself. Standard output has one JSON object per kernel, one with a
"reason" for a case that XLA serves, one with an "error" for a case that fails. DIR/N holds what the
compiler dumped of kernel N.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import json
import logging
import math
import shutil
import sys
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from experiments import compiler_targets

_DUMPS = "dumps"


def _keep_gpu(dumps: Path, target: Path) -> None:
    for pattern, name in (
        ("*.ptx", "kernel.ptx"),
        ("*.ptxas", "ptxas.txt"),
        ("*.before_layout_inference.txt", "module.mlir"),
    ):
        (found,) = dumps.glob(pattern)
        shutil.move(found, target / name)


def _keep_tpu(dumps: Path, target: Path) -> None:
    (found,) = dumps.glob("*-kernel.*-final_hlo-static-per-bundle-utilization.txt")
    shutil.move(found, target / "utilization.txt")


# What of the dumps stays.
_KEEP = {"gpu": _keep_gpu, "tpu": _keep_tpu}


def main(argv: list[str] | None = None) -> int:
    """Compiles the kernels of all cases on standard input."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--platform", choices=sorted(_KEEP), required=True)
    parser.add_argument("--topology", required=True)
    parser.add_argument("--directory", type=Path, required=True)
    args = parser.parse_args(argv)
    dumps = (args.directory / _DUMPS).resolve()
    dumps.mkdir(parents=True, exist_ok=True)
    keep = _KEEP[args.platform]
    compiler_targets.prepare(args.platform, dumps=dumps)
    target = compiler_targets.devices(args.platform, args.topology)[0]
    _reply({"versions": _versions()})
    seen: dict[Any, Path] = {}
    for line in sys.stdin:
        case = json.loads(line)
        try:
            for record, equation in _kernels_of(case, target):
                if equation is not None:
                    # A kernel that several cases share is compiled once.
                    key = (str(equation.params), tuple(str(x.aval) for x in equation.invars))
                    if key not in seen:
                        files = args.directory / str(len(seen))
                        _compile(equation, target, dumps, files, keep)
                        seen[key] = files
                    record |= {"files": str(seen[key].resolve())}
                _reply(case | record)
        except Exception as error:  # whatever the compiler says of one case, the others go on
            traceback.print_exc()
            _reply(case | {"error": f"{type(error).__name__}: {error}"[:500]})
    shutil.rmtree(dumps)
    return 0


def _kernels_of(case: dict[str, Any], target) -> Iterator[tuple[dict[str, Any], Any]]:
    """Records of the kernels of a case, with the equations that call them."""
    seen = set()
    for name, (function, arguments) in _programs(case).items():
        with _choices() as choices:
            jaxpr = _trace(function, arguments, target)
        equations = list(_kernel_equations(jaxpr.jaxpr))
        if not equations:
            reason = choices[-1] if choices else "no kernel is chosen for it"
            yield {"program": name, "reason": reason}, None
        for equation in equations:
            key = (_name(equation), *(str(x.aval) for x in (*equation.invars, *equation.outvars)))
            # The training step has the forward kernels again, unless they save something for it.
            if key not in seen:
                seen.add(key)
                yield {"program": name, **_facts(equation)}, equation


def _programs(case: dict[str, Any]):
    """Forward and training step on [batch, tokens, heads · dim], as projections make them."""
    import jax

    shape = (case["batch"], case["tokens"], case["heads"], case["dim"])
    attend = _attention(case)
    count = 1 if case["kind"] == "tssa" else 3

    def forward(*arrays):
        return attend(*(x.reshape(shape) for x in arrays)).reshape(arrays[0].shape)

    def train(out_bar, *arrays):
        out, pull = jax.vjp(forward, *arrays)
        return out, pull(out_bar)

    flat = jax.ShapeDtypeStruct((*shape[:2], shape[2] * shape[3]), case["dtype"])
    return {"forward": (forward, [flat] * count), "training": (train, [flat] * (count + 1))}


def _attention(case: dict[str, Any]):
    import cumulant_jax as cj

    is_causal = case["is_causal"]
    if case["kind"] == "tssa":
        return lambda w: cj.token_statistics_attention(w, temperature=1.0, is_causal=is_causal)
    return lambda q, k, v: cj.attention(case["kind"], q, k, v, is_causal=is_causal)


def _trace(function, arguments, target):
    import jax

    from cumulant_jax.kernels import assume_device

    with assume_device(compiler_targets.assumed([target])):
        return jax.make_jaxpr(function)(*arguments)


@contextlib.contextmanager
def _choices() -> Iterator[list[str]]:
    """Collects the log lines that say which implementation was chosen."""
    from cumulant_jax.kernels import implementation

    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logger = logging.getLogger("cumulant_jax")
    logger.setLevel(logging.INFO)
    logger.addHandler(handler)
    implementation._log.cache_clear()  # it speaks once per choice
    try:
        yield lines
    finally:
        logger.removeHandler(handler)


def _kernel_equations(jaxpr) -> Iterator[Any]:
    """The calls of kernels in a program, at any depth."""
    for equation in jaxpr.eqns:
        if equation.primitive.name in ("pallas_call", "mpmd_map"):
            yield equation
            continue
        for inner in _inner(equation):
            yield from _kernel_equations(inner)


def _inner(equation) -> Iterator[Any]:
    for value in equation.params.values():
        for item in value if isinstance(value, tuple | list) else [value]:
            item = getattr(item, "jaxpr", item)
            if hasattr(item, "eqns"):
                yield item


def _name(equation) -> str:
    meshes = equation.params.get("meshes")
    name = meshes[0].kernel_name if meshes else equation.params.get("name")
    return name or equation.params["name"] or "kernel"


def _facts(equation) -> dict[str, Any]:
    """What the program says of a kernel, before it is compiled."""
    arrays = [x.aval for x in (*equation.invars, *equation.outvars)]
    meshes, grid_mapping = equation.params.get("meshes"), equation.params.get("grid_mapping")
    grid = [int(n) for n in (meshes[0].grid if meshes else grid_mapping.grid)]
    return {
        "kernel": _name(equation),
        "grid": grid,
        "array_bytes": sum(x.size * x.dtype.itemsize for x in arrays),
        "moved_bytes": None if meshes else _moved_bytes(grid_mapping, grid),
        "has_loop": any(_has_loop(inner) for inner in _inner(equation)),
    }


def _has_loop(jaxpr) -> bool:
    return any(
        equation.primitive.name in ("scan", "while") or any(map(_has_loop, _inner(equation)))
        for equation in jaxpr.eqns
    )


def _moved_bytes(grid_mapping, grid: list[int]) -> int:
    """What a pipelined kernel moves: a block each time that its index changes along the grid."""
    import jax
    import jax.extend
    import numpy as np

    steps = np.indices(grid).reshape(len(grid), -1).T.astype(np.int32)
    total = 0
    for block in grid_mapping.block_mappings:
        mapping, array = block.index_map_jaxpr, block.array_aval
        shape = [_block_size(n) for n in block.block_shape]

        def index_of(step, mapping=mapping):
            return jax.extend.core.jaxpr_as_fun(mapping)(*step)

        indices = np.stack(jax.vmap(index_of)(steps), axis=-1)
        starts = indices * np.asarray(shape)
        sizes = np.clip(np.asarray(array.shape) - starts, 0, shape).prod(axis=-1)
        fetched = np.concatenate([[True], np.any(indices[1:] != indices[:-1], axis=-1)])
        total += int(sizes[fetched].sum()) * array.dtype.itemsize
    return total


def _block_size(size) -> int:
    """Along one axis; an axis that is squeezed away has 1."""
    size = getattr(size, "block_size", size)
    return size if isinstance(size, int) else 1


def _compile(equation, target, dumps: Path, files: Path, keep) -> None:
    """Compiles one kernel by itself and keeps what there is to read of it."""
    import jax
    import numpy as np
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    def kernel(*arrays):
        return equation.primitive.bind(*arrays, **equation.params)

    sharding = NamedSharding(Mesh(np.array([target]), ("x",)), PartitionSpec())
    arguments = [
        jax.ShapeDtypeStruct(x.aval.shape, x.aval.dtype, sharding=sharding) for x in equation.invars
    ]
    _empty(dumps)
    began = time.perf_counter()
    compiled = jax.jit(kernel).trace(*arguments).lower().compile()
    seconds = time.perf_counter() - began
    _empty(files)
    keep(dumps, files)
    (files / "program.hlo").write_text(compiled.as_text() or "", encoding="utf-8")
    print(f"{_name(equation)} {math.ceil(seconds)} s", file=sys.stderr, flush=True)


def _empty(directory: Path) -> None:
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)


def _versions() -> dict[str, str]:
    names = ("jax", "jaxlib", "libtpu", "jax-cuda13-plugin", "nvidia-cuda-nvcc")
    found = {x.metadata["Name"].lower(): x.version for x in importlib.metadata.distributions()}
    return {name: found[name] for name in names if name in found}


def _reply(record: dict[str, Any]) -> None:
    print(json.dumps(record), flush=True)


if __name__ == "__main__":
    sys.exit(main())
