"""Files of deploy/: their commands parse, and the script does what SLURM expects."""

import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from helpers.paths import ROOT
from marl_pool.cli.arguments import parse
from marl_pool.config import check, compose_only
from marl_pool.version import __version__

DEPLOY = ROOT / "deploy"
PAGES = (
    ROOT / "docs" / "cluster.md",
    *(DEPLOY / name for name in ("README.md", "rayjob.yaml", "slurm.sh")),
)
COMMAND = re.compile(r"marl-pool(?::\S+)? [a-z].*")


SHELL_WORDS = ("${storage[@]}", "$@", "&")


def commands(file: Path) -> list[list[str]]:
    """Return the commands in a file, without words that the shell interprets."""
    text = file.read_text()
    if file.suffix == ".yaml":
        text = yaml.safe_load(text)["spec"]["entrypoint"]
    if file.suffix == ".md":
        text = "\n".join(re.findall(r"```bash\n(.*?)```", text, re.DOTALL))
    lines = COMMAND.findall(text.replace("\\\n", " "))
    split = [shlex.split(line, comments=True)[1:] for line in lines]
    return [[word for word in words if word not in SHELL_WORDS] for words in split]


@pytest.mark.parametrize("file", PAGES, ids=lambda file: file.name)
def test_commands_parse(file):
    command_lines = commands(file)
    assert command_lines
    for words in command_lines:
        namespace, overrides = parse(words)
        assert namespace.verb == words[0]
        if namespace.verb == "train":
            check("train", compose_only("train", overrides, None))


def test_the_ray_job_has_what_kuberay_needs():
    job = yaml.safe_load((DEPLOY / "rayjob.yaml").read_text())
    assert (job["apiVersion"], job["kind"]) == ("ray.io/v1", "RayJob")
    # A retry starts with an empty disk.
    assert job["spec"]["backoffLimit"] > 0
    assert "--or-resume --storage s3://" in job["spec"]["entrypoint"]
    cluster = job["spec"]["rayClusterSpec"]
    groups = [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]
    (pinned,) = re.findall(
        r"^ray==(.*)", (ROOT / "constraints.txt").read_text(), re.MULTILINE
    )
    assert cluster["rayVersion"] == pinned
    cpus = 0
    for group in groups:
        assert "rayStartParams" in group
        (container,) = group["template"]["spec"]["containers"]
        assert container["image"].endswith(f":{__version__}")
        assert container["envFrom"] == [{"secretRef": {"name": "s3-credentials"}}]
        resources = container["resources"]
        assert resources["requests"] == resources["limits"]
        cpus += int(resources["limits"]["cpu"]) * group.get("replicas", 1)
    # Each env runner needs a CPU, and so does the learner.
    (words,) = commands(DEPLOY / "rayjob.yaml")
    assert cpus > int(words[words.index("--num-env-runners") + 1])


FAKE = f"""#!{sys.executable}
import os, pathlib, signal, sys, time
name = pathlib.Path(sys.argv[0]).name
with open("calls", "a") as out:
    print(name, *sys.argv[1:], file=out)
if name == "scontrol" and sys.argv[1] == "show":
    print("one", "two", sep="\\n")
if name == "marl-pool":
    while pathlib.Path("calls").read_text().count("srun") < 2:
        time.sleep(0.02)
    def stop(*_):
        time.sleep(0.3)
        pathlib.Path("saved").touch()
        sys.exit(130)
    signal.signal(signal.SIGINT, stop)
    pathlib.Path("began").touch()
    while "endless" in sys.argv:
        time.sleep(0.05)
"""


@pytest.fixture
def slurm(tmp_path, monkeypatch):
    """A function that starts the script among fake programs that log their calls."""
    programs = tmp_path / "bin"
    programs.mkdir()
    for name in ("scontrol", "srun", "marl-pool"):
        (programs / name).write_text(FAKE)
        (programs / name).chmod(0o755)
    environment = {
        "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}",
        "RAY_START_SECONDS": "0",
        "STORAGE": "s3://bucket/runs",
        "SLURM_JOB_NAME": "study",
        "SLURM_JOB_ID": "7",
        "SLURM_JOB_NODELIST": "one,two",
        "SLURM_CPUS_PER_TASK": "8",
    }

    def start(*arguments: str) -> subprocess.Popen:
        return subprocess.Popen(
            ["bash", str(DEPLOY / "slurm.sh"), *arguments],
            cwd=tmp_path,
            env={**os.environ, **environment},
        )

    return start


def calls(folder: Path) -> list[str]:
    return (folder / "calls").read_text().splitlines()


def test_the_script_starts_ray_on_all_nodes_and_trains(slurm, tmp_path):
    assert slurm("seed=3", "pooling=max").wait(300) == 0
    log = "\n".join(calls(tmp_path))
    assert "srun --nodes=1 --ntasks=1 --nodelist=one --overlap ray start --head" in log
    assert "--exclude=one --overlap ray start --address=one:20007" in log
    (line,) = (line for line in calls(tmp_path) if line.startswith("marl-pool"))
    assert line == (
        "marl-pool train --run-dir runs/study-7 --or-resume --storage s3://bucket/runs "
        "--address one:20007 --num-env-runners 4 seed=3 pooling=max"
    )
    assert "requeue" not in log


@pytest.mark.parametrize("sent", [signal.SIGUSR1, signal.SIGTERM])
def test_a_stopped_run_is_saved_and_requeued_only_at_its_time_limit(
    slurm, tmp_path, sent
):
    process = slurm("endless")
    while not (tmp_path / "began").exists():
        assert process.poll() is None
        time.sleep(0.02)
    process.send_signal(sent)
    assert process.wait(300) == 130
    assert (tmp_path / "saved").exists()
    is_requeued = "scontrol requeue 7" in calls(tmp_path)
    assert is_requeued == (sent == signal.SIGUSR1)
