"""Evolution, one generation at a time: sample, evaluate, update, validate."""

import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from typing_extensions import override

from marl_pool.envs.description import validate_env_change
from marl_pool.files.atomic import new_binary_file, write_json
from marl_pool.files.reading import read_npz
from marl_pool.options.construction import build
from marl_pool.policies.agent import Agent, load_vector, to_vector
from marl_pool.policies.storage import save_policies
from marl_pool.runs.run import Best, Run, iteration_of
from marl_pool.training.errors import StepError, writing
from marl_pool.training.evolution import STRATEGIES
from marl_pool.training.evolution.evaluator import (
    Evaluator,
    OutOfTimeError,
    PopulationTask,
    Workers,
)
from marl_pool.training.evolution.strategy import Strategy
from marl_pool.training.fixed_policies import load_saved
from marl_pool.training.jobs import with_absolute_folders
from marl_pool.training.loop import Iteration, TrainingLoop, TrainingMethod, never
from marl_pool.training.same_policy import validate_same
from marl_pool.training.settings import EvolveConfig, validate_gpus
from marl_pool.utils.errors import InputError
from marl_pool.utils.randomness import VALIDATION_ENVS
from marl_pool.utils.text import print_line, quoted

SEARCH, STATE, BEST = "strategy.npz", "state.json", "best"
"""Files of a checkpoint, and the folder of the best solution so far."""
SAVED_BEST = "saved_best"
"""Key of `STATE`: generation and score of the best solution, or null."""
MOST_EPISODES = 1 << 26
"""Maximum episodes of a generation, whose returns are held in memory."""
COUNTED = ("steps", "episodes", "seconds")
"""Attributes in the file `STATE`."""


def evolve(
    run: Run, config: EvolveConfig, should_stop: Callable[[], bool] = never
) -> None:
    """Evolve until the generations or the time limit are used up.

    The run receives metrics, checkpoints and the best policy; with a checkpoint, it
    continues from there. See `Job.function` for the arguments.

    Raises:
        InputError: parts of the configuration that do not fit each other.
        StoppedError: a return was not finite, a worker failed for good, or the disk is
            full; the last good checkpoint remains.
    """
    config = with_absolute_folders(config)
    TrainingLoop(run, config, should_stop).train(
        lambda checkpoint: EvolutionMethod(run, config, checkpoint)
    )


class EvolutionMethod(TrainingMethod):
    """Search for the parameters of a policy by the returns of whole populations."""

    unit = "generations"

    def __init__(self, run: Run, config: EvolveConfig, checkpoint: Path | None) -> None:
        super().__init__(run, config.total_generations)
        self.config, resources = config, config.resources
        validate_gpus("worker", resources.num_workers, resources.num_gpus_per_worker)
        self.evaluator = Evaluator(config)
        self.fitness_env = {**config.env, **config.fitness_env}
        if config.fitness_env:
            validate_env_change(config.env, config.fitness_env, "fitness_env")
        # A resumed run needs no initial policy, whose folder may be gone.
        init = config.init if checkpoint is None else "policy"
        agent, group = self.evaluator.agent, self.evaluator.group
        start = start_vector(init, agent, group, config.plugins)
        self.strategy: Strategy = build(
            config.evolution.name,
            STRATEGIES,
            "evolution",
            Strategy,
            config.evolution.arguments,
            {"start": start.cpu(), "seed": config.seed},
        )
        episodes = self.strategy.population * config.repetitions
        if episodes > MOST_EPISODES:
            raise InputError(
                f"repetitions: expected at most {MOST_EPISODES:,} episodes per "
                f"generation (repetitions times population), got {episodes:,}"
            )
        self.generation = self.steps = self.episodes = 0
        self.seconds = 0.0
        self.best: Tensor = start.double().cpu()
        self.saved_best: Best | None = None

    @override
    @contextmanager
    def session(self) -> Iterator[None]:
        resources = self.config.resources
        self.runner: Evaluator | Workers = self.evaluator
        with ExitStack() as stack:
            if resources.num_workers:
                # Import here: without workers, ray is not needed.
                from marl_pool.training.cluster import ray_session

                session = ray_session(
                    resources.address,
                    num_cpus=resources.num_workers + 1,
                    resume=f"resume with: marl-pool resume {quoted(self.run.path)}",
                )
                stack.enter_context(session)
                self.runner = Workers(self.evaluator, self.config, self.run)
            elif resources.address:
                print_line("resources.address: not used, as the run has no num_workers")
            self.runner.is_late = self.is_late
            yield

    @property
    @override
    def done(self) -> int:
        return self.generation

    @override
    def where(self, iteration: int) -> str:
        return f"generation {iteration}"

    # Generations

    @override
    def step(self, iteration: int) -> Iteration | None:
        if self.config.time_limit is None:
            return self._step(iteration)
        # At the time limit, give up the generation; a resumed run repeats it.
        names = ("generation", "steps", "episodes")
        counts = {name: getattr(self, name) for name in names}
        search = self.strategy.state_dict()
        try:
            return self._step(iteration)
        except OutOfTimeError:
            vars(self).update(counts)
            self.strategy.load_state_dict(search)
            return None

    def _step(self, iteration: int) -> Iteration:
        config, began = self.config, time.monotonic()
        # Sample members and measure each one's fitness in the same environments.
        vectors = self.strategy.ask(iteration)
        env_ids = torch.arange(config.repetitions)
        played = self.runner.play(
            vectors, PopulationTask(env_ids, iteration, self.fitness_env)
        )
        fitness = played.returns.mean(1)
        if not fitness.isfinite().all():
            raise StepError("a return is not finite")
        self.strategy.tell(vectors, fitness)
        self.generation = iteration
        self.steps += int(played.lengths.sum())
        self.episodes += played.lengths.numel()
        # Validate in the run's `env`, not in `fitness_env`; keep the best solution.
        validated = {}
        is_due = iteration % config.validation.every == 0
        if is_due or iteration in (1, self.total):
            validated = self._validate(vectors[fitness.argmax()])
        seconds = time.monotonic() - began
        self.seconds += seconds
        row = {
            "env_steps": self.steps,
            "episodes": self.episodes,
            "seconds": self.seconds,
            "fitness_mean": float(fitness.mean()),
            "fitness_max": float(fitness.max()),
            "fitness_min": float(fitness.min()),
            "step_size": self.strategy.step_size,
            **validated,
            "generations_per_second": 1 / seconds,
            "rollouts_per_second": played.lengths.numel() / seconds,
        }
        progress = {
            "fitness": row["fitness_mean"],
            "validated": self.run.best.score if self.run.best else float("nan"),
            "rollouts_per_second": row["rollouts_per_second"],
        }
        return Iteration(row, progress)

    def _validate(self, best_sample: Tensor) -> dict[str, float]:
        """Validate the search's center and the fittest member; save a new best."""
        # Training never sees these environments.
        env_ids = torch.arange(self.config.validation.episodes) + VALIDATION_ENVS
        vectors = torch.stack((self.strategy.center, best_sample))
        played = self.runner.play(
            vectors, PopulationTask(env_ids, 0, dict(self.config.env))
        )
        returns = played.returns.mean(1)
        if not returns.isfinite().all():
            raise StepError("a validation return is not finite")
        # Save the better of the two if it beats the best so far.
        score = float(returns.max())
        if self.accept(score):
            self.best = vectors[returns.argmax()]
            self._save_best(Best(self.generation, score))
        kinds = ("validation_center", "validation_best_sample")
        return dict(zip(kinds, returns.tolist(), strict=True))

    def _save_best(self, best: Best) -> None:
        self.saved_best = best
        with (
            writing(self.run, self.where(self.generation), "the policy"),
            self.run.save_policy_dir(best) as folder,
        ):
            self._save_vector(self.best, folder)

    @override
    def accept(self, score: float) -> bool:
        # A run that was killed after it saved its best policy and before its
        # checkpoint repeats the generation, and must find the same policy again.
        best = self.run.best
        is_current = best is not None and best.iteration == self.generation
        return is_current or super().accept(score)

    # Checkpoints

    @override
    def save(self, checkpoint: Path) -> None:
        state = self.strategy.state_dict()
        with new_binary_file(checkpoint / SEARCH) as out:
            np.savez(out, best=self.best.numpy(), allow_pickle=False, **state)
        self._save_vector(self.strategy.center, checkpoint / "policy")
        self._save_vector(self.best, checkpoint / BEST)
        counts = {name: getattr(self, name) for name in COUNTED}
        best = self.saved_best and self.saved_best._asdict()
        write_json(checkpoint / STATE, counts | {SAVED_BEST: best})

    @override
    def restore(self, checkpoint: Path) -> None:
        counts = json.loads((checkpoint / STATE).read_text())
        for name in COUNTED:
            setattr(self, name, counts[name])
        state = read_npz(checkpoint / SEARCH)
        self.best = torch.from_numpy(state.pop(BEST))
        self.strategy.load_state_dict(state)
        self.generation = iteration_of(checkpoint)
        if (saved := counts.get(SAVED_BEST)) is None:
            return
        self.saved_best = Best(**saved)
        try:
            damage = "" if self.run.best else f"{self.run.policy_dir} is missing"
        except InputError as error:
            damage = str(error)
        if damage:
            self._save_best(self.saved_best)
            number = self.saved_best.iteration
            print_line(f"{damage}; restored from generation {number}")

    def _save_vector(self, vector: Tensor, folder: Path) -> None:
        agent, group = self.evaluator.agent, self.evaluator.group
        load_vector(agent, vector.to(agent.low))
        save_policies({group: agent}, {group: group}, folder)


def start_vector(init: str, agent: Agent, group: str, plugins: Sequence[str]) -> Tensor:
    """Return the initial mean of the search, ``(n,)``.

    Args:
        init: ``policy``, ``zeros``, or what `load_saved` reads.
        agent: agent with initial weights.
        group: group of the agent.
        plugins: ``package.module:Class`` names that the folder may use.

    Raises:
        InputError: no policy in the folder, or one that differs from the agent in form.
    """
    vector = to_vector(agent)
    if init == "policy":
        return vector
    if init == "zeros":
        return torch.zeros_like(vector)
    try:
        policy = load_saved(init, group, plugins, "policy, zeros, ")
        validate_same(policy.eval(), agent, init)
    except InputError as error:
        raise InputError(f"init: {error}") from error
    assert isinstance(policy, Agent)
    return to_vector(policy)
