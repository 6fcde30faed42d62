"""Set networks inside Stable-Baselines3 and sb3-contrib."""

from collections.abc import Mapping, Sequence
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from sb3_contrib import MaskablePPO
from stable_baselines3 import A2C, DQN, PPO, SAC
from stable_baselines3.common.base_class import BaseAlgorithm

import marl_pool
from helpers.samples import VARIANTS
from marl_pool import InputError
from marl_pool.adapters.sb3 import (
    ActionMaskWrapper,
    AnySizeModel,
    SetExtractor,
    fitted_space,
    resize_policy,
)
from marl_pool.observations.make import make_view, split_action_mask
from marl_pool.observations.view import TokenOptions
from marl_pool.pooling.base import MemoryPooling

NUM_TOKENS, WIDTH = 6, 4


def token_space(num_tokens: int) -> spaces.Dict:
    return spaces.Dict(
        features=spaces.Box(-np.inf, np.inf, (num_tokens, WIDTH)),
        types=spaces.Box(0, 2, (num_tokens,), np.int64),
        padding=spaces.MultiBinary(num_tokens),
    )


TOKENS = token_space(NUM_TOKENS)
MASKED = spaces.Dict({**TOKENS.spaces, "action_mask": spaces.MultiBinary(5)})
SPACES: dict[str, tuple[spaces.Space, dict[str, Any]]] = {
    "tokens": (TOKENS, {}),
    "tokens with a mask": (MASKED, {}),
    "tokens of choices": (
        spaces.Dict(
            features=spaces.Box(0, 255, (3, 2), np.uint8),
            types=spaces.MultiDiscrete([3, 3, 3]),
            padding=spaces.MultiBinary(3),
        ),
        {},
    ),
    "rows": (spaces.Box(-1, 1, (5, 3)), {}),
    "rows with presence": (spaces.Box(0, 1, (5, 3)), {"presence": 0}),
    "sets": (
        spaces.Dict(
            {"self": spaces.Box(-1, 1, (3,)), "others": spaces.Box(-1, 1, (4, 2))}
        ),
        {},
    ),
    "vector": (spaces.Box(-1, 1, (4,)), {}),
    "choice": (spaces.Discrete(5), {}),
    "choices": (spaces.MultiDiscrete([3, 4]), {}),
    "image": (spaces.Box(0, 255, (40, 36, 3), np.uint8), {"patch": 12}),
    "image and number": (
        spaces.Dict(
            image=spaces.Box(0, 255, (40, 36, 1), np.uint8), speed=spaces.Box(0, 9)
        ),
        {},
    ),
}
HEADS = [
    (name, options)
    for name, options in VARIANTS
    if name not in ("attention_neuron", "vision_neuron", "multi")
]


class SampledEnv(gymnasium.Env):
    """Random observations in episodes of eight steps; the reward is the action's."""

    def __init__(
        self, observation_space: spaces.Space, action_space: spaces.Space
    ) -> None:
        self.observation_space, self.action_space = observation_space, action_space
        self.mask: np.ndarray | None = None

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        if seed is not None:
            self.observation_space.seed(seed)
        self.steps = 0
        return self.observe(), {}

    def step(self, action):
        assert self.mask is None or self.mask[action]
        self.steps += 1
        reward = float(np.sum(action))
        return self.observe(), reward, False, self.steps == 8, {}

    def observe(self):
        observation = sample(self.observation_space)
        if isinstance(observation, dict) and "action_mask" in observation:
            self.mask = observation["action_mask"]
        return observation


def sample(space: spaces.Space) -> Any:
    """Sample an observation; numbers under padding are NaN."""
    observation = space.sample()
    if isinstance(observation, dict):
        if "action_mask" in observation:
            observation["action_mask"][2] = 1
        if observation.get("features", np.zeros(0)).dtype == np.float32:
            observation["features"][observation["padding"] == 1] = np.nan
    return observation


def make(
    algorithm: type[BaseAlgorithm],
    space: spaces.Space,
    action_space: spaces.Space,
    sizes: Mapping[str, Any] | None = None,
    **options: Any,
) -> BaseAlgorithm:
    env = SampledEnv(space, action_space)
    wrapped = ActionMaskWrapper(env) if algorithm is MaskablePPO else env
    name = "MultiInputPolicy" if isinstance(space, spaces.Dict) else "MlpPolicy"
    extractor = {
        "features_extractor_class": SetExtractor,
        "features_extractor_kwargs": options,
    }
    return algorithm(
        name, wrapped, policy_kwargs=extractor, seed=0, device="cpu", **(sizes or {})
    )


def stacked(observations: Sequence[Any]) -> Any:
    """Stack observations of several environments as SB3's vector envs do."""
    if isinstance(observations[0], dict):
        return {k: np.stack([o[k] for o in observations]) for k in observations[0]}
    return np.stack(observations)


def batch(space: spaces.Space, count: int = 3) -> Any:
    return stacked([sample(space) for _ in range(count)])


def extract(model: BaseAlgorithm, observation: Any) -> torch.Tensor:
    """Compute the features as SB3 does, its preprocessing included."""
    tensors, _ = model.policy.obs_to_tensor(observation)
    return model.policy.extract_features(tensors, model.policy.features_extractor)


def permuted(observation: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    order = np.random.default_rng(0).permutation(NUM_TOKENS)
    return {key: part[:, order] for key, part in observation.items()}


@pytest.fixture(autouse=True)
def seeded():
    for space, _ in SPACES.values():
        space.seed(0)


@pytest.mark.parametrize("name", SPACES)
def test_preprocessing_is_undone(name):
    space, options = SPACES[name]
    model = make(PPO, space, spaces.Discrete(5), **options)
    observed, _ = split_action_mask(space)
    view = make_view(observed, TokenOptions(**options))
    observations = [sample(space) for _ in range(3)]
    arrays = view.arrays(3)
    for number, observation in enumerate(observations):
        view.write(arrays, number, observation)
    tokens = view.tokens({key: torch.from_numpy(a) for key, a in arrays.items()})
    extractor = model.policy.features_extractor
    expected = extractor.network(tokens)
    assert expected.isfinite().all()
    assert (expected.std(0) > 0).all()
    features = extract(model, stacked(observations))
    torch.testing.assert_close(features, expected, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("name", "options"), HEADS, ids=["-".join([n, *map(str, o)]) for n, o in HEADS]
)
def test_every_head_in_an_extractor(name, options):
    extractor = SetExtractor(
        TOKENS, pooling={"name": name, **options}, encoder="transformer"
    )
    assert not isinstance(extractor.network.pooling, MemoryPooling)
    observation = batch(TOKENS)
    # Some sets are whole, some are not, and none is empty.
    observation["padding"][0] = 0
    observation["padding"][:, 0] = 0
    observation["features"][0] = np.random.default_rng(1).normal(size=(6, 4))
    observation["features"][:, 0] = 0.5
    for dtype, rounding in ((torch.float64, 1e-12), (torch.float32, 2e-5)):
        extractor.to(dtype)
        features, shuffled = (
            extractor(
                {key: torch.from_numpy(part).to(dtype) for key, part in variant.items()}
            )
            for variant in (observation, permuted(observation))
        )
        assert features.shape == (3, extractor.features_dim)
        assert features.isfinite().all()
        # NaN under padding passes neither forward nor backward.
        extractor.zero_grad()
        features.square().sum().backward()
        for parameter in extractor.network.pooling.parameters():
            assert parameter.grad.isfinite().all()
        assert extractor.network.embedding.project.weight.grad.abs().max() > 0
        if extractor.network.pooling.permutation_invariant:
            torch.testing.assert_close(shuffled, features, rtol=0, atol=rounding)
        else:
            assert not torch.allclose(shuffled, features, rtol=0, atol=1e-3)


@pytest.mark.parametrize(
    ("algorithm", "action_space", "sizes"),
    [
        (PPO, spaces.Box(-1, 1, (2,)), {"n_steps": 32, "batch_size": 16}),
        (A2C, spaces.MultiDiscrete([2, 3]), {}),
        (DQN, spaces.Discrete(5), {"learning_starts": 16, "buffer_size": 99}),
        pytest.param(
            SAC,
            spaces.Box(-1, 1, (2,)),
            {"learning_starts": 64, "buffer_size": 99},
            marks=pytest.mark.slow,
        ),
        (MaskablePPO, spaces.Discrete(5), {"n_steps": 32, "batch_size": 16}),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_algorithms_learn_save_and_load(algorithm, action_space, sizes, tmp_path):
    space = MASKED if algorithm is MaskablePPO else TOKENS
    model = make(algorithm, space, action_space, sizes, pooling="ada", dim=16)
    networks = {
        name: parameter
        for name, parameter in model.policy.named_parameters()
        if "features_extractor" in name and "target" not in name
    }
    before = {name: parameter.detach().clone() for name, parameter in networks.items()}
    model.learn(96)
    for name, parameter in networks.items():
        assert parameter.isfinite().all()
        assert not parameter.equal(before[name]), name
    # The file is SB3's, and so is the call that reads it.
    model.save(tmp_path / "model")
    loaded = algorithm.load(tmp_path / "model", device="cpu")
    observation = batch(space, 16)
    masks = {}
    if algorithm is MaskablePPO:
        masks["action_masks"] = observation["action_mask"]
    actions, _ = model.predict(observation, deterministic=True, **masks)
    repeated, _ = loaded.predict(observation, deterministic=True, **masks)
    np.testing.assert_array_equal(repeated, actions)
    np.testing.assert_array_equal(AnySizeModel(loaded)(observation), actions)
    assert loaded.policy.features_extractor_kwargs == {"pooling": "ada", "dim": 16}


def test_initial_weights_are_those_of_the_network():
    env = SampledEnv(TOKENS, spaces.Discrete(2))
    extractor = {
        "features_extractor_class": SetExtractor,
        "features_extractor_kwargs": {"pooling": "pma"},
    }
    with_orthogonal, without = (
        PPO(
            "MultiInputPolicy",
            env,
            seed=0,
            device="cpu",
            policy_kwargs={**extractor, "ortho_init": ortho_init},
        ).policy
        for ortho_init in (True, False)
    )
    expected = without.features_extractor.state_dict()
    for name, weight in with_orthogonal.features_extractor.state_dict().items():
        assert weight.equal(expected[name])
    layers = (policy.mlp_extractor for policy in (with_orthogonal, without))
    first, second = (layer.policy_net[0].weight for layer in layers)
    assert not first.equal(second)


@pytest.mark.parametrize("pooling", ["ada", "pna"])
def test_sets_of_any_size(pooling):
    model = make(PPO, TOKENS, spaces.Box(-1, 1, (2,)), pooling=pooling)
    any_size = AnySizeModel(model)
    observation = batch(TOKENS)
    actions, _ = model.predict(observation, deterministic=True)
    # More slots without a token, and then the slots that hold one alone.
    longer = {
        key: np.concatenate([part, np.ones_like(part).repeat(4, 1)], 1)
        for key, part in observation.items()
    }
    np.testing.assert_allclose(any_size(longer), actions, rtol=0, atol=1e-6)
    longer["features"][:, NUM_TOKENS:] = 7
    longer["padding"][:, NUM_TOKENS:] = 0
    assert not np.allclose(any_size(longer), actions, atol=1e-3)
    observation["padding"][:] = 0, 0, 1, 1, 1, 1
    observation["features"][:, :2] = np.random.default_rng(0).normal(size=(3, 2, 4))
    actions, _ = model.predict(observation, deterministic=True)
    shorter = {key: part[:, :2] for key, part in observation.items()}
    np.testing.assert_allclose(any_size(shorter), actions, rtol=0, atol=1e-6)
    alone = {key: part[0] for key, part in shorter.items()}
    np.testing.assert_allclose(any_size(alone), actions[0], rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("space", "observation", "message"),
    [
        (
            TOKENS,
            {"apples": 1, "self": 2},
            "'features', got apples, self; the env needs",
        ),
        (TOKENS, np.zeros(3), "'features', got no Dict; the env needs tokenize_env"),
        (spaces.Dict(a=spaces.Box(0, 1, (2,))), {"b": 1}, "the entry 'a', got b$"),
    ],
)
def test_an_entry_that_is_missing_is_named_beside_those_present(
    space, observation, message
):
    with pytest.raises(InputError, match=message):
        fitted_space(space, observation)


def test_resized_policies_share_their_weights():
    model = make(PPO, TOKENS, spaces.Discrete(3))
    any_size = AnySizeModel(model)
    observation = {key: part[:, :3] for key, part in batch(TOKENS, 64).items()}
    observation["padding"][:] = 0
    observation["features"][:] = np.random.default_rng(0).normal(size=(64, 3, 4))
    before = any_size(observation)
    with torch.no_grad():
        model.policy.action_net.bias += torch.tensor([0.0, 0.0, 99.0])
    assert (before != 2).any()
    assert (any_size(observation) == 2).all()


def test_rows_of_any_number():
    space = spaces.Box(0, 1, (5, 3))
    model = make(PPO, space, spaces.Box(-1, 1, (2,)), presence=0)
    rows = batch(space)
    actions, _ = model.predict(rows, deterministic=True)
    longer = np.concatenate([rows, np.zeros((3, 4, 3), np.float32)], 1)
    np.testing.assert_allclose(AnySizeModel(model)(longer), actions, rtol=0, atol=1e-6)


@pytest.mark.parametrize("algorithm", [PPO, SAC], ids=lambda cls: cls.__name__)
def test_attention_weights(algorithm):
    options = {"pooling": {"name": "ada", "num_heads": 2}}
    model = make(algorithm, TOKENS, spaces.Box(-1, 1, (2,)), **options)
    observation = batch(TOKENS)
    observation["padding"][:, 0] = 0
    observation["features"][:, 0] = 0.5
    weights = AnySizeModel(model).attention_weights(observation)
    assert weights.shape == (3, 2, NUM_TOKENS)
    np.testing.assert_allclose(weights.sum(-1), 1, atol=1e-5)
    padded = np.broadcast_to(observation["padding"][:, None] == 1, weights.shape)
    assert (weights[padded] == 0).all()
    # SB3 preprocesses the tokens of the network alike.
    extractor = next(m for m in model.policy.modules() if isinstance(m, SetExtractor))
    tensors = {key: torch.from_numpy(part).float() for key, part in observation.items()}
    np.testing.assert_allclose(extractor.weights(tensors).detach(), weights, atol=1e-6)
    alone = {key: part[1] for key, part in observation.items()}
    np.testing.assert_allclose(
        AnySizeModel(model).attention_weights(alone), weights[1], atol=1e-6
    )
    without = make(algorithm, TOKENS, spaces.Box(-1, 1, (2,)), pooling="max")
    assert AnySizeModel(without).attention_weights(observation) is None


def test_masks_hold_in_predictions():
    model = make(MaskablePPO, MASKED, spaces.Discrete(5))
    observation = batch(MASKED, 32)
    for deterministic in (False, True):
        actions, _ = AnySizeModel(model).predict(
            observation, deterministic=deterministic
        )
        assert np.take_along_axis(observation["action_mask"], actions[:, None], 1).all()
    # Without a set network behind them, masks of the observation are no features.
    other = {**observation, "action_mask": 1 - observation["action_mask"]}
    assert extract(model, other).equal(extract(model, observation))


@pytest.mark.parametrize("source", ["observation", "infos"])
@pytest.mark.parametrize(
    ("action_space", "mask"),
    [
        (spaces.Discrete(3), [1, 0, 1]),
        (spaces.MultiDiscrete([2, 1]), [1, 0, 1]),
        (spaces.MultiDiscrete([2, 1]), ([1, 0], [1])),
        (spaces.Discrete(3), [True, False, True]),
    ],
)
def test_masks_of_environments(source, action_space, mask):
    env = SampledEnv(spaces.Box(-1, 1, (2,)), action_space)
    observation = {"observed": 0, **({"action_mask": mask} if "ob" in source else {})}
    env.reset = lambda **_: (observation, {"action_mask": mask})
    wrapped = ActionMaskWrapper(env)
    wrapped.reset()
    np.testing.assert_array_equal(wrapped.action_masks(), [True, False, True])
    # An agent that may do nothing does not act; a model must choose something.
    observation["action_mask"] = np.zeros(3)
    wrapped.reset()
    assert wrapped.action_masks().all()


@pytest.mark.slow
def test_shuffle_leaves_the_return_unchanged():
    env = gymnasium.make("marl_pool.envs:marl_pool/simple_centroid-v0", num_noise=2)
    extractor = {"features_extractor_class": SetExtractor}
    model = PPO("MultiInputPolicy", env, policy_kwargs=extractor, device="cpu")
    model.policy.double()
    measured = marl_pool.evaluate(
        AnySizeModel(model),
        env={"name": "simple_centroid", "num_noise": 2},
        suite={
            "perturbations": [
                {"name": name, "severities": [1.0]} for name in ("shuffle", "inject")
            ]
        },
        episodes=8,
        threads=1,
    )
    rows = {row.label: row for row in measured.results if row.policy == "trained"}
    assert rows["shuffle"].mean == rows["clean"].mean
    assert rows["inject"].mean != rows["clean"].mean


def test_options_of_the_network_are_named():
    with pytest.raises(InputError, match="Did you mean 'presence'") as error:
        SetExtractor(TOKENS, presense=0)
    assert "**" not in str(error.value)
    assert "observation_space" not in str(error.value)


def test_weights_of_other_sizes_follow_a_change_of_dtype():
    model = make(PPO, spaces.Box(-1, 1, (5, 2)), spaces.Discrete(3), dim=8)
    frozen = next(model.policy.parameters()).requires_grad_(False)
    any_size, observation = AnySizeModel(model), np.ones((9, 2), np.float32)
    any_size(observation)
    model.policy.double()
    resized = any_size._policy(observation)
    pairs = zip(resized.parameters(), model.policy.parameters(), strict=True)
    assert all(parameter is original for parameter, original in pairs)
    assert {tensor.dtype for tensor in resized.buffers()} <= {torch.float64}
    assert not frozen.requires_grad
    assert any_size(observation).shape == ()


@pytest.mark.parametrize("name", ["image", "image and number"])
def test_channels_may_be_last_as_for_the_model_itself(name):
    space, options = SPACES[name]
    model = make(PPO, space, spaces.Discrete(3), dim=8, **options)
    space.seed(0)
    observation = sample(space)
    expected = model.predict(observation, deterministic=True)[0]
    np.testing.assert_array_equal(AnySizeModel(model)(observation), expected)


def test_another_policy_of_the_model_has_its_own_weights():
    space = spaces.Box(-1, 1, (5, 2))
    models = [make(PPO, space, spaces.Discrete(3), dim=8) for _ in range(2)]
    any_size, longer = AnySizeModel(models[0]), np.ones((9, 2), np.float32)
    resized = any_size._policy(longer)
    models[0].policy = models[1].policy
    assert any_size._policy(longer) is not resized
    assert next(any_size._policy(longer).parameters()) is next(
        models[1].policy.parameters()
    )


def test_named_sets_keep_their_features():
    space = spaces.Dict(
        cars=spaces.Box(-1, 1, (4, 3)), people=spaces.Box(-1, 1, (2, 5))
    )
    model = AnySizeModel(make(PPO, space, spaces.Discrete(3)))
    cars = np.zeros((9, 3), np.float32)
    model({"cars": cars, "people": np.zeros((1, 5), np.float32)})
    with pytest.raises(InputError, match=r"with at least one token, got \(1, 4\)"):
        model({"cars": cars, "people": np.zeros((1, 4), np.float32)})


SLICES = {"slices": {"goal": [0, 2], "cars": {"start": 2, "count": 2, "features": 2}}}


@pytest.mark.parametrize(
    ("space", "options", "changes", "message"),
    [
        (
            spaces.Dict(cars=spaces.Box(-1, 1, (4, 5)), goal=spaces.Box(-1, 1, (2,))),
            {},
            {"goal": (3,)},
            r"part 'goal': expected the shape \(2,\) of the model's space, since it is",
        ),
        (spaces.Box(-1, 1, (6,)), SLICES, {"": (8,)}, r"the shape \(6,\) of the model"),
        (
            spaces.Dict(cars=spaces.Box(-1, 1, (4, 5)), mask=spaces.MultiBinary(4)),
            {"presence_keys": {"cars": "mask"}},
            {"cars": (7, 5)},
            r"presence_keys: expected mask of shape \(7,\).* got \(4,\)",
        ),
    ],
)
def test_only_sets_change_their_size(space, options, changes, message):
    model = AnySizeModel(make(PPO, space, spaces.Discrete(3), **options))
    parts = space if isinstance(space, spaces.Dict) else {"": space}
    observation = {
        key: np.ones(changes.get(key, part.shape), np.float32)
        for key, part in parts.items()
    }
    with pytest.raises(InputError, match=message) as caught:
        model(observation.get("", observation))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("space", "num_actions", "message"),
    [
        (
            spaces.Box(-1, 1, (6, 2)),
            3,
            r"model's observation space, Box\(.*5, 2.*; got the shape \(6, 2\)",
        ),
        (
            spaces.Dict(a=spaces.Box(-1, 1, (5, 2))),
            3,
            "model's observation space, Box.*got no such array",
        ),
        (
            spaces.Box(-1, 1, (5, 2)),
            4,
            r"expected a model with the action space Discrete\(4\).*got Discrete\(3\)",
        ),
    ],
)
def test_a_model_of_another_space_is_not_evaluated(space, num_actions, message):
    env = SampledEnv(space, spaces.Discrete(num_actions))
    model = make(PPO, spaces.Box(-1, 1, (5, 2)), spaces.Discrete(3), dim=8)
    with pytest.raises(InputError, match=message) as caught:
        marl_pool.evaluate(model, lambda: env, suite={"perturbations": []}, episodes=2)
    assert "\n" not in str(caught.value)


def test_models_without_a_set_extractor():
    model = PPO("MlpPolicy", SampledEnv(spaces.Box(-1, 1, (2,)), spaces.Discrete(2)))
    for other in (model, 3):
        with pytest.raises(InputError, match="expected a model of SB3 with a SetExt"):
            AnySizeModel(other)
    for policy in (model.policy, 3):
        with pytest.raises(InputError, match="policy: expected one of SB3 with a Set"):
            resize_policy(policy, spaces.Box(-1, 1, (2,)))


def test_heads_of_one_number_of_tokens():
    model = make(PPO, TOKENS, spaces.Discrete(3), pooling="flatten")
    longer = token_space(9)
    with pytest.raises(InputError, match="expected the number of tokens in the model"):
        resize_policy(model.policy, longer)


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        ([], "the entry 'features'"),
        ([(6, 4), 6], "the entry 'padding'"),
        ([4, 6, 6], r"expected \(6, 4\) with any number of tokens"),
        ([(6, 3), 6, 6], r"expected \(N, 4\) with at least .* got \(6, 3\)"),
        ([(0, 4), 0, 0], r"at least one token, got \(0, 4\)"),
    ],
)
def test_wrong_observations(shapes, message):
    model = AnySizeModel(make(PPO, TOKENS, spaces.Discrete(3)))
    names = ("features", "types", "padding")
    arrays = zip(names, map(np.zeros, shapes), strict=False)
    with pytest.raises(InputError, match=message):
        model(dict(arrays) or np.zeros((6, 4)))


NAN = np.full((4, 3), np.nan)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"action_mask": np.ones((2, 5))}, r"action_mask: expected \(3,\).*\(2, 5\)"),
        ({"action_mask": np.ones((3, 3))}, r"one batch, .*\(3,\) of action_mask, .2,"),
        ({"action_mask": np.ones(3)}, r"batches \(\) of action_mask, \(2,\) of cars"),
        ({"cars": np.stack((NAN, 0 * NAN))}, "expected finite numbers, got NaN"),
        ({"cars": [[1, 2], [3]]}, r"an array of \(4, 3\), got list \[\[1, 2"),
        ({"cars": {"near": 1, "far": 2}}, r"an array of .*got a Dict of near, far"),
    ],
)
@pytest.mark.parametrize("algorithm", [MaskablePPO, PPO])
def test_entries_and_masks_that_do_not_fit(algorithm, changes, message):
    space = spaces.Dict(
        cars=spaces.Box(-1, 1, (4, 3)), action_mask=spaces.MultiBinary(3)
    )
    model = AnySizeModel(make(algorithm, space, spaces.Discrete(3), dim=8))
    observation = {"cars": np.zeros((2, 4, 3)), "action_mask": np.ones((2, 3))}
    assert model(observation).shape == (2,)
    with pytest.raises(InputError, match=message) as caught:
        model({**observation, **changes})
    assert "\n" not in str(caught.value)


def test_masks_that_the_space_lacks_are_held_to_the_actions():
    space = spaces.Box(-1, 1, (4, 3))
    model = AnySizeModel(
        make(MaskablePPO, spaces.Dict(cars=space), spaces.Discrete(3), dim=8)
    )
    observation = {"cars": np.zeros((2, 4, 3))}
    with pytest.raises(InputError, match=r"of shape \(2, 3\), got \(2, 5\)"):
        model({**observation, "action_mask": np.ones((2, 5))})
    with pytest.raises(InputError, match=r"0 and 1 of .*got ndarray array\(\[\[0.5"):
        model({**observation, "action_mask": np.full((2, 3), 0.5)})
    model = AnySizeModel(make(PPO, space, spaces.Discrete(3), dim=8))
    with pytest.raises(InputError, match=r"an array of \(4, 3\), got a Dict of cars"):
        model(observation)


@pytest.mark.parametrize(
    ("action_space", "mask", "message"),
    [
        (spaces.Box(-1, 1, (2,)), None, "action space: expected choices"),
        (spaces.Discrete(3), None, "action_mask: expected an entry of the observation"),
        (spaces.Discrete(3), [1, 0], "action_mask: expected 3 numbers 0 and 1"),
        (spaces.Discrete(2), [1, 0.5], "action_mask: expected 2 numbers 0 and 1"),
    ],
)
def test_wrong_masks(action_space, mask, message):
    env = SampledEnv(spaces.Box(-1, 1, (2,)), action_space)
    env.reset = lambda **_: (np.zeros(2), {} if mask is None else {"action_mask": mask})
    with pytest.raises(InputError, match=message):
        ActionMaskWrapper(env).reset()
