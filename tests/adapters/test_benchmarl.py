"""BenchMARL's algorithms with set networks: `make test-benchmarl`.

BenchMARL 1.5 needs a TorchRL older than 0.12, so the usual environment skips this file.
"""

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("benchmarl")
pytest.importorskip("vmas")

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from benchmarl import algorithms
    from benchmarl.environments import VmasTask
    from benchmarl.environments.pettingzoo.common import PettingZooClass
    from benchmarl.experiment import Experiment, ExperimentConfig
    from mpe2 import simple_spread_v3
    from tensordict import TensorDict
    from torchrl.envs import EnvBase, PettingZooWrapper

from marl_pool.adapters.benchmarl import SetModelConfig
from marl_pool.utils.errors import InputError

pytestmark = pytest.mark.filterwarnings("ignore")  # BenchMARL's and its libraries'

SMALL: dict[str, Any] = {"dim": 8, "num_layers": 1, "num_heads": 2}


class Spread(PettingZooClass):
    """PettingZoo's simple_spread, which has moved to mpe2 since BenchMARL's."""

    def get_env_fun(
        self, num_envs: int, continuous_actions: bool, seed: int | None, device: str
    ) -> Callable[[], EnvBase]:
        return lambda: PettingZooWrapper(
            simple_spread_v3.parallel_env(
                continuous_actions=continuous_actions, **self.config
            ),
            categorical_actions=True,
            return_state=self.has_state(),
            seed=seed,
            device=device,
        )


class Stateless(Spread):
    """Spread without a state: centralized critics read the agents' observations."""

    def has_state(self) -> bool:
        return False

    def state_spec(self, env: EnvBase) -> None:
        return None


def make_task(name: str) -> Any:
    match name:
        case "spread":
            return Spread("SIMPLE_SPREAD", {"max_cycles": 10})
        case "stateless":
            return Stateless("SIMPLE_SPREAD", {"max_cycles": 10})
    task = VmasTask[name].get_from_yaml()
    task.config |= {"max_steps": 10}
    return task


def make_experiment(
    algorithm: str,
    folder: Path,
    task: str = "NAVIGATION",
    *,
    critic: Any = None,
    **options: Any,
) -> Experiment:
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
        task=make_task(task),
        algorithm_config=getattr(algorithms, f"{algorithm}Config").get_from_yaml(),
        model_config=SetModelConfig(**SMALL),
        critic_model_config=critic or SetModelConfig(vector="token", **SMALL),
        seed=0,
        config=config,
    )


@pytest.mark.parametrize(
    ("algorithm", "task", "options"),
    [
        ("Ippo", "NAVIGATION", {}),
        ("Mappo", "NAVIGATION", {}),
        ("Mappo", "NAVIGATION", {"share_policy_params": False}),
        ("Ippo", "SIMPLE_SPREAD", {}),
        ("Mappo", "SIMPLE_SPREAD", {}),
        ("Mappo", "spread", {}),
        ("Mappo", "stateless", {}),
        ("Ippo", "spread", {"prefer_continuous_actions": False}),
        ("Qmix", "NAVIGATION", {}),
        ("Qmix", "spread", {}),
        ("Maddpg", "NAVIGATION", {}),
        ("Masac", "NAVIGATION", {}),
        ("Masac", "NAVIGATION", {"prefer_continuous_actions": False}),
    ],
)
def test_every_algorithm_trains(
    algorithm: str, task: str, options: dict[str, Any], tmp_path: Path
) -> None:
    experiment = make_experiment(algorithm, tmp_path, task, **options)
    before = {k: v.clone() for k, v in experiment.policy.state_dict().items()}
    experiment.run()
    after = experiment.policy.state_dict()
    assert any(not torch.equal(before[key], after[key]) for key in before)
    assert all(value.isfinite().all() for value in after.values())


def test_a_critic_reads_agents_in_any_order(tmp_path: Path) -> None:
    experiment = make_experiment("Mappo", tmp_path)
    critic = experiment.losses["agents"].critic_network
    observed = torch.randn(
        4, *experiment.observation_spec["agents", "observation"].shape
    )

    def values(observation: torch.Tensor) -> torch.Tensor:
        agents = TensorDict({"observation": observation}, observation.shape[:2])
        batch = TensorDict({"agents": agents}, observation.shape[:1])
        with torch.no_grad(), params.to_module(critic):
            return critic(batch)["agents", "state_value"]

    params = experiment.losses["agents"].critic_network_params
    clean = values(observed)
    torch.testing.assert_close(values(observed[:, [2, 0, 1]]), clean)
    observed[:, 0] += 5
    assert ((values(observed) - clean).abs() > 1e-6).all()


def test_a_wrong_option_is_refused(tmp_path: Path) -> None:
    wrong = SetModelConfig(token_options={"presense": 0})
    with pytest.raises(InputError, match="presense"):
        make_experiment("Mappo", tmp_path, critic=wrong)
