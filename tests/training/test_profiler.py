import pytest

from cumulant_jax.training import ExperimentConfig, SilentReporter, train


@pytest.mark.parametrize("given", ["3,5", (3, 5), [3, 5]])
def test_some_steps_are_traced_and_the_run_stays_the_same(tiny, tmp_path, given):
    config = tiny(profile_steps=given)
    assert config.profile_steps == (3, 5)
    train(config, tmp_path, reporter=SilentReporter(), stop_after=6)
    (trace,) = tmp_path.glob("profile/plugins/profile/*/*.xplane.pb")
    assert trace.stat().st_size > 0
    # The trace is none of the experiment's properties: the run goes on without one.
    train(tiny(), tmp_path, reporter=SilentReporter())
    assert len(list(tmp_path.glob("profile/plugins/profile/*"))) == 1


def test_a_trace_that_is_open_at_the_end_is_written(tiny, tmp_path):
    config = tiny(profile_steps=(5, 100))
    train(config, tmp_path, reporter=SilentReporter(), stop_after=6)
    assert list(tmp_path.glob("profile/plugins/profile/*/*.xplane.pb"))


@pytest.mark.parametrize("value", ["5", "5,3", "0,3", "a,b", (1, 2, 3)])
def test_wrong_steps_are_named(value):
    with pytest.raises(ValueError, match=r"config key profile_steps: got .* two steps such as"):
        ExperimentConfig(profile_steps=value)
