"""The key ``kernels`` takes effect in the networks of a run, in all processes."""

import os
from collections.abc import Callable
from dataclasses import fields
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any, get_args

import pytest
import torch

import marl_pool
from helpers.ppo import CLOCKS, assert_same_weights
from marl_pool.compiled.choice import KERNELS_VARIABLE, chosen_kernels, use_kernels
from marl_pool.compiled.native import call
from marl_pool.options.types import Kernels
from marl_pool.training.ppo import learner
from marl_pool.training.settings import PPOSettings
from marl_pool.utils.errors import InputError

pytestmark = pytest.mark.skipif(
    call.library() is None, reason="no kernel was compiled: it needs g++ or clang"
)

TINY = ("ppo.num_envs=4", "ppo.batch_size=64", "ppo.minibatch_size=null", "threads=1")
SPREAD = ("env=simple_spread", "env.max_steps=4", "ppo.batch_size=96")
TAG = ("env=mpev2_tag", "env.max_steps=8", "ppo.normalize_value_loss=false")


def recorded_calls(
    monkeypatch: pytest.MonkeyPatch, *functions: tuple[ModuleType, str]
) -> list[tuple[str, int, int | None]]:
    """Return a list to which each call of these functions adds its name and threads.

    These are the numbers of torch's threads and of the kernel's.
    """
    calls = []
    for module, name in functions:
        computed = getattr(module, name)

        def counted(*args, name=name, computed=computed, **options):
            calls.append((name, torch.get_num_threads(), call._threads.get()))
            return computed(*args, **options)

        monkeypatch.setattr(module, name, counted)
    return calls


@pytest.mark.parametrize(
    ("pooling", "kernels", "names"),
    [
        ("ada", "native", {"run", "ppo_gradient"}),
        ("pma", "native", {"run", "gradients"}),  # its encoder alone
        ("ada", "torch", set()),
    ],
)
def test_a_run_uses_the_chosen_kernels(tmp_path, monkeypatch, pooling, kernels, names):
    """And their number of threads."""
    functions = ((call, "run"), (call, "gradients"), (learner, "ppo_gradient"))
    calls, before = recorded_calls(monkeypatch, *functions), chosen_kernels()
    options = [*TINY[:-1], "threads=2", f"kernels={kernels}", f"pooling={pooling}"]
    run = marl_pool.train(*options, total_steps=64, run_dir=tmp_path / "run")
    assert run.config["kernels"] == kernels
    assert {name for name, *_ in calls} == names
    # Learning uses the kernel's number of threads.
    threads = {tuple(numbers) for name, *numbers in calls if name != "run"}
    assert threads == ({(1, 2)} if names else set())
    assert call._threads.get() is None
    assert chosen_kernels() == before


def test_a_missing_kernel_is_named_by_its_device(monkeypatch) -> None:
    nvrtc = "marl_pool.compiled.cuda.compiler.nvrtc"
    monkeypatch.setattr("marl_pool.compiled.choice.library", lambda: None)
    monkeypatch.setattr(nvrtc, lambda: None)
    for device, compiler in (("cpu", r"g\+\+"), ("cuda", "NVRTC")):
        message = f"kernels: expected auto or torch, got native.*{compiler}"
        with pytest.raises(InputError, match=message), use_kernels("native", device):
            raise AssertionError("not reached")
    # A kernel for the GPU needs none for the CPU.
    monkeypatch.setattr(nvrtc, object)
    with use_kernels("native", "cuda"):
        assert chosen_kernels() == "native"


def test_auto_leaves_the_environment_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(KERNELS_VARIABLE, "torch")
    with use_kernels("auto"):
        assert chosen_kernels() == "torch"
    with use_kernels("native"):
        assert chosen_kernels() == "native"
    assert os.environ[KERNELS_VARIABLE] == "torch"
    # A wrong one is rejected.
    monkeypatch.setenv(KERNELS_VARIABLE, "cuda")
    with pytest.raises(InputError, match=r"MARL_POOL_KERNELS.*auto.*'cuda'"):
        chosen_kernels()


@pytest.mark.parametrize("choice", get_args(Kernels))
def test_a_variable_that_was_unset_is_unset_afterwards(
    choice: Kernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(KERNELS_VARIABLE, raising=False)
    with use_kernels(choice):
        assert chosen_kernels() == choice
    assert KERNELS_VARIABLE not in os.environ


def test_auto_does_not_restore_the_choice_of_another_thread(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv(KERNELS_VARIABLE, raising=False)
    automatic = use_kernels("auto")
    with use_kernels("torch"):
        automatic.__enter__()
    automatic.__exit__(None, None, None)
    assert chosen_kernels() == "auto"


def test_another_number_of_threads_gives_the_same_weights(tmp_path: Path) -> None:
    folders = []
    for threads in ("threads=1", "threads=2"):
        words, path = (*TINY[:-1], threads, "kernels=native"), tmp_path / threads
        run = marl_pool.train(*words, total_steps=128, run_dir=path)
        folders.append(run.policy_dir)
    # Only the kernel's number of threads differs.
    assert_same_weights(*folders)


@pytest.mark.parametrize(
    "options",
    [
        (),
        ("experiment=boxworld", "pooling=max"),
        # The actor alone; in the last one agents are absent at times.
        (*SPREAD, "critic=set", "ppo.value_norm=true"),
        (*SPREAD, "critic=state", "ppo.share_reward=true"),
        (*TAG, "critic=set", "ppo.dropout=0.1", "ppo.value_clip=0.01"),
        (*TAG, "critic=state", "ppo.normalize_value_loss=true"),
    ],
)
def test_one_call_gives_the_weights_of_separate_calls(tmp_path, monkeypatch, options):
    results, trained = [], []
    step = learner.BatchedPPOLearner._step

    def noted(self, losses):
        step(self, losses)
        trained.append({mid: flat.values.clone() for mid, flat in self._flat.items()})

    monkeypatch.setattr(learner.BatchedPPOLearner, "_step", noted)
    calls = recorded_calls(monkeypatch, (learner, "ppo_gradient"))
    for name in ("one", "separate"):
        if name == "separate":
            assert len(calls) == len(trained)
            cls = learner.BatchedPPOLearner
            monkeypatch.setattr(cls, "_native_gradient", lambda self, mid, rows: None)
        run = marl_pool.train(*TINY, *options, total_steps=128, run_dir=tmp_path / name)
        policy = marl_pool.load_policies(run.path / "policy")["agent"]
        results.append((run.metrics.rows()[-1], dict(policy.named_parameters())))
    assert 2 * len(calls) == len(trained)
    # With the weights of the critic, which no policy has.
    for weights, expected in zip(trained, trained[len(calls) :], strict=False):
        torch.testing.assert_close(weights, expected, rtol=1e-4, atol=1e-5)
    (metrics, weights), (other_metrics, other_weights) = results
    for name, weight in weights.items():
        torch.testing.assert_close(weight, other_weights[name], rtol=1e-4, atol=1e-5)
    assert metrics.keys() == other_metrics.keys()
    tolerance = {"rel": 1e-2, "abs": 1e-4, "nan_ok": True}
    for key in metrics.keys() - CLOCKS:
        assert metrics[key] == pytest.approx(other_metrics[key], **tolerance)


CHANGES: dict[str, Any] = {
    **{"lr": 1e-3, "lr_schedule": "linear", "gamma": 0.5, "gae_lambda": 0.3},
    **{"clip": 0.01, "value_coeff": 2.0, "value_clip": 1e-3, "value_norm": True},
    **{"normalize_value_loss": False, "entropy_coeff": 0.1, "share_reward": True},
    **{"kl_coeff": 5.0, "grad_clip": 1e-3},
}
"""Another value of each key of PPO that changes the loss or the step."""
OTHERS = {
    *("num_envs", "batch_size", "minibatch_size", "num_epochs", "max_seq_len"),
    *("kl_target", "kl_estimate", "dropout", "token_dropout", "dropout_in_sampler"),
}
"""Sizes, what later iterations show, and random masks, which the kernels lack."""


def test_each_key_of_ppo_is_changed_or_excluded_below() -> None:
    assert {field.name for field in fields(PPOSettings)} == {*CHANGES} | OTHERS


@pytest.fixture(scope="module")
def weights_with(tmp_path_factory) -> Callable[..., dict[str, torch.Tensor]]:
    """A function that trains for two iterations, and returns the weights."""

    @cache
    def trained(kernels: str, *options: str) -> dict[str, torch.Tensor]:
        words = (*TINY, *SPREAD, "ppo.num_epochs=3", f"kernels={kernels}", *options)
        folder = tmp_path_factory.mktemp("run") / "run"
        run = marl_pool.train(*words, total_steps=64, run_dir=folder)
        return marl_pool.load_policies(run.path / "policy")["agent"].state_dict()

    return trained


@pytest.mark.parametrize("key", CHANGES)
def test_a_key_of_ppo_has_the_same_effect_in_the_kernel(weights_with, key) -> None:
    option = f"ppo.{key}={CHANGES[key]}"
    default, changed = weights_with("native"), weights_with("native", option)
    effect = difference(changed, default)
    assert effect > 1e-4
    assert difference(changed, weights_with("torch", option)) < 0.05 * effect


def difference(weights: dict[str, torch.Tensor], reference: dict) -> float:
    """Return the largest difference of two weights."""
    return max(float((weights[name] - reference[name]).abs().max()) for name in weights)


def test_a_run_without_a_kernel_says_so(tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.setattr("marl_pool.training.loop.has_kernel", lambda device: False)
    marl_pool.train(*TINY, total_steps=64, run_dir=tmp_path / "run")
    assert "no kernel was compiled" in capsys.readouterr().err
