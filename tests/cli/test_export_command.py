"""`marl-pool export`: which files it writes; the formats are in test_export.py."""

import pytest

from helpers.reported import trained, with_policy
from marl_pool.cli.main import main
from marl_pool.policies.storage import load_policies, save_policies


@pytest.fixture
def run(tmp_path, monkeypatch):
    def write(policy, path, to, *, masked=False):
        path.write_text(to)
        return 0.0

    monkeypatch.setattr("marl_pool.policies.export.export_policy", write)
    monkeypatch.chdir(tmp_path)
    return with_policy(trained(tmp_path / "run", "pooling=avg"))


def test_a_single_policy_is_written_where_it_is_asked_for(run, tmp_path, capsys):
    assert main(["export", str(run.path), "--to", "torch"]) == 0
    assert main(["export", str(run.policy_dir), "--to", "onnx", "--out", "x.onnx"]) == 0
    captured = capsys.readouterr()
    assert captured.out.split() == ["run.pt2", "x.onnx"]
    assert "agent: actions differ by at most 0" in captured.err
    assert (tmp_path / "x.onnx").read_text() == "onnx"


def test_several_policies_are_written_side_by_side(run, tmp_path, capsys):
    two = {name: load_policies(run.policy_dir)["agent"] for name in ("a", "b")}
    folder = tmp_path / "two"
    save_policies(two, {"fox": "a", "hen": "b"}, folder)
    assert main(["export", str(folder), "--to", "torch", "--out", "x.pt2"]) == 0
    assert capsys.readouterr().out.split() == ["x-a.pt2", "x-b.pt2"]


def test_a_shipped_policy_is_written(run, tmp_path, capsys):
    assert main(["export", "pretrained=cartpole", "--to", "onnx"]) == 0
    assert capsys.readouterr().out == "cartpole.onnx\n"
    assert (tmp_path / "cartpole.onnx").read_text() == "onnx"


def test_wrong_words_are_refused(run, refused):
    command = ("export", str(run.path), "--to")
    assert "'onxn'" in refused(*command, "onxn")
    line = refused(*command, "torch", "seed=1")
    assert "export takes no key but pretrained, got 'seed=1'" in line
    line = refused(*command, "torch", "pretrained=cartpole")
    assert "pretrained: expected null where a folder is given" in line
    assert "'carpole'" in refused("export", "--to", "torch", "pretrained=carpole")
