"""PPO's batch sizes: fitted to the agents by default, kept if set by the user."""

from dataclasses import replace
from pathlib import Path

import pytest

from marl_pool.cli.main import main
from marl_pool.config import compose, fit_batch, plan_sweep
from marl_pool.config.compose import Origin, origin
from marl_pool.training.settings import PPOSettings, TrainConfig
from marl_pool.utils.errors import InputError

FARM = "env=helpers.farm:FoxAndHens"
"""One fox and three hens, four agents."""
UNIT = "(ppo.num_envs × runners × agents that learn)"


def rounding_note(before: str, after: int, unit: int) -> list[str]:
    change = f"{before} becomes {after}, a multiple of {unit} {UNIT}"
    return [f"ppo.batch_size: {change}"]


def fitted(
    *overrides: str, config_dir: Path | None = None
) -> tuple[PPOSettings, list[str]]:
    config = TrainConfig.from_plain(compose("train", overrides, config_dir))
    fit, lines = fit_batch("train", config, overrides, config_dir)
    assert replace(fit, ppo=config.ppo) == config
    return fit.ppo, lines


@pytest.mark.parametrize(
    ("overrides", "batch", "lines"),
    [
        (["ppo.num_envs=64"], 2048, []),
        (
            ["ppo.num_envs=64", "fixed={fox: random}"],
            2112,
            rounding_note("2048 of ppo=fast", 2112, 192),
        ),
        (
            ["ppo.num_envs=10", "resources.num_env_runners=7"],
            2240,
            rounding_note("2048 of ppo=fast", 2240, 280),
        ),
        (
            ["ppo=paper_tag", "ppo.num_envs=3", "ppo.minibatch_size=null"],
            8196,
            rounding_note("8192 of ppo=paper", 8196, 12),
        ),
        (
            ["experiment=cartpole", "ppo.num_envs=3"],
            8193,
            rounding_note("8192 of experiment=cartpole", 8193, 3),
        ),
        # Values set by the user are kept, and refused where they do not fit.
        (["ppo.num_envs=3", "ppo.batch_size=2048"], 2048, []),
        # Other errors are reported where they are checked.
        (["fixed={cow: random}", "ppo.num_envs=512"], 2048, []),
    ],
)
def test_only_sizes_that_nobody_set_are_rounded_up(overrides, batch, lines):
    arguments = overrides if "experiment" in overrides[0] else [FARM, *overrides]
    sizes, messages = fitted(*arguments)
    assert (sizes.batch_size, messages) == (batch, lines)


def test_a_minibatch_that_nobody_set_is_at_most_the_batch():
    sizes, lines = fitted(FARM, "ppo.batch_size=256")
    assert (sizes.batch_size, sizes.minibatch_size) == (256, 256)
    line = "ppo.minibatch_size: 512 of ppo=fast becomes 256, the whole batch"
    assert lines == [line]
    with pytest.raises(InputError, match=r"at most ppo\.batch_size = 256, got 512"):
        fitted(FARM, "ppo.batch_size=256", "ppo.minibatch_size=512")


def test_values_in_the_users_files_count_as_set_by_the_user(tmp_path):
    (tmp_path / "ppo").mkdir()
    (tmp_path / "ppo" / "mine.yaml").write_text("defaults: [fast]\nbatch_size: 2050\n")
    sizes, lines = fitted(FARM, "ppo=mine", "ppo.num_envs=3", config_dir=tmp_path)
    assert (sizes.batch_size, lines) == (2050, [])
    assert origin("train", "ppo.batch_size", ["ppo=mine"], tmp_path).option == ""
    source = origin("train", "ppo.minibatch_size", ["ppo=mine"], tmp_path)
    assert source == Origin("ppo=fast", 512)


def test_trials_of_a_sweep_are_fitted_and_told_once(capsys):
    plan = plan_sweep([FARM, "ppo.num_envs=3", "seed=0,1", "pooling=ada,max"])
    assert [trial.config.ppo.batch_size for trial in plan.trials] == [2052] * 4
    assert capsys.readouterr().err.count("ppo.batch_size: 2048 of ppo=fast") == 1
    swept = plan_sweep([FARM, "ppo.num_envs=3", "ppo.batch_size=600,1000"])
    sizes = [trial.config.ppo.batch_size for trial in swept.trials]
    assert sizes == [600, 1000]


def test_a_run_says_what_it_changed_and_keeps_it(tmp_path, capsys, monkeypatch):
    """PPO accepts the rounded size and refuses the one before."""
    pytest.importorskip("ray")
    from marl_pool.training import ppo
    from marl_pool.training.ppo.config import algorithm_config

    monkeypatch.setattr(ppo, "train", lambda run, config: algorithm_config(config))
    run = tmp_path / "run"
    words = ["train", FARM, "ppo.num_envs=3", "--run-dir", str(run)]
    assert main(words) == 0
    assert "marl-pool: ppo.batch_size: 2048 of ppo=fast" in capsys.readouterr().err
    assert "batch_size: 2052" in (run / "config.yaml").read_text()
    words[-1] = str(tmp_path / "other")
    assert main([*words, "ppo.batch_size=2048"]) == 2
    line = f"ppo.batch_size: expected a multiple of 12 {UNIT}, such as 2052, got 2048"
    assert line in capsys.readouterr().err
