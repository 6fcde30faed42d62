"""Configurations: composed from YAML, checked against the constructors' signatures."""

import inspect
import json
import re
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from hypothesis import given
from hypothesis import strategies as st
from pydantic_core import to_jsonable_python

from helpers.perturbed import OBSERVED
from helpers.tables import yaml_cases
from marl_pool import InputError
from marl_pool.config import (
    VERBS,
    assign,
    check,
    check_plain,
    commented,
    compose,
    plan_sweep,
)
from marl_pool.config.compose import signature
from marl_pool.config.option_files import files_of
from marl_pool.config.sections import GROUPS, POLICY, Section, built_in
from marl_pool.config.suitability import options_for
from marl_pool.options.overrides import overrides_of
from marl_pool.options.plugins import load
from marl_pool.options.signatures import (
    ANY_OTHER,
    Option,
    check_argument,
    check_value,
    describe,
    meanings,
    options_of,
    summary,
)
from marl_pool.options.types import Device, PositiveInt, Probability, Seed
from marl_pool.training.jobs import JOBS

# libyaml's parser, where there is one, takes a tenth of the time.
LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
REGISTERED = [
    (group, name, target)
    for group, entry in GROUPS.items()
    for name, target in entry.names().items()
    if target
]
TARGETS = [
    *((target, GROUPS[group].context) for group, _, target in REGISTERED),
    (POLICY.target, POLICY.context),
]
"""Every class that a configuration can construct, and what the program fills."""
CHOICES = {
    (group, option): (verb, kind.section(group))
    for verb, kind in VERBS.items()
    if not verb.startswith("sweep")
    for group in kind.sections
    for option in options_for(verb, group)
}
"""Every option of a group, a verb that takes it, and what the verb makes of it."""
BUILT_IN = [choice for choice in CHOICES if choice[1] in built_in(choice[0])]
PRESETS = [choice for choice in CHOICES if choice not in BUILT_IN]


def section_options(section: Any, name: str) -> dict[str, Option]:
    """The options of the class that a section constructs."""
    return options_of(section.cls(name), section.context)


@cache
def composed(verb: str, *overrides: str) -> dict[str, Any]:
    """A configuration shared by several tests; read only."""
    return compose(verb, overrides)


def refusal(verb: str, *overrides: str) -> str:
    with pytest.raises(InputError) as caught:
        compose(verb, overrides)
    message = str(caught.value)
    assert "\n" not in message
    return message


@pytest.fixture
def plugins(tmp_path, monkeypatch):
    """A folder on sys.path for modules of a user that a test writes."""
    monkeypatch.syspath_prepend(tmp_path)

    def write(name: str, source: str) -> None:
        (tmp_path / f"{name}.py").write_text(textwrap.dedent(source))

    return write


# Signatures


@pytest.mark.parametrize(("target", "context"), TARGETS)
def test_every_option_of_our_own_classes_is_named_typed_and_explained(target, context):
    cls = load(target)
    descriptions = meanings(cls)
    for name, option in options_of(cls, context).items():
        assert name != ANY_OTHER
        assert option.annotation is not Any, name
        hint = "write what it means under Args: of the class, or below the field"
        assert descriptions.get(name), f"{target}: {name}: {hint}"


@pytest.mark.parametrize("verb", VERBS)
def test_every_setting_is_explained(verb):
    sections = [VERBS[verb].section(group) for group in VERBS[verb].sections]
    settings = [section.cls() for section in sections if isinstance(section, Section)]
    for cls in (VERBS[verb].settings, *settings):
        missing = set(options_of(cls)) - set(meanings(cls))
        assert not missing, f"{cls}: write what they mean below the fields"


def test_context_is_part_of_some_constructor():
    for group, entry in GROUPS.items():
        targets = [target for owner, _, target in REGISTERED if owner == group]
        assert entry.context <= {key for t in targets for key in options_of(load(t))}


@pytest.mark.parametrize(("group", "name", "target"), REGISTERED)
def test_the_listing_shows_the_first_line_of_the_docstring(group, name, target):
    assert summary(target) == inspect.cleandoc(load(target).__doc__).splitlines()[0]


class Documented:
    """Something.

    Args:
        share: of the whole,
            on two lines.
        kind: is another.

    Raises:
        InputError: share.
    """


@dataclass
class Inherited(Documented):
    """Something else.

    Args:
        kind: its own.
    """

    below: int = 3
    """Text below a field."""
    unexplained: int = 4


def test_meanings_come_from_args_fields_and_bases():
    assert meanings(Inherited) == {
        "kind": "its own.",
        "below": "Text below a field.",
        "share": "of the whole, on two lines.",
    }


# The packaged YAML


@pytest.mark.parametrize("group", [*GROUPS, "ppo", "clone", "fit"])
def test_no_file_repeats_or_hides_a_signature(group):
    assert not {*built_in(group)} & {*files_of(group)}


@pytest.mark.parametrize(
    ("group", "option"), [choice for choice in BUILT_IN if choice[1] != "none"]
)
def test_an_option_without_a_file_holds_the_defaults_of_its_signature(group, option):
    _, section = CHOICES[group, option]
    content = signature(section, option)
    assert content.pop("name", option) == option
    options = section_options(section, option)
    assert list(content) == [key for key in options if not options[key].required]
    for key, setting in ((key, options[key]) for key in content):
        default = to_jsonable_python(setting.default)
        if (group, key) == ("pooling", "num_heads"):
            default = "${oc.select:encoder.num_heads,1}"
        assert content[key] == default, key


@pytest.mark.parametrize(("group", "option"), PRESETS)
def test_a_preset_differs_from_the_signature(group, option):
    verb, section = CHOICES[group, option]
    preset = composed(verb, f"{group}={option}")[group]
    name = preset.get("name", option)
    defaults = {
        key: to_jsonable_python(setting.default)
        for key, setting in section_options(section, name).items()
    }
    assert any(preset[key] != default for key, default in defaults.items())


def test_ppo_paper_is_table_11():
    ppo = compose("train", ["ppo=paper"])["ppo"]
    table = {
        **{"batch_size": 8192, "minibatch_size": None, "num_epochs": 16, "lr": 2.5e-3},
        **{"gamma": 0.99, "gae_lambda": 0.95, "kl_coeff": 0.0, "value_coeff": 0.05},
        **{"entropy_coeff": 0.0, "clip": 0.2, "grad_clip": 10.0, "dropout": 0.1},
    }
    assert {key: ppo[key] for key in table} == table


def test_ppo_gpu_divides_its_batch():
    ppo = compose("train", ["ppo=gpu"])["ppo"]
    assert ppo["num_envs"] >= 4096
    assert ppo["batch_size"] % ppo["num_envs"] == 0
    assert ppo["batch_size"] % ppo["minibatch_size"] == 0
    fast = compose("train", ["ppo=fast"])["ppo"]
    sizes = ("num_envs", "batch_size", "minibatch_size")
    assert ppo == {**fast, **{key: ppo[key] for key in sizes}}


def test_experiment_simple_centroid_is_table_10():
    config = compose("train", ["experiment=simple_centroid"])
    encoder = {"dim": 8, "num_layers": 3, "num_heads": 8, "dim_ff": 32}
    policy = {"type_embedding": 4, "head_hidden": [32, 32], "init_std": 0.2}
    env = {"counts": "1-3-28", "max_steps": 128}
    for section, table in (("encoder", encoder), ("policy", policy), ("env", env)):
        assert {key: config[section][key] for key in table} == table
    assert config["env"]["continuous_actions"] is True
    assert config["pooling"]["num_heads"] == 8


def test_experiment_simple_tag_is_tables_12_and_13_with_its_papers_options():
    words = ["encoder=paper_tag", "ppo=paper_tag"]
    config = compose("train", ["experiment=simple_tag", *words])
    encoder = {"dim": 3, "num_layers": 6, "num_heads": 3, "dim_ff": 12}
    policy = {"type_embedding": 4, "head_hidden": [32, 32]}
    env = {"name": "simple_tag", "counts": "1-3-28", "prey": "random"}
    env |= {"continuous_actions": False, "obstacles_collide": False, "max_steps": 128}
    for section, table in (("encoder", encoder), ("policy", policy), ("env", env)):
        assert {key: config[section][key] for key in table} == table
    assert config["pooling"]["num_heads"] == 3
    assert config["ppo"] == compose("train", ["ppo=paper_tag"])["ppo"]
    paper = compose("train", ["ppo=paper"])["ppo"]
    differs = {"kl_coeff": 0.5, "value_coeff": 0.0005, "entropy_coeff": 0.005}
    differs |= {"kl_target": 0.01, "kl_estimate": "mean"}
    assert config["ppo"] == {**paper, **differs}


SPEECH = {"value_norm": True, "entropy_coeff": 0.01}


@pytest.mark.parametrize(
    ("name", "critic", "differs"),
    [
        ("simple_spread", "own", {}),
        ("simple_speaker_listener", "state", SPEECH),
        (
            "simple_reference",
            "state",
            {**SPEECH, "entropy_coeff": 0.002, "num_epochs": 8, "share_reward": True},
        ),
        ("simple_adversary", "own", {}),
        ("simple_push", "own", {}),
        ("simple_world_comm", "own", {"gamma": 0.95, "entropy_coeff": 0.01}),
    ],
)
def test_experiments_of_mpe_are_one_network_and_nearly_one_setting(
    name, critic, differs
):
    config = compose("train", [f"experiment={name}"])
    assert (config["env"]["name"], config["critic"]["name"]) == (name, critic)
    assert config["env"]["max_steps"] == 25
    sizes = {"dim": 16, "num_layers": 2, "num_heads": 4, "dim_ff": 32}
    assert {key: config["encoder"][key] for key in sizes} == sizes
    spread = compose("train", ["ppo=fast_spread"])["ppo"]
    expected = {**spread, "gamma": 0.9, "entropy_coeff": 0.005, **differs}
    assert config["ppo"] == expected


def test_ada_has_as_many_heads_as_the_encoder_unless_it_is_told():
    heads = ["encoder.num_heads=2"]
    assert compose("train", heads)["pooling"]["num_heads"] == 2
    config = compose("train", [*heads, "pooling.num_heads=4"])
    assert config["pooling"]["num_heads"] == 4
    plain = compose("train", ["encoder=marl_pool.encoders.base:IdentityEncoder"])
    assert plain["pooling"]["num_heads"] == 1


def test_experiment_leaves_pooling_and_ppo_to_choose():
    base = ["experiment=simple_centroid", "pooling=max", "ppo=paper"]
    config = compose("train", base)
    assert config["pooling"] == {"name": "max"}
    assert config["ppo"]["num_epochs"] == 16
    assert config["total_steps"] == 500 * 8192
    config = compose("train", ["experiment=simple_tag", "pooling=max", "ppo=fast"])
    assert config["pooling"] == {"name": "max"}
    assert config["ppo"] == compose("train", ["ppo=fast"])["ppo"]
    assert refusal("train", "pooling=max", "pooling.num_heads=2") == (
        "pooling.num_heads: this pooling takes no options"
    )


# Composition


@pytest.mark.parametrize("verb", VERBS)
def test_composed_config_is_complete_plain_and_stable(verb):
    config = compose(verb)
    assert json.loads(json.dumps(config)) == config
    assert check_plain(verb, config) == config


@pytest.mark.parametrize("verb", JOBS)
def test_a_typed_config_has_the_plain_data_of_its_file(verb):
    """In the same order, at every level."""
    plain = compose(verb)
    config = check(verb, plain)
    assert config.verb == verb
    assert json.dumps(config.plain) == json.dumps(plain)


@pytest.mark.parametrize(
    ("override", "path", "expected"),
    [
        ("env.num_noise=3", "env.num_noise", 3),
        ("+env.num_noise=3", "env.num_noise", 3),
        ("total_steps=1e6", "total_steps", 1_000_000),
        ("pooling.query=[0,2]", "pooling.query", [0, 2]),
        ("pooling.query=mean", "pooling.query", "mean"),
        ("pooling=max", "pooling", {"name": "max"}),
        ("policy.head_hidden=[]", "policy.head_hidden", []),
        ("ppo.lr=1", "ppo.lr", 1.0),
        ("ppo.minibatch_size=null", "ppo.minibatch_size", None),
        ("modules={agent: shared}", "modules", {"agent": "shared"}),
        ("checkpoint.every=5", "checkpoint.every", 5),
        ("resources.address='10.0.0.1:6379'", "resources.address", "10.0.0.1:6379"),
        ("resources.num_gpus_per_learner=0.5", "resources.num_gpus_per_learner", 0.5),
        ("device=cuda:1", "device", "cuda:1"),
        ("perturbation=jitter", "perturbation.severity", 0.1),
        ("seed=${env.max_steps}", "seed", 128),
        ("env.counts=1-31-0", "env.counts", "1-31-0"),
    ],
)
def test_an_override_sets_its_key(override, path, expected):
    value = compose("train", [override])
    for key in path.split("."):
        value = value[key]
    assert value == expected


@yaml_cases("override, message")
def test_a_wrong_override_is_refused_in_one_line(override, message):
    assert message in refusal("train", override)


@yaml_cases("entry, message")
def test_a_wrong_perturbation_of_the_suite_is_refused(entry, message):
    assert message in refusal("evaluate", f"perturbations=[{entry}]")


def test_a_severity_may_be_a_pair_in_training():
    pair = ["perturbation=occlude", "perturbation.severity=[0,0.6]"]
    assert compose("train", pair)["perturbation"]["severity"] == [0.0, 0.6]
    assert refusal("train", pair[0], "perturbation.severity=[0,2]") == (
        "perturbation.severity: expected a number in [0, 1], or two: [low, high], "
        "got [0, 2]"
    )


@pytest.mark.parametrize("suite", ["cross", "cross_tag", "attention_neuron"])
def test_environments_of_a_suite_fit_some_env(suite):
    """Composing refuses misspelt keys."""
    transfer = compose("evaluate", [f"suite={suite}"])["transfer"]
    labels = [env["label"] for env in transfer]
    assert len(labels) == len(set(labels)) > 1


def test_a_misspelt_option_of_another_world_is_refused_and_a_foreign_one_is_not():
    transfer = "transfer=[{label: x, env: {KEY: 3}}]"
    message = refusal("evaluate", transfer.replace("KEY", "num_nois"))
    assert message.startswith("transfer[0].env.num_nois: unknown key 'num_nois'")
    assert message.endswith("Did you mean 'num_noise'?")
    foreign = compose("evaluate", [transfer.replace("KEY", "zyx")])
    assert foreign["transfer"][0]["env"] == {"zyx": 3}


def test_a_suite_is_chosen_by_name():
    quick = compose("evaluate", ["suite=quick"])["perturbations"]
    assert {len(entry["severities"]) for entry in quick} == {1}
    assert "suite" not in compose("evaluate")
    names = "attention_neuron, cross, cross_tag, full, population, quick"
    message = f"unknown suite 'quik': choose from {names}, robustness/extended, stan"
    assert message in refusal("evaluate", "suite=quik")


def test_the_standard_suite_fits_and_is_filled_in():
    suite = compose("evaluate")["perturbations"]
    full = compose("evaluate", ["suite=full"])["perturbations"]
    names = {entry["name"] for entry in suite}
    missing = ", ".join(sorted({*OBSERVED} - names))
    assert not missing, f"add {missing} to marl_pool/configs/suite/standard.yaml"
    assert names == {*OBSERVED}
    assert full[: len(suite)] == suite
    for entry in suite:
        assert len(entry["severities"]) == 5
        options = set(section_options(GROUPS["perturbation"], entry["name"]))
        assert set(entry) == options - {"severity"} | {"name", "severities"}


# Plug-ins


POOL = """
    from torch import Tensor

    from marl_pool.pooling.base import Pooling
    from marl_pool.options.types import PositiveInt

    class MyPool(Pooling):
        def __init__(self, dim: int, *, power: PositiveInt, eps: float = 1e-6):
            super().__init__(dim)

        def forward(self, x, padding=None, types=None):
            return x[:, 0]

    class Open(MyPool):
        def __init__(self, dim: int, untyped=3, *, lazy: "Unknown" = 4, **more: float):
            super().__init__(dim, power=2)

    class Named(MyPool):
        def __init__(self, dim: int, *, name: str = "mine"):
            super().__init__(dim, power=2)

    class WrongDefault(MyPool):
        def __init__(self, dim: int, *, scale: int = 0.5):
            super().__init__(dim, power=2)

    class NoPool:
        pass
"""


def test_a_plugin_is_checked_against_its_own_signature(plugins):
    plugins("plug_pools", POOL)
    chosen = ["pooling=plug_pools:MyPool", "pooling.power=3"]
    config = compose("train", chosen)
    assert config["pooling"] == {"name": "plug_pools:MyPool", "power": 3, "eps": 1e-6}
    assert check("train", config).plain == config
    preset = ["experiment=simple_centroid", "+pooling.power=3", chosen[0]]
    assert compose("train", preset)["pooling"] == config["pooling"]


def test_a_plugin_with_any_other_options_takes_them_by_their_type(plugins):
    plugins("open_pools", POOL)
    overrides = ["pooling=open_pools:Open", "pooling.untyped=[1,a]", "pooling.extra=2"]
    options = {"untyped": [1, "a"], "lazy": 4, "extra": 2.0}
    config = compose("train", overrides)
    assert config["pooling"] == {"name": "open_pools:Open", **options}
    message = refusal("train", "pooling=open_pools:Open", "pooling.extra=x")
    assert "pooling.extra: expected a number, got 'x'" in message


@yaml_cases("overrides, message")
def test_a_wrong_plugin_is_refused(plugins, overrides, message):
    plugins("wrong_pools", POOL)
    assert message in refusal("train", f"pooling={overrides[0]}", *overrides[1:])


FOR_TYPE_CHECKERS = """
    from __future__ import annotations

    from dataclasses import dataclass, field
    from typing import TYPE_CHECKING

    from marl_pool.options.types import PositiveFloat
    from marl_pool.perturbations import TokenShare
    from marl_pool.pooling import MaxPooling

    if TYPE_CHECKING:
        from collections.abc import Sequence
        from torch import Tensor

    class Scaled(MaxPooling):
        def __init__(
            self, dim: int, *, w: Tensor | None = None, scale: PositiveFloat = 1.0
        ):
            super().__init__(dim)

    @dataclass(kw_only=True, eq=False)
    class Shift(TokenShare):
        '''Shift.'''

        steps: Sequence[int] = field(default_factory=list)
        sizes: list[int] = field(default_factory=list)

        def apply(self, tokens, state):
            return tokens
"""


def test_a_type_that_only_type_checkers_import_leaves_the_others_checked(plugins):
    plugins("checker_parts", FOR_TYPE_CHECKERS)
    head, shift = "pooling=checker_parts:Scaled", "perturbation=checker_parts:Shift"
    for value, shown in {"abc": "'abc'", "-3": "-3"}.items():
        message = refusal("train", head, f"pooling.scale={value}")
        assert f"pooling.scale: expected a number > 0, got {shown}" in message
    message = refusal("train", shift, "perturbation.sizes=[a]")
    assert "sizes: expected a list (each an integer), got ['a']" in message
    message = refusal("train", shift, "perturbation.severity=2")
    assert "severity: expected a number in [0, 1], or two" in message
    config = compose("train", [head, "pooling.w=x", shift, "perturbation.steps=[a]"])
    assert config["pooling"]["w"] == "x"
    assert config["perturbation"]["steps"] == ["a"]


# A user's own folder of YAML


def write_yaml(folder: Path, text: str) -> Path:
    folder.parent.mkdir(exist_ok=True)
    folder.write_text(text)
    return folder


def test_config_dir_adds_options(tmp_path):
    write_yaml(tmp_path / "pooling" / "corner.yaml", "name: ada\nquery: [0]\n")
    mine = "defaults:\n  - pooling: corner\nseed: 7\n"
    write_yaml(tmp_path / "experiment" / "mine.yaml", mine)
    config = compose("train", ["experiment=mine"], tmp_path)
    assert config["pooling"]["query"] == [0]
    assert config["pooling"]["num_heads"] == 1
    assert config["seed"] == 7
    assert compose("train", ["pooling=corner"], tmp_path)["pooling"]["query"] == [0]
    message = "choose from ada, ada_corner, .*, avg, cls, cnn, corner, "
    with pytest.raises(InputError, match=message):
        compose("train", ["pooling=corn"], tmp_path)


def test_a_preset_appends_to_the_list_of_its_base(tmp_path):
    write_yaml(
        tmp_path / "suite" / "mine.yaml",
        "defaults: [quick]\nperturbations+: [{name: bias, severities: [1.0]}]\n",
    )
    suite = compose("evaluate", ["suite=mine"], tmp_path)["perturbations"]
    assert suite[:-1] == compose("evaluate", ["suite=quick"])["perturbations"]
    assert suite[-1]["name"] == "bias"
    for key in ("episodes+", "unknown+"):  # of no list
        write_yaml(tmp_path / "suite" / "mine.yaml", f"{key}: [1]\n")
        with pytest.raises(InputError, match=rf"unknown key '{re.escape(key)}'"):
            compose("evaluate", ["suite=mine"], tmp_path)


def test_a_wrong_value_is_refused_with_the_files_of_the_user(tmp_path):
    wrong = "perturbations:\n  - {name: occlude, severities: [0.5, 3.0]}\n"
    suite = write_yaml(tmp_path / "suite" / "mine.yaml", wrong)
    with pytest.raises(InputError) as caught:
        compose("evaluate", ["suite=mine"], tmp_path)
    for part in ("perturbations[0].severities", "[0, 1]", "3.0", str(suite)):
        assert part in str(caught.value)
    # Files that were not used are not named, and letters are no mention.
    for name in ("a", "s", "mine-2"):
        write_yaml(tmp_path / "suite" / f"{name}.yaml", wrong)
    with pytest.raises(InputError, match=r"composed with [^,]*mine\.yaml\)$"):
        compose("evaluate", ["suite=mine"], tmp_path)
    with pytest.raises(InputError) as caught:
        compose("evaluate", ["episodes=0"], tmp_path)
    assert str(suite) not in str(caught.value)


def test_an_unknown_key_of_a_preset_is_refused_with_its_name():
    preset = "experiment=boxworld_refined"
    message = rf"encoder\.num_layers: unknown key .* \(a key of {preset}\)$"
    with pytest.raises(InputError, match=message):
        compose("train", [preset, "init=x", "encoder=identity"])
    with pytest.raises(InputError, match=r"choose from dim\.?$"):
        compose("train", ["encoder=identity", "encoder.num_layers=2"])


def test_config_dir_that_is_missing_or_broken_is_refused(tmp_path):
    with pytest.raises(InputError, match="--config-dir: no such folder"):
        compose("train", [], tmp_path / "none")
    bad = write_yaml(tmp_path / "pooling" / "bad.yaml", "name: [ada\n")
    with pytest.raises(InputError, match="bad.yaml cannot be read: ") as caught:
        compose("train", ["pooling=bad"], tmp_path)
    assert "\n" not in str(caught.value)
    bad.unlink()
    write_yaml(tmp_path / "pooling" / "ada.yaml", "name: max\n")
    with pytest.raises(InputError, match="is the package's name; rename it"):
        compose("train", [], tmp_path)


@yaml_cases("content, message")
def test_a_wrong_file_of_ones_own_is_named(tmp_path, content, message):
    write_yaml(tmp_path / "suite" / "mine.yaml", content)
    with pytest.raises(InputError) as refused:
        compose("evaluate", ["suite=mine"], tmp_path)
    assert message in str(refused.value)


def test_presets_may_choose_each_other(tmp_path):
    def write(name: str, text: str) -> None:
        write_yaml(tmp_path / "experiment" / f"{name}.yaml", f"defaults:\n  - {text}")

    write("first", "experiment: second\nseed: 7\n")
    write("second", "experiment: first\nseed: 7\n")
    assert compose("train", ["experiment=first"], tmp_path)["seed"] == 7
    write("second", "experiment: third\n")
    with pytest.raises(InputError, match=r"second.yaml: experiment: expected one of"):
        compose("train", ["experiment=second"], tmp_path)


@pytest.mark.parametrize(
    ("verb", "group"),
    [("train", "pooling"), ("train", "experiment"), ("clone", "policy")],
)
def test_an_option_that_builds_on_itself_is_refused(tmp_path, verb, group):
    for name, base in (("first", "second"), ("second", "first"), ("own", "own")):
        write_yaml(tmp_path / group / f"{name}.yaml", f"defaults:\n  - {base}\n")
    for option, file, base in (("first", "second", "first"), ("own", "own", "own")):
        place = re.escape(f"{file}.yaml: defaults: expected another {group}, got ")
        with pytest.raises(InputError, match=f"{place}{base}: it builds on itself$"):
            compose(verb, [f"{group}={option}"], tmp_path)


def test_two_options_may_build_on_the_same_one(tmp_path):
    files = {
        "base": "defaults:\n  - ada\nnum_heads: 2\n",
        "left": "defaults:\n  - base\nquery: mean\n",
        "right": "defaults:\n  - base\nresidual: true\n",
        "both": "defaults:\n  - left\n  - right\n",
    }
    for name, text in files.items():
        write_yaml(tmp_path / "pooling" / f"{name}.yaml", text)
    pooling = compose("train", ["pooling=both"], tmp_path)["pooling"]
    assert (pooling["num_heads"], pooling["residual"]) == (2, True)


def test_a_required_option_may_be_swept():
    swept = ["env=pettingzoo", "env.module=mpe2.simple_v3,mpe2.simple_spread_v3"]
    plan = plan_sweep(swept)
    modules = [trial.config.env["module"] for trial in plan.trials]
    assert modules == ["mpe2.simple_v3", "mpe2.simple_spread_v3"]


# Printing and changing


@pytest.mark.parametrize(
    ("verb", "overrides"),
    [
        *((verb, []) for verb in VERBS),
        *((CHOICES[place][0], ["=".join(place)]) for place in PRESETS),
    ],
)
def test_commented_config_reads_back_and_explains_every_key(verb, overrides):
    config = composed(verb, *overrides)
    text = commented(verb, config)
    assert yaml.load(text, Loader=LOADER) == config
    lines = text.splitlines()
    for above, line in zip(["", *lines], lines, strict=False):
        if re.match(r" *\w+:", line):
            assert above.strip().startswith("#"), line


def test_commented_config_explains_the_chosen_options():
    config = compose("train", ["pooling=max", "perturbation=jitter"])
    text = commented("train", config)
    for group, name in (("pooling", "max"), ("perturbation", "jitter")):
        meaning = summary(GROUPS[group].names()[name]).replace("`", "")
        assert f"# {meaning}\n  name: {name}" in text


def test_assign_changes_only_the_keys_given():
    config = compose("train")
    changed = assign(config, ["total_steps=5", "checkpoint.keep=1"])
    checkpoint = {**config["checkpoint"], "keep": 1}
    assert changed == {**config, "total_steps": 5, "checkpoint": checkpoint}


def test_an_editors_hidden_files_are_no_options(tmp_path):
    folder = tmp_path / "experiment"
    folder.mkdir()
    (folder / ".#mine.yaml").symlink_to("user@host.1:2")
    (folder / "mine.yaml").write_text("seed: 3\n")
    with pytest.raises(InputError, match="Did you mean.*mine"):
        compose("train", ["experiment=mien"], tmp_path)
    assert compose("train", ["experiment=mine"], tmp_path)["seed"] == 3


LAST = {"fixed": {"predator": "random"}}


@pytest.mark.parametrize("last", ["fixed={predator: random}", *overrides_of(LAST)])
def test_the_last_mapping_of_groups_counts(last):
    first = ["env=simple_tag", "env.prey=learned", "fixed={prey: heuristic}"]
    assert compose("train", [*first, last])["fixed"] == LAST["fixed"]
    added = compose("train", [*first, "fixed.predator=random"])["fixed"]
    assert added == {"prey": "heuristic", "predator": "random"}


def test_assign_merges_a_mapping_as_a_new_run_does():
    config = compose("train", ["checkpoint.keep=50"])
    changed = assign(config, ["checkpoint={every: 5}"])
    assert changed["checkpoint"] == {**config["checkpoint"], "every": 5}


# Values


# Beyond 2**53 no float is exactly such an integer.
INTEGERS = st.integers(-(2**53), 2**53)
PLAIN = st.recursive(
    st.none() | st.booleans() | INTEGERS | st.floats() | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3),
    max_leaves=4,
)


@given(PLAIN)
def test_a_value_is_taken_as_it_is_or_refused(value):
    scalars = (int, PositiveInt, Probability, Seed, Device, bool | None)
    for annotation in (*scalars, list[int] | str, tuple[float, float]):
        try:
            result = check_value("key", value, annotation)
        except InputError:
            continue
        assert result == value
        assert isinstance(result, bool) == isinstance(value, bool)


@given(st.integers(-3, 3), st.integers(-2, 2))
def test_bounds_are_those_of_the_annotation(whole, tenths):
    def fits(value, annotation):
        try:
            check_value("key", value, annotation)
        except InputError:
            return False
        return True

    assert fits(whole, PositiveInt) == (whole >= 1)
    share = whole + tenths / 10
    assert fits(share, Probability) == (0 <= share < 1)


@given(PLAIN)
def test_an_argument_is_held_to_what_a_configuration_is(value):
    """Except that a configuration may write a whole number as a float."""
    for annotation in (PositiveInt, bool | None, list[int] | str, tuple[float, float]):
        try:
            check_argument("key", value, annotation)
        except InputError:
            continue
        check_value("key", value, annotation)


def test_an_argument_need_not_be_plain_data():
    tokens = [1, 2]
    for value, annotation in (
        ((1, 2), list[int]),
        (range(2), Sequence[int]),
        (np.int64(3), PositiveInt),
        (np.float32(0.5), Probability),
        (MappingProxyType({"a": 1}), Mapping[str, int]),
        (torch.float64, torch.dtype),
        (torch.device("cpu"), str | torch.device),
        (tokens, Any),
    ):
        check_argument("key", value, annotation)
    with pytest.raises(InputError, match=r"key: expected an integer >= 1, got 3\.0"):
        check_argument("key", 3.0, PositiveInt)
    with pytest.raises(InputError, match=r"key: expected dtype, got 'float32'"):
        check_argument("key", "float32", torch.dtype)


@pytest.mark.parametrize(
    ("annotation", "words"),
    [
        (PositiveInt | None, "an integer >= 1 or null"),
        (Probability, "a number in [0, 1)"),
        (list[PositiveInt], "a list (each an integer >= 1)"),
        (tuple[int, ...], "a list (each an integer)"),
        (dict[str, int], "a mapping"),
        (Path, "Path"),
        (Any, "anything"),
    ],
)
def test_describe_says_which_values_fit(annotation, words):
    assert describe(annotation) == words
