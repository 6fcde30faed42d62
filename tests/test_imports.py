"""Imports: light modules stay light, and only training imports ray.

One script takes all steps and prints the banned modules that are loaded after each:
with a fresh interpreter for each step, torch would be imported six times.
"""

import json
import subprocess
import sys

import pytest
from gymnasium import spaces

from helpers.paths import ROOT
from helpers.samples import SPEC
from marl_pool.cli.help import HELP
from marl_pool.policies import make_policy
from marl_pool.policies.storage import save_policy

ID = "marl_pool/simple_centroid-v0"
HEAVY = ("torch", "ray", "scipy", "matplotlib", "cv2")
COMMANDS = [
    [],
    ["--help"],
    ["--version"],
    *([verb, "--help"] for verb in HELP),
    ["list"],
    ["train", "pooling=adda"],
    ["train", "--num-env-runner", "3"],
    ["resume", "nowhere"],
]
UNNAMED = (
    *("ray", "matplotlib"),
    *("marl_pool.encoders.swarm", "marl_pool.perturbations.order"),
)
# Modules that a policy does not need.
BEYOND_POLICIES = (
    *(*HEAVY[1:], "omegaconf", "mpe2", "pydantic.v1"),
    *("marl_pool.envs", "marl_pool.perturbations", "marl_pool.training"),
    *("marl_pool.evaluation", "marl_pool.rollout"),
)
SCRIPT = f"""
import contextlib, io, json, os, sys

def tell(step, banned):
    print(json.dumps([step, [name for name in banned if name in sys.modules]]))
    sys.stdout.flush()

import marl_pool
tell("package", {(*HEAVY, "omegaconf", "pydantic")!r})

# Packages of registered classes.
if os.fork() == 0:
    import marl_pool.encoders, marl_pool.perturbations, marl_pool.policies
    import marl_pool.pooling
    tell("rooms", ["torch"])
    from marl_pool.pooling import Pooling
    assert "torch" in sys.modules
    sys.exit()
assert os.wait()[1] == 0

# The command line, in a process that stays without torch.
if os.fork() == 0:
    from marl_pool.cli.main import main
    for command in {COMMANDS!r}:
        told = io.StringIO()
        with contextlib.redirect_stdout(told), contextlib.redirect_stderr(told):
            with contextlib.suppress(SystemExit):
                main(command)
        tell(" ".join(["marl-pool", *command]), {HEAVY!r})
    sys.exit()
assert os.wait()[1] == 0

# A configuration imports the classes that it names, but neither ray nor matplotlib.
if os.fork() == 0:
    from marl_pool.cli.main import main
    told = io.StringIO()
    with contextlib.redirect_stdout(told), contextlib.redirect_stderr(told):
        assert main(["train", "--cfg", "encoder=lstm", "perturbation=occlude"]) == 0
        assert main(["train", "ppo.lr=0"]) == 2
    for named in ("encoders.lstm", "perturbations.membership"):
        assert "marl_pool." + named in sys.modules
    tell("config", {UNNAMED!r})
    with contextlib.redirect_stdout(told), contextlib.redirect_stderr(told):
        for verb in ("evaluate", "diagnose", "render", "report"):
            assert main([verb, "nowhere"]) == 2
    tell("reading", ["ray", "matplotlib"])
    sys.exit()
assert os.wait()[1] == 0

# Environments registered with Gymnasium and PettingZoo.
if os.fork() == 0:
    import marl_pool.envs
    tell("registration", ["torch"])
    import gymnasium, pettingzoo
    assert {ID!r} in gymnasium.registry
    assert {ID!r} in pettingzoo.parallel_registry
    sys.exit()
assert os.wait()[1] == 0

# A policy, and then all that the package offers.
import pickle, torch

def refuse(*args, **kwargs):
    raise AssertionError("unpickled")

originals = pickle.load, pickle.loads, pickle.Unpickler, torch.load
pickle.load = pickle.loads = pickle.Unpickler = torch.load = refuse
marl_pool.load_policy(sys.argv[1])
pickle.load, pickle.loads, pickle.Unpickler, torch.load = originals
tell("policy", {BEYOND_POLICIES!r})
for name in marl_pool.__all__:
    getattr(marl_pool, name)
tell("api", {(*HEAVY[1:], "omegaconf")!r})
import gymnasium
gymnasium.make("marl_pool.envs:{ID}")
tell("env", ["ray"])
"""


@pytest.fixture(scope="module")
def banned_modules(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """The banned modules that are loaded after each step."""
    folder = tmp_path_factory.mktemp("imports")
    policy = make_policy(SPEC, spaces.Discrete(3), seed=0)
    save_policy(policy, folder / "policy")
    result = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(folder / "policy")],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    assert result.stderr == ""
    assert [path.name for path in folder.iterdir()] == ["policy"]
    return dict(json.loads(line) for line in result.stdout.splitlines())


STEPS = [
    "package",
    "rooms",
    "config",
    "reading",
    "registration",
    "policy",
    "api",
    "env",
]
STEPS += [" ".join(["marl-pool", *command]) for command in COMMANDS]


def test_every_step_is_reported(banned_modules: dict[str, list[str]]) -> None:
    assert sorted(banned_modules) == sorted(STEPS)


@pytest.mark.parametrize("step", STEPS)
def test_no_banned_module_is_imported(
    banned_modules: dict[str, list[str]], step: str
) -> None:
    assert banned_modules[step] == []


def test_no_file_of_the_tree_is_ignored():
    """Ruff does not check what git ignores, and `git add` skips new ignored files."""
    if not (ROOT / ".git").exists():
        pytest.skip("no checkout")
    listing = ["git", "ls-files", "--cached", "--ignored", "--exclude-standard"]
    done = subprocess.run(listing, cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == ""
