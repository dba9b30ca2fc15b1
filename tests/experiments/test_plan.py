"""Plans: the compiling process on the devices there are, and the command around it."""

import json
import sys
from pathlib import Path

import jax
import pytest

from cumulant_jax.data import DataConfig, load
from cumulant_jax.training import load_config
from experiments import cli, compile_step, plan
from experiments.compiler_environments import Environment

REPOSITORY = Path(__file__).resolve().parents[2]
SMALL = [
    "--config.model.name=vit_nano4",
    "--config.model.options.dim=16",
    "--config.model.options.depth=1",
    "--config.model.options.heads=2",
    "--config.batch_size=32",
]


@pytest.fixture(autouse=True)
def _here(monkeypatch):
    monkeypatch.chdir(REPOSITORY)


def request(*overrides):
    config = load_config("configs/digits.py:attention=cumulant3", [*SMALL, *overrides])
    info = load(DataConfig(name="digits")).info
    return {"config": config.to_dict(), "info": {**vars(info), "class_names": []}}


def test_a_step_is_compiled_and_described():
    answer = compile_step.compile_step(json.loads(json.dumps(request())), jax.devices()[:1])
    assert answer["mesh"] == {"data": 1}
    assert answer["collectives"] == []
    assert answer["traffic_bytes"] > 0
    # Parameters, two moments and a batch, in float32, at least.
    parameters = sum(
        leaf.size
        for leaf in jax.tree.leaves(
            plan.build(load_config("configs/digits.py:attention=cumulant3", SMALL)).shapes.params
        )
    )
    assert answer["memory_bytes"] > 3 * 4 * parameters


def test_the_flops_of_a_step_are_three_times_those_of_the_forward_pass():
    config = load_config("configs/digits.py:attention=linear", SMALL)
    flops = plan.flops_of_step(config, load(config.data).info)
    # 4 patches of 4x4 pixels and a class token or none: linear layers 16 → 48, 16, 64, 16.
    tokens, dim = 4, 16
    layers = tokens * (16 * dim + dim * 3 * dim + dim * dim + 8 * dim * dim) + dim * 10
    attention = 2 * tokens * dim * (dim // 2)
    least = 3 * 2 * 32 * (layers + attention)
    assert least * 0.9 < flops < least * 1.5


COMPILER = """
import json, sys
print(json.dumps({"devices": 8}), flush=True)
for line in sys.stdin:
    config = json.loads(line)["config"]
    if config["mesh"] == "tensor=3":
        answer = {"error": "config key mesh: no"}
    elif config["batch_size"] > 100:
        answer = {"mesh": {"data": 8}, "too_large": "RESOURCE_EXHAUSTED: 20G of 16G"}
    else:
        exchange = {"kind": "all-reduce", "shape": "f32[9]", "size_bytes": 10**6,
                    "group": list(range(8)), "count": 2}
        answer = {"mesh": {"data": 8}, "memory_bytes": 1e9, "traffic_bytes": 2e9,
                  "collectives": [exchange], "seconds": 1.5}
    print(json.dumps(answer), flush=True)
"""


@pytest.fixture
def stand_in(tmp_path, monkeypatch):
    """A compiler's process that answers at once."""
    script = tmp_path / "compiler.py"
    script.write_text(COMPILER)
    environment = Environment("tpu", tmp_path, (), True)
    monkeypatch.setattr(plan, "plan", lambda *a, **k: [environment])
    original = plan.subprocess.Popen
    monkeypatch.setattr(
        plan.subprocess, "Popen", lambda command, **k: original([sys.executable, script], **k)
    )


def run(directory, *arguments):
    command = ["--config", "configs/digits.py", *SMALL, "--directory", str(directory), *arguments]
    return cli.run(plan.main, plan.make_parser(), command)


def test_meshes_and_batch_sizes_are_compared_best_first(tmp_path, stand_in, capsys):
    arguments = ["--topology=v5e:2x4", "--meshes=data=-1;tensor=3", "--batch-sizes=64,128"]
    assert run(tmp_path / "out", *arguments) == 0
    output, errors = capsys.readouterr()
    rows = [line for line in output.splitlines() if line.startswith("| data") and " GB |" in line]
    assert [row.split(" | ")[1:4] for row in rows] == [
        ["64", "1.00 GB", "yes"],
        ["128", "over 16 GB", "no"],
    ]
    assert "3.5 MB | 2 |" in rows[0]  # 2 * (2 * 7/8) MB
    assert errors.count("error: tensor=3, batch") == 2
    assert "[4/4] compiling tensor=3, batch 128, for 8 TPU v5e, ETA" in errors
    assert (tmp_path / "out" / "plan.md").read_text().splitlines()[0].startswith("# vit_nano4")
    assert len((tmp_path / "out" / "plan.csv").read_text().splitlines()) == 3


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--topology=v5x:2x4"], "--topology: unknown chip 'v5x'; did you mean"),
        (["--topology=v5e:8"], "--topology: got 'v5e:8', expected such as v5e:2x4"),
        (["--topology=h100:1x2x3"], "expected such as h100:4x8"),
        (["--topology=v5e:2x4", "--batch-sizes=0"], "--batch-sizes: got '0'"),
        (["--topology=v5e:2x4", "--meshes=rows=2"], "unknown mesh axis 'rows'"),
    ],
)
def test_wrong_arguments_are_one_line(tmp_path, capsys, arguments, message):
    assert run(tmp_path / "out", *arguments) == 2
    errors = capsys.readouterr().err
    assert message in errors
    assert len(errors.splitlines()) == 1
    assert not (tmp_path / "out").exists()
