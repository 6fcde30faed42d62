"""Pages of environments agree with their docstrings; stale ones are detected."""

import importlib.util
from types import ModuleType

import pytest

from helpers.paths import ROOT
from marl_pool.envs import ENVS, env_names
from marl_pool.envs.base import BatchedEnv
from marl_pool.envs.cartpole.env import CartPole
from marl_pool.utils.errors import InputError


@pytest.fixture(scope="module")
def script() -> ModuleType:
    """scripts/env_pages.py, which is in no package."""
    file = ROOT / "scripts" / "env_pages.py"
    spec = importlib.util.spec_from_file_location("env_pages", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_pages_are_what_the_docstrings_say(script, capsys):
    stale = script.main(["--check"])
    assert not stale, f"{capsys.readouterr().out}run python scripts/env_pages.py"
    assert (ROOT / "docs/envs/README.md").is_file()


def test_every_world_has_a_page_and_is_in_the_index():
    index = (ROOT / "docs/envs/README.md").read_text(encoding="utf-8")
    for name in env_names():
        assert (ROOT / "docs/envs" / f"{name}.md").is_file()
        assert (ROOT / "docs/images/envs" / f"{name}.png").is_file()
        assert f"[{name}]({name}.md)" in index


def test_a_page_tells_all_that_there_is_to_tell(script):
    page = script.page("cartpole")
    for needed in (
        "# cartpole\n",
        "`marl_pool/cartpole-v0`",
        "Swing a pole up",
        "| `env.num_frames` | `1` | an integer >= 1 | consecutive readings",
        "| `agent` | 1 | 5 | 1 | `channel` | 1 number in [-1, 1] |",
        "linear-quadratic regulator",
        "| `experiment=cartpole` | train, sweep |",
        "marl-pool evaluate runs/cartpole",
        "marl-pool render runs/cartpole",
    ):
        assert needed in page
    for context in ("env.num_envs", "env.seed", "env.device", ":math:", ".. math::"):
        assert context not in page


def test_a_stale_a_missing_and_a_foreign_page_are_found_and_mended(
    script, tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(script, "pages", lambda: {"cartpole": "new", "README": "list"})
    (tmp_path / "cartpole.md").write_text("old")
    (tmp_path / "forgotten.md").write_text("of a removed environment")
    assert script.main(["--check"], tmp_path) == 1
    names = ("forgotten", "cartpole", "README")
    expected = [f"{tmp_path.name}/{name}.md is stale" for name in names]
    assert capsys.readouterr().out.splitlines() == expected
    assert (tmp_path / "cartpole.md").read_text() == "old"
    assert script.main([], tmp_path) == 0
    assert sorted(file.name for file in tmp_path.iterdir()) == [
        "README.md",
        "cartpole.md",
    ]
    assert (tmp_path / "cartpole.md").read_text() == "new"
    assert script.main(["--check"], tmp_path) == 0


def test_a_missing_picture_is_drawn_and_an_old_one_kept(script, tmp_path, monkeypatch):
    cv2 = pytest.importorskip("cv2")
    monkeypatch.setattr(script, "pages", lambda: {"simple_tag": "new"})
    assert script.main([], tmp_path, tmp_path) == 0
    picture = tmp_path / "simple_tag.png"
    assert cv2.imread(str(picture)).std() > 0
    picture.write_bytes(b"old")
    assert script.main([], tmp_path, tmp_path) == 0
    assert picture.read_bytes() == b"old"


def test_a_world_that_cannot_be_drawn_gets_no_page(
    script, tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(script, "pages", lambda: {"cartpole": "new"})
    monkeypatch.setattr(CartPole, "draw", BatchedEnv.draw)
    assert script.main([], tmp_path, tmp_path) == 1
    assert "cartpole.png: CartPole cannot be rendered" in capsys.readouterr().err
    assert not any(tmp_path.iterdir())


def test_a_world_whose_extra_is_missing_keeps_its_page(
    script, tmp_path, monkeypatch, capsys
):
    monkeypatch.setitem(ENVS.built_in, "cartpole", "not_installed_anywhere:BatchedEnv")
    monkeypatch.setattr(script, "env_names", lambda: ["cartpole"])
    monkeypatch.setattr(script, "index", lambda: "list")
    (tmp_path / "cartpole.md").write_text("as it was")
    assert script.main([], tmp_path) == 0
    assert (tmp_path / "cartpole.md").read_text() == "as it was"
    assert "cartpole is left as it is" in capsys.readouterr().err


def test_a_world_that_is_broken_is_not_passed_over(script, monkeypatch):
    monkeypatch.setitem(
        ENVS.built_in, "cartpole", "marl_pool.envs.cartpole.env:Nothing"
    )
    with pytest.raises(InputError, match="has no 'Nothing'"):
        script.page("cartpole")


def test_markup_becomes_markdown(script):
    text = (
        "See ``x`` and :math:`a_1`:\n\n"
        ".. math:: r = 1\n\n"
        "and\n\n"
        ".. math::\n    a &= 1 \\\\\n    b &= 2\n\nthen."
    )
    assert script.markdown(text) == (
        "See `x` and $`a_1`$:\n\n"
        "```math\nr = 1\n```\n\n"
        "and\n\n"
        "```math\n\\begin{aligned}\na &= 1 \\\\\nb &= 2\n\\end{aligned}\n```\n\nthen."
    )


def test_meanings_are_read_from_the_section_args(script):
    meanings = script.meanings(CartPole)
    assert meanings["max_steps"] == "steps after which an episode is truncated."
    assert meanings["duplicates"].endswith("then all again.")
    assert script.meanings(InputError) == {}
    assert script.table([("a", "b"), ("x|y", 1)]) == "| a | b |\n| --- | --- |\n" + (
        "| x\\|y | 1 |"
    )
