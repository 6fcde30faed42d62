import json
import runpy
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from helpers.paths import ROOT
from helpers.played import pretrained_target, token_target
from marl_pool.envs.particles.simple_centroid import SimpleCentroid
from marl_pool.perturbations import PERTURBATIONS
from marl_pool.play.export import data_of, export, simulated_perturbations, wrapped
from marl_pool.pooling.basic import AvgPooling
from marl_pool.utils.errors import InputError

SCRIPT = str(ROOT / "scripts" / "refresh_demos.py")


def test_the_pages_of_the_documentation_are_the_present_ones(tmp_path, capsys):
    main = runpy.run_path(SCRIPT)["main"]
    assert main(["--check"]) == 0
    # One that is stale is found, and renewed with its own data.
    page = Path(tmp_path / "old.html")
    page.write_text(wrapped('{"seed":1}').replace("<title>", "<title>old "))
    assert main(["--check"], tmp_path) == 1
    assert capsys.readouterr().out == "old.html is stale\n"
    assert main([], tmp_path) == 0
    assert page.read_text() == wrapped('{"seed":1}')
    assert data_of(page.read_text()) == '{"seed":1}'


@pytest.mark.parametrize(
    ("target", "message"),
    [
        (token_target({"name": "simple_tag"}), "cartpole.*got SimpleTag"),
        (pretrained_target("cartpole_feed_forward"), "got FeedForward in a"),
        (token_target({"name": "cartpole"}, name="pma"), "got PMAPooling in a"),
        (
            token_target({"name": "cartpole"}, encoder={"name": "swarm", "dim": 8}),
            "got S",
        ),
        (token_target({"name": "cartpole", "num_frames": 2}), "got CartPole"),
        (
            token_target({"name": "simple_centroid"}, name="ada", query=[1]),
            "got AdaPooling in a",
        ),
    ],
)
def test_what_the_page_cannot_compute_is_refused(target, message, tmp_path):
    path = tmp_path / "demo.html"
    with pytest.raises(InputError, match=rf"--export: expected .*{message}"):
        export({"a": target}, path)
    assert not path.exists()


class Wind(SimpleCentroid):
    """A world that the page does not have."""


class Narrow(AvgPooling):
    """A head that the page does not have."""


@pytest.mark.parametrize(
    ("target", "message"),
    [
        (token_target({"name": f"{__name__}:Wind"}), "got Wind"),
        (token_target({"name": "simple_centroid"}, name=f"{__name__}:Narrow"), "got N"),
    ],
)
def test_a_subclass_of_what_the_page_has_is_refused(target, message, tmp_path):
    with pytest.raises(InputError, match=f"--export: expected .*{message}"):
        export({"a": target}, tmp_path / "demo.html")


def test_the_page_offers_no_perturbation_that_it_does_not_have(monkeypatch, tmp_path):
    assert simulated_perturbations() == {"hand", *PERTURBATIONS}
    monkeypatch.setattr(
        "marl_pool.play.export.simulated_perturbations",
        lambda: {*PERTURBATIONS} - {"bias"},
    )
    page = export({"a": token_target({"name": "simple_centroid"})}, tmp_path / "a.html")
    offers = json.loads(data_of(page.read_text()))["hello"]["perturbations"]
    reasons = {offer["name"]: offer["unfit"] for offer in offers}
    assert reasons["bias"] == "exported pages do not have it"
    assert not reasons["jitter"]


def test_options_are_checked_under_the_name_of_the_class_too(tmp_path):
    name = f"{SimpleCentroid.__module__}:SimpleCentroid"
    target = token_target({"name": name, "reward_power": 2.0})
    with pytest.raises(InputError, match=r"--export: expected env.reward_power=0\.5"):
        export({"a": target}, tmp_path / "demo.html")


def test_an_export_does_not_replace_a_file(tmp_path):
    path = tmp_path / "demo.html"
    path.write_text("mine")
    with pytest.raises(InputError, match=r"--export: expected a new file.*demo\.html"):
        export({"a": token_target({"name": "cartpole"})}, path)
    assert path.read_text() == "mine"


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("reward_power", 2.0),
        ("least_noise_offset", 0.5),
        ("signal_acceleration", 5.0),
        ("continuous_actions", False),
        ("departures", [{"type": "signal", "step": 5}]),
    ],
)
def test_a_world_that_the_page_cannot_simulate_is_refused(option, value, tmp_path):
    target = token_target({"name": "simple_centroid"})
    changed = replace(target, env={**target.env, option: value})
    with pytest.raises(InputError, match=f"--export: expected env.{option}="):
        export({"a": changed}, tmp_path / "demo.html")


PERCEIVED = """
const types = ["self", "signal"], perception = new Perception(0, 0, true, types);
const tokens = (step) => [0, 1, 2, 3, 4, 5].map((i) => (
  { f: [step, i], type: +(i > 0), pad: false, origin: i, entity: i }
));
perception.severities.NAME = SEVERITY;
let seen = [];
for (let step = 0; step < 9; step++) seen = perception.see(tokens(step), step, true);
const hidden = seen.filter((token) => token.pad).length;
console.log(JSON.stringify([seen.length, hidden, 8 - seen[1].f[0]]));
"""
"""Prints the numbers of all and of hidden tokens, and the delay in steps."""


@pytest.mark.skipif(shutil.which("node") is None, reason="node is not installed")
@pytest.mark.parametrize("half", [0.5, 1.5, 2.5])
@pytest.mark.parametrize("name", ["occlude", "duplicate", "inject", "delay"])
def test_the_page_rounds_halves_as_torch_does(name, half):
    count = {"inject": 32, "delay": 8}.get(name, 5)
    engine = (ROOT / "marl_pool" / "play" / "engine.js").read_text()
    case = PERCEIVED.replace("NAME", name).replace("SEVERITY", str(half / count))
    script = f"const window = {{}};\n{engine}\n{case}"
    node = ["node", "--eval", script]
    out = subprocess.run(node, check=True, capture_output=True, text=True).stdout
    changes = {"occlude": (0, 1, 0), "delay": (0, 0, 1)}
    added, hidden, delay = (round(half) * n for n in changes.get(name, (1, 0, 0)))
    assert json.loads(out) == [6 + added, hidden, delay]
