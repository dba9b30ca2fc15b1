"""The four factorisations of ViViT against loops in NumPy, and what starts from an image model."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from cumulant_jax import models
from cumulant_jax.attention import KINDS, cross_covariance_attention, token_statistics_attention
from cumulant_jax.models.layers.positions import resize_positions
from cumulant_jax.models.layers.space_time import SplitHeads
from cumulant_jax.models.layers.tubelet_embedding import inflate_kernel
from cumulant_jax.models.vivit_options import FACTORISATIONS
from tests.models.random_models import apply, by_path, random_model

SMALL = {
    "image_size": (8, 12),
    "patch_size": 4,
    "frames": 6,
    "channels": 2,
    "num_classes": 5,
    "dim": 16,
    "depth": 2,
    "heads": 2,
    "temporal_depth": 1,
}
every_factorisation = pytest.mark.parametrize("factorisation", FACTORISATIONS)


def small(**options):
    return random_model("vivit_nano16x2", **{**SMALL, **options})


def draw_clips(seed=0, shape=(2, 6, 8, 12, 2), dtype=np.float32):
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


# A second implementation: float64 NumPy, one loop for every sum that attention splits
# ------------------------------------------------------------------------------------------------


class Loops:
    """ViViT on one clip at a time, from the arrays of a model by dotted path."""

    def __init__(self, model):
        self.options = model.options
        self.arrays = {n: np.asarray(a, np.float64) for n, a in by_path(nnx.state(model)).items()}

    def linear(self, name, x):
        return x @ self.arrays[f"{name}.kernel"] + self.arrays[f"{name}.bias"]

    def norm(self, name, x):
        x = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-6)
        return x * self.arrays[f"{name}.scale"] + self.arrays[f"{name}.bias"]

    def mlp(self, name, x):
        h = self.linear(f"{name}.expand", x)
        h = 0.5 * h * (1 + np.tanh(math.sqrt(2 / math.pi) * (h + 0.044715 * h**3)))
        return self.linear(f"{name}.contract", h)

    def heads(self, name, x):
        """Query, key and value [tokens, heads, dim]."""
        qkv = self.linear(f"{name}.qkv", x)
        return [p.reshape(len(x), self.options.heads, -1) for p in np.split(qkv, 3, axis=-1)]

    def attend(self, name, x, groups):
        """Attention in which token n sees groups[head][n] alone; then the output projection."""
        query, key, value = self.heads(name, x)
        out = np.zeros_like(value)
        for head in range(self.options.heads):
            for n in range(len(x)):
                seen = groups[head][n]
                scores = key[seen, head] @ query[n, head] / math.sqrt(query.shape[-1])
                weights = np.exp(scores - scores.max())
                out[n, head] = weights @ value[seen, head] / weights.sum()
        return self.linear(f"{name}.out", out.reshape(len(x), -1))

    def tokens(self, clip):
        kernel = self.arrays["tubelet_embedding.kernel"]
        steps, rows, columns = (s // k for s, k in zip(clip.shape, kernel.shape[:3], strict=False))
        out = []
        for t in range(steps):
            for r in range(rows):
                for c in range(columns):
                    t0, r0, c0 = (i * k for i, k in zip((t, r, c), kernel.shape[:3], strict=True))
                    cut = clip[t0 : t0 + 2, r0 : r0 + 4, c0 : c0 + 4]
                    out.append(np.einsum("thwc,thwcd->d", cut, kernel))
        return np.array(out) + self.arrays["tubelet_embedding.bias"], steps, rows * columns

    def position(self, steps, patches):
        """The position vector of every token, the class token's first where there is one."""
        table = self.arrays["positions.position_embedding"][0]
        if self.options.position == "learned2d":
            token = len(table) - patches
            rows = [table[token + n % patches] for n in range(steps * patches)]
            table = np.array([*table[:token], *rows])
        return table

    def plain(self, name, x, groups):
        x = x + self.attend(f"{name}.attention", self.norm(f"{name}.norm1", x), groups)
        return x + self.mlp(f"{name}.mlp", self.norm(f"{name}.norm2", x))

    def encode(self, prefix, x, table):
        """Joint attention over x, with the class token in front if there is one."""
        if f"{prefix}class_token" in self.arrays:
            x = np.concatenate([self.arrays[f"{prefix}class_token"][0], x])
        x = x + table
        everything = [[np.arange(len(x))] * len(x)] * self.options.heads
        depth = sum(
            n.startswith(f"{prefix}blocks.") and n.endswith("norm1.bias") for n in self.arrays
        )
        for i in range(depth):
            x = self.plain(f"{prefix}blocks.{i}", x, everything)
        return self.pool(self.norm(f"{prefix}norm", x))

    def pool(self, x):
        return x[0] if self.options.pool == "token" else x.mean(0)

    def joint(self, x, steps, patches):
        return self.encode("", x, self.position(steps, patches))

    def encoder(self, x, steps, patches):
        table = self.arrays["positions.position_embedding"][0]
        frames = [self.encode("", x[t * patches : (t + 1) * patches], table) for t in range(steps)]
        table = self.arrays["temporal.positions.position_embedding"][0]
        return self.encode("temporal.", np.array(frames), table)

    def groups(self, steps, patches):
        """For every token those of its frame, and those at its place."""
        index = np.arange(steps * patches)
        frame = [np.flatnonzero(index // patches == n // patches) for n in index]
        place = [np.flatnonzero(index % patches == n % patches) for n in index]
        return frame, place

    def self_attention(self, x, steps, patches):
        frame, place = self.groups(steps, patches)
        x = x + self.position(steps, patches)
        for i in range(self.options.depth):
            name, heads = f"blocks.{i}", self.options.heads
            normed = self.norm(f"{name}.spatial_norm", x)
            x = x + self.attend(f"{name}.spatial_attention.layer", normed, [frame] * heads)
            normed = self.norm(f"{name}.norm1", x)
            x = x + self.attend(f"{name}.attention.layer", normed, [place] * heads)
            x = x + self.mlp(f"{name}.mlp", self.norm(f"{name}.norm2", x))
        return self.pool(self.norm("norm", x))

    def dot_product(self, x, steps, patches):
        frame, place = self.groups(steps, patches)
        half = self.options.heads // 2
        x = x + self.position(steps, patches)
        for i in range(self.options.depth):
            x = self.plain(f"blocks.{i}", x, [place] * half + [frame] * half)
        return self.pool(self.norm("norm", x))

    def __call__(self, clips):
        run = getattr(self, self.options.factorisation)
        return np.array([self.linear("head", run(*self.tokens(clip))) for clip in clips])


@pytest.mark.parametrize(
    ("factorisation", "options"),
    [
        *((name, {}) for name in FACTORISATIONS),
        *((name, {"position": "learned2d"}) for name in FACTORISATIONS),
        ("joint", {"pool": "mean"}),
        ("encoder", {"pool": "mean", "temporal_depth": 2}),
    ],
    ids=str,
)
def test_against_loops(factorisation, options, x64):
    types = {"dtype": "float64", "param_dtype": "float64"}
    model = small(factorisation=factorisation, **types, **options)
    clips = draw_clips(dtype=np.float64)
    np.testing.assert_allclose(apply(model, clips), Loops(model)(clips), rtol=0, atol=1e-10)


@pytest.mark.parametrize("kind", ["softmax", "cumulant3", "linear", "tssa", "xca"])
def test_split_heads_of_every_kind_of_function(kind, x64):
    """Each half of the heads is the function itself, frame by frame or place by place."""
    functions = {"tssa": token_statistics_attention, "xca": cross_covariance_attention, **KINDS}
    function, count = functions[kind], 1 if kind == "tssa" else 3
    rng = np.random.default_rng(0)
    projected = rng.standard_normal((count, 2, 3, 4, 6, 5))  # clips, frames, patches, heads, dim
    temperature = rng.uniform(0.5, 1.5, 6)
    options = {"temperature": temperature} if kind in ("tssa", "xca") else {}
    arrays = [jnp.asarray(x.reshape(2, 12, 6, 5)) for x in projected]
    out = SplitHeads(function)(*arrays, frames=3, **options).reshape(2, 3, 4, 6, 5)
    halves = (slice(0, 3), slice(3, 6))
    own = [{"temperature": temperature[half]} if options else {} for half in halves]
    for patch in range(4):
        expected = function(*(jnp.asarray(x[:, :, patch, :3]) for x in projected), **own[0])
        np.testing.assert_allclose(out[:, :, patch, :3], expected, rtol=0, atol=1e-12)
    for frame in range(3):
        expected = function(*(jnp.asarray(x[:, frame, :, 3:]) for x in projected), **own[1])
        np.testing.assert_allclose(out[:, frame, :, 3:], expected, rtol=0, atol=1e-12)


# What each factorisation can and cannot see
# ------------------------------------------------------------------------------------------------


@every_factorisation
@pytest.mark.parametrize(
    "kind",
    [
        "tssa",
        *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("cumulant3", "xca", "mssa")),
    ],
)
def test_every_kind_runs_in_every_factorisation(factorisation, kind):
    model = small(factorisation=factorisation, attention=kind, depth=1)
    logits = apply(model, draw_clips())
    assert logits.shape == (2, 5)
    assert np.isfinite(logits).all()
    alone = apply(model, draw_clips()[1:])
    np.testing.assert_allclose(logits[1:], alone, rtol=0, atol=1e-4)


@every_factorisation
def test_without_positions_frames_are_a_set(factorisation):
    """Shuffling the tubelets in time then changes nothing; with positions it does."""
    clips = draw_clips()
    shuffled = clips.reshape(2, 3, 2, *clips.shape[2:])[:, [2, 0, 1]].reshape(clips.shape)
    for position, same in (("none", True), ("learned", False)):
        model = small(factorisation=factorisation, position=position)
        close = np.allclose(apply(model, clips), apply(model, shuffled), rtol=0, atol=1e-4)
        assert close == same, position


def test_a_hybrid_over_space_and_time():
    """The attention over time may be of another kind than that over space."""
    layers = {"encoder": ["temporal.blocks.0.attention"], "self_attention": []}
    layers["self_attention"] = [f"blocks.{i}.attention.layer" for i in range(2)]
    for factorisation, temporal in layers.items():
        model = small(factorisation=factorisation, temporal_attention="tssa")
        names = by_path(nnx.state(model))
        found = {n.removesuffix(".temperature") for n in names if n.endswith("temperature")}
        assert found == set(temporal)
        assert np.isfinite(apply(model, draw_clips())).all()


def test_intermediates():
    model = small(factorisation="encoder")
    clips = draw_clips()
    logits, inside = model(jnp.asarray(clips), return_intermediates=True)
    np.testing.assert_allclose(logits, apply(model, clips), rtol=0, atol=1e-5)
    blocks = [
        f"{p}{n}_{i}"
        for p, d in (("", 2), ("temporal_", 1))
        for n in ("block", "attention")
        for i in range(d)
    ]
    assert set(inside) == {"tubelet_embedding", "embed", "temporal_embed", "pre_logits", *blocks}
    assert inside["block_1"].shape == (6, 7, 16)
    assert inside["temporal_block_0"].shape == (2, 4, 16)
    np.testing.assert_allclose(model.head(inside["pre_logits"]), logits, rtol=0, atol=1e-5)
    _, inside = small(factorisation="self_attention")(jnp.asarray(clips), return_intermediates=True)
    assert [a.shape for a in inside["attention_0"]] == [(2, 18, 16)] * 2


def test_an_empty_batch_gives_no_logits():
    for factorisation in FACTORISATIONS:
        model = small(factorisation=factorisation)
        assert jax.eval_shape(model, draw_clips(shape=(0, 6, 8, 12, 2))).shape == (0, 5)


# Sizes
# ------------------------------------------------------------------------------------------------

# Published in millions (the paper's table of the four models, 224 pixels, 32 frames, 400 classes);
# 88.954 is printed as 88.9.
PUBLISHED_MILLIONS = {
    "vivit_b16x2": 88.9,
    "vivit_b16x2_fe": 115.1,
    "vivit_b16x2_fsa": 117.3,
    "vivit_b16x2_fdp": 88.9,
}
# Published too, in billions: with what is not a matrix product in them.
PUBLISHED_GIGAFLOPS = {
    "vivit_b16x2": 455.2,
    "vivit_b16x2_fe": 284.4,
    "vivit_b16x2_fsa": 372.3,
    "vivit_b16x2_fdp": 277.1,
}


def abstract(name, **options):
    return nnx.eval_shape(lambda: models.create(name, rngs=nnx.Rngs(0), **options))


@pytest.mark.parametrize("name", PUBLISHED_MILLIONS)
def test_published_parameter_counts(name):
    count = models.count_parameters(abstract(name)) / 1e6
    assert count == pytest.approx(PUBLISHED_MILLIONS[name], abs=0.06)


@pytest.mark.parametrize("name", PUBLISHED_GIGAFLOPS)
def test_published_operations(name):
    macs = models.summary(name).macs / 1e9
    assert 0.99 * PUBLISHED_GIGAFLOPS[name] < macs < PUBLISHED_GIGAFLOPS[name]


@pytest.mark.parametrize("name", models.list_models("vivit_*"))
def test_counts_in_closed_form(name):
    """What the parts of a ViViT hold, added up by hand."""
    options = models.options(name)
    dim, depth, factorisation = options["dim"], options["depth"], options["factorisation"]
    token = factorisation in ("joint", "encoder")
    attention, norm = 4 * dim * dim + 4 * dim, 2 * dim
    block = attention + 8 * dim * dim + 5 * dim + 2 * norm
    count = 2 * 16 * 16 * 3 * dim + dim + token * dim + norm + 400 * (dim + 1) + depth * block
    if factorisation == "encoder":
        count += (14 * 14 + 1) * dim + (16 + 1) * dim + dim + norm + 4 * block
    else:
        count += (16 * 14 * 14 + token) * dim
    if factorisation == "self_attention":
        count += depth * (attention + norm)
    assert models.count_parameters(abstract(name)) == count


def cubic_weights(old, new):
    """The matrix of antialiased cubic interpolation from `old` to `new` points, entry by entry."""

    def cubic(x):
        x = abs(x)
        if x < 1:
            return 1.5 * x**3 - 2.5 * x**2 + 1
        return -0.5 * x**3 + 2.5 * x**2 - 4 * x + 2 if x < 2 else 0.0

    scale = max(old / new, 1.0)  # widened where the grid shrinks
    rows = []
    for i in range(new):
        center = (i + 0.5) * old / new - 0.5
        row = np.array([cubic((j - center) / scale) for j in range(old)])
        rows.append(row / row.sum())
    return np.array(rows)


@every_factorisation
@pytest.mark.parametrize("position", ["learned", "learned2d"])
def test_another_number_of_frames_and_another_image_size(factorisation, position, x64):
    """Position tables are resized along each axis of their grid by itself; the class row stays."""
    model = small(factorisation=factorisation, position=position, param_dtype="float64")
    larger = models.resize(model, image_size=(16, 8), frames=8)
    weights = [cubic_weights(o, n) for o, n in ((3, 4), (2, 4), (3, 2))]
    tables, resized = by_path(nnx.state(model)), by_path(nnx.state(larger))
    grids = {"positions": ((3, 2, 3), "tij")}
    if position == "learned2d" or factorisation == "encoder":
        grids = {"positions": ((2, 3), "ij")}
    if factorisation == "encoder":
        grids["temporal.positions"] = ((3,), "t")
    for name, (grid, axes) in grids.items():
        old = np.asarray(tables[f"{name}.position_embedding"])[0]
        prefix = len(old) - math.prod(grid)
        used = [weights["tij".index(axis)] for axis in axes]
        outputs = axes.upper()
        expression = ",".join(f"{o}{a}" for o, a in zip(outputs, axes, strict=True))
        new = np.einsum(f"{axes}d,{expression}->{outputs}d", old[prefix:].reshape(*grid, -1), *used)
        got = np.asarray(resized[f"{name}.position_embedding"])[0]
        np.testing.assert_allclose(got[prefix:], new.reshape(-1, 16), rtol=0, atol=1e-12)
        np.testing.assert_array_equal(got[:prefix], old[:prefix])
    assert apply(larger, draw_clips(shape=(1, 8, 16, 8, 2))).shape == (1, 5)
    with pytest.raises(ValueError, match="patches and the learned position table has"):
        apply(model, draw_clips(shape=(1, 8, 16, 8, 2)))


# From an image model
# ------------------------------------------------------------------------------------------------

IMAGE = {"patch_size": 4, "image_size": 8, "channels": 2, "dim": 16, "depth": 2, "heads": 2}


@pytest.mark.parametrize(("method", "frame"), [("central", 1), ("average", None)])
def test_a_tubelet_starts_as_the_patch_of_its_central_or_mean_frame(method, frame):
    clips = draw_clips()
    vit = random_model("vit_nano4", **{**IMAGE, "image_size": (8, 12)})
    vivit = models.vivit_from_vit(vit, frames=6, inflation=method, rngs=nnx.Rngs(0))
    tubelets = clips.reshape(2 * 3, 2, 8, 12, 2)
    seen = tubelets.mean(axis=1) if frame is None else tubelets[:, frame]
    expected = vit.patch_embedding(jnp.asarray(seen)).reshape(2, 18, 16)
    np.testing.assert_allclose(vivit.tubelet_embedding(clips), expected, rtol=0, atol=1e-5)


def test_one_tubelet_is_the_image_model():
    vit = random_model("vit_nano4", num_classes=0, **IMAGE)
    vivit = models.vivit_from_vit(vit, frames=2, num_classes=0, rngs=nnx.Rngs(0))
    clips = draw_clips(shape=(3, 2, 8, 8, 2))
    np.testing.assert_allclose(apply(vivit, clips), apply(vit, clips[:, 1]), rtol=0, atol=2e-5)


@pytest.mark.parametrize("layer_scale", [None, 0.1])
def test_factorised_self_attention_starts_as_the_image_model_on_each_frame(layer_scale):
    """The new attention over time starts as nothing, and can learn."""
    vit = random_model(
        "vit_nano4", num_classes=0, pool="mean", fc_norm=False, layer_scale=layer_scale, **IMAGE
    )
    vivit = models.vivit_from_vit(
        vit, frames=6, num_classes=0, factorisation="self_attention", rngs=nnx.Rngs(0)
    )
    clips = draw_clips(shape=(3, 6, 8, 8, 2))
    frames = apply(vit, clips[:, 1::2].reshape(9, 8, 8, 2)).reshape(3, 3, 16)
    np.testing.assert_allclose(apply(vivit, clips), frames.mean(1), rtol=0, atol=2e-5)
    gradient = jax.jit(jax.grad(lambda model: model(clips).sum(), allow_int=True))(vivit)
    assert np.abs(gradient.blocks[0].attention.layer.out.kernel[...]).max() > 1e-4


def test_the_factorised_encoder_starts_with_the_image_model_on_each_frame():
    vit = random_model("vit_nano4", num_classes=0, **IMAGE)
    vivit = models.vivit_from_vit(
        vit, frames=6, num_classes=0, factorisation="encoder", temporal_depth=1, rngs=nnx.Rngs(0)
    )
    clips = draw_clips(shape=(3, 6, 8, 8, 2))
    _, inside = vivit(jnp.asarray(clips), return_intermediates=True)
    frames = apply(vit, clips[:, 1::2].reshape(9, 8, 8, 2))
    np.testing.assert_allclose(vivit.norm(inside["block_1"])[:, 0], frames, rtol=0, atol=2e-5)


def test_positions_from_an_image_model_are_repeated_and_resized():
    vit = random_model("vit_nano4", **IMAGE)
    table = vit.positions.position_embedding[...]
    for position, repeats in (("learned", 3), ("learned2d", 1)):
        vivit = models.vivit_from_vit(
            vit, frames=6, image_size=16, position=position, rngs=nnx.Rngs(0)
        )
        got = np.asarray(vivit.positions.position_embedding[...])[0]
        larger = resize_positions(table, old_grid=(2, 2), new_grid=(4, 4), prefix_tokens=1)[0]
        np.testing.assert_array_equal(got[0], larger[0])
        for frame in range(repeats):
            np.testing.assert_array_equal(got[1 + 16 * frame :][:16], larger[1:])
    mean = models.vivit_from_vit(vit, frames=6, factorisation="dot_product", rngs=nnx.Rngs(0))
    got = np.asarray(mean.positions.position_embedding[...])[0]
    np.testing.assert_array_equal(got, np.tile(table[0, 1:], (3, 1)))


def test_what_cannot_start_a_video_model():
    vivit = small()
    with pytest.raises(TypeError, match="vit must be a ViT, got ViViT"):
        models.vivit_from_vit(vivit, rngs=nnx.Rngs(0))
    vit = random_model("vit_nano4", position="sincos2d", **IMAGE)
    with pytest.raises(ValueError, match="vit must have position='learned' or 'none'"):
        models.vivit_from_vit(vit, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match="unknown method 'centre'; did you mean 'central'"):
        inflate_kernel(jnp.ones((2, 2, 1, 3)), 2, method="centre")


# Wrong arguments
# ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"frames": 5}, ValueError, "frames must be a multiple of tubelet_frames, got 5 and 2"),
        ({"frames": 0}, ValueError, "frames must be at least 1"),
        ({"temporal_depth": 1.5}, TypeError, "temporal_depth must be an integer"),
        ({"factorisation": "encodr"}, ValueError, "unknown factorisation 'encodr'; did you mean"),
        ({"position": "learned3d"}, ValueError, "unknown position 'learned3d'"),
        ({"gelu": "tan"}, ValueError, "unknown gelu 'tan'; did you mean 'tanh'"),
        (
            {"factorisation": "dot_product", "pool": "token"},
            ValueError,
            "pool must be 'mean' with factorisation='dot_product'",
        ),
        (
            {"factorisation": "dot_product", "heads": 1},
            ValueError,
            "heads must be even with factorisation='dot_product', got 1",
        ),
        ({"temporal_attention": "tssa"}, ValueError, "temporal_attention must be None with"),
        (
            {"factorisation": "encoder", "attention": ["tssa", "softmax"]},
            ValueError,
            "temporal_attention must say what the 1 blocks over time",
        ),
        (
            {"factorisation": "encoder", "temporal_attention": "tsa"},
            ValueError,
            "unknown attention 'tsa'; did you mean 'tssa'",
        ),
        ({"image_size": 10}, ValueError, "must be a multiple of patch_size"),
    ],
    ids=str,
)
def test_impossible_options(options, error, message):
    with pytest.raises(error, match=message):
        models.ViViTOptions(**{**SMALL, **options})


@pytest.mark.parametrize(
    ("clips", "error", "message"),
    [
        ([1.0], TypeError, "clips must be an array, got list"),
        (np.zeros((1, 6, 8, 12)), ValueError, r"clips must be \[batch, frames, height, width, 2\]"),
        (np.zeros((1, 5, 8, 12, 2)), ValueError, "positive multiples of 2, 4, 4, got shape"),
        (np.zeros((1, 0, 8, 12, 2)), ValueError, "positive multiples of 2, 4, 4, got shape"),
        (np.zeros((1, 6, 8, 12, 2), int), TypeError, "clips must be normalised floats, got int64"),
    ],
    ids=["list", "rank", "frames", "none", "integers"],
)
def test_wrong_clips(clips, error, message):
    with pytest.raises(error, match=message):
        small()(clips)


def test_options_may_be_replaced():
    """A record holds its options in the one form it takes them in."""
    for options in (
        {},
        {"factorisation": "encoder", "temporal_attention": ["tssa"]},
        {"factorisation": "self_attention", "temporal_attention_options": [{"scale": 0.5}, None]},
    ):
        record = models.ViViTOptions(**SMALL, **options)
        assert dataclasses.replace(record) == record
