"""The key ``kernels`` reaches the networks of a run, also in other processes."""

import os
from pathlib import Path
from types import ModuleType

import pytest
import ray
import torch

import marl_pool
from marl_pool.compiled.choice import KERNELS_VARIABLE, chosen_kernels, use_kernels
from marl_pool.compiled.native import call
from marl_pool.training.cluster import quiet, ray_session
from marl_pool.training.ppo import learner
from marl_pool.utils.errors import InputError

pytestmark = pytest.mark.skipif(
    call.library() is None, reason="no kernel was compiled: it needs g++ or clang"
)

TINY = ("ppo.num_envs=4", "ppo.batch_size=64", "ppo.minibatch_size=null", "threads=1")
SPREAD = ("env=simple_spread", "env.max_steps=4", "ppo.batch_size=96")
SHORT = ("env.max_steps=8", "ppo.normalize_value_loss=false")
CLOCKS = {"seconds", "sample_seconds", "learn_seconds", "steps_per_second"}


def recorded_calls(
    monkeypatch: pytest.MonkeyPatch, *functions: tuple[ModuleType, str]
) -> list[str]:
    """Return a list to which these functions add their name when they are called."""
    calls: list[str] = []
    for module, name in functions:
        computed = getattr(module, name)

        def counted(*args, name=name, computed=computed, **options):
            calls.append(name)
            return computed(*args, **options)

        monkeypatch.setattr(module, name, counted)
    return calls


@pytest.mark.parametrize(("kernels", "is_used"), [("torch", False), ("native", True)])
def test_a_run_computes_by_the_chosen_kernels(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kernels: str, is_used: bool
) -> None:
    calls = recorded_calls(monkeypatch, (call, "run"), (learner, "ppo_gradient"))
    before = chosen_kernels()
    run = marl_pool.train(
        *TINY, f"kernels={kernels}", total_steps=64, run_dir=tmp_path / "run"
    )
    assert run.config["kernels"] == kernels
    assert {"run", "ppo_gradient"} <= set(calls) if is_used else not calls
    assert chosen_kernels() == before


@pytest.mark.parametrize(("device", "compiler"), [("cpu", r"g\+\+"), ("cuda", "NVRTC")])
def test_a_missing_kernel_is_named_by_its_device(
    monkeypatch: pytest.MonkeyPatch, device: str, compiler: str
) -> None:
    monkeypatch.setattr("marl_pool.compiled.choice.library", lambda: None)
    monkeypatch.setattr("marl_pool.compiled.cuda.compiler.nvrtc", lambda: None)
    message = f"kernels: expected auto or torch, got native.*{compiler}"
    with pytest.raises(InputError, match=message), use_kernels("native", device):
        raise AssertionError("not reached")


def test_a_kernel_for_the_gpu_needs_none_for_the_cpu(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("marl_pool.compiled.choice.library", lambda: None)
    monkeypatch.setattr("marl_pool.compiled.cuda.compiler.nvrtc", object)
    with use_kernels("native", "cuda"):
        assert chosen_kernels() == "native"


@pytest.mark.slow
@pytest.mark.usefixtures("no_cluster")
def test_workers_inherit_the_choice() -> None:
    with use_kernels("torch"), quiet(), ray_session(None, num_cpus=1):
        assert ray.get(ray.remote(chosen_kernels).remote()) == "torch"


def test_auto_leaves_the_environment_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(KERNELS_VARIABLE, "torch")
    with use_kernels("auto"):
        assert chosen_kernels() == "torch"
    with use_kernels("native"):
        assert chosen_kernels() == "native"
    assert os.environ[KERNELS_VARIABLE] == "torch"


def test_a_wrong_environment_variable_is_rejected(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(KERNELS_VARIABLE, "cuda")
    with pytest.raises(InputError, match=r"MARL_POOL_KERNELS.*auto.*'cuda'"):
        chosen_kernels()


def test_another_number_of_threads_gives_the_same_weights(tmp_path: Path) -> None:
    weights = []
    for threads in (1, 2):
        options = [*TINY[:-1], f"threads={threads}", "kernels=native"]
        run = marl_pool.train(
            *options, total_steps=128, run_dir=tmp_path / str(threads)
        )
        policy = marl_pool.load_policies(run.path / "policy")["agent"]
        weights.append(dict(policy.named_parameters()))
    # Only the kernel's threads differ.
    for name, weight in weights[0].items():
        assert torch.equal(weight, weights[1][name]), name


@pytest.mark.parametrize(
    ("pooling", "kernels", "expected"),
    [
        ("ada", "native", {(1, 2)}),
        ("pma", "native", {(1, 2)}),  # its encoder alone
        ("ada", "torch", set()),
    ],
)
def test_the_threads_of_learning_are_the_kernels(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    pooling: str,
    kernels: str,
    expected: set[tuple[int, int]],
) -> None:
    thread_counts = set()
    for module, name in ((call, "gradients"), (learner, "ppo_gradient")):
        computed = getattr(module, name)

        def observed(*args, computed=computed, **options):
            thread_counts.add((torch.get_num_threads(), call._threads.get()))
            return computed(*args, **options)

        monkeypatch.setattr(module, name, observed)
    options = [*TINY[:-1], "threads=2", f"kernels={kernels}", f"pooling={pooling}"]
    marl_pool.train(*options, total_steps=64, run_dir=tmp_path / "run")
    assert thread_counts == expected
    assert call._threads.get() is None


@pytest.mark.parametrize(
    "options",
    [
        (),
        ("experiment=boxworld", "pooling=max"),
        # The actor alone; in the last one agents are absent at times.
        (*SPREAD, "critic=set", "ppo.value_norm=true"),
        (*SPREAD, "critic=state", "ppo.share_reward=true"),
        ("env=mpev2_tag", *SHORT, "critic=set", "ppo.dropout=0.1"),
        ("env=mpev2_tag", *SHORT, "critic=set", "ppo.value_clip=0.01"),
        ("env=mpev2_tag", *SHORT, "critic=state", "ppo.normalize_value_loss=true"),
    ],
)
def test_one_call_gives_the_weights_of_separate_calls(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: tuple[str, ...]
) -> None:
    results, trained = [], []
    step = learner.BatchedPPOLearner._step

    def noted(self, losses):
        step(self, losses)
        trained.append({mid: flat.values.clone() for mid, flat in self._flat.items()})

    monkeypatch.setattr(learner.BatchedPPOLearner, "_step", noted)
    calls = recorded_calls(monkeypatch, (learner, "ppo_gradient"))
    for name in ("together", "apart"):
        if name == "apart":
            assert len(calls) == len(trained)
            gradient = "_native_gradient"
            monkeypatch.setattr(
                learner.BatchedPPOLearner, gradient, lambda self, mid, rows: None
            )
        run = marl_pool.train(*TINY, *options, total_steps=128, run_dir=tmp_path / name)
        policy = marl_pool.load_policies(run.path / "policy")["agent"]
        results.append((run.metrics.rows()[-1], dict(policy.named_parameters())))
    assert 2 * len(calls) == len(trained)
    # With the weights of the critic, which no policy has.
    for together, apart in zip(trained, trained[len(calls) :], strict=False):
        torch.testing.assert_close(together, apart, rtol=1e-4, atol=1e-5)
    (metrics, weights), (other_metrics, other_weights) = results
    for name, weight in weights.items():
        torch.testing.assert_close(weight, other_weights[name], rtol=1e-4, atol=1e-5)
    assert metrics.keys() == other_metrics.keys()
    for key in metrics.keys() - CLOCKS:
        assert metrics[key] == pytest.approx(
            other_metrics[key], rel=1e-2, abs=1e-4, nan_ok=True
        )


def test_a_run_without_a_kernel_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("marl_pool.training.loop.has_kernel", lambda device: False)
    marl_pool.train(*TINY, total_steps=64, run_dir=tmp_path / "run")
    assert "no kernel was compiled" in capsys.readouterr().err
