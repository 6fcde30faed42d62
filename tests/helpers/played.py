"""Sessions, servers and browsers for tests of the live page."""

import asyncio
import json
import shutil
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from marl_pool.envs.description import describe_env
from marl_pool.evaluation.load import target_from_policies
from marl_pool.evaluation.target import EvaluationTarget
from marl_pool.play.messages import parse_message
from marl_pool.play.server import LiveServer
from marl_pool.play.session import Session
from marl_pool.policies.storage import load_policies
from marl_pool.policies.token_policy import TokenPolicy
from marl_pool.pretrained import pretrained_path

TINY = {"name": "transformer", "dim": 8, "num_layers": 1, "num_heads": 2, "dim_ff": 8}
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")


def token_target(
    env: dict[str, Any], *, seed: int = 0, encoder: Any = TINY, **head: Any
) -> EvaluationTarget:
    """Make an untrained policy with large weights, which reacts to its observations."""
    (group,) = describe_env(env).groups.values()
    policy = TokenPolicy(
        group.tokens,
        group.action_space,
        encoder=encoder,
        pooling=head or {"name": "ada"},
        init_std=0.5,
        seed=seed,
    )
    return target_from_policies(policy, env)


def pretrained_target(name: str, **env: Any) -> EvaluationTarget:
    policies = load_policies(pretrained_path(name))
    return target_from_policies(policies, {"name": "cartpole", **env})


def tell(session: Session, **message: Any) -> None:
    """Send a message as the page does."""
    session.act(parse_message(json.dumps(message)))


@contextmanager
def served(session: Session) -> Iterator[LiveServer]:
    """Serve a session from a thread."""
    server, started = LiveServer(lambda: session), threading.Event()

    def run() -> None:
        with suppress(asyncio.CancelledError):
            asyncio.run(server.run(lambda _: started.set()))

    thread = threading.Thread(target=run)
    thread.start()
    assert started.wait(300)
    try:
        yield server
    finally:
        server.failure.get_loop().call_soon_threadsafe(server.failure.cancel)
        thread.join()


@contextmanager
def browser_page(*, width: int = 1280, offline: bool = False) -> Iterator[Any]:
    """Open a page in headless Chromium; fail if it has reported errors at the end."""
    binary = next(filter(None, map(shutil.which, BROWSERS)), None)
    if binary is None:
        pytest.skip(f"none of {', '.join(BROWSERS)} is installed")
    api = pytest.importorskip("playwright.sync_api")
    with api.sync_playwright() as driver:
        browser = driver.chromium.launch(
            executable_path=binary, args=["--no-sandbox"], timeout=300_000
        )
        context = browser.new_context(
            viewport={"width": width, "height": 900}, offline=offline
        )
        page, errors = context.new_page(), []
        page.set_default_timeout(60_000)
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.on("requestfailed", lambda request: errors.append(request.url))
        yield page
        assert not errors
        browser.close()


def wait_for(page: Any, expression: str) -> None:
    """Wait until a JavaScript expression is true; works although pages forbid eval."""
    end = time.monotonic() + 300
    while not page.evaluate(expression):
        assert time.monotonic() < end, expression
        page.wait_for_timeout(50)


def file_url(path: Path) -> str:
    return path.absolute().as_uri()
