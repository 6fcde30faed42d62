"""Cloning into the policy that PPO trains: loss, runs and refused options."""

import numpy as np
import pytest
import torch
from gymnasium import spaces

from marl_pool import InputError
from marl_pool.cli import main as cli
from marl_pool.compiled.choice import use_kernels
from marl_pool.config import compose
from marl_pool.evaluation.load import target_from_run
from marl_pool.evaluation.settings import TargetSettings
from marl_pool.policies import make_policy
from marl_pool.policies.actions import log_prob, mask_logits
from marl_pool.policies.storage import load_policy
from marl_pool.policies.token_policy import TokenPolicy
from marl_pool.rollout import Rollout
from marl_pool.runs.run import Run
from marl_pool.tokens import Tokens, TokenSpec
from marl_pool.training.cloning.clone import clone
from marl_pool.training.cloning.learner import Learner
from marl_pool.training.cloning.sampler import SequenceBatch
from marl_pool.training.cloning.settings import CloneSettings
from marl_pool.training.jobs import config_of
from marl_pool.training.ppo.train import PPOMethod
from marl_pool.training.settings import TrainConfig

SPEC = TokenSpec(4, 3, ("self", "prey", "rock"))
BOX = spaces.Box(np.float32([-1, -2]), np.float32([1, 4]))
SPACES = {
    "choice": spaces.Discrete(3),
    "box": BOX,
    "choices": spaces.MultiDiscrete([2, 3]),
    "choice and box": spaces.Tuple([spaces.Discrete(2), BOX]),
}
NEURON = {"name": "attention_neuron", "num_codes": 3, "key_units": 3}
RECURRENT = {"pooling": NEURON, "encoder": "identity"}
SMALL = [
    *("policy=token", "clone=steps", "env=simple_spread", "teacher=heuristic"),
    *("clone.episodes=6", "clone.validation_episodes=3", "clone.num_envs=4"),
    *("env.max_steps=9", "clone.batch_size=16", "clone.iteration_batches=2"),
    *("policy.encoder.dim_ff=16", "total_batches=20", "threads=1"),
    "clone.lr=1e-2",
]


def batch_of(policy: TokenPolicy, seed: int = 0) -> SequenceBatch:
    """Two sequences of three steps, the second of which is shorter."""
    draw = torch.Generator().manual_seed(seed)
    shape = (2, 3, 4)
    types = torch.randint(1, 3, shape, generator=draw)
    types[..., 0] = 0
    padding = torch.rand(shape, generator=draw) < 0.3
    padding[..., 0] = False
    sizes = policy.actions.sizes
    mask = None
    if sizes:
        mask = torch.rand(2, 3, sum(sizes), generator=draw) < 0.5
        for first in np.cumsum((0, *sizes[:-1])).tolist():  # an option of each choice
            mask[..., first] = True
    tokens = Tokens(torch.rand(*shape, 3, generator=draw), types, padding, mask)
    numbers = 2 * torch.rand(2, 3, len(policy.actions.low), generator=draw) - 1
    label = torch.cat([torch.zeros(2, 3, len(policy.actions.choices)), numbers], -1)
    if policy.actions.discrete:
        label = torch.zeros(2, 3, dtype=torch.int64)
    elif policy.actions.integral:
        label = label.long()
    previous = torch.rand(2, 3, policy.actions.dim, generator=draw)
    valid = torch.tensor([[True, True, True], [True, True, False]])
    return SequenceBatch(tokens, previous, label, None, valid)


@pytest.mark.parametrize("kernels", ["auto", "torch"])
@pytest.mark.parametrize("options", [{}, {"trunk": "separate"}, RECURRENT])
@pytest.mark.parametrize("space", SPACES.values(), ids=SPACES)
def test_the_loss_is_the_likelihood_of_the_teachers_actions(space, options, kernels):
    """Computed step by step, as the policy acts."""
    policy = make_policy(SPEC, space, seed=3, **options)
    batch = batch_of(policy)
    expected, memory = [], policy.initial_memory(2, 4)
    for t in range(3):
        tokens = batch.tokens.at((slice(None), t))
        state = ()
        if policy.recurrent:
            state = {"action": batch.prev_action[:, t], "memory": memory}
        logits, _, memory = policy.head_outputs(tokens, state)
        logits = mask_logits(logits, tokens.action_mask)
        step = -log_prob(policy.actions, logits, batch.label[:, t])
        expected.append(step * batch.valid[:, t])
    total = torch.stack(expected).sum()
    total.div(5).backward()
    gradients = {
        name: part.grad.clone()
        for name, part in policy.named_parameters()
        if part.grad is not None
    }
    policy.zero_grad()
    with use_kernels(kernels):
        score = Learner(policy, CloneSettings(grad_clip=None)).learn(batch, 1e-9)
    assert score.steps == 5
    torch.testing.assert_close(score.loss, total.detach(), rtol=1e-5, atol=1e-6)
    assert gradients
    for name, part in policy.named_parameters():
        if name in gradients:
            torch.testing.assert_close(
                part.grad, gradients[name], rtol=1e-4, atol=1e-6, msg=name
            )
        else:
            assert part.grad is None or not part.grad.any(), name


def cloned(path, *overrides: str) -> Run:
    run = Run.create(path, compose("clone", [*SMALL, *overrides]), "clone")
    clone(run, config_of(run))
    run.close()
    return run


@pytest.mark.parametrize(
    "overrides",
    [
        (),
        ("env.continuous_actions=true",),
        ("policy.pooling=pma", "policy.trunk=separate"),
        ("clone.rounds=1", "clone.first_round=2", "perturbation=shuffle"),
        (
            *("policy.encoder=identity", "policy.pooling=attention_neuron"),
            *("policy.type_embedding=0", "clone.truncate=4"),
        ),
    ],
    ids=["choice", "box", "trunk", "dagger", "recurrent"],
)
def test_a_clone_is_a_policy_that_is_saved_and_evaluated(tmp_path, overrides):
    run = cloned(tmp_path / "run", *overrides)
    assert isinstance(load_policy(run.policy_path("best")), TokenPolicy)
    assert run.rows()[-1]["loss"] < run.rows()[0]["loss"]
    target = target_from_run(run, TargetSettings())
    returns = Rollout(target.make_env(3), target.policies).episodes().returns
    assert all(part.isfinite().all() for part in returns.values())


def test_a_pointer_is_cloned_by_the_tokens_that_its_teacher_selects(tmp_path):
    overrides = ["env=lbforaging", "env.choices=food", "policy.action=select"]
    overrides.append("clone.batch_size=256")
    run = cloned(tmp_path / "run", *overrides, "total_batches=60")
    assert run.rows()[-1]["accuracy"] > run.rows()[0]["accuracy"]
    with pytest.raises(InputError, match="perturbation: expected none where actions"):
        cloned(tmp_path / "shuffled", *overrides, "perturbation=shuffle")


def test_a_name_and_a_users_file_select_default_options(tmp_path):
    policy = compose("clone", [*SMALL, "policy.pooling=max"])["policy"]
    assert policy["pooling"] == {"name": "max"}
    assert policy["encoder"]["dim_ff"] == 16
    assert policy["encoder"]["name"] == "transformer"
    (tmp_path / "policy").mkdir()
    file = tmp_path / "policy" / "narrow.yaml"
    file.write_text("defaults: [token]\nencoder: {num_layers: 1}\ninit_std: 0.1\n")
    policy = compose("clone", ["policy=narrow"], tmp_path)["policy"]
    assert policy["name"] == "token"
    assert policy["init_std"] == 0.1
    assert policy["encoder"]["num_layers"] == 1


@pytest.mark.parametrize("pooling", ["ada", "pma", "max"])
def test_training_with_default_options_starts_from_a_clone(tmp_path, pooling):
    run = cloned(tmp_path / "clone", f"policy.pooling={pooling}", "total_batches=2")
    words = ["env=simple_spread", "encoder.dim_ff=16", f"pooling={pooling}"]
    words.append("ppo.batch_size=1920")  # a multiple of 64 environments of 3 agents
    config = compose("train", [*words, f"init={run.path}"])
    settings = TrainConfig.from_plain(config)
    method = PPOMethod(Run.create(tmp_path / "run", config), settings, None)
    assert method.initial_weights.keys() == {"agent"}


@pytest.mark.slow
def test_boxworld_is_learned_from_its_solver_and_kept_by_ppo(tmp_path, capsys):
    """Random play returns about 0.5, the solver 11."""
    paths = [str(tmp_path / name) for name in ("clone", "refined")]
    words = ["clone", "experiment=boxworld_clone", "threads=1", "--run-dir", paths[0]]
    assert cli.main(words) == 0
    words = ["train", "experiment=boxworld_refined", f"init={paths[0]}", "threads=1"]
    assert cli.main([*words, "total_steps=100_000", "--run-dir", paths[1]]) == 0
    capsys.readouterr()
    goal = 0.5 + 0.8 * (11 - 0.5)
    for path in paths:
        assert Run.open(path).rows()[-1]["return_mean"] > goal


@pytest.mark.slow
def test_cartpole_is_learned_from_its_script(tmp_path, capsys):
    path = str(tmp_path / "run")
    words = ["clone", "experiment=cartpole_channels_clone", "threads=1"]
    sizes = ["clone.rounds=3", "total_batches=1250"]
    assert cli.main([*words, *sizes, "--run-dir", path]) == 0
    capsys.readouterr()
    target = target_from_run(Run.open(path), TargetSettings())
    returns = Rollout(target.make_env(128), target.policies).episodes().returns
    assert float(returns["agent"].mean()) > 480
