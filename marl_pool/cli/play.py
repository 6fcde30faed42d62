"""The verb play: a live page of policies in the browser."""

from argparse import Namespace
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from marl_pool.cli.common import composed, print_paths
from marl_pool.cli.evaluate import Reader
from marl_pool.utils.errors import InputError

if TYPE_CHECKING:
    from marl_pool.evaluation.loading import EvaluationTarget
    from marl_pool.evaluation.settings import PlaySettings


class Play(Reader):
    """Serve a live page of runs or policies, or export one."""

    verb = "play"
    settings: "PlaySettings"

    @classmethod
    def main(cls, arguments: Namespace, overrides: list[str]) -> int:
        """Compose the settings, load the policies, and serve or export them."""
        if arguments.export is None:
            import websockets  # noqa: F401 - missing ones are told before any loading
        port = _port(arguments.port)
        config = composed(cls.verb, arguments, overrides)
        if config is None:
            return 0
        reader = cls(arguments, **config)
        # A device would only add its latency to single environments.
        if reader.settings.device != "cpu":
            raise InputError(f"device: expected cpu, got {reader.settings.device}")
        targets = reader.load()
        if arguments.export is None:
            reader.serve(targets, port)
            return 0
        print_paths([reader.export(targets, Path(arguments.export))])
        return 0

    def load(self) -> "dict[str, EvaluationTarget]":
        """Load all policies by the name of their run; they play in equal environments.

        Raises:
            InputError: policies of different environments.
        """
        from marl_pool.evaluation.loading import EvaluationTarget
        from marl_pool.evaluation.standalone import find_standalone

        targets: dict[str, EvaluationTarget] = {}
        for path in self.arguments.run or [None]:
            alone = find_standalone(path, self.settings.pretrained)
            # A standalone policy needs a run for as long as it is read.
            with TemporaryDirectory() as folder:
                out = str(Path(folder) / alone.name) if alone else None
                with self.opened(path, out) as (run, options):
                    target = EvaluationTarget.from_run(run, self.settings, **options)
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

    def serve(self, targets: "Mapping[str, EvaluationTarget]", port: int) -> None:
        """Serve the page until Ctrl-C, which is the way to end it.

        Raises:
            StoppedError: an environment exceeded ``env_timeout``.
        """
        from marl_pool.evaluation.loading import computing
        from marl_pool.play.server import play
        from marl_pool.play.session import Session

        settings, browser = self.settings, not self.arguments.no_browser
        with (
            computing(settings.threads, settings.kernels, settings.env_timeout),
            suppress(KeyboardInterrupt),
        ):
            play(
                lambda: Session(targets, settings.seed, settings.stochastic),
                port=port,
                browser=browser,
            )

    def export(self, targets: "Mapping[str, EvaluationTarget]", path: Path) -> Path:
        """Write a page that needs no server; return its path.

        Raises:
            StoppedError: an environment exceeded ``env_timeout``.
        """
        from marl_pool.evaluation.loading import computing
        from marl_pool.play.export import export

        settings = self.settings
        with computing(settings.threads, env_timeout=settings.env_timeout):
            return export(targets, path, settings.seed)


def _port(text: str | None) -> int:
    if text is None:
        return 0
    if not (text.isascii() and text.isdigit() and int(text) < 1 << 16):
        raise InputError(f"--port: expected a number from 0 to 65535, got {text!r}")
    return int(text)
