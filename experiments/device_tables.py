"""The benchmark of kernels and models on this device, and the tuning of block sizes."""

from __future__ import annotations

import importlib
import json
import math
from collections.abc import Callable
from pathlib import Path

import jax

from cumulant_jax.analysis.kernel_benchmark import (
    KernelCase,
    KernelResult,
    Rates,
    chosen_implementation,
    measure_case,
    seconds_of,
)
from cumulant_jax.analysis.model_benchmark import ModelTime
from cumulant_jax.analysis.tuning import Sizes, Trial, tune
from cumulant_jax.kernels.block_sizes import ENVIRONMENT_VARIABLE, read_table, try_sizes
from cumulant_jax.kernels.device import current_device

Say = Callable[[str], None]


def kernel_cases(
    kinds: list[str], tokens: list[int], *, dtype: str, heads: int, dim: int
) -> list[KernelCase]:
    """Every kind at every number of tokens, both ways; at ViT's 197 in a batch of 256."""
    cases = []
    for kind in kinds:
        for count in tokens:
            batch = 256 if count <= 256 else 1
            for is_causal in (False, True):
                cases.append(
                    KernelCase(
                        kind=kind,
                        is_causal=is_causal,
                        tokens=count,
                        batch=batch,
                        heads=heads,
                        dim=dim,
                        dtype=dtype,
                    )
                )
    return cases


def kernel_table(results: list[KernelResult], rates: Rates) -> list[str]:
    """Lines of markdown: time, share of the floor, and how many times slower each other is."""
    lines = [
        "## Kernels",
        "",
        f"This device copies {rates.bytes_per_second / 1e9:.0f} GB/s and multiplies large matrices "
        f"at {rates.flops_per_second / 1e12:.2f} TFLOP/s, measured in this run. `floor` is the "
        "least time that these allow for the bytes and FLOPs of the operation; `of floor` is floor "
        "/ time. `others` is their time over ours. `error` is against XLA in float32.",
        "",
        "| operation | batch | tokens | by | pass | ms | of floor | others | error |",
        "| --- | ---: | ---: | --- | --- | ---: | ---: | --- | ---: |",
    ]
    for result in results:
        case = result.case
        passes = zip(("forward", "both"), (result.forward, result.both), result.floor, strict=True)
        for name, seconds, floor in passes:
            own = seconds[result.implementation]
            others = [
                f"{n} {s / own:.2f}×" for n, s in seconds.items() if n != result.implementation
            ]
            cells = [
                *(case.name, str(case.batch), str(case.tokens), result.implementation, name),
                *(f"{1e3 * own:.3f}", f"{floor / own:.0%}", ", ".join(others)),
                f"{result.error:.1e}",
            ]
            lines.append(f"| {' | '.join(cells)} |")
    return [*lines, ""]


def model_table(times: list[ModelTime]) -> list[str]:
    """Lines of markdown: forward and backward of whole models, beside PyTorch's."""
    lines = [
        "## Models, forward and backward (224 pixels, batch 8, float32)",
        "",
        "| model | attention | ms | PyTorch ms | PyTorch / ours |",
        "| --- | --- | ---: | ---: | ---: |",
    ]
    for time in times:
        peer = time.torch_seconds
        beside = ("", "") if peer is None else (f"{1e3 * peer:.0f}", f"{peer / time.seconds:.2f}")
        cells = (time.name, time.attention, f"{1e3 * time.seconds:.0f}", *beside)
        lines.append(f"| {' | '.join(cells)} |")
    return [*lines, ""]


def measure_kernels(
    cases: list[KernelCase], rates: Rates, say: Say, **options
) -> list[KernelResult]:
    """Measures case by case."""
    results = []
    for index, case in enumerate(cases):
        say(f"kernel {index + 1} of {len(cases)}: {case.name}, {case.batch} × {case.tokens} tokens")
        results.append(measure_case(case, rates, **options))
    return results


def tune_block_sizes(
    tokens: list[int], path: Path, say: Say, *, dtype: str, heads: int, rounds: int
) -> list[str]:
    """Tunes the block sizes of this device, writes them to a table and returns lines about it."""
    cases = [
        KernelCase(kind="cumulant3", is_causal=causal, tokens=n, heads=heads, dtype=dtype)
        for n in tokens
        for causal in (False, True)
    ]
    name = chosen_implementation(cases[0])
    module = "token_pass" if name == "xla" else f"{name}.passes"
    candidates = importlib.import_module(f"cumulant_jax.kernels.{module}").CANDIDATES
    start = {size: values[len(values) // 2] for size, values in candidates.items()}

    def measure(sizes: Sizes) -> float:
        with try_sizes(name, sizes):
            jax.clear_caches()  # programs that were traced with other sizes
            times = [seconds_of(case, name, rounds=rounds) for case in cases]
        return math.prod(times) ** (1 / len(times))

    def report(trial: Trial) -> None:
        time = (
            "cannot run: " + trial.error
            if trial.seconds is None
            else f"{1e3 * trial.seconds:.3f} ms"
        )
        say(f"{trial.sizes}: {time}")

    best, trials = tune(candidates, measure, start=start, report=report)
    device = current_device()
    table = {n: dict(kinds) for n, kinds in read_table(path).items()} if path.is_file() else {}
    table.setdefault(name, {})[device.kind] = best
    path.write_text(json.dumps(table, indent=2) + "\n", encoding="utf-8")
    read_table.cache_clear()
    return [
        "## Block sizes",
        "",
        f"{name} on {device.kind}, cumulant3 forward and backward, bidirectional and causal, at "
        f"{', '.join(map(str, tokens))} tokens (geometric mean): best of {len(trials)}: {best}.",
        f"Written to {path}; to use it, set {ENVIRONMENT_VARIABLE}={path}, or add it to "
        "cumulant_jax/kernels/block_sizes.json for everyone.",
        "",
    ]
