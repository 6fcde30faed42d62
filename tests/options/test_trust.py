"""Untrusted files: nothing that they name is imported or resolved."""

import contextlib
import importlib
import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from helpers.reported import evaluated, trained, with_policy
from helpers.samples import SPEC
from marl_pool import evaluate as evaluate_policy
from marl_pool.cli.common import resume_command
from marl_pool.cli.main import main
from marl_pool.config import compose, registry
from marl_pool.envs import make_batched_env
from marl_pool.options import names
from marl_pool.options.construction import build
from marl_pool.options.names import (
    UntrustedError,
    inheritance,
    resolve,
    trust,
    validate_trusted,
)
from marl_pool.options.plugins import user_plug_ins
from marl_pool.options.signatures import ANY_OTHER, options_of
from marl_pool.perturbations import make_perturbation
from marl_pool.policies import make_policy
from marl_pool.policies.actions import ActionSpec
from marl_pool.policies.storage import load_policies, load_policy, save_policy
from marl_pool.pooling import make_pooling
from marl_pool.runs.run import Run
from marl_pool.runs.sweep import Sweep
from marl_pool.utils.errors import InputError

PAYLOAD = "sent_payload:Part"
CODE = "from pathlib import Path\nPath(__file__).with_suffix('.ran').touch()\n"
QUICK = ["episodes=2", "threads=1"]
SPREAD = "mpe2.simple_spread_v3"


@pytest.fixture
def payload(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Write a module that leaves a mark when it is imported."""
    folder = tmp_path / "importable"
    folder.mkdir()
    (folder / "sent_payload.py").write_text(CODE)
    monkeypatch.syspath_prepend(folder)
    importlib.invalidate_caches()
    yield folder / "sent_payload.ran"
    sys.modules.pop("sent_payload", None)


def has_run(payload: Path) -> bool:
    """Return True if the module was imported since the last call."""
    ran = payload.exists()
    payload.unlink(missing_ok=True)
    sys.modules.pop("sent_payload", None)
    return ran


# Every nested option of every registered class

BOX = ActionSpec(low=(-1.0,), high=(1.0,))
CONTEXTS: dict[str, dict[str, Any]] = {
    "poolings": {"dim": 8, "num_tokens": 5, "has_self": True, "action_dim": 1},
    "encoders": {"dim": 8},
    "policies": {"spec": SPEC, "action_space": BOX, "seed": 0},
    "envs": {"num_envs": 1},
    "perturbations": {"specs": [SPEC], "num_features": 3},
    "tasks": {"data_dir": None, "download": False, "dropout": 0.0, "init_std": None},
    "strategies": {"start": torch.zeros(3), "seed": 0},
    "tokenizers": {"observer": None},
}
REQUIRED: dict[str, dict[str, Any]] = {
    "token": {"encoder": {"name": "identity"}, "pooling": {"name": "avg"}},
    "sensory": {"pooling": {"name": "attention_neuron"}},
    "vision": {"pooling": {"name": "vision_neuron"}},
    "pettingzoo": {"module": SPREAD},
    "clustering": {"encoder": {"name": "transformer"}, "pooling": None},
    "images": {"encoder": {"name": "transformer"}, "pooling": {"name": "avg"}},
}
FORMS: tuple[Any, ...] = (
    PAYLOAD,
    {"name": PAYLOAD},
    {"class": PAYLOAD},
    {"inner": {"name": PAYLOAD}},
    [PAYLOAD],
    [{"name": PAYLOAD}],
    {"name": "multi", "heads": [{"name": PAYLOAD}]},
    {"name": "multi", "heads": [{"name": "multi", "heads": [{"name": PAYLOAD}]}]},
)
OPTIONS = [
    (kind, name, option)
    for kind in CONTEXTS
    for name, target in sorted(registry(kind).items())
    for option in options_of(resolve(target, {}, kind, object))
    if option not in {*CONTEXTS[kind], ANY_OTHER}
]


def try_all_forms(kind: str, name: str, option: str) -> None:
    """Build a registered class with the payload's name, in each form, as one option."""
    classes = registry(kind)
    for form in FORMS:
        options = {**REQUIRED.get(name, {}), option: form}
        # Any error about a wrong type will do.
        with contextlib.suppress(Exception):
            build(name, classes, kind, object, options, CONTEXTS[kind])


def test_no_option_of_any_registered_class_imports_what_a_file_names(payload):
    assert len(OPTIONS) > 250
    for place in OPTIONS:
        with trust([SPREAD], "a file"):
            try_all_forms(*place)
        assert not has_run(payload), place


@pytest.mark.parametrize(
    "place",
    [
        ("poolings", "multi", "heads"),
        ("policies", "token", "encoder"),
        ("policies", "token", "pooling"),
        ("policies", "sensory", "pooling"),
        ("policies", "vision", "pooling"),
        ("policies", "attention_agent", "pooling"),
        ("envs", "pettingzoo", "module"),
        ("envs", "pettingzoo", "tokenizer"),
    ],
    ids=".".join,
)
def test_what_a_user_names_is_imported_there(payload, place):
    # The test above could fail: without a file in between, all of these import.
    assert place in OPTIONS
    try_all_forms(*place)
    assert has_run(payload)
    with trust([SPREAD, PAYLOAD, "sent_payload"]):
        try_all_forms(*place)
    assert has_run(payload)


# What is trusted


def test_an_inner_trust_never_allows_more() -> None:
    with trust(["a:B"], "outer", "again"):
        with trust(["a:B", "c:D"], "inner"):
            assert names.allowed() == {"a:B"}
            with pytest.raises(UntrustedError, match=r"^inner .*'c:D'.*again --plugin"):
                names.validate_trusted("c:D", "policy")
        with pytest.raises(UntrustedError, match=r"^outer uses the policy 'c:D'"):
            names.validate_trusted("c:D", "policy")
        names.validate_trusted("a:B", "policy")
    names.validate_trusted("c:D", "policy")


@pytest.mark.parametrize("plugins", [3, None, "my_module:Head", [3], [["x"]]])
def test_plug_ins_are_a_list_of_names(plugins) -> None:
    message = "plugins: expected a list of package.module:Class, got "
    with pytest.raises(InputError, match=message), trust(plugins):
        pass


def test_threads_and_processes_are_as_restricted(payload: Path) -> None:
    probe = "import sys; from marl_pool.options.names import resolve\n"
    probe += f"resolve({PAYLOAD!r}, {{}}, 'thing', object)"
    with trust([], "a file"), ThreadPoolExecutor(1) as pool:
        future = pool.submit(copy_context().run, resolve, PAYLOAD, {}, "thing", object)
        assert isinstance(future.exception(), UntrustedError)
        handed = inheritance()
    path = ":".join([str(payload.parent), *sys.path])
    for extra in (handed, {names.VARIABLE: "no JSON"}):
        done = subprocess.run(
            [sys.executable, "-c", probe],
            env={"PYTHONPATH": path, **extra},
            capture_output=True,
            text=True,
            check=False,
        )
        assert "UntrustedError" in done.stderr
        assert not has_run(payload)
    assert inheritance() == {}


# Entry points


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return with_policy(trained(tmp_path / "run", "pooling=avg"))


def in_policy(run: Run, **changes: Any) -> None:
    """Change the modules of the saved policy."""
    file = run.policy_dir / "config.json"
    content = json.loads(file.read_text())
    for module in content["modules"].values():
        module |= changes
    file.write_text(json.dumps(content))


def in_config(run: Run, **changes: Any) -> None:
    file = run.path / "config.yaml"
    content = yaml.safe_load(file.read_text()) | changes
    file.write_text(yaml.safe_dump(content, sort_keys=False))


NESTED = {"name": "multi", "heads": [{"name": "avg"}, {"name": PAYLOAD}]}
DEEPER = {"name": "multi", "heads": [NESTED]}
ENV = {"name": "pettingzoo", "module": SPREAD, "options": {"N": 2}}
TAG = {"name": "simple_tag", "prey": "learned"}
PLACES: dict[str, tuple[Callable[..., None], dict[str, Any]]] = {
    "policy": (in_policy, {"class": PAYLOAD}),
    "pooling": (in_policy, {"pooling": {"name": PAYLOAD}}),
    "encoder": (in_policy, {"encoder": {"name": PAYLOAD}}),
    "nested": (in_policy, {"pooling": NESTED}),
    "deeper": (in_policy, {"pooling": DEEPER}),
    "env": (in_config, {"env": {"name": PAYLOAD}}),
    "module": (in_config, {"env": {**ENV, "module": "sent_payload"}}),
    "tokenizer": (in_config, {"env": {**ENV, "tokenizer": PAYLOAD}}),
    "fixed": (in_config, {"env": TAG, "fixed": {"prey": PAYLOAD}}),
}
"""Where a run may name the payload: what changes, and how."""
VERBS = {
    "evaluate": ["evaluate", "suite=quick", *QUICK],
    "diagnose": ["diagnose", *QUICK],
    "render": ["render", "episodes=1", "threads=1", "size=64"],
    "report": ["report", "threads=1"],
}


def one_line(capsys: pytest.CaptureFixture[str], status: int) -> str:
    """The refusal, which is one line; exit status 2."""
    line = capsys.readouterr().err
    assert status == 2, line
    assert line.count("\n") == 1
    assert line.startswith("marl-pool: ")
    return line


@pytest.mark.parametrize("place", list(PLACES))
def test_no_reading_verb_imports_what_a_run_names(
    place, run, payload, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    change, options = PLACES[place]
    change(run, **options)
    allowed = ["--plugin", SPREAD] if place == "tokenizer" else []
    for verb, words in VERBS.items():
        status = main([*words, str(run.path), *allowed])
        assert not has_run(payload), verb
        if verb != "report" or status:  # whose page has a gap instead
            assert "sent_payload" in one_line(capsys, status)
    for load in (load_policy, load_policies):
        with contextlib.suppress(InputError):
            load(run.policy_dir)
        assert not has_run(payload)
    brief = ["env=simple_centroid", "env.max_steps=2", *QUICK]
    bare = ["evaluate", str(run.policy_dir), *brief]
    with contextlib.suppress(InputError):
        main([*bare, "suite=quick", "--out", str(tmp_path / "out")])
    assert not has_run(payload)


@pytest.mark.parametrize("place", ["nested", "env", "module"])
def test_an_allowed_plug_in_is_imported(place, run, payload, capsys):
    change, options = PLACES[place]
    change(run, **options)
    allowed = "sent_payload" if place == "module" else PAYLOAD
    flags = ["--plugin", allowed, *(["--plugin", SPREAD] * (place == "module"))]
    assert main([*VERBS["evaluate"], str(run.path), *flags]) == 2  # there is no Part
    assert has_run(payload)


@pytest.mark.parametrize("name", ["a','b", "${oc.env:HOME}", "a\\"])
def test_a_folder_of_files_may_have_any_name(name: str, tmp_path: Path) -> None:
    (tmp_path / name / "pooling").mkdir(parents=True)
    (tmp_path / name / "pooling" / "mine.yaml").write_text("name: max\n")
    config = compose("train", ["pooling=mine"], config_dir=tmp_path / name)
    assert config["pooling"] == {"name": "max"}


@pytest.mark.parametrize("key", ["policy.activation", "encoder.num_heads"])
def test_resume_fills_no_missing_option_with_a_current_default(key, run, capsys):
    section, _, option = key.partition(".")
    old = {name: value for name, value in run.config[section].items() if name != option}
    assert old != run.config[section]
    in_config(run, **{section: old})
    message = one_line(capsys, main(["resume", str(run.path), "total_steps=999999"]))
    assert f"{key}: expected the value that the run was begun with, got none" in message


@pytest.mark.parametrize(
    ("changes", "kind"),
    [
        ({"pooling": NESTED}, "pooling"),
        ({"pooling": {"name": PAYLOAD}}, "pooling"),
        ({"encoder": {"name": PAYLOAD}}, "encoder"),
        ({"env": {"name": PAYLOAD}}, "env"),
        ({"env": {**ENV, "module": "sent_payload"}}, "env.module"),
        ({"perturbation": {"name": PAYLOAD}}, "perturbation"),
        ({"fixed": {"agent": PAYLOAD}, "plugins": [PAYLOAD]}, "policy"),
    ],
    ids=lambda value: "" if isinstance(value, dict) else value,
)
def test_resume_imports_only_what_it_is_allowed(changes, kind, run, payload, capsys):
    in_config(run, **changes)
    command = ["resume", str(run.path), "total_steps=999999"]
    message = one_line(capsys, main(command))
    assert not has_run(payload)
    name = "sent_payload" if kind == "env.module" else PAYLOAD
    if name in message:  # the heads of `multi` and modules are met when training begins
        assert f"{kind} {name!r}" in message
        assert f"marl-pool resume {run.path} --plugin {name}" in message
    main([*command, "--plugin", name])
    assert has_run(payload) or kind == "policy"


def test_what_is_stopped_says_which_plug_ins_it_needs(tmp_path: Path) -> None:
    config = {"env": {**ENV, "tokenizer": "my.own:One"}, "pooling": NESTED}
    flags = f"--plugin {SPREAD} --plugin my.own:One --plugin {PAYLOAD}"
    assert resume_command(Path("run"), config) == f"marl-pool resume run {flags}"
    assert resume_command(Path("run")) == "marl-pool resume run"


def test_resume_keeps_the_plug_ins_that_were_given(run, payload, capsys):
    in_config(run, env={"name": PAYLOAD})
    message = one_line(
        capsys, main(["resume", str(run.path), "--plugin", "my.own:One"])
    )
    assert f"resume {run.path} --plugin my.own:One --plugin {PAYLOAD}" in message
    assert not has_run(payload)


@pytest.mark.parametrize(
    "content",
    [
        {"overrides": [f"pooling={PAYLOAD}"]},
        {"overrides": [f"env={PAYLOAD}"]},
        {"overrides": [f"encoder={PAYLOAD}"], "verb": "fit"},
        {"overrides": ["pooling=multi", f"pooling.heads=[{{name: '{PAYLOAD}'}}]"]},
        {"grid": {"pooling": [PAYLOAD]}},
        {"overrides": ["seed=${oc.env:HOME}"]},
        {"grid": {"seed": ["${oc.env:HOME}"]}},
        {"grid": {"seed": 3}},
        {"overrides": [3]},
        {"verb": "evil"},
        {"config_dir": "importable"},
    ],
    ids=str,
)
def test_resuming_a_sweep_imports_and_resolves_nothing(
    content, payload, tmp_path, monkeypatch, capsys
):
    pytest.importorskip("ray")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "importable" / "ppo").mkdir()
    (tmp_path / "importable" / "ppo" / "sent.yaml").write_text("lr: '${oc.env:HOME}'")
    whole = {"grid": {"seed": [0, 1]}, "overrides": [], "config_dir": None}
    if "config_dir" in content:
        whole["overrides"] = ["ppo=sent"]
    sweep = tmp_path / "sweep"
    sweep.mkdir()
    text = yaml.safe_dump({**whole, **content, "package_version": "1"})
    (sweep / "sweep.yaml").write_text(text)
    assert Sweep.is_at(sweep)
    monkeypatch.setenv("HOME", "/home/hunter2")
    if "pooling.heads" in text:  # built by training's own start, which refuses it
        monkeypatch.setattr(
            "marl_pool.cli.train._run_sweep",
            lambda sweep, plan: build_heads(plan.trials[0].config.pooling),
        )
    message = one_line(capsys, main(["resume", str(sweep)]))
    assert not has_run(payload)
    assert "hunter2" not in message


def build_heads(pooling: Mapping[str, Any]) -> None:
    make_pooling(dim=8, **pooling)


SUITES = {
    "perturbation": {"perturbations": [{"name": PAYLOAD, "severities": [1.0]}]},
    "module": {"transfer": [{"label": "x", "env": {"module": "sent_payload"}}]},
    "env": {"env": {"name": PAYLOAD}},
    "resolver": {"seed": "${oc.env:HOME}"},
}


@pytest.mark.parametrize("place", list(SUITES))
def test_a_suite_imports_and_resolves_nothing(
    place, run, payload, tmp_path, monkeypatch, capsys
):
    folder = tmp_path / "yaml" / "suite"
    folder.mkdir(parents=True)
    text = yaml.safe_dump(SUITES[place])
    (folder / "sent.yaml").write_text(text)
    monkeypatch.setenv("HOME", "/home/hunter2")
    words = ["evaluate", str(run.path), "suite=sent", *QUICK]
    status = main([*words, "--config-dir", str(tmp_path / "yaml")])
    captured = capsys.readouterr()
    assert not has_run(payload)
    assert "hunter2" not in captured.err + captured.out
    assert status == (
        0 if place == "module" else 2
    )  # the env has no such option: a gap
    policy = load_policy(run.policy_dir)
    with contextlib.suppress(InputError):
        evaluate_policy(
            policy,
            {"name": "simple_centroid", "max_steps": 3},
            suite="sent",
            config_dir=tmp_path / "yaml",
            episodes=2,
        )
    assert not has_run(payload)


def test_a_typed_name_is_the_user_s_in_a_reading_verb(run, payload, capsys):
    perturbation = f"perturbations=[{{name: '{PAYLOAD}', severities: [1.0]}}]"
    assert main(["evaluate", str(run.path), perturbation, *QUICK]) == 2
    assert has_run(payload)


def test_reading_verbs_search_the_working_directory_only_for_plug_ins(
    run, tmp_path, monkeypatch, capsys
):
    elsewhere = [entry for entry in sys.path if entry not in ("", str(tmp_path))]
    monkeypatch.chdir(tmp_path)
    for verb, words in {**VERBS, "resume": ["resume", "seed=1"]}.items():
        monkeypatch.setattr(sys, "path", list(elsewhere))
        main([*words, str(run.path)])
        assert str(tmp_path) not in sys.path, verb
        main([*words, str(run.path), "--plugin", "my.own:One"])
        assert sys.path[0] == str(tmp_path), verb
        shutil.rmtree(tmp_path / "reports", ignore_errors=True)


# Invalid configurations

CONFIGS = {
    "no env": ("seed: 0\n", "env"),
    "empty": ("env:\n", "env"),
    "text": ("env: text\n", "env"),
    "no name": ("env: {num_noise: 3}\n", "env"),
    "reserved": ("env: {name: simple_centroid, num_envs: 3}\n", "num_envs"),
    "number as key": ("env: {name: simple_centroid, 3: 3}\n", "3"),
    "deeper than plain": ("env: " + "[" * 150 + "]" * 150 + "\n", "100 levels"),
    "merges": ("a: &a {x: 1}\nenv: {<<: *a, <<: *a}\n", "env"),
    "date": ("env: 2001-01-01\n", "env"),
    "code": ("env: !!python/object/apply:os.system [touch pwned]\n", "python"),
    "large": ("# " + "x" * (1 << 20) + "\nenv: {}\n", "1,048,576"),
    "only fixed": ("env: {name: simple_centroid}\nfixed: {agent: random}\n", "fixed"),
    "fixed text": ("env: {name: simple_centroid}\nfixed: text\n", "fixed"),
    "no group": ("env: {name: simple_centroid}\nfixed: {hen: random}\n", "fixed"),
    "noise": ("env: {name: simple_centroid, num_noise: 100000000}\n", "num_noise"),
    "counts": ("env: {name: simple_centroid, counts: 1-3-999999}\n", "counts"),
}


@pytest.mark.parametrize("case", list(CONFIGS))
def test_an_invalid_configuration_is_refused_in_one_line(
    case, run, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    text, key = CONFIGS[case]
    (run.path / "config.yaml").write_text(text + "package_version: '1'\n")
    # All verbs that read a run with a policy open it in the same way.
    verbs = {verb: VERBS[verb] for verb in ("evaluate", "report")}
    for verb, words in {**verbs, "resume": ["resume"]}.items():
        status = main([*words, str(run.path)])
        if verb == "report" and not status:  # what was logged can be shown
            (page,) = (tmp_path / "reports").iterdir()
            assert page.read_text().rstrip().endswith("</html>")
            capsys.readouterr()
        elif verb == "resume":  # it may stop at another key
            one_line(capsys, status)
        else:
            assert key in one_line(capsys, status), verb
    assert not (tmp_path / "pwned").exists()


# Pages


@pytest.mark.parametrize("name", ["x:../../../../up", "x:/tmp/abs", "x:" + "n" * 999])
def test_a_page_stays_in_its_folder(name, tmp_path, monkeypatch):
    folder = tmp_path / "a" / "b" / "c"
    folder.mkdir(parents=True)
    monkeypatch.chdir(folder)
    run = trained(folder / "run")
    in_config(run, env={**run.config["env"], "name": name})
    assert main(["report", str(run.path), "threads=1"]) == 0
    pages = set(tmp_path.rglob("*.html"))
    assert len(pages) == 1
    assert pages == set((folder / "reports").glob("*.html"))


@pytest.mark.parametrize("key", ["fixed", "teacher"])
def test_a_page_shows_no_folder_of_the_machine(key, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folders = ["/home/alice/secret/elsewhere", "/home/bob/secret/elsewhere", "plain"]
    paths = []
    for i, folder in enumerate(folders):
        run = evaluated(trained(tmp_path / f"run{i}"))
        in_config(run, **{key: {"prey": folder} if key == "fixed" else folder})
        paths.append(str(run.path))
    words = ["report", *paths, "threads=1", "videos=false", "--out", "page.html"]
    assert main(words) == 0
    page = Path("page.html").read_text()
    for hidden in ("/home", "alice", "bob", "secret"):
        assert hidden not in page
    # Still three methods, told apart.
    for label in ("=elsewhere", "=elsewhere (2)", "=plain"):
        assert label in page


def test_perturbations_of_a_page_are_not_imported(payload, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run = evaluated(with_policy(trained(tmp_path / "run")))
    (file,) = run.evaluation_dir.glob("results.json")
    file.write_text(file.read_text().replace('"occlude"', f'"{PAYLOAD}"'))
    main(["report", str(run.path), "threads=1"])
    assert not has_run(payload)


def test_environments_of_a_loaded_run_stay_restricted(payload: Path) -> None:
    with trust([]), pytest.raises(UntrustedError):
        make_batched_env("pettingzoo", num_envs=1, module="sent_payload")
    with trust([]), pytest.raises(UntrustedError):
        make_perturbation(PAYLOAD, specs={"agent": SPEC})
    assert not has_run(payload)


def test_a_policy_saved_with_a_plug_in_says_how_to_allow_it(tmp_path: Path) -> None:
    name = "helpers.plug_in:SumPooling"
    pooling = {"name": "multi", "heads": [{"name": name}, {"name": "avg"}]}
    policy = make_policy(SPEC, BOX, encoder={"name": "identity"}, pooling=pooling)
    save_policy(policy, tmp_path / "mine")
    with pytest.raises(UntrustedError, match=f"--plugin {name}") as refusal:
        load_policy(tmp_path / "mine")
    assert str(tmp_path / "mine") in str(refusal.value)
    load_policy(tmp_path / "mine", plugins=[name])


def test_a_refusal_names_all_that_has_to_be_allowed():
    config = {"pooling": {"name": "a.b:C"}, "env": {"name": "d:E", "module": "f.g"}}
    with (
        trust(["d:E"], "a run", "marl-pool resume a", config=config),
        pytest.raises(UntrustedError) as refused,
    ):
        validate_trusted("f.g", "env.module")
    assert str(refused.value).endswith("marl-pool resume a --plugin f.g --plugin a.b:C")


def test_a_file_of_the_user_holds_trusted_names(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    assert user_plug_ins() == []
    (tmp_path / "marl_pool").mkdir()
    file = tmp_path / "marl_pool" / "plugins"
    names = [
        "a.b:C",
        "mpe2.simple_v3",
        "gymnasium:CartPole-v1",
        "gymnasium:ALE/Pong-v5",
    ]
    file.write_text("# mine\n" + "  # a name\n\n".join(names))
    assert user_plug_ins() == names
    file.write_text("a.b:C\nrm -rf\n")
    with pytest.raises(InputError) as refused:
        user_plug_ins()
    assert f"{file}: line 2: expected package.module:Class, got 'rm -rf'" in str(
        refused.value
    )
