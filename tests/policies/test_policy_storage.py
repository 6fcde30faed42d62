"""Policies on disk: the same actions, no code in the files, and clear refusals."""

import contextlib
import copy
import json
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import nn

import marl_pool
from helpers.campaign import CLONE, EVOLVE
from helpers.samples import SPEC, heads, random_tokens
from marl_pool.cli import main as cli
from marl_pool.files.manifest import MANIFEST, problem_of
from marl_pool.policies import make_policy
from marl_pool.policies.random_policy import RandomPolicy
from marl_pool.policies.sensory import FeedForward
from marl_pool.policies.storage import (
    CONFIG,
    FORMAT,
    WEIGHTS,
    load_env_config,
    load_policies,
    load_policy,
    save_policies,
    save_policy,
)
from marl_pool.policies.token_policy import TokenPolicy
from marl_pool.pooling.attention_neuron import AttentionNeuronPooling
from marl_pool.pooling.base import Pooling
from marl_pool.pretrained import pretrained_names, pretrained_path
from marl_pool.tokens import TokenSpec
from marl_pool.utils.errors import InputError
from marl_pool.utils.randomness import Purpose, Stream

CHOICE = spaces.Discrete(4)
LOW, HIGH = np.array([[-2, 0, 0.1], [2, 1, 5]], dtype=np.float32)
BOX = spaces.Box(LOW, HIGH)
SMALL = {"name": "transformer", "num_layers": 1, "num_heads": 2}


def make(space: spaces.Space = BOX, **options: Any) -> TokenPolicy:
    return make_policy(SPEC, space, **{"encoder": SMALL, "seed": 3, **options}).eval()


def same_decisions(first: Any, second: Any) -> bool:
    """Compare the decisions of two policies bit for bit."""
    tokens = random_tokens(0, (6, 2))
    for explore in (False, True):
        decisions = []
        for policy in (first, second):
            size = 2 * policy.noise_size
            noise = Stream(5, torch.arange(6), Purpose.POLICY, size)
            decision = policy.act(tokens, (), noise, explore)
            decisions.append((*decision[:4], policy.scale(decision.action)))
        if not all(map(torch.equal, *decisions)):
            return False
    return True


def refusal_of(folder: Path, **options: Any) -> str:
    """Return the one-line error of loading from ``folder``."""
    with pytest.raises(InputError) as refusal:
        load_policy(folder, **options)
    message = str(refusal.value)
    assert "\n" not in message
    assert str(folder) in message
    return message


@pytest.fixture(scope="module")
def saved_policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("policy")
    save_policy(make(), folder)
    return folder


@pytest.fixture
def folder(saved_policy: Path, tmp_path: Path) -> Path:
    """A copy of a saved policy, to be damaged."""
    for name in (CONFIG, WEIGHTS):
        (tmp_path / name).write_bytes((saved_policy / name).read_bytes())
    return tmp_path


def edit(folder: Path, change: Any) -> None:
    config = json.loads((folder / CONFIG).read_text())
    change(config)
    (folder / CONFIG).write_text(json.dumps(config))


# Round trips


@heads
def test_a_loaded_policy_acts_identically(
    name: str, options: dict[str, Any], tmp_path: Path
) -> None:
    policy = make(pooling={"name": name, **options})
    save_policy(policy, tmp_path)
    loaded = load_policy(tmp_path)
    assert same_decisions(loaded, policy)
    assert not same_decisions(make(pooling={"name": name, **options}, seed=4), policy)
    assert json.dumps(loaded.config) == json.dumps(policy.config)
    assert loaded.spec == policy.spec
    assert loaded.actions == policy.actions
    assert not loaded.training


def test_a_callers_later_change_does_not_reach_a_saved_policy(tmp_path: Path) -> None:
    heads = [{"name": "avg"}, {"name": "max"}]
    policy = make(pooling={"name": "multi", "heads": heads})
    heads.append({"name": "ada"})
    save_policy(policy, tmp_path)
    assert same_decisions(load_policy(tmp_path), policy)


def test_a_tilde_is_the_home_folder(folder, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    save_policy(load_policy(folder), "~/policy")
    load_policy("~/policy")
    assert (tmp_path / "home" / "policy" / "config.json").is_file()
    assert not Path("~").exists()


def test_numpys_numbers_are_saved_as_pythons(tmp_path: Path) -> None:
    pooling = {"name": "pma", "num_seeds": np.int64(2)}
    policy = make(pooling=pooling, init_std=np.float32(0.25))
    save_policy(policy, tmp_path)
    loaded = load_policy(tmp_path)
    assert same_decisions(loaded, policy)
    assert loaded.config["pooling"]["num_seeds"] == 2


def test_options_that_json_lacks_leave_the_saved_policy_alone(folder: Path) -> None:
    before = {name: (folder / name).read_bytes() for name in (CONFIG, WEIGHTS)}
    policy = make(seed=5)
    for note in ({3}, {np.int64(3): 1}, np.longdouble(1), Path("x")):
        policy.config["note"] = note
        with pytest.raises(
            InputError, match="^policy: expected options of JSON's type"
        ):
            save_policy(policy, folder)
    assert {name: (folder / name).read_bytes() for name in (CONFIG, WEIGHTS)} == before


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"modules": {}}, "modules: expected at least one, got {}"),
        ({"groups": {"agent": "b"}}, "group 'agent' has no module 'b'"),
        ({"groups": {"agent": 1}}, "groups: expected a mapping"),
        ({"env": {"num": 3}}, "env: expected a mapping with a name"),
        ({"modules": {"a": make(), "b": make()}}, "groups: expected the module of"),
        ({"modules": {1: make()}}, "modules: expected names as text, got 1"),
        (
            {"modules": {"a": RandomPolicy(CHOICE)}},
            "module 'a': expected a SpecifiedPolicy, got a RandomPolicy",
        ),
        (
            {"modules": {"a": nn.Linear(2, 2)}},
            "module 'a': expected a SpecifiedPolicy, got a Linear",
        ),
        ({"path": 3}, "path: expected text or Path, got 3"),
    ],
)
def test_what_cannot_be_loaded_is_not_saved(arguments, message, folder: Path) -> None:
    before = {file: file.read_bytes() for file in folder.iterdir()}
    defaults = {"modules": {"a": make(seed=5)}, "groups": {}, "path": folder}
    with pytest.raises(InputError, match=f"^{message}"):
        save_policies(**defaults | arguments)
    assert {file: file.read_bytes() for file in folder.iterdir()} == before


@pytest.mark.parametrize("place", ["config.json", "config.json/policy"])
def test_a_policy_is_not_saved_in_place_of_a_file(place: str, folder: Path) -> None:
    with pytest.raises(InputError, match=r"path: expected a folder, .*json is a file$"):
        save_policy(make(), folder / place)


class Sharpened(TokenPolicy):
    """A policy with an option that it does not record."""

    def __init__(
        self, spec: Any, action_space: Any, *, temperature: float = 1.0, **options: Any
    ) -> None:
        super().__init__(spec, action_space, **options)
        self.temperature = temperature


class RecordedSharpened(Sharpened):
    def __init__(
        self, spec: Any, action_space: Any, *, temperature: float = 1.0, **options: Any
    ) -> None:
        super().__init__(spec, action_space, temperature=temperature, **options)
        self.config["temperature"] = temperature


class Nameless(TokenPolicy):
    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)


class FixedSize(TokenPolicy):
    def __init__(self, spec: Any, action_space: Any, *, seed: Any = None) -> None:
        super().__init__(spec, action_space, head_hidden=(4,), seed=seed)


class Outer:
    class Inner(TokenPolicy):
        pass


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (Sharpened, "options of .*:Sharpened in its config, got none of temperature:"),
        (FixedSize, "all options of its config, got none of activation, encoder, "),
        (Nameless, "all options of its config, got none of action_space, spec$"),
        (Outer.Inner, "a class at the top of a module .*, got .*:Outer.Inner: write"),
    ],
)
def test_a_class_that_cannot_be_built_again_is_not_saved(
    kind: type[TokenPolicy], message: str, tmp_path: Path
) -> None:
    with pytest.raises(InputError, match=f"^policy: expected .*{message}") as refusal:
        save_policy(kind(SPEC, CHOICE), tmp_path / "policy")
    assert "\n" not in str(refusal.value)
    assert not list(tmp_path.iterdir())


def test_an_option_of_a_users_class_is_restored(tmp_path: Path) -> None:
    save_policy(RecordedSharpened(SPEC, CHOICE, temperature=3.0), tmp_path)
    loaded = load_policy(tmp_path, plugins=[f"{__name__}:RecordedSharpened"])
    assert loaded.temperature == 3.0


@pytest.mark.parametrize(
    "options",
    [
        {"space": CHOICE},
        {"trunk": "separate"},
        {"head_hidden": (7,), "type_embedding": 0},
        {"head_hidden": (), "log_std_range": (-0.02, 0.01)},
        {"encoder": {**SMALL, "dim": 6, "activation": "relu"}, "init_std": 0.7},
        {"dropout": 0.3},
        {"activation": "relu"},
        {"input_activation": None},
        {"activation": "relu", "head_hidden": (), "input_activation": "relu"},
    ],
)
def test_every_option_is_restored(options: dict[str, Any], tmp_path: Path) -> None:
    policy = make(**options)
    save_policy(policy, tmp_path)
    assert same_decisions(load_policy(tmp_path), policy)


def test_specs_of_images_and_of_sets_without_self_are_restored(tmp_path: Path) -> None:
    spec = TokenSpec(5, 3, ("patch",), has_self=False, dtype="uint8")
    policy = make_policy(spec, CHOICE, encoder=SMALL)
    save_policy(policy, tmp_path)
    loaded: Any = load_policy(tmp_path)
    assert loaded.spec == spec
    assert loaded.network.pooling.query == "mean"


def test_the_files_are_json_and_safetensors(tmp_path: Path) -> None:
    policy = make()
    save_policy(policy, tmp_path / "a" / "policy")
    files = {path.name for path in (tmp_path / "a" / "policy").iterdir()}
    assert {CONFIG, WEIGHTS, MANIFEST} == files
    assert {CONFIG, WEIGHTS} == {"config.json", "model.safetensors"}
    config = json.loads((tmp_path / "a" / "policy" / CONFIG).read_text())
    assert config["format"] == FORMAT
    assert config["package_version"] == marl_pool.__version__
    (module,) = config["modules"].values()
    assert module["spec"] == json.loads(json.dumps(SPEC.to_json()))
    assert module["pooling"] == {"name": "ada"}
    assert module["encoder"] == SMALL
    assert module["action_space"]["low"] == LOW.tolist()
    weights = load_file(tmp_path / "a" / "policy" / WEIGHTS)
    assert sum(w.numel() for w in weights.values()) == sum(
        p.numel() for p in policy.parameters()
    )


@pytest.mark.parametrize("name", [CONFIG, WEIGHTS])
@given(st.data())
def test_any_flipped_bit_is_found(
    tmp_path_factory: pytest.TempPathFactory, name: str, data: st.DataObject
) -> None:
    folder = tmp_path_factory.mktemp("policy")
    save_policy(make(), folder)
    content = bytearray((folder / name).read_bytes())
    content[data.draw(st.integers(0, len(content) - 1))] ^= 1 << data.draw(
        st.integers(0, 7)
    )
    (folder / name).write_bytes(content)
    assert str(folder) in refusal_of(folder)


def test_a_changed_policy_is_loaded_without_its_manifest(tmp_path: Path) -> None:
    folder = tmp_path / "policy"
    save_policy(make(), folder)
    text = (folder / CONFIG).read_text()
    (folder / CONFIG).write_text(text + " ")
    message = refusal_of(folder)
    assert CONFIG in message
    assert f"remove its {MANIFEST}" in message
    (folder / MANIFEST).unlink()
    load_policy(folder)


@pytest.mark.parametrize("name", pretrained_names())
def test_shipped_policies_match_their_manifests(name: str) -> None:
    path = pretrained_path(name)
    assert (path / MANIFEST).is_file()
    assert problem_of(path) == ""
    assert load_policies(f"pretrained={name}").keys() == load_policies(path).keys()
    assert load_env_config(f"pretrained={name}") == load_env_config(path)


def test_saving_replaces_an_earlier_policy(folder: Path) -> None:
    policy = make(CHOICE, pooling="max")
    save_policy(policy, folder)
    assert same_decisions(load_policy(folder), policy)


def test_several_modules_and_their_groups(tmp_path: Path) -> None:
    modules = {"hunter": make(BOX, seed=1), "team": make(CHOICE, seed=2)}
    groups = {"predator": "hunter", "prey": "team", "decoy": "team"}
    save_policies(modules, groups, tmp_path)
    loaded = load_policies(tmp_path)
    assert set(loaded) == set(groups)
    for group, module in groups.items():
        assert same_decisions(loaded[group], modules[module])
    assert loaded["prey"] is loaded["decoy"]
    message = refusal_of(tmp_path)
    assert "expected one policy, found 'hunter', 'team'; use load_policies" in message


def test_one_module_for_all_groups_is_one_policy(tmp_path: Path) -> None:
    policy = make()
    save_policies({"shared": policy}, {"a": "shared", "b": "shared"}, tmp_path)
    assert same_decisions(load_policy(tmp_path), policy)
    assert set(load_policies(tmp_path)) == {"a", "b"}


def test_a_policy_of_no_group_is_not_loaded_by_group(folder: Path) -> None:
    with pytest.raises(InputError, match="got 'policy' of none; use load_policy$"):
        load_policies(folder)


def test_module_names_may_share_a_prefix(tmp_path: Path) -> None:
    modules = {"team": make(seed=1), "team/a": make(seed=2), "team/z": make(seed=3)}
    save_policies(modules, {name: name for name in modules}, tmp_path)
    loaded = load_policies(tmp_path)
    for name, policy in modules.items():
        assert same_decisions(loaded[name], policy)


# Damage


def test_missing_files_are_named(folder: Path, tmp_path: Path) -> None:
    assert f"{CONFIG} is missing" in refusal_of(tmp_path / "nowhere")
    (folder / WEIGHTS).rename(folder / "kept")
    assert f"{WEIGHTS} is missing" in refusal_of(folder)
    # A run's folder has its policy inside.
    run = tmp_path / "run"
    shutil.copytree(folder, run / "policy")
    assert str(run / "policy") in refusal_of(run)
    (folder / "kept").rename(folder / WEIGHTS)
    (folder / CONFIG).unlink()
    assert f"no policy in {folder}: {CONFIG} is missing" in refusal_of(folder)
    (folder / CONFIG).mkdir()
    refusal_of(folder)


def test_a_file_in_place_of_the_folder_is_refused(folder: Path) -> None:
    refusal_of(folder / CONFIG)


@pytest.mark.parametrize("name", [CONFIG, WEIGHTS])
def test_a_truncated_file_is_refused_wherever_it_breaks(
    name: str, folder: Path
) -> None:
    whole = (folder / name).read_bytes()
    cuts = {0, 1, 7, 8, 9, 200, len(whole) // 2, len(whole) - 3, len(whole) - 2}
    for cut in cuts:
        (folder / name).write_bytes(whole[:cut])
        assert f"{name} is damaged" in refusal_of(folder)


@pytest.mark.parametrize(
    "content", [b"\x00\xff\xfe\x80", b"PK\x03\x04 a zip file", b"\x80\x02}q\x00."]
)
def test_files_of_another_kind_are_refused(content: bytes, folder: Path) -> None:
    (folder / WEIGHTS).write_bytes(content)
    assert f"{WEIGHTS} is damaged" in refusal_of(folder)
    (folder / CONFIG).write_bytes(content)
    assert f"{CONFIG} is damaged" in refusal_of(folder)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("[]", f"expected policy format {FORMAT}, got"),
        ("null", f"expected policy format {FORMAT}, got"),
        ("{}", f"expected policy format {FORMAT}, got None"),
        ('{"format": 99}', f"expected policy format {FORMAT}, got 99"),
        ('{"format": "x"}', f"expected policy format {FORMAT}, got 'x'"),
        ('{"format": 1}', "modules: expected a mapping (each a mapping)"),
        ('{"format": 1, "modules": [], "groups": {}}', "modules: expected a mapping"),
        ('{"format": 1, "modules": {}, "groups": []}', "groups: expected a mapping"),
        ('{"format": 1, "modules": {}, "groups": {}}', "modules: expected at least"),
        ('{"format": 1, "modules": {"a": 3}, "groups": {}}', "got {'a': 3}"),
        ('{"format": 1, "modules": {"a": {}}, "groups": {}}', "module 'a' is no"),
        ("[" * 10**5, f"{CONFIG} is damaged"),
    ],
)
def test_foreign_json_is_refused(content: str, message: str, folder: Path) -> None:
    (folder / CONFIG).write_text(content)
    assert message in refusal_of(folder)


def test_a_long_text_is_not_repeated_whole(folder: Path) -> None:
    (folder / CONFIG).write_text(json.dumps("x" * 10**6))
    assert len(refusal_of(folder)) < 400


def test_a_group_needs_its_module(folder: Path) -> None:
    edit(folder, lambda config: config["groups"].update(fox="nobody"))
    assert "group 'fox' has no module 'nobody'" in refusal_of(folder)


def test_a_policy_of_another_class_is_refused(folder: Path) -> None:
    def change(config: Any) -> None:
        config["modules"]["policy"]["class"] = "recurrent"

    edit(folder, change)
    assert "unknown policy 'recurrent': choose from" in refusal_of(folder)


@pytest.mark.parametrize("option", ["activation", "input_activation", "init_std"])
def test_an_option_that_is_not_stored_is_not_guessed(option: str, folder: Path) -> None:
    edit(folder, lambda config: config["modules"]["policy"].pop(option))
    message = refusal_of(folder)
    assert f"{CONFIG}: expected the policy options {option}, got none" in message


@pytest.mark.parametrize(
    ("option", "value"),
    [("num_tokens", 5.5), ("dtype", "load"), ("type_names", ["a", 1, "b"])],
)
def test_a_spec_of_other_types_is_refused(option, value, folder: Path) -> None:
    def change(config: Any) -> None:
        config["modules"]["policy"]["spec"][option] = value

    edit(folder, change)
    assert f": TokenSpec.{option}: expected " in refusal_of(folder)


def test_weights_must_fit_the_configuration(folder: Path, tmp_path: Path) -> None:
    def set_to(**options: Any) -> None:
        edit(folder, lambda config: config["modules"]["policy"].update(options))

    set_to(head_hidden=[16])
    assert "damaged or foreign" in refusal_of(folder)
    set_to(head_hidden=[32, 32], pooling={"name": "max"})
    message = refusal_of(folder)
    assert "damaged or foreign" in message
    assert "network.pooling.attention" in message
    set_to(pooling={"name": "ada"})
    assert same_decisions(load_policy(folder), make())
    save_policy(make(CHOICE), tmp_path / "other")
    (folder / WEIGHTS).write_bytes((tmp_path / "other" / WEIGHTS).read_bytes())
    assert "damaged or foreign" in refusal_of(folder)


def paths(tree: Any, path: tuple = ()) -> Iterator[tuple]:
    """Iterate over the paths to the values of a nested dictionary or list."""
    items: Any = ()
    if isinstance(tree, dict):
        items = tree.items()
    elif isinstance(tree, list):
        items = enumerate(tree)
    for key, value in items:
        yield (*path, key)
        yield from paths(value, (*path, key))


WRONG = [None, -1, 0, 2.5, "x", "", [], {}, [None], {"name": "x"}, {"a": []}, True]


@given(data=st.data())
def test_no_edit_of_the_configuration_is_more_than_a_refusal(
    saved_policy: Path, data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.getbasetemp() / "edited"
    folder.mkdir(exist_ok=True)
    (folder / WEIGHTS).write_bytes((saved_policy / WEIGHTS).read_bytes())
    config = json.loads((saved_policy / CONFIG).read_text())
    *way, last = data.draw(st.sampled_from(list(paths(config))))
    place = config
    for key in way:
        place = place[key]
    if data.draw(st.booleans()):
        del place[last]
    else:
        place[last] = copy.deepcopy(data.draw(st.sampled_from(WRONG)))
    (folder / CONFIG).write_text(json.dumps(config))
    for load in (load_policy, load_policies):
        with contextlib.suppress(InputError):
            load(folder)


# Code


SPY = """
import pathlib
pathlib.Path(__file__).with_suffix(".imported").touch()
from marl_pool import Pooling

class Sum(Pooling):
    def __init__(self, dim: int, *, factor: float = 1.0):
        super().__init__(dim)
        self.factor = factor

    def forward(self, x, padding=None, types=None):
        return self.factor * x.sum(1)
"""


@pytest.fixture
def plug_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A module that leaves a file behind when it is imported."""
    module = tmp_path / "code" / "spying_plug_in.py"
    module.parent.mkdir()
    module.write_text(SPY)
    monkeypatch.syspath_prepend(str(module.parent))
    yield module.with_suffix(".imported")
    sys.modules.pop("spying_plug_in", None)


@pytest.mark.parametrize("part", ["pooling", "encoder"])
@pytest.mark.parametrize(
    "name", ["os:system", "builtins:exec", "spying_plug_in:Sum", "spying_plug_in:Rest"]
)
def test_a_class_that_the_caller_does_not_allow_is_not_imported(
    part: str, name: str, folder: Path, plug_in: Path
) -> None:
    edit(folder, lambda config: config["modules"]["policy"][part].update(name=name))
    for options in ({}, {"plugins": ["another_package.module:Class"]}):
        message = refusal_of(folder, **options)
        assert f"uses the {part} {name!r}" in message
        assert f"plugins=[{name!r}]" in message
    assert not plug_in.exists()
    assert "spying_plug_in" not in sys.modules


@pytest.mark.parametrize("name", ["max2", "", "a.b", "a:b:c", 3, None, ["ada"], {}])
def test_invalid_names_are_refused(name: Any, folder: Path) -> None:
    for part in ("pooling", "encoder"):
        changed = {"name": name}
        edit(folder, lambda c, p=part, v=changed: c["modules"]["policy"].update({p: v}))
        refusal_of(folder)


def test_a_plug_in_that_the_caller_allows_is_loaded(
    tmp_path: Path, plug_in: Path
) -> None:
    name = "spying_plug_in:Sum"
    policy = make(pooling={"name": name, "factor": 0.5})
    save_policy(policy, tmp_path)
    plug_in.unlink()
    del sys.modules["spying_plug_in"]
    refusal_of(tmp_path)
    assert not plug_in.exists()
    assert same_decisions(load_policy(tmp_path, plugins=[name]), policy)
    assert plug_in.exists()
    save_policies({"shared": policy}, {"fox": "shared"}, tmp_path)
    loaded = load_policies(tmp_path, plugins=[name])
    assert same_decisions(loaded["fox"], policy)


def test_an_allowed_name_must_still_be_a_head(folder: Path) -> None:
    def change(config: Any) -> None:
        config["modules"]["policy"]["pooling"] = {"name": "os:system"}

    edit(folder, change)
    with pytest.raises(InputError, match="must be a subclass of .*Pooling"):
        load_policy(folder, plugins=["os:system"])


class TiedHead(Pooling):
    """A head whose second layer has the weights of the first."""

    def __init__(self, dim: int) -> None:
        super().__init__(dim)
        self.down = nn.Linear(dim, dim, bias=False)
        self.up = nn.Linear(dim, dim, bias=False)
        self.up.weight = self.down.weight

    def forward(self, x: Any, padding: Any = None, types: Any = None) -> Any:
        return self.up(self.down(x).tanh()).sum(1)


class FaultyHead(TiedHead):
    """A head with the fault that its option names."""

    def __init__(self, dim: int, *, fault: str) -> None:
        super().__init__(dim)
        self.fault = fault
        match fault:
            case "lazy":
                self.up = nn.LazyLinear(dim)
            case "meta":
                self.more = nn.Parameter(torch.ones(dim, device="meta"))
            case "sparse":
                self.more = nn.Parameter(torch.eye(dim).to_sparse())
            case "expanded":
                self.more = nn.Parameter(torch.ones(1).expand(dim))
            case "path":
                self.parts = nn.ParameterDict({"a/b": torch.ones(dim)})
            case "growing":
                self.register_buffer("means", torch.zeros(0))
            case "half":
                self.down.half()

    def forward(self, x: Any, padding: Any = None, types: Any = None) -> Any:
        match self.fault:
            case "late":
                self.late = nn.Linear(x.shape[-1], x.shape[-1])
            case "growing":
                self.means = torch.cat([self.means, x.mean().detach()[None]])
            case "failing":
                raise KeyError("no such\ntoken")
            case "rounded":
                return x.sum(1).half()
            case "flat":
                return self.up(x)
        return super().forward(x)


class CountingHead(TiedHead):
    def get_extra_state(self) -> Any:
        return {"calls": 3}

    def set_extra_state(self, state: Any) -> None:
        pass


class RandomHead(TiedHead):
    """A head that counts its calls, and draws random numbers in each."""

    def __init__(self, dim: int) -> None:
        super().__init__(dim)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        nn.utils.parametrizations.spectral_norm(self.down)

    def forward(self, x: Any, padding: Any = None, types: Any = None) -> Any:
        self.calls += 1
        return self.down(x + 0 * torch.rand(())).sum(1)


def head_policy(head: type[Pooling], **options: Any) -> TokenPolicy:
    pooling = {"name": f"{__name__}:{head.__name__}", **options}
    encoder = {"name": "identity"}
    return TokenPolicy(SPEC, spaces.Discrete(3), encoder=encoder, pooling=pooling)


def test_tied_weights_are_saved_and_tied_again(tmp_path: Path) -> None:
    policy = head_policy(TiedHead)
    save_policy(policy, tmp_path)
    loaded = load_policy(tmp_path, plugins=[f"{__name__}:TiedHead"])
    head = loaded.network.pooling
    assert head.up.weight is head.down.weight
    for name, tensor in policy.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], tensor)


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("lazy", "expected parameters that have a shape, got 'up.weight' of a lazy"),
        ("meta", "expected dense tensors with numbers, got 'more', meta"),
        ("sparse", "expected dense tensors with numbers, got 'more', torch.spa"),
        ("expanded", "memory for each number, got 'more', an expanded one"),
        ("path", "expected names of parameters without /, got 'parts.a/b'"),
        ("late", "same tensors and shapes before .* got another 'pooling.late.bias'"),
        ("growing", "same tensors and shapes before .* got another 'pooling.means'"),
        (
            "half",
            r"for 2 sets of zeros, got RuntimeError: .*test_policy_sto.*:\d+",
        ),
        (
            "failing",
            "for 2 sets of zeros, got KeyError: 'no such.*py:\\d+\\)$",
        ),
        ("rounded", "FaultyHead': expected a result of torch.float32, got torch.fl"),
        ("flat", r"FaultyHead: expected a result of shape \(B, \d+\), got \(2, "),
    ],
)
def test_a_head_that_cannot_be_saved_is_refused_at_once(fault, message) -> None:
    with pytest.raises(InputError, match=message) as caught:
        head_policy(FaultyHead, fault=fault)
    assert "\n" not in str(caught.value)


class MemoryHead(AttentionNeuronPooling):
    def unroll(self, *arguments: Any) -> Any:
        raise KeyError("no memory")


@pytest.mark.parametrize(
    ("head", "message"),
    [
        (CountingHead, "expected a state of tensors, got '_extra_state', dict"),
        (MemoryHead, "for 2 sets of zeros, got KeyError: 'no memory"),
    ],
)
def test_heads_with_another_state_or_a_faulty_memory_are_refused(head, message) -> None:
    with pytest.raises(InputError, match=message):
        head_policy(head)


class PathAgent(FeedForward):
    def __init__(
        self, spec: Any, action_space: Any, *, hidden: Any = (3,), seed: Any = None
    ) -> None:
        super().__init__(spec, action_space, hidden=hidden, seed=seed)
        self.parts = self.make()

    def make(self) -> nn.Module:
        return nn.ModuleDict({"a/b": nn.Linear(1, 1)})


class LazyAgent(PathAgent):
    def make(self) -> nn.Module:
        return nn.LazyLinear(1)


class MetaAgent(PathAgent):
    def make(self) -> nn.Module:
        return nn.Linear(1, 1, device="meta")


class CountingAgent(PathAgent):
    def get_extra_state(self) -> Any:
        return {"calls": 3}


@pytest.mark.parametrize(
    ("agent", "message"),
    [
        (PathAgent, "names of parameters without /, got 'parts.a/b.weight'"),
        (LazyAgent, "parameters that have a shape, got 'parts.weight' of a lazy layer"),
        (MetaAgent, "dense tensors with numbers, got 'parts.weight', meta"),
        (CountingAgent, "a state of tensors, got '_extra_state', dict"),
    ],
)
@pytest.mark.parametrize("verb", ["evolve", "clone"])
def test_an_agent_that_cannot_be_saved_is_refused_at_once(
    tmp_path, capsys, verb, agent, message
) -> None:
    name = f"{__name__}:{agent.__name__}"
    base = EVOLVE if verb == "evolve" else CLONE
    words = [verb, *base, f"policy.name={name}", "--run-dir", str(tmp_path / "run")]
    assert cli.main(words) == 2
    line = capsys.readouterr().err.splitlines()[-1]
    assert line.endswith(f"policy {name!r}: expected {message}")


def test_checking_a_head_changes_neither_it_nor_the_random_state(
    tmp_path: Path,
) -> None:
    torch.manual_seed(3)
    policy = head_policy(RandomHead)
    number = torch.rand(())
    assert int(policy.network.pooling.calls) == 0
    torch.manual_seed(3)
    again = head_policy(RandomHead)
    assert torch.equal(torch.rand(()), number)
    assert policy.training
    save_policy(policy, tmp_path)
    loaded = load_policy(tmp_path, plugins=[f"{__name__}:RandomHead"])
    for name, tensor in policy.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], tensor)
        assert torch.equal(again.state_dict()[name], tensor)
