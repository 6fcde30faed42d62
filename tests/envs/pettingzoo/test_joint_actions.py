"""Actions of all spaces and their masks, from the policy to PettingZoo and back."""

import json
import re
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces

import marl_pool
from helpers.joint_actions import SPACES, JointEnv
from helpers.played import tell, token_target
from helpers.ppo import assert_same, resumed, run_of
from marl_pool.config import compose
from marl_pool.envs import make_env
from marl_pool.envs.checks import check_env
from marl_pool.envs.pettingzoo.env import PettingZooEnv
from marl_pool.perturbations.actions import ActionNoise, DropActions
from marl_pool.perturbations.membership import Occlude
from marl_pool.play.session import Session
from marl_pool.policies import make_agent, make_policy
from marl_pool.policies.action_spaces import ActionRows
from marl_pool.policies.actions import ActionSpec, mask_logits, most_likely
from marl_pool.policies.random_policy import RandomPolicy
from marl_pool.rollout import Rollout
from marl_pool.runs.run import Run
from marl_pool.tokens import Tokens
from marl_pool.training.cloning.clone import clone
from marl_pool.training.cloning.learner import losses
from marl_pool.training.cloning.sampler import SequenceBatch
from marl_pool.training.cloning.settings import CloneSettings
from marl_pool.training.jobs import config_of
from marl_pool.utils.errors import InputError

MODULE = "helpers.joint_actions:JointEnv"
MASKS = [None, "observation", "infos", "tuple"]


def joint_env(num_envs: int = 3, **options: Any) -> PettingZooEnv:
    return PettingZooEnv(num_envs, module=MODULE, options=options, seed=1)


def build(kind: str, env: PettingZooEnv) -> Any:
    group = env.groups["a"]
    if kind == "random":
        return RandomPolicy(group.action_space)
    if kind == "agent":
        pooling = {"name": "attention_neuron"}
        make = make_agent(group.tokens, group.action_space, "sensory", pooling=pooling)
        return make.eval()
    return make_policy(group.tokens, group.action_space, pooling=kind, seed=0).eval()


PLAYERS = [
    *(("ada", True), ("lstm", True), ("random", True), ("agent", True)),
    ("ada", False),
]
"""Policies, and whether they explore."""


# Each pair of a space, a kind of masks and a player: none of them knows the others.
@pytest.mark.parametrize(
    ("kind", "masks", "policy", "explore"),
    [
        (kind, MASKS[(i + j) % len(MASKS)], *player)
        for i, kind in enumerate(SPACES)
        for j, player in enumerate(PLAYERS)
    ],
)
def test_policies_play_every_space_legally(kind, masks, policy, explore):
    env = joint_env(kind=kind, masks=masks)
    # Masks are of actions, and stay where tokens are hidden.
    perturbation = None if explore else Occlude(severity=0.5)
    options = {"explore": explore, "perturbation": perturbation}
    rollout = Rollout(env, {"a": build(policy, env)}, **options)
    trajectory = rollout.steps(12)["a"]
    spec = env.groups["a"].actions
    assert trajectory.actions.shape == (12, 3, 2, *spec.shape)
    assert trajectory.actions.is_floating_point() != spec.integral
    assert (trajectory.tokens.action_mask is None) == (masks is None)
    assert trajectory.log_probs.isfinite().all()
    assert not trajectory.active.all()
    if masks is not None:
        mask, active = trajectory.tokens.action_mask, trajectory.active
        assert not mask[active].all()
        assert spec.allowed(trajectory.actions, mask)[active].all()
    # A rollout that was never stepped continues exactly.
    state = rollout.state_dict()
    after = rollout.steps(5)["a"]
    env = joint_env(kind=kind, masks=masks)
    loaded = Rollout(env, rollout.policies, **options)
    loaded.load_state_dict(state)
    again = loaded.steps(5)["a"]
    assert torch.equal(again.actions, after.actions)
    for part, reference in zip(again.tokens, after.tokens, strict=True):
        assert part is reference is None or torch.equal(part, reference)


@pytest.mark.parametrize(
    ("kind", "masks", "perturbation"),
    [
        (kind, ("observation", "infos")[(i + j) % 2], perturbation)
        for i, kind in enumerate(SPACES)
        for j, perturbation in enumerate(
            (
                ActionNoise(severity=1.0),
                DropActions(severity=0.7),
                DropActions(severity=0.7, instead="zero"),
            )
        )
    ],
)
def test_perturbed_actions_are_allowed_ones(kind, masks, perturbation):
    env = joint_env(kind=kind, masks=masks)
    policy = RandomPolicy(env.groups["a"].action_space)
    rollout = Rollout(env, {"a": policy}, perturbation=perturbation)
    actions = rollout.steps(12)["a"].actions[-1]
    executed = rollout.perturbation_states["a"]["executed"]
    if np.prod(env.groups["a"].actions.sizes) > 4:
        assert not actions.equal(executed)


@pytest.mark.parametrize(
    ("kind", "masks"),
    [(kind, MASKS[i % len(MASKS)]) for i, kind in enumerate(SPACES)],
)
def test_the_contract_holds(kind, masks):
    options = {"module": MODULE, "options": {"kind": kind, "masks": masks}}
    assert not any(check_env("pettingzoo", **options).values())


def play_legally(view: Any, masks: str) -> None:
    """Play an episode, in which every observation and action is of its space."""
    observations, infos = view.reset(seed=3)
    while view.agents:
        actions = {}
        for agent in view.agents:
            obs = observations[agent]
            assert view.observation_space(agent).contains(obs)
            assert ("action_mask" in obs) == (masks == "observation")
            mask = (obs if masks == "observation" else infos[agent])["action_mask"]
            actions[agent] = first_legal(view.action_space(agent), mask)
        observations, _, _, _, infos = view.step(actions)


def first_legal(space: spaces.Space[Any], mask: np.ndarray) -> Any:
    rows, first, row = ActionRows(space), 0, []
    for size in rows.sizes:
        row.append(int(mask[first : first + size].argmax()))
        first += size
    return rows.restore(np.array([*row, *rows.low]))


@pytest.mark.parametrize("masks", ["observation", "infos"])
@pytest.mark.parametrize("kind", SPACES)
def test_views_show_the_masks_and_take_their_actions(kind, masks):
    options = {"kind": kind, "masks": masks}
    play_legally(make_env("pettingzoo", module=MODULE, options=options), masks)


@pytest.mark.parametrize(
    ("kind", "masks", "perturbation"),
    [
        (kind, ("observation", "infos")[(i + j) % 2], perturbation)
        for i, kind in enumerate(SPACES)
        for j, perturbation in enumerate(("action_noise", "drop_actions", "occlude"))
    ],
)
def test_wrapped_environments_execute_allowed_actions(kind, masks, perturbation):
    env = make_env("pettingzoo", module=MODULE, options={"kind": kind, "masks": masks})
    change = {"name": perturbation, "severity": 0.8}
    play_legally(marl_pool.perturb_env(env, change), masks)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"kind": "one", "masks": "observation", "stuck_at": 2},
            "agent 'a_0' of group 'a': action_mask: expected at least one",
        ),
        (
            {"masks": "infos", "stuck_at": 2},
            "agent 'a_0' of group 'a': action_mask: .* action of choice 0, ",
        ),
        (
            {"masks": "infos", "start": 2},
            "agent 'a_0': infos: action_mask: expected one after the reset",
        ),
    ],
)
def test_masks_that_break_their_rules_in_mid_episode_are_refused(options, message):
    env = joint_env(**options)
    policy = RandomPolicy(env.groups["a"].action_space)
    with pytest.raises(InputError, match=f"step 2: {message}"):
        Rollout(env, {"a": policy}).steps(3)


@pytest.mark.parametrize("perturbation", [None, DropActions(severity=0.5)])
def test_masks_that_begin_with_a_later_episode_are_refused(perturbation):
    env = joint_env(masks="infos", first=1)
    policy = RandomPolicy(env.groups["a"].action_space)
    rollout = Rollout(env, {"a": policy}, perturbation=perturbation)
    message = "reset: group 'a': infos: expected action_mask from the first reset on"
    with pytest.raises(InputError, match=message):
        rollout.steps(9)


@pytest.mark.parametrize(
    ("mask", "message"),
    [
        (np.ones(4, np.int8), r"expected 5 numbers 0 and 1, got array\(\[1, 1, 1, 1\]"),
        (np.full(5, 0.5), r"expected 5 numbers 0 and 1, got array\(\[0.5, 0.5, "),
        (np.full(5, np.nan), r"expected 5 numbers 0 and 1, got array\(\[nan, "),
        (np.full(5, 2), r"expected 5 numbers 0 and 1, got array\(\[2, 2"),
        (["a"] * 5, "expected 5 numbers 0 and 1, got .'a', "),
        ({1, 2}, "expected 5 numbers 0 and 1, got {1, 2}"),
        ([], r"expected 5 numbers 0 and 1, got \[\]"),
        ((np.ones(2), np.ones(3)), r"of the sizes \(3, 2\), .*, got \(2, 3\)"),
        ([[1, 1], [1, 1, 1]], r"of the sizes \(3, 2\), .*, got \(2, 3\)"),
        ((np.ones(5),), r"of the sizes \(3, 2\), .*, got \(5,\)"),
        ([np.ones(3), 1], r"of the sizes \(3, 2\), .*, got \[array"),
        ([[1, 1, 1], [[1, 1]]], r"of the sizes \(3, 2\), .*, got \[\[1, 1, 1\], "),
        (np.ones((2, 3)), r"of the sizes \(3, 2\), .*, got \(3, 3\)"),
        (np.ones((1, 2, 2)), "expected 5 numbers 0 and 1, got array"),
        ([np.ones((2, 2)), np.ones(2)], r"of the sizes \(3, 2\), .*, got \[array"),
    ],
)
def test_wrong_masks_in_infos_are_refused(monkeypatch, mask, message):
    where = "^env.module: reset: agent 'a_0': infos: action_mask: "
    with pytest.raises(InputError, match=where) as caught:
        masked_by(monkeypatch, mask)
    assert re.search(message, str(caught.value))
    assert "\n" not in str(caught.value)


BITS = spaces.MultiBinary
FLOATS = spaces.Box(0, 1, (3,), np.float32), spaces.Box(0, 1, (2,), np.float32)
THREE, TWO = np.array([1, 0, 1], np.int8), np.array([0, 1], np.int8)
ROW = np.concatenate([THREE, TWO])
PAIRS = np.array([[1, 0], [0, 1], [1, 1]], np.int8)


def masked_by(monkeypatch, mask, space=None, kind="several"):
    """Return an env, of choices among 3 and 2, with one mask in each observation.

    Without a space, the mask is in the infos.
    """
    seen = spaces.Box(-1, 1, (3,), np.float32)
    observed = {"observation": np.zeros(3, np.float32), "action_mask": mask}
    observations = dict.fromkeys(JointEnv.possible_agents, observed)
    infos = {agent: {} for agent in observations}
    if space is None:
        observations = dict.fromkeys(infos, observed["observation"])
        infos = {agent: {"action_mask": mask} for agent in infos}
    else:
        seen = spaces.Dict(observation=seen, action_mask=space)
    monkeypatch.setattr(JointEnv, "observation_space", lambda *_: seen)
    monkeypatch.setattr(JointEnv, "_observe", lambda *_: (observations, infos))
    env = joint_env(1, kind=kind)
    env.reset()
    return env


SEVERAL_MASKS = [
    (BITS(5), ROW),
    (BITS(5), ROW.astype(bool)),
    (BITS(5), ROW.tolist()),
    (spaces.Box(0, 1, (5,), np.bool_), ROW.astype(bool)),
    (spaces.Box(0, 1, (5,), np.float64), ROW.astype(float)),
    (spaces.MultiDiscrete([2] * 5), ROW),
    (spaces.Tuple([BITS(3), BITS(2)]), (THREE, TWO)),
    (spaces.Tuple([BITS(3), BITS(2)]), [THREE.tolist(), TWO.tolist()]),
    (spaces.Tuple([BITS(3), BITS(2)]), ROW),
    (spaces.Tuple(FLOATS), (THREE.astype(np.float32), TWO.astype(np.float32))),
    (None, ROW),
    (None, ROW.astype(bool)),
    (None, ROW.astype(float)),
    (None, ROW.tolist()),
    (None, torch.from_numpy(ROW)),
    (None, (THREE, TWO)),
    (None, [THREE.tolist(), TWO.tolist()]),
    (None, (torch.from_numpy(THREE), torch.from_numpy(TWO))),
]
"""Masks of choices among 3 and 2, and their spaces; None for those in infos."""
BITS_MASKS = [
    (None, PAIRS),
    (None, PAIRS.tolist()),
    (None, torch.from_numpy(PAIRS)),
    (BITS((3, 2)), PAIRS),
    (BITS((3, 2)), PAIRS.flatten()),
    (spaces.Box(0, 1, (3, 2), np.float32), PAIRS.astype(np.float32)),
    (spaces.Tuple([BITS(2)] * 3), PAIRS),
]
"""Masks of three choices of equal lengths, which may be a matrix."""


@pytest.mark.parametrize(
    ("kind", "allowed", "space", "mask"),
    [
        *(("several", ROW, *masks) for masks in SEVERAL_MASKS),
        *(("bits", PAIRS.flatten(), *masks) for masks in BITS_MASKS),
    ],
)
def test_a_mask_may_be_of_any_numbers_0_and_1(monkeypatch, kind, allowed, space, mask):
    env = masked_by(monkeypatch, mask, space, kind)
    assert env.observe()["a"].action_mask[0].tolist() == [(allowed != 0).tolist()] * 2


@pytest.mark.parametrize(
    ("space", "mask", "message"),
    [
        (
            spaces.Tuple([BITS(2), BITS(3)]),
            (TWO, THREE),
            r"^env.module: agent 'a_0': expected an action_mask of shape \(5,\), or a "
            r"Tuple of the sizes \(3, 2\) for .*, got a Tuple of the sizes \(2, 3",
        ),
        (spaces.Tuple([BITS(4), BITS(1)]), (), r"got a Tuple of the sizes \(4, 1\)$"),
        (spaces.Tuple([BITS(6)]), (), r"Tuple of the sizes \(3, 2\) for .*got \(6,\)$"),
        (
            spaces.Dict(x=BITS(3), y=BITS(2)),
            {},
            r"such as a Dict whose action_mask is a MultiBinary\(n\), .* or a Tuple of",
        ),
        (
            spaces.Tuple([BITS(3), BITS(2)]),
            (TWO, THREE),
            r"^env.module: reset: agent 'a_0': action_mask: expected masks of the "
            r"sizes \(3, 2\), one for each choice, got \(2, 3\)$",
        ),
        (spaces.Tuple(FLOATS), (np.ones(2), np.ones(3)), r"\(3, 2\), .* got \(2, 3\)$"),
        (BITS(5), (TWO, THREE), r"expected one row of 5 numbers, got \(2, 3\)$"),
        (BITS(5), (THREE, TWO), r"expected one row of 5 numbers, got \(3, 2\)$"),
        (BITS(5), ROW.astype(float), r"_mask': expected integers .* got float64"),
        *(
            (
                spaces.Box(-np.inf, np.inf, (5,), np.float32),
                np.array([1, 1, number, 0, 0], np.float32),
                "agent 'a_0': action_mask: expected numbers 0 and 1, got ",
            )
            for number in (0.5, -1.0, np.nan)
        ),
    ],
)
def test_masks_that_do_not_fit_each_choice_are_refused(
    monkeypatch, space, mask, message
):
    with pytest.raises(InputError, match=message):
        masked_by(monkeypatch, mask, space)


def test_gymnasiums_masks_in_infos_are_obeyed():
    env = PettingZooEnv(2, module="gymnasium:Taxi-v3", seed=1)
    (name,) = env.groups
    policy = RandomPolicy(env.groups[name].action_space)
    trajectory = Rollout(env, {name: policy}).steps(8)[name]
    mask = trajectory.tokens.action_mask
    assert not mask.all()
    assert mask.gather(-1, trajectory.actions[..., None]).all()


def first_allowed(observation, action_masks):
    masks = np.split(action_masks, [3], axis=1)
    return np.stack([mask.argmax(1) for mask in masks], 1)


def last_allowed(observation, action_masks):
    masks = np.split(action_masks[:, ::-1], [2], axis=1)
    rows = [mask.shape[1] - 1 - mask.argmax(1) for mask in masks]
    return np.stack(rows[::-1], 1)


TASK = {"name": "pettingzoo", "module": MODULE, "options": {"masks": "infos"}}


def test_functions_get_the_masks_of_infos():
    best, worst = (
        next(r.mean for r in measured.results if r.label == "clean")
        for measured in (
            marl_pool.evaluate(act, TASK, suite={"perturbations": []}, episodes=4)
            for act in (last_allowed, first_allowed)
        )
    )
    assert best > worst


@pytest.mark.parametrize(
    ("actions", "message"),
    [
        ([3, 0], "row 0: choice 0: expected 0 to 2, got 3"),
        ([0, -1], "row 0: choice 1: expected 0 to 1, got -1"),
        ([0.0, 1.0], "expected actions of an integer dtype"),
        ([0], r"expected actions of shape \(\d+, 2\)"),
    ],
)
def test_functions_are_held_to_the_choices(actions, message):
    def act(observation):
        return np.tile(actions, (len(observation), 1))

    with pytest.raises(InputError, match=message):
        marl_pool.evaluate(act, TASK, episodes=2)


@pytest.mark.parametrize("kind", ["several", "tuple"])
def test_the_live_page_plays_legally_and_tells_perturbed_actions(kind):
    env = {**TASK, "options": {"kind": kind, "masks": "infos"}}
    session = Session({"a": token_target(env)})
    for name in ("action_noise", "drop_actions"):
        tell(session, do="severity", name=name, value=1)
    session.step()
    frame = json.loads(json.dumps(session.frame()))
    moment = frame["lanes"][0]["episode"]
    assert len(moment["action"]) == {"several": 2, "tuple": 5}[kind]
    for _ in range(4):
        session.step()


CLONING = [
    *("env=pettingzoo", f"env.module={MODULE}", "clone=steps", "policy=feed_forward"),
    *("total_batches=60", "clone.lr=1e-2"),
    f"teacher={__name__}:Scripted",
]


class Scripted(RandomPolicy):
    """A policy that takes the last allowed option, and the middle of a Box."""

    def __init__(self, group: Any) -> None:
        super().__init__(group.action_space)

    def act(self, tokens, state=(), generator=None, explore=False):
        decision = super().act(tokens, state, generator, explore)
        spec = self.actions
        logits = mask_logits(
            torch.arange(spec.num_logits).expand(decision.logits.shape).float(),
            tokens.action_mask,
        )
        middle = ((self.low + self.high) / 2).expand(*tokens.batch_shape, -1)
        return decision._replace(action=most_likely(spec, logits, middle))


@pytest.mark.parametrize(
    ("kind", "masks"),
    [("tuple", None), *((kind, "infos") for kind in ("one", "several", "tuple"))],
)
def test_cloning_imitates_every_space(tmp_path, kind, masks):
    options = f"kind: {kind}" + (f", masks: {masks}" if masks else "")
    overrides = [*CLONING, f"env.options={{{options}}}", "clone.iteration_batches=10"]
    run = Run.create(tmp_path / "run", compose("clone", overrides), "clone")
    clone(run, config_of(run))
    rows = list(run.rows())
    run.close()
    assert rows[-1]["validation_loss"] < 0.6 * rows[0]["validation_loss"]


def test_illegal_options_have_no_regret():
    spec, mask = ActionSpec(n=3), torch.tensor([[[True, True, False]]])
    logits = mask_logits(torch.tensor([[[1.0, 3.0, 9.0]]]), mask)
    batch = SequenceBatch(
        tokens=Tokens(
            torch.zeros(1, 1, 2, 1),
            torch.zeros(1, 1, 2, dtype=torch.int64),
            torch.zeros(1, 1, 2, dtype=torch.bool),
            mask,
        ),
        prev_action=torch.zeros(1, 1, 3),
        label=torch.tensor([[1]]),
        logits=logits,
        valid=torch.ones(1, 1, dtype=torch.bool),
    )
    outputs = mask_logits(torch.zeros(1, 1, 3), mask)
    settings = CloneSettings(expected_regret=1.0, margin_weighting=4.0)
    weight = 0.1 + 2 / 4
    expected = weight * np.log(2) + 0.5 * 2
    loss = losses(outputs, batch, settings, spec)
    torch.testing.assert_close(loss, torch.tensor([[expected]], dtype=torch.float32))


TRAINING = [
    *("env=pettingzoo", f"env.module={MODULE}", "ppo.num_envs=4", "ppo.batch_size=64"),
    *("ppo.minibatch_size=32", "ppo.kl_coeff=0.2", "ppo.entropy_coeff=0.01"),
    *("checkpoint.every=1", "ppo.num_epochs=2", "threads=1"),
]


@pytest.mark.parametrize(
    ("kind", "masks", "pooling", "kernels"),
    [
        ("several", "infos", "lstm", True),
        ("tuple", "tuple", "ada", True),
        ("tuple", "tuple", "ada", False),
        ("dict", None, "ada", True),
    ],
)
def test_training_resumes_exactly(tmp_path, monkeypatch, kind, masks, pooling, kernels):
    if not kernels:
        monkeypatch.setenv("MARL_POOL_KERNELS", "torch")
    options = f"kind: {kind}" + (f", masks: {masks}" if masks else "")
    overrides = [*TRAINING, f"pooling={pooling}", f"env.options={{{options}}}"]
    whole = run_of(tmp_path / "whole", compose("train", [*overrides, "total_steps=64"]))
    run_of(tmp_path / "part", compose("train", [*overrides, "total_steps=32"]))
    assert_same(resumed(tmp_path / "part", 64), whole)


def test_training_learns_the_best_option(tmp_path):
    overrides = [*TRAINING, "env.options={kind: several}", "total_steps=1500"]
    overrides += ["ppo.lr=0.01", "ppo.batch_size=256", "ppo.minibatch_size=128"]
    overrides += ["ppo.num_envs=16"]
    run = run_of(tmp_path / "run", compose("train", overrides))
    rows = list(run.rows())
    assert rows[-1]["return_mean"] > rows[0]["return_mean"] + 3
