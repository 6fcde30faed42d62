"""The driver: ask, play, tell, validate, log, checkpoint."""

import json
import time
from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from marl_pool.atomic import new_binary_file, new_file
from marl_pool.construction import build
from marl_pool.errors import StoppedError
from marl_pool.policies.population import load_vector
from marl_pool.policies.storage import save_policies
from marl_pool.progress import Progress
from marl_pool.randomness import VALIDATION_WORLDS
from marl_pool.reading import read_npz
from marl_pool.runs import PARTS, Best, Run, iteration_of
from marl_pool.training.evolution import STRATEGIES
from marl_pool.training.evolution.curriculum import check_options, env_at
from marl_pool.training.evolution.evaluator import Evaluator, Task
from marl_pool.training.evolution.start import OWN, start_vector
from marl_pool.training.evolution.strategy import Strategy
from marl_pool.training.evolution.workers import Player, players
from marl_pool.training.interrupt import Interruptible
from marl_pool.training.stopping import (
    checkpoint_to_resume,
    reading,
    stopped,
    trim_log,
    writing,
)

SEARCH, STATE, BEST = "strategy.npz", "state.json", "best"
"""Files of a checkpoint, and the folder of the best solution so far."""


def evolve(run: Run, config: Mapping[str, Any]) -> None:
    """Evolve until the generations or the seconds are used up.

    It goes on from the last checkpoint, if there is one.

    Args:
        run: takes the metrics, the checkpoints and the best policy.
        config: composed and checked, as in ``run.config``.

    Raises:
        InputError: parts of the configuration that don't fit each other.
        StoppedError: a return was not finite, a worker failed for good, or the disk is
            full; the last good checkpoint stays.
    """
    torch.set_num_threads(config["threads"])
    evolution = Evolution(run, config)
    if config != run.config:
        run.write_config(config)
    with players(evolution.evaluator, config, run) as player:
        evolution.loop(player)


class Validation(NamedTuple):
    """Mean returns in the worlds by which solutions are chosen."""

    favourite: float
    best_sample: float


class Evolution:
    """One process's search of one run.

    Args:
        run: takes the results.
        config: of the run.

    Raises:
        InputError: parts of the configuration that don't fit each other.
    """

    def __init__(self, run: Run, config: Mapping[str, Any]) -> None:
        self.run, self.config = run, config
        self.evaluator = Evaluator(config)
        self._check_training_env()
        agent, options = self.evaluator.agent, dict(config["evolution"])
        # A run that goes on needs no start: its folder may be gone by then.
        init = OWN if checkpoint_to_resume(run) else config["init"]
        start = start_vector(init, agent, config["plugins"])
        self.strategy: Strategy = build(
            options.pop("name"),
            STRATEGIES,
            "evolution",
            Strategy,
            options,
            {"start": start.cpu(), "seed": config["seed"]},
        )
        self.generation = self.steps = self.episodes = 0
        self.seconds = 0.0
        self.best: Tensor = start.double().cpu()

    def loop(self, player: Player) -> None:
        """Run generations; see `evolve`."""
        self._resume()
        limit, total = self.config["time_limit"], self.config["total_generations"]
        began = time.monotonic()
        with (
            Progress(
                total, unit="generations", done=self.generation, time_limit=limit
            ) as progress,
            Interruptible() as ctrl_c,
        ):
            while self.generation < total and not ctrl_c.asked:
                self._iterate(player, progress)
                if limit is not None and time.monotonic() - began >= limit:
                    break
        self._save()
        if ctrl_c.asked:
            raise KeyboardInterrupt

    def _iterate(self, player: Player, progress: Progress) -> None:
        began, number = time.monotonic(), self.generation + 1
        vectors = self.strategy.ask(number)
        share = (number - 1) / self.config["curriculum_generations"]
        worlds = torch.arange(self.config["repetitions"])
        played = player.play(vectors, Task(worlds, number, self._env(share)))
        fitness = played.returns.mean(1)
        if not fitness.isfinite().all():
            raise self._stopped("a return is not finite")
        self.strategy.tell(vectors, fitness)
        self.generation = number
        self.steps += int(played.lengths.sum())
        self.episodes += played.lengths.numel()
        row = {
            "iteration": number,
            "env_steps": self.steps,
            "episodes": self.episodes,
            "seconds": self.seconds,
            # Of worlds with `fitness_env`; validation is in the run's own env.
            "fitness_mean": float(fitness.mean()),
            "fitness_max": float(fitness.max()),
            "fitness_min": float(fitness.min()),
            "step_size": self.strategy.step_size,
        }
        if number == 1 or number % self.config["validation"]["every"] == 0:
            found = self._validate(player, vectors[fitness.argmax()])
            row["validation_favourite"] = found.favourite
            row["validation_best_sample"] = found.best_sample
        seconds = time.monotonic() - began
        self.seconds += seconds
        row["seconds"] = self.seconds
        row["generations_per_second"] = 1 / seconds
        row["rollouts_per_second"] = played.lengths.numel() / seconds
        with self._writing("metrics.csv"):
            self.run.log(row)
        progress.update(
            number,
            fitness=row["fitness_mean"],
            validated=self.run.best.score if self.run.best else float("nan"),
            rollouts_per_second=row["rollouts_per_second"],
        )
        if number % self.config["checkpoint"]["every"] == 0:
            self._save()

    def _check_training_env(self) -> None:
        curriculum, fixed = self.config["curriculum"], self.config["fitness_env"]
        if fixed:
            self.evaluator.check({**self.config["env"], **fixed}, "fitness_env")
        if not curriculum:
            return
        check_options(self.config["env"], curriculum, fixed)
        for share in (0.0, 1.0):
            self.evaluator.check(self._env(share), "curriculum")

    def _env(self, share: float) -> dict[str, Any]:
        """Training's worlds when ``share`` of the curriculum is done."""
        env = {**self.config["env"], **self.config["fitness_env"]}
        return env_at(env, self.config["curriculum"], share)

    def _validate(self, player: Player, best_sample: Tensor) -> Validation:
        """Measure the favourite and a member; the best so far is the run's policy."""
        count = self.config["validation"]["episodes"]
        worlds = torch.arange(count) + VALIDATION_WORLDS
        vectors = torch.stack((self.strategy.favourite, best_sample))
        played = player.play(vectors, Task(worlds, 0, dict(self.config["env"])))
        returns = played.returns.mean(1)
        if not returns.isfinite().all():
            raise self._stopped("a return of the validation is not finite")
        best, score = self.run.best, float(returns.max())
        # A generation that is played again, since the run was killed after it had
        # marked its best and before its checkpoint, finds what it found.
        again = best is not None and best.iteration == self.generation
        if best is None or again or score > best.score:
            self.best = vectors[returns.argmax()]
            best = Best(self.generation, score)
            with self._writing("the policy"), self.run.save_policy_dir(best) as folder:
                self._save_policy(self.best, folder)
        return Validation(*returns.tolist())

    def _save_policy(self, vector: Tensor, folder: Path) -> None:
        agent, group = self.evaluator.agent, self.evaluator.group
        load_vector(agent, vector.to(agent.low))
        save_policies({group: agent}, {group: group}, folder)

    def _save(self) -> None:
        """Checkpoint: the search, its favourite and the best solution so far."""
        latest = self.run.latest_checkpoint()
        saved = 0 if latest is None else iteration_of(latest)
        if self.generation == saved:
            return
        with self._writing("the checkpoint"):
            with self.run.checkpoint(self.generation, PARTS["evolve"]) as folder:
                self._write_checkpoint(folder)
            self.run.prune(self.config["checkpoint"]["keep"])

    def _write_checkpoint(self, folder: Path) -> None:
        state = self.strategy.state_dict()
        with new_binary_file(folder / SEARCH) as out:
            np.savez(out, best=self.best.numpy(), allow_pickle=False, **state)
        self._save_policy(self.strategy.favourite, folder / "policy")
        self._save_policy(self.best, folder / BEST)
        counts = {
            "steps": self.steps,
            "episodes": self.episodes,
            "seconds": self.seconds,
        }
        with new_file(folder / STATE) as out:
            json.dump(counts, out)

    def _resume(self) -> None:
        checkpoint = self.run.latest_checkpoint()
        if checkpoint is not None:
            with reading(self.run, checkpoint):
                self._load(checkpoint)
        with self._writing("metrics.csv"):
            trim_log(self.run, self.generation)

    def _load(self, checkpoint: Path) -> None:
        counts = json.loads((checkpoint / STATE).read_text())
        state = read_npz(checkpoint / SEARCH)
        self.best = torch.from_numpy(state.pop(BEST))
        self.strategy.load_state_dict(state)
        self.steps, self.episodes = counts["steps"], counts["episodes"]
        self.seconds = counts["seconds"]
        self.generation = iteration_of(checkpoint)

    def _writing(self, what: str) -> AbstractContextManager[None]:
        return writing(self.run, self._where, what)

    def _stopped(self, reason: str) -> StoppedError:
        return stopped(self.run, self._where, reason)

    @property
    def _where(self) -> str:
        return f"generation {self.generation + 1}"
