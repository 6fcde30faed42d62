"""BenchMARL's algorithms with set networks: `make test-benchmarl`.

BenchMARL 1.5 needs a TorchRL older than 0.12, so the usual environment skips this file.
"""

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("benchmarl")
pytest.importorskip("vmas")

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from benchmarl import algorithms
    from benchmarl.environments import PettingZooTask, VmasTask
    from benchmarl.experiment import Experiment, ExperimentConfig

from marl_pool.adapters.benchmarl import SetModelConfig

pytestmark = pytest.mark.filterwarnings("ignore")  # BenchMARL's and its libraries'

SMALL: dict[str, Any] = {"dim": 8, "num_layers": 1, "num_heads": 2}
ENVIRONMENTS = {
    "navigation": (VmasTask.NAVIGATION, {"n_agents": 3}),
    "vmas_spread": (VmasTask.SIMPLE_SPREAD, {}),
    "spread": (PettingZooTask.SIMPLE_SPREAD, {}),
}


def make_experiment(
    algorithm: str,
    folder: Path,
    environment: str = "navigation",
    critic: Any = None,
    **options: Any,
) -> Experiment:
    task, changes = ENVIRONMENTS[environment]
    task = task.get_from_yaml()
    task.config |= {**changes, "max_steps": 10}
    config = ExperimentConfig.get_from_yaml()
    settings = {
        "max_n_iters": 1,
        "max_n_frames": None,
        "on_policy_collected_frames_per_batch": 40,
        "on_policy_n_envs_per_worker": 2,
        "on_policy_n_minibatch_iters": 1,
        "on_policy_minibatch_size": 20,
        "off_policy_collected_frames_per_batch": 40,
        "off_policy_n_envs_per_worker": 2,
        "off_policy_n_optimizer_steps": 2,
        "off_policy_train_batch_size": 20,
        "off_policy_memory_size": 100,
        "evaluation": False,
        "render": False,
        "loggers": [],
        "create_json": False,
        "save_folder": str(folder),
        # QMIX and others without continuous actions.
        "prefer_continuous_actions": algorithm not in ("Qmix", "Vdn", "Iql"),
        **options,
    }
    for key, value in settings.items():
        assert hasattr(config, key), key
        setattr(config, key, value)
    return Experiment(
        task=task,
        algorithm_config=getattr(algorithms, f"{algorithm}Config").get_from_yaml(),
        model_config=SetModelConfig(**SMALL),
        critic_model_config=critic or SetModelConfig(vector="token", **SMALL),
        seed=0,
        config=config,
    )


@pytest.mark.parametrize(
    ("algorithm", "environment", "options"),
    [
        ("Ippo", "navigation", {}),
        ("Mappo", "navigation", {}),
        ("Mappo", "navigation", {"share_policy_params": False}),
        ("Ippo", "vmas_spread", {}),
        ("Mappo", "vmas_spread", {}),
        ("Mappo", "spread", {}),
        ("Ippo", "spread", {"prefer_continuous_actions": False}),
        ("Qmix", "navigation", {}),
        ("Qmix", "spread", {}),
        ("Maddpg", "navigation", {}),
        ("Masac", "navigation", {}),
        ("Masac", "navigation", {"prefer_continuous_actions": False}),
    ],
)
def test_every_algorithm_trains(
    algorithm: str, environment: str, options: dict[str, Any], tmp_path: Path
) -> None:
    experiment = make_experiment(algorithm, tmp_path, environment, **options)
    before = {k: v.clone() for k, v in experiment.policy.state_dict().items()}
    experiment.run()
    after = experiment.policy.state_dict()
    assert any(not torch.equal(before[key], after[key]) for key in before)
    assert all(
        value.isfinite().all() for value in after.values() if value.is_floating_point()
    )
