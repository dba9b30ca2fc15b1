import pytest

from cumulant_jax.training import Duration


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("40 epochs", 400),
        ("1 epoch", 10),
        ("0.5 epochs", 5),
        ("1200 steps", 1200),
        ("1200", 1200),
        (7, 7),
        ("300000 examples", 3000),
        ("301 examples", 4),
        ("1 example", 1),
        ("0 steps", 0),
        ("0 epochs", 0),
        ("0.001 epochs", 1),
        ("1e3 steps", 1000),
        ("1_000 Steps", 1000),
    ],
)
def test_steps(text, expected):
    assert Duration.parse(text).steps(num_examples=1000, batch_size=100) == expected


def test_epochs_are_exact_where_batches_cross_them():
    # 40 epochs of 1437 images in batches of 64 are 898.125 steps, not 40 * 22.
    assert Duration.parse("40 epochs").steps(num_examples=1437, batch_size=64) == 898


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("-3 steps", ValueError),
        ("3 parsecs", ValueError),
        ("epochs", ValueError),
        ("", ValueError),
        ("1.5 steps", ValueError),
        ("nan epochs", ValueError),
        (1.5, TypeError),
        (True, TypeError),
        (None, TypeError),
    ],
)
def test_wrong_durations_name_what_they_are_for(text, error):
    with pytest.raises(error, match=r"^total: got .*expected"):
        Duration.parse(text, name="total")


def test_a_number_that_no_training_can_reach_is_refused():
    with pytest.raises(ValueError, match=r"total: got '1e400 epochs', expected a number below"):
        Duration.parse("1e400 epochs", name="total")
