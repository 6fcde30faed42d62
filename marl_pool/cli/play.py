"""The verb play: a live page of policies in the browser."""

from argparse import Namespace
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from marl_pool.cli.common import composed, print_paths
from marl_pool.cli.evaluate import Reader
from marl_pool.utils.errors import InputError

if TYPE_CHECKING:
    from marl_pool.evaluation.loading import EvaluationTarget


def play(arguments: Namespace, overrides: list[str]) -> int:
    """Serve a live page of runs or policies, or export one.

    Raises:
        StoppedError: an environment exceeded ``env_timeout``.
    """
    if arguments.export is None:
        import websockets  # noqa: F401 - missing ones are told before any loading
    port = arguments.port
    if not (port.isascii() and port.isdigit() and int(port) < 1 << 16):
        raise InputError(f"--port: expected a number from 0 to 65535, got {port!r}")
    config = composed("play", arguments, overrides)
    if config is None:
        return 0
    reader = Reader("play", arguments, config)
    settings = reader.settings
    # A device would only add its latency to single environments.
    if settings.device != "cpu":
        raise InputError(f"device: expected cpu, got {settings.device}")
    targets = _load(reader)
    from marl_pool.evaluation.loading import computing

    if arguments.export is not None:
        from marl_pool.play.export import export

        with computing(settings.threads, env_timeout=settings.env_timeout):
            page = export(targets, Path(arguments.export), settings.seed)
        print_paths([page])
        return 0
    from marl_pool.play import server
    from marl_pool.play.session import Session

    # Ctrl-C is the way to end it.
    with (
        computing(settings.threads, settings.kernels, settings.env_timeout),
        suppress(KeyboardInterrupt),
    ):
        server.play(
            lambda: Session(targets, settings.seed, settings.stochastic),
            port=int(port),
            browser=not arguments.no_browser,
        )
    return 0


def _load(reader: Reader) -> "dict[str, EvaluationTarget]":
    """Load all policies by the name of their run; they play in equal environments.

    Raises:
        InputError: policies of different environments.
    """
    from marl_pool.evaluation.loading import EvaluationTarget
    from marl_pool.evaluation.standalone import find_standalone

    targets: dict[str, EvaluationTarget] = {}
    for path in reader.arguments.run or [None]:
        alone = find_standalone(path, reader.settings.pretrained)
        # A standalone policy needs a run for as long as it is read.
        with TemporaryDirectory() as folder:
            out = str(Path(folder) / alone.name) if alone else None
            with reader.opened(path, out) as (run, options):
                target = EvaluationTarget.from_run(run, reader.settings, **options)
        number = f" ({len(targets) + 1})" if target.source in targets else ""
        targets[target.source + number] = target
    first, *others = targets.items()
    for name, target in others:
        for key in {**first[1].env, **target.env}:
            ours, its = first[1].env.get(key), target.env.get(key)
            if ours != its:
                raise InputError(
                    f"play: expected policies of one environment, got env.{key} = "
                    f"{ours} in {first[0]} and {its} in {name}"
                )
    return targets
