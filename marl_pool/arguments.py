"""What the command line takes: verbs, flags, their help, and key=value overrides."""

import argparse
import difflib
from pathlib import Path
from typing import NoReturn

from marl_pool import __version__, names
from marl_pool.errors import InputError

KINDS = ("pooling", "envs", "encoders", "perturbations", "tokenizers")
"""What can be listed."""
RESOURCES = {
    "num_env_runners": "processes that sample",
    "num_learners": "processes that learn",
    "num_gpus_per_env_runner": "GPUs of each process that samples",
    "num_gpus_per_learner": "GPUs of each process that learns",
    "address": "existing Ray cluster, host:port or auto",
}
"""Flags of ``train`` that are short for the keys ``resources.…``."""
SWEEP_FLAGS = {
    "concurrency": "trials at a time",
    "cpus_per_trial": "CPUs, and threads of torch, of each trial",
    "gpus_per_trial": "GPUs of each trial",
    "format": "of the table, csv or parquet",
    "seed_sd": "standard deviation of the return between seeds, if known",
    "address": "existing Ray cluster, host:port or auto",
}
"""Flags of ``sweep`` that are short for the keys ``sweep.…``."""

TRAIN = """\
Arguments of the form key=value set a key; group=option takes another file of a group:

  {groups}

For env, encoder, pooling and perturbation the option may be package.module:Class,
a class of your own. `marl-pool train --cfg` prints every key with its meaning.

examples:
  marl-pool train
  marl-pool train experiment=simple_centroid pooling=max env.num_noise=16 seed=3
  marl-pool train ppo=paper total_steps=4e6 --num-env-runners 4 --run-dir runs/paper
  marl-pool train pooling=my_package.my_module:MyPool pooling.width=16
"""
SWEEP = """\
key=a,b or key=range(0,3) gives a key several values; every combination is a trial. A
preset such as experiment=figure5 may bring a grid, whose keys can be set anew. All
trials are checked before the first one starts. key=value and group=option are as for
`marl-pool train`:

  {groups}

Each trial is an ordinary run in DIR/trials. A sweep that was stopped goes on with
`marl-pool resume DIR`. With --address, DIR must be on a file system that all machines
of the cluster share. `marl-pool sweep --cfg`, with a grid, prints every key.

examples:
  marl-pool sweep pooling=ada,avg,max,cls env.counts=1-31-0,1-3-28 seed=0,1,2
  marl-pool sweep experiment=figure5 seed=0,1,2 total_steps=300_000 ppo=fast --dry-run
  marl-pool sweep experiment=figure5 --concurrency 8 --format parquet
"""
RESUME = """\
Training goes on from the newest checkpoint, and a sweep with what it has not finished.
Only run control may be changed: total_steps, time_limit, checkpoint.*, resources.*, and
sweep.* of a sweep.

examples:
  marl-pool resume runs/my-run
  marl-pool resume runs/my-run total_steps=2e6 time_limit=600
  marl-pool resume sweeps/my-sweep sweep.concurrency=4
"""
EVALUATE = """\
Arguments of the form key=value set a key.
`marl-pool evaluate --cfg` prints every key with its meaning.

examples:
  marl-pool evaluate runs/my-run
  marl-pool evaluate runs/my-run episodes=1024 stochastic=true checkpoint=last
  marl-pool evaluate runs/my-run --plugin my_package.my_module:MyPool
"""
RENDER = """\
Arguments of the form key=value set a key; group=option takes another file of a group:

  {groups}

`marl-pool render --cfg` prints every key with its meaning.

examples:
  marl-pool render runs/my-run
  marl-pool render runs/my-run episodes=3 head=0 seed=7
"""
LIST = """\
examples:
  marl-pool list
  marl-pool list pooling
"""


def parse(arguments: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """Split a command line into flags and key=value overrides.

    Args:
        arguments: at least one, without the program's name.

    Raises:
        InputError: an unknown verb or flag, or an argument that is neither.
    """
    parser, verbs = _parsers(asked=arguments[0])
    if not arguments[0].startswith("-") and arguments[0] not in verbs:
        raise names.unknown("command", arguments[0], verbs)
    known, rest = parser.parse_known_args(arguments)
    run = getattr(known, "run", None)
    if run and _is_override(run) and not Path(run).exists():
        # argparse takes the first bare argument for RUN, wherever RUN stands.
        paths = [text for text in rest if "=" not in text and text[0] != "-"]
        known.run = next(iter(paths), None)
        rest = [run, *(text for text in rest if text != known.run)]
    for text in rest:
        if not _is_override(text):
            raise _not_understood(text, verbs.get(known.verb, parser))
    return known, rest


def print_help() -> None:
    """Print what the command can do."""
    _parsers(asked="")[0].print_help()


class _Parser(argparse.ArgumentParser):
    """A parser whose refusals are one line, like all others."""

    def error(self, message: str) -> NoReturn:
        raise InputError(message)


def _parsers(asked: str) -> tuple[_Parser, dict[str, argparse.ArgumentParser]]:
    parser = _Parser(
        prog="marl-pool",
        description="Train, measure and watch policies that see sets of tokens.",
        epilog="`marl-pool VERB --help` shows a verb's options and examples.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=__version__)
    verbs = parser.add_subparsers(dest="verb", metavar="VERB", required=True)

    def add(verb: str, what: str, epilog: str) -> argparse.ArgumentParser:
        # Listing a verb's groups reads a folder and loads pydantic: only if asked.
        if asked == verb and "{groups}" in epilog:
            epilog = epilog.format(groups=_groups(verb))
        return verbs.add_parser(
            verb,
            help=what,
            description=f"{what[0].upper()}{what[1:]}.",
            epilog=epilog,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )

    train = add("train", "train a policy with PPO", TRAIN)
    train.add_argument("--run-dir", metavar="DIR", help="folder of the new run")
    for key, what in RESOURCES.items():
        flag = f"--{key.replace('_', '-')}"
        train.add_argument(flag, metavar="X", help=f"{what} (resources.{key})")
    sweep = add("sweep", "train a grid of policies, several at a time", SWEEP)
    sweep.add_argument("--sweep-dir", metavar="DIR", help="folder of the sweep")
    sweep.add_argument(
        "--dry-run", action="store_true", help="print the study and stop"
    )
    for key, what in SWEEP_FLAGS.items():
        flag = f"--{key.replace('_', '-')}"
        sweep.add_argument(flag, metavar="X", help=f"{what} (sweep.{key})")
    resume = add("resume", "go on with a run or a sweep that was stopped", RESUME)
    evaluate = add("evaluate", "measure a policy under perturbations", EVALUATE)
    render = add("render", "make a video of a policy", RENDER)
    for reader in (resume, evaluate, render):
        reader.add_argument("run", metavar="RUN", nargs="?", help="folder of the run")
    for reader in (evaluate, render):
        reader.add_argument(
            "--plugin",
            metavar="CLASS",
            action="append",
            default=[],
            help="package.module:Class that the run may use; may be given repeatedly",
        )
    for composer in (train, sweep, evaluate, render):
        composer.add_argument(
            "--config-dir", metavar="DIR", type=Path, help="folder of your own YAML"
        )
        composer.add_argument(
            "--cfg", action="store_true", help="print the configuration and stop"
        )
    listing = add("list", "list what can be named", LIST)
    listing.add_argument("kind", metavar="KIND", nargs="?", help=", ".join(KINDS))
    return parser, dict(verbs.choices)


def _groups(verb: str) -> str:
    from marl_pool.config.sections import VERBS, files_of

    groups = VERBS[verb].config_groups
    return "\n  ".join(f"{group}={'|'.join(files_of(group))}" for group in groups)


def _is_override(text: str) -> bool:
    return "=" in text and not text.startswith("-")


def _not_understood(text: str, parser: argparse.ArgumentParser) -> InputError:
    if not text.startswith("-"):
        hint = "; quote what has spaces: 'key={a: b}'" if text[-1:] in "]}" else ""
        return InputError(f"{text!r}: expected a flag or key=value{hint}")
    flags = [flag for action in parser._actions for flag in action.option_strings]
    near = difflib.get_close_matches(text.partition("=")[0], flags, n=1)
    hint = f" Did you mean {near[0]}?" if near else ""
    return InputError(f"unknown flag {text!r}: choose from {', '.join(flags)}.{hint}")
