"""Cloning: recorded trajectories, learning from them, and resume."""

import json
import re
import shutil
import signal
from pathlib import Path

import numpy as np
import pytest
import torch
from gymnasium import spaces
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from helpers.farm import TOKENS, FoxAndHens
from helpers.tables import yaml_cases
from marl_pool import InputError
from marl_pool.cli import main as cli
from marl_pool.config import compose
from marl_pool.envs import make_batched_env
from marl_pool.envs.base import AgentGroup
from marl_pool.finite import NonFiniteError
from marl_pool.options.types import Options
from marl_pool.perturbations.base import Perturbation
from marl_pool.policies import make_agent
from marl_pool.policies.actions import ActionSpec
from marl_pool.policies.base import Decision, Policy
from marl_pool.policies.random_policy import RandomPolicy
from marl_pool.policies.storage import load_policies, load_policy, save_policy
from marl_pool.runs.run import Run
from marl_pool.tokens import Tokens, TokenSpec
from marl_pool.training.cloning.clone import PLAY_ENV_IDS, clone
from marl_pool.training.cloning.dataset import (
    FOLDER,
    load_round,
    read_about,
    round_path,
    save_round,
)
from marl_pool.training.cloning.learner import (
    AuxiliaryHead,
    Learner,
    auxiliary_errors,
    losses,
)
from marl_pool.training.cloning.sampler import (
    Augmentation,
    Sampler,
    SequenceBatch,
    chunks,
)
from marl_pool.training.cloning.settings import CloneSettings
from marl_pool.training.cloning.teacher import PolicyTeacher, Roles
from marl_pool.training.cloning.trajectories import (
    NO_ACTION,
    PER_TRAJECTORY,
    BehaviorPolicy,
    RowTable,
    Trajectories,
    cut,
    join,
)
from marl_pool.training.jobs import config_of
from marl_pool.utils.errors import StoppedError
from marl_pool.utils.randomness import EVALUATION_ENVS, VALIDATION_ENVS

PLAIN = CloneSettings(grad_clip=None)
CHANNELS = TokenSpec(5, 1, ("channel",), has_self=False)
FORCE = spaces.Box(-1.0, 1.0, (1,), np.float32)
SMALL = [
    *("env.max_steps=20", "policy.pooling.num_codes=3", "policy.pooling.key_units=3"),
    *("clone.episodes=6", "clone.validation_episodes=3", "clone.num_envs=4"),
    *("clone.batch_size=4", "clone.iteration_batches=2", "total_batches=6"),
    "threads=1",
]


def sensory(seed: int = 0, spec: TokenSpec = CHANNELS, space: spaces.Space = FORCE):
    pooling = {"name": "attention_neuron", "num_codes": 3, "key_units": 3}
    return make_agent(spec, space, "sensory", pooling=pooling, hidden=[4], seed=seed)


@pytest.fixture
def teacher_folder(tmp_path) -> Path:
    """A saved teacher with memory."""
    save_policy(sensory(seed=7), tmp_path / "teacher")
    return tmp_path / "teacher"


def small_overrides(*overrides: str) -> list[str]:
    """Prepend overrides for a small size, without pooling's for another policy."""
    has_policy = any(text.startswith("policy=") for text in overrides)
    base = [text for text in SMALL if not (has_policy and "pooling" in text)]
    return [*base, *overrides]


def run_clone(path: Path, *overrides: str, stop_after: int | None = None) -> Run:
    """Clone at a small size, perhaps interrupted after some iterations."""
    if (path / "config.yaml").is_file():
        run = Run.open(path)
    else:
        run = Run.create(path, compose("clone", small_overrides(*overrides)), "clone")
    counter = iter(range(10_000))
    stop = stop_after is not None
    clone(run, config_of(run), lambda: stop and next(counter) >= stop_after)
    run.close()
    return run


def collected(
    teacher: Policy | PolicyTeacher,
    env: dict,
    episodes: int = 3,
    student: Policy | None = None,
    perturbation: Perturbation | None = None,
) -> tuple[Trajectories, RowTable | None]:
    """Record episodes of the only group, played by the teacher or by a student."""
    if isinstance(teacher, Policy):
        teacher = PolicyTeacher(teacher.eval())
    (name, group), *_ = make_batched_env(num_envs=1, **env).groups.items()
    spec = group.tokens
    rows = RowTable(spec.num_features) if spec.dtype == "uint8" else None

    def play(first, count):
        envs = make_batched_env(num_envs=count, first_env=first, **env)
        roles = Roles(name, teacher, {})
        return BehaviorPolicy(roles, envs, rows, student, perturbation).episodes()

    starts = range(0, episodes, 2)
    return join(play(first, min(2, episodes - first)) for first in starts), rows


CARTPOLE = {"name": "cartpole", "max_steps": 15}


# Recorded trajectories


def by_trajectory(trajectories: Trajectories, name: str) -> list[torch.Tensor]:
    return list(trajectories.steps[name].split(trajectories.lengths.tolist()))


def split_parts(trajectories: Trajectories, *names: str):
    """Yield these columns, one trajectory at a time."""
    return zip(*(by_trajectory(trajectories, name) for name in names), strict=True)


@pytest.mark.parametrize("student", [None, sensory(seed=3)])
def test_labels_are_the_teachers_actions_in_every_state(student):
    teacher = sensory(seed=7)
    played, _ = collected(teacher, CARTPOLE, student=student)
    parts = split_parts(played, "features", "prev_action", "label")
    for features, before, label in parts:
        memory = teacher.initial_memory(1, 5)
        answers, _ = teacher.unroll(features[None], None, before[None], memory)
        torch.testing.assert_close(label, answers[0].detach(), rtol=0, atol=1e-5)


def test_the_previous_action_is_the_one_that_was_truly_taken():
    played, _ = collected(sensory(seed=7), CARTPOLE)
    for before, label in split_parts(played, "prev_action", "label"):
        assert (before[0] == 0).all()
        torch.testing.assert_close(before[1:], label[:-1], rtol=0, atol=1e-6)
    assert played.steps["prev_action"].abs().max() > 0.01


def test_recorded_features_are_unperturbed():
    student = sensory(seed=3)
    changes = {"perturbation": augmentation(perturbation={"name": "shuffle"}).build()}
    played, _ = collected(sensory(seed=7), CARTPOLE, student=student, **changes)
    parts = split_parts(played, "features", "prev_action")
    for number, (features, before) in zip(played.env_ids.tolist(), parts, strict=True):
        env = make_batched_env(num_envs=1, first_env=number, **CARTPOLE)
        env.reset()
        for t in range(len(features)):
            expected = env.observe()["agent"].features[0, 0]
            torch.testing.assert_close(features[t], expected, rtol=0, atol=1e-5)
            if t + 1 < len(before):
                scaled = student.scale(before[t + 1]).view(1, 1, 1)
                env.step({"agent": scaled})


class Walk(FoxAndHens):
    """A deterministic walk of one agent, with two choices and three starts."""

    spec = TOKENS

    @property
    def groups(self):
        return {"walker": AgentGroup(1, self.spec, spaces.Discrete(2))}

    def observe(self):
        return {"walker": super().observe()["fox"]}

    def place(self, rows, keys):
        super().place(rows, keys)
        self.places[rows] = torch.tensor([0.0, 0.3, 0.6, 0.9])
        self.places[rows, 0] = (self.sample_uniform(keys, 1)[:, 0] * 3).floor()

    def advance(self, actions):
        step = actions["walker"].to(self.dtype) - 0.5
        walker, static = self.places.split([1, 3], 1)
        self.places = torch.cat([walker + 0.1 * step, static], 1)
        return {"walker": step}, torch.zeros(self.num_envs, dtype=torch.bool)

    def _tensors(self):
        return {"places": self.places}


class Left(Policy):
    """A policy that always takes the first choice."""

    def act(self, tokens, state=(), generator=None, explore=False):
        none = torch.zeros(tokens.batch_shape)
        logits = torch.zeros(*tokens.batch_shape, 2)
        return Decision(none.long(), none, none, logits, state)


class Last(Left):
    """A policy that always takes the last of 40 000 choices."""

    def act(self, tokens, state=(), generator=None, explore=False):
        decision = super().act(tokens)
        return decision._replace(action=torch.full_like(decision.action, 39_999))


class WideWalk(Walk):
    """The walk with more choices than an int16 can number."""

    @property
    def groups(self):
        return {"walker": AgentGroup(1, self.spec, spaces.Discrete(40_000))}


def random_walker() -> Policy:
    """A policy that takes both choices at random."""
    torch.manual_seed(0)
    return RandomPolicy(spaces.Discrete(2))


def test_equal_trajectories_count_once_and_never_on_both_sides(tmp_path, capsys):
    run = run_clone(
        tmp_path / "run",
        *(f"env={__name__}:Walk", "policy=feed_forward", f"teacher={__name__}:Left"),
        *("clone.episodes=30", "clone.validation_episodes=1"),
    )
    record = json.loads((run.path / "trajectories/round_000/about.json").read_text())
    assert record["played"] == {"train": 30, "validation": 1}
    train, validation = record["digests"]["train"], record["digests"]["validation"]
    assert (len(train), len(validation)) == (2, 1)
    assert not set(train) & set(validation)
    assert "round 0: 2 trajectories" in capsys.readouterr().err
    assert run.rows()[-1]["trajectories"] == 2


def test_no_trajectory_is_learned_in_one_round_and_validated_in_another(tmp_path):
    run = run_clone(
        tmp_path / "run",
        *(f"env={__name__}:Walk", "policy=feed_forward", f"teacher={__name__}:Left"),
        *("clone.episodes=30", "clone.validation_episodes=1", *ROUNDS),
        "clone.prev_action_noise=0",
    )
    digests: dict[str, list[str]] = {"train": [], "validation": []}
    for number in range(3):
        path = run.path / f"trajectories/round_00{number}/about.json"
        for name, part in json.loads(path.read_text())["digests"].items():
            digests[name] += part
    together = digests["train"] + digests["validation"]
    assert len(set(together)) == len(together)


def test_a_lost_round_is_not_collected_again(tmp_path, teacher_folder):
    options = (f"teacher={teacher_folder}", *ROUNDS)
    run = run_clone(tmp_path / "run", *options, stop_after=4)
    shutil.rmtree(round_path(run.path / FOLDER, 1))
    with pytest.raises(InputError, match="round_001: expected the trajectories of"):
        run_clone(tmp_path / "run")


def test_weights_that_diverge_in_the_last_step_are_not_saved(tmp_path, teacher_folder):
    huge = ("clone.lr=1e20", "clone.lr_end=1e20", "clone.grad_clip=null")
    single = ("clone.iteration_batches=1", "checkpoint.every=1")
    with pytest.raises(StoppedError, match="iteration 1: the validation loss is not"):
        run_clone(tmp_path / "run", f"teacher={teacher_folder}", *huge, *single)
    assert not Run.open(tmp_path / "run").checkpoints()


def test_training_validation_and_evaluation_envs_are_disjoint():
    assert 1 << 32 < VALIDATION_ENVS < PLAY_ENV_IDS < EVALUATION_ENVS


def walker_games(count: int) -> BehaviorPolicy:
    """Games of a walker, of 5 steps each."""
    env = make_batched_env(num_envs=count, name=f"{__name__}:Walk", max_steps=5)
    teacher = PolicyTeacher(Left().eval())
    spec, space = env.groups["walker"].tokens, spaces.Discrete(2)
    student = make_agent(spec, space, "feed_forward", seed=3)
    return BehaviorPolicy(Roles("walker", teacher, {}), env, None, student)


def test_choices_beyond_an_int16_keep_their_numbers() -> None:
    env = make_batched_env(num_envs=1, name=f"{__name__}:WideWalk", max_steps=3)
    roles = Roles("walker", PolicyTeacher(Last().eval()), {})
    steps = BehaviorPolicy(roles, env, None).episodes().steps
    assert steps["label"].tolist() == [39_999] * 3
    assert steps["prev_action"].tolist() == [NO_ACTION, 39_999, 39_999]


def test_games_continue_from_their_last_step() -> None:
    resumed, straight = walker_games(3), walker_games(3)
    parts, complete = [resumed.advance(4), resumed.advance(8)], straight.advance(12)
    assert [part.lengths.tolist() for part in parts] == [[4] * 3, [1, 5, 2] * 3]
    assert complete.lengths.tolist() == [5, 5, 2] * 3
    for name in ("features", "prev_action", "label"):
        first, second = (part.steps[name].unflatten(0, (3, -1)) for part in parts)
        steps = torch.cat([first, second], 1)
        assert torch.equal(steps.flatten(0, 1), complete.steps[name])
    at_start = complete.steps["prev_action"].view(3, -1)[0] == NO_ACTION
    assert at_start.nonzero()[:, 0].tolist() == [0, 5, 10]
    assert complete.begins.all()
    assert parts[1].begins.tolist() == [False, True, True] * 3
    # Each trajectory's return is the sum of all its environment's rewards.
    sums = sum(part.returns.view(3, -1)[:, 0] for part in parts)
    assert torch.equal(complete.returns.view(3, -1), sums[:, None].expand(3, 3))


@pytest.mark.parametrize("play", ["advance", "episodes"])
def test_labels_that_are_no_numbers_are_refused(play) -> None:
    games = walker_games(3)
    teacher = make_agent(games.spec, spaces.Discrete(2), "feed_forward", seed=3)
    for parameter in teacher.parameters():
        parameter.data.fill_(torch.nan)
    games.teacher = PolicyTeacher(teacher.eval())
    with pytest.raises(NonFiniteError, match="action logits of .* at step 0"):
        games.advance(4) if play == "advance" else games.episodes()


# Bytes


shapes = st.tuples(st.integers(1, 6), st.integers(1, 6), st.just(3))


@given(hnp.arrays(np.uint8, shapes, elements=st.integers(0, 2)))
def test_numbered_rows_are_the_rows(array):
    rows = RowTable(3)
    features = torch.from_numpy(array)
    numbers = rows.number(features)
    table = rows.table()
    assert torch.equal(table[numbers.long()], features)
    assert len(table.unique(dim=0)) == len(table)
    assert (table[0] == 0).all()


class Bytes(Walk):
    """A walk whose observations are bytes."""

    spec = TokenSpec(4, 2, TOKENS.type_names, dtype="uint8")

    def observe(self):
        tokens = super().observe()["walker"]
        features = (tokens.features * 20 + self.steps[:, None, None, None]).byte()
        return {"walker": tokens._replace(features=features)}


BYTES = {"name": f"{__name__}:Bytes", "max_steps": 12}


class Motley(Walk):
    """A walk with many token types, of which only the last is observed."""

    spec = TokenSpec(4, 2, tuple(f"type_{i}" for i in range(300)))

    def observe(self):
        tokens = super().observe()["walker"]
        return {"walker": tokens._replace(types=torch.full_like(tokens.types, 299))}


MOTLEY = {"name": f"{__name__}:Motley", "max_steps": 12}


def test_type_numbers_above_255_are_recorded_exactly():
    played, _ = collected(Left(), MOTLEY)
    assert (played.steps["types"] == 299).all()


class TeacherWithTargets(PolicyTeacher):
    """A teacher with the targets time and, in the first half of an episode, place."""

    target_names = ("time", "place")

    def label(self, env, tokens, state, noise):
        time = env.steps[:, None].float()
        place = tokens.features[..., 0, 0].float().masked_fill(time > 5, torch.nan)
        answer = super().label(env, tokens, state, noise)
        return answer._replace(privileged_targets=torch.stack([time, place], -1))


def with_targets(teacher: Policy) -> TeacherWithTargets:
    return TeacherWithTargets(teacher.eval())


@pytest.mark.parametrize(
    ("teacher", "env"),
    [
        (sensory(seed=7), CARTPOLE),
        (Left(), BYTES),
        (with_targets(sensory(seed=7)), CARTPOLE),
        (with_targets(Left()), BYTES),
        (Left(), MOTLEY),
    ],
)
def test_trajectories_are_read_as_they_were_written(tmp_path, teacher, env):
    played, rows = collected(teacher, env)
    splits = {"train": played, "validation": played.without_duplicates()}
    save_round(tmp_path / "r", splits, {"a": [1]}, rows)
    used_rows = None
    if rows is not None:
        used_rows = RowTable(2)  # that has seen other rows before
        used_rows.number(torch.full((3, 2), 77, dtype=torch.uint8))
    assert read_about(tmp_path / "r")["a"] == [1]
    after = load_round(tmp_path / "r", used_rows)["train"]
    assert after.digests == played.digests
    for name in PER_TRAJECTORY:
        assert torch.equal(getattr(after, name), getattr(played, name))
    for name, part in played.steps.items():
        column = after.steps[name]
        if rows is not None and name == "features":
            part, column = rows.table()[part.long()], used_rows.table()[column.long()]
        assert column.dtype == part.dtype
        torch.testing.assert_close(column, part, rtol=0, atol=0, equal_nan=True)
    has_targets = "privileged_targets" in played.steps
    assert has_targets == isinstance(teacher, TeacherWithTargets)


def test_damaged_trajectories_are_refused_in_one_line(tmp_path):
    played, rows = collected(Left(), BYTES)
    path = round_path(tmp_path, 0)
    save_round(path, {"train": played, "validation": played}, {}, rows)
    file = path / "train.safetensors"
    file.write_bytes(file.read_bytes()[:100])
    with pytest.raises(InputError, match=r"round_000 is damaged") as caught:
        load_round(path, RowTable(2))
    assert "\n" not in str(caught.value)
    (path / "about.json").write_text('{"format": 99}')
    with pytest.raises(InputError, match="expected format 2, got 99"):
        load_round(path, RowTable(2))


# Samples


def augmentation(
    spec: TokenSpec = CHANNELS,
    perturbation: dict | None = None,
    seed: int = 0,
    **options,
) -> Augmentation:
    """Make an augmentation, by default without a perturbation."""
    settings = CloneSettings(**options)
    choice = Options(perturbation or {"name": "none"})
    return Augmentation(spec, choice, settings, seed)


def sampler(
    trajectories: Trajectories,
    rows: RowTable | None = None,
    *,
    whole: bool = False,
    batch_size: int = 8,
    **options,
) -> Sampler:
    spec = CHANNELS if rows is None else Bytes.spec
    actions = ActionSpec.of(FORCE) if rows is None else ActionSpec(n=2)
    augmented = augmentation(spec, batch_size=batch_size, **options)
    return Sampler(trajectories, rows, actions, augmented, whole=whole)


def numbered() -> Trajectories:
    """Trajectories whose labels are the numbers of their steps."""
    played, _ = collected(sensory(seed=7), CARTPOLE)
    played.steps["label"] = torch.arange(played.num_steps).float()[:, None]
    return played


def test_an_epoch_takes_each_step_once_in_an_order_of_the_seed():
    played = numbered()
    batches = sampler(played, batch_size=5)
    count = batches.per_epoch
    first, second = (
        torch.cat([batches.batch(k + e * count, 0).label for k in range(count)])
        for e in range(2)
    )
    assert first.flatten().unique().numel() == first.numel() == 5 * count
    assert not torch.equal(first, second)
    repeat = sampler(played, batch_size=5)
    assert torch.equal(repeat.batch(count, 9).label.flatten(), second[:5].flatten())
    reseeded = sampler(played, batch_size=5, seed=1)
    assert not torch.equal(reseeded.batch(0, 0).label.flatten(), first[:5].flatten())


def test_validation_takes_steps_evenly_spread():
    played = numbered()
    batches = sampler(played, batch_size=5)
    labels = torch.cat([batch.label for batch in batches.all(12)]).flatten()
    assert labels[0] == 0
    assert labels[-1] == played.num_steps - 1
    gap = (played.num_steps - 1) / 11
    assert ((labels.diff() - gap).abs() < 1).all()
    for limit in (played.num_steps, 10**6):
        all_labels = torch.cat([batch.label for batch in batches.all(limit)])
        assert torch.equal(all_labels.flatten(), torch.arange(played.num_steps).float())


def test_no_step_of_many_is_beyond_the_last(monkeypatch):
    batches = sampler(numbered(), batch_size=4096)
    batches.count = 16_777_220  # the next number is no float32
    monkeypatch.setattr(batches, "select", lambda numbers, turn, part: numbers)
    *_, last = batches.all(4096)
    assert last[-1] == batches.count - 1


@pytest.mark.parametrize("whole", [False, True])
def test_validation_leaves_previous_actions_alone_and_repeats_itself(whole: bool):
    played, _ = collected(sensory(seed=7), CARTPOLE)
    occlude = {"name": "occlude"}
    batches = sampler(played, whole=whole, perturbation=occlude, prev_action_noise=0.5)
    first, repeated = (list(batches.all(10**6)) for _ in range(2))
    before = torch.cat([batch.prev_action[batch.valid] for batch in first])
    assert torch.equal(before, played.steps["prev_action"])
    for batch, twin in zip(first, repeated, strict=True):
        assert torch.equal(batch.tokens.padding, twin.tokens.padding)
    blurred = batches.select(torch.arange(batches.count), 0)
    assert not torch.equal(blurred.prev_action[blurred.valid], before)


def test_whole_trajectories_are_padded_at_their_ends():
    parts = [collected(sensory(seed=7), {**CARTPOLE, "max_steps": n}) for n in (4, 9)]
    played = join([part for part, _ in parts])
    batch = sampler(played, whole=True).select(torch.arange(len(played)), 0)
    assert batch.valid.sum(1).tolist() == played.lengths.tolist()
    for row, (features, label) in enumerate(split_parts(played, "features", "label")):
        assert torch.equal(batch.tokens.features[row, : len(label)], features)
        assert torch.equal(batch.label[row, : len(label)], label)


@given(st.lists(st.integers(1, 9), min_size=1, max_size=6), st.integers(1, 10))
def test_pieces_hold_each_step_once_and_in_its_order(lengths, length) -> None:
    sizes = torch.tensor(lengths)
    begins = torch.arange(len(lengths)) % 2 == 0
    trajectories = Trajectories({}, (), sizes, sizes, sizes, begins)
    starts, cut, at_start = chunks(trajectories, length)
    assert starts[at_start].tolist() == trajectories.starts[begins].tolist()
    steps = [
        range(a, a + n) for a, n in zip(starts.tolist(), cut.tolist(), strict=True)
    ]
    assert [t for piece in steps for t in piece] == list(range(sum(lengths)))
    assert 1 <= int(cut.min()) <= int(cut.max()) <= length
    assert len(cut) == sum(-(-n // length) for n in lengths)


class Still(Policy):
    """A teacher whose action is zero, which also stands for no previous action."""

    def act(self, tokens, state=(), generator=None, explore=False):
        none = torch.zeros(tokens.batch_shape)
        return Decision(none[..., None], none, none, none[..., None], state)


@pytest.mark.parametrize(("teacher", "env"), [(Left(), BYTES), (Still(), CARTPOLE)])
def test_burn_in_steps_are_valid_only_at_an_episodes_start(teacher, env) -> None:
    played, rows = collected(teacher, {**env, "max_steps": 8}, episodes=2)
    batches = sampler(played, rows, whole=True, chunk_length=5, burn_in=2)
    batch = batches.select(torch.arange(batches.count), 0)
    valid = [[1, 1, 1, 1, 1], [0, 0, 1, 0, 0]] * 2
    assert batch.valid.int().tolist() == valid


def test_a_chunk_that_ends_within_its_burn_in_is_left_out() -> None:
    played, rows = collected(Left(), {**BYTES, "max_steps": 8}, episodes=2)
    batches = sampler(played, rows, whole=True, chunk_length=5, burn_in=3)
    batch = batches.select(torch.arange(batches.count), 0)
    assert batch.valid.int().tolist() == [[1, 1, 1, 1, 1]] * 2


def test_the_life_of_an_agent_ends_with_the_episode() -> None:
    """An agent that is born late may begin at the step after its last one."""
    steps = 6
    recorded = {
        **dict.fromkeys(("env", "agent"), torch.zeros(steps, dtype=torch.int64)),
        "episode": torch.tensor([0, 0, 0, 0, 1, 1]),
        "time": torch.arange(steps),
        "begins": torch.tensor([True, False, False, False, True, False]),
        "features": torch.arange(steps).float().view(-1, 1, 1),
        "padding": torch.zeros(steps, 1, dtype=torch.bool),
        **dict.fromkeys(("prev_action", "label"), torch.zeros(steps, 1)),
    }
    trajectories = cut(recorded, torch.tensor([0]), torch.zeros(1, 1), None)
    assert trajectories.lengths.tolist() == [4, 2]
    assert trajectories.begins.tolist() == [True, True]
    # Where agents take turns, a life goes on although steps are left out.
    in_turns = {**recorded, "time": 2 * torch.arange(steps)}
    turns = cut(in_turns, torch.tensor([0]), torch.zeros(1, 1), None)
    assert turns.lengths.tolist() == [4, 2]


def test_trajectories_of_other_types_or_masks_are_no_duplicates() -> None:
    steps = {
        "features": torch.zeros(2, 1, 1),
        "padding": torch.zeros(2, 1, dtype=torch.bool),
        **dict.fromkeys(("prev_action", "label"), torch.zeros(2, 1)),
    }
    indices = {
        **dict.fromkeys(("agent", "time", "episode"), torch.zeros(2).long()),
        "env": torch.arange(2),
        "begins": torch.ones(2, dtype=torch.bool),
    }
    for part, count in (("types", 2), ("action_mask", 2), ("unknown", 1)):
        other = {part: torch.tensor([[0], [1]])}
        recorded = {**steps, **indices, **other}
        trajectories = cut(recorded, torch.arange(2), torch.zeros(2, 1), None)
        assert len(trajectories.without_duplicates()) == count


def test_a_rollout_perturbs_the_cloned_group_alone() -> None:
    perturbation = augmentation(perturbation={"name": "occlude"}).build("hen")
    assert perturbation is not None
    assert [perturbation.covers(name) for name in ("hen", "fox")] == [True, False]


@pytest.mark.parametrize("whole", [True, False])
def test_targets_go_along_with_their_steps(whole: bool) -> None:
    played, rows = collected(with_targets(Left()), BYTES)
    batches = sampler(played, rows, whole=whole, chunk_length=5 if whole else None)
    batch = batches.batch(1, 0)
    assert batch.privileged_targets is not None
    time, place = batch.privileged_targets.unbind(-1)
    assert torch.equal(place.isnan(), time > 5)
    # `Bytes` shows the time in all features.
    clock = batch.tokens.features[..., 0, 0].float()
    assert torch.equal(place[time <= 5], clock[time <= 5])
    starts = batch.prev_action.sum(-1) == 0
    assert torch.equal(starts, time == 0)
    if whole:
        assert (time.diff() == 1)[batch.valid[:, 1:]].all()
    plain, rows = collected(Left(), BYTES)
    assert sampler(plain, rows).batch(0, 0).privileged_targets is None


def test_a_previous_choice_is_one_hot_and_nothing_at_the_start():
    played, rows = collected(Left(), BYTES, student=random_walker())
    batch = sampler(played, rows, whole=True).select(torch.arange(3), 0)
    first, later = batch.prev_action[:, 0], batch.prev_action[:, 1:]
    assert (first == 0).all()
    assert (later.sum(-1) == 1).all()
    choices = torch.stack(by_trajectory(played, "prev_action"))[:, 1:].long()
    assert torch.equal(later.argmax(-1), choices)


@pytest.mark.parametrize(
    "perturbation",
    [
        {"name": "shuffle"},
        {"name": "occlude", "severity": 0.5},
        {"name": "occlude", "severity": 0.5, "mode": "zero"},
        {"name": "occlude", "severity": [0.0, 0.9]},
        {"name": "jitter", "severity": 0.1},
    ],
)
def test_rows_are_perturbed_as_their_bytes_are(perturbation):
    played, rows = collected(Left(), BYTES, student=random_walker())
    batches = sampler(played, rows, whole=True, perturbation=perturbation)
    batch = batches.select(torch.arange(3), 4)
    table = rows.table()
    features, types, padding = (
        torch.stack(by_trajectory(played, name))
        for name in ("features", "types", "padding")
    )
    plain = Tokens(table[features.long()], types.long(), padding)
    view = batches.augmentation.perturb(plain, 4)
    for actual, expected in zip(batch.tokens.parts, view.parts, strict=True):
        assert torch.equal(actual, expected)
    assert not torch.equal(view.features, plain.features) or view.padding.any()


def test_occlusion_differs_by_sample_within_its_bounds():
    spec = TokenSpec(40, 1, ("channel",), has_self=False)
    occlude = augmentation(spec, {"name": "occlude", "severity": [0.25, 0.75]})
    tokens = bare_tokens(torch.randn(64, 1, 40, 1))
    first, repeated, later = (occlude.perturb(tokens, t).padding for t in (0, 0, 1))
    counts = first.sum(-1)
    assert counts.min() >= 10
    assert counts.max() <= 30
    assert counts.unique().numel() > 3
    assert first.unique(dim=0).shape[0] == 64
    assert torch.equal(first, repeated)
    assert not torch.equal(first, later)


def test_previous_actions_are_blurred():
    box = ActionSpec.of(spaces.Box(-1, 1, (3,)))
    for action in (0.3, 0.0):  # in a box, 0 is an action like any other
        before = torch.full((200, 5, 3), action)
        noisy = augmentation(prev_action_noise=0.1).perturb_prev_actions(box, before, 0)
        assert abs(float(noisy.std()) - 0.1) < 0.01
        assert abs(float(noisy.mean()) - action) < 0.01
    choice, actions = ActionSpec(n=4), torch.eye(4)[torch.ones(2000, 5).long()]
    picks = augmentation(prev_action_noise=0.4).perturb_prev_actions(choice, actions, 0)
    assert (picks.sum(-1) == 1).all()
    # A noisy choice is any with equal probability.
    shares = torch.tensor([0.1, 0.7, 0.1, 0.1])
    torch.testing.assert_close(picks.mean((0, 1)), shares, rtol=0, atol=0.025)
    none = torch.zeros(3, 5, 4)  # an episode's start stays one
    certain = augmentation(prev_action_noise=1.0)
    assert (certain.perturb_prev_actions(choice, none, 0) == 0).all()
    assert augmentation().perturb_prev_actions(choice, actions, 0) is actions


# Learning


def bare_tokens(features: torch.Tensor) -> Tokens:
    """Tokens of one type, without padding."""
    types = torch.zeros(features.shape[:-1], dtype=torch.int64)
    return Tokens(features, types, types.bool())


def batch_of(lengths: list[int], seed: int = 0) -> SequenceBatch:
    draw = torch.Generator().manual_seed(seed)
    count, total = len(lengths), max(lengths)
    valid = torch.arange(total) < torch.tensor(lengths)[:, None]
    return SequenceBatch(
        bare_tokens(torch.randn(count, total, 5, 1, generator=draw)),
        torch.rand(count, total, 1, generator=draw) * 2 - 1,
        torch.rand(count, total, 1, generator=draw) * 2 - 1,
        None,
        valid,
    )


def gradients(agent) -> list[torch.Tensor]:
    return [p.grad.clone() for p in agent.parameters() if p.grad is not None]


def test_a_batch_of_sequences_is_the_mean_over_their_steps():
    batch, agent = batch_of([6, 3]), sensory()
    outputs = []
    for row, length in enumerate((6, 3)):
        memory = agent.initial_memory(1, 5)
        for t in range(length):  # one step after the other, as it acts
            features = batch.tokens.features[row, t][None, None]
            before = batch.prev_action[row, t][None, None]
            answer, memory = agent.unroll(features, None, before, memory)
            outputs.append((answer[0, 0] - batch.label[row, t]).square().mean())
    learner = Learner(agent, PLAIN)
    score = learner.measure(batch)
    torch.testing.assert_close(score.loss, torch.stack(outputs).sum().detach())
    torch.stack(outputs).mean().backward()
    expected = gradients(agent)
    agent.zero_grad()
    learner.learn(batch, 1e-3)
    torch.testing.assert_close(gradients(agent), expected, rtol=1e-4, atol=1e-6)


def test_a_truncated_gradient_carries_the_memory_but_stops():
    batch, agent = batch_of([6, 5]), sensory()
    # A learning rate of almost 0: all pieces are answered by the same weights.
    scores, agent_gradients = {}, {}
    for truncate in (None, 99, 2):
        settings = CloneSettings(grad_clip=None, truncate=truncate)
        scores[truncate] = Learner(agent, settings).learn(batch, 1e-12)
        agent_gradients[truncate] = gradients(agent)
    torch.testing.assert_close(scores[2].loss, scores[None].loss)
    assert scores[2].steps == scores[None].steps
    torch.testing.assert_close(agent_gradients[99], agent_gradients[None])
    assert not torch.allclose(agent_gradients[2][0], agent_gradients[None][0])


def choice_batch(
    label: list[list[int]], logits: torch.Tensor, valid: torch.Tensor
) -> SequenceBatch:
    """A batch with labels and logits of one choice; its observations are arbitrary."""
    tokens = bare_tokens(torch.zeros(*valid.shape, 5, 1))
    before = torch.zeros_like(logits)
    return SequenceBatch(tokens, before, torch.tensor(label), logits, valid)


def test_a_choice_is_learned_by_cross_entropy():
    outputs, logits = torch.randn(2, 3, 4), torch.randn(2, 3, 4)
    valid = torch.tensor([[True, True, True], [True, False, False]])
    batch = choice_batch([[0, 1, 2], [3, 0, 1]], logits, valid)
    logs = outputs.log_softmax(-1)
    choice = ActionSpec(n=4)
    hard = -logs.gather(-1, batch.label[..., None])[..., 0] * valid
    torch.testing.assert_close(losses(outputs, batch, CloneSettings(), choice), hard)
    soft = -(logs * logits.softmax(-1)).sum(-1) * valid
    loss = losses(outputs, batch, CloneSettings(soft=True), choice)
    torch.testing.assert_close(loss, soft)


def test_margin_weighting_and_expected_regret() -> None:
    logits = torch.tensor([[[0.0, -3.0, -1.0], [2.0, 2.0, 2.0], [5.0, -9.0, 0.0]]])
    outputs = torch.log(torch.tensor([[[0.5, 0.25, 0.25]] * 3]))
    batch = choice_batch([[0, 0, 0]], logits, torch.ones(1, 3, dtype=torch.bool))

    def loss_of(**settings: float) -> torch.Tensor:
        return losses(outputs, batch, CloneSettings(**settings), ActionSpec(n=3))[0]

    missed = torch.log(torch.tensor(2.0))
    weighed = loss_of(margin_weighting=6.0)
    torch.testing.assert_close(weighed, torch.tensor([0.6, 0.1, 1.1]) * missed)
    # 3 / 4 + 1 / 4, nothing, and 14 / 4 + 5 / 4.
    regret = torch.tensor([1.0, 0.0, 4.75])
    torch.testing.assert_close(loss_of(expected_regret=2.0), missed + 2 * regret)
    combined = loss_of(margin_weighting=6.0, expected_regret=2.0)
    torch.testing.assert_close(combined, weighed + 2 * regret)


def test_unknown_targets_have_no_error() -> None:
    targets = torch.tensor([[[1.0, torch.nan], [2.0, -1.0], [5.0, 5.0]]])
    predicted = torch.zeros(1, 3, 2, requires_grad=True)
    valid = torch.tensor([[True, True, False]])
    errors = auxiliary_errors(predicted, targets, valid)
    torch.testing.assert_close(errors, torch.tensor([[0.5, 2.5, 0.0]]))
    errors.sum().backward()
    expected = torch.tensor([[[-1.0, 0.0], [-2.0, 1.0], [0.0, 0.0]]])
    torch.testing.assert_close(predicted.grad, expected)


PATCHES = TokenSpec(4, 6, ("patch",), has_self=False, dtype="uint8")


def with_head(auxiliary: float, seed: int = 0) -> Learner:
    """A learner with an auxiliary head for three targets."""
    pooling = {"name": "vision_neuron", "num_codes": 4, "value_dim": 4, "frames": 2}
    layers = {"convolutions": [], "hidden": [6], "memory": 5, "readout": [7]}
    student = make_agent(
        PATCHES, spaces.Discrete(3), "vision", pooling=pooling, seed=seed, **layers
    )
    settings = CloneSettings(grad_clip=None, auxiliary=auxiliary)
    return Learner(student, settings, AuxiliaryHead(7, 3, seed))


def targeted(seed: int = 0) -> SequenceBatch:
    draw = torch.Generator().manual_seed(seed)
    valid = torch.ones(3, 4, dtype=torch.bool)
    label = torch.randint(3, (3, 4), generator=draw)
    features = torch.randint(255, (3, 4, 4, 6), generator=draw, dtype=torch.uint8)
    targets = torch.rand(3, 4, 3, generator=draw)
    tokens, before = bare_tokens(features), torch.zeros(3, 4, 3)
    return SequenceBatch(tokens, before, label, None, valid, targets)


def test_targets_are_learned_beside_the_answers() -> None:
    batch, learner = targeted(), with_head(3.0)
    memory = learner.student.initial_memory(3, 4)
    inputs = (batch.tokens.features, None, batch.prev_action, memory)
    outputs, hidden, _ = learner.student.unroll_hidden(*inputs)
    predicted = learner.auxiliary_head.linear(hidden)
    missed = (predicted - batch.privileged_targets).square().mean()
    answered = losses(outputs, batch, CloneSettings(), learner.student.actions).mean()
    (answered + 3 * missed).backward()
    expected = [part.grad.clone() for part in learner.parameters]
    score = learner.learn(batch, 1e-3)
    torch.testing.assert_close([part.grad for part in learner.parameters], expected)
    torch.testing.assert_close(score.loss / 12, answered.detach())
    torch.testing.assert_close(score.auxiliary_error / 12, missed.detach())
    for _ in range(300):
        learner.learn(batch, 0.01)
    assert learner.measure(batch).auxiliary_error < 0.1 * score.auxiliary_error


def test_a_learner_with_an_auxiliary_head_resumes_exactly(tmp_path) -> None:
    learner, restored = with_head(1.0), with_head(1.0, seed=1)
    learner.learn(targeted(), 1e-3)
    learner.save(tmp_path)
    restored.restore(tmp_path)
    for instance in (learner, restored):
        instance.learn(targeted(1), 1e-3)
    torch.testing.assert_close(learner.parameters, restored.parameters, rtol=0, atol=0)


def test_gradients_are_clipped():
    agent = sensory()
    learner = Learner(agent, CloneSettings(grad_clip=1e-3))
    learner.learn(batch_of([6, 3]), 1e-3)
    assert learner.gradient_norm > 1e-3
    norm = torch.stack([g.norm() for g in gradients(agent)]).norm()
    assert norm <= 1.001e-3


# Runs


def assert_same_runs(first: Run, second: Run) -> None:
    """Assert that two runs learned the same."""
    clocks = ("seconds", "learn_seconds", "samples_per_second")

    def results(run: Run) -> tuple:
        weights = load_policy(run.policy_path("last")).state_dict()
        rows = [{k: v for k, v in r.items() if k not in clocks} for r in run.rows()]
        return weights, str(rows), run.best

    (weights, *record), (expected, *expected_record) = map(results, (first, second))
    torch.testing.assert_close(weights, expected, rtol=0, atol=0)
    assert record == expected_record


ROUNDS = [
    *("clone.rounds=2", "clone.round_episodes=3", "clone.first_round=3"),
    *("clone.round_every=2", "perturbation=occlude", "perturbation.severity=[0.0,0.5]"),
    *("clone.prev_action_noise=0.1", "clone.lr_end=0.0001", "clone.play_every=2"),
    *("clone.play_episodes=2", "total_batches=8"),
]


def test_an_interrupted_run_ends_like_one_that_was_not(tmp_path, teacher_folder):
    options = (f"teacher={teacher_folder}", *ROUNDS)
    straight = run_clone(tmp_path / "straight", *options)
    stopped = run_clone(tmp_path / "stopped", *options, stop_after=1)
    assert len(stopped.rows()) == 1
    (teacher_folder / "config.json").unlink()  # the run has kept a copy
    for _ in range(2):
        run_clone(tmp_path / "stopped", stop_after=1)
    run = run_clone(tmp_path / "stopped")
    assert_same_runs(straight, run)
    assert [row["round"] for row in run.rows()] == [0, 0, 1, 2, 2]
    assert [row["batches"] for row in run.rows()] == [2, 3, 5, 7, 8]


def test_rounds_continue_unfinished_games(tmp_path, teacher_folder) -> None:
    options = ["clone.round_steps=4", "clone.chunk_length=4", "clone.burn_in=1"]
    options += [f"teacher={teacher_folder}", *ROUNDS]
    run = run_clone(tmp_path / "run", *options)
    paths = [round_path(run.path / FOLDER, number) for number in (1, 2)]
    parts = [load_round(path, None)["train"] for path in paths]
    assert [part.lengths.tolist() for part in parts] == [[4] * 3] * 2
    at_start = [part.steps["prev_action"][part.starts].flatten() == 0 for part in parts]
    assert [flags.tolist() for flags in at_start] == [[True] * 3, [False] * 3]
    stopped = run_clone(tmp_path / "stopped", *options, stop_after=1)
    assert len(stopped.rows()) == 1
    assert run_clone(tmp_path / "stopped").rows()[-1]["batches"] == 8


def test_a_run_learns_and_leaves_what_other_commands_read(tmp_path, teacher_folder):
    run = run_clone(
        tmp_path / "run",
        f"teacher={teacher_folder}",
        *("clone.lr=0.02", "clone.lr_end=0.001", "clone.grad_clip=1"),
        *("clone.iteration_batches=40", "total_batches=80"),
    )
    first, last = run.rows()
    assert last["loss"] < 0.5 * first["loss"]
    assert last["samples"] > first["samples"]
    (policy,) = load_policies(run.policy_dir).values()
    assert policy.config["pooling"]["num_codes"] == 3
    assert run.best.score == -last["validation_loss"]
    assert run.verb == "clone"


@pytest.mark.usefixtures("default_sigint")
def test_ctrl_c_while_collecting_can_be_resumed(tmp_path, monkeypatch, teacher_folder):
    options = (f"teacher={teacher_folder}", *ROUNDS)
    straight = run_clone(tmp_path / "straight", *options)
    calls: list[int] = []
    answer = PolicyTeacher.label

    def press(*arguments):
        calls.append(1)
        if len(calls) in (30, 115):  # in the teacher's own play, in a round
            signal.raise_signal(signal.SIGINT)
        return answer(*arguments)

    monkeypatch.setattr(PolicyTeacher, "label", press)
    with pytest.raises(KeyboardInterrupt):
        run_clone(tmp_path / "stopped", *options)
    assert not (tmp_path / "stopped" / FOLDER).exists()
    with pytest.raises(KeyboardInterrupt):
        run_clone(tmp_path / "stopped")
    assert round_path(tmp_path / "stopped" / FOLDER, 0).is_dir()
    assert_same_runs(straight, run_clone(tmp_path / "stopped"))


def test_the_best_by_return_is_the_one_with_the_highest(tmp_path, teacher_folder):
    run = run_clone(
        tmp_path / "run",
        f"teacher={teacher_folder}",
        *("clone.select=return", "clone.play_every=1", "clone.play_episodes=3"),
        *("clone.lr=0.05", "clone.lr_end=0.05", "checkpoint.every=1"),
    )
    returns = [row["return_mean"] for row in run.rows()]
    assert len(set(returns)) > 1
    assert run.best.score == max(returns)
    assert run.rows()[run.best.iteration - 1]["return_mean"] == max(returns)


def test_one_of_several_groups_is_cloned(tmp_path):
    run = run_clone(
        tmp_path / "run",
        *("env=helpers.farm:FoxAndHens", "policy=feed_forward"),
        *("fixed={fox: random}", "teacher=helpers.farm:StillHens"),
        *("clone.lr=0.05", "clone.lr_end=0.05", "clone.grad_clip=null"),
    )
    policy = load_policies(run.policy_dir)["hen"]
    assert policy.actions.n == 3
    assert run.rows()[-1]["accuracy"] > 0.9
    document = json.loads((run.path / "trajectories/round_000/about.json").read_text())
    assert len(document["digests"]["train"]) == 18  # three hens in six environments


def test_the_learning_rate_goes_from_one_end_to_the_other():
    for end, rates in {0.1: [0.1, 0.1, 0.1], 0.02: [0.1, 0.06, 0.02]}.items():
        settings = CloneSettings(lr=0.1, lr_end=end)
        values = [settings.lr_at(batch, 11) for batch in (0, 5, 10)]
        assert values == pytest.approx(rates)


def test_a_loss_that_is_not_finite_stops_the_run(tmp_path, teacher_folder):
    huge = ("clone.lr=1e30", "clone.lr_end=1e30", "clone.grad_clip=null")
    with pytest.raises(StoppedError, match="iteration 1: the loss is not finite"):
        run_clone(tmp_path / "run", f"teacher={teacher_folder}", *huge)


# Bad input


VISION = (
    "env.num_frames=2 policy=vision policy.pooling.frames=2 "
    "policy.pooling.num_codes=9 policy.convolutions=[]"
)
"""A student that shows a hidden layer."""


@yaml_cases("overrides, message")
def test_bad_input_is_refused(elsewhere, capsys, teacher_folder, overrides, message):
    text = overrides.replace("VISION", VISION).replace("FOLDER", str(teacher_folder))
    words = small_overrides("teacher=heuristic", *text.split())
    assert cli.main(["clone", "--run-dir", "run", *words]) == 2
    out, err = capsys.readouterr()
    last = err.splitlines()[-1]
    assert last.startswith("marl-pool: ")
    assert re.search(message, last)
    assert (out, "Traceback" in err) == ("", False)
    assert not Path("run").exists()


@pytest.mark.usefixtures("elsewhere")
def test_the_command_resumes_and_knows_when_it_is_done(capsys, teacher_folder):
    threads = torch.get_num_threads()
    command = ["clone", "--run-dir", "run", *SMALL, f"teacher={teacher_folder}"]
    assert cli.main([*command, "time_limit=1e-6"]) == 0
    assert len(Run.open("run").rows()) == 1  # one iteration, however late
    assert cli.main(["resume", "run", "time_limit=null"]) == 0
    assert Run.open("run").rows()[-1]["batches"] == 6
    assert cli.main(["resume", "run"]) == 0
    assert "6 of 6 batches are done; nothing to do" in capsys.readouterr().out
    assert cli.main(["resume", "run", "total_batches=9"]) == 0
    assert Run.open("run").rows()[-1]["batches"] == 9
    assert cli.main(["resume", "run", "clone.lr=1"]) == 2
    torch.set_num_threads(threads)


# Pong

PONG = [
    *("env=pong", "env.max_steps=12", "env.threads=1", "env.actions=moves"),
    *("policy=vision", "policy.pooling.num_codes=16", "policy.pooling.value_dim=4"),
    *("policy.convolutions=[[4,2,1]]", "policy.hidden=[8]", "clone.episodes=2"),
    *("clone.validation_episodes=1", "clone.num_envs=2", "clone.validation_steps=8"),
    *("clone.rounds=1", "clone.round_episodes=1", "clone.first_round=2"),
    "total_batches=4",
]


@pytest.mark.slow
def test_a_pong_student_with_an_auxiliary_head_resumes_exactly(tmp_path):
    pytest.importorskip("ale_py")
    # Sticky actions, so that no trajectory is left out as a duplicate.
    sticky = ["env.sticky_actions=0.25", "policy.memory=5", "clone.auxiliary=1"]
    overrides = [*PONG, *sticky, "teacher=value_table", "clone.iteration_batches=1"]
    straight = run_clone(tmp_path / "straight", *overrides)
    stopped = run_clone(tmp_path / "stopped", *overrides, stop_after=2)
    assert len(stopped.rows()) == 2
    assert_same_runs(straight, run_clone(tmp_path / "stopped"))
    assert all(row["validation_auxiliary_error"] > 0 for row in straight.rows())
    for path in (straight.path / FOLDER).glob("*/about.json"):
        assert json.loads(path.read_text())["privileged_targets"][0] == "crossing"


@pytest.mark.slow
def test_a_pong_student_is_cloned_from_the_value_table(tmp_path):
    pytest.importorskip("ale_py")
    overrides = [*PONG, "clone=steps", "perturbation=shuffle", "teacher=value_table"]
    run = run_clone(tmp_path / "run", *overrides)
    rows = RowTable(144)
    trajectories = load_round(tmp_path / "run/trajectories/round_000", rows)["train"]
    assert trajectories.steps["features"].shape == (trajectories.num_steps, 196)
    assert len(rows.table()) < 0.1 * trajectories.num_steps * 196
    # Labels are the actions taken next.
    for before, label in split_parts(trajectories, "prev_action", "label"):
        assert torch.equal(before[1:], label[:-1])
    assert [row["round"] for row in run.rows()] == [0, 1]
    sticky = "clone.rollout_env={sticky_actions: 0.25}"
    sticky_run = run_clone(tmp_path / "other", *overrides, sticky)
    assert [row["round"] for row in sticky_run.rows()] == [0, 1]
