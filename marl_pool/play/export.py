"""A page without a server: environment and network in JavaScript."""

import base64
import json
import re
from collections.abc import Mapping
from dataclasses import replace
from hashlib import sha256
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch
from pydantic_core import to_jsonable_python
from torch import nn

from marl_pool.encoders.base import IdentityEncoder
from marl_pool.encoders.transformer import TransformerEncoder
from marl_pool.envs.base import BatchedEnv
from marl_pool.envs.cartpole.env import CartPole
from marl_pool.envs.particles.simple_centroid import AGENT_ACCELERATION, SimpleCentroid
from marl_pool.evaluation.target import EvaluationTarget
from marl_pool.files.atomic import make_folder, new_file
from marl_pool.kernels.functional import ACTIVATIONS
from marl_pool.networks.embedding import TokenEmbedding
from marl_pool.networks.set_network import SetNetwork
from marl_pool.options.signatures import options_of
from marl_pool.play.episodes import LiveEpisode
from marl_pool.play.messages import MAX_SEED
from marl_pool.play.session import Session
from marl_pool.policies.base import Policy, SpecifiedPolicy
from marl_pool.policies.sensory import Sensory
from marl_pool.policies.token_policy import TokenPolicy
from marl_pool.pooling.ada import AdaPooling
from marl_pool.pooling.attention_neuron import AttentionNeuronPooling
from marl_pool.pooling.basic import AvgPooling, MaxPooling
from marl_pool.utils.errors import InputError, explain_os_errors
from marl_pool.utils.randomness import EVALUATION_ENVS

NOT_SIMULATED = (
    *("arrivals", "departures", "continuous_actions"),
    *("reward_power", "least_noise_offset", "signal_acceleration"),
)
"""Options of `SimpleCentroid` of which the page has only the defaults."""
GOLDEN_STEPS = 16
"""Steps in which the page is compared with torch."""
ACTIVATION_NAMES = {nn.Identity: "none"} | {
    ACTIVATIONS[name]: name for name in ACTIVATIONS
}
"""Names of activation functions in the page's JavaScript."""
HEAD, SCRIPTS = '<meta charset="utf-8">', re.compile(r"<script>(.*?)</script>", re.S)
SECURITY_POLICY = (
    "default-src 'none'; script-src {scripts}; style-src 'unsafe-inline'; "
    "img-src data:; base-uri 'none'; form-action 'none'"
)
"""The Content-Security-Policy of an exported page, which loads and sends nothing."""
CHAINS = re.compile(r"const CHAIN = .*;")
"""The page's perturbations of tokens and of actions."""
ENGINE, SCRIPT, DATA = "/*ENGINE*/", "engine.js", "const DEMO = "


def export(targets: Mapping[str, EvaluationTarget], path: Path, seed: int = 0) -> Path:
    """Write a page that runs policies in the browser, without a server.

    All policies must have equal environments: `SimpleCentroid`, or a `CartPole` with
    one frame and no noise. ``path`` is a new HTML file, and ``seed`` the seed of its
    first episode.

    Raises:
        InputError: the file exists, or the page's JavaScript does not have the
            environment, a policy or the seed.
    """
    if path.exists():
        raise InputError(f"--export: expected a new file, got {path}, which exists")
    if seed > MAX_SEED:
        raise InputError(f"--export: expected a seed <= {MAX_SEED:,}, got {seed:,}")
    session = Session(targets, seed)
    env = session.lanes[0].episode.env
    world = describe_world(env)
    for target in targets.values():
        _validate_options(type(env), target.env)
    hello = session.hello()
    if isinstance(env, CartPole):
        hello["adds"] = False  # noise sensors are the environment's, not injected
    for perturbation in hello["perturbations"]:
        if perturbation["name"] not in simulated_perturbations():
            perturbation["unfit"] = "exported pages do not have it"
    demo = {
        "hello": hello,
        "seed": seed,
        "has_self": env.groups[session.group].tokens.has_self,
        "env": world,
        "policies": [
            describe_policy(name, target.policies[session.group])
            for name, target in targets.items()
        ],
        "golden": [golden(target, seed) for target in targets.values()],
    }
    # A closing tag within the data would end the script.
    data = json.dumps(demo, separators=(",", ":")).replace("<", "\\u003c")
    with explain_os_errors(f"--export: {path} cannot be written"):
        make_folder(path.parent)
    with new_file(path) as out:
        out.write(wrapped(data))
    return path


def page() -> str:
    """Return the page, one HTML file."""
    return (files("marl_pool.play") / "page.html").read_text(encoding="utf-8")


def wrapped(data: str) -> str:
    """Return the page with the data of a demonstration, JSON on one line."""
    script = (files("marl_pool.play") / SCRIPT).read_text(encoding="utf-8")
    whole = page().replace(ENGINE, f"{DATA}{data};\n{script}")
    # No other script may run in the page.
    hashes = [sha256(text.encode()).digest() for text in SCRIPTS.findall(whole)]
    sources = " ".join(
        f"'sha256-{base64.b64encode(digest).decode()}'" for digest in hashes
    )
    policy = SECURITY_POLICY.format(scripts=sources)
    meta = f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
    return whole.replace(HEAD, f"{HEAD}\n{meta}", 1)


def simulated_perturbations() -> set[str]:
    """Return the names of the perturbations in the page's JavaScript."""
    script = (files("marl_pool.play") / SCRIPT).read_text(encoding="utf-8")
    lists = CHAINS.search(script)
    assert lists is not None
    return set(re.findall(r'"(\w+)"', lists[0]))


def data_of(exported: str) -> str:
    """Return the data of an exported page; see `wrapped`."""
    return exported.partition(DATA)[2].partition(";\n")[0]


def _validate_options(env_type: type[BatchedEnv], env: Mapping[str, Any]) -> None:
    """Raise InputError if options of an env are not those that the page simulates."""
    parameters = options_of(SimpleCentroid)
    for key in NOT_SIMULATED if env_type is SimpleCentroid else ():
        default = to_jsonable_python(parameters[key].default)
        if (value := env.get(key, default)) != default:
            raise InputError(f"--export: expected env.{key}={default}, got {value}")


def describe_world(env: BatchedEnv) -> dict[str, Any]:
    """Return the constants of an environment that the page can simulate.

    Raises:
        InputError: another environment, a subclass of these included.
    """
    common = {"first_env": EVALUATION_ENVS, "max_steps": env.max_steps}
    # A subclass may differ in anything.
    if type(env) is SimpleCentroid:
        group = env.groups["agent"]
        types = env.observe()["agent"].types[0]
        names = ("num_agents", "num_signal", "num_noise", "spread", "noise_offset")
        return {
            "name": "simple_centroid",
            **common,
            **{name: getattr(env, name) for name in (*names, "reward_scale", "extent")},
            "feature_scale": env.feature_scale,
            "acceleration": AGENT_ACCELERATION,
            "orders": env.token_entities("agent").tolist(),
            "token_types": [types[i].tolist() for i in range(group.num_agents)],
        }
    if type(env) is CartPole and env.num_frames == 1 and not env.noise_channels:
        channels = env.channel_names()
        return {
            "name": "cartpole",
            **common,
            "start_speed": env.start_speed,
            "start_angle": env.start_angle,
            "order": [channels.index(name) for name in channels],
            "token_types": env.observe()["agent"].types[0, 0].tolist(),
        }
    raise InputError(
        "--export: expected the env simple_centroid, or cartpole with num_frames=1 and "
        f"noise_channels=0, got {type(env).__name__}"
    )


def describe_policy(name: str, policy: Policy) -> dict[str, Any]:
    """Return the weights and options of a policy that the page can compute.

    Raises:
        InputError: another kind of policy, or a subclass of its parts.
    """
    if isinstance(policy, SpecifiedPolicy):
        policy = policy.to_save()
    if type(policy) is TokenPolicy and policy.value_network is None:
        return _token(name, policy)
    if type(policy) is Sensory and type(policy.sensor) is AttentionNeuronPooling:
        return _sensory(name, policy)
    raise _unknown(name, type(policy).__name__)


def _token(name: str, policy: TokenPolicy) -> dict[str, Any]:
    network = policy.network
    encoder, pooling = network.encoder, network.pooling
    layers: Any = ()
    final_norm = False
    if type(encoder) is TransformerEncoder:
        layers, final_norm = encoder.layers, encoder.final_norm is not None
    elif type(encoder) is not IdentityEncoder:
        raise _unknown(name, type(encoder).__name__)
    if type(network) is not SetNetwork or type(network.embedding) is not TokenEmbedding:
        raise _unknown(name, "another network")
    if network.embedding.adds:
        raise _unknown(name, "an added type embedding")
    head: dict[str, Any] = {"name": "max"}
    if type(pooling) is AdaPooling and isinstance(pooling.query, str):
        head = {
            "name": "ada",
            "query": pooling.query,
            "residual": pooling.residual,
            "heads": pooling.attention.num_heads,
            "scale": pooling.attention.scale,
        }
    elif type(pooling) is AvgPooling:
        head = {"name": "avg"}
    elif type(pooling) is not MaxPooling:
        raise _unknown(name, type(pooling).__name__)
    return {
        "kind": "token",
        "network": "network",
        **_bounds(policy),
        "width": network.dim_out,
        "layers": [
            {
                "heads": layer.attention.num_heads,
                "scale": layer.attention.scale,
                "activation": ACTIVATION_NAMES[type(layer.feedforward[1])],
            }
            for layer in layers
        ],
        "final_norm": final_norm,
        "input_activation": ACTIVATION_NAMES[type(network.embedding.activate)],
        "activation": policy.activation,
        "head": _places(policy.action_head),
        "pooling": head,
        "weights": _weights(policy, skip="value_head."),
    }


def _sensory(name: str, policy: Sensory) -> dict[str, Any]:
    sensor = policy.sensor
    assert isinstance(sensor, AttentionNeuronPooling)
    plain = sensor.activation == "tanh" and not sensor.expected_tokens
    if sensor.cell is None or not plain or sensor.dim != 1:
        raise _unknown(name, "attention neurons without an LSTM, or of images")
    return {
        "kind": "sensory",
        **_bounds(policy),
        "units": sensor.cell.hidden_size,
        "table": sensor.table.tolist(),
        "scale": sensor.scale,
        "squash": sensor.squash,
        "body": _places(policy.body),
        "weights": _weights(policy),
    }


def golden(target: EvaluationTarget, seed: int) -> list[Any]:
    """Play the first unperturbed steps in float64.

    Returns:
        For each step, all actions in one row, in the environment's units; the first
        agent's attention; and the mean return so far.
    """
    env = replace(target, seed=seed).make_env(1, dtype=torch.float64)
    group = next(iter(env.groups))
    episode = LiveEpisode(target, env, None, explore=False)
    steps = []
    for _ in range(GOLDEN_STEPS):
        weights = episode.attention(episode.perceived()[group], group)
        episode.step()
        attention = [] if weights is None else weights[0].tolist()
        total = episode.mean_return(group)
        steps.append([episode.actions[group].flatten().tolist(), attention, total])
        if episode.over:
            break
    return steps


def _bounds(policy: TokenPolicy | Sensory) -> dict[str, Any]:
    return {
        "n": policy.actions.n,
        "low": policy.low.tolist(),
        "high": policy.high.tolist(),
    }


def _places(layers: nn.Sequential) -> list[int]:
    return [i for i, layer in enumerate(layers) if isinstance(layer, nn.Linear)]


def _weights(policy: nn.Module, skip: str = "\n") -> dict[str, Any]:
    """Return the parameters as base64 of float32, in which they are trained."""
    return {
        name: [
            list(weight.shape),
            base64.b64encode(weight.detach().float().numpy().tobytes()).decode(),
        ]
        for name, weight in policy.named_parameters()
        if not name.startswith(skip)
    }


def _unknown(name: str, actual: str) -> InputError:
    return InputError(
        "--export: expected a token policy with a transformer or no encoder and the "
        "pooling ada, avg or max, or attention neurons with an LSTM, "
        f"got {actual} in {name}"
    )
