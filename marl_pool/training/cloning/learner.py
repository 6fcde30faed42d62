"""The student, its imitation losses and its gradient steps."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils._pytree import tree_map_only

from marl_pool.compiled import compile
from marl_pool.envs.base import AgentGroup
from marl_pool.networks.set_network import (
    present_padding,
    seeded,
    validate_state,
)
from marl_pool.options.construction import build
from marl_pool.policies import POLICIES
from marl_pool.policies.actions import (
    ActionSpec,
    choice_log_prob,
    log_prob,
    mask_logits,
)
from marl_pool.policies.agent import Agent
from marl_pool.policies.base import SequencePolicy
from marl_pool.pooling.base import Memory
from marl_pool.training.cloning.sampler import SequenceBatch
from marl_pool.training.cloning.settings import CloneConfig, CloneSettings
from marl_pool.training.optimization import (
    descend,
    load_moments,
    moments,
    read_parts,
    write_parts,
)
from marl_pool.utils.errors import InputError

FILE = "learner.safetensors"
LEAST_WEIGHT = 0.1
"""Weight of a step in which all of the teacher's logits are equal."""


def make_student(config: CloneConfig, group: AgentGroup) -> SequencePolicy:
    """Build the policy that learns.

    Raises:
        InputError: an invalid option, a class other than a `SequencePolicy`, or a state
            that no file of tensors can hold.
    """
    seed, policy = config.seed, config.policy
    context = {"spec": group.tokens, "action_space": group.action_space, "seed": seed}
    # Seed the construction, too: a plug-in class may take no seed.
    with seeded(seed, "student"):
        student: SequencePolicy = build(
            policy.name, POLICIES, "policy", SequencePolicy, policy.arguments, context
        )
    validate_state(f"policy {policy.name!r}", student)
    return student.to(config.device)


class Score(NamedTuple):
    """Agreement of student and teacher, as sums over steps."""

    loss: Tensor
    """Sum of losses."""
    right: Tensor
    """Number of steps in which both choose the same action; 0 for a box."""
    auxiliary_error: Tensor
    """Sum of the auxiliary head's squared errors; 0 without a head."""
    steps: int
    """Number of valid steps."""

    def plus(self, other: "Score") -> "Score":
        """Add two scores."""
        pairs: Any = zip(self, other, strict=True)
        return Score(*(first + second for first, second in pairs))


ZERO_SCORE = Score(torch.zeros(()), torch.zeros(()), torch.zeros(()), 0)


def losses(
    outputs: Tensor, batch: SequenceBatch, settings: CloneSettings, actions: ActionSpec
) -> Tensor:
    r"""Compute losses ``(B, T)``, zero at steps that are not valid.

    If the action is not a single choice, the loss is the negative log-likelihood of the
    teacher's action if the student has a distribution; if it is deterministic, it is
    the squared error of a box, averaged over the action's components, plus the
    cross-entropies of choices. For a single choice the loss is

    .. math:: w\, H(p, \pi) + \rho \sum_a \pi(a) (\max_b q_b - q_a)

    with the student's probabilities :math:`\pi`, the teacher's choice or, with
    ``soft``, its probabilities :math:`p`, its logits q, and the weight
    :math:`w = 0.1 + \min(1, (\max_b q_b - \min_b q_b) / g)` with the margin g of
    ``margin_weighting``, or 1 without it. :math:`\rho` is ``expected_regret``: with
    action values q the last term is the expected loss against the best action, as in
    Ross and Bagnell, Reinforcement and imitation learning via interactive no-regret
    learning (2014), https://arxiv.org/abs/1406.5979.

    Args:
        outputs: the student's ``(B, T, L)``, masked; see `unroll_logits`.
        batch: labels and logits of the teacher.
        settings: terms to include.
        actions: the action space.
    """
    outputs = outputs.float()
    if not actions.discrete:
        if outputs.shape[-1] == actions.num_logits:
            step_losses = -log_prob(actions, outputs, batch.label)
        else:
            numbers = batch.label[..., len(actions.choices) :]
            errors = outputs[..., actions.num_options :] - numbers
            step_losses = errors.square().mean(-1)
            if actions.choices:
                log_probs = choice_log_prob(actions, outputs, batch.label)
                step_losses = step_losses - log_probs
        return step_losses.masked_fill(~batch.valid, 0.0)
    # Cross-entropy with the teacher's choice or its probabilities.
    target = batch.label.flatten()
    if settings.soft:
        assert batch.logits is not None
        target = batch.logits.softmax(-1).flatten(0, 1)
    step_losses = cross_entropy(outputs.flatten(0, 1), target, reduction="none")
    step_losses = step_losses.view_as(batch.valid)
    # Weight steps by the margin of the teacher's logits, and add expected regret.
    if settings.margin_weighting is not None or settings.expected_regret:
        assert batch.logits is not None
        regret = batch.logits.amax(-1, keepdim=True) - batch.logits
        if batch.tokens.action_mask is not None:
            # The student cannot choose disallowed options either.
            regret = regret.masked_fill(~batch.tokens.action_mask, 0.0)
        if settings.margin_weighting is not None:
            margin = regret.amax(-1) / settings.margin_weighting
            step_losses = step_losses * (LEAST_WEIGHT + margin.clamp(max=1.0))
        expected = (outputs.softmax(-1) * regret).sum(-1)
        step_losses = step_losses + settings.expected_regret * expected
    return step_losses.masked_fill(~batch.valid, 0.0)


class AuxiliaryHead(nn.Module):
    """Predict the teacher's K privileged targets from the student's hidden layer.

    The linear layer is trained along with the student and dropped afterwards. It makes
    the student represent the state on which the teacher's actions depend, which the
    actions alone reveal slowly.

    Source: auxiliary targets known only in training, as in Lample and Chaplot, Playing
    FPS games with deep reinforcement learning (2017), section 3.2,
    https://arxiv.org/abs/1609.05521.
    """

    def __init__(self, width: int, count: int, seed: int | None = None) -> None:
        super().__init__()
        with seeded(seed, "hints"):  # another name would change the random stream
            self.linear = nn.Linear(width, count)

    def forward(self, hidden: Tensor) -> Tensor:
        """Map hidden layers ``(B, T, H)`` to predictions ``(B, T, K)``."""
        # In full precision: bfloat16 would move a position by a pixel.
        predicted: Tensor = self.linear(hidden.to(self.linear.weight.dtype))
        return predicted


def make_auxiliary_head(
    config: CloneConfig, student: SequencePolicy, targets: Sequence[str]
) -> AuxiliaryHead | None:
    """Build the head for the teacher's privileged targets, if configured.

    Raises:
        InputError: a student without a hidden layer, or a teacher without targets.
    """
    weight = config.clone.auxiliary
    if not weight:
        return None
    if not isinstance(student, Agent) or not student.hidden_dim:
        raise InputError(
            f"clone.auxiliary: expected 0 with policy={config.policy.name}, "
            f"which exposes no hidden layer, got {weight:g}"
        )
    if not targets:
        raise InputError(
            f"clone.auxiliary: expected 0, because {config.teacher} has no privileged "
            f"targets, got {weight:g}"
        )
    head = AuxiliaryHead(student.hidden_dim, len(targets), config.seed)
    return head.to(config.device)


def auxiliary_errors(predicted: Tensor, targets: Tensor, valid: Tensor) -> Tensor:
    """Compute squared errors ``(B, T)`` of predictions ``(B, T, K)``, averaged over K.

    Unknown targets (NaN) and steps that are not valid have error 0.
    """
    unknown = targets.isnan()
    # Replace NaN before the square: masking afterwards leaves a NaN gradient.
    error = torch.where(unknown, 0.0, predicted - targets.nan_to_num())
    return error.square().mean(-1).masked_fill(~valid, 0.0)


class Learner:
    """A student and its optimizer, Adam.

    With ``truncate`` each window of that many steps is a separate gradient step; the
    memory is carried from one window to the next without a gradient (truncated
    backpropagation through time).

    The student, and the auxiliary head if there is one, are trained in place.
    """

    def __init__(
        self,
        student: SequencePolicy,
        settings: CloneSettings,
        auxiliary_head: AuxiliaryHead | None = None,
    ) -> None:
        self.student, self.settings = student, settings
        self._student = compile(student)
        self.auxiliary_head = auxiliary_head
        self.modules = nn.ModuleDict({"student": student})
        if auxiliary_head is not None:
            self.modules["auxiliary_head"] = auxiliary_head
        self.parameters = list(self.modules.parameters())
        self.optimizer = torch.optim.Adam(self.parameters, lr=settings.lr)
        self.gradient_norm = torch.zeros(())

    def learn(self, batch: SequenceBatch, lr: float) -> Score:
        """Take a gradient step, or one for each window of ``truncate`` steps."""
        total, memory = ZERO_SCORE, None
        for window in batch.windows(self.settings.truncate):
            score, memory = self._score(window, memory)
            if not score.steps:
                continue
            # Minimise the mean over the window's valid steps.
            loss = score.loss + self.settings.auxiliary * score.auxiliary_error
            self.gradient_norm = descend(
                self.optimizer, loss / score.steps, lr, self.settings.grad_clip
            )
            # Cut the gradient between windows.
            memory = tree_map_only(Tensor, torch.detach, memory)
            total = total.plus(tree_map_only(Tensor, torch.detach, score))
        return total

    @torch.no_grad()
    def measure(self, batch: SequenceBatch) -> Score:
        """Score a batch without learning from it."""
        return self._score(batch, None)[0]

    def save(self, folder: Path) -> None:
        """Write weights and the optimizer's state to a folder."""
        weights = {name: part.state_dict() for name, part in self.modules.items()}
        write_parts({"adam": moments(self.optimizer), **weights}, folder / FILE)

    def restore(self, folder: Path) -> None:
        """Restore what a learner with the same options saved."""
        parts = read_parts(folder / FILE)
        for name, module in self.modules.items():
            module.load_state_dict(parts[name])
        load_moments(self.optimizer, parts["adam"])

    def _score(
        self, batch: SequenceBatch, memory: Memory | None
    ) -> tuple[Score, Memory]:
        if memory is None:
            memory = self.student.initial_memory(
                len(batch.valid), batch.tokens.num_tokens
            )
        # Unroll the sequences; only an auxiliary head needs the hidden layer.
        tokens, prev_action = batch.tokens, batch.prev_action
        device, mixed = tokens.features.device.type, self.settings.bfloat16
        with torch.autocast(device, torch.bfloat16, enabled=mixed):
            if self.auxiliary_head is None:
                outputs, memory = self._student.unroll_logits(
                    tokens, prev_action, memory
                )
            else:
                assert isinstance(self.student, Agent)
                outputs, hidden, memory = self.student.unroll_hidden(
                    tokens.features, present_padding(tokens), prev_action, memory
                )
        # Compare actions and, with a head, predictions of the privileged targets.
        actions = self.student.actions
        outputs = mask_logits(outputs.float(), self.student.options(tokens))
        step_losses = losses(outputs, batch, self.settings, actions)
        right = auxiliary_error = step_losses.new_zeros(())
        if actions.discrete:
            right = ((outputs.argmax(-1) == batch.label) & batch.valid).sum()
        if self.auxiliary_head is not None:
            assert batch.privileged_targets is not None
            predicted = self.auxiliary_head(hidden)
            errors = auxiliary_errors(predicted, batch.privileged_targets, batch.valid)
            auxiliary_error = errors.sum()
        count = int(batch.valid.sum())
        return Score(step_losses.sum(), right, auxiliary_error, count), memory
