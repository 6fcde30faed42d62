"""Policies without a run: folders written by `save_policy`, and pretrained ones."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from marl_pool.files.atomic import discard, removed_if_empty
from marl_pool.files.hub import HubFolder, is_hub
from marl_pool.pretrained import CONFIG as POLICY_CONFIG
from marl_pool.pretrained import PREFIX, pretrained_path
from marl_pool.runs.metrics import free
from marl_pool.runs.run import CONFIG, OUTPUTS, POLICY, Run
from marl_pool.utils.errors import InputError
from marl_pool.utils.paths import dated, user_path


@dataclass(frozen=True)
class StandalonePolicy:
    """A saved policy without a run.

    Attributes:
        name: name for folders of its results.
        folder: folder of the policy.
        source: absolute path, ``pretrained=NAME``, or ``hf://…`` with the commit.
        env: environment that it acts in, if its folder names one.
    """

    name: str
    folder: Path
    source: str
    env: dict[str, Any] | None

    @contextmanager
    def new_run(
        self, env: Mapping[str, Any], out: str | None, verb: str
    ) -> Iterator[Run]:
        """Yield a new run that holds this policy and its results.

        As a run, the folder can be reported, rendered and evaluated again later. From
        Python, `marl_pool.evaluate` measures a policy without a run. The new run is
        removed on exit if no results were written to it.

        ``env`` has all options of the environment, ``verb`` is the command that writes
        the results, and ``out`` the new folder, by default one in ``evaluations/``.

        Raises:
            InputError: the folder exists or cannot be created.
        """
        from marl_pool.policies.storage import copy_policy  # imports torch

        # The run states where its policy comes from, and holds a copy of it.
        path = results_folder(self.name, out, f" or `marl-pool {verb} {out}`")
        parent_existed = path.parent.exists()
        run = Run.create(path, {"env": dict(env), "policy_from": self.source}, verb)
        try:
            with run.save_policy_dir() as folder:
                copy_policy(self.folder, folder)
            yield run
        finally:
            if not any(any((path / name).glob("*")) for name in OUTPUTS):
                discard(path)
                if not parent_existed:
                    with suppress(OSError):  # another process has written to it
                        path.parent.rmdir()


def find_standalone(
    path: str | None, pretrained: str | None
) -> StandalonePolicy | None:
    """Find the policy in a folder or on the hub, or the one shipped as ``pretrained``.

    Returns:
        None for a path that is not a policy's, such as a run's.

    Raises:
        InputError: both are given, the name is unknown, or the policy cannot be read.
    """
    if pretrained is not None:
        if path is not None:
            raise InputError(
                f"pretrained: expected null where a folder is given, got "
                f"{pretrained!r} and {path}"
            )
        folder, source = pretrained_path(pretrained), f"{PREFIX}{pretrained}"
    elif path is None:
        return None
    elif is_hub(path):
        from marl_pool.policies.storage import fetch_policy

        folder, place = fetch_policy(path)
        source = str(place)
    else:
        # A run's folder is evaluated as a run.
        folder = user_path(path)
        if (folder / CONFIG).exists() or not (folder / POLICY_CONFIG).is_file():
            return None
        source = str(folder.absolute())
    from marl_pool.policies.storage import load_env_config  # imports torch

    return StandalonePolicy(name_of(source), folder, source, load_env_config(folder))


def name_of(source: str) -> str:
    """Return the name of the policy with this `StandalonePolicy.source`."""
    if is_hub(source):
        return HubFolder.parse(source).name
    path = Path(source.removeprefix(PREFIX))
    # The policy of a run is named after the run.
    return (path.parent if path.name == POLICY else path).name


@contextmanager
def new_results(out: str | None, name: str = "") -> Iterator[Path]:
    """Yield the path of `results_folder`; the folder is removed if it stays empty."""
    folder = results_folder(name, out)
    with removed_if_empty(folder):
        yield folder


def results_folder(name: str, out: str | None, hint: str = "") -> Path:
    """Return the path of a new folder for results that belong to no run.

    Without ``out`` it is ``evaluations/<date-time>-<name>``, numbered if that exists.

    Raises:
        InputError: ``out`` exists; the message also recommends ``hint``.
    """
    default = Path("evaluations") / dated(name)
    folder = free(default) if out is None else user_path(out)
    if folder.exists():
        raise InputError(f"{folder} exists; choose another --out{hint}")
    return folder
