"""PPO learner on tensors, with gradients accumulated over microbatches."""

import functools
import operator
import time
import zlib
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from typing import Any, NamedTuple, cast

import torch
from ray.rllib.algorithms.ppo.ppo import (
    LEARNER_RESULTS_KL_KEY,
    LEARNER_RESULTS_VF_EXPLAINED_VAR_KEY,
)
from ray.rllib.algorithms.ppo.torch.ppo_torch_learner import PPOTorchLearner
from ray.rllib.core.columns import Columns
from ray.rllib.core.learner.training_data import TrainingData
from ray.rllib.utils.metrics import (
    ALL_MODULES,
    NUM_ENV_STEPS_SAMPLED_LIFETIME,
    NUM_MODULE_STEPS_TRAINED,
    WEIGHTS_SEQ_NO,
)
from ray.rllib.utils.schedules.scheduler import Scheduler
from torch import Tensor, distributed
from torch.nn.parallel import DistributedDataParallel
from typing_extensions import override

from marl_pool.compiled.native.call import threads_for_kernel
from marl_pool.compiled.ppo import Coefficients, ppo_gradient, ppo_loss, without_value
from marl_pool.critics.base import Critic
from marl_pool.policies.actions import kl_divergence
from marl_pool.tokens import Tokens
from marl_pool.training.optimization import FlatAdam, FlatParameters
from marl_pool.training.ppo.batch import (
    VALUE_SCALE,
    Rows,
    episode_rows,
    existing_steps,
    map_rows,
    minibatches,
    num_steps,
    prepare_rows,
)
from marl_pool.training.ppo.loss import (
    STATISTICS,
    PPOTerms,
    explained_variance,
    recorded_steps,
    value_errors,
)
from marl_pool.training.ppo.module import TokenRLModule
from marl_pool.training.ppo.trajectories import RECORDED
from marl_pool.training.settings import PPOSettings
from marl_pool.utils.devices import without_denormals
from marl_pool.utils.randomness import seed_process, seed_torch

MICROBATCH_STEPS = 1024
"""Steps of a microbatch that torch computes on a CPU, few enough for the cache."""

STEP_COLUMNS = (Columns.ACTIONS, VALUE_SCALE, *RECORDED)
"""Columns that the loss of a step needs, besides the module's outputs."""

FIRST_RATIO_ERROR = "first_ratio_error"
"""Metric: largest |ratio - 1| in an update's first minibatch, before any step."""
FIRST_KL = "first_kl"
"""Metric: mean KL divergence from the sampling policy in the first minibatch; the
largest of its microbatches."""
GRADIENT_NORM = "gradient_norm"
"""Metric: global norm of the last gradient, before clipping."""
KL_COEFFICIENTS = "kl_coefficients"
"""Component of the learner's state: adapted coefficients by module."""
KL_COEFF = "kl_coeff"
"""Component of the learner's state: the coefficient from which they adapted."""
LEARN_SECONDS = "learn_seconds"
"""Metric: seconds of one update, over all its epochs."""
NON_FINITE_LOSS = "non_finite_loss"
"""Metric: 1 if a loss or gradient was NaN or infinite, so that its step was skipped."""

LOCAL_DEVICE = "local_device"
"""Key of ``learner_config_dict``: device of a learner in this process, or None."""
SEED = "seed"
"""Key of ``learner_config_dict``: seed of learners."""
SETTINGS = "settings"
"""Key of ``learner_config_dict``: the run's `PPOSettings`."""
NUM_MINIBATCHES = "num_minibatches"
"""Key of ``learner_config_dict``: minibatches in one epoch."""


class Outputs(NamedTuple):
    """Steps of a module, and what its heads computed from them."""

    rows: Rows
    logits: Tensor
    """``(B, L)``."""
    values: Tensor
    """``(B,)`` in the units of the targets."""


class Microbatch(NamedTuple):
    """Part of a minibatch: by module, the outputs and the fraction of the steps."""

    outputs: dict[str, Outputs]
    weights: dict[str, float]


class BatchedPPOLearner(PPOTorchLearner):
    """Proximal policy optimization with minibatches of whole tensors.

    The loss is `PPOTerms`. Differences from RLlib:

    - A local runner passes tensors; only remote ones pass episodes.
    - Every module is trained on its rows exactly ``num_epochs`` times.
    - If torch computes on a CPU, the gradient of a minibatch is accumulated over
      microbatches that fit the cache. It equals the gradient of the whole minibatch.
    - A module's parameters are one tensor for the optimizer.
    - The order of the rows and dropout depend only on the seed and the number of the
      update, and the state includes the KL coefficients, so that a resumed run
      continues exactly.
    - A resumed run's learning rate follows its present schedule from the first update.
    - A non-finite loss or gradient is reported, and its optimizer step is skipped.
    - Metrics describe the last minibatch, and are logged once per update. The KL
      divergence is the mean over all minibatches with ``kl_estimate: mean``, and always
      over all learners, so that their penalties adapt alike.

    Attributes:
        num_updates: number of updates since the start of the run.
        num_steps: environment steps up to the last update.
    """

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._run_seed: int = self.config.learner_config_dict[SEED]
        seed_process(self._run_seed)
        self.num_updates = self.num_steps = 0
        self._flat: dict[str, FlatParameters] = {}
        self._given_device = torch.device("cpu")

    @property
    def _device(self) -> torch.device:
        # RLlib would start Ray to find the GPU of a learner in this process.
        local = self.config.learner_config_dict[LOCAL_DEVICE]
        return self._given_device if local is None else torch.device(local)

    @_device.setter
    def _device(self, device: torch.device | None) -> None:
        self._given_device = device or torch.device("cpu")

    @override
    def configure_optimizers_for_module(self, module_id: str, config: Any) -> None:
        flat = FlatParameters(self.get_parameters(self.module[module_id]))
        self._flat[module_id] = flat
        self.register_optimizer(
            module_id=module_id,
            optimizer=FlatAdam(flat.values),
            params=[flat.values],
            lr_or_lr_schedule=config.lr,
        )

    @override
    def get_state(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        # RLlib leaves out the KL coefficients, and numbers the weights in its `update`.
        kl = {
            module_id: float(c)
            for module_id, c in self.curr_kl_coeffs_per_module.items()
        }
        state = super().get_state(*args, **kwargs)
        return {
            **state,
            KL_COEFFICIENTS: kl,
            KL_COEFF: self.config.kl_coeff,
            WEIGHTS_SEQ_NO: self.num_updates,
            NUM_ENV_STEPS_SAMPLED_LIFETIME: self.num_steps,
        }

    @override
    def set_state(self, state: dict[str, Any]) -> None:
        super().set_state(state)
        self.num_updates = state.get(WEIGHTS_SEQ_NO, self.num_updates)
        # After an edit of the configuration the penalty starts from its new weight.
        if state.get(KL_COEFF, self.config.kl_coeff) == self.config.kl_coeff:
            for module_id, coefficient in state.get(KL_COEFFICIENTS, {}).items():
                self.curr_kl_coeffs_per_module[module_id].fill_(coefficient)
        self.num_steps = state.get(NUM_ENV_STEPS_SAMPLED_LIFETIME, self.num_steps)
        # The optimizers' state has the rates of an earlier configuration.
        if self.num_steps:
            rate = Scheduler(self.config.lr).update(self.num_steps)
            for module_id in self._flat:
                for _, optimizer in self.get_optimizers_for_module(module_id):
                    for group in optimizer.param_groups:
                        group["lr"] = rate

    @override
    @without_denormals()  # a remote learner has another process
    def update(
        self,
        *,
        training_data: TrainingData,
        timesteps: dict[str, Any],
        num_epochs: int = 1,
        shuffle_batch_per_epoch: bool = False,
        **kwargs: Any,
    ) -> Any:
        """Pass over the batch ``num_epochs`` times, and return the metrics."""
        began = time.perf_counter()
        self.before_gradient_based_update(timesteps=timesteps)
        # Take the tensors of the local runner, or the episodes of remote ones. All
        # learners use the same order of modules, since they synchronize at each.
        settings: PPOSettings = self.config.learner_config_dict[SETTINGS]
        training_data.solve_refs()
        if training_data.batch is not None:
            rows_by_module: Mapping[str, Any] = training_data.batch.policy_batches
        else:
            rows_by_module = episode_rows(training_data.episodes)
        move = operator.methodcaller("to", self.device)
        batch = {
            module_id: prepare_rows(
                map_rows(move, rows_by_module[module_id]),
                settings,
                self._module_of(module_id).value_norm,
            )
            for module_id in sorted(rows_by_module)
        }
        self.num_steps = timesteps[NUM_ENV_STEPS_SAMPLED_LIFETIME]
        # Seed every update by its own number, so that a resumed run repeats it exactly.
        self.num_updates += 1
        seed = zlib.crc32(f"{self._run_seed} {self.num_updates}".encode())
        seed_torch(seed, self.device.type)
        generator = torch.Generator("cpu").manual_seed(seed)
        # Take a gradient step on each minibatch; log the metrics of the last one.
        self._is_first, self._metrics = True, dict[tuple[str, str], Any]()
        self._divergences = defaultdict[str, list[Tensor]](list)
        last: dict[str, list[Microbatch]] = {}
        tokens = {
            module_id: Tokens(**rows[Columns.OBS]).flatten_batch()
            for module_id, rows in batch.items()
        }
        # Microbatches are for a CPU's cache: the compiled kernel and a GPU need none.
        self._takes_whole = {
            module_id: not observed.features.is_cpu
            or self._by_kernel(module_id, observed)
            for module_id, observed in tokens.items()
        }
        # Leave the threads to the kernel where it computes every encoder.
        by_kernel = all(
            self._by_kernel(module_id, tokens[module_id], encoder=True)
            for module_id in batch
        )
        with threads_for_kernel() if by_kernel else nullcontext():
            for minibatch in minibatches(
                batch,
                num_epochs=num_epochs,
                num_minibatches=self.config.learner_config_dict[NUM_MINIBATCHES],
                generator=generator if shuffle_batch_per_epoch else None,
                in_step=self.config.num_learners > 1,
            ):
                microbatches = self._update(minibatch)
                # A module with few rows may have none in the last minibatch.
                last.update(dict.fromkeys(minibatch, microbatches))
        self._log(last)
        for module_id, rows in batch.items():
            steps = num_epochs * num_steps(rows)
            self.metrics.log_value(
                (module_id, NUM_MODULE_STEPS_TRAINED), steps, reduce="sum"
            )
        # RLlib adapts the KL coefficient to the logged divergence.
        self.after_gradient_based_update(timesteps=timesteps)
        seconds = time.perf_counter() - began
        self.metrics.log_value((ALL_MODULES, LEARN_SECONDS), seconds, reduce="max")
        return self.metrics.reduce()

    def _module_of(self, module_id: str) -> TokenRLModule:
        """Return a module without the wrapper that synchronizes gradients."""
        module: TokenRLModule = self.module[module_id].unwrapped()
        return module

    def _by_kernel(
        self, module_id: str, tokens: Tokens, *, encoder: bool = False
    ) -> bool:
        """Return True if the kernel pools for actor and critic; see `pools`."""
        module = self._module_of(module_id)
        return module.actor.pools(tokens, encoder=encoder) and (
            module.critic is None or module.critic.is_compiled(encoder=encoder)
        )

    @override
    def _update(self, batch: dict[str, Rows], **kwargs: Any) -> list[Microbatch]:
        """Take one gradient step on a minibatch; return what its metrics need."""
        # The kernel writes the gradient of a whole policy in one call.
        losses: dict[str, Tensor] = {}
        done, autograd_batch = [], dict(batch)
        for module_id in batch:
            result = self._native_gradient(module_id, autograd_batch[module_id])
            if result is not None:
                del autograd_batch[module_id]
                losses[module_id], out = result
                done.append(Microbatch({module_id: out}, {module_id: 1.0}))
        if autograd_batch:
            autograd_losses, microbatches = self._accumulate(autograd_batch)
            losses |= autograd_losses
            done += microbatches
        self._is_first = False
        # All learners take their modules in the same order.
        self._step({module_id: losses[module_id] for module_id in batch})
        return done

    def _native_gradient(
        self, module_id: str, rows: Rows
    ) -> tuple[Tensor, Outputs] | None:
        """Set the gradient of a module's weights by one call of the compiled kernel.

        Returns:
            The loss and the outputs; None if the kernel cannot compute all of it, or
            if several learners average their gradients.
        """
        module, flat = self.module[module_id], self._flat[module_id]
        if isinstance(module, DistributedDataParallel):
            return None
        critic: Critic | None = module.critic
        tokens = Tokens(**rows[Columns.OBS])
        # The kernel of a whole policy does not support action masks; the kernel of the
        # loss gets logits that are already masked.
        if (
            not (tokens.features.is_cpu and self._takes_whole[module_id])
            or not flat.is_plain(module.unused_parameters)
            or module.actor.recurrent
            or (critic is not None and critic.shares_trunk)
            or tokens.action_mask is not None
        ):
            return None
        # `train` visits all submodules, so do not call it in every step.
        if not module.training:
            module.train()
        columns = (Columns.OBS, *STEP_COLUMNS)
        steps = existing_steps(rows, {key: rows[key] for key in columns if key in rows})
        policy = module.actor.actor_critic(Tokens(**steps[Columns.OBS]))
        recorded = recorded_steps(steps, module.actor.actions)
        if policy is None or not recorded.fits(policy.network.values):
            return None
        coefficients, scale = self._coefficients(module_id), steps.get(VALUE_SCALE)
        flat.view_grad()
        if critic is None:
            loss, logits, values = ppo_gradient(policy, coefficients, recorded, scale)
        else:
            # Actor and critic have only the loss in common.
            actor = replace(coefficients, value=0.0)
            loss, logits, _ = ppo_gradient(without_value(policy), actor, recorded, None)
            predicted = {Columns.VF_PREDS: module.critic_values(rows)}
            values = existing_steps(rows, predicted)[Columns.VF_PREDS]
            errors = value_errors(values, recorded.targets, coefficients.value_clip)
            value_loss = coefficients.value * errors.mean()
            value_loss.backward()  # the critic's gradient is still 0
            loss = loss + value_loss.detach()
        outputs = Outputs(steps, logits, values)
        self._record_divergence(module_id, outputs)
        return loss, outputs

    def _accumulate(
        self, batch: dict[str, Rows]
    ) -> tuple[dict[str, Tensor], list[Microbatch]]:
        """Set the gradients of the modules' weights by autograd; return the losses."""
        for module_id in batch:
            self._flat[module_id].zero_grad()
        # Accumulate the gradient of the minibatch over microbatches. Each loss is a
        # mean over its steps, so it is weighted by its fraction of the minibatch.
        losses: dict[str, Tensor] = {}
        done = []
        microbatches = list(self._microbatches(batch))
        for number, (part, weights) in enumerate(microbatches, 1):
            with ExitStack() as stack:
                # Learners average their gradients once, in the last backward pass.
                if number < len(microbatches):
                    for module in (self.module[module_id] for module_id in part):
                        if isinstance(module, DistributedDataParallel):
                            stack.enter_context(module.no_sync())
                out = {
                    module_id: self._outputs(module_id, rows)
                    for module_id, rows in part.items()
                }
                part_losses = {
                    module_id: self._loss(module_id, out[module_id])
                    for module_id in out
                }
                if len(microbatches) > 1:
                    part_losses = {
                        module_id: weights[module_id] * loss
                        for module_id, loss in part_losses.items()
                    }
                torch.autograd.backward(list(part_losses.values()))
            for module_id, loss in part_losses.items():
                loss = loss.detach()
                losses[module_id] = (
                    losses[module_id] + loss if module_id in losses else loss
                )
            done.append(Microbatch(out, weights))
        for module_id in batch:
            self._flat[module_id].gather_grad()
        return losses, done

    def _step(self, losses: Mapping[str, Tensor]) -> None:
        """Clip the gradients and update the weights, unless a number is not finite."""
        gradients = {
            module_id: cast(Tensor, self._flat[module_id].values.grad)
            for module_id in losses
        }
        norms = {
            module_id: gradient.norm() for module_id, gradient in gradients.items()
        }
        # The sum of a norm and a loss is finite only if both are.
        bad = {
            module_id: _is_bad(norms[module_id] + losses[module_id])
            for module_id in losses
        }
        # No branch here, which would wait for the GPU.
        skip = functools.reduce(torch.maximum, bad.values())
        for module_id, gradient in gradients.items():
            if (limit := self.config.grad_clip) is not None:
                # As `torch.nn.utils.clip_grad_norm_`, its 1e-6 included.
                gradient *= (limit / (norms[module_id] + 1e-6)).clamp(max=1.0)
            (optimizer,) = (opt for _, opt in self.get_optimizers_for_module(module_id))
            optimizer.found_inf = skip
            optimizer.step()
            self._metrics[module_id, GRADIENT_NORM] = norms[module_id]
            key = (module_id, NON_FINITE_LOSS)
            previous = self._metrics.get(key, bad[module_id])
            self._metrics[key] = torch.maximum(bad[module_id], previous)

    def _outputs(self, module_id: str, rows: Rows) -> Outputs:
        """Compute logits and values of the steps in ``rows``."""
        module = self.module[module_id]
        out = module.forward_train(rows)
        if Columns.LOSS_MASK in rows:
            # Drop the padding of sequences; the loss is over single steps.
            steps = {key: rows[key] for key in STEP_COLUMNS if key in rows}
            rows, out = existing_steps(rows, steps), existing_steps(rows, out)
        if Columns.VF_PREDS in out:
            values = self._module_of(module_id).scaled(out[Columns.VF_PREDS], rows)
        else:
            values = self._module_of(module_id).compute_values(
                rows, out[Columns.EMBEDDINGS]
            )
        outputs = Outputs(rows, out[Columns.ACTION_DIST_INPUTS], values)
        self._record_divergence(module_id, outputs)
        return outputs

    def _terms(self, module_id: str, outputs: Outputs) -> PPOTerms:
        config = self.config.get_config_for_module(module_id)
        actions = self._module_of(module_id).policy.actions
        return PPOTerms.of(config, actions, *outputs)

    def _loss(self, module_id: str, outputs: Outputs) -> Tensor:
        """Compute the mean loss, by the compiled kernel where it fits."""
        actions = self._module_of(module_id).policy.actions
        recorded = recorded_steps(outputs.rows, actions)
        if recorded.fits(outputs.logits, outputs.values):
            coefficients = self._coefficients(module_id)
            return ppo_loss(coefficients, recorded, outputs.logits, outputs.values)
        terms = self._terms(module_id, outputs)
        value_coeff = self.config.get_config_for_module(module_id).vf_loss_coeff
        # The KL coefficient stays a tensor, which on a GPU is not read.
        kl_coeff = self.curr_kl_coeffs_per_module[module_id]
        return terms.loss(value_coeff, self._entropy_coeff(module_id), kl_coeff)

    def _coefficients(self, module_id: str) -> Coefficients:
        config = self.config.get_config_for_module(module_id)
        kl_coeff = self.curr_kl_coeffs_per_module[module_id]
        return Coefficients(
            clip=config.clip_param,
            value=config.vf_loss_coeff,
            value_clip=config.vf_clip_param,
            entropy=self._entropy_coeff(module_id),
            kl=float(kl_coeff) if config.use_kl_loss else 0.0,
        )

    def _entropy_coeff(self, module_id: str) -> float:
        scheduler = self.entropy_coeff_schedulers_per_module[module_id]
        return float(scheduler.get_current_value())

    def _microbatches(
        self, batch: dict[str, Rows]
    ) -> Iterator[tuple[dict[str, Rows], dict[str, float]]]:
        """Yield microbatches, with the fraction of each module's steps in them."""
        counts = {
            module_id: len(rows[Columns.ACTIONS]) for module_id, rows in batch.items()
        }
        steps = {module_id: num_steps(rows) for module_id, rows in batch.items()}
        # The module with the most steps decides; each part of it has at least one row.
        number = 1
        if not all(self._takes_whole[module_id] for module_id in batch):
            number = -(-max(steps.values()) // MICROBATCH_STEPS)
            number = min(number, max(counts.values()))
        if number == 1:
            yield batch, dict.fromkeys(batch, 1.0)
            return
        for i in range(number):
            part, weights = {}, {}
            for module_id, rows in batch.items():
                # Take the same fraction of each module's rows.
                start, stop = (counts[module_id] * j // number for j in (i, i + 1))
                if stop > start:
                    part[module_id] = map_rows(
                        operator.itemgetter(slice(start, stop)), rows
                    )
                    weights[module_id] = num_steps(part[module_id]) / steps[module_id]
            yield part, weights

    @torch.no_grad()
    def _log(self, last: Mapping[str, list[Microbatch]]) -> None:
        """Log the metrics of an update, given each module's last minibatch."""
        for module_id, microbatches in last.items():
            parts = [part for part in microbatches if module_id in part.outputs]
            terms = [self._terms(module_id, part.outputs[module_id]) for part in parts]
            weighted = [
                part.weights[module_id] * part_terms.statistics()
                for part, part_terms in zip(parts, terms, strict=True)
            ]
            means = torch.stack(weighted).sum(0)
            for name, value in zip(STATISTICS, means, strict=True):
                self._metrics[module_id, name] = value
            # A ratio of variances is not the mean of the microbatches' ratios.
            self._metrics[module_id, LEARNER_RESULTS_VF_EXPLAINED_VAR_KEY] = (
                explained_variance(
                    torch.cat([part_terms.values for part_terms in terms]),
                    torch.cat([part_terms.targets for part_terms in terms]),
                )
            )
            divergences = [kl for part in terms if (kl := part.kl) is not None]
            if divergences and self.config.num_learners > 1:
                self._divergences.setdefault(module_id, divergences)
        # Learners take the modules in the same order.
        for module_id, divergences in sorted(self._divergences.items()):
            mean = self._mean_over_learners(torch.cat(divergences))
            self._metrics[module_id, LEARNER_RESULTS_KL_KEY] = mean
        for key, value in self._metrics.items():
            self.metrics.log_value(key, value.item(), window=1)

    def _mean_over_learners(self, numbers: Tensor) -> Tensor:
        """Average numbers, except NaN, over the steps of all learners."""
        # Steps of minibatches that are not finite are skipped, and do not count.
        mean = numbers.nanmean()
        if self.config.num_learners < 2:
            return mean
        count = (~numbers.isnan()).sum()
        # The mean of no step is NaN; its count is 0.
        sums = torch.stack([mean.nan_to_num() * count, count])
        distributed.all_reduce(sums)
        return sums[0] / sums[1]

    @torch.no_grad()
    def _record_divergence(self, module_id: str, outputs: Outputs) -> None:
        """Record the divergence from the sampling policy before the first step.

        Record it in all minibatches if the estimate is their mean.
        """
        settings: PPOSettings = self.config.learner_config_dict[SETTINGS]
        is_averaged = settings.kl_coeff > 0 and settings.kl_estimate == "mean"
        if not (self._is_first or is_averaged):
            return
        rows, logits, _ = outputs
        actions = self._module_of(module_id).policy.actions
        kl = kl_divergence(actions, rows[Columns.ACTION_DIST_INPUTS], logits)
        if is_averaged:
            self._divergences[module_id].append(kl)
        if not self._is_first:
            return
        ratio = self._terms(module_id, outputs).ratio
        for name, value in (
            (FIRST_RATIO_ERROR, (ratio - 1).abs().max()),
            (FIRST_KL, kl.mean()),
        ):
            # The largest of the microbatches.
            previous = self._metrics.get((module_id, name), value)
            self._metrics[module_id, name] = torch.maximum(previous, value)


def _is_bad(number: Tensor) -> Tensor:
    """Return 1.0 if a number is NaN or infinite, else 0.0."""
    # NaN and infinity less themselves are NaN, which differs from 0.
    return (number - number != 0).float()
