"""Losses of imitation, and the student's gradient steps."""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.utils._pytree import tree_map

from marl_pool.policies.agent import Agent
from marl_pool.pooling.memory import Memory
from marl_pool.training.cloning.auxiliary import AuxiliaryHead, auxiliary_errors
from marl_pool.training.cloning.sampler import SequenceBatch


class Score(NamedTuple):
    """Agreement of student and teacher, as sums over steps."""

    loss: Tensor
    """Sum of losses."""
    right: Tensor
    """Number of steps in which both choose the same; 0 for a box."""
    auxiliary_error: Tensor
    """Sum of the auxiliary head's squared errors; 0 without a head."""
    steps: int
    """Number of valid steps."""

    def plus(self, other: "Score") -> "Score":
        """Add two scores."""
        return Score(
            self.loss + other.loss,
            self.right + other.right,
            self.auxiliary_error + other.auxiliary_error,
            self.steps + other.steps,
        )


LEAST_WEIGHT = 0.1
"""Weight of a step in which all of the teacher's logits are equal."""
NOTHING = Score(torch.zeros(()), torch.zeros(()), torch.zeros(()), 0)


class Loss(NamedTuple):
    """Terms of the loss of a step; see `losses` for the formula."""

    soft: bool = False
    """Learn the teacher's probabilities instead of its choice."""
    margin_weighting: float | None = None
    """Smallest margin of the teacher's logits that gives a step its full weight."""
    expected_regret: float = 0.0
    """Weight of the student's expected regret."""

    @property
    def needs_logits(self) -> bool:
        """True if a term depends on the teacher's logits."""
        return (
            self.soft or self.margin_weighting is not None or self.expected_regret > 0
        )


def losses(outputs: Tensor, batch: SequenceBatch, loss: Loss) -> Tensor:
    r"""Compute losses ``(B, T)``, zero at steps that are not valid.

    For a box the loss is the squared error, averaged over the action's components; for
    a choice it is

    .. math:: w\, H(p, \pi) + \rho \sum_a \pi(a) (\max_b q_b - q_a)

    with the student's probabilities :math:`\pi`, the teacher's choice or, with
    ``soft``, its probabilities :math:`p`, its logits q, and the weight
    :math:`w = 0.1 + \min(1, (\max_b q_b - \min_b q_b) / g)` with the margin g of
    ``margin_weighting``, or 1 without it. :math:`\rho` is ``expected_regret``: with
    action values q the last term is the expected loss against the best action, as in
    Ross and Bagnell, Reinforcement and imitation learning via interactive no-regret
    learning (2014), https://arxiv.org/abs/1406.5979.

    Args:
        outputs: the student's outputs ``(B, T, L)``, logits for a choice.
        batch: labels and logits of the teacher.
        loss: terms to include.
    """
    outputs = outputs.float()
    if batch.label.dim() == 3:
        each = (outputs - batch.label).square().mean(-1)
    else:
        target = batch.label.flatten()
        if loss.soft:
            assert batch.logits is not None
            target = batch.logits.softmax(-1).flatten(0, 1)
        each = cross_entropy(outputs.flatten(0, 1), target, reduction="none")
        each = _with_values(each.view_as(batch.valid), outputs, batch, loss)
    return each.masked_fill(~batch.valid, 0.0)


def _with_values(
    each: Tensor, outputs: Tensor, batch: SequenceBatch, loss: Loss
) -> Tensor:
    """Weight losses by the margin of the teacher's logits, and add expected regret."""
    if loss.margin_weighting is None and not loss.expected_regret:
        return each
    assert batch.logits is not None
    regret = batch.logits.amax(-1, keepdim=True) - batch.logits
    if loss.margin_weighting is not None:
        margin = regret.amax(-1) / loss.margin_weighting
        each = each * (LEAST_WEIGHT + margin.clamp(max=1.0))
    return each + loss.expected_regret * (outputs.softmax(-1) * regret).sum(-1)


class Learner:
    """A student and its optimizer, Adam.

    With ``truncate`` each window of that many steps is a gradient step of its own; the
    memory is carried from one window to the next without a gradient (truncated
    backpropagation through time).

    Args:
        student: agent to train, in place.
        lr: learning rate of Adam, until `learn` receives another.
        grad_clip: maximum global norm of the gradient; None: no limit.
        truncate: steps of backpropagation through time; None: the whole sequence.
        loss: terms of the loss.
        bfloat16: use torch's automatic mixed precision with bfloat16.
        auxiliary_head: predicts privileged targets from the student's hidden layer,
            and is trained with the student; None: no auxiliary loss.
        auxiliary: weight of its squared error.
    """

    def __init__(
        self,
        student: Agent,
        *,
        lr: float = 1e-3,
        grad_clip: float | None = None,
        truncate: int | None = None,
        loss: Loss = Loss(),  # noqa: B008 (it cannot change)
        bfloat16: bool = False,
        auxiliary_head: AuxiliaryHead | None = None,
        auxiliary: float = 0.0,
    ) -> None:
        self.student, self.auxiliary_head = student, auxiliary_head
        self.auxiliary = auxiliary
        self.grad_clip, self.truncate = grad_clip, truncate
        self.loss, self.bfloat16 = loss, bfloat16
        self.parameters = list(student.parameters())
        if auxiliary_head is not None:
            self.parameters += auxiliary_head.parameters()
        self.optimizer = torch.optim.Adam(self.parameters, lr=lr)
        self.gradient_norm = torch.zeros(())

    def learn(self, batch: SequenceBatch, lr: float | None = None) -> Score:
        """Take a gradient step, or one for each window of ``truncate`` steps.

        Args:
            batch: sequences, on the student's device.
            lr: learning rate from now on; None: keep the present one.
        """
        if lr is not None:
            for group in self.optimizer.param_groups:
                group["lr"] = lr
        total, memory = NOTHING, None
        for window in batch.windows(self.truncate):
            score, memory = self._score(window, memory)
            if not score.steps:
                continue
            # Minimise the mean over the window's valid steps.
            self.optimizer.zero_grad(set_to_none=True)
            loss = score.loss + self.auxiliary * score.auxiliary_error
            (loss / score.steps).backward()
            limit = torch.inf if self.grad_clip is None else self.grad_clip
            self.gradient_norm = torch.nn.utils.clip_grad_norm_(self.parameters, limit)
            self.optimizer.step()
            # Cut the gradient between windows.
            memory = tree_map(_detached, memory)
            total = total.plus(tree_map(_detached, score))
        return total

    @torch.no_grad()
    def measure(self, batch: SequenceBatch) -> Score:
        """Score a batch without learning from it."""
        return self._score(batch, None)[0]

    def _score(
        self, batch: SequenceBatch, memory: Memory | None
    ) -> tuple[Score, Memory]:
        if memory is None:
            size, _, num_tokens, _ = batch.features.shape
            memory = self.student.initial_memory(size, num_tokens)
        outputs, hidden, memory = self._unroll(batch, memory)
        each = losses(outputs, batch, self.loss)
        right = auxiliary_error = each.new_zeros(())
        if batch.label.dim() == 2:
            right = ((outputs.argmax(-1) == batch.label) & batch.valid).sum()
        if self.auxiliary_head is not None:
            targets = batch.privileged_targets
            assert targets is not None
            predicted = self.auxiliary_head(hidden)
            auxiliary_error = auxiliary_errors(predicted, targets, batch.valid).sum()
        steps = int(batch.valid.sum())
        return Score(each.sum(), right, auxiliary_error, steps), memory

    def _unroll(
        self, batch: SequenceBatch, memory: Memory
    ) -> tuple[Tensor, Tensor | None, Memory]:
        """Return outputs, the hidden layer for an auxiliary head, and the memory."""
        inputs = (batch.features, batch.padding, batch.prev_action, memory)
        device = batch.features.device.type
        with torch.autocast(device, torch.bfloat16, enabled=self.bfloat16):
            if self.auxiliary_head is not None:
                return self.student.unroll_hidden(*inputs)
            outputs, memory = self.student(*inputs)
        return outputs, None, memory


def _detached(part: Any) -> Any:
    return part.detach() if isinstance(part, Tensor) else part
