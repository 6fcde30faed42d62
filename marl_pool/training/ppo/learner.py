"""PPO learner: RLlib's loss, and gradients accumulated over microbatches."""

import operator
import time
import zlib
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from ray.rllib.algorithms.ppo.ppo import (
    LEARNER_RESULTS_KL_KEY,
    LEARNER_RESULTS_VF_EXPLAINED_VAR_KEY,
    LEARNER_RESULTS_VF_LOSS_UNCLIPPED_KEY,
)
from ray.rllib.algorithms.ppo.torch.ppo_torch_learner import PPOTorchLearner
from ray.rllib.core.columns import Columns
from ray.rllib.core.learner.learner import ENTROPY_KEY, POLICY_LOSS_KEY, VF_LOSS_KEY
from ray.rllib.policy.sample_batch import MultiAgentBatch, SampleBatch
from ray.rllib.utils.metrics import ALL_MODULES
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from typing_extensions import override

from marl_pool.training.ppo.batch import (
    VALUE_SCALE,
    Rows,
    map_rows,
    minibatches,
    num_steps,
)
from marl_pool.training.ppo.episodes import RECORDED

MICROBATCH_STEPS = 1024
"""Steps of a microbatch on a CPU, few enough that activations stay in the cache."""

STEP_COLUMNS = (Columns.ACTIONS, VALUE_SCALE, *RECORDED)
"""Columns that the loss of a step needs, besides the module's outputs."""

NUM_MINIBATCHES = "num_minibatches"
"""Key of ``learner_config_dict``: minibatches in one epoch."""

FIRST_RATIO_ERROR = "first_ratio_error"
"""Metric: largest |ratio - 1| in an update's first minibatch, before any step."""
FIRST_KL = "first_kl"
"""Metric: mean KL divergence from the sampling policy in the first minibatch."""
KL_COEFFICIENTS = "kl_coefficients"
"""Component of the learner's state."""
LEARN_SECONDS = "learn_seconds"
"""Metric: seconds of one update, over all its epochs."""
AVERAGED = (
    POLICY_LOSS_KEY,
    VF_LOSS_KEY,
    LEARNER_RESULTS_VF_LOSS_UNCLIPPED_KEY,
    LEARNER_RESULTS_VF_EXPLAINED_VAR_KEY,
    ENTROPY_KEY,
    LEARNER_RESULTS_KL_KEY,
)
"""RLlib's metrics of a loss, here averaged over the microbatches of a minibatch."""
NON_FINITE_LOSS = "non_finite_loss"
"""Metric: 1 if a loss or gradient was NaN or infinite, so that its step was skipped."""


class BatchedPPOLearner(PPOTorchLearner):
    r"""Proximal policy optimization with RLlib's loss and our own minibatches.

    .. math::
        L = -\min(\rho A, \mathrm{clip}(\rho, 1 - \epsilon, 1 + \epsilon) A)
            + c_v (V - V^*)^2 - c_e H + c_{kl} KL

    :math:`\rho` is the ratio of the action's probability to that while sampling.

    Source: Schulman et al., Proximal policy optimization algorithms (2017),
    https://arxiv.org/abs/1707.06347, with the loss of RLlib's ``PPOTorchLearner``.
    Differences from RLlib:

    - Every module passes over its own rows exactly ``num_epochs`` times.
    - On a CPU the gradient of a minibatch is accumulated over microbatches that fit
      the cache. It equals the gradient of the whole minibatch.
    - The order of the rows and dropout depend only on the seed and the number of the
      update, and the state includes the KL coefficients, so that a resumed run
      continues exactly.
    - A loss or gradient that is not finite skips the optimizer step and is reported.
    """

    @override
    def configure_optimizers_for_module(self, module_id: str, config: Any) -> None:
        # Fused Adam: the overhead of many small kernels dominates small networks.
        parameters = self.get_parameters(self._module[module_id])
        self.register_optimizer(
            module_id=module_id,
            optimizer=torch.optim.Adam(parameters, fused=True),
            params=parameters,
            lr_or_lr_schedule=config.lr,
        )

    @override
    def before_gradient_based_update(self, *, timesteps: dict[str, Any]) -> None:
        super().before_gradient_based_update(timesteps=timesteps)
        self._began = time.perf_counter()

    @override
    def after_gradient_based_update(self, *, timesteps: dict[str, Any]) -> None:
        super().after_gradient_based_update(timesteps=timesteps)
        seconds = time.perf_counter() - self._began
        self.metrics.log_value((ALL_MODULES, LEARN_SECONDS), seconds, reduce="max")

    @override
    def get_state(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        # RLlib leaves out the KL coefficients.
        kl = {mid: float(c) for mid, c in self.curr_kl_coeffs_per_module.items()}
        return {**super().get_state(*args, **kwargs), KL_COEFFICIENTS: kl}

    @override
    def set_state(self, state: dict[str, Any]) -> None:
        super().set_state(state)
        for module_id, coefficient in state.get(KL_COEFFICIENTS, {}).items():
            self.curr_kl_coeffs_per_module[module_id].fill_(coefficient)

    def _create_iterator_if_necessary(
        self,
        *,
        training_data: Any,
        num_epochs: int = 1,
        shuffle_batch_per_epoch: bool = False,
        **kwargs: Any,
    ) -> Iterator[MultiAgentBatch]:
        # RLlib counts minibatches in environment steps and divides them among learners;
        # `algorithm_config` counts them in rows.
        batch = self._make_batch_if_necessary(training_data=training_data)
        # Remove modules that RLlib was told not to update.
        for module_id in list(batch.policy_batches):
            if not self.should_module_be_updated(module_id, batch):
                del batch.policy_batches[module_id]
        # Seed every update by its own number, so that a resumed run repeats it exactly.
        seed = zlib.crc32(f"{self.config.seed} {self._weights_seq_no}".encode())
        torch.manual_seed(seed)
        self._is_first = True
        generator = torch.Generator("cpu").manual_seed(seed)
        return minibatches(
            batch,
            num_epochs=num_epochs,
            num_minibatches=self.config.learner_config_dict[NUM_MINIBATCHES],
            generator=generator if shuffle_batch_per_epoch else None,
            in_step=self.config.num_learners > 1,
        )

    def _uncompiled_update(
        self, batch: dict[str, Any], **kwargs: Any
    ) -> tuple[Any, dict[str, Tensor], dict]:
        # Start from zero gradients, losses and metrics.
        for optimizer in self._optimizer_parameters:
            optimizer.zero_grad(set_to_none=True)
        losses: dict[str, Any] = defaultdict(float)
        self._sums: dict[tuple[str, str], Any] = defaultdict(float)
        # Accumulate the gradient of the minibatch over microbatches. Each loss is a
        # mean over its steps, so it is weighted by its fraction of the minibatch.
        microbatches = list(self._microbatches(batch))
        for number, (part, weights) in enumerate(microbatches, 1):
            self._weights = weights
            # Learners average their gradients once, in the last backward pass.
            last = number == len(microbatches)
            with nullcontext() if last else self._no_sync(part):
                fwd_out = self.module.forward_train(part)
                own = self.compute_losses(fwd_out=fwd_out, batch=part)
                weighted = {mid: loss * weights[mid] for mid, loss in own.items()}
                sum(weighted.values()).backward()
            for mid, loss in weighted.items():
                losses[mid] += loss.detach()
        self._is_first = False
        # Log averages over the minibatch in place of those of its last microbatch;
        # RLlib adapts the KL coefficient to them.
        for key, value in self._sums.items():
            self.metrics.log_value(key, value, window=1)
        # Clip the gradients and update the weights, unless a number is not finite.
        finite = {mid: self._is_finite(mid, loss) for mid, loss in losses.items()}
        for mid, good in finite.items():
            self.metrics.log_value((mid, NON_FINITE_LOSS), int(not good), reduce="max")
        if all(finite.values()):
            gradients = {ref: p.grad for ref, p in self._params.items()}
            self.apply_gradients(self.postprocess_gradients(gradients))
        return fwd_out, losses, {}

    @override
    def compute_loss_for_module(
        self, *, module_id: str, config: Any, batch: Rows, fwd_out: dict[str, Tensor]
    ) -> Tensor:
        if Columns.LOSS_MASK in batch:
            # Drop the padding of sequences; the loss is then that of any other policy.
            select = operator.itemgetter(batch[Columns.LOSS_MASK])
            steps = {key: batch[key] for key in STEP_COLUMNS if key in batch}
            batch, fwd_out = map_rows(select, steps), map_rows(select, fwd_out)
        # Log the distance from the sampling policy before the first step of an update.
        if self._is_first:
            self._log_off_policy(module_id, batch, fwd_out)
        # RLlib computes the clipped PPO loss of the remaining rows.
        loss = super().compute_loss_for_module(
            module_id=module_id, config=config, batch=batch, fwd_out=fwd_out
        )
        # RLlib has just logged the metrics of this microbatch alone.
        for name in AVERAGED:
            key = (module_id, name)
            self._sums[key] += self._weights[module_id] * self.metrics.peek(key)
        return loss

    def _microbatches(
        self, batch: dict[str, Any]
    ) -> Iterator[tuple[dict[str, Any], dict[str, float]]]:
        """Yield microbatches, with the fraction of each module's steps in them."""
        counts = {mid: len(rows[Columns.ACTIONS]) for mid, rows in batch.items()}
        steps = {mid: num_steps(rows) for mid, rows in batch.items()}
        # Microbatches serve a CPU's cache; a GPU takes the whole minibatch.
        if torch.device(self._device).type != "cpu":
            yield batch, dict.fromkeys(counts, 1.0)
            return
        # Split by the module with the most steps; a part has at least one row.
        number = -(-max(steps.values()) // MICROBATCH_STEPS)
        number = min(number, max(counts.values()))
        for i in range(number):
            part, weights = {}, {}
            for mid, rows in batch.items():
                # Take the same fraction of each module's rows.
                start, stop = (counts[mid] * j // number for j in (i, i + 1))
                if stop > start:
                    part[mid] = SampleBatch(
                        map_rows(operator.itemgetter(slice(start, stop)), dict(rows))
                    )
                    weights[mid] = num_steps(part[mid]) / steps[mid]
            yield part, weights

    @contextmanager
    def _no_sync(self, modules: Iterable[str]) -> Iterator[None]:
        """Accumulate gradients without averaging them over learners."""
        with ExitStack() as stack:
            for module_id in modules:
                module = self.module[module_id]
                if isinstance(module, DistributedDataParallel):
                    stack.enter_context(module.no_sync())
            yield

    def _is_finite(self, module_id: str, loss: Tensor) -> bool:
        parameters = self.module[module_id].parameters()
        gradients = [p.grad for p in parameters if p.grad is not None]
        norm = torch.nn.utils.get_total_norm(gradients)
        return bool(torch.isfinite(norm + loss))

    def _log_off_policy(
        self, module_id: str, batch: Rows, fwd_out: dict[str, Tensor]
    ) -> None:
        module = self.module[module_id].unwrapped()
        distribution = module.get_train_action_dist_cls()
        with torch.no_grad():
            now = distribution.from_logits(fwd_out[Columns.ACTION_DIST_INPUTS])
            then = distribution.from_logits(batch[Columns.ACTION_DIST_INPUTS])
            log_probs = now.logp(batch[Columns.ACTIONS])
            error = ((log_probs - batch[Columns.ACTION_LOGP]).exp() - 1).abs().max()
            kl = then.kl(now).mean()
        self.metrics.log_value((module_id, FIRST_RATIO_ERROR), error, reduce="max")
        self.metrics.log_value((module_id, FIRST_KL), kl, reduce="mean")
