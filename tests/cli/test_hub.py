"""Policies by name, hf://user/name: the real client against a hub on this machine."""

import json
import pickle
import shutil
import sys
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file, save

from helpers.hub import TOKEN, FakeHub, connect, serve
from marl_pool import (
    InputError,
    load_policies,
    load_policy,
    make_batched_env,
    make_policy,
    save_policies,
)
from marl_pool.cli.main import main
from marl_pool.config import compose
from marl_pool.files.hub import HubFolder
from marl_pool.runs.run import Best, Run

NAME = "hf://me/heads"
ENV = {"name": "simple_centroid", "num_noise": 1, "max_steps": 3}
QUICK = ("suite=quick", "episodes=2", "threads=1")
SMALL = ("env.max_steps=3", "env.num_noise=1", "encoder=identity", "pooling=max")
KEYS = {"config.json", "manifest.json", "model.safetensors"}


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """An empty hub, and a working directory and a cache for it."""
    monkeypatch.chdir(tmp_path)
    hub = FakeHub()
    with serve(hub) as url:
        connect(monkeypatch, url, tmp_path / "cache", TOKEN)
        yield hub


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory):
    """A run with an untrained policy, an evaluation and a video."""
    path = tmp_path_factory.mktemp("runs") / "mine"
    config = compose("train", [*SMALL, "ppo.lr=0.002", "seed=3"])
    run = Run.create(path, config)
    group = make_batched_env(num_envs=1, **config["env"]).groups["agent"]
    parts = {"encoder": config["encoder"], "pooling": config["pooling"]}
    policy = make_policy(group.tokens, group.action_space, **parts, seed=0)
    with run.save_policy_dir(Best(7, -0.5)) as saved:
        save_policies({"agent": policy}, {"agent": "agent"}, saved)
    assert main(["evaluate", str(path), *QUICK]) == 0
    (path / "videos").mkdir()
    (path / "videos" / "clean.webp").write_bytes(b"frames")
    return path


@pytest.fixture
def run_copy(run_folder, tmp_path):
    return shutil.copytree(run_folder, tmp_path / "mine")


@pytest.fixture
def policy_files(run_folder):
    """The files of a policy's folder, with its environment, by name."""
    folder = run_folder / "policy"
    files = {name: (folder / name).read_bytes() for name in KEYS - {"manifest.json"}}
    config = json.loads(files["config.json"])
    config["env"] = Run.open(run_folder).env
    return {**files, "config.json": json.dumps(config).encode()}


# Names


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("hf://me/heads", ("me/heads", None, "")),
        ("hf://me/heads/", ("me/heads", None, "")),
        ("hf://me/heads@v1.0", ("me/heads", "v1.0", "")),
        ("hf://me/heads@v1/a/b", ("me/heads", "v1", "a/b")),
        ("hf://me/he-a_d.s/a", ("me/he-a_d.s", None, "a")),
        ("hf://me/heads@refs/pr/3/a", ("me/heads", "refs/pr/3", "a")),
    ],
)
def test_a_name_has_three_parts(text, parts):
    source = HubFolder.parse(text)
    assert (source.repository, source.revision, source.folder) == parts
    assert HubFolder.parse(str(source)) == source


@pytest.mark.parametrize(
    "text",
    [
        *("hf://", "hf://me", "hf://me/", "hf:///heads", "hf://me/heads@"),
        *("hf://me/..", "hf://me/heads/..", "hf://me/heads/../../etc/passwd"),
        *("hf://me/heads@../x", "hf://me/heads@..", "hf://../heads", "hf://me/heads/*"),
        *("hf://me/heads//a", "hf://me/heads/a b", "hf://me/heads\n", "hf://me/h?x=1"),
    ],
)
def test_other_names_are_refused_without_a_request(hub, text):
    with pytest.raises(InputError, match=r"expected hf://USER/NAME"):
        load_policy(text)
    assert not hub.requests


# Reading


def test_a_policy_is_loaded_by_its_name(hub, policy_files, run_folder):
    hub.add("me/heads", {**policy_files, "README.md": b"", "train.py": b"raise"})
    policy = load_policy(NAME)
    saved = load_policy(run_folder / "policy")
    for key, value in saved.state_dict().items():
        assert torch.equal(policy.state_dict()[key], value)
    assert load_policies(NAME).keys() == {"agent"}
    # Only what a policy consists of is fetched.
    fetched = {path.name for path in Path("cache").rglob("snapshots/*/*")}
    assert fetched == {"config.json", "model.safetensors"}


def test_revisions_and_folders_are_parts_of_a_name(hub, policy_files):
    inside = {f"small/a/{name}": content for name, content in policy_files.items()}
    repository = hub.add("me/heads", {**inside, "config.yaml": b"env: {}"})
    first, _ = repository.commits[0]
    repository.tags["v1"] = first
    repository.commit({"README.md": b"emptied"})
    for revision in ("v1", first):
        assert load_policy(f"{NAME}@{revision}/small/a").config
    with pytest.raises(InputError, match=r"heads/small/a: config.json is missing"):
        load_policy(f"{NAME}/small/a")
    with pytest.raises(InputError, match=r"heads@v2/small: no such revision 'v2'"):
        load_policy(f"{NAME}@v2/small")


def test_a_cache_replaces_the_hub(hub, policy_files, tmp_path, monkeypatch):
    """For a commit always, for a branch where there is no network."""
    commit = hub.add("me/heads", policy_files).commits[0][0]
    assert load_policy(NAME).config
    hub.requests.clear()
    assert load_policy(f"{NAME}@{commit}").config
    assert not hub.requests
    connect(monkeypatch, "http://127.0.0.1:9", tmp_path / "cache", TOKEN)
    assert load_policy(NAME).config
    with pytest.raises(InputError, match=r"hf://me/other: the hub cannot be reached"):
        load_policy("hf://me/other")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert load_policy(NAME).config


@pytest.mark.parametrize("verb", ["evaluate", "render", "play", "export"])
def test_commands_take_a_name_for_a_policy(hub, policy_files, verb, monkeypatch):
    # The formats are in test_export.py.
    monkeypatch.setattr(
        "marl_pool.policies.export.export_policy",
        lambda policy, path, to, masked: path.write_text(to) * 0.0,
    )
    commit = hub.add("me/heads", policy_files).commits[0][0]
    words = {
        "evaluate": [*QUICK, "--out", "results"],
        "render": ["size=64", "--format", "gif", "--out", "film"],
        "play": ["--export", "page.html"],
        "export": ["--to", "torch", "--out", "policy.pt2"],
    }[verb]
    assert main([verb, NAME, *words]) == 0
    if verb == "evaluate":
        pinned = f"{NAME}@{commit}"
        document = json.loads(Path("results/evaluation/results.json").read_text())
        assert document["policy_from"] == pinned
        assert Run.open("results").config["policy_from"] == pinned
        table = Path("results/evaluation/results.csv").read_text()
        assert pinned in table


@pytest.mark.parametrize("verb", ["report", "resume"])
def test_verbs_that_need_a_run_say_so(hub, verb, refused):
    line = refused(verb, NAME)
    assert line == f"marl-pool: {verb}: expected a run, got the policy {NAME}\n"
    assert not hub.requests


# Hostile repositories


def weights_with(policy_files, change):
    """The weights file with one tensor changed."""
    Path("stored").write_bytes(policy_files["model.safetensors"])
    tensors = load_file("stored")
    first = min(tensors)
    return save({**tensors, first: change(tensors[first])})


def config_with(policy_files, **options):
    config = json.loads(policy_files["config.json"])
    config["modules"]["agent"].update(options)
    return json.dumps(config).encode()


CONFIG, WEIGHTS, MANIFEST = "config.json", "model.safetensors", "manifest.json"
HOSTILE = {
    "plug-in": (
        CONFIG,
        lambda files: config_with(files, **{"class": "sent:Policy"}),
        "uses the policy 'sent:Policy', which is not part of marl_pool",
    ),
    "nested plug-in": (
        CONFIG,
        lambda files: config_with(files, pooling={"name": "sent:Head"}),
        "uses the pooling 'sent:Head', which is not part of marl_pool",
    ),
    "claimed network": (
        CONFIG,
        lambda files: config_with(files, head_hidden=[100_000, 100_000]),
        "head_hidden",
    ),
    "link": (CONFIG, b"../../../../etc/passwd", "config.json is damaged or foreign"),
    "deep JSON": (CONFIG, b"[" * 100_000, "config.json is damaged or foreign"),
    "pickle": (WEIGHTS, pickle.dumps({"agent/w": 1}), f"{WEIGHTS} is damaged"),
    "huge header": (WEIGHTS, b"\0" * 7 + b"\x40{}", f"{WEIGHTS} is damaged"),
    "integers": (
        WEIGHTS,
        lambda files: weights_with(files, lambda tensor: tensor.long()),
        "expected real numbers, got torch.int64",
    ),
    "other shape": (
        WEIGHTS,
        lambda files: weights_with(files, lambda tensor: tensor[..., :1]),
        "is damaged or foreign",
    ),
    "no weights": (WEIGHTS, None, "model.safetensors is mis"),
    "manifest that leads out": (
        MANIFEST,
        b'{"format": 1, "files": {"../../x": {"bytes": 1}}}',
        "manifest.json cannot be read",
    ),
}
"""A file; its content, or a function that makes it of intact files; the refusal."""


@pytest.mark.parametrize("kind", HOSTILE)
def test_a_hostile_repository_runs_nothing(hub, policy_files, kind, monkeypatch):
    # A module with the name in the files leaves a mark when it is imported.
    Path("sent.py").write_text("from pathlib import Path\nPath('ran').touch()\n")
    monkeypatch.syspath_prepend(".")
    name, content, message = HOSTILE[kind]
    files = {**policy_files, name: content}
    if callable(content):
        files[name] = content(policy_files)
    hub.add("me/heads", {k: v for k, v in files.items() if v is not None})
    with pytest.raises(InputError) as refused:
        load_policy(NAME)
    assert message in str(refused.value)
    assert "\n" not in str(refused.value)
    assert not Path("ran").exists()
    assert "sent" not in sys.modules


def test_a_plug_in_that_the_user_allows_is_imported(hub, policy_files, capsys):
    config = config_with(policy_files, pooling={"name": "sent:Head"})
    hub.add("me/heads", {**policy_files, "config.json": config})
    assert main(["evaluate", NAME, *QUICK]) == 2
    assert "--plugin sent:Head" in capsys.readouterr().err
    with pytest.raises(InputError, match="'sent:Head' cannot be imported: No module"):
        load_policy(NAME, plugins=["sent:Head"])


@pytest.mark.parametrize(
    ("path", "limit"), [("config.json", 1 << 24), ("model.safetensors", 1 << 30)]
)
def test_a_large_file_is_not_downloaded(hub, policy_files, path, limit):
    hub.add("me/heads", policy_files, sizes={path: limit + 1})
    with pytest.raises(InputError, match=rf"{path}: expected at most {limit:,} bytes"):
        load_policy(NAME)
    assert not any("/resolve/" in request for request in hub.requests)


@pytest.mark.parametrize(
    ("options", "token", "message"),
    [
        (None, TOKEN, "no such repository, or one that is not open to you"),
        ({"private": True}, "hf_other", "no such repository, or one that is not open"),
        ({"gated": True}, TOKEN, "its authors have to grant you access"),
    ],
)
def test_a_closed_repository_is_one_line(
    hub, policy_files, monkeypatch, refused, options, token, message
):
    monkeypatch.setenv("HF_TOKEN", token)
    if options is not None:
        hub.add("me/heads", policy_files, **options)
    line = refused("evaluate", NAME, *QUICK)
    assert message in line
    assert "hf auth login" in line


def test_a_missing_client_names_the_extra(monkeypatch, refused):
    find = sys.modules["importlib.util"].find_spec
    monkeypatch.setattr(
        "importlib.util.find_spec",
        lambda name, *a: None if name == "huggingface_hub" else find(name, *a),
    )
    line = refused("evaluate", NAME)
    assert 'this needs huggingface_hub: pip install "marl-pool[hub]"\n' in line


# Writing


def test_a_pushed_policy_is_the_runs_and_has_a_card(hub, run_copy, capsys):
    assert main(["push", str(run_copy), NAME, "--license", "mit"]) == 0
    printed = capsys.readouterr()
    repository = hub.repositories["me/heads"]
    commit = repository.commits[-1][0]
    assert printed.out == f"{NAME}@{commit}\n"
    assert f"marl-pool evaluate {NAME}@{commit}" in printed.err
    extras = {"README.md", "results.json", "replay.webp", ".gitattributes"}
    assert repository.files.keys() == KEYS | extras
    pushed, saved = load_policy(NAME), load_policy(run_copy / "policy")
    for key, value in saved.state_dict().items():
        assert torch.equal(pushed.state_dict()[key], value)
    # The card.
    card = repository.files["README.md"].decode()
    header = yaml.safe_load(card.split("---\n")[1])
    assert header["library_name"] == "marl_pool"
    assert header["license"] == "mit"
    assert {"simple_centroid", "max"} <= {*header["tags"]}
    document = json.loads((run_copy / "evaluation/results.json").read_text())
    clean = document["results"][0]
    (metric,) = header["model-index"][0]["results"][0]["metrics"]
    half_width = (clean["mean_high"] - clean["mean_low"]) / 2
    assert metric["value"] == f"{clean['mean']:.3f} ± {half_width:.3f}"
    for row in document["results"]:
        assert f"| {row['label']} |" in card
    assert "![An episode of the policy](replay.webp)" in card
    # Its command composes the run's configuration.
    command = next(x for x in card.splitlines() if x.startswith("marl-pool train"))
    assert compose("train", command.split()[2:]) == Run.open(run_copy).config
    assert str(run_copy.parent) not in card
    # The policy is measured as the run was.
    assert main(["evaluate", NAME, *QUICK, "--out", "out"]) == 0
    evaluation = json.loads(Path("out/evaluation/results.json").read_text())
    assert evaluation["results"] == document["results"]


def test_a_second_push_replaces_the_first_and_keeps_its_commit(hub, run_copy):
    assert main(["push", str(run_copy), NAME]) == 0
    repository = hub.repositories["me/heads"]
    first, files = repository.commits[-1]
    repository.commit({**files, "notes.txt": b"of a person"})
    (run_copy / "videos/clean.webp").rename(run_copy / "videos/clean.mp4")
    assert main(["push", str(run_copy), NAME]) == 0
    assert repository.files["notes.txt"] == b"of a person"
    assert "replay.mp4" in repository.files
    assert "replay.webp" not in repository.files
    assert '<video src="replay.mp4"' in repository.files["README.md"].decode()
    assert repository.at(first) == (first, files)


@pytest.mark.parametrize(
    "foreign",
    [
        {"README.md": b"# Mine\n", "model.bin": b"1"},
        {"config.json": b"{}"},
        {"README.md": b"", "manifest.json": b"{}"},
        "edited",
    ],
)
def test_other_files_are_replaced_only_by_force(hub, run_copy, refused, foreign):
    if foreign == "edited":
        assert main(["push", str(run_copy), NAME]) == 0
        files = hub.repositories["me/heads"].files
        text = files["README.md"].replace(b"# heads", b"# Heads of mine")
        hub.repositories["me/heads"].commit({**files, "README.md": text})
    else:
        hub.add("me/heads", foreign)
    commits = len(hub.repositories["me/heads"].commits)
    line = refused("push", str(run_copy), NAME)
    assert "expected a new repository, or one whose README.md is as `marl-pool" in line
    assert "--force replaces" in line
    assert len(hub.repositories["me/heads"].commits) == commits
    assert main(["push", str(run_copy), NAME, "--force"]) == 0
    assert load_policy(NAME).config


def test_a_dry_run_asks_no_hub(hub, run_copy, capsys):
    assert main(["push", str(run_copy), NAME, "--dry-run"]) == 0
    out = capsys.readouterr().out
    assert not hub.requests
    for name in (*KEYS, "README.md", "replay.webp", "results.json"):
        assert f"  {name}\n" in out
    assert "library_name: marl_pool" in out


def test_private_is_for_new_repositories(hub, run_copy, policy_files, refused):
    assert main(["push", str(run_copy), NAME, "--private"]) == 0
    assert hub.repositories["me/heads"].private
    hub.add("me/public", policy_files)
    line = refused("push", str(run_copy), "hf://me/public", "--private")
    assert "--private: expected a private or a new repository" in line


def test_an_older_policys_evaluation_is_not_on_the_card(hub, run_copy, capsys):
    best = run_copy / "policy" / "best.json"
    best.write_text(best.read_text().replace("7", "8"))
    (run_copy / "policy" / "manifest.json").unlink()
    assert main(["push", str(run_copy), NAME]) == 0
    assert "no evaluation of mine's best policy" in capsys.readouterr().err
    assert "results.json" not in hub.repositories["me/heads"].files
    card = hub.repositories["me/heads"].files["README.md"].decode()
    assert "The policy was not evaluated" in card


def test_a_policy_folder_is_pushed_too_with_a_new_picture(hub, policy_files):
    Path("saved").mkdir()
    for name, content in policy_files.items():
        Path("saved", name).write_bytes(content)
    assert main(["push", "saved", NAME]) == 0
    files = hub.repositories["me/heads"].files
    assert files["replay.webp"][8:12] == b"WEBP"
    assert "## Training" not in files["README.md"].decode()
    assert load_policy(NAME).config
    assert not Path("evaluations").exists()


@pytest.mark.parametrize("token", ["", "hf_other"])
def test_a_push_without_rights_is_one_line(hub, run_copy, monkeypatch, refused, token):
    monkeypatch.setenv("HF_TOKEN", token)
    line = refused("push", str(run_copy), NAME)
    assert "log in with `hf auth login`, or set HF_TOKEN" in line
    assert not hub.repositories


def test_a_network_without_a_hub(hub, run_copy, tmp_path, monkeypatch, refused):
    hub.page = b"<html>Log in to this network</html>"
    line = refused("evaluate", NAME)
    assert "the answer is not the hub's; HF_ENDPOINT, if set, must be a hub" in line
    connect(monkeypatch, "http://127.0.0.1:9", tmp_path / "cache", TOKEN)
    line = refused("push", str(run_copy), NAME)
    assert f"{NAME}: the hub cannot be reached" in line


def test_groups_without_a_saved_policy_are_refused(hub, tmp_path, refused):
    words = ["env=simple_tag", "env.prey=learned", "fixed={prey: random}", *SMALL[2:]]
    run = Run.create(tmp_path / "tag", config := compose("train", words))
    group = make_batched_env(num_envs=1, **config["env"]).groups["predator"]
    policy = make_policy(group.tokens, group.action_space)
    with run.save_policy_dir() as saved:
        save_policies({"predator": policy}, {"predator": "predator"}, saved)
    line = refused("push", str(run.path), NAME)
    assert "expected a saved policy of each group, got none of prey" in line
