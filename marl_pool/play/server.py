"""The server of the live page: HTTP and a websocket on one port of this machine."""

import asyncio
import hmac
import json
import logging
import os
import secrets
import sys
import time
import webbrowser
from collections.abc import Callable
from typing import Any
from urllib.parse import parse_qs, urlsplit

from websockets.asyncio.server import Server, ServerConnection, serve
from websockets.datastructures import Headers
from websockets.exceptions import ConnectionClosed
from websockets.frames import CloseCode
from websockets.http11 import Request, Response

from marl_pool.envs.timeout import EnvTimeoutError
from marl_pool.play.export import page
from marl_pool.play.messages import MAX_BYTES, PlainMessage, parse_message
from marl_pool.play.session import Session
from marl_pool.utils.errors import InputError

ADDRESS = "127.0.0.1"
FPS = 30
"""Maximum frames per second that a page receives."""
VIEWERS = 4
"""Maximum number of pages at a time; each has a separate session."""
HOLD = 1.5
"""Seconds for which the end of an episode stays on the page."""
MESSAGES = 8
"""Maximum messages of a page that are handled between two of its frames."""
DRAWN = "drawn"
"""What a page sends for each frame, once it has drawn it."""
AHEAD = 4
"""Frames that may be on their way: a slow page gets fewer, not later ones."""
PLAYING = ("step", "restart", "next")
"""Plain messages that play; their errors are the environment's or the policy's."""
MAX_REASON = 123
"""Maximum bytes of the reason for closing a websocket, set by its protocol."""
SLOW = 15
"""Frames per second below which a page says that the environment is slow."""
SECURITY_POLICY = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; "
    "img-src data:; connect-src 'self' ws://{host}; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'"
)
"""The Content-Security-Policy of the page, which loads nothing from elsewhere."""


class LiveServer:
    """Server of the page to clients with the token, with a session for each page.

    ``make_session`` is called for each page that connects; port 0 is any free one.
    ``token`` is the secret part of the address. A session that fails sets ``failure``,
    which ends the server.
    """

    def __init__(self, make_session: Callable[[], Session], port: int = 0) -> None:
        self.make_session, self.port = make_session, port
        self.token = secrets.token_urlsafe(16)
        self.viewers = 0
        self.page = page().encode()

    @property
    def url(self) -> str:
        """Address of the page, token included."""
        return f"http://{ADDRESS}:{self.port}/?token={self.token}"

    @property
    def hosts(self) -> list[str]:
        """Names under which a browser on this machine reaches the server."""
        return [f"{name}:{self.port}" for name in (ADDRESS, "localhost")]

    async def run(self, on_start: Callable[["LiveServer"], None]) -> None:
        """Serve until cancelled; call ``on_start`` once the port is open.

        Raises:
            InputError: the port is not free, or an environment cannot be shown.
            EnvTimeoutError: a call of an environment exceeded its limit.
        """
        self.failure: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        # Do not show the user other programs' malformed requests.
        logger = logging.getLogger("marl_pool.play")
        logger.setLevel(logging.CRITICAL)
        try:
            server: Server = await serve(
                self._view,
                ADDRESS,
                self.port,
                process_request=self._answer,
                max_size=MAX_BYTES,
                max_queue=16,
                logger=logger,
                server_header=None,
            )
        except OSError as error:
            raise InputError(
                f"--port: expected a free port, got {self.port}: {error.strerror}"
            ) from None
        async with server:
            self.port = next(iter(server.sockets)).getsockname()[1]
            on_start(self)
            await self.failure

    def _answer(
        self, connection: ServerConnection, request: Request
    ) -> Response | None:
        """Answer a request; None lets a websocket connect."""
        hosts, origins = map(request.headers.get_all, ("Host", "Origin"))
        try:
            address, (host,) = urlsplit(request.path), hosts
        except ValueError:
            return connection.respond(400, "expected one Host and a valid address\n")
        # Any other host name that points to this machine may be an attacker's.
        if host not in self.hosts:
            return connection.respond(403, "unknown host\n")
        # Older versions of the library accept no other method.
        if getattr(request, "method", "GET") != "GET":
            allowed = {"Allow": "GET", "Content-Length": "0", "Connection": "close"}
            return Response(405, "Method Not Allowed", Headers(allowed), b"")
        token = parse_qs(address.query).get("token", [""])[0]
        if not hmac.compare_digest(token.encode(), self.token.encode()):
            return connection.respond(403, "wrong or missing token\n")
        if address.path == "/":
            headers = {
                "Content-Type": "text/html; charset=utf-8",
                "Content-Length": str(len(self.page)),
                "Content-Security-Policy": SECURITY_POLICY.format(host=host),
                "Cache-Control": "no-store",
                "Referrer-Policy": "no-referrer",
                "X-Content-Type-Options": "nosniff",
                "Connection": "close",
            }
            return Response(200, "OK", Headers(headers), self.page)
        if address.path != "/live":
            return connection.respond(404, "not found\n")
        if origins not in [[f"http://{host}"] for host in self.hosts]:
            return connection.respond(403, "unknown origin\n")
        if self.viewers >= VIEWERS:
            return connection.respond(503, f"at most {VIEWERS} pages at a time\n")
        return None

    async def _view(self, connection: ServerConnection) -> None:
        """Serve one page until it closes."""
        self.viewers += 1
        try:
            viewer = Viewer(connection, self.make_session())
            await viewer.run()
        except ConnectionClosed:
            pass
        except Exception as error:
            if isinstance(error, EnvTimeoutError):
                reason = str(error).encode()[:MAX_REASON].decode(errors="ignore")
                await connection.close(CloseCode.INTERNAL_ERROR, reason)
            # The library would only log it: end the server, if no other page has.
            if not self.failure.done():
                self.failure.set_exception(error)
        finally:
            self.viewers -= 1


class Viewer:
    """One page: its session, stepped in real time, and its messages."""

    def __init__(self, connection: ServerConnection, session: Session) -> None:
        self.connection, self.session = connection, session
        self.touched = asyncio.Event()
        self.credit, self.ended = 0.0, 0.0
        # CPU time of this process for a frame, and time until it was ready.
        self.cost = self.delay = 0.0
        # Messages handled so far, and those that may still be before the next frame.
        self.heard, self.quota = 0, MESSAGES
        self.renewed = asyncio.Event()
        # Frames that the page has not drawn yet.
        self.undrawn = 0

    async def run(self) -> None:
        """Send frames and handle messages until the page closes."""
        await self._send(self.session.hello())
        listening = asyncio.create_task(self._listen())
        self.touched.set()
        try:
            while not listening.done():
                began = time.monotonic()
                await self._send_frame()
                self.quota = MESSAGES
                self.renewed.set()
                # Sleep at least once, so that messages are read.
                await asyncio.sleep(max(0.001, began + 1 / FPS - time.monotonic()))
            listening.result()
        finally:
            listening.cancel()

    async def _listen(self) -> None:
        async for text in self.connection:
            if text == DRAWN:
                self.undrawn = max(0, self.undrawn - 1)
            else:
                await self._act(text)
            # A page that floods the server waits, so that others and Ctrl-C need not.
            self.quota -= 1
            if not self.quota:
                self.renewed.clear()
                await self.renewed.wait()

    async def _act(self, text: str | bytes) -> None:
        playing = False
        try:
            message = parse_message(text)
            playing = isinstance(message, PlainMessage) and message.do in PLAYING
            self.session.act(message)
        except InputError as error:
            # A failed episode cannot continue, but one with a rejected change can.
            if playing:
                raise
            await self._send({"kind": "error", "text": str(error)})
        self.heard += 1
        self.touched.set()

    async def _send_frame(self) -> None:
        """Take the steps that are due, and send a frame if anything has changed."""
        began, busy = time.monotonic(), time.process_time()
        if self._advance():
            self.touched.set()
        if not self.touched.is_set() or self.undrawn >= AHEAD:
            return
        self.touched.clear()
        self.undrawn += 1
        frame = self.session.frame()
        self.cost = running_mean(self.cost, time.process_time() - busy)
        # A simulator that sleeps, or runs in other processes, takes no CPU time here.
        self.delay = running_mean(self.delay, time.monotonic() - began)
        frame["heard"] = self.heard
        frame["milliseconds"] = round(1000 * self.cost, 2)
        frame["slow"] = self.delay > 1 / SLOW
        await self._send(frame)

    def _advance(self) -> int:
        """Take the steps that are due; return their number."""
        session = self.session
        if session.paused:
            self.ended = 0.0
            return 0
        # Show the end for a while, then begin the next episode.
        if session.over:
            self.ended = self.ended or time.monotonic()
            if time.monotonic() - self.ended < HOLD:
                return 0
            self.ended = 0.0
            session.next_episode()
            return 1
        self.credit += session.speed / FPS
        steps, self.credit = divmod(self.credit, 1)
        began = time.monotonic()
        for done in range(int(steps)):
            session.step()
            # A slow environment takes fewer steps, but the page stays responsive.
            if time.monotonic() - began > 1 / FPS or session.over:
                return done + 1
        return int(steps)

    async def _send(self, message: dict[str, Any]) -> None:
        await self.connection.send(json.dumps(message, separators=(",", ":")))


def running_mean(mean: float, seconds: float) -> float:
    """Return the mean over the frames of about a second; 0 is none yet."""
    return mean + (seconds - mean) / (FPS if mean else 1)


def announce(server: LiveServer, *, browser: bool) -> None:
    """Print the address, and open it if there is a graphical browser."""
    print(f"{server.url}\nCtrl-C ends it.", flush=True)
    # Without a display, a text browser would take over the terminal.
    graphical = sys.platform != "linux" or {"DISPLAY", "WAYLAND_DISPLAY"} & {
        *os.environ
    }
    if browser and graphical:
        webbrowser.open(server.url)


def play(make_session: Callable[[], Session], *, port: int, browser: bool) -> None:
    """Serve the page until Ctrl-C."""
    server = LiveServer(make_session, port)
    asyncio.run(server.run(lambda started: announce(started, browser=browser)))
