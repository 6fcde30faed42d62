"""Verbs, flags and help of the command line, and the split from key=value overrides."""

import argparse
import difflib
import os
from pathlib import Path
from typing import Any, NoReturn

from marl_pool import __version__
from marl_pool.cli.completion import COMPLETING, complete
from marl_pool.utils import names
from marl_pool.utils.errors import InputError
from marl_pool.utils.text import is_url

PRETRAINED = "pretrained"
KINDS = (
    *("pooling", "envs", "encoders", "perturbations", "tokenizers"),
    *("policies", "strategies", "tasks", "suites", "experiments", PRETRAINED),
)
"""Registries and presets that `marl-pool list` shows."""
CLUSTER = "existing Ray cluster, host:port or auto"
RESOURCES = {
    "num_env_runners": "processes that sample",
    "num_learners": "processes that learn",
    "num_gpus_per_env_runner": "GPUs of each process that samples",
    "num_gpus_per_learner": "GPUs of each process that learns",
    "address": CLUSTER,
}
"""Flags of ``train`` that set the keys ``resources.…``, with their help."""
WORKERS = {
    "num_workers": "processes that play; 0: this one",
    "num_gpus_per_worker": "GPUs of each process that plays",
    "address": CLUSTER,
}
"""Flags of ``evolve`` that set the keys ``resources.…``, with their help."""
STORAGE = {"storage": "URL below which the run is mirrored, such as s3://bucket/runs"}
"""Flags of the verbs that train that set a top-level key, with their help."""
SWEEP_FLAGS = {
    "concurrency": "trials at a time",
    "cpus_per_trial": "CPUs, and threads of torch, of each trial",
    "gpus_per_trial": "GPUs of each trial",
    "seed_sd": "standard deviation of the return between seeds, if known",
    "address": CLUSTER,
}
"""Flags of ``sweep`` that set the keys ``sweep.…``, with their help."""
RENDER_FLAGS = {"format": "file format: webm, mp4, gif or webp (format)"}
"""Flags of ``render`` that set keys, with their help."""

STATUS = """\
exit status: 0 finished; 1 failed; 2 bad input; 75 with --or-resume, not finished within
time_limit; 130, 143 and 138 stopped by Ctrl-C, SIGTERM and SIGUSR1, with a checkpoint
"""
"""Part of the help of `TRAINING`."""
TRAINING = ("train", "evolve", "clone", "fit", "sweep", "resume")
"""Verbs that train."""
KEYS = """\
Arguments of the form key=value set a key; group=option takes another file of a group:

  {groups}

For {classes} the option may be package.module:Class,
a class of your own. `marl-pool {verb} --cfg` prints every key with its meaning.
"""
"""First paragraphs of the help of verbs with config groups."""
STUDIED = ("train", "fit")
"""Verbs whose runs a sweep can consist of."""
WEIGHTS = ("attention-neuron",)
"""Sources of published weights."""
PUBLISHED = ("ant_mlp", "ant_pi", "carracing", "carracing_pi", "cartpole_pi")
"""Agents with published weights."""

TRAIN = """\
{keys}
examples:
  marl-pool train
  marl-pool train experiment=simple_centroid pooling=max env.num_noise=16 seed=3
  marl-pool train ppo=paper total_steps=4e6 --num-env-runners 4 --run-dir runs/paper
  marl-pool train pooling=my_package.my_module:MyPool pooling.width=16
"""
SWEEP = """\
key=a,b or key=range(0,3) gives a key several values; every combination is a trial. A
preset such as experiment=figure5 may have a grid, whose keys can be overridden. All
trials are checked before the first one starts, and `--cfg` needs a grid too. Each trial
is an ordinary run in DIR/trials. A stopped sweep continues with `marl-pool resume DIR`.
With --address, DIR must be on a file system that all machines of the cluster share, or
--storage must be given.

{keys}
examples:
  marl-pool sweep pooling=ada,avg,max,cls env.counts=1-31-0,1-3-28 seed=0,1,2
  marl-pool sweep experiment=figure5 seed=0,1,2 total_steps=300_000 ppo=fast --dry-run
  marl-pool sweep experiment=figure5 --concurrency 8 --cpus-per-trial 2
  marl-pool sweep --verb fit task=knn_centroid pooling=ada,avg,max,cls task.k=1,4,16
"""
EVOLVE = """\
{keys}
All members of a generation play the same episodes. Simulators are played by several
processes with --num-workers, of a cluster with --address.

examples:
  marl-pool evolve experiment=cartpole_attention_neuron
  marl-pool evolve policy=feed_forward evolution=pgpe evolution.population=64 seed=3
  marl-pool evolve evolution=cma init=zeros repetitions=32 time_limit=600
"""
CLONE = """\
{keys}
teacher=… is the policy to clone: the folder of a run or policy, heuristic, value_table
(for Pong, reads the console's memory), or package.module:Class of a policy. The teacher
acts on unperturbed tokens, the student on perturbed ones. clone=sequences is for
students with a memory, clone=steps for those without.

examples:
  marl-pool clone teacher=heuristic perturbation=shuffle
  marl-pool clone teacher=runs/my-run policy=feed_forward clone=steps clone.rounds=4
  marl-pool clone experiment=pong_clone_remembering
"""
FIT = """\
{keys}
A supervised study of a pooling head or an encoder, without RL. scale= sets its size
through keys that can be overridden. The estimated cost is printed first, with --dry-run
nothing else. Grids of such runs: `marl-pool sweep --verb fit`.

examples:
  marl-pool fit task=knn_centroid pooling=ada task.k=4
  marl-pool fit task=clustering encoder=set_transformer pooling=none scale=tiny
  marl-pool fit task=images pooling=cls data_dir=my-data task.dataset=fashion_mnist
"""
RESUME = """\
Training continues from the newest checkpoint, a sweep with its unfinished trials.
Only run control may be changed: total_steps, total_generations or total_batches,
time_limit, env_timeout, storage, checkpoint.*, resources.*; threads, device and
data_dir of a fit; and sweep.* of a sweep. A URL is fetched to runs/ or sweeps/, and
mirrored again.

examples:
  marl-pool resume runs/my-run
  marl-pool resume runs/my-run total_steps=2e6 time_limit=600
  marl-pool resume sweeps/my-sweep sweep.concurrency=4
  marl-pool resume s3://my-bucket/runs/my-run
  marl-pool resume runs/my-run --plugin my_package.my_module:MyPool
"""
EVALUATE = """\
{keys}
env.KEY=… measures a run in another environment than it was trained in. A policy without
a run is named by its folder, with env=NAME if that names no environment, or by
pretrained=NAME if it is shipped with the package. Its results are written to --out, by
default a new folder in evaluations/. `marl-pool report` compares several runs.

examples:
  marl-pool evaluate runs/my-run
  marl-pool evaluate runs/my-run suite=attention_neuron env.noise_channels=5
  marl-pool evaluate my-policy env=cartpole suite=attention_neuron --out my-results
  marl-pool evaluate runs/one runs/two suite=attention_neuron
  marl-pool evaluate runs/my-run suite=robustness/extended worst_of=5
  marl-pool evaluate runs/my-run episodes=1024 stochastic=true checkpoint=last
  marl-pool evaluate runs/my-run --plugin my_package.my_module:MyPool
"""
DIAGNOSE = """\
{keys}
The policy plays unperturbed in an environment that marks which tokens matter for the
task. Signal loss, relation scores and the bounds of the AdaPool paper's Theorem 3.12
are written to the run. A table of several runs is written to --out.
Environments and policies without a run are named as for `marl-pool evaluate`.

examples:
  marl-pool diagnose runs/my-run
  marl-pool diagnose runs/my-run episodes=256 max_observations=32768 checkpoint=last
  marl-pool diagnose runs/my-run env.num_noise=60
  marl-pool diagnose runs/ada runs/avg runs/max --out my-table
"""
RENDER = """\
{keys}
env.KEY=… shows a run in another environment than it was trained in. Policies without a
run are named as for `marl-pool evaluate`; their video is written to --out. Several runs
are shown side by side in one video, which is also written to --out. Tokens that the
policy perceives otherwise than they are have a mark, which a legend names.

examples:
  marl-pool render runs/my-run
  marl-pool render runs/my-run top_patches=10
  marl-pool render runs/my-run episodes=3 head=0 seed=7
  marl-pool render runs/my-run perturbation=occlude beside_clean=true rows=2
  marl-pool render runs/ada runs/max perturbation=inject --out ada-and-max
  marl-pool render runs/my-run perturbation=freeze --format gif size=400
"""
PLAY = """\
{keys}
A page in the browser shows each policy's episode beside its unperturbed twin, and takes
your hand: severities, clicks on entities, drags, a push. It is served to this machine
alone, at the address printed, until Ctrl-C. Policies are named as for `marl-pool
evaluate`; several play side by side. --export writes a page that needs no server.

examples:
  marl-pool play pretrained=cartpole_attention_neuron_reshuffled
  marl-pool play runs/ada runs/max --no-browser --port 8000
  marl-pool play runs/ada --export demo.html
"""
REPORT = """\
FILE becomes a self-contained page: learning curves, robustness, comparisons, videos,
and the origin of each number. Runs that differ only in their seed are one method. Each
run's newest evaluation counts; evaluate=true makes those that are missing, and accepts
the keys of `marl-pool evaluate`. Without --out the page is written to reports/.
`marl-pool report --cfg` prints every key with its meaning.

examples:
  marl-pool report runs/my-run
  marl-pool report runs/ada-0 runs/ada-1 runs/max-0 runs/max-1 --out ada-or-max.html
  marl-pool report sweeps/my-sweep/trials/* videos=false
  marl-pool report runs/one runs/two evaluate=true suite=quick episodes=64
"""
IMPORT_WEIGHTS = """\
FILE is a model.npz of the folder AttentionNeuron/pretrained in the repository
github.com/google/brain-tokyo-workshop. DIR becomes a folder with a policy, as in a run.

examples:
  marl-pool import-weights attention-neuron model.npz --agent cartpole_pi --out cartpole
"""
CHECK_ENV = """\
A few episodes with random actions are compared with the contract of an environment:
shapes, dtypes, ranges, equal episodes from equal seeds, alone and in a batch, and an
exact continuation of a saved state. One line for each; exit status 1 if one fails.

examples:
  marl-pool check-env env=simple_tag env.prey=learned
"""
LIST = """\
examples:
  marl-pool list
  marl-pool list pooling
  marl-pool list pooling ada
  marl-pool list experiments
"""
EXPORT = """\
The file computes the most likely action from features, types and padding of a batch of
sets. It is compared with the policy on random sets. torch writes a file for
torch.export.load, onnx one for any ONNX runtime. Policies with a memory have no export.

examples:
  marl-pool export runs/my-run --to onnx
  marl-pool export runs/my-run --to torch --out my-policy.pt2
"""
SHOW = """\
examples:
  marl-pool show runs/my-run
"""
LS = """\
DIR is the working directory by default. Runs in its folders, and in the trials of
sweeps in them, are listed.

examples:
  marl-pool ls
  marl-pool ls sweeps/my-sweep
"""
HELP = """\
examples:
  marl-pool help
  marl-pool help train
"""
VERBS = {
    "train": ("train a policy with PPO", TRAIN),
    "evolve": ("evolve a policy, a population at a time", EVOLVE),
    "clone": ("clone a teacher's behaviour", CLONE),
    "fit": ("fit a network to a supervised task", FIT),
    "sweep": ("train a grid of policies, several at a time", SWEEP),
    "resume": ("resume a stopped run or sweep", RESUME),
    "evaluate": ("measure a policy under perturbations", EVALUATE),
    "diagnose": ("measure how a policy pools signal", DIAGNOSE),
    "render": ("make a video of a policy", RENDER),
    "play": ("watch and disturb a policy in the browser", PLAY),
    "report": ("write a page about one run or several", REPORT),
    "export": ("export a policy for other programs", EXPORT),
    "import-weights": ("make a policy of published weights", IMPORT_WEIGHTS),
    "check-env": ("check an environment before training", CHECK_ENV),
    "show": ("show a run's state, results and next commands", SHOW),
    "ls": ("list the runs in a folder", LS),
    "list": ("list what can be named", LIST),
    "help": ("show the options and examples of a verb", HELP),
}
"""Summary and epilog of the help of each verb."""


def parse(arguments: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """Split a command line into flags and key=value overrides.

    Args:
        arguments: at least one, without the program's name.

    Raises:
        InputError: an unknown verb or flag, or an argument that is neither.
    """
    # Reject an unknown command before its flags are read.
    parser, verbs = _parsers(arguments)
    if not arguments[0].startswith("-") and arguments[0] not in verbs:
        raise names.unknown("command", arguments[0], verbs)
    known, rest = parser.parse_known_args(arguments)
    # Find the folder of the run among the bare arguments.
    if hasattr(known, "run"):
        # argparse takes the first bare arguments for RUN, wherever RUN stands.
        several = isinstance(known.run, list)
        taken = known.run if several else [known.run]
        words = [*filter(None, taken), *(text for text in rest if text[0] != "-")]
        paths = [word for word in words if _is_path(word)]
        known.run = paths if several else next(iter(paths), None)
        left = [] if several else paths[1:]
        flags = [text for text in rest if text[0] == "-"]
        rest = [*(word for word in words if not _is_path(word)), *left, *flags]
    # All other arguments have to be overrides.
    for text in rest:
        key, given, value = text.partition("=")
        if text.startswith("-") or not given:
            following = [*arguments[arguments.index(text) + 1 :], "-"][0]
            value = "VALUE" if following.startswith("-") else following
            raise _not_understood(
                text, known.verb, verbs.get(known.verb, parser), value
            )
        # A flag is easily taken for a key.
        flag = f"--{key.lstrip('+').replace('_', '-')}"
        if flag in verbs[known.verb]._option_string_actions:
            raise InputError(f"{key}: expected the flag {flag} {value}, got {text!r}")
    return known, rest


def answer_shell() -> None:
    """Print the completions that a shell asks for, and exit; otherwise do nothing."""
    if COMPLETING in os.environ:
        complete(*_parsers([]))


def print_help() -> None:
    """Print the summary of all verbs."""
    _parsers([])[0].print_help()


class _Parser(argparse.ArgumentParser):
    """A parser whose refusals are one line, like all others."""

    def error(self, message: str) -> NoReturn:
        raise InputError(message)


def _parsers(
    arguments: list[str],
) -> tuple[_Parser, dict[str, argparse.ArgumentParser]]:
    """Return the parser of the command and those of its verbs."""
    # Make the parser, and one for each verb.
    parser = _Parser(
        prog="marl-pool",
        description="Train, measure and watch policies that see sets of tokens.",
        epilog="`marl-pool VERB --help` shows a verb's options and examples.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=__version__)
    verbs = parser.add_subparsers(dest="verb", metavar="VERB", required=True)
    for verb, (what, epilog) in VERBS.items():
        # Listing a verb's groups reads a folder and loads pydantic: only if asked.
        if arguments[:1] == [verb] and "{keys}" in epilog:
            epilog = epilog.replace("{keys}", _keys(verb, arguments))
        if verb in TRAINING:
            epilog = epilog.replace("examples:", f"{STATUS}\nexamples:")
        verbs.add_parser(
            verb,
            help=what,
            description=f"{what[0].upper()}{what[1:]}.",
            epilog=epilog,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )

    # Add one argument to several verbs.
    def add(of: str, name: str, what: str, **options: Any) -> None:
        for verb in of.split():
            verbs.choices[verb].add_argument(name, help=what, **options)

    # Flags of the verbs that train.
    flag: dict[str, Any] = {"action": "store_true"}
    add("train evolve clone fit", "--run-dir", "folder of the new run", metavar="DIR")
    what = "continue what the folder, or its mirror, has of the same configuration"
    add("train evolve clone fit sweep", "--or-resume", what, **flag)
    what = STORAGE["storage"]
    add("train evolve clone fit sweep", "--storage", what, metavar="URL")
    add("fit", "--dry-run", "print what it would cost and stop", **flag)
    add(
        "sweep",
        "--verb",
        "what makes each run: train (the default) or fit",
        dest="trained_by",
        metavar="VERB",
        choices=STUDIED,
        default=STUDIED[0],
    )
    add("sweep", "--sweep-dir", "folder of the sweep", metavar="DIR")
    add("sweep", "--dry-run", "print the study and stop", **flag)
    for verb, section, keys in (
        ("train", "resources", RESOURCES),
        ("evolve", "resources", WORKERS),
        ("sweep", "sweep", SWEEP_FLAGS),
    ):
        for key, what in keys.items():
            name = f"--{key.replace('_', '-')}"
            add(verb, name, f"{what} ({section}.{key})", metavar="X")

    for key, what in RENDER_FLAGS.items():
        add("render", f"--{key}", what, metavar="X")

    # Arguments of the verbs that read runs.
    readers = "evaluate diagnose render"
    what = "folder or URL of a run, or folder of a policy; or of several runs"
    new = "new folder for results that belong to no run"
    add("play", "--port", "port of the page; default: a free one", metavar="N")
    add("play", "--no-browser", "only print the address", **flag)
    add("play", "--export", "new HTML file that needs no server", metavar="FILE")
    add("report", "--out", "new HTML file; default: one in reports/", metavar="FILE")
    run: dict[str, Any] = {"name": "run", "metavar": "RUN"}
    add("resume", what="folder or URL of the run or sweep", nargs="?", **run)
    add(f"{readers} play", what=what, nargs="*", **run)
    add("report", what="folders or URLs of runs", nargs="*", **run)
    add(readers, "--out", new, metavar="DIR")
    add(
        f"resume {readers} play report export",
        "--plugin",
        "package.module:Class that the run may use; may be given repeatedly",
        metavar="CLASS",
        action="append",
        default=[],
    )
    composers = f"train evolve clone fit sweep {readers} play report"
    add(composers, "--config-dir", "folder of your own YAML", metavar="DIR", type=Path)
    add(composers, "--cfg", "print the configuration and stop", **flag)

    # Arguments of the other verbs.
    importer = "import-weights"
    add(importer, "source", ", ".join(WEIGHTS), metavar="SOURCE")
    add(importer, "file", "the published .npz", metavar="FILE")
    add(importer, "--agent", ", ".join(PUBLISHED), metavar="NAME", required=True)
    add(importer, "--out", "new folder", metavar="DIR", required=True)
    add("list", "kind", ", ".join(KINDS), metavar="KIND", nargs="?")
    add("list", "name", "one of these, to list its options", metavar="NAME", nargs="?")
    add("export", what="folder of a run, or of a policy", nargs="?", **run)
    add("export", "--to", "torch or onnx", metavar="FORMAT", required=True)
    add("export", "--out", "new file; default: RUN.pt2 or RUN.onnx", metavar="FILE")
    add("show", what="folder of a run or sweep", nargs="?", **run)
    what = "folder with runs; default: the working directory"
    add("ls", "folder", what, metavar="DIR", nargs="?", default=".")
    add("help", "about", "a verb", metavar="VERB", nargs="?")
    return parser, dict(verbs.choices)


def _keys(verb: str, arguments: list[str]) -> str:
    from marl_pool.config.sections import VERBS, Group, options_for

    # Help is printed before the flags are parsed.
    fits = verb == "sweep" and "--verb fit" in " ".join(arguments).replace("=", " ")
    made_by = "fit" if fits else verb
    # List the groups, and the sections that take a class by name.
    kind = VERBS[made_by]
    options = {
        name: "|".join(options_for(made_by, name)) for name in kind.config_groups
    }
    groups = "\n  ".join(f"{name}={own}" for name, own in options.items() if own)
    sections = (*kind.sections, *kind.changes)
    *most, last = [one for one in sections if isinstance(kind.section(one), Group)]
    classes = f"{', '.join(most)} and {last}" if most else last
    return KEYS.format(groups=groups, classes=classes, verb=verb)


def _is_path(text: str) -> bool:
    """Return True for a bare argument that is a folder or URL and not key=value."""
    try:
        there = Path(text).exists()
    except OSError:  # longer than a path may be
        there = False
    return there or is_url(text) or ("=" not in text and text[-1:] not in "]}")


def _not_understood(
    text: str, verb: str, parser: argparse.ArgumentParser, following: str
) -> InputError:
    if not text.startswith("-"):
        hint = "; quote what has spaces: 'key={a: b}'" if text[-1:] in "]}" else ""
        return InputError(f"{text!r}: expected a flag or key=value{hint}")
    # A key is easily taken for a flag.
    from marl_pool.config.sections import VERBS as COMPOSED

    flag, _, value = text.partition("=")
    key = flag.lstrip("-").replace("-", "_")
    if verb in COMPOSED and key.partition(".")[0] in COMPOSED[verb].keys:
        return InputError(
            f"{text!r}: expected key=value, got a flag. Did you mean "
            f"{key}={value or following}?"
        )
    flags = [flag for action in parser._actions for flag in action.option_strings]
    near = difflib.get_close_matches(text.partition("=")[0], flags, n=1)
    hint = f" Did you mean {near[0]}?" if near else ""
    return InputError(f"unknown flag {text!r}: choose from {', '.join(flags)}.{hint}")
