"""Published weights: actions, scores, and files that are refused."""

import hashlib
import importlib.util
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from helpers import published_forward
from helpers.paths import GOLDEN_FILES
from helpers.tables import yaml_cases
from marl_pool import InputError
from marl_pool.cli import main as cli
from marl_pool.envs import make_batched_env
from marl_pool.envs.base import BatchedEnv
from marl_pool.envs.cartpole.env import CartPole
from marl_pool.evaluation.cases import play
from marl_pool.evaluation.standalone import find_standalone, results_folder
from marl_pool.perturbations.base import Perturbation
from marl_pool.perturbations.order import Shuffle
from marl_pool.policies.base import SpecifiedPolicy
from marl_pool.policies.sensory import Sensory
from marl_pool.policies.storage import load_policies, load_policy
from marl_pool.tokens import Tokens
from marl_pool_studies import plugin
from marl_pool_studies.attention_neuron.weights import (
    PUBLISHED,
    import_weights,
    load_published,
)

FILES = GOLDEN_FILES / "attention_neuron"
WEIGHTS, GOLDEN = FILES / "cartpole_pi.npz", FILES / "golden_cartpole.npz"
SIZES = {
    "cartpole_pi": 913,
    "ant_pi": 2504,
    "ant_mlp": 2248,
    "carracing": 3667,
    "carracing_pi": 7212,
}
needs_box2d = pytest.mark.skipif(
    not all(importlib.util.find_spec(name) for name in ("Box2D", "pygame")),
    reason="no Box2D here",
)


def synthetic(agent: str, scale: float = 0.5) -> np.ndarray:
    """Meaningless weights of the right number."""
    rng = np.random.default_rng(SIZES[agent])
    return (scale * rng.standard_normal(SIZES[agent])).astype(np.float32)


@pytest.fixture
def write(tmp_path: Path) -> Any:
    """Write an ``.npz``; return its path."""

    def write(**arrays: Any) -> Path:
        file = tmp_path / "model.npz"
        np.savez(file, **arrays)
        return file

    return write


def refusal_of(file: Path, agent: str = "cartpole_pi") -> str:
    with pytest.raises(InputError) as caught:
        load_published(file, agent)
    message = str(caught.value)
    assert "\n" not in message
    return message


def act(
    policy: SpecifiedPolicy, sets: Tensor, orders: list[list[int]] | None = None
) -> np.ndarray:
    """The actions of one env that shows ``(T, N, F)``, each perhaps in an order."""
    state = policy.initial_state(1, 1, sets.shape[1])
    actions = []
    for step, features in enumerate(sets):
        observation = features if orders is None else features[orders[step]]
        types = torch.zeros(1, 1, len(observation), dtype=torch.int64)
        tokens = Tokens(observation[None, None], types, types.bool())
        with torch.no_grad():
            decision = policy.act(tokens, state)
        state = decision.state
        actions.append(decision.action[0, 0].numpy())
    return np.stack(actions)


# Policies written to folders


@pytest.mark.parametrize("agent", SIZES)
def test_a_folder_is_written_that_acts_like_the_file(agent, write, tmp_path) -> None:
    file = write(params=synthetic(agent))
    folder = import_weights(file, agent, tmp_path / "deep" / "policy")
    reread, loaded = load_policy(folder), load_published(file, agent)
    assert set(load_policies(folder)) == {"agent"}
    assert sum(part.numel() for part in reread.parameters()) == SIZES[agent]
    assert PUBLISHED[agent].size == SIZES[agent]
    sets = random_sets(loaded, 2)
    np.testing.assert_array_equal(act(reread, sets), act(loaded, sets))
    config = json.loads((folder / "config.json").read_text())
    assert config["env"] == PUBLISHED[agent].env


def random_sets(policy: SpecifiedPolicy, steps: int) -> Tensor:
    """Random observations ``(T, N, F)``."""
    generator = torch.Generator().manual_seed(0)
    shape = (steps, policy.spec.num_tokens, policy.spec.num_features)
    if policy.spec.dtype == "uint8":
        return torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8)
    return torch.randn(shape, generator=generator)


@pytest.mark.parametrize("agent", SIZES)
def test_every_number_of_the_file_is_used_once(agent: str, write: Any) -> None:
    numbers = np.arange(SIZES[agent], dtype=np.float32)
    policy = load_published(write(params=numbers), agent)
    parameters = torch.cat([part.flatten() for part in policy.parameters()])
    np.testing.assert_array_equal(parameters.detach().sort().values, numbers)


@pytest.mark.parametrize("agent", SIZES)
def test_each_published_policy_fits_its_env(agent: str) -> None:
    env = dict(PUBLISHED[agent].env)
    if env["name"] != "cartpole":
        pytest.importorskip("Box2D" if env["name"] == "car_racing" else "pybullet")
    group = make_batched_env(num_envs=1, **env).groups["agent"]
    policy = PUBLISHED[agent].build()
    assert not policy.mismatch(group.tokens, group.action_space)
    assert group.tokens.num_tokens == policy.spec.num_tokens
    low, high = policy.actions.low, policy.actions.high
    np.testing.assert_array_equal(group.action_space.low, low)
    np.testing.assert_array_equal(group.action_space.high, high)


# The same actions


@pytest.mark.parametrize(
    ("agent", "dtype", "atol"),
    [
        ("ant_mlp", torch.float32, 1e-5),
        ("ant_mlp", torch.float64, 1e-12),
        ("ant_pi", torch.float32, 1e-5),
        # What it remembers of its action is rounded to float32.
        ("ant_pi", torch.float64, 2e-6),
    ],
)
def test_ants_act_like_the_published_code(agent, dtype, atol, write) -> None:
    weights = synthetic(agent)
    policy = load_published(write(params=weights), agent).to(dtype)
    sets = random_sets(policy, 6).to(dtype)
    forward = getattr(published_forward, agent)
    expected = list(forward(weights, sets[..., 0].double().numpy()))
    np.testing.assert_allclose(act(policy, sets), expected, atol=atol, rtol=0)


def stacks(steps: int, frames: int, colors: int) -> np.ndarray:
    """Pictures ``(T, frames, 96, 96, colors)`` that shift and flicker."""
    rng = np.random.default_rng(1)
    ground = rng.integers(0, 200, (96, 96, colors))
    pictures = [
        np.roll(ground, 3 * t, axis=0) + rng.integers(0, 56, ground.shape)
        for t in range(steps + frames - 1)
    ]
    return np.stack([pictures[t : t + frames] for t in range(steps)]).astype(np.uint8)


def patch_tokens(stacks: np.ndarray, patch: int, stride: int) -> Tensor:
    """The tokens of stacks of pictures, ``(T, N, F)``: as the env CarRacing says."""
    places = range(0, 96 - patch + 1, stride)
    rows = [
        stacks[:, :, y : y + patch, x : x + patch].reshape(len(stacks), -1)
        for y in places
        for x in places
    ]
    return torch.from_numpy(np.stack(rows, 1))


def test_attention_agent_acts_like_the_published_code(write: Any) -> None:
    weights, pictures = synthetic("carracing"), stacks(4, 1, 3)
    policy = load_published(write(params=weights), "carracing").double()
    actions = act(policy, patch_tokens(pictures, 7, 4))
    expected = np.stack(list(published_forward.carracing(weights, pictures[:, 0])))
    np.testing.assert_allclose(actions, expected, atol=1e-6, rtol=0)
    assert np.ptp(expected, axis=0).min() > 1e-2


@pytest.mark.parametrize("shuffled", [False, True])
def test_sensory_attention_agent_acts_like_the_published_code(shuffled, write) -> None:
    weights, pictures = synthetic("carracing_pi"), stacks(5, 4, 1)
    policy = load_published(write(params=weights), "carracing_pi").double()
    rng = np.random.default_rng(2)
    orders = [rng.permutation(256).tolist() for _ in pictures] if shuffled else None
    actions = act(policy, patch_tokens(pictures, 6, 6), orders)
    expected = list(published_forward.carracing_pi(weights, pictures[..., 0]))
    np.testing.assert_allclose(actions, np.stack(expected), atol=1e-6, rtol=0)
    assert np.ptp(expected, axis=0).min() > 1e-2


@needs_box2d
@pytest.mark.parametrize("agent", ["carracing", "carracing_pi"])
def test_the_envs_tokens_are_those_of_these_tests(agent: str) -> None:
    env: Any = make_batched_env(num_envs=3, **PUBLISHED[agent].env)
    pictures = stacks(3, env.num_frames, env.screens.shape[-1])
    env.screens = torch.from_numpy(pictures)
    features, grid = env.observe()["agent"].features[:, 0], env.patch_grid
    assert torch.equal(features, patch_tokens(pictures, grid.patch, grid.stride))


# CartPole: golden vectors


@pytest.fixture(scope="module")
def golden() -> dict[str, np.ndarray]:
    return dict(np.load(GOLDEN))


def replay(
    policy: SpecifiedPolicy, observations: np.ndarray, actions: np.ndarray
) -> dict[str, np.ndarray]:
    """Codes, pre-actions and LSTM states while the golden actions are taken."""
    assert isinstance(policy, Sensory)
    dtype = policy.low.dtype
    x = torch.from_numpy(observations)[None, ..., None].to(dtype)
    prev_action = torch.from_numpy(actions)[None, :-1].to(dtype)
    prev_action = torch.nn.functional.pad(prev_action, (0, 0, 1, 0))
    memory = policy.initial_memory(1, x.shape[2])
    parts: dict[str, list[Tensor]] = {k: [] for k in ("latent", "pre_action", "h", "c")}
    with torch.no_grad():
        for t in range(len(observations)):
            step = slice(t, t + 1)
            codes, _ = policy.codes(x[:, step], None, prev_action[:, step], memory)
            _, memory = policy.unroll(x[:, step], None, prev_action[:, step], memory)
            values = (codes[0, 0], policy.body(codes)[0, 0], *(m[0] for m in memory))
            for part, value in zip(parts.values(), values, strict=True):
                part.append(value)
    return {key: torch.stack(part).numpy() for key, part in parts.items()}


@pytest.mark.parametrize(
    ("run", "inputs", "dtype", "atol"),
    [
        ("f32", "obs", torch.float32, 1e-4),
        ("f64", "obs", torch.float64, 1e-9),
        ("cl", "cl_obs", torch.float32, 1e-4),
    ],
)
def test_inner_values_of_cartpole_as_published(run, inputs, dtype, atol, golden):
    policy = load_published(WEIGHTS, "cartpole_pi").to(dtype)
    replayed = replay(policy, golden[inputs], golden[f"{run}_action"])
    for key, values in replayed.items():
        expected = golden[f"{run}_{key}"]
        np.testing.assert_allclose(values, expected, atol=atol, rtol=0, err_msg=key)


@pytest.mark.parametrize("case", ["f32", "n7", "perm", "dup10", "resh"])
def test_cartpole_acts_as_published(case: str, golden: Any) -> None:
    """Try it with noise, permuted, doubled, and reshuffled in mid-episode.

    Doubled channels are not scaled in the golden run.
    """
    policy = load_published(WEIGHTS, "cartpole_pi")
    observations = {
        "f32": golden["obs"],
        "n7": golden["obs7"],
        "perm": golden["obs"][:, golden["perm"]],
        "dup10": np.concatenate([golden["obs"], golden["obs"]], 1),
        "resh": golden["resh_obs"],
    }[case]
    actions = act(policy, torch.from_numpy(observations).float()[..., None])
    np.testing.assert_allclose(actions, golden[f"{case}_action"], atol=1e-4, rtol=0)


def test_doubled_channels_at_half_the_size_change_nothing(golden: Any) -> None:
    policy = load_published(WEIGHTS, "cartpole_pi").double()
    observations = torch.from_numpy(golden["obs"])[..., None]
    plain = act(policy, observations)
    # Halve the sum inside the tanh where each channel is there twice.
    policy.sensor.expected_tokens = 5
    doubled = torch.cat([observations, observations], 1)
    np.testing.assert_allclose(act(policy, doubled), plain)


# CartPole: scores

EPISODES = 1000
SD = {25: 149, 100: 254, 500: 376}


def score(
    policy: SpecifiedPolicy, env: BatchedEnv, perturbation: Perturbation | None = None
) -> float:
    return float(play({"agent": policy}, env, perturbation).returns["agent"].mean())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "shuffle", "expected", "within"),
    [
        ({}, None, 498, 45),
        ({"noise_channels": 5}, None, 484, 45),
        *(
            ({}, {"every": every}, mean, 3.4 * SD[every] / EPISODES**0.5)
            for every, mean in ((25, 114), (100, 253), (500, 432))
        ),
    ],
    ids=str,
)
def test_cartpole_scores_as_published(options, shuffle, expected, within) -> None:
    policy = load_published(WEIGHTS, "cartpole_pi")
    env = CartPole(EPISODES, seed=0, **options)
    perturbation = None if shuffle is None else Shuffle(**shuffle)
    assert score(policy, env, perturbation) == pytest.approx(expected, abs=within)


class PublishedStarts(CartPole):
    """The starts of seed 1 in the published environment."""

    def __init__(self, num_envs: int) -> None:
        super().__init__(num_envs)
        # The seed that old gym makes of 1.
        words = np.frombuffer(hashlib.sha512(b"1").digest()[:8], "<u4")
        uniforms = np.random.RandomState(words).rand(num_envs, 4)
        starts = (2 * uniforms - 1) * (2.4, 10, np.pi / 2, 10) + (0, 0, np.pi, 0)
        self.starts = torch.from_numpy(starts)

    def place(self, rows: Tensor, keys: Tensor) -> None:
        self.put(rows, self.starts[rows])


@pytest.mark.slow
def test_cartpole_scores_as_published_from_the_published_starts(golden: Any) -> None:
    env = PublishedStarts(EPISODES)
    np.testing.assert_allclose(env.starts[:20], golden["env_resets_seed1"])
    policy = load_published(WEIGHTS, "cartpole_pi")
    assert score(policy, env) == pytest.approx(479, abs=10)


# Refusals


def test_another_agents_file_is_refused_and_named(write: Any) -> None:
    message = refusal_of(write(params=synthetic("ant_mlp")), "ant_pi")
    assert "expected 2504 numbers for ant_pi, got an array of shape (2248,)" in message
    assert message.endswith("ant_mlp")


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"params": np.zeros(914)}, r"shape (914,) and type float64"),
        ({"params": np.zeros((1, 913))}, r"got an array of shape (1, 913)"),
        ({"params": np.zeros(913, int)}, r"type int64"),
        ({"params": np.full(913, np.nan)}, "expected finite numbers, but 913 are not"),
        ({"params": np.full(913, 1e300)}, "but 913 are not"),
        ({"weights": np.zeros(913)}, "expected one array 'params', got 'weights'"),
        ({"params": np.zeros(913), "b": np.zeros(1)}, "got 'params', 'b'"),
        ({}, "got none"),
        ({str(i): np.zeros(1) for i in range(9)}, "got '0', '1', '2', …"),
        ({"params": np.array([None] * 913)}, "it is damaged or of another kind"),
    ],
)
def test_another_content_is_refused(arrays: Any, message: str, write: Any) -> None:
    assert message in refusal_of(write(**arrays))


def test_nothing_is_unpickled(tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self) -> Any:
            return (tmp_path / "run").touch, ()

    file = tmp_path / "model.npz"
    np.savez(file, params=np.array([Evil()] * 913, dtype=object))
    assert "of another kind" in refusal_of(file)
    assert not (tmp_path / "run").exists()


def test_other_files_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "model.npz"
    assert "cannot be read: No such file" in refusal_of(file)
    assert "cannot be read: Is a directory" in refusal_of(tmp_path)
    for text in ("no weights", ""):
        file.write_text(text)
        assert "of another kind" in refusal_of(file)
    with file.open("wb") as out:
        np.save(out, np.zeros(913))
    assert "expected an .npz file, got a single array" in refusal_of(file)


@given(damage=st.data())
def test_a_damaged_file_is_refused_or_read_completely(damage, tmp_path_factory) -> None:
    file = tmp_path_factory.getbasetemp() / "damaged.npz"
    np.savez_compressed(file, params=np.zeros(913, np.float32))
    content = bytearray(file.read_bytes())
    for _ in range(damage.draw(st.integers(1, 3))):
        place = damage.draw(st.integers(0, len(content) - 1))
        content[place] = damage.draw(st.integers(0, 255))
    file.write_bytes(content[: damage.draw(st.integers(0, len(content)))])
    message = ""
    try:
        policy = load_published(file, "cartpole_pi")
        assert all(part.isfinite().all() for part in policy.parameters())
    except InputError as error:
        message = str(error)
    assert "\n" not in message


def test_a_tilde_is_the_home_folder(write, tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    file = write(params=synthetic("ant_mlp"))
    folder = import_weights(f"~/{file.name}", "ant_mlp", "~/policy")
    assert folder == tmp_path / "policy"
    assert find_standalone("~/policy", None).folder == folder
    with pytest.raises(InputError, match=f"{folder} exists"):
        results_folder("", "~/policy")


def test_an_existing_folder_is_not_replaced(write: Any, tmp_path: Path) -> None:
    file, folder = write(params=synthetic("ant_mlp")), tmp_path / "mine"
    folder.mkdir()
    (folder / "note").write_text("mine")
    with pytest.raises(InputError, match=r"mine exists; choose another --out"):
        import_weights(file, "ant_mlp", folder)
    assert [path.name for path in folder.iterdir()] == ["note"]
    with pytest.raises(InputError, match="cannot be written: Not a directory"):
        import_weights(file, "ant_mlp", file / "below")


# The command


def test_the_command(write: Any, tmp_path: Path, capsys: Any) -> None:
    file, out = write(params=synthetic("ant_mlp")), tmp_path / "ant"
    words = ["import-weights", "attention-neuron", str(file), "--agent", "ant_mlp"]
    assert cli.main([*words, "--out", str(out)]) == 0
    assert capsys.readouterr().out.strip() == str(out)
    assert load_policy(out).spec.num_tokens == 28
    assert cli.main([*words, "--out", str(out)]) == 2
    assert "exists" in capsys.readouterr().err


@yaml_cases("words, message")
def test_the_command_refuses(words: str, message: str, refused: Any) -> None:
    assert message in refused("import-weights", *words.split(), "--out", "nowhere")


def test_the_command_knows_the_agents() -> None:
    assert sorted(PUBLISHED) == list(plugin.AGENTS)
    with pytest.raises(InputError, match="Did you mean 'ant_pi'"):
        load_published("nowhere", "ant_pie")
