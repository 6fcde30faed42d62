"""The site is built without a warning, and lists all registered names."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from helpers.paths import ROOT
from marl_pool.cli.help import HELP
from marl_pool.envs import env_names
from marl_pool.pooling import POOLING


@pytest.mark.slow
def test_the_site_is_built_without_a_warning(tmp_path: Path) -> None:
    pytest.importorskip("sphinx")
    pytest.importorskip("myst_parser")
    pytest.importorskip("furo")
    pytest.importorskip("sphinx-mathjax-offline")
    command = ["-m", "sphinx", "--fail-on-warning", "--keep-going", "--quiet"]
    built = subprocess.run(
        [sys.executable, *command, "-b", "html", "docs", str(tmp_path)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert built.returncode == 0, built.stderr
    for verb in HELP:
        assert f"marl-pool {verb}" in read(tmp_path / f"reference/cli_{verb}.html")
    for name in env_names():
        assert f"_images/{name}.png" in read(tmp_path / f"envs/{name}.html")
    pooling = read(tmp_path / "reference/pooling.html")
    for target in POOLING.values():
        assert f'id="marl_pool.pooling.{target.partition(":")[2]}"' in pooling
    # Formulas need no network.
    pages = [read(page) for page in tmp_path.rglob("*.html")]
    scripts = {
        src for page in pages for src in re.findall(r'<script[^>]*src="(\S+?)"', page)
    }
    assert any("mathjax" in src for src in scripts)
    assert not [src for src in scripts if "//" in src]
    # Options have their expected values beside them.
    assert "<em>an integer &gt;= 1</em>" in pooling


def read(file: Path) -> str:
    return file.read_text(encoding="utf-8")
