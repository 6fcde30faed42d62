"""The driver: build, train, log, checkpoint, stop for good reasons."""

import json
import math
import sys
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import ray
import torch
from ray.exceptions import RayError
from ray.rllib.utils.metrics import (
    ALL_MODULES,
    ENV_RUNNER_RESULTS,
    LEARNER_RESULTS,
    NUM_ENV_STEPS_SAMPLED_LIFETIME,
    NUM_EPISODES_LIFETIME,
)

from marl_pool.atomic import new_file
from marl_pool.errors import InputError, StoppedError
from marl_pool.progress import Progress
from marl_pool.runs import LEARNER, PARTS, Best, Run, iteration_of
from marl_pool.training.cluster import quiet, ray_session, refuse_missing_device
from marl_pool.training.fixed import Fixed, with_absolute_folders
from marl_pool.training.interrupt import Interruptible
from marl_pool.training.ppo.algorithm import (
    MAX_RESTARTS,
    RETURN_WINDOW,
    BatchedPPO,
    algorithm_config,
)
from marl_pool.training.ppo.faults import (
    all_learners_live,
    bad_numbers,
    errors_to,
    first_failure,
    last_line,
)
from marl_pool.training.ppo.learner import (
    FIRST_KL,
    FIRST_RATIO_ERROR,
    LEARN_SECONDS,
)
from marl_pool.training.ppo.runner import (
    EPISODE_RETURNS,
    SAMPLE_SECONDS,
)
from marl_pool.training.ppo.saving import (
    load_algorithm,
    save_algorithm,
    save_modules,
)
from marl_pool.training.stopping import (
    checkpoint_to_resume,
    reading,
    stopped,
    trim_log,
    writing,
)

KL, KL_COEFFICIENT = "mean_kl_loss", "curr_kl_coeff"
LOSSES = {
    "policy_loss": "policy_loss",
    "vf_loss": "value_loss",
    "vf_explained_var": "value_explained_variance",
    "entropy": "entropy",
    KL: "kl",
    KL_COEFFICIENT: "kl_coeff",
    "gradients_default_optimizer_global_norm": "gradient_norm",
    FIRST_RATIO_ERROR: FIRST_RATIO_ERROR,
    FIRST_KL: FIRST_KL,
}
"""RLlib's name of a learner metric → ours, written ``MODULE/name``."""


def train(
    run: Run,
    config: Mapping[str, Any],
    should_stop: Callable[[], bool] = lambda: False,
) -> None:
    """Train until the steps or the seconds are used up, from the last checkpoint on.

    Args:
        run: takes the metrics, the checkpoints and the best policy.
        config: composed and checked, as in ``run.config``.
        should_stop: asked before each iteration; True saves the run and ends it.

    Raises:
        InputError: parts of the configuration that don't fit each other.
        StoppedError: a number was not finite, the world raised, processes died for
            good, or the disk is full; the last good checkpoint stays.
    """
    resources = config["resources"]
    processes = resources["num_env_runners"] + resources["num_learners"]
    refuse_missing_device(config)
    with quiet():
        torch.set_num_threads(config["threads"])
        config = {**config, "fixed": with_absolute_folders(config["fixed"])}
        latest = checkpoint_to_resume(run)
        algorithm = algorithm_config(config, latest and latest / "policy")
        if config != run.config:
            run.write_config(config)
        with (
            ray_session(resources["address"], num_cpus=processes + 1),
            errors_to(run.error_path),
        ):
            _check_gpus(config)
            Driver(run, config, algorithm, should_stop).loop()


class Driver:
    """One process's training of one run.

    Args:
        run: takes the results.
        config: of the run.
        algorithm: the same as RLlib's configuration.
        should_stop: see `train`.
    """

    def __init__(
        self,
        run: Run,
        config: Mapping[str, Any],
        algorithm: Any,
        should_stop: Callable[[], bool],
    ) -> None:
        self.run, self.config, self.should_stop = run, config, should_stop
        self.modules: dict[str, str] = algorithm.env_config["modules"]
        self.fixed: Fixed = algorithm.env_config["fixed"]
        self.algo = self._build(algorithm)
        # Building the algorithm can set the number of threads.
        torch.set_num_threads(config["threads"])
        self.iteration = self.steps = self.empty = self.losses = 0
        self.seconds = 0.0
        self.ctrl_c = Interruptible()
        self.logged = dict(LOSSES)
        if not config["ppo"]["kl_coeff"]:
            del self.logged[KL], self.logged[KL_COEFFICIENT]
        self.returns: dict[str, deque[float]] = {
            group: deque(maxlen=RETURN_WINDOW) for group in (*self.modules, *self.fixed)
        }

    def _build(self, algorithm: Any) -> BatchedPPO:
        try:
            algo: BatchedPPO = algorithm.copy(copy_frozen=False).build_algo()
        except Exception as error:
            # What the main process builds was tried before; others may lack something.
            if not algorithm.num_env_runners + algorithm.num_learners:
                raise
            logged = isinstance(error, RayError) or not self.run.error_path.is_file()
            text = str(error) if logged else self.run.error_path.read_text()
            file = self.run.write_error("".join(traceback.format_exception(error)))
            raise StoppedError(
                f"the processes of the run did not start: {last_line(text)}; see {file}"
            ) from error
        return algo

    def loop(self) -> None:
        """Iterate; see `train`."""
        try:
            self._resume()
            limit, total = self.config["time_limit"], self.config["total_steps"]
            began = time.monotonic()
            with (
                Progress(total, done=self.steps, time_limit=limit) as progress,
                self.ctrl_c,
            ):
                while self.steps < total and not self._must_stop():
                    self._iterate(progress)
                    if limit is not None and time.monotonic() - began >= limit:
                        break
            self._save()
            if self.ctrl_c.asked:
                raise KeyboardInterrupt
        finally:
            self.algo.stop()

    def _must_stop(self) -> bool:
        return self.ctrl_c.asked or self.should_stop()

    def _iterate(self, progress: Progress) -> None:
        began = time.monotonic()
        result = self._train()
        sampled = result.get(ENV_RUNNER_RESULTS, {})
        steps = int(sampled.get(NUM_ENV_STEPS_SAMPLED_LIFETIME, self.steps))
        if steps == self.steps:
            self._count_empty()
            return
        if bad := bad_numbers(result):
            raise self._stopped(bad)
        seconds = time.monotonic() - began
        taken, self.steps = steps - self.steps, steps
        self.iteration, self.empty = self.iteration + 1, 0
        self.seconds += seconds
        for group, returns in sampled.get(EPISODE_RETURNS, {}).items():
            if isinstance(returns, list):  # of no episodes RLlib makes a NaN
                self.returns[group].extend(returns)
        row = {
            "iteration": self.iteration,
            "env_steps": steps,
            "episodes": int(sampled.get(NUM_EPISODES_LIFETIME, 0)),
            "seconds": self.seconds,
            "return_mean": self._return_mean(self.modules),
            "sample_seconds": float(sampled[SAMPLE_SECONDS]),
            "learn_seconds": float(result[LEARNER_RESULTS][ALL_MODULES][LEARN_SECONDS]),
            "steps_per_second": taken / seconds,
        }
        if len(self.returns) > 1:
            for group in self.returns:
                row[f"{group}/return_mean"] = self._return_mean([group])
        for module in sorted(set(self.modules.values())):
            metrics = result[LEARNER_RESULTS].get(module, {})
            for theirs, ours in self.logged.items():
                row[f"{module}/{ours}"] = float(metrics.get(theirs, math.nan))
        with self._writing("metrics.csv"):
            self.run.log(row)
        progress.update(steps, return_mean=row["return_mean"])
        if self.iteration % self.config["checkpoint"]["every"] == 0:
            self._save()

    def _return_mean(self, groups: Iterable[str]) -> float:
        """Mean of the last episodes' returns, summed over the agents of ``groups``.

        NaN before the first episode has ended.
        """
        parts = [self.returns[group] for group in groups]
        totals = [sum(each) for each in zip(*parts, strict=True)]
        return sum(totals) / len(totals) if totals else math.nan

    def _train(self) -> Mapping[str, Any]:
        """One iteration of the algorithm; stop if a process failed for good."""
        try:
            result: Mapping[str, Any] = self.algo.train()
        except Exception as error:
            if all_learners_live(self.algo):
                raise
            file = self.run.write_error("".join(traceback.format_exception(error)))
            raise self._stopped(f"a learner died; see {file}") from error
        if failure := first_failure(self.algo.env_runner_group):
            file = self.run.write_error(failure.traceback)
            raise self._stopped(
                f"{failure.error}, raised while sampling from {failure.world}; "
                f"traceback in {file}"
            )
        if self.algo.losses > self.losses:
            self.losses = self.algo.losses
            print(
                f"iteration {self.iteration + 1}: a runner died ({self.losses} so far) "
                f"and is started again, if it may be; see {self.run.error_path}",
                file=sys.stderr,
            )
        return result

    def _stopped(self, reason: str) -> StoppedError:
        return stopped(self.run, f"iteration {self.iteration + 1}", reason)

    def _count_empty(self) -> None:
        self.empty += 1
        if self.empty >= MAX_RESTARTS:
            raise self._stopped(
                f"no steps came from the runners in {self.empty} iterations: they keep "
                f"failing; see {self.run.error_path}"
            )

    def _save(self) -> None:
        """Checkpoint; the best one's policy becomes the run's."""
        if not self.iteration or self.iteration == self._saved():
            return
        with self._writing("the checkpoint"):
            with self.run.checkpoint(self.iteration, self._parts()) as folder:
                self._write_checkpoint(folder)
            best, score = self.run.best, self._score()
            if best is None or score > best.score:
                best = Best(self.iteration, score)
                with self.run.save_policy_dir(best) as folder:
                    self._save_policy(folder)
            self.run.prune(self.config["checkpoint"]["keep"])

    def _parts(self) -> tuple[str, ...]:
        """What a checkpoint must have: the weights of each module among it."""
        modules = sorted(set(self.modules.values()))
        weights = (f"{LEARNER}/rl_module/{name}/module_state.pkl" for name in modules)
        return (*PARTS["train"], *weights)

    def _write_checkpoint(self, folder: Path) -> None:
        save_algorithm(self.algo, folder / "algorithm")
        self._save_policy(folder / "policy")
        progress = {
            "steps": self.steps,
            "seconds": self.seconds,
            "returns": {group: list(last) for group, last in self.returns.items()},
        }
        with new_file(folder / "progress.json") as out:
            json.dump(progress, out)

    def _score(self) -> float:
        """How good the policy is, to choose the best.

        Several modules may learn at each other's cost, and a perturbation that grows
        makes the task harder, so that no number tells which checkpoint is better: the
        newest counts as best.
        """
        grows = self.config["perturbation"].get("ramp") is not None
        if grows or len(set(self.modules.values())) > 1:
            return self.iteration
        score = self._return_mean(self.modules)
        # Before the first episode has ended any later checkpoint is better.
        return -math.inf if math.isnan(score) else score

    def _writing(self, what: str) -> AbstractContextManager[None]:
        return writing(self.run, f"iteration {self.iteration}", what)

    def _saved(self) -> int | None:
        latest = self.run.latest_checkpoint()
        return None if latest is None else iteration_of(latest)

    def _save_policy(self, folder: Path) -> None:
        save_modules(self.algo, self.modules, self.fixed, folder)

    def _resume(self) -> None:
        checkpoint = self.run.latest_checkpoint()
        if checkpoint is None:
            self._resume_log()
            return
        with reading(self.run, checkpoint):
            progress = json.loads((checkpoint / "progress.json").read_text())
            for group, returns in progress["returns"].items():
                self.returns[group].extend(returns)
            load_algorithm(self.algo, checkpoint / "algorithm")
        self.iteration = iteration_of(checkpoint)
        self.steps, self.seconds = progress["steps"], progress["seconds"]
        self._resume_log()

    def _resume_log(self) -> None:
        with self._writing("metrics.csv"):
            trim_log(self.run, self.iteration)


def _check_gpus(config: Mapping[str, Any]) -> None:
    """Refuse processes that would wait forever for their GPUs."""
    resources = config["resources"]
    wanted = sum(
        resources[f"num_{kind}s"] * resources[f"num_gpus_per_{kind}"]
        for kind in ("env_runner", "learner")
    )
    there = ray.cluster_resources().get("GPU", 0)
    if wanted > there:
        raise InputError(f"resources: {wanted:g} GPUs are asked for, ray has {there:g}")
