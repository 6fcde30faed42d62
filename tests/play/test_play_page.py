import re
import signal
import subprocess
import sys

import pytest

from helpers.paths import ROOT
from helpers.played import (
    browser_page,
    file_url,
    pretrained_target,
    served,
    token_target,
    wait_for,
)
from marl_pool.play.export import export
from marl_pool.play.session import Session

pytestmark = pytest.mark.slow

# Long episodes, so that none ends between two looks at a page on a slow machine.
CENTROID = {"name": "simple_centroid", "max_steps": 4000}
LONG = "a_run_whose_name_is_longer_than_its_half_of_a_window_of_800_pixels"
LANE = "view.frame.lanes[0]"


def test_shuffle_keeps_the_twin_and_occlusion_parts_the_curves():
    session = Session(
        {"ada": token_target(CENTROID), LONG: token_target(CENTROID, name="max")}
    )
    with served(session) as server, browser_page(width=800) as page:
        page.goto(server.url)
        wait_for(page, f"!!view.frame && {LANE}.episode.steps > 3")
        # An invariant head: the same actions as the twin.
        page.click("#shuffle")
        wait_for(page, "view.frame.severities.shuffle === 1")
        step_count = page.evaluate(f"{LANE}.episode.steps")
        wait_for(page, f"{LANE}.episode.steps > {step_count} + 5")
        order = page.evaluate(f"{LANE}.episode.tokens.entity")
        assert order != sorted(order)
        # In one expression, since the next frame may arrive in between.
        action, twin_action = page.evaluate(
            f"[{LANE}.episode.action, {LANE}.twin.action]"
        )
        assert action == twin_action
        assert page.evaluate(f"{LANE}.parted") is None
        assert "same actions" in page.inner_text(".badge >> nth=0")
        # Occlude nearly all: the curves part.
        page.click("#restart")
        page.focus("input[data-name=occlude]")
        page.keyboard.press("End")
        wait_for(page, "view.frame.severities.occlude === 1")
        wait_for(page, f"{LANE}.parted !== null && {LANE}.episode.steps > 40")
        lane = "view.lanes[0]"
        ends = page.evaluate(f"[{lane}.returns.at(-1)[1], {lane}.twins.at(-1)[1]]")
        assert ends[0] != ends[1]
        # What became of an action is told, above the episode's picture alone.
        page.focus("input[data-name=action_noise]")
        page.keyboard.press("End")
        wait_for(page, f"{LANE}.episode.executed !== null")
        wait_for(page, "view.lanes[0].acted.textContent.startsWith('action off by ')")
        assert page.evaluate(f"{LANE}.twin.executed") is None
        # A click on an entity occludes it; the keyboard undoes all and pauses.
        page.keyboard.press("Escape")
        page.evaluate("document.activeElement.blur()")
        page.keyboard.press("c")
        page.keyboard.press("Space")
        wait_for(page, "view.frame.paused && !view.frame.severities.occlude")
        x, y, _ = page.evaluate("view.lanes[0].tools.episode.centre(3)")
        page.click(".episode canvas >> nth=0", position={"x": x, "y": y})
        wait_for(page, "view.frame.chosen.hidden.length === 1")
        # A copy is drawn over its original, so a number shows it.
        tokens = "{entity: [0, 1, 1, 2, 2, -1, -1], padding: [0, 0, 0, 0, 1, 0, 0]}"
        assert page.evaluate(f"repeats({tokens})") == [[1, 2]]
        assert "perceived twice" in page.inner_text("#legend")
        assert "type as perceived" in page.inner_text("#legend")
        # A small difference is not shown as zero.
        off = page.evaluate("changeOf({action: [0.5], executed: [0.501]})")
        assert off == "action off by 0.0010"
        # Each policy alone, then both; a hidden one plays on.
        headings = ".lane:visible h2"
        ada, long_title = titles = ["ada · ada", f"{LONG} · max"]
        for expected in ([ada], [long_title], titles):
            page.keyboard.press("v")
            assert page.locator(headings).all_inner_texts() == expected
        page.click("#policies button >> nth=0")
        assert page.locator(headings).all_inner_texts() == [long_title]
        page.click("#policies button >> nth=1")  # the last one stays
        assert page.locator(headings).all_inner_texts() == [long_title]
        page.evaluate("document.activeElement.blur()")
        step_count = page.evaluate(f"{LANE}.episode.steps")
        page.keyboard.press(".")
        wait_for(page, f"view.lanes[0].returns.at(-1)[0] === {step_count} + 1")
        # Keyboard actions go to the visible policy.
        x, y = page.evaluate("view.lanes[1].tools.episode.at(view.chosen).slice(0, 2)")
        page.keyboard.press("ArrowRight")
        place = f"{LANE}.episode.scene.state[view.chosen]"
        wait_for(page, f"Math.abs({place}[0] - ({x} + .15)) < 1e-3")
        assert page.evaluate(f"{place}[1]") == pytest.approx(y, abs=1e-3)
        page.click("#policies button >> nth=0")
        assert page.locator(headings).all_inner_texts() == titles
        # Nothing is wider than the window, even on a phone.
        for width in (800, 420):
            page.set_viewport_size({"width": width, "height": 900})
            assert page.evaluate("document.documentElement.scrollWidth") <= width


@pytest.mark.parametrize("env", ["simple_centroid", "cartpole"])
def test_the_export_computes_what_torch_does_without_a_network(env, tmp_path):
    targets = {
        "simple_centroid": {
            "ada": token_target(CENTROID),
            "mean": token_target(CENTROID, name="ada", query="mean", num_heads=2),
            "learned": token_target(CENTROID, name="ada", query="learned"),
            "max": token_target(CENTROID, name="max"),
            "avg": token_target(CENTROID, name="avg"),
            "no encoder": token_target(
                CENTROID, encoder={"name": "identity"}, name="ada"
            ),
        },
        "cartpole": {"neurons": pretrained_target("cartpole_attention_neuron")},
    }[env]
    path = export(targets, tmp_path / "demo.html", seed=3)
    with browser_page(offline=True) as page:
        page.goto(file_url(path))
        wait_for(page, f"!!view.frame && {LANE}.episode.steps > 3")
        # Actions, attention and returns of torch in float64, step by step.
        assert page.evaluate("window.engine.state.error") < 1e-9
        assert page.evaluate("DEMO.golden.length") == len(targets)
        assert page.evaluate("DEMO.golden.every((steps) => steps.length === 16)")
        if env == "simple_centroid":
            page.click("#shuffle")
            step_count = page.evaluate(f"{LANE}.episode.steps")
            wait_for(page, f"{LANE}.episode.steps > {step_count} + 5")
            assert page.evaluate(f"{LANE}.parted") is None
            perturb_actions(page)
            page.evaluate("send({do: 'severity', name: 'occlude', value: 0.9})")
        else:
            page.evaluate("send({do: 'occlude', entity: 2})")
        wait_for(page, f"{LANE}.parted !== null")


def test_the_documentation_shows_attention_that_stays_on_the_signal():
    # README states this of AdaPool.
    with browser_page(offline=True) as page:
        page.goto(file_url(ROOT / "docs" / "demo" / "simple_centroid.html"))
        wait_for(page, f"!!view.frame && {LANE}.episode.steps > 3")
        assert page.evaluate("window.engine.state.error") < 1e-9
        share = page.locator(".gauge >> nth=1").inner_text()
        assert "attention on signal" in share
        assert int(re.search(r"(\d+) ?%", share)[1]) > 90
        # On a phone Shuffle is in view.
        page.set_viewport_size({"width": 390, "height": 800})
        box = page.locator("#shuffle").bounding_box()
        assert box["y"] + box["height"] <= 800


def perturb_actions(page):
    """Drop actions of an exported page, and add noise to them."""
    run, steps = "window.engine.state.lanes[0].episode", f"{LANE}.episode.steps"
    page.click("#pause")
    wait_for(page, "view.frame.paused")
    for name in ("drop_actions", "action_noise"):
        page.evaluate(f"send({{do: 'severity', name: '{name}', value: 1}})")
        actions = []
        for _ in range(3):
            step_count = page.evaluate(steps)
            page.click("#step")
            wait_for(page, f"{steps} === {step_count} + 1")
            actions.append(page.evaluate(f"{run}.inRange({run}.executed[0])"))
            executed = page.evaluate(f"{LANE}.episode.executed")
            assert executed in (None, actions[-1])
        assert all(0 <= number <= 1 for action in actions for number in action)
        # A lost action repeats the one before; noise is another in each step.
        lost = name == "drop_actions"
        assert len({tuple(action) for action in actions}) == (1 if lost else 3)
        assert lost or page.evaluate(f"{LANE}.parted") is not None
        assert page.evaluate(f"{LANE}.twin.executed") is None
        page.click("#clear")
        page.click("#restart")
        # Saturated actions may not have parted the curves.
        wait_for(page, f"{steps} === 0 && {LANE}.parted === null")
    page.click("#pause")


@pytest.mark.parametrize(("name", "status"), [("SIGINT", 130), ("SIGTERM", 143)])
def test_a_signal_ends_the_command_cleanly(tmp_path, name, status):
    policy = "pretrained=cartpole_attention_neuron"
    command = [sys.executable, "-m", "marl_pool", "play", policy, "--no-browser"]
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=tmp_path,
        # Tests that a shell starts in the background ignore Ctrl-C.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    with process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline().startswith("http://127.0.0.1:")
            process.send_signal(signal.Signals[name])
            _, errors = process.communicate(timeout=300)
        finally:
            process.kill()
    assert (process.returncode, errors) == (status, "marl-pool: stopped\n")
    assert not list(tmp_path.iterdir())


def test_keys_pressed_between_two_frames_all_act():
    press = "new KeyboardEvent('keydown', {key: '%s', bubbles: true})"
    with (
        served(Session({"a": token_target(CENTROID)})) as server,
        browser_page() as page,
    ):
        page.goto(server.url)
        wait_for(page, "!!view.frame")
        page.evaluate(
            f"for (let i = 0; i < 5; i++) document.dispatchEvent({press % '+'})"
        )
        wait_for(page, "view.frame.distractors === 5")
        # An even number of presses leaves it as it is, an odd one does not.
        page.evaluate(
            f"for (let i = 0; i < 3; i++) document.dispatchEvent({press % ' '})"
        )
        wait_for(page, "view.frame.paused")
        state = f"{LANE}.episode.scene.state[0]"
        page.evaluate("view.chosen = 0")
        before = page.evaluate(state)
        page.evaluate(3 * f"document.dispatchEvent({press % 'ArrowRight'});")
        wait_for(page, f"Math.abs({state}[0] - {before[0]} - 0.45) < 1e-3")


def test_no_other_script_runs_in_an_exported_page(tmp_path):
    file = export({"a": token_target(CENTROID)}, tmp_path / "page.html")
    stranger = "<script>window.stranger = 1</script></body>"
    file.write_text(file.read_text().replace("</body>", stranger))
    with browser_page(offline=True) as page:
        page.goto(file_url(file))
        wait_for(page, f"!!view.frame && {LANE}.episode.steps > 3")
        assert page.evaluate("window.stranger === undefined")
        page.click("#shuffle")
        wait_for(page, "view.frame.severities.shuffle === 1")
