"""Random streams: uniform, reproducible, and the same however they are served."""

from itertools import pairwise, product

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats
from torch import Tensor

from marl_pool.utils.errors import InputError
from marl_pool.utils.randomness import (
    _GAMMA,
    EVALUATION_ENVS,
    Purpose,
    Stream,
    _mix,
    stream_keys,
    uniform,
)

UNLIKELY = 1e-4
"""The significance level: share of true generators that a test here rejects."""


def make_key(seed: int = 0, env: int = 0, episode: int = 0, purpose: int = 1) -> Tensor:
    ids = torch.tensor([env]), torch.tensor([episode])
    return stream_keys(seed, *ids, Purpose(purpose))


def serve(stream: Stream, steps: int) -> Tensor:
    """Return the next ``steps`` steps, ``(steps, num_envs, size)``."""
    return torch.stack([stream.next().clone() for _ in range(steps)])


def test_mix_is_the_finaliser_of_splitmix64() -> None:
    """The vector comes from the public-domain splitmix64.c with seed 1234567."""
    expected = (
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
        4593380528125082431,
        16408922859458223821,
    )
    states = 1234567 + torch.arange(1, 6) * _GAMMA
    assert [bits % (1 << 64) for bits in _mix(states).tolist()] == list(expected)


@pytest.mark.parametrize("seed", [0, 1, 2**63 - 1])
def test_one_stream_is_uniform(seed: int) -> None:
    numbers = uniform(make_key(seed), 50_000)[0]
    assert stats.kstest(numbers.numpy(), "uniform").pvalue > UNLIKELY


def test_first_numbers_of_many_streams_are_uniform() -> None:
    """Neighboring keys must not give neighboring numbers."""
    env_ids = torch.arange(50_000)
    for keys in (
        stream_keys(3, env_ids, torch.zeros_like(env_ids), Purpose.RESET),
        stream_keys(3, torch.zeros_like(env_ids), env_ids, Purpose.RESET),
        torch.cat([make_key(seed) for seed in range(2000)]),
    ):
        for place in range(3):
            numbers = uniform(keys, 1, place)[:, 0].numpy()
            assert stats.kstest(numbers, "uniform").pvalue > UNLIKELY


def test_neighbors_in_world_episode_place_and_purpose_are_independent() -> None:
    env_ids, episodes = torch.arange(200).repeat(50), torch.arange(50)
    episodes = episodes.repeat_interleave(200)
    reset, dynamics = (
        uniform(stream_keys(0, env_ids, episodes, purpose), 4).view(50, 200, 4)
        for purpose in (Purpose.RESET, Purpose.DYNAMICS)
    )
    pairs = {
        "environments": (reset[:, 1:], reset[:, :-1]),
        "episodes": (reset[1:], reset[:-1]),
        "places": (reset[..., 1:], reset[..., :-1]),
        "purposes": (reset, dynamics),
    }
    for name, (first, second) in pairs.items():
        cells = torch.stack((first.flatten(), second.flatten())) * 8
        table = torch.zeros(8, 8).index_put_(
            tuple(cells.long()), torch.ones(first.numel()), accumulate=True
        )
        assert stats.chisquare(table.flatten().numpy()).pvalue > UNLIKELY, name


def test_streams_of_different_names_share_no_number() -> None:
    names = [*product(range(3), range(3), range(3), (1, 2, 3, 4))]
    names += [(0, EVALUATION_ENVS, 0, 1)]
    numbers = torch.cat([uniform(make_key(*name), 50) for name in names])
    assert len(set(numbers.flatten().tolist())) == numbers.numel()


def test_parts_of_a_purpose_are_different_streams() -> None:
    env_ids = torch.zeros(1, dtype=torch.int64)
    keys = [stream_keys(0, env_ids, env_ids, Purpose.POLICY, part) for part in range(5)]
    assert len({int(stream_key) for stream_key in keys}) == 5


@given(
    seed=st.integers(0, 2**63 - 1),
    env=st.integers(0, 2**45),
    episode=st.integers(0, 2**30),
    start=st.integers(0, 2**40),
)
def test_a_number_depends_on_its_name_and_place_alone(
    seed: int, env: int, episode: int, start: int
) -> None:
    alone = uniform(make_key(seed, env, episode), 3, start)
    env_ids = torch.tensor([5, env, env + 1])
    episodes = torch.tensor([episode + 1, episode, 0])
    keys = stream_keys(seed, env_ids, episodes, Purpose.RESET)
    starts = torch.tensor([[0], [start - 2], [7]])
    among = uniform(keys, 6, starts)
    assert torch.equal(alone[0], among[1, 2:5])


def test_numbers_lie_in_the_open_interval() -> None:
    numbers = uniform(make_key(), 1000)
    assert 0 < numbers.min() < numbers.max() < 1


def test_the_largest_number_stays_below_one_in_float32(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    extremes = torch.tensor([[0.5 * 2**-53, 1 - 0.5 * 2**-53]], dtype=torch.float64)
    monkeypatch.setattr(
        "marl_pool.utils.randomness.uniform", lambda *_: extremes.expand(2, 2)
    )
    env_ids = torch.arange(2)
    for dtype in (torch.float32, torch.float64):
        stream = Stream(0, env_ids, Purpose.POLICY, 2, dtype=dtype, block=1)
        numbers = stream.next()
        assert numbers.dtype == dtype
        assert 0 < numbers.min() < numbers.max() < 1


def make(block: int = 4, num_envs: int = 3, size: int = 2, seed: int = 0) -> Stream:
    return Stream(seed, torch.arange(num_envs), Purpose.DYNAMICS, size, block=block)


@pytest.mark.parametrize("block", [1, 2, 5, 64])
def test_what_is_served_does_not_depend_on_the_block(block: int) -> None:
    assert torch.equal(serve(make(block), 13), serve(make(7), 13))


def test_a_step_serves_the_next_numbers_of_each_stream() -> None:
    env_ids = torch.arange(3)
    keys = stream_keys(0, env_ids, torch.zeros_like(env_ids), Purpose.DYNAMICS)
    expected = uniform(keys, 20).float().view(3, 10, 2).transpose(0, 1)
    assert torch.equal(serve(make(), 10), expected)


def test_one_world_alone_equals_the_same_among_many() -> None:
    batch = serve(make(num_envs=5), 11)
    single = Stream(0, torch.tensor([3]), Purpose.DYNAMICS, 2, block=6)
    assert torch.equal(serve(single, 11)[:, 0], batch[:, 3])


@given(
    block=st.integers(1, 6),
    plays=st.lists(
        st.tuples(st.integers(0, 9), st.lists(st.booleans(), min_size=3, max_size=3)),
        max_size=5,
    ),
)
def test_a_restart_at_any_time_begins_the_new_episode_and_touches_no_other(
    block: int, plays: list[tuple[int, list[bool]]]
) -> None:
    stream = make(block)
    episodes = torch.zeros(3, dtype=torch.int64)
    steps_played = [0, 0, 0]
    for steps, restarts in [*plays, (7, [False] * 3)]:
        output = serve(stream, steps) if steps else torch.zeros(0, 3, 2)
        for env in range(3):
            fresh = make()
            fresh.restart(episodes)
            expected = serve(fresh, steps_played[env] + steps + 1)
            assert torch.equal(output[:, env], expected[steps_played[env] : -1, env])
        where = torch.tensor(restarts)
        episodes = episodes + where
        stream.restart(episodes, where)
        steps_played = [
            0 if restarted else count + steps
            for restarted, count in zip(restarts, steps_played, strict=True)
        ]


def test_a_restart_of_all_equals_a_partial_one_of_all() -> None:
    first, second = make(), make()
    for stream in (first, second):
        serve(stream, 6)
    episodes = torch.tensor([4, 2, 9])
    first.restart(episodes)
    second.restart(episodes, torch.ones(3, dtype=torch.bool))
    assert torch.equal(serve(first, 9), serve(second, 9))


@pytest.mark.parametrize("steps", [0, 3, 4, 6])
def test_selected_streams_continue_where_they_are(steps: int) -> None:
    stream = make()
    for _ in range(steps):
        stream.next()
    selected = stream.select(torch.tensor([2, 0]))
    assert torch.equal(serve(stream, 9)[:, [2, 0]], serve(selected, 9))
    episodes = torch.tensor([5, 5, 5])
    stream.restart(episodes)
    selected.restart(episodes[:2])
    assert torch.equal(serve(stream, 3)[:, [2, 0]], serve(selected, 3))


@pytest.mark.parametrize("steps", [0, 3, 4, 6])
def test_a_saved_stream_goes_on_where_it_was(steps: int) -> None:
    stream = make(block=4)
    stream.restart(torch.tensor([1, 2, 3]))
    for _ in range(steps):
        stream.next()
    saved = stream.state_dict()
    expected = serve(stream, 9)
    for block in (4, 5):  # the saved state is not changed by its use
        restored = make(block)
        serve(restored, 2)
        restored.load_state_dict(saved)
        assert torch.equal(serve(restored, 9), expected)


def test_a_stream_used_in_inference_mode_continues_outside_of_it() -> None:
    expected, stream = serve(make(), 3), make()
    with torch.inference_mode():
        assert torch.equal(stream.next(), expected[0])
    weight = torch.ones((), requires_grad=True)
    (stream.next() * weight).sum().backward()
    stream.restart(torch.tensor([0, 0, 4]), torch.tensor([False, False, True]))
    assert torch.equal(stream.next()[:2], expected[2, :2])


def test_seeds_differ_from_one_another() -> None:
    served = [serve(make(seed=seed), 4) for seed in range(5)]
    for first, second in pairwise(served):
        assert not (first == second).any()


@pytest.mark.parametrize("seed", [-1, 2**63])
def test_a_seed_out_of_range_is_refused(seed: int) -> None:
    with pytest.raises(InputError, match=rf"seed: expected .*, got {seed}"):
        make(seed=seed)


def test_a_stream_of_no_numbers_can_be_served() -> None:
    assert make(size=0).next().shape == (3, 0)
