"""Small runs of each command and their results, for tests that damage or kill them."""

import json
import re
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file

from marl_pool.runs.run import Run

CLOCKS = re.compile("seconds|_per_second")
EVOLVE = (
    # With more than 200 parameters, BLAS rounds according to the memory layout.
    *("env=cartpole", "env.max_steps=5", "policy=feed_forward", "policy.hidden=[40]"),
    *("evolution=pgpe", "evolution.population=4", "repetitions=2"),
    *("validation.every=1", "validation.episodes=2"),
    *("checkpoint.every=1", "checkpoint.keep=2", "threads=1", "total_generations=3"),
)
CLONE = (
    *("env=cartpole", "env.max_steps=8", "teacher=heuristic", "policy=feed_forward"),
    *("policy.hidden=[3]", "clone.rounds=1", "clone.first_round=4"),
    *("clone.episodes=4", "clone.validation_episodes=2", "clone.num_envs=2"),
    *("clone.batch_size=4", "clone.iteration_batches=2", "total_batches=8"),
    *("checkpoint.every=1", "checkpoint.keep=2", "threads=1"),
)
FIT = (
    *("task=helpers.line_fit:LineFit", "encoder=none", "pooling=none", "threads=1"),
    *("fit.epochs=3", "fit.folds=2", "fit.batch_size=8", "fit.lr=0.1"),
    *("checkpoint.every=1", "checkpoint.keep=2"),
)
TRAIN = (
    *("env.num_noise=2", "env.max_steps=4", "encoder.num_layers=1", "threads=1"),
    *("ppo.num_envs=4", "ppo.batch_size=16", "ppo.minibatch_size=16"),
    *("ppo.num_epochs=1", "total_steps=64", "checkpoint.every=2"),
)


def results_of(folder: Path) -> dict[str, Any]:
    """Return a run's metrics without timings, its weights and its mean results."""
    run = Run.open(folder)
    rows = [
        {name: repr(value) for name, value in row.items() if not CLOCKS.search(name)}
        for row in run.rows()
    ]
    files = [
        *folder.glob("networks/*.safetensors"),
        *folder.glob("policy/*.safetensors"),
    ]
    files += [c / "policy/model.safetensors" for c in run.checkpoints()[-1:]]
    weights = {
        file.relative_to(folder).as_posix(): _numbers(file)
        for file in files
        if file.is_file()
    }
    results = folder / "results.json"
    means = json.loads(results.read_text())["mean"] if results.is_file() else None
    return {"rows": rows, "weights": weights, "means": means}


def _numbers(file: Path) -> dict[str, Any] | str:
    """Return the tensors in ``file``, or why they cannot be read."""
    try:
        return {name: tensor.tolist() for name, tensor in load_file(file).items()}
    except SafetensorError as error:
        return str(error)
