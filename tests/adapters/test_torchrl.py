"""TorchRL's losses, collectors and advantages with set networks."""

import warnings
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch import Tensor
from torch.utils._pytree import tree_map

pytest.importorskip("torchrl")

with warnings.catch_warnings():
    # TorchRL's modules warn about one another when they are imported.
    warnings.simplefilter("ignore", DeprecationWarning)
    from tensordict import TensorDict, TensorDictBase
    from tensordict.nn import TensorDictModule, TensorDictModuleBase
    from torchrl import data
    from torchrl.collectors import Collector
    from torchrl.envs import PettingZooWrapper
    from torchrl.modules import (
        MaskedCategorical,
        OneHotCategorical,
        ProbabilisticActor,
        TanhNormal,
    )
    from torchrl.objectives import ClipPPOLoss, DiscreteSACLoss

import marl_pool
from helpers.samples import SPEC
from marl_pool.adapters.torchrl import (
    SetActor,
    SetCritic,
    as_policy,
    observation_space,
)
from marl_pool.envs import make_env
from marl_pool.utils.errors import InputError

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning:(torchrl|tensordict).*"),
    pytest.mark.filterwarnings("ignore::UserWarning:(torchrl|tensordict).*"),
]

SMALL: dict[str, Any] = {"dim": 8, "num_layers": 1, "num_heads": 2, "init_std": 0.5}
NUM_AGENTS = 3


def token_observations(num_agents: int = NUM_AGENTS) -> data.Composite:
    """Return the specs of agents that observe tokens."""
    slots = SPEC.num_tokens
    shape = (num_agents, slots)
    tokens = data.Composite(
        features=data.Unbounded((*shape, SPEC.num_features)),
        types=data.Bounded(0, SPEC.num_types - 1, shape, dtype=torch.int64),
        padding=data.Binary(slots, shape, dtype=torch.bool),
        shape=(num_agents,),
    )
    agents = data.Composite(observation=tokens, shape=(num_agents,))
    return data.Composite(agents=agents)


def observations(*batch: int, seed: int = 0) -> TensorDict:
    """Return random tokens of agents; the last slot is padding that holds NaN."""
    torch.manual_seed(seed)
    shape = (*batch, SPEC.num_tokens)
    types = torch.randint(1, SPEC.num_types, shape)
    types[..., 0] = 0
    padding = torch.zeros(shape, dtype=torch.bool)
    padding[..., -1] = True
    features = torch.randn(*shape, SPEC.num_features)
    features[..., -1, :] = torch.nan
    tokens = {"features": features, "types": types, "padding": padding}
    observed = TensorDict({"observation": TensorDict(tokens, batch)}, batch)
    return TensorDict({"agents": observed}, batch[:-1])


def values(critic: TensorDictModuleBase, observed: TensorDictBase) -> Tensor:
    with torch.no_grad():
        return critic(observed.clone())["agents", "state_value"]


# Values of several agents


@pytest.mark.parametrize("name", ["ada", "cls", "max", "pma"])
def test_a_value_of_all_agents_depends_on_the_others_in_any_order(name: str) -> None:
    torch.manual_seed(0)
    critic = SetCritic(token_observations(), pooling=name, **SMALL).double()
    observed = observations(2, NUM_AGENTS)
    clean = values(critic, observed)
    assert clean.shape == (2, NUM_AGENTS, 1)
    assert clean.isfinite().all()
    # TorchRL's test of MAPPO: the others' values feel a change of the first agent.
    changed = observed.clone()
    changed["agents", "observation", "features"][:, 0] += 5
    assert ((values(critic, changed) - clean)[:, 1:].abs() > 1e-6).all()
    # All agents in another order have their own values; the others' order is nothing.
    order = torch.tensor([2, 0, 1])
    shuffled = TensorDict({"agents": observed["agents"][:, order]}, [2])
    torch.testing.assert_close(values(critic, shuffled), clean[:, order])
    swapped = TensorDict({"agents": observed["agents"][:, [0, 2, 1]]}, [2])
    torch.testing.assert_close(values(critic, swapped)[:, 0], clean[:, 0])


def test_a_value_of_the_own_observation_depends_on_no_other_agent() -> None:
    critic = SetCritic(token_observations(), scope="agent", **SMALL).double()
    observed = observations(2, NUM_AGENTS)
    changed = observed.clone()
    changed["agents", "observation", "features"][:, 0] += 5
    difference = (values(critic, changed) - values(critic, observed)).abs()
    assert (difference[:, 1:] < 1e-6).all()
    assert (difference[:, 0] > 1e-6).all()


def test_plain_tensors_may_take_the_place_of_parameters() -> None:
    critic, observed = SetCritic(token_observations(), **SMALL), observations(4, 3)
    expected = values(critic, observed)
    # As TorchRL 0.11 does it for target networks.
    for module in critic.modules():
        for name, parameter in [*module._parameters.items()]:
            if parameter is not None:
                del module._parameters[name]
                setattr(module, name, parameter.detach())
    assert not list(critic.parameters())
    torch.testing.assert_close(values(critic, observed), expected)


def test_a_team_has_one_value_in_any_order_of_agents() -> None:
    critic = SetCritic(token_observations(), scope="team", **SMALL).double()
    observed = observations(2, NUM_AGENTS)
    value = critic(observed.clone())["state_value"]
    assert value.shape == (2, 1)
    reversed_ = TensorDict({"agents": observed["agents"][:, [2, 1, 0]]}, [2])
    torch.testing.assert_close(critic(reversed_)["state_value"], value)
    observed["agents", "observation", "features"][:, 1] += 5
    assert ((critic(observed)["state_value"] - value).abs() > 1e-6).all()


def test_absent_agents_change_no_value_and_no_gradient() -> None:
    key = ("agents", "mask")
    critic = SetCritic(token_observations(), present_key=key, **SMALL).double()
    few = observations(2, NUM_AGENTS)
    few[key] = torch.ones(2, NUM_AGENTS, dtype=torch.bool)
    many = TensorDict({"agents": torch.cat([few["agents"], few["agents"]], 1)}, [2])
    many[key][:, NUM_AGENTS:] = False
    many["agents", "observation", "features"][:, NUM_AGENTS:] = torch.nan
    both = critic(many)["agents", "state_value"]
    expected = values(critic, few)
    torch.testing.assert_close(both[:, :NUM_AGENTS].detach(), expected)
    # NaN of absent agents is in no gradient either.
    parameters = [*critic.parameters()]
    results = (both[:, :NUM_AGENTS], critic(few.clone())["agents", "state_value"])
    actual, reference = (
        torch.autograd.grad(result.sum(), parameters, allow_unused=True)
        for result in results
    )
    assert any(part is not None and part.any() for part in reference)
    torch.testing.assert_close(actual, reference)


@pytest.mark.parametrize(
    ("present", "message"),
    [
        (None, "got no such entry"),
        (torch.ones(2, 3).long(), r"got torch.int64 of shape \(2, 3\)"),
        (torch.ones(2, 1).bool(), r"of shape \(2, 3\), .*got torch.bool .*\(2, 1\)"),
    ],
)
def test_missing_or_non_boolean_presence_is_refused(present, message) -> None:
    critic = SetCritic(token_observations(), present_key="present", **SMALL)
    observed = observations(2, NUM_AGENTS)
    observed.batch_size = [2]
    if present is not None:
        observed["present"] = present
    with pytest.raises(InputError, match=f"present_key: expected .*{message}"):
        critic(observed)


@pytest.mark.parametrize("name", ["ada", "max", "pma"])
def test_weights_serve_any_number_of_agents_and_tokens(name: str) -> None:
    critic = SetCritic(token_observations(), pooling=name, **SMALL)
    actor = SetActor(token_observations(), 4, pooling=name, **SMALL)
    observed = observations(2, 7)
    tokens = observed["agents", "observation"]
    for key, dim in (("features", -2), ("types", -1), ("padding", -1)):
        tokens[key] = torch.cat([tokens[key], tokens[key]], dim)
    assert values(critic, observed).shape == (2, 7, 1)
    assert actor(observed)["agents", "logits"].shape == (2, 7, 4)


# Observations


SLICES = {"self": [0, 4], "near": {"start": 4, "count": 2, "features": 3}}
ACTION = data.Composite(
    observation=data.Unbounded((3, 5)), action=data.Bounded(-1, 1, (3, 2)), shape=(3,)
)
SETS = data.Composite(
    {"self": data.Unbounded((3, 2)), "near": data.Unbounded((3, 4, 5))}, shape=(3,)
)
SPECS: dict[str, tuple[data.TensorSpec, dict[str, Any]]] = {
    "vector": (data.Unbounded((3, 5)), {}),
    "token": (data.Unbounded((3, 5)), {"vector": "token"}),
    "rows": (data.Unbounded((3, 4, 5)), {"presence": 0}),
    "image": (
        data.Bounded(0, 255, (3, 8, 8, 3), dtype=torch.uint8),
        {"pooling": "max"},
    ),
    "choice": (data.Categorical(4, (3,)), {}),
    "choices": (data.MultiCategorical([2, 3], (3, 2)), {}),
    "one_hot": (data.OneHot(4, (3, 4)), {"vector": "token"}),
    "slices": (data.Unbounded((3, 10)), {"slices": SLICES}),
    "action": (ACTION, {}),
    "sets": (SETS, {"pooling": "cls"}),
}


@pytest.mark.parametrize(("spec", "options"), SPECS.values(), ids=SPECS)
def test_specs_become_tokens(spec: data.TensorSpec, options: dict[str, Any]) -> None:
    agents = data.Composite(observation=spec, shape=(3,))
    whole = data.Composite(agents=agents)
    actor = SetActor(whole, 4, **options, **SMALL)
    critic = SetCritic(whole, **options, **SMALL)
    observed = whole.rand([2])
    assert actor(observed.clone())["agents", "logits"].shape == (2, 3, 4)
    assert values(critic, observed).shape == (2, 3, 1)


@pytest.mark.parametrize("dtype", [torch.bool, torch.int8])
def test_bits_of_any_dtype_are_bits(dtype: torch.dtype) -> None:
    space = observation_space(data.Binary(5, dtype=dtype), 0)
    assert space == spaces.MultiBinary((5,))


def test_a_single_agent_has_its_entries_at_the_root() -> None:
    spec = data.Composite(near=data.Unbounded((4, 5)), far=data.Unbounded((2, 3)))
    actor = SetActor(spec, 4, in_key=(), out_keys=["loc", "scale"], **SMALL)
    result = actor(spec.rand([6]))
    assert result["loc"].shape == result["scale"].shape == (6, 4)
    assert (result["scale"] > 0).all()
    critic = SetCritic(spec, in_key=(), scope="agent", **SMALL)
    assert critic(spec.rand([6]))["state_value"].shape == (6, 1)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda s: SetActor(s, 4, in_key="state"), "in_key: expected one of .*agents"),
        (lambda s: SetActor(s, 4, out_keys=["a", "b", "c"]), "out_keys: expected one"),
        (lambda s: SetActor(s, 4, poling="ada"), "poling"),
        (lambda s: SetActor(s, 4, pooling="best"), "pooling"),
        (lambda s: SetActor(s, 4, vector="row"), "vector: "),
        (lambda s: SetCritic(s, scope="all"), "scope: "),
        (lambda s: SetActor(3, 4), "observation_spec: expected a Composite, .*got int"),
        (lambda s: SetActor(s, 4, in_key=3), "in_key: expected a string or a tuple"),
        (
            lambda s: SetCritic(data.Composite(a=data.Unbounded(3)), in_key="a"),
            "scope: expected agent",
        ),
    ],
)
def test_invalid_arguments_are_refused_in_one_line(make: Any, message: str) -> None:
    with pytest.raises(InputError, match=message) as refusal:
        make(token_observations())
    assert "\n" not in str(refusal.value)


# TorchRL's algorithms


def test_ppo_collects_estimates_and_learns() -> None:
    torch.manual_seed(0)
    env = PettingZooWrapper(make_env("simple_centroid", counts="2-3-2"), use_mask=False)
    key = ("agent", "observation")
    actions = env.full_action_spec["agent", "action"]
    network = SetActor(
        env.observation_spec,
        actions.shape[-1],
        in_key=key,
        out_keys=[("agent", "loc"), ("agent", "scale")],
        **SMALL,
    )
    actor = ProbabilisticActor(
        network,
        spec=env.full_action_spec,
        in_keys=network.out_keys,
        out_keys=[("agent", "action")],
        distribution_class=TanhNormal,
        distribution_kwargs={
            "low": actions.space.low[0],
            "high": actions.space.high[0],
        },
        return_log_prob=True,
        log_prob_key=("agent", "log_prob"),
    )
    critic = SetCritic(env.observation_spec, in_key=key, **SMALL)
    loss = ClipPPOLoss(actor, critic)
    loss.set_keys(
        sample_log_prob=("agent", "log_prob"),
        **{
            name: ("agent", key)
            for name, key in [("value", "state_value")]
            + [(n, n) for n in ("action", "reward", "done", "terminated")]
        },
    )
    loss.make_value_estimator(gamma=0.9, lmbda=0.9)
    collector = Collector(
        env,
        actor,
        frames_per_batch=16,
        total_frames=16,
        auto_register_policy_transforms=False,
    )
    for batch in collector:
        with torch.no_grad():
            loss.value_estimator(
                batch,
                params=loss.critic_network_params,
                target_params=loss.target_critic_network_params,
            )
        outputs = loss(batch)
        sum(v for k, v in outputs.items() if k.startswith("loss_")).backward()
    collector.shutdown()
    for module in (actor, critic):
        gradients = [p.grad for p in module.parameters() if p.grad is not None]
        assert any(gradient.any() for gradient in gradients)
        assert all(gradient.isfinite().all() for gradient in gradients)
    # The trained actor is invariant to the order of tokens.
    results = marl_pool.evaluate(
        as_policy(actor),
        {"name": "simple_centroid", "counts": "2-3-2"},
        suite={"perturbations": [{"name": "shuffle", "severities": [1.0]}]},
        episodes=2,
    )
    trained = [row for row in results.results if row.policy == "trained"]
    clean, shuffled = trained
    assert shuffled.mean == pytest.approx(clean.mean, rel=1e-3)


def test_action_values_are_computed_by_vmap() -> None:
    spec = token_observations(num_agents=1)["agents"]
    torch.manual_seed(0)
    actor = categorical(SetActor(spec, 4, in_key="observation", **SMALL))
    action_values = SetActor(
        spec, 4, in_key="observation", out_keys=["action_value"], **SMALL
    )
    loss = DiscreteSACLoss(
        actor, action_values, num_actions=4, action_space="categorical"
    )
    batch = observations(6, 1)["agents"][:, 0]
    following = {
        "observation": batch["observation"].clone(),
        "reward": torch.ones(6, 1),
        "done": torch.zeros(6, 1, dtype=torch.bool),
        "terminated": torch.zeros(6, 1, dtype=torch.bool),
    }
    batch["next"] = TensorDict(following, [6])
    batch["action"] = torch.randint(4, (6,))
    outputs = loss(batch)
    sum(v for k, v in outputs.items() if k.startswith("loss_")).backward()
    gradients = [p.grad for p in loss.parameters() if p.grad is not None]
    assert any(gradient.any() for gradient in gradients)
    assert all(gradient.isfinite().all() for gradient in gradients)


# Policies


ORDER = ("features", "types", "padding")


def choosing(**options: Any) -> ProbabilisticActor:
    spec = token_observations()
    return ProbabilisticActor(
        SetActor(spec, 4, **SMALL), out_keys=[("agents", "action")], **options
    )


def categorical(network: TensorDictModuleBase) -> ProbabilisticActor:
    """An actor of a single agent that chooses by logits."""
    return ProbabilisticActor(
        network,
        in_keys=["logits"],
        out_keys=["action"],
        distribution_class=torch.distributions.Categorical,
    )


def columns(observed: TensorDictBase) -> dict[str, Any]:
    tokens = observed["agents", "observation"]
    return {key: tokens[key][:, 0].numpy() for key in ORDER}


def test_a_policy_chooses_the_most_likely_action_that_a_mask_allows() -> None:
    logits, mask = ("agents", "logits"), ("agents", "action_mask")
    torch.manual_seed(0)
    actor = choosing(
        in_keys={"logits": logits, "mask": mask}, distribution_class=MaskedCategorical
    )
    observed = observations(64, 1)
    allowed = torch.rand(64, 4) > 0.5
    allowed[:, 0] = True
    chosen = as_policy(actor)({**columns(observed), "action_mask": allowed.numpy()})
    scores = actor[0](observed)[logits][:, 0].masked_fill(~allowed, -torch.inf)
    assert chosen.tolist() == scores.argmax(-1).tolist()


class WithNaN(torch.nn.Linear):
    """A network with scores and an output of NaN."""

    def forward(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        return super().forward(rows), rows * torch.nan


def test_nan_in_an_unused_output_is_ignored() -> None:
    torch.manual_seed(0)
    network = WithNaN(5, 4)
    actor = categorical(TensorDictModule(network, ["observation"], ["logits", "_"]))
    rows = torch.randn(6, 5)
    actions = as_policy(actor)(rows.numpy())
    assert actions.tolist() == network(rows)[0].argmax(-1).tolist()


def test_one_hot_actions_become_numbers() -> None:
    actor = choosing(
        in_keys=[("agents", "logits")],
        distribution_class=OneHotCategorical,
        spec=data.Composite(
            agents=data.Composite(action=data.OneHot(4, (3, 4)), shape=(3,))
        ),
    )
    observed = observations(64, 1)
    chosen = as_policy(actor)(columns(observed))
    assert (
        chosen.tolist()
        == actor[0](observed)["agents", "logits"][:, 0].argmax(-1).tolist()
    )


ROWS = torch.randn(6, 4, 5).numpy()
CARS = torch.randn(6, 2, 3).numpy()


ROW_SPEC = data.Unbounded((4, 5))
BOTH_SPECS = data.Composite(rows=ROW_SPEC, cars=data.Unbounded((2, 3)))


@pytest.mark.parametrize(
    ("observed", "observation"),
    [
        (ROW_SPEC, ROWS),
        (ROW_SPEC, {"observation": ROWS, "goal": CARS}),
        (BOTH_SPECS, {"cars": CARS, "rows": ROWS}),
    ],
)
def test_a_policy_reads_observations_of_any_space(observed, observation) -> None:
    torch.manual_seed(0)
    spec = data.Composite(observation=observed)
    actor = categorical(SetActor(spec, 4, in_key="observation", **SMALL))
    inputs = TensorDict({}, [6])
    for key in actor.in_keys:
        name = key if isinstance(key, str) else key[-1]
        inputs[key] = torch.from_numpy(CARS if name == "cars" else ROWS)
    scores = actor[0](inputs)["logits"]
    policy = as_policy(actor)
    assert policy(observation).tolist() == scores.argmax(-1).tolist()
    with pytest.raises(InputError, match="the network's outputs are NaN"):
        policy(tree_map(lambda part: part * np.nan, observation))


def test_a_policy_plays_without_dropout_and_restores_the_mode() -> None:
    torch.manual_seed(0)
    spec = data.Composite(observation=ROW_SPEC)
    options = {**SMALL, "dropout": 0.5, "token_dropout": 0.5}
    actor = categorical(SetActor(spec, 4, in_key="observation", **options))
    frozen = actor[1].eval()
    rows = np.random.default_rng(0).normal(size=(256, 4, 5)).astype(np.float32)
    actions = as_policy(actor)(rows)
    modes = [part.training for part in (actor, actor[0], frozen)]
    assert modes == [True, True, False]
    scores = actor.eval()[0](TensorDict({"observation": torch.tensor(rows)}, [256]))
    assert actions.tolist() == scores["logits"].argmax(-1).tolist()


def test_a_policy_needs_what_it_reads_and_actions() -> None:
    for actor in (3, torch.nn.Linear(2, 2)):
        with pytest.raises(InputError, match="actor: expected a ProbabilisticActor"):
            as_policy(actor)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="actor: expected an out_key action"):
        as_policy(SetActor(token_observations(), 4, **SMALL))
    policy = as_policy(choosing(in_keys=[("agents", "logits")]))
    for observation, message in (
        (
            {"features": ROWS, "padding": ROWS},
            "an array for .*'types'.*, got features, padding",
        ),
        ({}, "an array for .*, got "),
        (
            columns(observations(6, 1)) | {"features": ROWS[..., :1]},
            "features': expected observations of shape .*, got",
        ),
    ):
        with pytest.raises(InputError, match=message) as caught:
            policy(observation)
        assert "\n" not in str(caught.value)
