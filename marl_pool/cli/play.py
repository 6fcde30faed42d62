"""The verb play: a live page of policies in the browser."""

from argparse import Namespace
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from typing_extensions import override

from marl_pool.cli.common import composed, print_paths
from marl_pool.cli.evaluate import Reader
from marl_pool.utils.errors import InputError

if TYPE_CHECKING:
    from marl_pool.evaluation.loading import EvaluationTarget
    from marl_pool.evaluation.settings import PlaySettings
    from marl_pool.runs import Run


class Play(Reader):
    """Serve a live page of runs or policies, or export one."""

    verb = "play"
    settings: "PlaySettings"

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.targets: dict[str, EvaluationTarget] = {}

    @override
    @classmethod
    def main(cls, arguments: Namespace, overrides: list[str]) -> int:
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
        reader.on_several()
        if arguments.export is None:
            reader.serve(port)
            return 0
        from marl_pool.play.export import export

        path = Path(arguments.export)
        print_paths([export(reader.targets, path, reader.settings.seed)])
        return 0

    @override
    def on_several(self) -> None:
        """Load all policies; they play in equal environments."""
        from marl_pool.evaluation.standalone import find_standalone

        for path in self.arguments.run or [None]:
            # A standalone policy needs a run for as long as it is read.
            with TemporaryDirectory() as folder:
                alone = find_standalone(path, self.settings.pretrained)
                self.on_one(path, str(Path(folder) / alone.name) if alone else None)
        first, *others = self.targets.items()
        for name, target in others:
            for key in {**first[1].env, **target.env}:
                ours, its = first[1].env.get(key), target.env.get(key)
                if ours != its:
                    raise InputError(
                        f"play: expected policies of one environment, got env.{key} = "
                        f"{ours} in {first[0]} and {its} in {name}"
                    )

    @override
    def act(self, run: "Run", **options: Any) -> list[Path]:
        """Load the policies of a run, named after it."""
        from marl_pool.evaluation.loading import EvaluationTarget

        target = EvaluationTarget.from_run(run, self.settings, **options)
        taken = target.source in self.targets
        number = f" ({len(self.targets) + 1})" if taken else ""
        self.targets[target.source + number] = target
        return []

    def serve(self, port: int) -> None:
        """Serve the page until Ctrl-C, which is the way to end it."""
        from marl_pool.evaluation.loading import computing
        from marl_pool.play.server import play
        from marl_pool.play.session import Session

        settings, browser = self.settings, not self.arguments.no_browser
        with (
            computing(settings.threads, settings.kernels),
            suppress(KeyboardInterrupt),
        ):
            play(
                lambda: Session(self.targets, settings.seed, settings.stochastic),
                port=port,
                browser=browser,
            )


def _port(text: str | None) -> int:
    if text is None:
        return 0
    if not (text.isascii() and text.isdigit() and int(text) < 1 << 16):
        raise InputError(f"--port: expected a number from 0 to 65535, got {text!r}")
    return int(text)
