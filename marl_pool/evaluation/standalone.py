"""A policy without a run, made into one, so that it is evaluated like any other."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from marl_pool.pretrained import pretrained_path
from marl_pool.utils.atomic import discard
from marl_pool.utils.errors import InputError

if TYPE_CHECKING:
    from marl_pool.runs import Run

POLICY, RUN = "config.json", "config.yaml"
"""The file that tells the folder of a policy, and that of a run."""
RESULTS = ("evaluation", "videos")
"""Folders of a run that are worth keeping."""


@dataclass(frozen=True)
class StandalonePolicy:
    """A policy without a run.

    Attributes:
        name: of what is made of it.
        folder: of the policy.
        source: what the user named.
        env: the world that it acts in, if its folder says so.
    """

    name: str
    folder: Path
    source: str
    env: dict[str, Any] | None

    @contextmanager
    def as_run(
        self, env: Mapping[str, Any], out: str | None, verb: str
    ) -> "Iterator[Run]":
        """Yield a run of this policy; nothing of it stays if no results were made.

        Args:
            env: the world, complete.
            out: its folder; None for a new one in ``evaluations/``.
            verb: what makes it.

        Raises:
            InputError: the folder exists or cannot be made.
        """
        from marl_pool.policies.storage import copy_policy  # brings torch
        from marl_pool.runs import Run

        path = new_folder_for(self.name) if out is None else Path(out)
        if path.exists():
            raise InputError(
                f"{path} exists; choose another --out or `marl-pool {verb} {path}`"
            )
        run = Run.create(path, {"env": dict(env), "policy_from": self.source}, verb)
        try:
            with run.save_policy_dir() as folder:
                copy_policy(self.folder, folder)
            yield run
        finally:
            if not any(any((path / name).glob("*")) for name in RESULTS):
                discard(path)


def find_standalone(path: str | None, pretrained: str | None) -> StandalonePolicy | None:
    """Find the policy that a user names, if it is one without a run.

    Args:
        path: of a run or of a policy.
        pretrained: name of a policy that is shipped with the package.

    Returns:
        None for the path of anything else than a policy.

    Raises:
        InputError: both or an unknown name, or a foreign folder.
    """
    if pretrained is not None:
        if path is not None:
            raise InputError(
                f"pretrained: expected null where a folder is given, got "
                f"{pretrained!r} and {path}"
            )
        folder = pretrained_path(pretrained)
        return _standalone(pretrained, folder, f"pretrained={pretrained}")
    if path is None:
        return None
    folder = Path(path)
    if (folder / RUN).exists() or not (folder / POLICY).is_file():
        return None
    absolute = folder.absolute()
    named = absolute if absolute.name != "policy" else absolute.parent
    return _standalone(named.name, folder, str(absolute))


def _standalone(name: str, folder: Path, source: str) -> StandalonePolicy:
    from marl_pool.policies.storage import world_of  # brings torch

    return StandalonePolicy(name, folder, source, world_of(folder))


def new_folder_for(name: str) -> Path:
    """``evaluations/<date-time>-<name>``, or where it exists the next that does not."""
    dated = f"{datetime.now():%Y%m%d-%H%M%S}-{name}"
    path, number = Path("evaluations") / dated, 1
    while path.exists():
        number += 1
        path = path.with_name(f"{dated}-{number}")
    return path
