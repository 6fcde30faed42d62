"""Benchmarks of learning: one iteration, and the time to a goal."""

import math
import statistics
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from benchmarks.common import (
    Row,
    Size,
    Task,
    build,
    by_torch,
    compare,
    finished_returns,
    on,
    seconds,
    taking_turns,
    task_of,
)
from benchmarks.sampling import floor_of
from marl_pool.compiled import CompiledTokenPolicy
from marl_pool.compiled.choice import use_kernels
from marl_pool.compiled.ppo import Coefficients, RecordedSteps, ppo_gradient
from marl_pool.config import compose
from marl_pool.policies.actions import log_prob, mode
from marl_pool.policies.token_policy import TokenPolicy
from marl_pool.tokens import Tokens
from marl_pool.training.optimization import FlatParameters
from marl_pool.training.ppo.module import build_policy
from marl_pool.training.ppo.train import RETURN_WINDOW

GOALS = {"time_to_return": -1.45, "time_to_skill": -0.72}
"""Mean returns: the published code's after 18 iterations, and 0.8 of the way
from random actions (-1.89) to a controller that knows the centroid (-0.43)."""
PUBLISHED = {
    "time_to_return": "published code: 234 s, one seed, measured elsewhere",
    "time_to_skill": "published code: not reached",
}

Climb = dict[str, tuple[float, int] | None]
"""Seconds and env steps to each goal; None if it was not reached."""


def iteration(name: str, ppo: str = "paper") -> Callable[[Size], Iterator[Row]]:
    """Measure one iteration of training, compared with torch and with its parts."""
    suffix = "" if ppo == "paper" else f"/{ppo}"

    def measure(size: Size) -> Iterator[Row]:
        task = task_of(name, size)
        config = task.iteration(size, ppo)
        algo = build(config)
        (spec,) = algo.config.rl_module_spec.rl_module_specs.values()
        policy = build_policy(spec.model_config).to(size.device)
        contenders = {
            "ours": algo.train,
            "parts": parts_of(policy, task, size, config),
            "torch": by_torch(algo.train),
        }
        rounds = min(size.iterations, task.iterations)
        if ppo != "paper":
            rounds = size.rounds
        # An iteration by torch is too expensive for a warm-up.
        algo.train()
        times = taking_turns(contenders, rounds, warm_up=False)
        algo.stop()
        ours, parts = times["ours"], times["parts"]
        overhead = statistics.median(
            1 - b / a for a, b in zip(ours, parts, strict=True)
        )
        settings = config["ppo"]
        note = (
            task.about("iteration") if ppo == "paper" else "",
            f"{settings['batch_size']} steps, {settings['num_epochs']} epochs",
            f"not environment or network: {100 * overhead:.0f} %",
        )
        beside = ours, times["torch"], "kernels=torch"
        text = "; ".join(filter(None, note))
        yield compare(f"iteration/{name}{suffix}", *beside, note=text)

    return measure


def iteration_of_critic(critic: str) -> Callable[[Size], Iterator[Row]]:
    """Measure one iteration in simple_spread with a critic, compared with torch."""

    def measure(size: Size) -> Iterator[Row]:
        overrides = ["env=simple_spread", "ppo=fast_spread", f"critic={critic}"]
        if size.tiny:
            overrides += ["ppo.batch_size=384", "ppo.num_epochs=1"]
        config = compose("train", [*overrides, *on(size.device)])
        algo = build(config)
        algo.train()
        contenders = {"ours": algo.train, "torch": by_torch(algo.train)}
        rounds = min(size.iterations, size.rounds)
        times = taking_turns(contenders, rounds, warm_up=False)
        algo.stop()
        settings = config["ppo"]
        note = f"{settings['batch_size']} steps, {settings['num_epochs']} epochs"
        beside = times["ours"], times["torch"], "kernels=torch"
        yield compare(f"iteration/{critic}_critic", *beside, note=note)

    return measure


def parts_of(
    policy: TokenPolicy, task: Task, size: Size, config: dict[str, Any]
) -> Callable[[], None]:
    """Return a function that computes an iteration's environment steps and networks.

    There is one fragment of steps, by one thread as in the runner, and for each
    minibatch a forward and a backward pass, in one call where the learner has one.
    """
    settings, env = config["ppo"], task.make_env(size)
    sample = floor_of(policy, env, settings["batch_size"] // task.num_envs)
    minibatch = settings["minibatch_size"] or settings["batch_size"]
    updates = settings["num_epochs"] * (settings["batch_size"] // minibatch)
    (observed,) = (tokens.flatten_batch() for tokens in env.observe().values())
    rows = torch.arange(minibatch, device=size.device) % len(observed.types)
    backpropagate = gradient_of(policy, observed.map(lambda part: part[rows]))

    def run() -> None:
        policy.eval()
        torch.set_num_threads(1)
        sample()
        policy.train()  # with dropout
        torch.set_num_threads(config["threads"])
        for _ in range(updates):
            backpropagate()

    return run


def gradient_of(policy: TokenPolicy, tokens: Tokens) -> Callable[[], None]:
    """Return a function that computes the policy's outputs, and back."""
    actor = CompiledTokenPolicy(policy)
    with torch.no_grad():
        logits, values = actor(tokens)
    if actor.actor_critic(tokens) is None:

        def by_autograd() -> None:
            logits, values = actor(tokens)
            (logits.sum() + values.sum()).backward()

        return by_autograd
    actions = mode(policy.actions, logits)
    flat = FlatParameters(policy.parameters())
    log_probs = log_prob(policy.actions, logits, actions)
    recorded = RecordedSteps(
        actions, log_probs, logits, values, values, policy.actions.sizes
    )
    terms = Coefficients(clip=0.2, value=0.5, value_clip=math.inf, entropy=0.0, kl=0.0)

    def in_one_call() -> None:
        actor_critic = actor.actor_critic(tokens)
        assert actor_critic is not None
        flat.view_grad()
        ppo_gradient(actor_critic, terms, recorded, None)

    return in_one_call


def two_learners(name: str) -> Callable[[Size], Iterator[Row]]:
    """Measure the same iteration by two learner processes of one thread each."""

    def measure(size: Size) -> Iterator[Row]:
        task = task_of(name, size)
        config = task.iteration(size, num_learners=2)
        algo = build(config)
        algo.train()
        rounds = min(size.iterations, task.iterations)
        times = [seconds(algo.train) for _ in range(rounds)]
        algo.stop()
        settings = config["ppo"]
        workload = f"{settings['batch_size']} steps, {settings['num_epochs']} epochs"
        yield Row(
            f"iteration/{name}/two_learners",
            statistics.median(times),
            "s",
            task.about("iteration"),
            note=f"{workload}; 2 processes of one thread; memory is the driver's",
        )

    return measure


def time_to_goals(size: Size) -> Iterator[Row]:
    """Measure seconds until the mean return reaches goals, also by torch."""
    ours: list[Climb] = []
    torchs: list[Climb] = []
    for seed in range(size.seeds):
        ours.append(climb(seed, size.limit, size.device))
        with use_kernels("torch"):
            torchs.append(climb(seed, size.limit, size.device))
    for name, goal in GOALS.items():
        times, steps = median_of([climb[name] for climb in ours])
        beside, beside_steps = median_of([climb[name] for climb in torchs])
        comparator = "kernels=torch: not reached"
        if beside is not None:
            comparator = f"kernels=torch: {beside:.3g} s, {beside_steps:,} env steps"
        note = f"return >= {goal}; {spread(name, ours, size)}"
        yield Row(
            f"{name}/simple_centroid",
            times,
            "s",
            f"{comparator}; {PUBLISHED[name]}",
            None if times is None or beside is None else beside / times,
            note if steps is None else f"{note}; {steps:,} env steps at the median",
        )


def median_of(
    results: Sequence[tuple[float, int] | None],
) -> tuple[float, int] | tuple[None, None]:
    """Return the seconds and env steps of the median seed, if it reached the goal."""
    reached = sorted(result for result in results if result is not None)
    middle = (len(results) - 1) // 2
    return reached[middle] if middle < len(reached) else (None, None)


def spread(name: str, climbs: list[Climb], size: Size) -> str:
    """Describe the fastest and the slowest seed, and those that failed."""
    reached = sorted(
        result[0] for climb in climbs if (result := climb[name]) is not None
    )
    text = f"{len(climbs)} seeds"
    if reached:
        text += f": {reached[0]:.0f} to {reached[-1]:.0f} s"
    failed = len(climbs) - len(reached)
    return f"{text}; {failed} failed within {size.limit:.0f} s"


def climb(seed: int, limit: float, device: str) -> Climb:
    """Train with ``ppo=fast`` until every goal is reached or the time is up."""
    return reach(compose("train", [f"seed={seed}", *on(device)]), "agent", GOALS, limit)


def reach(
    config: dict[str, Any],
    group: str,
    goals: Mapping[str, float],
    limit: float,
    most_steps: float = math.inf,
) -> Climb:
    """Train until a group's mean return has reached goals, or time or steps are up.

    The clock starts before the first iteration; a check is an iteration in which
    episodes ended. Returns the seconds and env steps for each goal.
    """
    algo = build(config)
    returns: deque[float] = deque(maxlen=RETURN_WINDOW)
    result: Climb = dict.fromkeys(goals)
    streaks = dict.fromkeys(goals, 0)
    steps, began = 0, time.perf_counter()
    while (
        None in result.values()
        and steps < most_steps
        and time.perf_counter() - began < limit
    ):
        sampled = algo.train()["env_runners"]
        steps = int(sampled["num_env_steps_sampled_lifetime"])
        finished = finished_returns(sampled, group)
        returns.extend(finished)
        if not finished or len(returns) < RETURN_WINDOW:
            continue
        for name, goal in goals.items():
            reached = statistics.fmean(returns) >= goal
            streaks[name] = streaks[name] + 1 if reached else 0
            if streaks[name] >= 2 and result[name] is None:
                result[name] = time.perf_counter() - began, steps
    algo.stop()
    print(f"  seed {config['seed']}: {result}", file=sys.stderr, flush=True)
    return result
