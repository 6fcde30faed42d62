"""Policies that select tokens: permutations, absent tokens, masks and set sizes."""

from pathlib import Path
from typing import Any

import pytest
import torch
from gymnasium import spaces
from torch import Tensor

from helpers.samples import SPEC, random_tokens
from marl_pool import compile, load_policy, make_policy
from marl_pool.envs import AgentGroup
from marl_pool.policies.action_spaces import Selection
from marl_pool.policies.actions import ActionSpec
from marl_pool.policies.export import ActionNetwork, export_policy
from marl_pool.policies.selection import SelectedTokens
from marl_pool.policies.storage import save_policy
from marl_pool.policies.token_policy import TokenPolicy
from marl_pool.tokens import Tokens
from marl_pool.utils.errors import InputError

FIXED = 2
SPACE = Selection(FIXED, SPEC.num_tokens, ("friend", "noise"))
ENCODER = {"name": "transformer", "num_layers": 2}


def make(space: spaces.Space = SPACE, **options: Any) -> TokenPolicy:
    options = {"encoder": ENCODER, "init_std": 0.3, "seed": 0, **options}
    return make_policy(SPEC, space, action="select", **options).eval()


def probabilities(policy: TokenPolicy, tokens: Tokens) -> Tensor:
    return policy(tokens)[0].softmax(-1)


@pytest.mark.parametrize("pooling", ["ada", "max", "avg", "cls", "pna"])
@pytest.mark.parametrize("trunk", ["shared", "separate"])
def test_permuting_tokens_permutes_the_options(pooling: str, trunk: str) -> None:
    policy = make(pooling=pooling, trunk=trunk)
    tokens = random_tokens(batch=(64,))
    order = torch.randperm(SPEC.num_tokens)
    moved = Tokens(*(part[:, order] for part in tokens.parts))
    logits, values = policy(tokens)
    moved_logits, moved_values = policy(moved)
    torch.testing.assert_close(moved_logits[:, :FIXED], logits[:, :FIXED])
    torch.testing.assert_close(moved_logits[:, FIXED:], logits[:, FIXED:][:, order])
    torch.testing.assert_close(moved_values, values)


@pytest.mark.parametrize("garbage", [0.0, float("nan"), float("inf")])
def test_absent_tokens_and_other_types_have_no_probability(garbage: float) -> None:
    policy = make()
    tokens = random_tokens(batch=(256,))
    tokens = tokens._replace(
        features=tokens.features.masked_fill(tokens.padding[..., None], garbage)
    )
    chances = probabilities(policy, tokens)
    absent = tokens.padding | (tokens.types == 0)
    assert absent.any()
    assert (chances[:, FIXED:][absent] == 0).all()
    assert (chances[:, FIXED:][~absent] > 0).all()
    for explore in (False, True):
        decision = policy.act(tokens, explore=explore)
        slot = (decision.action - FIXED).clamp(min=0)
        is_absent = absent.gather(1, slot[:, None])[:, 0]
        assert not (is_absent & (decision.action >= FIXED)).any()
        assert decision.log_prob.isfinite().all()
        assert (decision.log_prob > -30).all()


def test_only_fixed_options_are_left_where_all_tokens_are_absent() -> None:
    policy = make().train()
    tokens = random_tokens(batch=(8,))
    tokens = tokens._replace(padding=torch.ones_like(tokens.padding))
    logits, values = policy(tokens)
    chances = logits.softmax(-1)
    torch.testing.assert_close(chances[:, :FIXED].sum(1), torch.ones(8))
    assert (chances[:, FIXED:] == 0).all()
    (logits.log_softmax(-1)[:, 0].sum() + values.sum()).backward()
    gradients = [p.grad for p in policy.parameters() if p.grad is not None]
    assert gradients
    assert all(gradient.isfinite().all() for gradient in gradients)


def test_gradients_reach_key_and_encoder() -> None:
    policy = make()
    tokens = random_tokens(batch=(8,))
    policy(tokens)[0].log_softmax(-1)[:, -1].sum().backward()
    assert policy.key is not None
    assert policy.key.weight.grad is not None
    assert policy.key.weight.grad.abs().sum() > 0
    embedding: Any = policy.network.embedding
    assert embedding.project.weight.grad.abs().sum() > 0


def test_action_masks_forbid_options() -> None:
    policy, tokens = make(), random_tokens(batch=(128,))
    mask = torch.rand(128, int(SPACE.n)) < 0.5
    mask[0] = False
    chances = probabilities(policy, tokens._replace(action_mask=mask))
    assert (chances[1:][~mask[1:]] == 0).sum() > 0
    allowed = mask & (probabilities(policy, tokens) > 0)
    stuck = ~allowed.any(1)
    assert (chances[~stuck][~allowed[~stuck]] == 0).all()
    # Where a mask allows no option that is possible, the fixed options remain.
    assert stuck[0]
    assert (chances[stuck][:, :FIXED] > 0).all()
    assert (chances[stuck][:, FIXED:] == 0).all()


def test_policies_select_among_any_number_of_tokens() -> None:
    policy, tokens = make(), random_tokens(batch=(16,))
    larger_set = Tokens(*(torch.cat([part, part[:, 1:]], 1) for part in tokens.parts))
    assert probabilities(policy, larger_set).shape == (
        16,
        FIXED + 2 * SPEC.num_tokens - 1,
    )
    action = policy.act(larger_set, explore=True).action
    assert action.max() >= int(SPACE.n)
    spec = SPEC.__class__(20, SPEC.num_features, SPEC.type_names)
    larger = Selection(FIXED, 20, SPACE.selects)
    assert policy.mismatch(spec, larger) == ""
    assert "actions" in policy.mismatch(spec, Selection(3, 20, SPACE.selects))
    assert "actions" in policy.mismatch(spec, Selection(FIXED, 20, ("friend",)))
    plain = make_policy(SPEC, SPACE, encoder=ENCODER)
    assert "actions" in plain.mismatch(spec, larger)


def test_the_scores_are_scaled_dot_products() -> None:
    policy, tokens = make(pooling="max"), random_tokens(batch=(4,))
    pooled, encoded = policy.network.pool_and_encode(tokens)
    assert policy.key is not None
    fixed, query = policy.action_head(pooled).split([FIXED, encoded.shape[-1]], 1)
    keys = encoded @ policy.key.weight.T + policy.key.bias
    scores = torch.einsum("bd,bnd->bn", query, keys) / encoded.shape[-1] ** 0.5
    logits = policy(tokens)[0]
    possible = logits > -1e8
    torch.testing.assert_close(
        logits[possible], torch.cat([fixed, scores], 1)[possible]
    )


def test_the_kernel_computes_the_encoder_alone() -> None:
    policy = make()
    tokens = random_tokens(batch=(32,))
    compiled: Any = compile(policy)
    assert compiled is not policy
    with torch.no_grad():
        assert compiled.actor_critic(tokens) is None
        assert compiled.pools(tokens, encoder=True)
        assert not compiled.pools(tokens)
        actual, expected = compiled(tokens), policy(tokens)
    for result, reference in zip(actual, expected, strict=True):
        torch.testing.assert_close(result, reference, rtol=1e-4, atol=1e-4)


def test_a_selecting_policy_is_saved_and_loaded(tmp_path: Path) -> None:
    policy = make()
    save_policy(policy, tmp_path)
    loaded: Any = load_policy(tmp_path)
    assert loaded.config == policy.config
    tokens = random_tokens(batch=(8,))
    assert torch.equal(loaded(tokens)[0], policy(tokens)[0])
    # Policies that select nothing are saved as before.
    assert "action" not in make_policy(SPEC, spaces.Discrete(3)).config


@pytest.mark.slow
@pytest.mark.parametrize(("to", "masked"), [("torch", True), ("onnx", False)])
def test_a_selecting_policy_is_exported(tmp_path: Path, to: Any, masked: bool) -> None:
    policy = make(encoder={"name": "transformer", "num_layers": 1})
    assert export_policy(policy, tmp_path / "new", to, masked=masked) == 0
    if to == "torch":
        module = torch.export.load(tmp_path / "new").module()
        tokens = random_tokens(batch=(6,))
        parts = [*tokens[:3], *([torch.ones(6, int(SPACE.n)).bool()] * masked)]
        assert torch.equal(module(*parts), ActionNetwork(policy)(*parts))


def test_a_space_tells_what_can_be_selected() -> None:
    spec = ActionSpec.of(SPACE)
    assert (spec.n, spec.num_fixed, spec.selects) == (7, FIXED, ("friend", "noise"))
    assert ActionSpec(**spec.to_json()) == spec
    assert spec.space() == SPACE
    assert Selection(FIXED, 5, ("noise",)) != SPACE
    assert spaces.Discrete(7) != SPACE
    assert repr(SPACE) == "Selection(2, 5, ('friend', 'noise'))"
    assert "selects" not in ActionSpec.of(spaces.Discrete(7)).to_json()


def test_a_selection_refers_to_the_same_entity_under_a_perturbation() -> None:
    selection = SelectedTokens(SPEC, ActionSpec.of(SPACE))
    types = torch.tensor([0, 1, 1, 2, 2])
    padding = torch.tensor([False, False, True, False, False])
    mask = torch.tensor([True, True, False, True, False, True, False])
    # Perceived: slots 3, 0, 4, 1, 2 of the environment, and one that it lacks.
    origin = torch.tensor([3, 0, 4, 1, 2, -1])
    source = origin.clamp(min=0)
    tokens = Tokens(torch.zeros(6, 3), types[source], padding[source], mask)
    tokens = tokens._replace(types=tokens.types.index_fill(0, torch.tensor(5), 1))
    perceived = selection.perceive(tokens, origin)
    assert perceived.action_mask is not None
    expected = [True, True, True, False, False, True, False, True]
    assert perceived.action_mask.tolist() == expected
    choices = torch.tensor([0, 1, 2, 5, 7])
    executed = selection.execute(
        choices, origin.expand(5, -1), perceived._replace(action_mask=None)
    )
    assert executed.tolist() == [0, 1, FIXED + 3, FIXED + 1, 0]
    # A selection that the environment lacks becomes the first allowed fixed option.
    only_second = torch.tensor([False, True, *[True] * 6])
    moved = perceived._replace(action_mask=only_second)
    assert selection.execute(torch.tensor(7), origin, moved) == 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"space": spaces.Discrete(6)},
            "policy.action: expected head where the environment's actions are no "
            "Selection of tokens, but a choice of 6, got select",
        ),
        (
            {"pooling": "attention_neuron"},
            "policy.action: expected head with the recurrent pooling head "
            "AttentionNeuronPooling, got select",
        ),
        (
            {"token_dropout": 0.1},
            r"policy.action: expected head with ppo.token_dropout=0.1, got select",
        ),
        (
            {"space": Selection(1, 5, ("foe",))},
            "Selection.selects: expected some of 'self', 'friend', 'noise', got 'foe'",
        ),
        (
            {"space": Selection(1, 4, ("noise",))},
            "Selection.num_tokens: expected 5, the number of tokens of an observation, "
            "got 4",
        ),
    ],
)
def test_misfit_selections_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        make(**change)
    if isinstance(space := change.get("space"), Selection):
        with pytest.raises(InputError, match=message):
            AgentGroup(1, SPEC, space)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((0, 5, ("food",)), "Selection.num_fixed: expected an integer of at least 1"),
        ((1, 0, ("food",)), "Selection.num_tokens: .* of at least 1, got 0"),
        ((1.5, 5, ("food",)), "Selection.num_fixed: .* of at least 1, got 1.5"),
        ((True, 5, ("food",)), "Selection.num_fixed: .* of at least 1, got True"),
        ((1, None, ("food",)), "Selection.num_tokens: .* of at least 1, got None"),
        ((1, 5, ()), r"Selection.selects: expected names of types, got \(\)"),
        ((1, 5, "food"), "Selection.selects: expected names of types, got 'food'"),
    ],
)
def test_invalid_selection_spaces_are_refused(arguments: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        Selection(*arguments)


@pytest.mark.parametrize(
    "parts",
    [
        {"n": 4, "selects": ("a",)},
        {"n": 4, "num_fixed": 4, "selects": ("a",)},
        {"n": 4, "num_fixed": 1},
        {"choices": (3, 2), "num_fixed": 1, "selects": ("a",)},
    ],
)
def test_action_specs_that_select_have_one_choice(parts: dict[str, Any]) -> None:
    with pytest.raises(InputError, match="expected fixed options and tokens that can"):
        ActionSpec(**parts)
