"""Times PyTorch's counterparts of our operations.

Run as a program, by any Python that has PyTorch:

    python torch_peers.py '{"tokens": 4096, "batch": 1, "heads": 6, "dim": 64, "dtype": "float32"}'

It prints one JSON object: peer, then "forward" and "both" (with the backward pass), in seconds. It
imports nothing of this package, so that PyTorch may live in an environment of its own. Triton
kernels of flash-linear-attention are among the peers where that is installed, on a GPU.
"""

import json
import statistics
import sys
import time


def sdpa(torch):
    """PyTorch's scaled dot-product attention; tokens come before heads in our arrays."""

    def run(q, k, v):
        swapped = (x.transpose(1, 2) for x in (q, k, v))
        return torch.nn.functional.scaled_dot_product_attention(*swapped).transpose(1, 2)

    return run


def token_statistics(torch):
    """The operator of ToST, by its formulas, on arrays [batch, heads, tokens, dim]."""

    def run(w, _k, _v):
        w = w.transpose(1, 2)
        shares = torch.nn.functional.normalize(w, dim=-2).square().sum(-1)
        membership = torch.softmax(shares, dim=1)
        weights = membership / (membership.sum(-1, keepdim=True) + 1e-8)
        moments = torch.matmul(weights.unsqueeze(-2), w.square())
        return (-(w * membership.unsqueeze(-1)) / (1 + moments)).transpose(1, 2)

    return run


def triton_linear_attention(torch):
    """Causal linear attention of flash-linear-attention."""
    from fla.ops.linear_attn import chunk_linear_attn  # pyright: ignore[reportMissingImports]

    del torch

    def run(q, k, v):
        return chunk_linear_attn(q, k, v, normalize=False)[0]

    return run


PEERS = {
    "torch scaled_dot_product_attention": sdpa,
    "torch token statistics": token_statistics,
    "fla chunk_linear_attn": triton_linear_attention,
}


def measure(case, rounds=7, least_seconds=0.2):
    """Seconds by peer; a peer that is not installed, or cannot run here, is left out."""
    import torch  # pyright: ignore[reportMissingImports]

    device = "cuda" if torch.cuda.is_available() else "cpu"
    wait = torch.cuda.synchronize if device == "cuda" else lambda: None
    shape = (case["batch"], case["tokens"], case["heads"], case["dim"])
    dtype = getattr(torch, case["dtype"])
    torch.manual_seed(0)
    inputs = [torch.randn(shape, device=device, dtype=dtype, requires_grad=True) for _ in range(3)]
    cotangent = torch.randn(shape, device=device, dtype=dtype)
    found = {}
    for name, make in PEERS.items():
        try:
            function = make(torch)

            out = function(*inputs)
            grads = torch.autograd.grad(out, inputs, cotangent, allow_unused=True)
            used = [x for x, g in zip(inputs, grads, strict=True) if g is not None]

            def forward(function=function):
                with torch.no_grad():
                    function(*inputs)

            def both(function=function, used=used):
                torch.autograd.grad(function(*inputs), used, cotangent)

            found[name] = {
                "forward": median_seconds(forward, wait, rounds, least_seconds),
                "both": median_seconds(both, wait, rounds, least_seconds),
            }
        except (ImportError, RuntimeError, AttributeError):
            continue
    return {"torch": torch.__version__, "device": device, "seconds": found}


def median_seconds(call, wait, rounds, least_seconds):
    """The median over rounds of the time per call."""
    call()
    wait()
    began = time.perf_counter()
    call()
    wait()
    calls = max(1, round(least_seconds / max(time.perf_counter() - began, 1e-9)))
    times = []
    for _ in range(rounds):
        began = time.perf_counter()
        for _ in range(calls):
            call()
        wait()
        times.append((time.perf_counter() - began) / calls)
    return statistics.median(times)


if __name__ == "__main__":
    json.dump(measure(json.loads(sys.argv[1])), sys.stdout)
