"""The student's gradient steps."""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.utils._pytree import tree_map

from marl_pool.policies.agent import Agent
from marl_pool.pooling.memory import Memory
from marl_pool.training.cloning.batches import Batch
from marl_pool.training.cloning.reader import HintReader, hint_errors


class Score(NamedTuple):
    """How well a student answers, as sums over steps."""

    loss: Tensor
    """Sum of the steps' losses."""
    right: Tensor
    """How many choices were the teacher's; of a box nothing."""
    hint_error: Tensor
    """Sum of the steps' squared errors in reading hints; without a reader nothing."""
    steps: int
    """How many steps."""

    def plus(self, other: "Score") -> "Score":
        """Both together."""
        return Score(
            self.loss + other.loss,
            self.right + other.right,
            self.hint_error + other.hint_error,
            self.steps + other.steps,
        )


LEAST = 0.1
"""Weight of a step in which all choices are worth the same."""
NOTHING = Score(torch.zeros(()), torch.zeros(()), torch.zeros(()), 0)


class Loss(NamedTuple):
    """What counts in a step; see `CloneSettings`."""

    soft: bool = False
    """Learn the teacher's probabilities."""
    by_gap: float | None = None
    """Gap of the teacher's logits from which on a step has its full weight."""
    regret: float = 0.0
    """Weight of what the student is expected to lose."""

    @property
    def needs_logits(self) -> bool:
        """Whether it takes a teacher that has logits."""
        return self.soft or self.by_gap is not None or self.regret > 0


def losses(outputs: Tensor, batch: Batch, loss: Loss) -> Tensor:
    r"""Losses ``(B, T)``, zero where a step does not count.

    For a box it is the squared error, the mean over the action's numbers; for a choice

    .. math:: w\, H(p, \pi) + \rho \sum_a \pi(a) (\max_b q_b - q_a)

    with the student's probabilities :math:`\pi`, the teacher's choice or, where
    ``soft``, its probabilities :math:`p`, its logits q, the weight
    :math:`w = 0.1 + \min(1, (\max_b q_b - \min_b q_b) / g)`, or 1 without ``by_gap``
    g, and ``regret`` :math:`\rho`. Where q is what actions are worth, the last term is
    what is lost by not taking the best (as in Ross and Bagnell, Reinforcement and
    imitation learning via interactive no-regret learning, 2014).

    Args:
        outputs: ``(B, T, L)`` of the student.
        batch: what the teacher said.
        loss: what counts.
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
        each = _by_worth(each.view_as(batch.valid), outputs, batch, loss)
    return each.masked_fill(~batch.valid, 0.0)


def _by_worth(each: Tensor, outputs: Tensor, batch: Batch, loss: Loss) -> Tensor:
    """Weigh losses by how much depends on the choice, and add what is lost."""
    if loss.by_gap is None and not loss.regret:
        return each
    assert batch.logits is not None
    lost = batch.logits.amax(-1, keepdim=True) - batch.logits
    if loss.by_gap is not None:
        each = each * (LEAST + (lost.amax(-1) / loss.by_gap).clamp(max=1.0))
    return each + loss.regret * (outputs.softmax(-1) * lost).sum(-1)


class Learner:
    """A student and its optimizer.

    Args:
        student: learns in place.
        lr: learning rate of Adam, until `learn` is told another.
        grad_clip: largest global norm of the gradient; None: no limit.
        truncate: steps that a gradient goes back in time; None: the whole sequence.
            Then each chunk is a gradient step of its own, and the memory is carried
            from one to the next.
        loss: what counts.
        bfloat16: compute in bfloat16 where torch thinks that it is safe.
        reader: reads hints from the student's hidden layer, and learns along; None:
            nothing is read.
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
        reader: HintReader | None = None,
        auxiliary: float = 0.0,
    ) -> None:
        self.student, self.reader, self.auxiliary = student, reader, auxiliary
        self.grad_clip, self.truncate = grad_clip, truncate
        self.loss, self.bfloat16 = loss, bfloat16
        self.parameters = list(student.parameters())
        if reader is not None:
            self.parameters += reader.parameters()
        self.optimizer = torch.optim.Adam(self.parameters, lr=lr)
        self.gradient_norm = torch.zeros(())

    def learn(self, batch: Batch, lr: float | None = None) -> Score:
        """Learn from one batch: a gradient step, or one for each truncated chunk.

        Args:
            batch: on the student's device.
            lr: learning rate from now on; None: as it is.
        """
        if lr is not None:
            for group in self.optimizer.param_groups:
                group["lr"] = lr
        total, memory = NOTHING, None
        for chunk in batch.windows(self.truncate):
            score, memory = self._answer(chunk, memory)
            if not score.steps:
                continue
            self.optimizer.zero_grad(set_to_none=True)
            wrong = score.loss + self.auxiliary * score.hint_error
            (wrong / score.steps).backward()
            limit = torch.inf if self.grad_clip is None else self.grad_clip
            self.gradient_norm = torch.nn.utils.clip_grad_norm_(self.parameters, limit)
            self.optimizer.step()
            memory = tree_map(_detached, memory)
            total = total.plus(tree_map(_detached, score))
        return total

    @torch.no_grad()
    def measure(self, batch: Batch) -> Score:
        """How well the student answers a batch, without learning from it."""
        return self._answer(batch, None)[0]

    def _answer(self, batch: Batch, memory: Memory | None) -> tuple[Score, Memory]:
        if memory is None:
            size, _, num_tokens, _ = batch.features.shape
            memory = self.student.initial_memory(size, num_tokens)
        outputs, hidden, memory = self._unroll(batch, memory)
        each = losses(outputs, batch, self.loss)
        right = hint_error = each.new_zeros(())
        if batch.label.dim() == 2:
            right = ((outputs.argmax(-1) == batch.label) & batch.valid).sum()
        if self.reader is not None:
            assert batch.hints is not None
            read = self.reader(hidden)
            hint_error = hint_errors(read, batch.hints, batch.valid).sum()
        return Score(each.sum(), right, hint_error, int(batch.valid.sum())), memory

    def _unroll(
        self, batch: Batch, memory: Memory
    ) -> tuple[Tensor, Tensor | None, Memory]:
        """Answers, the hidden layer if it is read, and the memory."""
        seen = (batch.features, batch.padding, batch.before, memory)
        device = batch.features.device.type
        with torch.autocast(device, torch.bfloat16, enabled=self.bfloat16):
            if self.reader is not None:
                return self.student.unroll_hidden(*seen)
            outputs, memory = self.student(*seen)
        return outputs, None, memory


def _detached(part: Any) -> Any:
    return part.detach() if isinstance(part, Tensor) else part
