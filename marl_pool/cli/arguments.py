"""Flags of the command line, and the split from key=value overrides."""

import argparse
import difflib
import os
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from marl_pool import __version__
from marl_pool.cli.help import HELP, KEYS, STATUS
from marl_pool.options import names
from marl_pool.options.plugins import commands
from marl_pool.utils.errors import InputError
from marl_pool.utils.text import is_url

PRETRAINED = "pretrained"
KINDS = (
    "pooling",
    "envs",
    "critics",
    "encoders",
    "perturbations",
    "tokenizers",
    "policies",
    "strategies",
    "tasks",
    "teachers",
    "suites",
    "experiments",
    PRETRAINED,
)
"""Registries and presets that `marl-pool list` shows."""
CLUSTER = "existing Ray cluster, host:port or auto"
STORAGE = {"storage": "URL below which the run is mirrored, such as s3://bucket/runs"}
KEY_FLAGS: dict[str, dict[str, str]] = {
    "train": {
        "resources.num_env_runners": "processes that sample",
        "resources.num_learners": "processes that learn",
        "resources.num_gpus_per_env_runner": "GPUs of each process that samples",
        "resources.num_gpus_per_learner": "GPUs of each process that learns",
        "resources.address": CLUSTER,
        **STORAGE,
    },
    "evolve": {
        "resources.num_workers": "processes that play; 0: this one",
        "resources.num_gpus_per_worker": "GPUs of each process that plays",
        "resources.address": CLUSTER,
        **STORAGE,
    },
    "clone": STORAGE,
    "fit": STORAGE,
    "sweep": {
        "sweep.concurrency": "trials at a time",
        "sweep.cpus_per_trial": "CPUs, and threads of torch, of each trial",
        "sweep.gpus_per_trial": "GPUs of each trial",
        "sweep.seed_sd": "standard deviation of the return between seeds, if known",
        "sweep.trials": "trials of a search",
        "sweep.address": CLUSTER,
        **STORAGE,
    },
    "render": {"format": "file format: webm, mp4, gif or webp"},
}
"""Keys that a flag sets as well, by verb: ``--address`` is ``resources.address``."""
TRAINING = ("train", "evolve", "clone", "fit", "sweep", "resume")
"""Verbs that train."""
STUDIED = ("train", "fit")
"""Verbs whose runs can be the trials of a sweep."""


def parse(arguments: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """Split a command line into flags and key=value overrides.

    Args:
        arguments: at least one, without the program's name.

    Raises:
        InputError: an unknown verb or flag, or another argument that is no override.
    """
    # Reject an unknown command before its flags are read.
    parser, verbs = _parsers(arguments)
    if not arguments[0].startswith("-") and arguments[0] not in verbs:
        raise names.unknown("command", arguments[0], verbs)
    namespace, extra = parser.parse_known_args(arguments)
    if hasattr(namespace, "run"):
        extra = _take_runs(namespace, extra)
    # All other arguments have to be overrides.
    for text in extra:
        key, separator, value = text.partition("=")
        if text.startswith("-") or not separator:
            following = [*arguments[arguments.index(text) + 1 :], "-"][0]
            value = "VALUE" if following.startswith("-") else following
            raise _not_understood(
                text, namespace.verb, verbs.get(namespace.verb, parser), value
            )
        # Flags are easily mistaken for keys; some keys have a flag of their name.
        flag = f"--{key.lstrip('+').replace('_', '-')}"
        is_key = key in KEY_FLAGS.get(namespace.verb, ())
        if flag in verbs[namespace.verb]._option_string_actions and not is_key:
            raise InputError(f"{key}: expected the flag {flag} {value}, got {text!r}")
    _validate_once(namespace, extra)
    return namespace, extra


def _take_runs(namespace: argparse.Namespace, extra: list[str]) -> list[str]:
    """Set RUN to the paths among the bare arguments, and return all others.

    argparse takes the first bare arguments for RUN, wherever RUN stands.
    """
    takes_many = isinstance(namespace.run, list)
    runs = filter(None, namespace.run if takes_many else [namespace.run])
    flags = [text for text in extra if text.startswith("-")]
    words = [*runs, *(text for text in extra if text not in flags)]
    paths = [word for word in words if _is_path(word)]
    namespace.run = paths if takes_many else next(iter(paths), None)
    surplus = [] if takes_many else paths[1:]
    return [*(word for word in words if word not in paths), *surplus, *flags]


def _validate_once(namespace: argparse.Namespace, overrides: list[str]) -> None:
    """Reject two options of one group, and in a sweep two values of any key.

    Elsewhere the last value of a key counts, so that arguments can be appended to a
    command. In a sweep, this would drop values of a grid.
    """
    pairs = [text.lstrip("+").partition("=")[::2] for text in overrides]
    flags = {key: getattr(namespace, key) for key in KEY_FLAGS.get(namespace.verb, ())}
    pairs += [(key, value) for key, value in flags.items() if value is not None]
    # pooling=max and pooling.name=avg set the same option. But a user's class may take
    # the options of a built-in one.
    pairs = [
        (key if ":" in value else key.removesuffix(".name"), value)
        for key, value in pairs
    ]
    if len({key for key, _ in pairs}) == len(pairs):
        return
    from marl_pool.config.verbs import VERBS as COMPOSED

    groups = {group for verb in COMPOSED.values() for group in verb.config_groups}
    first: dict[str, str] = {}
    for key, value in pairs:
        is_single = key in groups or namespace.verb == "sweep"
        if is_single and first.setdefault(key, value) != value:
            kind = "option" if key in groups else "value"
            raise InputError(
                f"{key}: expected one {kind}, got {first[key]} and {value}"
            )


def answer_shell() -> None:
    """Print the completions that a shell asks for, and exit; otherwise do nothing."""
    if "_ARGCOMPLETE" not in os.environ:
        return
    with suppress(ImportError):
        import argcomplete

        from marl_pool.config.verbs import VERBS as COMPOSED

        parser, verbs = _parsers([])
        # The parser has no argument for keys, so add one to each verb.
        for verb in COMPOSED.keys() & verbs.keys():
            keys: Any = verbs[verb].add_argument("keys", nargs="*")
            keys.completer = partial(_completions, verb)
        argcomplete.autocomplete(parser)


def _completions(verb: str, prefix: str, **_: Any) -> list[str]:
    from marl_pool.config.suitability import options_for
    from marl_pool.config.verbs import VERBS as COMPOSED

    group, separator, _value = prefix.partition("=")
    if separator and group in COMPOSED[verb].config_groups:
        return [f"{group}={option}" for option in options_for(verb, group)]
    return [f"{key}=" for key in sorted(COMPOSED[verb].keys)]


def print_help() -> None:
    """Print the summary of all verbs."""
    _parsers([])[0].print_help()


class _Parser(argparse.ArgumentParser):
    """A parser whose errors are one line, like all others."""

    def error(self, message: str) -> NoReturn:
        raise InputError(message)


def _parsers(
    arguments: list[str],
) -> tuple[_Parser, dict[str, argparse.ArgumentParser]]:
    """Return the parser of the command, and its verbs' parsers."""
    parser = _Parser(
        prog="marl-pool",
        description="Train, measure and watch policies that see sets of tokens.",
        epilog="`marl-pool VERB --help` shows a verb's options and examples.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=__version__)
    verbs = parser.add_subparsers(dest="verb", metavar="VERB", required=True)
    for verb, text in HELP.items():
        summary, _, epilog = text.partition("\n")
        # Listing a verb's groups reads a folder and loads pydantic: only if asked.
        if arguments[:1] == [verb] and "{keys}" in epilog:
            epilog = epilog.replace("{keys}", _keys(verb, arguments))
        if verb in TRAINING:
            epilog = epilog.replace("examples:", f"{STATUS}\nexamples:")
        verbs.add_parser(
            verb,
            help=summary,
            description=f"{summary[0].upper()}{summary[1:]}.",
            epilog=epilog,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )

    # Add one argument to several verbs.
    def add(verb_names: str, name: str, help_text: str, **options: Any) -> None:
        for verb in verb_names.split():
            verbs.choices[verb].add_argument(name, help=help_text, **options)

    # Flags of the verbs that train.
    flag: dict[str, Any] = {"action": "store_true"}
    folder: dict[str, Any] = {"metavar": "DIR", "type": _path}
    add("train evolve clone fit", "--run-dir", "folder of the new run", **folder)
    help_text = "continue a run of the same configuration in the folder or its mirror"
    add("train evolve clone fit sweep", "--or-resume", help_text, **flag)
    add("fit", "--dry-run", "print what it would cost and stop", **flag)
    add(
        "sweep",
        "--verb",
        "verb that makes each run: train (the default) or fit",
        dest="trained_by",
        metavar="VERB",
        type=_studied,
        choices=STUDIED,
        default=STUDIED[0],
    )
    add("sweep", "--sweep-dir", "folder of the sweep", **folder)
    add(
        "sweep",
        "--dry-run",
        "print the study, timed by short trainings, and stop",
        **flag,
    )
    add("sweep", "--search", "search ranges in place of a grid", **flag)
    for verb, keys in KEY_FLAGS.items():
        for key, help_text in keys.items():
            name = key.rpartition(".")[2].replace("_", "-")
            add(verb, f"--{name}", f"{help_text} ({key})", metavar="X", dest=key)

    # Arguments of the verbs that read runs.
    added = commands()
    readers = " ".join(
        ["evaluate", "render", *(verb for verb in added if added[verb].settings)]
    )
    help_text = "port of the page; default: a free one"
    add("play", "--port", help_text, metavar="N", default="0")
    add("play", "--no-browser", "only print the address", **flag)
    file: dict[str, Any] = {"metavar": "FILE", "type": _path}
    add("play", "--export", "new HTML file that needs no server", **file)
    add("report", "--out", "new HTML file; default: one in reports/", **file)
    run: dict[str, Any] = {"name": "run", "metavar": "RUN"}
    add("resume", help_text="folder or URL of the run or sweep", nargs="?", **run)
    help_text = "run or policy: a folder, a URL, or hf://USER/NAME; or several"
    add(f"{readers} play", help_text=help_text, nargs="*", **run)
    add("report", help_text="folders or URLs of runs", nargs="*", **run)
    add(readers, "--out", "new folder for the files written", **folder)
    add(
        f"resume {readers} play report export push",
        "--plugin",
        "package.module:Class that the run may use; may be given repeatedly",
        metavar="CLASS",
        action="append",
        default=[],
    )
    composers = f"train evolve clone fit sweep {readers} play report"
    yaml_folder = {**folder, "type": lambda text: Path(_path(text))}
    add(composers, "--config-dir", "folder of your own YAML", **yaml_folder)
    add(composers, "--cfg", "print the configuration and stop", **flag)

    # Arguments of the other verbs.
    for verb, command in added.items():
        for name, options in command.arguments.items():
            verbs.choices[verb].add_argument(name, **options)
    add("list", "kind", ", ".join(KINDS), metavar="KIND", nargs="?")
    add(
        "list",
        "name",
        "one of this kind, to show its options or card",
        metavar="NAME",
        nargs="?",
    )
    add("export", help_text="folder of a run, or of a policy", nargs="?", **run)
    add("export", "--to", "torch or onnx", metavar="FORMAT", required=True)
    add("export", "--out", "new file; default: RUN.pt2 or RUN.onnx", **file)
    add("export", "--action-mask", "let the file take an action mask", **flag)
    help_text = "run, or folder of a policy; then hf://USER/NAME"
    add("push", help_text=help_text, nargs="*", **run)
    add("push", "--license", "identifier of a license, such as mit", metavar="ID")
    add("push", "--private", "make a new repository private", **flag)
    add("push", "--force", "replace what no push has written", **flag)
    add("push", "--dry-run", "print the files and the card, and stop", **flag)
    add("show", help_text="folder of a run or sweep", nargs="?", **run)
    help_text = "folder with runs; default: the working directory"
    add("ls", "folder", help_text, metavar="DIR", nargs="?", default=".")
    add("help", "about", "a verb", metavar="VERB", nargs="?")
    return parser, dict(verbs.choices)


def _path(text: str) -> str:
    if not text:
        raise argparse.ArgumentTypeError("expected a path, got an empty text")
    # Shells leave the ~ of `--out=~/x` as it is.
    return os.path.expanduser(text)


def _studied(verb: str) -> str:
    """Return the verb of a sweep's runs; explain why other training verbs don't fit."""
    if verb in ("evolve", "clone"):
        expected = " or ".join(STUDIED)
        raise argparse.ArgumentTypeError(
            f"expected {expected}, got {verb!r}, which makes single runs only"
        )
    return verb


def _keys(verb: str, arguments: list[str]) -> str:
    from marl_pool.config.sections import Group
    from marl_pool.config.suitability import options_for
    from marl_pool.config.verbs import VERBS

    # Help is printed before the flags are parsed.
    fits = verb == "sweep" and "--verb fit" in " ".join(arguments).replace("=", " ")
    made_by = "sweep --verb fit" if fits else verb
    # List the groups, and the sections that accept a class by name.
    kind = VERBS[made_by]
    options = {
        name: "|".join(options_for(made_by, name)) for name in kind.config_groups
    }
    groups = "\n  ".join(f"{name}={text}" for name, text in options.items() if text)
    sections = (*kind.sections, *kind.changes)
    *most, last = [name for name in sections if isinstance(kind.section(name), Group)]
    classes = f"{', '.join(most)} and {last}" if most else last
    return KEYS.format(groups=groups, classes=classes, verb=verb)


def _is_path(text: str) -> bool:
    """Return True for a bare argument that is a folder or URL and not key=value."""
    try:
        exists = Path(text).exists()
    except OSError:  # longer than a path may be
        exists = False
    key, sign, _ = text.partition("=")
    # No key has a slash, as `sweeps/a/trials/seed=0` does before it exists.
    is_word = "/" in key if sign else text[-1:] not in "]}"
    return exists or is_url(text) or is_word


def _not_understood(
    text: str, verb: str, parser: argparse.ArgumentParser, following: str
) -> InputError:
    if not text.startswith("-"):
        hint = "; quote what has spaces: 'key={a: b}'" if text[-1:] in "]}" else ""
        return InputError(f"{text!r}: expected a flag or key=value{hint}")
    # Keys are easily mistaken for flags.
    from marl_pool.config.verbs import VERBS as COMPOSED

    flag, _, value = text.partition("=")
    key = flag.lstrip("-").replace("-", "_")
    flags = [flag for action in parser._actions for flag in action.option_strings]
    near = difflib.get_close_matches(flag, flags, n=1, cutoff=0.8)
    keys = []
    if verb in COMPOSED and key.partition(".")[0] in COMPOSED[verb].keys:
        keys = [key]
    elif verb in COMPOSED and not near and key != "run_dir":
        from marl_pool.config import compose
        from marl_pool.config.checks import places_of

        keys = places_of(key, compose(verb))
    if keys:
        pairs = " or ".join(f"{key}={value or following}" for key in keys)
        return InputError(
            f"{text!r}: expected key=value, got a flag. Did you mean {pairs}?"
        )
    if key == "run_dir" and any(action.dest == "run" for action in parser._actions):
        return InputError(
            f"{text!r}: expected the run without a flag: marl-pool {verb} "
            f"{value or following}"
        )
    near = near or difflib.get_close_matches(flag, flags, n=1)
    hint = f" Did you mean {near[0]}?" if near else ""
    return InputError(f"unknown flag {text!r}: choose from {', '.join(flags)}.{hint}")
