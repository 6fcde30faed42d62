"""The PPO learner: RLlib's loss, our minibatches, gradients in cache-sized pieces."""

import operator
import time
import zlib
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
from ray.rllib.policy.sample_batch import SampleBatch
from ray.rllib.utils.metrics import ALL_MODULES
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from marl_pool.training.ppo.batch import (
    VALUE_SCALE,
    EpochIterator,
    Rows,
    existing,
    map_rows,
    num_steps,
)
from marl_pool.training.ppo.episodes import RECORDED

PIECE = 1024
"""Steps of one piece of a minibatch on a CPU: their activations stay in the cache."""

STEP_COLUMNS = (Columns.ACTIONS, VALUE_SCALE, *RECORDED)
"""What the loss of a step needs, beside the module's outputs."""

NUM_MINIBATCHES = "num_minibatches"
"""Key of ``learner_config_dict``: minibatches of one epoch."""

FIRST_RATIO_ERROR = "first_ratio_error"
"""Metric: largest |ratio - 1| in an update's first pass, before any step."""
FIRST_KL = "first_kl"
"""Metric: mean KL divergence from the sampling policy in an update's first pass."""
KL_COEFFICIENTS = "kl_coefficients"
"""Component of the learner's state."""
LEARN_SECONDS = "learn_seconds"
"""Metric: of one update, all its epochs."""
PIECEWISE = (
    POLICY_LOSS_KEY,
    VF_LOSS_KEY,
    LEARNER_RESULTS_VF_LOSS_UNCLIPPED_KEY,
    LEARNER_RESULTS_VF_EXPLAINED_VAR_KEY,
    ENTROPY_KEY,
    LEARNER_RESULTS_KL_KEY,
)
"""RLlib's metrics of a loss; ours are means over the pieces of a minibatch."""
NON_FINITE_LOSS = "non_finite_loss"
"""Metric: 1 if a loss or gradient was NaN or infinite; that step was not taken."""


class BatchedPPOLearner(PPOTorchLearner):
    """PPO as RLlib computes it, with these differences.

    - Every module passes over its own rows exactly ``num_epochs`` times.
    - On a CPU the gradient of a minibatch is summed over pieces that fit the cache;
      the sum is that of the whole minibatch.
    - The order of the rows and dropout depend on the seed and the number of the
      update alone, and the state holds the KL coefficients, so that a resumed run
      goes on as if it had not stopped.
    - A loss or gradient that is not finite skips its step and is reported.
    """

    def configure_optimizers_for_module(self, module_id: str, config: Any) -> None:
        """Register Adam in its fused form: small networks are all overhead."""
        parameters = self.get_parameters(self._module[module_id])
        self.register_optimizer(
            module_id=module_id,
            optimizer=torch.optim.Adam(parameters, fused=True),
            params=parameters,
            lr_or_lr_schedule=config.lr,
        )

    def before_gradient_based_update(self, *, timesteps: dict[str, Any]) -> None:
        """Start the clock of the update."""
        super().before_gradient_based_update(timesteps=timesteps)
        self._began = time.perf_counter()

    def after_gradient_based_update(self, *, timesteps: dict[str, Any]) -> None:
        """Stop the clock of the update."""
        super().after_gradient_based_update(timesteps=timesteps)
        seconds = time.perf_counter() - self._began
        self.metrics.log_value((ALL_MODULES, LEARN_SECONDS), seconds, reduce="max")

    def get_state(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """RLlib's state, and the KL coefficients, which it forgets."""
        coefficients = {
            module_id: float(coefficient)
            for module_id, coefficient in self.curr_kl_coeffs_per_module.items()
        }
        return {**super().get_state(*args, **kwargs), KL_COEFFICIENTS: coefficients}

    def set_state(self, state: dict[str, Any]) -> None:
        """Take over a state of `get_state`."""
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
    ) -> EpochIterator:
        # RLlib counts minibatches in env steps, and shares of them for several
        # learners; ours are counted in rows, once, in `algorithm_config`.
        batch = self._make_batch_if_necessary(training_data=training_data)
        for module_id in list(batch.policy_batches):
            if not self.should_module_be_updated(module_id, batch):
                del batch.policy_batches[module_id]
        seed = zlib.crc32(f"{self.config.seed} {self._weights_seq_no}".encode())
        torch.manual_seed(seed)
        self._first_pass = True
        generator = torch.Generator("cpu").manual_seed(seed)
        return EpochIterator(
            batch,
            num_epochs=num_epochs,
            num_minibatches=self.config.learner_config_dict[NUM_MINIBATCHES],
            generator=generator if shuffle_batch_per_epoch else None,
            in_step=self.config.num_learners > 1,
        )

    def _uncompiled_update(
        self, batch: dict[str, Any], **kwargs: Any
    ) -> tuple[Any, dict[str, Tensor], dict]:
        for optimizer in self._optimizer_parameters:
            optimizer.zero_grad(set_to_none=True)
        losses: dict[str, Tensor] = {}
        fwd_out: Any = {}
        self._sums: dict[tuple[str, str], Any] = {}
        pieces = list(self._pieces(batch))
        for number, (piece, shares) in enumerate(pieces, 1):
            self._shares = shares
            with self._apart(piece) if number < len(pieces) else nullcontext():
                fwd_out = self.module.forward_train(piece)
                parts = self.compute_losses(fwd_out=fwd_out, batch=piece)
                weighted = {mid: loss * shares[mid] for mid, loss in parts.items()}
                sum(weighted.values()).backward()
            for mid, loss in weighted.items():
                losses[mid] = losses.get(mid, 0.0) + loss.detach()
        self._first_pass = False
        for key, value in self._sums.items():
            self.metrics.log_value(key, value, window=1)
        self._step(losses)
        return fwd_out, losses, {}

    def compute_loss_for_module(
        self, *, module_id: str, config: Any, batch: Rows, fwd_out: dict[str, Tensor]
    ) -> Tensor:
        """RLlib's PPO loss; the first pass also logs how far it is off policy."""
        if Columns.LOSS_MASK in batch:
            # Steps that exist, one after the other: a loss as of any other policy.
            mask = batch[Columns.LOSS_MASK]
            steps = {key: batch[key] for key in STEP_COLUMNS if key in batch}
            batch, fwd_out = existing(mask, steps), existing(mask, fwd_out)
        if self._first_pass:
            self._log_first_pass(module_id, batch, fwd_out)
        loss = super().compute_loss_for_module(
            module_id=module_id, config=config, batch=batch, fwd_out=fwd_out
        )
        # RLlib logs what this piece gave, and adapts the KL coefficient to it.
        for name in PIECEWISE:
            key = (module_id, name)
            part = self._shares[module_id] * self.metrics.peek(key)
            self._sums[key] = self._sums.get(key, 0.0) + part
        return loss

    def _pieces(
        self, batch: dict[str, Any]
    ) -> Iterator[tuple[dict[str, Any], dict[str, float]]]:
        counts = {mid: len(rows[Columns.ACTIONS]) for mid, rows in batch.items()}
        steps = {mid: num_steps(rows) for mid, rows in batch.items()}
        on_cpu = torch.device(self._device).type == "cpu"
        if not on_cpu:
            yield batch, dict.fromkeys(counts, 1.0)
            return
        number = min(-(-max(steps.values()) // PIECE), max(counts.values()))
        bounds = {
            mid: [count * i // number for i in range(number + 1)]
            for mid, count in counts.items()
        }
        for i in range(number):
            piece, shares = {}, {}
            for mid, rows in batch.items():
                start, stop = bounds[mid][i : i + 2]
                if stop > start:
                    piece[mid] = SampleBatch(
                        map_rows(operator.itemgetter(slice(start, stop)), dict(rows))
                    )
                    shares[mid] = num_steps(piece[mid]) / steps[mid]
            yield piece, shares

    @contextmanager
    def _apart(self, modules: Iterable[str]) -> Iterator[None]:
        """Let several learners average gradients when they are whole, not before."""
        with ExitStack() as stack:
            for module_id in modules:
                module = self.module[module_id]
                if isinstance(module, DistributedDataParallel):
                    stack.enter_context(module.no_sync())
            yield

    def _step(self, losses: dict[str, Tensor]) -> None:
        finite = {mid: self._is_finite(mid, loss) for mid, loss in losses.items()}
        for mid, good in finite.items():
            self.metrics.log_value((mid, NON_FINITE_LOSS), int(not good), reduce="max")
        if all(finite.values()):
            gradients = {ref: p.grad for ref, p in self._params.items()}
            self.apply_gradients(self.postprocess_gradients(gradients))

    def _is_finite(self, module_id: str, loss: Tensor) -> bool:
        parameters = self.module[module_id].parameters()
        gradients = [p.grad for p in parameters if p.grad is not None]
        norm = torch.nn.utils.get_total_norm(gradients)
        return bool(torch.isfinite(norm + loss))

    def _log_first_pass(
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
