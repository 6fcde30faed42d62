"""Videos of several runs side by side."""

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from marl_pool.evaluation.loading import EvaluationTarget, cpu_threads
from marl_pool.evaluation.settings import RenderSettings
from marl_pool.evaluation.standalone import new_folder_for
from marl_pool.evaluation.video.render import load_target, video_name, write_video
from marl_pool.utils.atomic import make_folder
from marl_pool.utils.errors import InputError

if TYPE_CHECKING:
    from marl_pool.runs import Run


class SideBySideVideo:
    """A video with a column for each run.

    Args:
        settings: of the video.
        perturbation: ``{"name": …, **options}``; None or the name "none" for none.
        out: a new folder for the video; None for one in ``evaluations/``.

    Raises:
        InputError: the folder exists.
    """

    def __init__(
        self,
        settings: RenderSettings,
        perturbation: Mapping[str, Any] | None,
        out: str | None,
    ) -> None:
        self.settings, self.perturbation = settings, perturbation
        self.folder = new_folder_for("videos") if out is None else Path(out)
        if self.folder.exists():
            raise InputError(f"{self.folder} exists; choose another --out")
        self.targets: dict[str, EvaluationTarget] = {}

    def add(
        self,
        path: str,
        run: "Run",
        env: Mapping[str, Any] | None,
        plugins: Collection[str],
    ) -> None:
        """Load a run for the next column.

        Args:
            path: the run's path as the user typed it, a fallback for its name.
            run: the run.
            env: as in `render_run`.
            plugins: ``package.module:Class`` names that files of the run may name.
        """
        name = Path(path).name
        if name in self.targets:
            name = path
        with cpu_threads(self.settings.threads):
            self.targets[name] = load_target(run, self.settings, env, plugins)

    def write(self) -> Path:
        """Write the video and return its path."""
        make_folder(self.folder)
        path = self.folder / f"{video_name(self.perturbation)}.webm"
        with cpu_threads(self.settings.threads):
            write_video(path, self.targets, self.settings, self.perturbation)
        return path
