import jax
import jax.numpy as jnp
import numpy as np
import pytest

from cumulant_jax.costs.collectives import Collective, collectives


def line(text):
    return "ENTRY %main (p: f32[8]) -> f32[8] {\n  " + text + "\n}\n"


@pytest.mark.parametrize(
    ("text", "kind", "size", "group", "sent"),
    [
        (
            "%a = f32[32,96]{1,0} all-gather(%p), replica_groups=mesh['x'=8] {'x'}, dimensions={0}",
            "all-gather",
            32 * 96 * 4,
            tuple(range(8)),
            32 * 96 * 4 * 7 // 8,
        ),
        (
            "%r = (bf16[4]{0}, f32[2,3]{1,0}) all-reduce(%p, %q), replica_groups=[4,2]<=[8]",
            "all-reduce",
            8 + 24,
            (0, 1),
            32,
        ),
        (
            "ROOT %r = f32[4]{0} reduce-scatter(%p), replica_groups=[4,2]<=[2,4]T(1,0)",
            "reduce-scatter",
            32,
            (0, 4),
            16,
        ),
        (
            "%a = s8[10]{0} all-to-all(%p), replica_groups={{0,2,4,6},{1,3,5,7}}",
            "all-to-all",
            10,
            (0, 2, 4, 6),
            8,
        ),
        (
            "%c = (f32[4]{0}, f32[4]{0}, u32[], u32[]) collective-permute-start(%p),"
            " source_target_pairs={{3,0},{0,3}}",
            "collective-permute",
            16,
            (3, 0),
            16,
        ),
        (
            "%g = (pred[4]{0}, pred[16]{0}) all-gather-start(%p), replica_groups={{0,1,2,3}}",
            "all-gather",
            16,
            (0, 1, 2, 3),
            12,
        ),
        (
            "%a = f32[8]{0} all-reduce(%p), replica_groups=mesh['x'=2,'y'=4] {'y':(2)2}",
            "all-reduce",
            32,
            (0, 1),
            32,
        ),
        (
            "%a = f32[8]{0} all-reduce(%p), replica_groups=mesh['x'=2,'y'=4] {'x','y':(1)2}",
            "all-reduce",
            32,
            (0, 2, 4, 6),
            48,
        ),
    ],
)
def test_every_form_is_read(text, kind, size, group, sent):
    (found,) = collectives(line(text))
    assert (found.kind, found.size_bytes, found.group) == (kind, size, group)
    assert found.bytes_sent == sent


def test_the_end_of_an_asynchronous_one_and_uses_of_its_name_do_not_count():
    text = "%d = f32[4] all-reduce-done(%all-reduce.1)\n  %f = f32[4] fusion(%all-gather), calls=%x"
    assert collectives(line(text)) == []
    assert collectives(line("%a = f32[8] all-reduce(%p), replica_groups=[8,1]<=[8]")) == []


def test_a_loop_counts_by_its_turns():
    program = (
        "%body (p: (s32[], f32[4])) -> (s32[], f32[4]) {\n"
        "  %r = f32[4]{0} all-reduce(%x), replica_groups={{0,1}}, to_apply=%add\n"
        "}\n\n"
        "ENTRY %main (p: f32[4]) -> f32[4] {\n"
        '  %w = (s32[], f32[4]) while(%t), condition=%c, body=%body, backend_config={"known_trip_'
        'count":{"n":"12"}}\n'
        "}\n"
    )
    (found,) = collectives(program)
    assert found == Collective(
        kind="all-reduce", shape="f32[4]", size_bytes=16, group=(0, 1), count=12
    )
    assert found.bytes_sent == 12 * 16


def test_a_program_of_one_device_sends_nothing():
    compiled = jax.jit(lambda x: jnp.sum(x @ x.T)).lower(np.ones((8, 8), np.float32)).compile()
    assert collectives(compiled.as_text()) == []
