"""The GPU check, run on a CPU: it runs, and it finds a fault."""

import importlib
import json
import sys
from types import ModuleType

import pytest

from helpers.paths import ROOT
from helpers.training import RAY_WARNINGS
from marl_pool.utils.errors import UnfitTokensError

pytestmark = [pytest.mark.slow, *RAY_WARNINGS]


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    return importlib.import_module("gpu_check")


def test_all_checks_pass_and_all_is_measured(script, tmp_path, capsys):
    file = tmp_path / "rows.json"
    assert script.main(["--device", "cpu", "--tiny", "--json", str(file)]) == 0
    content = json.loads(file.read_text())
    assert not any(check["reason"] for check in content["checks"])
    names = [check["name"] for check in content["checks"]]
    assert {"env/boxworld", "no_waiting/cartpole", "training", "resume"} <= set(names)
    *networks, sampled, trained, steps, skill = content["speed"]
    assert [row["name"].partition("'")[0] for row in networks] == [
        "simple_centroid",
        "simple_tag",
        "boxworld",
    ]
    names = [row["name"] for row in (sampled, trained, steps, skill)]
    assert names == ["sampled", "trained", "512 steps of training", "time to skill"]
    assert all(row["value"] and row["torch"] for row in (*networks, sampled))
    assert all(row["value"] for row in (trained, steps))
    assert "| sampled |" in capsys.readouterr().out


def test_a_failed_check_is_reported(script, monkeypatch, capsys):
    def wrong_numbers() -> None:
        raise AssertionError("numbers differ")

    def unfit_tokens() -> None:
        raise UnfitTokensError("too few")

    def fake_checks(device: str, folder: object, *, tiny: bool) -> dict[str, object]:
        return {"wrong": wrong_numbers, "right": lambda: None, "unfit": unfit_tokens}

    monkeypatch.setattr(script, "checks", fake_checks)
    assert script.main(["--device", "cpu", "--only", "correct"]) == 1
    printed = capsys.readouterr().out
    assert "wrong: AssertionError: numbers differ" in printed
    assert "1 of 2 checks passed, 1 left out" in printed


def test_a_missing_gpu_is_said(script, monkeypatch, capsys):
    monkeypatch.setattr(script.torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", ["gpu_check.py"])
    with pytest.raises(SystemExit):
        script.main()
    assert "torch finds no CUDA device" in capsys.readouterr().err
