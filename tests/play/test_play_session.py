import pytest
import torch

from helpers.played import pretrained_target, tell, token_target
from helpers.tables import yaml_cases
from marl_pool.envs.description import describe_env
from marl_pool.evaluation.cases import play
from marl_pool.evaluation.load import target_from_policies
from marl_pool.play.episodes import resized
from marl_pool.play.messages import parse_message
from marl_pool.play.scenes import rounded
from marl_pool.play.session import Session
from marl_pool.policies import make_policy
from marl_pool.policies.random_policy import RandomPolicy
from marl_pool.utils.errors import InputError

CENTROID = {"name": "simple_centroid", "max_steps": 12}
BOXES = {"name": "boxworld", "observation": "entities"}


def steps(session, count):
    for _ in range(count):
        session.step()


def parted_steps(session):
    return [lane.parted for lane in session.lanes]


def test_a_shuffle_changes_no_action_of_an_invariant_head_and_others_by_position():
    session = Session(
        {
            "invariant": token_target(CENTROID),
            "by position": token_target(CENTROID, name="ada", query=[3]),
        }
    )
    steps(session, 2)
    assert parted_steps(session) == [None, None]
    for _ in range(3):
        tell(session, do="shuffle")
        steps(session, 2)
    assert parted_steps(session) == [None, 3]
    entities = session.frame()["lanes"][0]["episode"]["tokens"]["entity"]
    assert entities != sorted(entities)


@pytest.mark.parametrize("name", ["shuffle", "action_noise"])
def test_selected_tokens_are_compared_as_those_of_the_environment(name):
    env = {"name": "lbforaging", "choices": "food", "max_steps": 12}
    (group,) = describe_env(env).groups.values()
    policy = make_policy(
        group.tokens, group.action_space, action="select", init_std=0.5, seed=0
    )
    session = Session({"a": target_from_policies(policy, env)})
    tell(session, do="severity", name=name, value=1.0)
    moments = []
    while not session.over:
        session.step()
        moments.append(session.frame()["lanes"][0])
    is_same = name == "shuffle"
    assert (session.lanes[0].parted is None) == is_same
    assert all(moment["episode"]["executed"] is None for moment in moments) == is_same
    if is_same:
        actions = [moment["episode"]["action"] for moment in moments]
        assert actions == [moment["twin"]["action"] for moment in moments]
        assert any(actions)


def test_the_twin_plays_the_episode_of_an_evaluation():
    target = token_target(CENTROID)
    session = Session({"a": target})
    tell(session, do="severity", name="occlude", value=0.9)
    steps(session, 20)
    assert session.over
    twin = session.lanes[0].twin
    expected = play(target.policies, target.make_env(1)).returns["agent"]
    assert float(twin.returns["agent"].mean()) == expected[0]
    assert session.frame()["lanes"][0]["twin"]["over"] == "time is up"
    # The same episode again, and another one.
    tell(session, do="clear")
    tell(session, do="restart")
    start = session.lanes[0].twin.env.state.clone()
    tell(session, do="next")
    assert not session.lanes[0].twin.env.state.equal(start)


def test_occluding_and_freezing_by_hand():
    session = Session({"a": token_target(CENTROID)})
    lane = session.lanes[0]
    steps(session, 2)
    tell(session, do="occlude", entity=2)
    tell(session, do="freeze", entity=3)
    tell(session, do="duplicate", entity=1)
    before = lane.episode.perceived()["agent"]
    steps(session, 2)
    tokens = lane.episode.perceived()["agent"]
    order = lane.episode.env.token_entities("agent")[0].tolist()
    assert tokens.num_tokens == 33
    assert tokens.padding[0, 0].nonzero()[:, 0].tolist() == [order.index(2)]
    frozen = order.index(3)
    assert tokens.features[0, 0, frozen].equal(before.features[0, 0, frozen])
    assert tokens.features[0, 0, -1].equal(tokens.features[0, 0, order.index(1)])
    assert lane.parted == 3
    # A second click undoes the first; an agent's own token is left alone.
    tell(session, do="occlude", entity=2)
    tell(session, do="occlude", entity=0)
    assert not lane.episode.perceived()["agent"].padding.any()


@pytest.mark.parametrize("groups", [None, {"a": ["p_0"], "b": ["p_1"], "c": ["p_2"]}])
@pytest.mark.parametrize("do", ["occlude", "freeze", "duplicate"])
def test_a_choice_before_an_agents_first_turn_holds_in_it(do, groups):
    env = {"name": "pettingzoo", "module": "helpers.turn_based:RandomTurns"}
    env |= {"options": {"masks": None, "deaths": 0.0}, "max_steps": 12}
    env |= {} if groups is None else {"groups": groups}
    policies = {
        name: RandomPolicy(group.action_space)
        for name, group in describe_env(env).groups.items()
    }
    session = Session({"a": target_from_policies(policies, env)})
    episode, readings, turns = session.lanes[0].episode, {}, set()
    tell(session, do=do, entity=1)
    while not session.over:
        true = episode.env.observe()
        for name, tokens in episode.perceived().items():
            for agent in episode.env.active[name][0].nonzero()[:, 0].tolist():
                seen = tokens.at((0, agent))
                turns.add((name, agent))
                if do == "occlude":
                    assert seen.padding.tolist() == [False, True, False, False]
                elif do == "duplicate":
                    assert seen.features[4].equal(seen.features[1])
                    assert not seen.padding.any()
                else:
                    value = true[name].features[0, agent, 1]
                    reading = readings.setdefault((name, agent), value)
                    assert seen.features[1].equal(reading)
        session.step()
    assert len(turns) == 3


def test_a_paused_page_shows_a_token_doubled_after_a_step():
    session = Session({"a": token_target(CENTROID)})
    steps(session, 3)
    tell(session, do="duplicate", entity=4)
    entities = session.frame()["lanes"][0]["episode"]["tokens"]["entity"]
    assert len(entities) == 33
    assert entities[-1] == 4


def test_several_perturbations_at_once_show_where_tokens_come_from():
    session = Session(
        {"a": token_target(CENTROID), "b": token_target(CENTROID, seed=1)}
    )
    for name in ("jitter", "occlude", "duplicate", "inject", "shuffle"):
        tell(session, do="severity", name=name, value=0.5)
    steps(session, 2)
    tokens = session.frame()["lanes"][1]["episode"]["tokens"]
    assert len(tokens["entity"]) == 32 + 16 + 16
    # Injected tokens come from nowhere; occluded ones stay where they were.
    pairs = list(zip(tokens["entity"], tokens["padding"], strict=True))
    assert pairs.count((-1, 0)) == 16
    assert sum(padding for entity, padding in pairs if entity >= 0) >= 16
    assert set(tokens["entity"]) == set(range(-1, 32))
    tell(session, do="clear")
    assert session.frame()["severities"] == {}
    entities = session.frame()["lanes"][0]["episode"]["tokens"]["entity"]
    assert len(entities) == 32


def test_an_action_out_of_range_is_told_as_the_environment_clips_it():
    target = token_target({**CENTROID, "continuous_actions": True})
    with torch.no_grad():
        for parameter in target.policies["agent"].action_head.parameters():
            parameter.mul_(20.0)
    session = Session({"a": target})
    tell(session, do="severity", name="action_noise", value=0.1)
    lane, outside = session.lanes[0], False
    low, high = 0.0, 1.0
    while not session.over:
        session.step()
        episode = session.frame()["lanes"][0]["episode"]
        action = lane.episode.actions["agent"][0]
        outside |= bool(((action < low) | (action > high)).any())
        assert episode["action"] == action.clamp(low, high).tolist()
    assert outside


@pytest.mark.parametrize("continuous", [True, False])
@pytest.mark.parametrize("name", ["action_noise", "drop_actions"])
def test_perturbed_actions_are_told_and_leave_the_twin_alone(name, continuous):
    target = token_target({**CENTROID, "continuous_actions": continuous})
    with torch.no_grad():
        # Small logits, so that sampled actions differ from step to step.
        for parameter in target.policies["agent"].action_head.parameters():
            parameter.mul_(0.05)
    session = Session({"a": target}, explore=True)
    lane = session.lanes[0]
    steps(session, 3)
    tell(session, do="severity", name=name, value=1.0)
    reports = []
    while not session.over:
        before = lane.episode.executed["agent"].clone()
        session.step()
        reports.append(session.frame()["lanes"][0]["episode"]["executed"])
        actions, executed = (
            lane.episode.actions["agent"],
            lane.episode.executed["agent"],
        )
        # A lost action repeats the one before, also at once in mid-episode.
        if name == "drop_actions":
            assert executed.equal(before)
        assert reports[-1] in (None, executed[0].tolist())
        assert (reports[-1] is None) == actions[0].equal(executed[0])
    assert any(report is not None for report in reports)
    assert lane.parted is not None
    assert lane.parted > 3
    # What was executed moved the agent; the twin plays the episode of an evaluation.
    assert not lane.episode.env.state.equal(lane.twin.env.state)
    expected = play(target.policies, target.make_env(1), explore=True).returns["agent"]
    assert float(lane.twin.returns["agent"].mean()) == expected[0]
    assert session.frame()["lanes"][0]["twin"]["executed"] is None


@pytest.mark.parametrize("name", ["action_noise", "drop_actions"])
def test_a_moved_slider_keeps_the_random_numbers_of_the_actions(name):
    def executed(*severities):
        session = Session({"a": token_target(CENTROID)})
        for severity in severities:
            tell(session, do="severity", name=name, value=severity)
            steps(session, 12 // len(severities))
        assert session.over
        return session.lanes[0].episode.returns["agent"]

    assert executed(0.5, 0.5, 0.5).equal(executed(0.5))
    assert not executed(0.5, 0.0, 0.0).equal(executed(0.5))


@pytest.mark.parametrize(
    "name", ["simple_centroid", "simple_tag", "mpev2_tag", "mpev2_spread"]
)
def test_unperturbed_tokens_are_perceived_where_the_entities_are(name):
    session = Session({"a": token_target({"name": name})})
    steps(session, 3)
    moment = session.frame()["lanes"][0]["episode"]
    tokens, state = moment["tokens"], moment["scene"]["state"]
    shown = [i for i, padded in enumerate(tokens["padding"]) if not padded]
    assert len(shown) > 3
    for i in shown:
        place = state[tokens["entity"][i]][:2]
        assert tokens["places"][i] == pytest.approx(place, abs=2e-4)


def test_a_page_is_told_who_is_there():
    leaving = [{"type": "noise", "step": 2}]
    session = Session({"a": token_target({**CENTROID, "departures": leaving})})
    presence = []
    for _ in range(2):
        presence.append(session.frame()["lanes"][0]["episode"]["scene"]["present"])
        steps(session, 2)
    assert set(presence[0]) == {1}
    assert set(presence[1]) == {0, 1}


def test_numbers_that_json_lacks_are_zeros():
    assert rounded(torch.tensor([[1.23456, torch.nan]])) == [[1.2346, 0.0]]


@pytest.mark.parametrize("start", [0, 3])
def test_moving_an_entity_moves_it_in_the_twin_too(start):
    session = Session({"a": token_target(CENTROID)})
    steps(session, start)
    tell(session, do="move", entity=2, x=1.25, y=-99.0)
    for episode in (session.lanes[0].episode, session.lanes[0].twin):
        place = episode.env.state[0, 2].tolist()
        assert place == pytest.approx([1.25, -episode.env.extent, 0, 0])
    session.step()
    assert parted_steps(session) == [None]


def test_a_box_moves_as_a_whole_to_free_cells_only():
    session = Session({"a": token_target(BOXES)})
    env, n = session.lanes[0].episode.env, session.lanes[0].episode.env.n
    content, lock = env.token_places(0)[2:4].tolist()
    code = env.codes[0, [content, lock]].tolist()
    free = next(
        cell
        for cell in range(1, n**2)
        if (cell - 1) % n < n - 1 and env.codes[0, [cell, cell + 1]].eq(1).all()
    )
    tell(
        session, do="move", entity=2, x=float((free - 1) % n), y=float((free - 1) // n)
    )
    assert env.token_places(0)[2:4].tolist() == [free, free + 1]
    assert env.codes[0, [free, free + 1]].tolist() == code
    # Onto another box, and outside.
    box = int(env.token_places(0)[4])
    for x, y in (((box - 1) % n, (box - 1) // n), (n - 1, 0), (-1, 0), (0, 99)):
        tell(session, do="move", entity=2, x=float(x), y=float(y))
        assert env.token_places(0)[2:4].tolist() == [free, free + 1]


def test_a_push_turns_the_pole_and_a_memory_takes_more_sensors():
    target = pretrained_target("cartpole_attention_neuron")
    session = Session({"a": target})
    steps(session, 2)
    env = session.lanes[0].twin.env
    turn = float(env.state[0, 4])
    tell(session, do="push", value=0.5)
    assert float(env.state[0, 4]) == pytest.approx(turn - 3.0)
    tell(session, do="severity", name="duplicate", value=1.0)
    steps(session, 2)
    memory = session.lanes[0].episode.rollout.states["agent"]["memory"]
    assert memory[0].shape[2] == 10
    tell(session, do="distractors", value=3)
    steps(session, 2)
    assert session.frame()["distractors"] == 3
    assert len(session.frame()["lanes"][0]["twin"]["tokens"]["entity"]) == 8


def test_a_change_that_a_policy_cannot_take_is_undone():
    session = Session({"a": pretrained_target("cartpole_feed_forward")})
    steps(session, 2)
    with pytest.raises(InputError, match=r"at most 5 tokens, got 7"):
        tell(session, do="severity", name="duplicate", value=0.5)
    with pytest.raises(InputError, match=r"at most 5 tokens, got 6"):
        tell(session, do="duplicate", entity=1)
    with pytest.raises(InputError, match=r"noise_channels.*at most 5 tokens"):
        tell(session, do="distractors", value=1)
    with pytest.raises(InputError, match="confuse.*at least two types"):
        tell(session, do="severity", name="confuse", value=0.5)
    frame = session.frame()
    assert (frame["severities"], frame["distractors"]) == ({}, 0)
    steps(session, 2)
    assert parted_steps(session) == [None]


def test_a_change_is_refused_between_episodes_too():
    session = Session({"a": pretrained_target("cartpole_feed_forward")})
    lane = session.lanes[0]
    lane.episode.over = lane.twin.over = "terminated"
    with pytest.raises(InputError, match=r"at most 5 tokens, got 7"):
        tell(session, do="severity", name="duplicate", value=0.5)
    session.next_episode()
    steps(session, 2)
    assert session.frame()["severities"] == {}


class Remembering(RandomPolicy):
    """A policy whose memory is a tensor, a number for each token."""

    def initial_state(self, num_envs, num_agents, num_tokens):
        return torch.zeros(num_envs, num_agents, num_tokens)


def test_a_memory_that_is_a_tensor_gets_initial_numbers_of_added_tokens():
    env = token_target(CENTROID).make_env(1)
    env.reset()
    group, tokens = env.groups["agent"], env.observe()["agent"]
    memory = torch.ones(1, group.num_agents, tokens.num_tokens - 1)
    new = resized(Remembering(group.action_space), memory, tokens)
    assert new[..., :-1].equal(memory)
    assert new[..., -1].eq(0).all()


@yaml_cases("text, message")
def test_a_malformed_message_is_refused_with_key_expected_and_got(text, message):
    with pytest.raises(InputError, match=message):
        parse_message(text)


def test_every_environment_without_a_drawing_shows_its_picture():
    pytest.importorskip("cv2")
    torch.manual_seed(0)
    from marl_pool.play.scenes import Scene

    env = token_target(CENTROID).make_env(1)
    env.reset()
    scene = Scene()
    assert scene.describe(env, "agent")["kind"] == "picture"
    assert scene.state(env)["picture"].startswith("/9j/")  # a JPEG in base64
