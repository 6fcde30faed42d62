"""AttentionNeuron and recurrent policies, from one step to training sequences."""

from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from hypothesis import given
from hypothesis import strategies as st
from ray.rllib.core.columns import Columns
from torch import Tensor, nn

from helpers.farm import FoxAndHens
from helpers.paths import GOLDEN_FILES
from marl_pool.policies import make_policy
from marl_pool.policies.token_policy import TokenPolicy
from marl_pool.pooling import make_pooling
from marl_pool.pooling.attention_neuron import AttentionNeuronPooling, sinusoids
from marl_pool.rollout import Rollout
from marl_pool.training.ppo.batch import (
    STATE,
    episode_rows,
    num_steps,
    prepare_rows,
    to_sequences,
)
from marl_pool.training.ppo.module import TokenRLModule
from marl_pool.training.ppo.trajectories import estimate_advantages, to_episodes
from marl_pool.training.settings import PPOSettings

B, T, N, D, A = 3, 5, 4, 2, 2
PUBLISHED = GOLDEN_FILES / "attention_neuron" / "golden_cartpole.npz"


def make(**options: Any) -> AttentionNeuronPooling:
    torch.manual_seed(0)
    head = make_pooling(
        "attention_neuron", dim=D, **{"action_dim": A, "num_codes": 3, **options}
    ).double()
    assert isinstance(head, AttentionNeuronPooling)
    return head


def inputs(seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Sample vectors, padding and actions of T steps."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(B, T, N, D, generator=generator, dtype=torch.float64)
    padding = torch.rand(B, T, N, generator=generator) < 0.3
    x = x.masked_fill(padding[..., None], 0)
    actions = torch.randn(B, T, A, generator=generator, dtype=torch.float64)
    return x, padding, actions


def test_the_table_of_sinusoids_is_the_published_one() -> None:
    # angle = row / 10000^(2 (column // 2) / width), sine first.
    table = sinusoids(3, 4)
    expected = [
        [0, 1, 0, 1],
        [np.sin(1), np.cos(1), np.sin(0.01), np.cos(0.01)],
        [np.sin(2), np.cos(2), np.sin(0.02), np.cos(0.02)],
    ]
    torch.testing.assert_close(table, torch.tensor(expected, dtype=torch.float32))


def test_one_code_by_hand() -> None:
    head = make(memory="none", key_units=0, message_dim=1, position_dim=1, num_codes=2)
    with torch.no_grad():
        head.key.weight.copy_(torch.tensor([[1.0, -1.0, 0.5, 0.0]]))
        head.key.bias.fill_(0.1)
        head.query.weight.fill_(2.0)
        head.query.bias.fill_(0.3)
    x, _, actions = inputs()
    codes, _ = head.unroll(x, None, actions, ())
    token, action = x[1, 2], actions[1, 2]
    keys = token[:, 0] - token[:, 1] + 0.5 * action[0] + 0.1
    for row in range(2):
        query = 2 * float(sinusoids(2, 1)[row, 0]) + 0.3
        expected = (torch.tanh(query * keys) @ token).tanh()
        torch.testing.assert_close(codes[1, 2, D * row : D * row + D], expected)


@pytest.mark.parametrize(
    ("observed_key", "action_key", "code_key"),
    [("obs", "f64_action", "f64_latent"), ("obs7", "n7_action", "n7_latent")],
    ids=["five channels", "two of noise besides"],
)
def test_the_codes_are_the_published_layers(
    observed_key: str, action_key: str, code_key: str
) -> None:
    """With the published weights of CartPole, over 20 steps."""
    golden = {key: torch.from_numpy(array) for key, array in np.load(PUBLISHED).items()}
    head = AttentionNeuronPooling(1, scale=False, bias=False, action_dim=1).double()
    assert head.cell is not None
    weights = [*head.cell.parameters(), head.query.weight, head.key.weight]
    sizes = [weight.numel() for weight in weights]
    with torch.no_grad():
        for weight, part in zip(
            weights, golden["params"].split([*sizes, 17]), strict=False
        ):
            weight.copy_(part.view_as(weight))
    x = golden[observed_key][None, ..., None]
    before = torch.nn.functional.pad(
        golden[action_key].double()[None, :-1], (0, 0, 1, 0)
    )
    output, _ = head.unroll(x, None, before, head.initial_memory(1, x.shape[2]))
    atol = 1e-12 if golden[code_key].dtype == torch.float64 else 1e-4
    torch.testing.assert_close(output[0], golden[code_key].double(), rtol=0, atol=atol)


def test_the_memory_is_torchs_lstm() -> None:
    head = make(squash=False)
    assert isinstance(head.cell, nn.LSTMCell)
    x, _, actions = inputs()
    oracle = nn.LSTM(D + A, head.cell.hidden_size, batch_first=True).double()
    oracle.load_state_dict({f"{k}_l0": v for k, v in head.cell.state_dict().items()})
    memory = head.initial_memory(B, N)
    _, (hidden, cell) = head.unroll(x, None, actions, memory)
    for token in range(N):
        fed = torch.cat([x[:, :, token], actions], dim=-1)
        _, (expected, expected_cell) = oracle(fed)
        torch.testing.assert_close(hidden[:, token], expected[0])
        torch.testing.assert_close(cell[:, token], expected_cell[0])


@pytest.mark.parametrize(
    "options",
    [{}, {"activation": "softmax"}, {"memory": "none"}],
    ids=["lstm", "softmax", "none"],
)
@given(seed=st.integers(0, 99), cut=st.integers(1, T - 1))
def test_memory_carries_over_a_cut(options: Any, seed: int, cut: int) -> None:
    head, (x, padding, actions) = make(**options), inputs(seed)
    start = head.initial_memory(B, N)
    whole, end = head.unroll(x, padding, actions, start)
    first, memory = head.unroll(x[:, :cut], padding[:, :cut], actions[:, :cut], start)
    second, second_end = head.unroll(
        x[:, cut:], padding[:, cut:], actions[:, cut:], memory
    )
    torch.testing.assert_close(torch.cat([first, second], 1), whole)
    torch.testing.assert_close(second_end, end)


def test_a_dropped_sensor_keeps_its_memory() -> None:
    head, (x, _, actions) = make(), inputs()
    start = head.initial_memory(B, N)
    _, memory = head.unroll(x[:, :2], None, actions[:, :2], start)
    dropped = torch.zeros(B, T - 2, N, dtype=torch.bool)
    dropped[:, :, 1] = True
    _, (hidden, cell) = head.unroll(x[:, 2:], dropped, actions[:, 2:], memory)
    torch.testing.assert_close(hidden[:, 1], memory[0][:, 1])
    torch.testing.assert_close(cell[:, 1], memory[1][:, 1])
    assert not torch.isclose(hidden[:, 0], memory[0][:, 0]).any()


@given(order=st.permutations(range(N)), seed=st.integers(0, 99))
def test_a_shuffle_of_a_whole_episode_changes_nothing(
    order: list[int], seed: int
) -> None:
    head, (x, padding, actions) = make(), inputs(seed)
    start = head.initial_memory(B, N)
    codes, memory = head.unroll(x, padding, actions, start)
    shuffled, shuffled_memory = head.unroll(
        x[:, :, order], padding[:, :, order], actions, start
    )
    torch.testing.assert_close(shuffled, codes)
    torch.testing.assert_close(shuffled_memory[0], memory[0][:, order])


def test_a_shuffle_in_mid_episode_leaves_memories_where_they_are() -> None:
    head, (x, _, actions) = make(), inputs()
    start = head.initial_memory(B, N)
    turned = x.clone()
    turned[:, 3:] = x[:, 3:].roll(1, dims=2)
    codes, _ = head.unroll(x, None, actions, start)
    turned_codes, _ = head.unroll(turned, None, actions, start)
    torch.testing.assert_close(turned_codes[:, :3], codes[:, :3])
    assert not torch.isclose(turned_codes[:, 3:], codes[:, 3:]).all()


@pytest.mark.parametrize("options", [{}, {"memory": "none"}])
def test_the_previous_action_matters(options: Any) -> None:
    head, (x, padding, actions) = make(**options), inputs()
    start = head.initial_memory(B, N)
    codes, _ = head.unroll(x, padding, actions, start)
    negated, _ = head.unroll(x, padding, -actions, start)
    assert not torch.isclose(codes, negated).all(-1).any()


def test_keys_depend_on_differences_of_frames_only() -> None:
    torch.manual_seed(0)
    head = AttentionNeuronPooling(6, frames=3, memory="none").double()
    x = torch.randn(B, 1, N, 6, dtype=torch.float64)
    keys, _ = head._keys(
        head.fold(), x, None, torch.zeros(B, 1, 0, dtype=torch.float64), ()
    )
    # A constant added to all frames of a token changes no difference.
    shifted_keys, _ = head._keys(
        head.fold(),
        x + torch.randn(B, 1, N, 1, dtype=torch.float64).expand_as(x),
        None,
        torch.zeros(B, 1, 0, dtype=torch.float64),
        (),
    )
    torch.testing.assert_close(keys, shifted_keys)


def test_every_parameter_gets_a_gradient_from_two_steps() -> None:
    head, (x, padding, actions) = make(), inputs()
    codes, _ = head.unroll(x, padding, actions, head.initial_memory(B, N))
    codes.square().sum().backward()
    for label, parameter in head.named_parameters():
        assert parameter.grad is not None, label
        assert parameter.grad.any(), label


def test_gradcheck_through_time() -> None:
    head, (x, padding, actions) = make(key_units=2, num_codes=2), inputs()

    def run(x: Tensor, actions: Tensor) -> Tensor:
        return head.unroll(x, padding[:1, :3], actions, head.initial_memory(1, N))[0]

    leaves = x[:1, :3].requires_grad_(), actions[:1, :3].requires_grad_()
    assert torch.autograd.gradcheck(run, leaves)


# In a policy

HEADS: list[dict[str, Any]] = [
    {"name": "attention_neuron", "num_codes": 4},
    {"name": "attention_neuron", "num_codes": 4, "memory": "none"},
]
both_trunks = pytest.mark.parametrize("trunk", ["shared", "separate"])
both_heads = pytest.mark.parametrize("head", HEADS, ids=["lstm", "none"])


def policies(head: dict[str, Any], trunk: str) -> dict[str, TokenPolicy]:
    env = FoxAndHens(1)
    return {
        name: make_policy(
            group.tokens,
            group.action_space,
            encoder={"name": "identity"},
            pooling=head,
            type_embedding=2,
            trunk=trunk,
            seed=0,
        ).eval()
        for name, group in env.groups.items()
    }


@both_heads
@both_trunks
def test_a_training_pass_reproduces_the_outputs_of_the_rollout(
    head: dict[str, Any], trunk: str
) -> None:
    """Across ends of episodes, ends of fragments, and cuts within both."""
    env = FoxAndHens(5, seed=3)
    rollout = Rollout(env, policies(head, trunk), explore=True)
    rollout.steps(7)  # the next fragment begins in mid-episode
    parts = rollout.steps(20)
    chunks = []
    for name, part in parts.items():
        advantages, targets = estimate_advantages(part, 0.9, 0.9)
        chunks += to_episodes(
            part,
            advantages,
            targets,
            group=name,
            module_id=name,
            prefix="x",
            first_steps=np.zeros(5, dtype=int),
        )
    modules = {name: module_of(policy) for name, policy in rollout.policies.items()}
    for name, steps in episode_rows(chunks).items():
        settings = PPOSettings(max_seq_len=4, normalize_value_loss=False)
        rows = prepare_rows(steps, settings)
        mask = rows[Columns.LOSS_MASK]
        longest = 4 if head.get("memory", "lstm") == "lstm" else 1
        assert mask.shape[1] == longest
        assert num_steps(rows) == parts[name].rewards.numel()
        with torch.no_grad():
            out = modules[name].forward_train(rows)
            values = modules[name].compute_values(rows, out[Columns.EMBEDDINGS])
        torch.testing.assert_close(
            out[Columns.ACTION_DIST_INPUTS][mask],
            rows[Columns.ACTION_DIST_INPUTS][mask],
        )
        torch.testing.assert_close(values[mask], rows[Columns.VF_PREDS][mask])


def module_of(policy: TokenPolicy) -> TokenRLModule:
    module = TokenRLModule(
        observation_space=policy.spec.space(),
        action_space=spaces.Discrete(3),
        model_config={"policy": policy.config},
    )
    module.policy.load_state_dict(policy.state_dict())
    return module.eval()


def test_the_state_is_reset_only_when_an_episode_starts() -> None:
    env = FoxAndHens(6, seed=1)
    rollout = Rollout(env, policies(HEADS[0], "shared"), explore=True)
    before = rollout.steps(9)["hen"]
    part = rollout.steps(9)["hen"]
    ended = before.terminated[-1] | before.truncated[-1]
    hidden = part.states["memory"][0][0]
    for t in range(9):
        for env in range(6):
            if ended[env]:
                assert not hidden[t, env].any()
                assert not part.states["action"][t, env].any()
            else:
                assert hidden[t, env].any()
        ended = part.terminated[t] | part.truncated[t]


def test_a_loaded_recurrent_state_continues_exactly() -> None:
    kinds = policies(HEADS[0], "separate")
    original = Rollout(FoxAndHens(3, seed=5), kinds, explore=True)
    original.steps(5)
    state = original.state_dict()
    expected = original.steps(9)["fox"]
    resumed = Rollout(FoxAndHens(3, seed=5), kinds, explore=True)
    resumed.load_state_dict(state)
    assert torch.equal(resumed.steps(9)["fox"].logits, expected.logits)


@both_heads
def test_the_state_holds_actions_as_vectors(head: dict[str, Any]) -> None:
    kinds = policies(head, "shared")
    env = FoxAndHens(2)
    rollout = Rollout(env, kinds, explore=True)
    parts = rollout.steps(2)
    choices = parts["hen"].states["action"][1]
    assert torch.equal(choices.argmax(-1), parts["hen"].actions[0])
    assert torch.equal(choices.sum(-1), torch.ones(2, 3))
    pushes = parts["fox"].states["action"][1]
    torch.testing.assert_close(pushes, parts["fox"].actions[0].clamp(-1, 1))


@given(
    lengths=st.lists(st.integers(1, 9), min_size=1, max_size=6),
    limit=st.integers(1, 10),
)
def test_sequences_hold_every_step_once(lengths: list[int], limit: int) -> None:
    count = sum(lengths)
    steps = torch.arange(count)
    rows = {
        Columns.OBS: {"features": steps[:, None].float()},
        Columns.ACTIONS: steps,
        f"{STATE}/0": 10 * steps,
    }
    begins = torch.zeros(count, dtype=torch.bool)
    begins[torch.tensor([0, *lengths[:-1]]).cumsum(0)] = True
    cut = to_sequences(rows, begins, limit)
    mask = cut[Columns.LOSS_MASK]
    assert torch.equal(cut[Columns.ACTIONS][mask], steps)
    assert torch.equal(cut[Columns.OBS]["features"][mask][:, 0], steps.float())
    assert torch.equal(cut[f"{STATE}/0"], 10 * cut[Columns.ACTIONS][:, 0])
    assert mask.shape[1] <= limit
    chunk = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    for row, present in zip(cut[Columns.ACTIONS], mask, strict=True):
        inside = row[present]
        assert torch.equal(inside, torch.arange(len(inside)) + inside[0])
        assert len(chunk[inside].unique()) == 1
