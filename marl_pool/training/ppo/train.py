"""PPO on RLlib, one iteration at a time."""

import json
import math
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from operator import attrgetter
from pathlib import Path
from typing import Any

import torch
from ray.exceptions import RayError
from ray.rllib.utils.metrics import (
    ALL_MODULES,
    ENV_RUNNER_RESULTS,
    LEARNER_RESULTS,
    NUM_ENV_STEPS_SAMPLED_LIFETIME,
    NUM_EPISODES_LIFETIME,
)
from typing_extensions import override

from marl_pool.files.atomic import write_json
from marl_pool.runs.run import LEARNER, NEWEST, RETURN, Run
from marl_pool.training import cluster
from marl_pool.training.errors import StepError
from marl_pool.training.jobs import with_absolute_folders
from marl_pool.training.loop import Iteration, TrainingLoop, TrainingMethod, never
from marl_pool.training.ppo import learner
from marl_pool.training.ppo.algorithm import (
    BatchedPPO,
    has_processes,
    load_algorithm,
    save_algorithm,
    save_modules,
)
from marl_pool.training.ppo.config import MAX_RESTARTS, algorithm_config
from marl_pool.training.ppo.faults import (
    all_learners_live,
    errors_to,
    last_line,
)
from marl_pool.training.ppo.runner import (
    EPISODE_RETURNS,
    RUNNER,
    SAMPLE_SECONDS,
    RunnerSettings,
)
from marl_pool.training.ppo.warm_start import (
    Weights,
    load_initial_weights,
    set_weights,
)
from marl_pool.training.settings import TrainConfig
from marl_pool.training.signals import patience
from marl_pool.utils.errors import StoppedError
from marl_pool.utils.text import print_line, quoted

RETURN_WINDOW = 128
"""Number of episodes averaged in the logged mean return."""
MOST_FIRST_KL = 1.0
"""Largest KL from the sampling policy before a step, in nats, without a warning."""
KL, KL_COEFFICIENT = "mean_kl_loss", "curr_kl_coeff"
LOSSES = {
    "policy_loss": "policy_loss",
    "vf_loss": "value_loss",
    "vf_explained_var": "value_explained_variance",
    "entropy": "entropy",
    KL: "kl",
    KL_COEFFICIENT: "kl_coeff",
    learner.GRADIENT_NORM: learner.GRADIENT_NORM,
    # RLlib logs it after the update, so it is the rate of the next one.
    "default_optimizer_learning_rate": "learning_rate",
    learner.FIRST_RATIO_ERROR: learner.FIRST_RATIO_ERROR,
    learner.FIRST_KL: learner.FIRST_KL,
}
"""RLlib's name of a learner metric → name in the log, after ``MODULE/``."""


def train(
    run: Run, config: TrainConfig, should_stop: Callable[[], bool] = never
) -> None:
    """Train by PPO until the steps or the time limit are used up.

    The run receives metrics, checkpoints and the best policy; with a checkpoint, it
    continues from there. See `Job.function` for the arguments.

    Raises:
        InputError: parts of the configuration that do not fit each other.
        StoppedError: a number was not finite, the environment raised, processes kept
            dying, or the disk is full; the last good checkpoint remains.
    """
    config = with_absolute_folders(config)
    cluster.validate_device(config)
    with cluster.quiet():
        TrainingLoop(run, config, should_stop).train(
            lambda checkpoint: PPOMethod(run, config, checkpoint)
        )


class PPOMethod(TrainingMethod):
    """PPO on RLlib: each iteration samples a batch and learns from it.

    Raises:
        InputError: parts of the configuration that do not fit each other.
    """

    unit = "steps"

    def __init__(self, run: Run, config: TrainConfig, checkpoint: Path | None) -> None:
        super().__init__(run, config.total_steps)
        self.config = config
        self.algorithm = algorithm_config(config, checkpoint and checkpoint / "policy")
        settings: RunnerSettings = self.algorithm.env_config[RUNNER]
        self.modules, self.fixed = settings.modules, settings.fixed
        self.initial_weights: Mapping[str, Weights] = {}
        if checkpoint is None:
            specs = self.algorithm.rl_module_spec.rl_module_specs
            self.initial_weights = load_initial_weights(config, self.modules, specs)
        self.steps = self.empty = self.deaths = 0
        self.has_overflowed = False
        self.seconds = 0.0
        self.logged = dict(LOSSES)
        # Without a KL penalty there is no coefficient to log.
        if not config.ppo.kl_coeff:
            del self.logged[KL], self.logged[KL_COEFFICIENT]
        self.returns: dict[str, deque[float]] = {
            group: deque(maxlen=RETURN_WINDOW) for group in (*self.modules, *self.fixed)
        }

    # Processes

    @override
    @contextmanager
    def session(self) -> Iterator[None]:
        # Join or start Ray, unless everything runs in this process.
        resources = self.config.resources
        ray: AbstractContextManager[None] = nullcontext()
        if has_processes(self.algorithm):
            count = resources.num_env_runners + resources.num_learners + 1
            hint = f"resume with: marl-pool resume {quoted(self.run.path)}"
            ray = cluster.ray_session(resources.address, num_cpus=count, resume=hint)
        elif resources.address:
            print_line(
                "resources.address: not used, as the run has neither "
                "num_env_runners nor num_learners"
            )
        with ray, errors_to(self.run):
            self.algo = self._build()
            try:
                if self.initial_weights:
                    set_weights(self.algo, self.initial_weights)
                # Building the algorithm can change the number of threads.
                torch.set_num_threads(self.config.threads)
                yield
            finally:
                self.algo.stop()

    def _build(self) -> BatchedPPO:
        algo: BatchedPPO
        algorithm, resources = self.algorithm, self.config.resources
        if not has_processes(algorithm):
            algo = algorithm.copy(copy_frozen=False).build_algo()
            return algo
        # RLlib reserves no CPU for a learner that has a GPU.
        cpus = 0 if resources.num_gpus_per_learner else resources.num_learners
        needed = {
            "CPU": resources.num_env_runners + cpus,
            "GPU": resources.num_env_runners * resources.num_gpus_per_env_runner
            + resources.num_learners * resources.num_gpus_per_learner,
        }
        needs = " and ".join(f"{number:g} {kind}s" for kind, number in needed.items())
        limit = cluster.validate_cluster(needed)
        # The time limit ends a run after an iteration, and so ends this start only if
        # it may wait in vain.
        if not cluster.has_free(needed):
            limit = min(limit, self.config.time_limit or limit)
        try:
            with patience(f"starting processes that need {needs}", limit):
                algo = algorithm.copy(copy_frozen=False).build_algo()
        except Exception as error:
            # Prefer a logged traceback, unless ray or the limit raised the error.
            is_direct = isinstance(error, RayError | TimeoutError)
            logged = is_direct or not self.run.error_path.is_file()
            text = str(error) if logged else self.run.error_path.read_text()
            raise StoppedError(
                f"the processes of the run did not start: {last_line(text)}; see "
                f"{self.run.write_error(traceback.format_exc())}"
            ) from error
        return algo

    # Iterations

    @property
    @override
    def done(self) -> int:
        return self.steps

    @override
    def step(self, iteration: int) -> Iteration | None:
        began = time.monotonic()
        result = self._train(iteration)
        seconds = time.monotonic() - began
        self.seconds += seconds
        sampled = result.get(ENV_RUNNER_RESULTS, {})
        steps = int(sampled.get(NUM_ENV_STEPS_SAMPLED_LIFETIME, self.steps))
        # All runners may have died; RLlib restarts them.
        if steps == self.steps:
            self.empty += 1
            if self.empty >= MAX_RESTARTS:
                raise StepError(
                    f"the runners returned no steps in {self.empty} iterations: they "
                    f"keep failing; see {self.run.error_path}"
                )
            return None
        learned = result.get(LEARNER_RESULTS, {})
        for module, metrics in learned.items():
            if metrics.get(learner.NON_FINITE_LOSS, 0) > 0:
                raise StepError(
                    f"loss or gradient of module {module!r} is NaN or infinite; try a "
                    "smaller ppo.lr or ppo.grad_clip"
                )
            first_kl = float(metrics.get(learner.FIRST_KL, 0.0))
            # It is NaN for a module without rows.
            if first_kl > MOST_FIRST_KL and not self.has_overflowed:
                self.has_overflowed = True
                print_line(
                    f"iteration {iteration}: first_kl of module {module!r} is "
                    f"{first_kl:.2g} instead of 0: its action probabilities are too "
                    "extreme for float32; try a smaller policy.init_std or ppo.lr"
                )
        # Count the steps, and keep the last returns for the logged mean.
        new_steps, self.steps, self.empty = steps - self.steps, steps, 0
        for group, returns in sampled.get(EPISODE_RETURNS, {}).items():
            if isinstance(returns, list):  # without episodes RLlib returns a NaN
                self.returns[group].extend(returns)
        # Make the row of metrics: the whole run, each group, each module. Without an
        # active agent that learns, `learned` is empty.
        row = {
            "env_steps": steps,
            "episodes": int(sampled.get(NUM_EPISODES_LIFETIME, 0)),
            "seconds": self.seconds,
            "return_mean": self._return_mean(self.modules),
            "sample_seconds": float(sampled[SAMPLE_SECONDS]),
            "learn_seconds": float(
                learned.get(ALL_MODULES, {}).get(learner.LEARN_SECONDS, math.nan)
            ),
            "steps_per_second": new_steps / seconds,
        }
        # Separate returns matter only if there are several groups.
        if len(self.returns) > 1:
            for group in self.returns:
                row[f"{group}/return_mean"] = self._return_mean([group])
        for module in sorted(set(self.modules.values())):
            metrics = learned.get(module, {})
            for rllib_name, column in self.logged.items():
                row[f"{module}/{column}"] = float(metrics.get(rllib_name, math.nan))
        return Iteration(row, {"return_mean": row["return_mean"]})

    def _train(self, iteration: int) -> Mapping[str, Any]:
        """Run one iteration of RLlib's algorithm, and check that no process failed."""
        try:
            result: Mapping[str, Any] = self.algo.train()
        except TimeoutError as error:
            raise StepError(str(error)) from error
        except Exception as error:
            if all_learners_live(self.algo):
                raise
            file = self.run.write_error(traceback.format_exc())
            raise StepError(f"a learner died; see {file}") from error
        # A runner catches its own errors and reports them with its next sample.
        failures = self.algo.env_runner_group.foreach_env_runner(attrgetter("failure"))
        if failure := next(filter(None, failures), None):
            file = self.run.write_error(failure.traceback)
            name = self.config.env["name"]
            hint = f"; try `marl-pool check-env env={name}`" if ":" in name else ""
            raise StepError(
                f"{failure.error}, raised while sampling from {failure.env}; "
                f"traceback in {file}{hint}"
            )
        # Runners may die: warn, and continue with their successors.
        if self.algo.deaths > self.deaths:
            self.deaths = self.algo.deaths
            print_line(
                f"iteration {iteration}: a runner died ({self.deaths} so far); it is "
                f"restarted at most {MAX_RESTARTS} times; see {self.run.error_path}"
            )
        return result

    def _return_mean(self, groups: Iterable[str]) -> float:
        """Average the last episodes' returns, summed over groups; NaN without any."""
        parts = [self.returns[group] for group in groups]
        totals = [sum(values) for values in zip(*parts, strict=True)]
        return sum(totals) / len(totals) if totals else math.nan

    # Checkpoints

    @property
    @override
    def parts(self) -> tuple[str, ...]:
        modules = sorted(set(self.modules.values()))
        weights = (f"{LEARNER}/rl_module/{name}/module_state.pt" for name in modules)
        return (*super().parts, *weights)

    @override
    def save(self, checkpoint: Path) -> None:
        save_algorithm(self.algo, checkpoint / "algorithm")
        self.save_policy(checkpoint / "policy")
        progress = {
            "steps": self.steps,
            "seconds": self.seconds,
            "returns": {group: list(last) for group, last in self.returns.items()},
        }
        write_json(checkpoint / "progress.json", progress)

    @override
    def restore(self, checkpoint: Path) -> None:
        progress = json.loads((checkpoint / "progress.json").read_text())
        for group, returns in progress["returns"].items():
            self.returns[group].extend(returns)
        load_algorithm(self.algo, checkpoint / "algorithm")
        self.steps, self.seconds = progress["steps"], progress["seconds"]

    @property
    @override
    def score_of(self) -> str:
        # Modules may learn at each other's expense, and a ramped perturbation makes the
        # task harder: returns are not comparable, and the newest checkpoint is best.
        is_ramped = self.config.perturbation.get("ramp") is not None
        return NEWEST if is_ramped or len(set(self.modules.values())) > 1 else RETURN

    @override
    def score(self, iteration: int) -> float:
        if self.score_of == NEWEST:
            return iteration
        score = self._return_mean(self.modules)
        return -math.inf if math.isnan(score) else score

    @override
    def accept(self, score: float) -> bool:
        # Until an episode is finished, the newest checkpoint is the best.
        best = self.run.best
        unknown = best is not None and best.score == score == -math.inf
        return unknown or super().accept(score)

    @override
    def save_policy(self, folder: Path) -> None:
        save_modules(self.algo, self.modules, self.fixed, folder)
