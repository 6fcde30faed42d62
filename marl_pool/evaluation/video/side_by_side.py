"""One video of several runs."""

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from marl_pool.evaluation.loading import EvaluationTarget, cpu_threads
from marl_pool.evaluation.standalone import new_folder_for
from marl_pool.evaluation.video.render import film_to, load_subject, video_name
from marl_pool.utils.atomic import make_folder
from marl_pool.utils.errors import InputError

if TYPE_CHECKING:
    from marl_pool.runs import Run


class SideBySide:
    """Runs that are filmed together, a column each.

    Args:
        settings: of `RenderSettings` and ``perturbation``, as plain data.
        out: a new folder for the video; None for one in ``evaluations/``.

    Raises:
        InputError: the folder exists.
    """

    def __init__(self, settings: Mapping[str, Any], out: str | None) -> None:
        self.settings = settings
        self.folder = new_folder_for("videos") if out is None else Path(out)
        if self.folder.exists():
            raise InputError(f"{self.folder} exists; choose another --out")
        self.subjects: dict[str, EvaluationTarget] = {}

    def add(
        self,
        path: str,
        run: "Run",
        settings: Mapping[str, Any],
        plugins: Collection[str],
    ) -> list[Path]:
        """Read a run; nothing is written yet.

        Args:
            path: what the user called it.
            run: the same, opened.
            settings: for this run.
            plugins: ``package.module:Class`` names that the run may use.
        """
        name = Path(path).name
        if name in self.subjects:
            name = path
        with cpu_threads(settings["threads"]):
            self.subjects[name] = load_subject(run, settings, plugins)
        return []

    def write(self) -> Path:
        """Film them all and return the video's path."""
        make_folder(self.folder)
        path = self.folder / f"{video_name(self.settings)}.webm"
        with cpu_threads(self.settings["threads"]):
            film_to(path, self.subjects, self.settings)
        return path
