"""The verb that exports policies for other programs."""

import sys
from argparse import Namespace
from pathlib import Path

from marl_pool.cli.common import open_run, print_paths
from marl_pool.utils import names
from marl_pool.utils.text import printable


def export(arguments: Namespace, overrides: list[str]) -> int:
    """Write each policy of a run, or of a folder, to a file of its own."""
    from marl_pool.evaluation.standalone import find_standalone
    from marl_pool.policies.export import SUFFIXES, export_policy
    from marl_pool.policies.storage import load_modules
    from marl_pool.utils.progress import Progress

    if arguments.to not in SUFFIXES:
        raise names.unknown("format", arguments.to, SUFFIXES)
    standalone = find_standalone(arguments.run, None)
    if standalone is None:
        run = open_run("export", arguments.run)
        name, folder = run.path.name, run.policy_path()
    else:
        name, folder = standalone.name, standalone.folder
    modules, _ = load_modules(folder, plugins=arguments.plugin)
    # A single policy has the file itself, several have files beside it.
    out = Path(arguments.out or f"{name}{SUFFIXES[arguments.to]}")
    for module, policy in modules.items():
        path = out.with_stem(f"{out.stem}-{module}") if len(modules) > 1 else out
        with Progress(0, unit="exports") as progress:
            progress.doing = f"exporting {module}"
            difference = export_policy(policy, path, arguments.to)
        told = f"{module}: actions differ by at most {difference:.1g}"
        print(printable(told), file=sys.stderr)
        print_paths([path])
    return 0
