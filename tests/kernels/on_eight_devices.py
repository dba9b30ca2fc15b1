"""Run by test_over_mesh.py in a process of its own: attention on a mesh of eight CPU devices.

Compares outputs and gradients with those of one device, in float64, and reads in the compiled
program what is sent between the devices.
"""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import cumulant_jax as cj
from cumulant_jax.kernels import over_mesh

BATCH, HEADS, KEY_HEADS, DIM = 4, 4, 2, 4
SPECS = (
    P("data", "sequence", "tensor"),
    P("data", None, "tensor"),
    P(None, ("data", "tensor", "sequence")),
    P("data", "sequence"),
)
PAIRWISE = ("linear", "cumulant2", "cumulant3", "cumulant3_full", "cumulant4")


def mesh(axis_type):
    """Two devices along each of three axes."""
    return jax.make_mesh((2, 2, 2), ("data", "tensor", "sequence"), axis_types=(axis_type,) * 3)


def arrays(tokens, seed=0):
    random = np.random.default_rng(seed)
    heads = (HEADS, KEY_HEADS, KEY_HEADS, HEADS)
    q, k, v, w = (random.standard_normal((BATCH, tokens, h, DIM)) for h in heads)
    mask = random.random((BATCH, tokens)) < 0.8
    mask[0, : tokens // 2 + 3] = False
    return {"query": q, "key": k + 2, "value": v - 1, "w": w}, mask


def calls(tokens):
    """Name, function of the arrays, and the arrays it takes."""
    bias = jnp.linspace(-1, 1, HEADS * tokens).reshape(HEADS, tokens) / 10
    for causal in (False, True):
        for kind in PAIRWISE:

            def pairwise(x, mask, kind=kind, causal=causal):
                return cj.attention(kind, **x, mask=mask, is_causal=causal)

            yield f"{kind} causal={causal}", pairwise, ("query", "key", "value")

        def statistics(x, mask, causal=causal):
            options = {"is_causal": True, "denominator_bias": bias} if causal else {}
            return cj.token_statistics_attention(x["w"], temperature=1.5, mask=mask, **options)

        yield f"token_statistics causal={causal}", statistics, ("w",)


def gradient(call):
    def loss(x, mask):
        out = call(x, mask)
        return jnp.sum(jnp.sin(2 * out)), out

    return jax.jit(jax.grad(loss, has_aux=True))


def check_equal(name, actual, expected):
    (gradients, out), (true_gradients, true_out) = actual, expected
    named = {"output": (out, true_out)}
    named |= {f"gradient of {n}": (g, true_gradients[n]) for n, g in gradients.items()}
    for what, (a, e) in named.items():
        error = np.abs(np.asarray(a) - e).max() / np.abs(e).max()
        assert error < 1e-11, f"{name}, {what}: relative error {error:.1e}"


def check_values():
    tokens = 264
    inputs, mask = arrays(tokens)
    for name, call, needs in calls(tokens):
        for m, specs in ((mask, SPECS), (None, SPECS[:1])):
            plain = {n: jnp.asarray(inputs[n]) for n in needs}
            with jax.default_device(jax.devices()[0]):
                expected = jax.tree.map(np.asarray, gradient(call)(plain, m))
            for spec in specs:
                sharding = NamedSharding(mesh(AxisType.Auto), spec)
                placed = {n: jax.device_put(x, sharding) for n, x in plain.items()}
                actual = gradient(call)(placed, m)
                assert actual[1].sharding.is_equivalent_to(sharding, 4), (name, spec)
                check_equal(f"{name} {spec} masked={m is not None}", actual, expected)


def check_state():
    """The state, and gradients through it, do not depend on the mesh."""
    inputs, _ = arrays(264)
    first, second = (
        {n: jnp.asarray(x[:, s]) for n, x in inputs.items()}
        for s in (slice(0, 128), slice(128, 264))
    )
    keys = ("query", "key", "value")

    def loss(first, second):
        total = 0
        for kind in ("linear", "cumulant3"):
            a, b = ({n: x[n] for n in keys} for x in (first, second))
            _, state = cj.attention(kind, **a, is_causal=True, return_state=True)
            out, state = cj.attention(
                kind, **b, is_causal=True, initial_state=state, return_state=True
            )
            total += jnp.sum(jnp.sin(out))
            if kind == "linear":  # those of cumulants are about a pivot, which is free
                total += jnp.sum(jnp.cos(state.sums / 50))
        options = {"temperature": 1.5, "is_causal": True, "return_state": True}
        _, state = cj.token_statistics_attention(first["w"], **options)
        out, state = cj.token_statistics_attention(second["w"], initial_state=state, **options)
        return total + jnp.sum(jnp.sin(out)) + sum(jnp.sum(jnp.cos(x / 50)) for x in state)

    run = jax.jit(jax.grad(loss, argnums=(0, 1)))
    expected = run(first, second)
    sharding = NamedSharding(mesh(AxisType.Auto), P("data", ("tensor", "sequence")))
    actual = run(*jax.device_put((first, second), sharding))
    for part, (a, e) in enumerate(zip(actual, expected, strict=True)):
        for n in a:
            error = np.abs(a[n] - e[n]).max() / max(np.abs(e[n]).max(), 1e-3)
            assert error < 1e-11, f"state, gradient of {n} in part {part}: {error:.1e}"


def check_batch_axes_and_vmap():
    """No batch axis, several of them, and axes that vmap adds, also to what has no batch."""
    random = np.random.default_rng(3)
    w = jnp.asarray(random.standard_normal((2, 3, 40, HEADS, DIM)))
    temperature = jnp.asarray([1.0, 2.0, 0.5, 1.5])

    def statistics(w, temperature, causal):
        def loss(w, temperature):
            out = cj.token_statistics_attention(w, temperature=temperature, is_causal=causal)
            return jnp.sum(jnp.sin(out))

        return jax.grad(loss, argnums=(0, 1))(w, temperature)

    def attend(w, causal):
        return jax.grad(
            lambda w: jnp.sum(jnp.sin(cj.attention("cumulant3", w, w, w, is_causal=causal)))
        )(w)

    for causal in (False, True):
        run = functools.partial(statistics, causal=causal)
        rows = [[run(w[i, j], temperature) for j in range(3)] for i in range(2)]
        w_bars = np.array([[np.asarray(x[0]) for x in row] for row in rows])
        t_bars = np.array([[np.asarray(x[1]) for x in row] for row in rows])
        whole = run(w, temperature)
        np.testing.assert_allclose(whole[0], w_bars, atol=1e-12)
        np.testing.assert_allclose(whole[1], t_bars.sum((0, 1)), atol=1e-12)
        mapped = jax.vmap(run, in_axes=(0, None))(w, temperature)
        np.testing.assert_allclose(mapped[0], w_bars, atol=1e-12)
        np.testing.assert_allclose(mapped[1], t_bars.sum(1), atol=1e-12)
        many = jnp.stack([temperature, 2 * temperature])
        mapped = jax.vmap(run)(w, many)
        np.testing.assert_allclose(mapped[1][0], t_bars[0].sum(0), atol=1e-12)
        np.testing.assert_allclose(mapped[1][1], run(w[1], many[1])[1], atol=1e-12)
        one = np.array([[np.asarray(attend(w[i, j], causal)) for j in range(3)] for i in range(2)])
        np.testing.assert_allclose(attend(w, causal), one, atol=1e-12)
        every = jax.vmap(jax.vmap(functools.partial(attend, causal=causal)))(w)
        np.testing.assert_allclose(every, one, atol=1e-12)


def check_explicit():
    inputs, mask = arrays(264)
    for name, call, needs in calls(264):
        plain = {n: jnp.asarray(inputs[n]) for n in needs}
        expected = jax.tree.map(np.asarray, gradient(call)(plain, mask))
        with jax.set_mesh(mesh(AxisType.Explicit)):
            placed = {n: jax.device_put(x, SPECS[0]) for n, x in plain.items()}
            actual = gradient(call)(placed, jax.device_put(mask, P("data", "sequence")))
        check_equal(f"{name} explicit", actual, expected)


def check_names():
    """As on TPUs, whose compiler does not ask: split by the names of the ambient mesh's axes."""
    asking, over_mesh._ASKING = over_mesh._ASKING, ()
    inputs, mask = arrays(264)
    ambient = mesh(AxisType.Auto)
    try:
        for name, call, needs in calls(264):
            if name.split()[0] not in ("linear", "cumulant3", "token_statistics"):
                continue  # all cumulants go the same way
            plain = {n: jnp.asarray(inputs[n]) for n in needs}
            with jax.default_device(jax.devices()[0]):
                expected = jax.tree.map(np.asarray, gradient(call)(plain, mask))
            check_equal(f"{name} without a mesh", gradient(call)(plain, mask), expected)
            with jax.set_mesh(ambient):
                placed = jax.device_put(plain, NamedSharding(ambient, SPECS[0]))
                check_equal(f"{name} by names", gradient(call)(placed, mask), expected)
                if "causal=False" in name:
                    text = gradient(call).lower(placed, None).compile().as_text()
                    found = {kind for _, kind in COLLECTIVE.findall(text)}
                    heads = {"all-to-all", "all-gather"} if "statistics" in name else set()
                    assert found <= {"all-reduce", *heads}, f"{name} by names: {found}"
    finally:
        over_mesh._ASKING = asking


COLLECTIVE = re.compile(r"= (\(?\S.*?) (all-reduce|all-gather|all-to-all|collective-permute)\(")


def sent(call, needs, tokens):
    """The names of the collectives and the bytes they make, in a compiled training program."""
    inputs, _ = arrays(tokens)
    # Token statistics compare the heads of a token: splitting these costs a sum per token.
    spec = P("data", "sequence") if needs == ("w",) else P("data", "sequence", "tensor")
    placed = {n: jax.device_put(inputs[n], NamedSharding(mesh(AxisType.Auto), spec)) for n in needs}
    text = gradient(call).lower(placed, None).compile().as_text()
    found = []
    for shapes, name in COLLECTIVE.findall(text):
        sizes = re.findall(r"f64\[([\d,]*)\]", shapes)
        found.append(
            (name, 8 * sum(int(np.prod([int(n) for n in s.split(",") if n])) for s in sizes))
        )
    return found


def check_programs():
    for (name, call, needs), (_, longer, _) in zip(calls(512), calls(2048), strict=True):
        short, long = sent(call, needs, 512), sent(longer, needs, 2048)
        assert short == long, f"{name}: what is sent depends on the length: {short}, {long}"
        assert not [n for n, _ in short if n in ("all-to-all", "collective-permute")], name
        if "causal=False" in name:
            assert not [n for n, _ in short if n == "all-gather"], f"{name}: {short}"
        most = max(size for _, size in short)
        features = DIM * DIM * DIM if "full" in name else 4 * DIM * (DIM + 1)
        assert most <= 8 * BATCH * HEADS * 2 * features, f"{name}: {short}"


if __name__ == "__main__":
    jax.config.update("jax_enable_x64", True)
    assert jax.device_count() == 8
    import sys

    "v" in sys.argv or check_values()
    check_state()
    check_batch_axes_and_vmap()
    check_explicit()
    check_names()
    check_programs()
    print("equal on 8 devices")
