"""The verb ``diagnose``."""

from argparse import Namespace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from marl_pool.cli.common import composed, print_paths
from marl_pool.cli.evaluate import Reader

if TYPE_CHECKING:
    from marl_pool.runs.run import Run


def diagnose(arguments: Namespace, overrides: list[str]) -> int:
    """Measure how much signal pooling heads keep, and compare several runs."""
    config = composed(arguments, overrides)
    if config is None:
        return 0
    reader = Reader("diagnose", arguments, **config)
    if len(arguments.run) < 2:
        return reader.process_single(_diagnose_run)
    runs = reader.open_all()
    from marl_pool.evaluation.comparable import validate_comparable
    from marl_pool_studies.adapool.diagnosis.run import compare

    validate_comparable(runs)
    print_paths(compare(reader.process_all(_diagnose_run), arguments.out))
    return 0


def _diagnose_run(run: "Run", settings: Any, **options: Any) -> list[Path]:
    from marl_pool_studies.adapool.diagnosis.run import diagnose_run

    return diagnose_run(run, settings, **options)
