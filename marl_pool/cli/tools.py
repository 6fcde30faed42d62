"""Verbs for parts and policies: list, help, check-env and export."""

from argparse import Namespace
from pathlib import Path

from marl_pool.api.train import compose_run
from marl_pool.cli.arguments import KINDS, PRETRAINED, parse, print_help
from marl_pool.cli.common import open_run, print_paths
from marl_pool.options import names
from marl_pool.options.overrides import parse as parse_override
from marl_pool.utils.errors import InputError
from marl_pool.utils.text import print_note, printable

PRESETS = ("suites", "experiments")
"""Kinds that are files instead of classes."""
CHECK_SECONDS = 60.0
"""Time limit of the check of each rule, unless ``env_timeout`` is set."""


def list_registered(arguments: Namespace, overrides: list[str]) -> int:
    """Print what is registered, of one kind or all, or what one name stands for."""
    if arguments.kind and arguments.kind not in KINDS:
        raise names.unknown("kind", arguments.kind, KINDS)
    if arguments.name:
        print(_options(arguments.kind, arguments.name), end="")
        return 0
    # Print one kind, or all kinds under headings.
    for kind in [arguments.kind] if arguments.kind else KINDS:
        if not arguments.kind:
            print(f"{kind}:")
        summaries = _summaries(kind)
        width = max(16, *(len(name) for name, _ in summaries))
        for name, text in summaries:
            print(f"  {name:<{width}} {text}")
    return 0


def check_env(arguments: Namespace, overrides: list[str]) -> int:
    """Compare an environment with its contract, and print one line per rule."""
    for text in overrides:
        if not text.startswith(("env=", "env.", "+env.", "env_timeout=")):
            raise InputError(
                "check-env: expected env=NAME, env.KEY=… or env_timeout=SECONDS, got "
                f"{text!r}"
            )
    config = compose_run("train", overrides, None)
    from marl_pool.envs.checks import check_env
    from marl_pool.envs.timeout import limit_calls
    from marl_pool.training.settings import TrainConfig

    assert isinstance(config, TrainConfig)
    with limit_calls(config.env_timeout or CHECK_SECONDS):
        findings = check_env(**config.env)
    rules, previous = dict[str, str](), ""
    for name, problem in findings.items():
        # One problem can break many rules: describe it once.
        first = rules.setdefault(problem, name)
        text = f"for the reason of {first!r}" if first != name else problem
        text = "likewise" if problem == previous else text
        previous = problem
        print(printable(f"failed  {name}: {text}" if problem else f"ok      {name}"))
    return 1 if any(findings.values()) else 0


def _summaries(kind: str) -> list[tuple[str, str]]:
    """Return each name of a kind with its summary."""
    from marl_pool.config.option_files import files_of, summary_of
    from marl_pool.config.sections import registry
    from marl_pool.config.suitability import verbs_for
    from marl_pool.options.signatures import summary
    from marl_pool.pretrained import pretrained_names, pretrained_summary

    if kind == PRETRAINED:
        return [(name, pretrained_summary(name)) for name in pretrained_names()]
    if kind in PRESETS:
        group = kind.removesuffix("s")
        files = sorted(files_of(group).items())
        verbs = {name: ", ".join(verbs_for(group, name)) for name, _ in files}
        width = max(map(len, verbs.values()))
        return [
            (name, f"{verbs[name]:<{width}} {summary_of(file)}".strip())
            for name, file in files
        ]
    return [(name, summary(target)) for name, target in sorted(registry(kind).items())]


def _options(kind: str, name: str) -> str:
    """Return the options of a name as YAML, a preset's file, or a policy's card."""
    from marl_pool.config import files_of, registry
    from marl_pool.config.describe import commented_options

    if kind in PRESETS:
        group = kind.removesuffix("s")
        files = files_of(group)
        if name not in files:
            raise names.unknown(group, name, files)
        return files[name].read_text(encoding="utf-8")
    if kind == PRETRAINED:
        from marl_pool.evaluation.pretrained_card import card_text

        return card_text(name)
    if name not in registry(kind):
        raise names.unknown(kind, name, registry(kind))
    return commented_options(kind, name)


def show_help(arguments: Namespace, overrides: list[str]) -> int:
    """Print the summary of all verbs, or the help of one."""
    if arguments.about is None:
        print_help()
    else:
        parse([arguments.about, "--help"])  # prints it and exits
    return 0


def export(arguments: Namespace, overrides: list[str]) -> int:
    """Write each policy of a run, or of a folder, to a separate file."""
    from marl_pool.evaluation.standalone import find_standalone
    from marl_pool.policies.export import SUFFIXES, export_policy
    from marl_pool.policies.storage import load_modules
    from marl_pool.utils.progress import Progress

    if arguments.to not in SUFFIXES:
        raise names.unknown("format", arguments.to, SUFFIXES)
    pretrained = None
    for text in overrides:
        override = parse_override(text)
        if override.key != PRETRAINED:
            raise InputError(f"export takes no key but {PRETRAINED}, got {text!r}")
        pretrained = str(override.value)
    standalone = find_standalone(arguments.run, pretrained)
    if standalone is None:
        run = open_run("export", arguments.run)
        name, folder = run.name, run.policy_path()
    else:
        name, folder = standalone.name, standalone.folder
    modules, _ = load_modules(folder, plugins=arguments.plugin)
    # A single policy goes to the file itself, several go to files beside it.
    out = Path(arguments.out or f"{name}{SUFFIXES[arguments.to]}")
    for module, policy in modules.items():
        path = out.with_stem(f"{out.stem}-{module}") if len(modules) > 1 else out
        with Progress(0, unit="exports") as progress:
            progress.doing = f"exporting {module}"
            difference = export_policy(
                policy, path, arguments.to, masked=arguments.action_mask
            )
        message = f"{module}: actions differ by at most {difference:.1g}"
        print_note(printable(message))
        print_paths([path])
    return 0
