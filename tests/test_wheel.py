"""The built wheel, from another directory, with and without ray."""

import os
import subprocess
import sys
import tarfile
from pathlib import PurePosixPath

import pytest

from helpers.paths import ROOT

pytestmark = pytest.mark.slow

SMOKE = """
import sys
sys.modules["ray"] = None  # as if it were not installed
import marl_pool, torch
from pathlib import Path
assert Path(marl_pool.__file__).is_relative_to(sys.argv[1]), marl_pool.__file__
head = marl_pool.make_pooling("ada", dim=8, query="mean")
assert head(torch.randn(2, 5, 8)).shape == (2, 8)
env = marl_pool.make_batched_env("simple_centroid", num_envs=2)
group = env.groups["agent"]
policy = marl_pool.make_policy(group.tokens, group.action_space, seed=0)
parts = marl_pool.collect(env, {"agent": policy}, steps=3)
assert parts["agent"].rewards.shape == (3, 2, 1)
marl_pool.save_policy(policy, "saved")
marl_pool.load_policy("saved")
from marl_pool.cli.main import main
assert main(["list", "pooling"]) == 0
assert main(["train", "--cfg"]) == 0
assert main(["fit", "task=clustering", "--cfg"]) == 0
assert main(["train", "--run-dir", "run"]) == 2
assert not Path("run").exists()
"""
EARLIER_PATHS = """
import sys
sys.meta_path[:] = [
    finder for finder in sys.meta_path if "editable" not in type(finder).__module__
]
"""


def build(folder, *options):
    command = [sys.executable, "-m", "build", "--no-isolation", *options]
    command += ["--outdir", str(folder), str(ROOT)]
    subprocess.run(command, check=True, capture_output=True)


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheel")
    # Without the kernel, which takes long to build and is tested where it is used.
    build(folder, "--wheel", "--config-setting=wheel.cmake=false")
    (wheel,) = folder.glob("*.whl")
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps"]
    subprocess.run([*pip, "--target", str(folder / "site"), str(wheel)], check=True)
    # An editable installation would find its checkout before this path.
    (folder / "site" / "sitecustomize.py").write_text(EARLIER_PATHS)
    return folder / "site"


def run(site, cwd, *arguments):
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": str(site)},
        capture_output=True,
        text=True,
        check=False,
    )


def test_the_wheel_works_from_another_folder_without_ray(site, tmp_path):
    result = run(site, tmp_path, "-c", SMOKE, str(site))
    assert result.returncode == 0, result.stderr
    assert "adaptive pooling" in result.stdout.lower() or "ada" in result.stdout
    assert result.stderr.strip() == (
        'marl-pool: this needs ray: pip install "marl-pool[rllib]"'
    )


def test_the_source_distribution_has_the_package_and_no_tests(tmp_path):
    build(tmp_path, "--sdist")
    (archive,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(archive) as opened:
        paths = [PurePosixPath(*PurePosixPath(n).parts[1:]) for n in opened.getnames()]
    top = {path.parts[0] for path in paths}
    packages = {"marl_pool", "marl_pool_studies", "examples"}
    assert {*packages, "README.md", "LICENSE", "pyproject.toml"} <= top
    assert not {"tests", "docs", "scripts", "runs"} & top


def test_the_wheel_has_every_data_file_and_pretrained_policy(site):
    packaged = {
        path.relative_to(ROOT).as_posix()
        for folder in ("marl_pool/configs", "marl_pool/pretrained", "marl_pool_studies")
        for path in (ROOT / folder).rglob("*.*")
        if path.suffix in (".yaml", ".json", ".safetensors")
    }
    assert packaged
    assert all((site / name).is_file() for name in packaged)
    assert (site / "marl_pool" / "py.typed").is_file()


def test_the_wheel_trains_from_another_folder(site, tmp_path):
    overrides = "ppo.num_envs=2 ppo.batch_size=16 ppo.minibatch_size=8 total_steps=16"
    result = run(
        site, tmp_path, "-m", "marl_pool", "train", "--run-dir", "r", *overrides.split()
    )
    assert result.returncode == 0, result.stderr
    assert (tmp_path / "r" / "policy" / "model.safetensors").is_file()
