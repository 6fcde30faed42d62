import asyncio
import itertools
import json
import re
import socket
import sys
from types import SimpleNamespace
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import pytest
from websockets.asyncio.client import connect as visitor
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.sync.client import connect

from helpers.played import served, token_target
from helpers.tables import yaml_cases
from marl_pool.play.messages import MAX_BYTES
from marl_pool.play.server import AHEAD, DRAWN, MESSAGES, LiveServer, Viewer, play
from marl_pool.play.session import Session
from marl_pool.utils.errors import InputError

CENTROID = {"name": "simple_centroid"}


@pytest.fixture(scope="module")
def server():
    with served(Session({"a": token_target(CENTROID)})) as running:
        yield running


def fetch(server, path, **headers):
    """Return status, headers and text of an answer."""
    url = f"http://127.0.0.1:{server.port}{path}"
    try:
        with urlopen(Request(url, headers=headers), timeout=300) as answer:
            return answer.status, answer.headers, answer.read().decode()
    except HTTPError as error:
        with error:
            return error.code, error.headers, error.read().decode()


def live(server, origin="http://127.0.0.1", token=None):
    query = f"token={server.token if token is None else token}"
    return connect(
        f"ws://127.0.0.1:{server.port}/live?{query}",
        origin=f"{origin}:{server.port}" if origin else None,
        proxy=None,
    )


def test_the_page_is_served_to_the_token_alone(server):
    status, headers, text = fetch(server, f"/?token={server.token}")
    assert status == 200
    assert text.startswith("<!doctype html>")
    assert "default-src 'none'" in headers["Content-Security-Policy"]
    assert "http" not in headers["Content-Security-Policy"].replace("ws://", "")
    for path in ("/", "/?token=", "/?token=x", "/live", "/?token=ä"):
        path = path.encode("ascii", "xmlcharrefreplace").decode()
        assert fetch(server, path)[0] == 403
    assert fetch(server, f"/other?token={server.token}")[0] == 404
    # A name of the attacker's that points to this machine.
    evil = fetch(server, f"/?token={server.token}", Host=f"evil.example:{server.port}")
    assert evil[0] == 403


@pytest.mark.parametrize(
    ("method", "path", "hosts", "status"),
    [
        *((method, None, 1, 405) for method in ("HEAD", "POST", "PUT", "OPTIONS")),
        *((method, "/live", 1, 405) for method in ("DELETE", "TRACE", "get", "X")),
        ("GET", None, 2, 400),
        ("GET", None, 0, 400),
        ("GET", "//[::1", 1, 400),
        ("GET", None, 1, 200),
    ],
)
def test_other_methods_and_malformed_requests_are_answered(
    server, method, path, hosts, status
):
    head = f"{method} {path or f'/?token={server.token}'} HTTP/1.1\r\n"
    head += f"Host: 127.0.0.1:{server.port}\r\n" * hosts
    with socket.create_connection(("127.0.0.1", server.port), timeout=300) as client:
        client.sendall(f"{head}\r\n".encode())
        answer = b"".join(iter(lambda: client.recv(1 << 16), b""))
    assert answer.startswith(f"HTTP/1.1 {status} ".encode())
    assert (b"Allow: GET" in answer) == (status == 405)
    assert (b"<!doctype html>" in answer) == (status == 200)


def test_a_page_that_floods_waits_for_its_frames(server, monkeypatch):
    count = 5 * MESSAGES
    monkeypatch.setattr("marl_pool.play.server.AHEAD", count)
    with live(server) as connection:
        for _ in range(count):
            connection.send('{"do": "restart"}')
        counts = [0]
        while counts[-1] < count:
            message = json.loads(connection.recv(timeout=300))
            if message["kind"] == "frame":
                counts.append(message["heard"])
    assert max(b - a for a, b in itertools.pairwise(counts)) <= MESSAGES


def test_a_page_that_draws_slowly_gets_fewer_frames_not_late_ones(server):
    with live(server) as connection:
        assert json.loads(connection.recv(timeout=300))["kind"] == "hello"
        frames = [json.loads(connection.recv(timeout=300)) for _ in range(AHEAD)]
        # The episode goes on meanwhile, and what the page asks is heard.
        with pytest.raises(TimeoutError):
            connection.recv(timeout=2)
        connection.send('{"do": "pause", "on": true}')
        connection.send(DRAWN)
        while not frames[-1]["paused"]:
            frames.append(json.loads(connection.recv(timeout=300)))
            connection.send(DRAWN)
    steps = [frame["lanes"][0]["episode"]["steps"] for frame in frames]
    assert len(frames) <= 2 * AHEAD
    assert steps[AHEAD] > steps[AHEAD - 1] + 1


@pytest.mark.parametrize(
    ("origin", "token"),
    [("http://evil.example", None), (None, None), ("http://127.0.0.1", "wrong")],
)
def test_a_websocket_from_elsewhere_is_refused(server, origin, token):
    with pytest.raises(InvalidStatus) as refusal, live(server, origin, token):
        pass
    assert refusal.value.response.status_code == 403


def test_messages_are_bounded_and_malformed_ones_answered(server):
    def receive(connection, kind):
        while True:
            message = json.loads(connection.recv(timeout=300))
            if message["kind"] == "frame":
                connection.send(DRAWN)
            if message["kind"] == kind:
                return message

    with live(server) as connection:
        assert receive(connection, "hello")["env"] == "simple_centroid"
        connection.send('{"do": "push", "value": "far"}')
        text = receive(connection, "error")["text"]
        assert "push.value" in text
        assert "number" in text
        assert "far" in text
        # The session goes on.
        connection.send('{"do": "pause", "on": true}')
        while not receive(connection, "frame")["paused"]:
            pass
        connection.send("x" * (MAX_BYTES + 1))
        with pytest.raises(ConnectionClosed) as closed:
            receive(connection, "nothing")
        assert closed.value.rcvd.code == 1009  # message too big
    with live(server) as connection:
        assert receive(connection, "frame")["lanes"]


@pytest.mark.parametrize("message", ["step", "restart", "next"])
def test_an_environment_that_breaks_a_rule_ends_the_server(message, monkeypatch):
    def fail(*_):
        raise InputError("broken")

    session = Session({"a": token_target(CENTROID)})
    session.paused = True
    monkeypatch.setattr(session, "step", fail)
    monkeypatch.setattr(session, "restart", fail)
    running = LiveServer(lambda: session)

    async def visit(server):
        url = f"ws://127.0.0.1:{server.port}/live?token={server.token}"
        origin = f"http://127.0.0.1:{server.port}"
        async with visitor(url, origin=origin, proxy=None) as page:
            await page.send(json.dumps({"do": message}))
            await page.wait_closed()

    async def main():
        visits = []
        await running.run(lambda s: visits.append(asyncio.create_task(visit(s))))

    with pytest.raises(InputError, match="^broken$"):
        asyncio.run(asyncio.wait_for(main(), 300))


def test_a_slow_environment_says_so(server, monkeypatch):
    def slow():
        with live(server) as connection:
            while True:
                message = json.loads(connection.recv(timeout=300))
                if message["kind"] == "frame":
                    return message["slow"]

    monkeypatch.setattr("marl_pool.play.server.SLOW", 1e-9)
    assert not slow()
    monkeypatch.setattr("marl_pool.play.server.SLOW", 1e9)
    assert slow()


def test_an_environment_that_waits_for_its_simulator_is_slow(monkeypatch):
    session = Session({"a": token_target(CENTROID)})
    now, frames = itertools.count(), []
    clocks = SimpleNamespace(monotonic=lambda: next(now), process_time=lambda: 0.001)
    monkeypatch.setattr("marl_pool.play.server.time", clocks)

    async def send(text):
        frames.append(json.loads(text))

    viewer = Viewer(SimpleNamespace(send=send), session)
    viewer.touched.set()
    asyncio.run(viewer._send_frame())
    (frame,) = frames
    assert frame["slow"]
    assert frame["milliseconds"] == 0


def test_only_a_few_pages_at_a_time(server, monkeypatch):
    monkeypatch.setattr("marl_pool.play.server.VIEWERS", 0)
    with pytest.raises(InvalidStatus) as refusal, live(server):
        pass
    assert refusal.value.response.status_code == 503


def test_a_port_that_is_taken_is_named():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        with pytest.raises(
            InputError, match=f"--port: expected a free port, got {port}"
        ):
            play(lambda: None, port=port, browser=False)


@yaml_cases("arguments, message")
def test_bad_input_is_one_line(arguments, message, refused, elsewhere):
    assert re.search(message, refused("play", *arguments))
    assert not list(elsewhere.iterdir())


def test_a_missing_extra_is_named(monkeypatch, refused):
    for name in list(sys.modules):
        if name.startswith(("marl_pool.play", "websockets")):
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "websockets", None)
    message = refused("play", "pretrained=cartpole_feed_forward")
    assert 'pip install "marl-pool[play]"' in message
