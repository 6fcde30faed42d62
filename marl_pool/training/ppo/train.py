"""The driver: build, train, log, checkpoint, stop for good reasons."""

import contextlib
import json
import logging
import math
import os
import signal
import time
import warnings
from collections import deque
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import FrameType
from typing import Any

import ray
import torch
from ray.rllib.algorithms.ppo import PPO
from ray.rllib.utils.metrics import (
    ALL_MODULES,
    ENV_RUNNER_RESULTS,
    LEARNER_RESULTS,
    NUM_ENV_STEPS_SAMPLED_LIFETIME,
    NUM_EPISODES_LIFETIME,
)

from marl_pool.errors import InputError, StoppedError
from marl_pool.policies.storage import save_policies
from marl_pool.policies.token_policy import TokenPolicy
from marl_pool.progress import Progress
from marl_pool.runs import Run
from marl_pool.training.ppo.algorithm import (
    MAX_RESTARTS,
    RETURN_WINDOW,
    algorithm_config,
)
from marl_pool.training.ppo.learner import (
    FIRST_KL,
    FIRST_RATIO_ERROR,
    LEARN_SECONDS,
    NON_FINITE_LOSS,
)
from marl_pool.training.ppo.module import build_policy
from marl_pool.training.ppo.runner import (
    EPISODE_RETURNS,
    NON_FINITE,
    NON_FINITE_PLACE,
    SAMPLE_SECONDS,
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


def train(run: Run, config: Mapping[str, Any]) -> None:
    """Train until the steps or the seconds are used up, from the last checkpoint on.

    Args:
        run: takes the metrics, the checkpoints and the best policy.
        config: composed and checked, as in ``run.config``.

    Raises:
        InputError: parts of the configuration that don't fit each other.
        StoppedError: a number was not finite, or the runners gave no more steps; the
            last good checkpoint stays.
    """
    with _quiet():
        torch.set_num_threads(config["threads"])
        algorithm = algorithm_config(config)
        if config != run.config:
            run.write_config(config)
        with _ray(config):
            _check_gpus(config)
            Driver(run, config, algorithm).loop()


class Driver:
    """One process's training of one run.

    Args:
        run: takes the results.
        config: of the run.
        algorithm: the same as RLlib's configuration.
    """

    def __init__(self, run: Run, config: Mapping[str, Any], algorithm: Any) -> None:
        self.run, self.config = run, config
        self.modules: dict[str, str] = algorithm.env_config["modules"]
        self.algo: PPO = algorithm.copy(copy_frozen=False).build_algo()
        # Building the algorithm can set the number of threads.
        torch.set_num_threads(config["threads"])
        self.iteration = self.steps = self.empty = 0
        self.seconds = 0.0
        self.stopping = False
        self.losses = dict(LOSSES)
        if not config["ppo"]["kl_coeff"]:
            del self.losses[KL], self.losses[KL_COEFFICIENT]
        self.returns: deque[float] = deque(maxlen=RETURN_WINDOW)

    def loop(self) -> None:
        """Iterate; see `train`."""
        try:
            self._resume()
            limit, total = self.config["time_limit"], self.config["total_steps"]
            began = time.monotonic()
            with (
                Progress(total, done=self.steps, time_limit=limit) as progress,
                self._interruptible(),
            ):
                while self.steps < total and not self.stopping:
                    self._iterate(progress)
                    if limit is not None and time.monotonic() - began >= limit:
                        break
            self._save()
            if self.stopping:
                raise KeyboardInterrupt
        finally:
            self.algo.stop()

    def _iterate(self, progress: Progress) -> None:
        began = time.monotonic()
        result = self.algo.train()
        sampled = result.get(ENV_RUNNER_RESULTS, {})
        steps = int(sampled.get(NUM_ENV_STEPS_SAMPLED_LIFETIME, self.steps))
        if steps == self.steps:
            self._count_empty()
            return
        self._check(result)
        seconds = time.monotonic() - began
        taken, self.steps = steps - self.steps, steps
        self.iteration, self.empty = self.iteration + 1, 0
        self.seconds += seconds
        row = {
            "iteration": self.iteration,
            "env_steps": steps,
            "episodes": int(sampled.get(NUM_EPISODES_LIFETIME, 0)),
            "seconds": self.seconds,
            "return_mean": self._return_mean(sampled),
            "sample_seconds": float(sampled[SAMPLE_SECONDS]),
            "learn_seconds": float(result[LEARNER_RESULTS][ALL_MODULES][LEARN_SECONDS]),
            "steps_per_second": taken / seconds,
        }
        for module in sorted(set(self.modules.values())):
            metrics = result[LEARNER_RESULTS].get(module, {})
            for theirs, ours in self.losses.items():
                row[f"{module}/{ours}"] = float(metrics.get(theirs, math.nan))
        self.run.log(row)
        progress.update(steps, return_mean=row["return_mean"])
        if self.iteration % self.config["checkpoint"]["every"] == 0:
            self._save()

    def _return_mean(self, sampled: Mapping[str, Any]) -> float:
        """Mean return of the last episodes; NaN before the first one has ended."""
        self.returns.extend(sampled.get(EPISODE_RETURNS, ()))
        return sum(self.returns) / len(self.returns) if self.returns else float("nan")

    def _check(self, result: Mapping[str, Any]) -> None:
        sampled = result[ENV_RUNNER_RESULTS]
        bad = {kind: n for kind, n in sampled.get(NON_FINITE, {}).items() if n > 0}
        if bad:
            world, step = divmod(int(sampled[NON_FINITE_PLACE]), 1 << 20)
            seen = ", ".join(f"{int(n)} {kind}" for kind, n in sorted(bad.items()))
            raise StoppedError(
                f"iteration {self.iteration + 1}: NaN or infinite: {seen}; one in "
                f"world {world} at step {step} of the fragment; {self._kept()}"
            )
        for module, metrics in result[LEARNER_RESULTS].items():
            if metrics.get(NON_FINITE_LOSS, 0) > 0:
                raise StoppedError(
                    f"iteration {self.iteration + 1}: loss or gradient of module "
                    f"{module!r} is NaN or infinite (loss "
                    f"{float(metrics.get('total_loss', float('nan'))):g}); try a "
                    f"smaller ppo.lr or ppo.grad_clip; {self._kept()}"
                )

    def _kept(self) -> str:
        checkpoint = self.run.latest_checkpoint()
        return "no checkpoint yet" if checkpoint is None else f"kept {checkpoint}"

    def _count_empty(self) -> None:
        self.empty += 1
        if self.empty >= MAX_RESTARTS:
            raise StoppedError(
                f"no steps came from the runners in {self.empty} iterations: they keep "
                f"failing; see the logs of ray; {self._kept()}"
            )

    def _save(self) -> None:
        """Checkpoint; the best one's policy becomes the run's."""
        if not self.iteration or self.iteration == self._saved():
            return
        with self.run.checkpoint(self.iteration) as folder:
            self.algo.save_to_path(str((folder / "algorithm").absolute()))
            self._save_policy(folder / "policy")
            progress = {
                "steps": self.steps,
                "seconds": self.seconds,
                "returns": list(self.returns),
            }
            (folder / "progress.json").write_text(json.dumps(progress))
        best = self.run.best
        # Before the first episode has ended any later checkpoint is better.
        score = sum(self.returns) / len(self.returns) if self.returns else -math.inf
        if best is None or score > best.score:
            with self.run.save_policy_dir() as folder:
                self._save_policy(folder)
            self.run.mark_best(self.iteration, score)
        self.run.prune(self.config["checkpoint"]["keep"])

    def _saved(self) -> int | None:
        latest = self.run.latest_checkpoint()
        return None if latest is None else int(latest.name.removeprefix("iter_"))

    def _save_policy(self, folder: Path) -> None:
        weights = self.algo.learner_group.get_weights()
        save_policies(
            {name: self._policy(name, weights[name]) for name in weights},
            self.modules,
            folder,
        )

    def _policy(self, module: str, weights: Mapping[str, Any]) -> TokenPolicy:
        spec = self.algo.config.rl_module_spec.rl_module_specs[module]
        policy = build_policy(spec.model_config)
        policy.load_state_dict(
            {
                name.removeprefix("policy."): torch.as_tensor(value)
                for name, value in weights.items()
            }
        )
        return policy

    def _resume(self) -> None:
        checkpoint = self.run.latest_checkpoint()
        if checkpoint is None:
            self.run.resume_at(0)
            return
        try:
            progress = json.loads((checkpoint / "progress.json").read_text())
            self.algo.restore_from_path(str((checkpoint / "algorithm").absolute()))
        except Exception as error:
            # RLlib fails in many ways on a damaged folder; all mean the same to a user.
            reason = " ".join(str(error).split())[:200]
            raise StoppedError(
                f"{checkpoint} cannot be read: {reason}; remove it to go on from the "
                "checkpoint before"
            ) from error
        self.iteration = int(checkpoint.name.removeprefix("iter_"))
        self.steps, self.seconds = progress["steps"], progress["seconds"]
        self.returns.extend(progress["returns"])
        self.run.resume_at(self.iteration)

    @contextlib.contextmanager
    def _interruptible(self) -> Iterator[None]:
        """Let the first Ctrl-C finish the iteration; a second one stops at once."""

        def stop(number: int, frame: FrameType | None) -> None:
            if self.stopping:
                raise KeyboardInterrupt
            self.stopping = True

        try:
            before = signal.signal(signal.SIGINT, stop)
        except ValueError:  # not the main thread: signals are someone else's
            yield
            return
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, before)


@contextlib.contextmanager
def _ray(config: Mapping[str, Any]) -> Iterator[None]:
    """Start ray, or join a cluster, and leave it; one that runs already is kept."""
    if ray.is_initialized():
        yield
        return
    resources = config["resources"]
    options: dict[str, Any] = {"address": resources["address"]}
    if resources["address"] is None:
        processes = resources["num_env_runners"] + resources["num_learners"]
        options = {"num_cpus": processes + 1, "include_dashboard": False}
    # Workers find a user's own classes where the driver does.
    path = os.pathsep.join([os.getcwd(), os.environ.get("PYTHONPATH", "")])
    try:
        ray.init(
            runtime_env={"env_vars": {"PYTHONPATH": path.rstrip(os.pathsep)}},
            log_to_driver=False,
            logging_level=logging.ERROR,
            **options,
        )
    except (ConnectionError, ValueError, RuntimeError) as error:
        reason = " ".join(str(error).split())[:200]
        raise InputError(
            f"resources.address: cannot join or start ray: {reason}"
        ) from error
    try:
        yield
    finally:
        ray.shutdown()


def _check_gpus(config: Mapping[str, Any]) -> None:
    """Refuse what would wait forever for GPUs, or fail deep inside RLlib."""
    resources = config["resources"]
    wanted = sum(
        resources[f"num_{kind}s"] * resources[f"num_gpus_per_{kind}"]
        for kind in ("env_runner", "learner")
    )
    there = ray.cluster_resources().get("GPU", 0)
    if wanted > there:
        raise InputError(f"resources: {wanted:g} GPUs are asked for, ray has {there:g}")
    local = not resources["num_learners"] and resources["num_gpus_per_learner"]
    if local and not torch.cuda.is_available():
        raise InputError(
            "resources.num_gpus_per_learner: the local learner finds no CUDA device"
        )


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keep RLlib's notes about its own migration from the screen."""
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    for name in ("ray", "ray.rllib", "ray.tune"):
        logging.getLogger(name).setLevel(logging.ERROR)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        yield
