"""Upload of a policy to a repository of the Hugging Face Hub, in one commit."""

from collections.abc import Collection, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from marl_pool.files.hub import HubFolder, explain_hub_errors, hub_client
from marl_pool.files.manifest import MANIFEST, fingerprint, read_manifest
from marl_pool.policies.storage import CONFIG, WEIGHTS
from marl_pool.utils.errors import InputError

CARD, RESULTS, REPLAY = "README.md", "results.json", "replay"
PICTURES = (".webp", ".gif", ".mp4", ".webm")
"""Suffixes of videos and animations; Markdown shows the first two as images."""
NAMES = (
    *(CONFIG, WEIGHTS, MANIFEST, CARD, RESULTS),
    *(f"{REPLAY}{suffix}" for suffix in PICTURES),
)
"""All files that a push may write, replace or remove."""
MADE_BY_HUB = ".gitattributes"
LONGEST_FILE = 1 << 20
"""Largest card and manifest that are compared, in bytes."""
SHOWN = 3
"""Maximum number of files in a message."""


def push(
    files: Mapping[str, Path],
    target: HubFolder,
    message: str,
    *,
    private: bool = False,
    force: bool = False,
) -> str:
    """Commit files to the main branch of a repository, created if it is missing.

    Earlier commits stay. Files that are not in `NAMES` are left alone.

    Args:
        files: local files, by their names in the repository.
        target: the repository.
        message: first line of the commit.
        private: make a new repository private.
        force: replace files that no push has written.

    Returns:
        The commit.

    Raises:
        InputError: no access or no network; without ``force``, a repository of
            something else or whose card was edited; with ``private``, a public one.
    """
    client = hub_client()
    from huggingface_hub import CommitOperationAdd, CommitOperationDelete, errors

    with explain_hub_errors(target):
        try:
            info = client.model_info(target.repository)
        except errors.GatedRepoError:
            raise
        except errors.RepositoryNotFoundError:
            client.create_repo(target.repository, private=private)
            info = client.model_info(target.repository)
        if private and not info.private:
            raise InputError(
                "--private: expected a private or a new repository, got "
                f"{target}, which is public"
            )
        present = {file.rfilename for file in info.siblings or ()} - {MADE_BY_HUB}
        if not force:
            _validate_replaceable(client, target, info.sha, present, files)
        obsolete = sorted(present & {*NAMES} - files.keys())
        commit = client.create_commit(
            target.repository,
            [
                *(CommitOperationAdd(name, str(files[name])) for name in files),
                *(CommitOperationDelete(name) for name in obsolete),
            ],
            commit_message=message,
            # Fail if somebody has committed since.
            parent_commit=info.sha,
        )
    return str(commit.oid)


def _validate_replaceable(
    client: Any,
    target: HubFolder,
    head: str,
    present: Collection[str],
    files: Collection[str],
) -> None:
    if not present:
        return
    if {CARD, MANIFEST} <= {*present}:
        place = {"repo_id": target.repository, "revision": head}
        entries = client.get_paths_info(paths=[CARD, MANIFEST], **place)
        if all(entry.size <= LONGEST_FILE for entry in entries):
            client.hf_hub_download(filename=MANIFEST, **place)
            card = Path(client.hf_hub_download(filename=CARD, **place))
            with suppress(InputError):  # a damaged manifest
                if read_manifest(card.parent).get("card") == fingerprint(card):
                    return
    names = sorted(present)
    present_names = ", ".join(names[:SHOWN]) + (", …" if len(names) > SHOWN else "")
    replaced = ", ".join(sorted({*present} & {*files})) or "none of them"
    raise InputError(
        f"{target}: expected a new repository, or one whose {CARD} is as `marl-pool "
        f"push` wrote it, got one with {present_names}; --force replaces {replaced}, "
        "which the earlier commits keep"
    )
