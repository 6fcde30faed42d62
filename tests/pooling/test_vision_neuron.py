"""AttentionNeuron on patches: the layer, distinct patches, and the agent with a CNN."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import one_hot

from marl_pool.policies import make_agent
from marl_pool.policies.agent import to_vector
from marl_pool.policies.storage import load_policy, save_policy
from marl_pool.pooling import make_pooling, vision_neuron
from marl_pool.pooling.vision_neuron import (
    TileConv2d,
    VisionNeuronPooling,
    unique_patches,
)
from marl_pool.tokens import Tokens, TokenSpec
from marl_pool.utils.errors import InputError
from marl_pool_studies.attention_neuron.vision import Vision

B, T, N, D, A = 2, 3, 12, 6, 2
"""Sets of 12 patches with 2 frames of 3 pixels."""
SPEC = TokenSpec(N, D, ("patch",), has_self=False, dtype="uint8")
CHOICE: spaces.Space = spaces.Discrete(A)
BOX = spaces.Box(-1, 1, (A,))
SMALL: dict[str, Any] = {
    "pooling": {"name": "vision_neuron", "num_codes": 9, "value_dim": 4, "frames": 2},
    "convolutions": [(5, 2, 1)],
    "hidden": [7],
}
seeds = st.integers(0, 2**31)


def make(dim: int = D, **options: Any) -> VisionNeuronPooling:
    torch.manual_seed(0)
    sizes = {"frames": 2, "num_codes": 3, "value_dim": 4, "action_dim": A}
    head = make_pooling("vision_neuron", dim=dim, **{**sizes, **options})
    assert isinstance(head, VisionNeuronPooling)
    return head.double()


def agent(space: spaces.Space = CHOICE, **options: Any) -> Vision:
    return Vision(SPEC, space, **{**SMALL, "seed": 3, **options}).eval()


def pictures(seed: int = 0, kinds: int = 4) -> tuple[Tensor, Tensor, Tensor]:
    """Sample bytes of patches, few of them distinct, padding, and previous actions."""
    generator = torch.Generator().manual_seed(seed)
    palette = torch.randint(0, 256, (kinds, D), generator=generator, dtype=torch.uint8)
    features = palette[torch.randint(0, kinds, (B, T, N), generator=generator)]
    padding = torch.rand(B, T, N, generator=generator) < 0.3
    before = torch.randint(0, A, (B, T), generator=generator)
    return features, padding, one_hot(before, A)


def tokens_of(features: Tensor, padding: Tensor | None = None) -> Tokens:
    """Make tokens of a batch (B, T), such as B environments of T agents."""
    types = torch.zeros(features.shape[:-1], dtype=torch.int64)
    return Tokens(features, types, types.bool() if padding is None else padding)


# The layer


def shapes(module: torch.nn.Module) -> dict[str, tuple[int, ...]]:
    return {name: tuple(part.shape) for name, part in module.named_parameters()}


def test_the_published_layers_have_the_same_parameters() -> None:
    pong = VisionNeuronPooling(144, num_codes=400, action_dim=6)
    expected = {
        "query.weight": (32, 8),
        "query.bias": (32,),
        "key.weight": (32, 114),
        "key.bias": (32,),
        "value.weight": (32, 144),
        "value.bias": (32,),
        "frame_norm.weight": (36,),
        "frame_norm.bias": (36,),
        "code_norm.weight": (32,),
        "code_norm.bias": (32,),
    }
    assert shapes(pong) == expected
    assert list(shapes(pong)) == list(expected)
    cars = VisionNeuronPooling(
        144, num_codes=1024, value_dim=16, message_dim=16, affine=False, action_dim=3
    )
    assert shapes(cars) == {
        "query.weight": (16, 8),
        "query.bias": (16,),
        "key.weight": (16, 111),
        "key.bias": (16,),
        "value.weight": (16, 144),
        "value.bias": (16,),
    }
    assert cars.dim_out == 1024 * 16


def normalized(row: np.ndarray, norm: torch.nn.LayerNorm) -> np.ndarray:
    scaled = (row - row.mean()) / np.sqrt(row.var() + 1e-5)
    if norm.weight is None:
        return scaled
    return scaled * norm.weight.detach().numpy() + norm.bias.detach().numpy()


@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("scale", [True, False])
def test_codes_by_hand(affine: bool, scale: bool) -> None:
    head = make(affine=affine, scale=scale, message_dim=5)
    for parameter in head.parameters():
        torch.nn.init.normal_(parameter)
    generator = torch.Generator().manual_seed(1)
    x = torch.rand(1, 1, 3, D, generator=generator, dtype=torch.float64)
    action = torch.tensor([[[0.3, -0.8]]], dtype=torch.float64)
    output, memory = head.unroll(x, None, action, ())
    assert memory == ()
    weights = {k: v.detach().numpy() for k, v in head.named_parameters()}
    keys, values = [], []
    for patch in x[0, 0].numpy():
        older, newer = patch[:3], patch[3:]
        difference = np.concatenate([newer - older, action[0, 0].numpy()])
        keys.append(weights["key.weight"] @ difference + weights["key.bias"])
        frames = [normalized(frame, head.frame_norm) for frame in (older, newer)]
        pixels = np.concatenate(frames)
        values.append(weights["value.weight"] @ pixels + weights["value.bias"])
    expected = []
    for code in range(3):
        position = [
            np.sin(code / 10_000 ** (j / 8))
            if j % 2 == 0
            else np.cos(code / 10_000 ** ((j - 1) / 8))
            for j in range(8)
        ]
        query = weights["query.weight"] @ position + weights["query.bias"]
        scores = np.array([query @ key for key in keys]) / (5**0.5 if scale else 1)
        shares = np.exp(scores) / np.exp(scores).sum()
        mixture = sum(s * value for s, value in zip(shares, values, strict=True))
        expected.append(normalized(np.maximum(mixture, 0), head.code_norm))
        actual = head.attention_weights(x, None, action, ())[0, code].detach()
        np.testing.assert_allclose(actual, shares, atol=1e-6)
    output = output[0, 0].detach()
    # The table of sinusoids is float32.
    np.testing.assert_allclose(output, np.concatenate(expected), atol=1e-5)


def test_brightness_changes_neither_weights_nor_codes() -> None:
    head = make()
    features, _, before = pictures()
    x = features.double() / 255
    brighter = x + torch.rand(B, T, N, 1, dtype=torch.float64)
    shares = head.attention_weights(x, None, before.double(), ())
    torch.testing.assert_close(
        head.attention_weights(brighter, None, before.double(), ()), shares
    )
    # Each frame is normalized on its own.
    codes, _ = head.unroll(x, None, before.double(), ())
    same, _ = head.unroll(brighter, None, before.double(), ())
    torch.testing.assert_close(same, codes, rtol=1e-3, atol=1e-3)
    reversed_codes, _ = head.unroll(x.flip(-1), None, before.double(), ())
    assert not torch.isclose(reversed_codes, codes, atol=1e-2).all()


def test_the_previous_action_cancels() -> None:
    head = make()
    features, padding, before = pictures()
    x = (features.double() / 255).masked_fill(padding[..., None], 0)
    codes, _ = head.unroll(x, padding, before.double(), ())
    negated, _ = head.unroll(x, padding, 5 - before.double(), ())
    torch.testing.assert_close(negated, codes)


def test_gains_multiply_torchs_default_weights() -> None:
    plain = make(key_gain=1.0, query_gain=1.0)
    ours = make()
    expected = {name: part.clone() for name, part in plain.named_parameters()}
    expected["key.weight"][:, :3] *= 15
    expected["query.weight"] *= 5
    for name, part in ours.named_parameters():
        torch.testing.assert_close(part, expected[name])


@pytest.mark.parametrize("affine", [True, False])
def test_gradcheck_with_counts(affine: bool) -> None:
    head = make(affine=affine, num_codes=2)
    features, _, before = pictures()
    counts = torch.tensor([[[1, 2, 0, 5]], [[0, 0, 0, 0]]])

    def run(x: Tensor, *weights: Tensor) -> Tensor:
        names = (f"head.{name}" for name in shapes(head))
        parameters = dict(zip(names, weights, strict=True))
        arguments = (x, None, before[:, :1].double(), (), counts)
        return torch.func.functional_call(Unrolled(head), parameters, arguments)

    x = (features[:, :1, :4].double() / 255).requires_grad_()
    assert torch.autograd.gradcheck(run, (x, *head.parameters()))


class Unrolled(torch.nn.Module):
    """Calls a head's `unroll`."""

    def __init__(self, head: VisionNeuronPooling) -> None:
        super().__init__()
        self.head = head

    def forward(self, *arguments: Any) -> Tensor:
        return self.head.unroll(*arguments)[0]


# Distinct patches


def sorted_patches(patches: Tensor, counts: Tensor) -> list[list[int]]:
    """List all patches of one picture, sorted."""
    return sorted(patches.repeat_interleave(counts, dim=0).tolist())


@given(seed=seeds, kinds=st.integers(1, 9), width=st.sampled_from([1, 6, 8, 17, 144]))
def test_distinct_patches_are_those_that_unique_finds(
    seed: int, kinds: int, width: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    # Bits of low and of high bytes only, where a poor hash would see no difference.
    palette = 128 * torch.randint(0, 2, (kinds, width), generator=generator)
    features = palette[torch.randint(0, kinds, (B, N), generator=generator)].byte()
    padding = torch.rand(B, N, generator=generator) < 0.4
    for hidden in (None, padding, torch.ones_like(padding)):
        patches, counts = unique_patches(features, hidden)
        assert patches.dtype == torch.uint8
        most = 1
        for row in range(B):
            row_patches = (
                features[row] if hidden is None else features[row][~hidden[row]]
            )
            expected = row_patches.unique(dim=0, return_counts=True)
            used = counts[row] > 0
            assert used.sum() == len(expected[0])
            assert sorted_patches(patches[row], counts[row]) == sorted_patches(
                *expected
            )
            most = max(most, len(expected[0]))
        assert patches.shape == (B, most, width)


def test_distinct_keeps_batch_dimensions_and_the_original() -> None:
    features, padding, _ = pictures()
    original = features.clone()
    patches, counts = unique_patches(features, padding)
    assert patches.shape == (B, T, counts.shape[-1], D)
    assert torch.equal(counts.sum(-1), (~padding).sum(-1))
    assert torch.equal(features, original)
    alone = unique_patches(features[1, 2], padding[1, 2])
    assert sorted_patches(*alone) == sorted_patches(patches[1, 2], counts[1, 2])
    view = torch.cat([features.flatten(), features.new_zeros(5)])[5:]
    assert unique_patches(view.view(features.shape))[1].shape[:2] == (B, T)


@given(seed=seeds)
def test_collisions_change_nothing_but_the_speed(seed: int) -> None:
    features, padding, _ = pictures(seed)
    expected = unique_patches(features, padding)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(vision_neuron, "_hash", lambda words: words[..., 0] * 0)
        listed = unique_patches(features, padding)
        lowest = torch.iinfo(torch.int64).max  # as padding has
        patch.setattr(vision_neuron, "_hash", lambda words: words[..., 0] * 0 + lowest)
        mixed = unique_patches(features, padding)
    for patches, counts in (listed, mixed):
        for row in range(B):
            for step in range(T):
                assert sorted_patches(
                    patches[row, step], counts[row, step]
                ) == sorted_patches(expected[0][row, step], expected[1][row, step])


@pytest.mark.parametrize("shape", [(0, 3, 4), (2, 0, 4), (2, 3, 0)])
def test_distinct_patches_of_nothing_are_refused(shape):
    with pytest.raises(InputError, match="features: expected one patch or more"):
        unique_patches(torch.zeros(shape, dtype=torch.uint8))


@given(seed=seeds, full=st.booleans())
def test_distinct_patches_with_counts_give_what_all_give(seed: int, full: bool) -> None:
    head = make()
    features, padding, before = pictures(seed)
    padding[0, 1] = full
    x = (features.double() / 255).masked_fill(padding[..., None], 0)
    all_of_them, _ = head.unroll(x, padding, before.double(), ())
    patches, counts = unique_patches(features, padding)
    given_patches = patches.double() / 255
    from_distinct, _ = head.unroll(given_patches, None, before.double(), (), counts)
    torch.testing.assert_close(from_distinct, all_of_them, rtol=0, atol=1e-12)
    # Both say that a slot is empty, or one does.
    absent = counts == 0
    same, _ = head.unroll(given_patches, absent, before.double(), (), counts)
    assert torch.equal(same, from_distinct)
    if full:
        bias = head.code_norm.bias.expand(3, 4).flatten()
        assert torch.equal(from_distinct[0, 1], bias)


# The agent


def test_the_published_pong_player_has_as_many_parameters() -> None:
    spec = TokenSpec(196, 144, ("patch",), has_self=False, dtype="uint8")
    player = Vision(
        spec, spaces.Discrete(6), pooling={"name": "vision_neuron", "num_codes": 400}
    )
    assert to_vector(player).shape == (1_687_726,)
    assert list(shapes(player).values())[10:] == [
        (64, 32, 4, 4),
        (64,),
        (64, 64, 3, 3),
        (64,),
        (512, 3136),
        (512,),
        (6, 512),
        (6,),
    ]


def test_the_cnn_reads_the_codes_as_rows_of_a_picture() -> None:
    player = agent(BOX, convolutions=[(1, 1, 1)], hidden=[])
    features, _, before = pictures()
    with torch.no_grad():
        convolution, output = player.body[0], player.body[-1]
        assert isinstance(convolution, torch.nn.Conv2d)
        assert isinstance(output, torch.nn.Linear)
        assert convolution.bias is not None
        convolution.weight.copy_(torch.eye(4)[2].view(1, 4, 1, 1))
        convolution.bias.zero_()
        output.weight.zero_()
        output.weight[1, 5] = 1.0
        output.bias.zero_()
    codes, _ = player.codes(features, None, before, ())
    outputs, _ = player.unroll(features, None, before, ())
    expected = codes.unflatten(-1, (9, 4))[..., 5, 2].relu().tanh()
    torch.testing.assert_close(outputs[..., 1], expected)
    assert not outputs[..., 0].any()


@pytest.mark.parametrize("space", [CHOICE, BOX], ids=["choice", "box"])
@given(seed=seeds, order=st.permutations(range(N)))
def test_a_shuffle_changes_nothing(
    space: spaces.Space, seed: int, order: list[int]
) -> None:
    player = agent(space)
    features, padding, _ = pictures(seed)
    first = player.act(tokens_of(features, padding))
    second = player.act(tokens_of(features[:, :, order], padding[:, :, order]))
    # Distinct patches are sorted by content: the same bit for bit.
    assert torch.equal(second.logits, first.logits)
    assert torch.equal(second.action, first.action)
    exact = agent(space).double()
    dense = [
        exact.unroll(part.double() / 255, None, torch.zeros(B, T, A), ())[0]
        for part in (features, features[:, :, order])
    ]
    torch.testing.assert_close(dense[1], dense[0], rtol=0, atol=1e-12)


@given(seed=seeds)
def test_bytes_numbers_and_patches_with_counts_are_answered_alike(seed: int) -> None:
    player = agent().double()
    features, padding, before = pictures(seed)
    expected, memory = player.unroll(features, padding, before, ())
    assert memory == ()
    assert expected.shape == (B, T, A)
    dense, _ = player.unroll(features.double() / 255, padding, before, ())
    torch.testing.assert_close(dense, expected, rtol=0, atol=1e-12)
    patches, counts = unique_patches(features, padding)
    counted, _ = player.unroll(patches, None, before, (), counts)
    assert torch.equal(counted, expected)
    called, _ = player(patches, None, before, (), counts)
    assert torch.equal(called, expected)


def test_every_parameter_gets_a_gradient() -> None:
    player = agent()
    features, padding, before = pictures()
    outputs, _ = player.unroll(features, padding, before, ())
    outputs.square().sum().backward()
    for label, parameter in player.named_parameters():
        assert parameter.grad is not None, label
        assert parameter.grad.isfinite().all(), label


def test_half_precision_is_finite_without_any_patch() -> None:
    player = agent()
    features, padding, before = pictures()
    padding[1] = True
    with torch.autocast("cpu", torch.bfloat16):
        outputs, _ = player.unroll(features, padding, before, ())
    outputs.float().square().sum().backward()
    assert outputs.isfinite().all()
    for parameter in player.parameters():
        assert parameter.grad is not None
        assert parameter.grad.isfinite().all()


def test_attention_weights_and_latent_codes() -> None:
    player = agent()
    features, padding, _ = pictures()
    tokens = tokens_of(features, padding)
    shares = player.attention_weights(tokens, player.initial_state(B, T, N))
    assert shares is not None
    assert shares.shape == (B, T, 1, N)
    torch.testing.assert_close(shares.sum(-1), torch.ones(B, T, 1))
    assert not shares[:, :, 0][padding].any()
    codes = player.latent(tokens)
    assert codes.shape == (B, T, 9 * 4)
    expected, _ = player.codes(features, padding, torch.zeros(B, T, A), ())
    torch.testing.assert_close(codes, expected)


def test_the_state_holds_the_previous_action() -> None:
    player = agent()
    features, _, _ = pictures()
    state = player.initial_state(B, T, N)
    assert not state["action"].any()
    decision = player.act(tokens_of(features), state)
    assert torch.equal(decision.state["action"], one_hot(decision.action, A).float())
    assert decision.state["memory"] == ()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"pooling": {}}, "pooling: expected a mapping with a name"),
        (
            {"pooling": {"name": "attention_neuron"}},
            "expected vision_neuron or a class",
        ),
        ({"pooling": {**SMALL["pooling"], "num_codes": 8}}, "a square number, got 8"),
        ({"pooling": {**SMALL["pooling"], "codes": 8}}, "'codes': choose from"),
        ({"convolutions": [(5, 4, 1)]}, "no wider than its input, 3, got"),
        ({"convolutions": [(5, 2, 0)]}, "policy.convolutions: .* integer >= 1"),
        ({"hidden": [0]}, r"policy.hidden: .* integer >= 1\), got \[0\]"),
        ({"memory": 5, "hidden": []}, r"policy.memory: expected 0 .*, got 5"),
        ({"readout": [4]}, r"policy.readout: expected \[\] without a"),
        ({"memory": 5, "readout": [0]}, r"policy.readout: .* integer >= 1"),
    ],
)
def test_bad_options_are_refused(options: Any, message: str) -> None:
    with pytest.raises(InputError, match=message) as refusal:
        make_agent(SPEC, CHOICE, "vision", **{**SMALL, **options})
    assert "\n" not in str(refusal.value)


# Our additions: large patches and a memory


LARGE: dict[str, Any] = {"patch_convolutions": [(3, 2, 2), (2, 2, 1)], "patch_dim": 5}
"""Options for patches of 2 frames of 6 × 6 pixels."""


def large_head(**options: Any) -> VisionNeuronPooling:
    return make(72, **{**LARGE, **options})


def large_pictures() -> Tensor:
    generator = torch.Generator().manual_seed(1)
    palette = torch.randint(0, 256, (5, 72), generator=generator, dtype=torch.uint8)
    return palette[torch.randint(0, 5, (B, T, N), generator=generator)]


def test_a_cnn_on_patches_in_any_order_and_with_counts() -> None:
    head, features = large_head(), large_pictures()
    before = torch.zeros(B, T, A, dtype=torch.float64)
    codes, _ = head.unroll(features.double() / 255, None, before, ())
    assert codes.shape == (B, T, 12)
    assert not torch.isclose(codes[0, 0], codes[0, 1]).all()
    shuffled = features[:, :, torch.randperm(N)].double() / 255
    torch.testing.assert_close(head.unroll(shuffled, None, before, ())[0], codes)
    patches, counts = unique_patches(features)
    from_distinct, _ = head.unroll(patches.double() / 255, None, before, (), counts)
    torch.testing.assert_close(from_distinct, codes)
    assert head.attention_weights(shuffled, None, before, ()).shape == (B, 3, N)


def test_the_cnn_reads_frames_as_channels_and_pixels_in_rows() -> None:
    head = large_head(patch_convolutions=[(1, 6, 1)])
    assert head.embedding is not None
    for parameter in head.embedding.parameters():
        torch.nn.init.normal_(parameter)
    head.embedding[0].weight.data.fill_(0.0)
    head.embedding[0].weight.data[0, 1, 4, 3] = 1.0
    x = torch.rand(1, 1, N, 72, dtype=torch.float64)
    before = torch.zeros(1, 1, A, dtype=torch.float64)
    codes, _ = head.unroll(x, None, before, ())
    changed = torch.rand_like(x)
    changed[..., 36 + 4 * 6 + 3] = x[..., 36 + 4 * 6 + 3]
    torch.testing.assert_close(head.unroll(changed, None, before, ())[0], codes)


def test_the_initial_cnn_hardly_responds_to_the_background() -> None:
    head = large_head()
    assert head.embedding is not None
    grey = torch.full((1, 2, 6, 6), 0.34, dtype=torch.float64)
    response = head.embedding[0](grey)
    assert response.abs().max() < 1 / 8**0.5  # only torch's default bias is left
    assert (head.embedding[0](grey + 0.5) - response).abs().max() > 0.2


@given(st.integers(1, 3), st.integers(1, 4), st.integers(4, 9))
def test_tiles_are_a_convolution(channels: int, size: int, side: int) -> None:
    torch.manual_seed(side)
    tiles = TileConv2d(channels, 2, size, size).double()
    plain = torch.nn.Conv2d(channels, 2, size, size).double()
    plain.load_state_dict(tiles.state_dict())
    x = torch.rand(2, channels, side, side, dtype=torch.float64)
    results = [layer(x) for layer in (tiles, plain)]
    torch.testing.assert_close(*results)
    for result in results:
        result.square().sum().backward()
    torch.testing.assert_close(tiles.weight.grad, plain.weight.grad)
    torch.testing.assert_close(tiles.bias.grad, plain.bias.grad)


def agent_with_memory(**options: Any) -> Vision:
    return agent(memory=5, **options)


def test_the_memory_is_a_gru_on_the_hidden_layer() -> None:
    player = agent_with_memory().double()
    features, _, before = pictures()
    captured: list[Tensor] = []
    player.body.register_forward_hook(lambda *_: captured.append(_[2]))
    with torch.no_grad():
        state = torch.rand(B, 5, dtype=torch.float64)
        outputs, memory = player.unroll(features, None, before.double(), state)
        hidden = captured[0].view(B, T, 7)
        cell = torch.nn.GRUCell(7 + A, 5).double()
        for name, layer in (("ih", player.on_input), ("hh", player.on_state)):
            for kind in ("weight", "bias"):
                # Torch has the reset gate first.
                update, reset, new = getattr(layer, kind).chunk(3)
                getattr(cell, f"{kind}_{name}").copy_(torch.cat([reset, update, new]))
        for t in range(T):
            state = cell(torch.cat([hidden[:, t], before[:, t].double()], -1), state)
            expected = player.output(torch.cat([hidden[:, t], state], -1))
            torch.testing.assert_close(outputs[:, t], expected)
    torch.testing.assert_close(memory, state)


def test_actions_carry_the_memory_along() -> None:
    player = agent_with_memory()
    features, _, _ = pictures()
    tokens = [tokens_of(features[:, t][:, None]) for t in range(T)]
    state = player.initial_state(B, 1, N)
    assert torch.equal(state["memory"], torch.zeros(B, 1, 5))
    for step_tokens in tokens:
        decision = player.act(step_tokens, state)
        state = decision.state
    assert state["memory"].abs().sum() > 0
    assert player.latent(tokens[0], state).shape == (B, 1, 36)
    weights = player.attention_weights(tokens[0], state)
    assert weights is not None
    assert weights.shape == (B, 1, 1, N)


def test_a_readout_lies_between_memory_and_output(tmp_path: Path) -> None:
    player = agent_with_memory(readout=[6, 4])
    features, _, before = pictures()
    memory = torch.rand(B, 5)
    captured: list[tuple[Tensor, ...]] = []
    player.body.register_forward_hook(lambda *_: captured.append(_[2]))
    with torch.no_grad():
        outputs, last = player(features[:, :1], None, before[:, :1], memory)
        x = torch.cat([captured[0], last], -1)
        for layer in (player.readout[0], player.readout[2]):
            x = layer(x).relu()
        torch.testing.assert_close(outputs[:, 0], player.output(x))
        save_policy(player, tmp_path / "saved")
        loaded = load_policy(tmp_path / "saved")
        reloaded, _ = loaded(features[:, :1], None, before[:, :1], memory)
    torch.testing.assert_close(reloaded, outputs)


def test_without_a_readout_neither_config_nor_weights_name_it() -> None:
    assert "readout" not in agent_with_memory().config
    assert not any("readout" in name for name in agent_with_memory().state_dict())


@pytest.mark.parametrize("space", [CHOICE, BOX], ids=["choice", "box"])
@pytest.mark.parametrize(
    "options", [{}, {"hidden": []}, {"memory": 5}, {"memory": 5, "readout": [6]}]
)
def test_the_output_is_linear_in_the_hidden_layer(
    space: spaces.Space, options: dict[str, Any]
) -> None:
    player = agent(space, **options)
    features, _, before = pictures()
    memory = player.initial_memory(B, N)
    with torch.no_grad():
        outputs, hidden, last = player.unroll_hidden(features, None, before, memory)
        expected = player.unroll(features, None, before, memory)
        torch.testing.assert_close((outputs, last), expected, rtol=0, atol=0)
        linear = player.output if player.units else player.body[-1]
        logits = linear(hidden)
    assert hidden.shape == (B, T, player.hidden_dim)
    torch.testing.assert_close(outputs, logits if space is CHOICE else logits.tanh())
