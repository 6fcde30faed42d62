"""Saving and loading of policies: JSON and safetensors, formats without code.

A policy folder holds ``config.json`` (the modules, and the module of each group of
agents), ``model.safetensors`` (weights named module/parameter) and, optionally,
``manifest.json`` (checksums of both).
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from threading import get_ident
from typing import Any

import numpy as np
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from marl_pool.files.atomic import make_folder, new_binary_file, write_json
from marl_pool.files.hub import HubFolder, fetch, is_hub
from marl_pool.files.manifest import MANIFEST, validate_intact, write_manifest
from marl_pool.files.reading import ARRAY_BYTES, JSON_BYTES, read_json
from marl_pool.files.tensors import write_tensors
from marl_pool.options.construction import build
from marl_pool.options.names import UntrustedError, is_plug_in, name_of, trust
from marl_pool.options.signatures import (
    ANY_OTHER,
    check_argument,
    check_options,
    check_sizes,
    options_of,
)
from marl_pool.policies import POLICIES
from marl_pool.policies.actions import ActionSpec
from marl_pool.policies.base import Policy, SpecifiedPolicy
from marl_pool.pretrained import PREFIX, pretrained_path
from marl_pool.tokens import TokenSpec
from marl_pool.utils.errors import InputError, one_line
from marl_pool.utils.paths import user_path
from marl_pool.version import __version__

FORMAT = 1
CONFIG, WEIGHTS = "config.json", "model.safetensors"
FILE_BYTES = {CONFIG: JSON_BYTES, MANIFEST: JSON_BYTES, WEIGHTS: ARRAY_BYTES}
"""Files of a policy in a repository, and the largest size of each in bytes."""
SPACES = {"spec": TokenSpec, "action_space": ActionSpec}
"""Options of every policy that are built from their JSON first."""
UNSAVED = ("seed", "dropout", "token_dropout", "action")
"""Options that a policy's config may lack: only training needs them, or, for
`action`, only other values than the default are recorded."""
SPARE_PARAMETERS = 1_000_000
"""Parameters that a policy may create beyond four times those in its file."""


def save_policy(policy: SpecifiedPolicy, path: str | Path) -> None:
    """Write one policy to the folder ``path``; see `save_policies` for several.

    Raises:
        InputError: see `save_policies`.
    """
    save_policies({"policy": policy}, {}, path)


def save_policies(
    modules: Mapping[str, SpecifiedPolicy],
    groups: Mapping[str, str],
    path: str | Path,
    *,
    env: Mapping[str, Any] | None = None,
) -> None:
    """Write a folder for `load_policy` and `load_policies`.

    Args:
        modules: the policies, by module name.
        groups: the module name of each group of agents.
        path: created if missing; existing policy files in it are replaced.
        env: environment of the policies, ``{"name": …, **options}``, for a folder
            outside a run, or None to record none.

    Raises:
        InputError: what `load_policies` would reject: anything but a `SpecifiedPolicy`,
            a class that it cannot import or build again, options that are not
            JSON-ready, a group without a module, an ``env`` without a name; or a path
            that is no folder. No file is replaced.
    """
    check_argument("path", path, str | Path)
    modules = {name: _savable(name, policy) for name, policy in modules.items()}
    config = _plain_config(modules, groups, env)
    folder = user_path(path)
    try:
        make_folder(folder)
    except NotADirectoryError as error:
        raise InputError(
            f"path: expected a folder, got {folder}: {error.filename} is a file"
        ) from None
    weights = {
        f"{name}/{key}": tensor
        for name, policy in modules.items()
        for key, tensor in policy.state_dict().items()
    }
    write_tensors(weights, folder / WEIGHTS)
    write_json(folder / CONFIG, config, indent=2)
    write_manifest(folder, (CONFIG, WEIGHTS))


def _savable(name: str, policy: SpecifiedPolicy) -> SpecifiedPolicy:
    """Return the policy to save for a module; reject what cannot be loaded again."""
    if not isinstance(name, str):
        raise InputError(f"modules: expected names as text, got {name!r}")
    if not isinstance(policy, SpecifiedPolicy):
        raise InputError(
            f"module {name!r}: expected a SpecifiedPolicy, got a "
            f"{type(policy).__name__}"
        )
    original = policy.to_save()
    validate_class(original)
    return original


def _plain_config(
    modules: Mapping[str, SpecifiedPolicy],
    groups: Mapping[str, str],
    env: Mapping[str, Any] | None,
) -> dict[str, Any]:
    """Return the content of `CONFIG`, checked as it is by loading."""
    config = {
        "format": FORMAT,
        "package_version": __version__,
        "modules": {
            name: {"class": name_of(type(policy), POLICIES), **policy.config}
            for name, policy in modules.items()
        },
        "groups": dict(groups),
        **({} if env is None else {"env": dict(env)}),
    }
    # With Python's numbers in place of NumPy's.
    try:
        plain: dict[str, Any] = json.loads(json.dumps(config, default=_to_plain))
    except (TypeError, ValueError, RecursionError) as error:
        raise InputError(
            f"policy: expected options of JSON's types, got {one_line(error)}"
        ) from error
    _parse(plain)
    return plain


def validate_class(policy: SpecifiedPolicy) -> None:
    """Raise InputError for a policy of a class that `load_policy` could not build.

    Classes with a short name, as the package's own, are not checked.
    """
    name = name_of(type(policy), POLICIES)
    if ":" not in name:
        return
    if not is_plug_in(name):
        raise InputError(
            "policy: expected a class at the top of a module that other programs can "
            f"import, got {name}: write it in a file of its own"
        )
    options = options_of(type(policy)).keys()
    missing = options - {ANY_OTHER, *policy.config, *UNSAVED}
    if missing:
        raise InputError(
            f"policy: expected all options of {name} in its config, got none of "
            f"{', '.join(sorted(missing))}: add them after super().__init__"
        )
    # Spec and action space are passed by name, to ``**options`` all others.
    required = SPACES.keys() if ANY_OTHER in options else policy.config.keys()
    if unknown := required - options:
        raise InputError(
            f"policy: expected a constructor of {name} that names all options of its "
            f"config, got none of {', '.join(sorted(unknown))}"
        )


def _to_plain(option: Any) -> Any:
    plain = option.item() if isinstance(option, np.generic) else option
    if isinstance(plain, bool | int | float | str):
        return plain
    raise TypeError(f"{option!r}, a {type(option).__name__}")


def copy_policy(source: Path, folder: Path) -> None:
    """Copy the policy files of ``source``, and no others, into an existing folder."""
    validate_intact(source)
    for name in (CONFIG, WEIGHTS):
        try:
            content = (source / name).read_bytes()
            with new_binary_file(folder / name) as binary:
                binary.write(content)
        except FileNotFoundError:
            raise InputError(f"no policy in {source}: {name} is missing") from None
        except OSError as error:
            raise InputError(f"{source / name} cannot be copied: {error}") from None
    write_manifest(folder, (CONFIG, WEIGHTS))


def fetch_policy(name: str) -> tuple[Path, HubFolder]:
    """Fetch a policy from the Hugging Face Hub, unless it is in the cache.

    Args:
        name: ``hf://USER/NAME[@REVISION][/FOLDER]``.

    Returns:
        Its folder in the cache, and its name with the commit as the revision.

    Raises:
        InputError: a name of another form, no such policy, no access, or too large a
            file.
    """
    return fetch(HubFolder.parse(name), FILE_BYTES, optional=(MANIFEST,))


def load_policy(path: str | Path, *, plugins: Iterable[str] = ()) -> SpecifiedPolicy:
    """Read the only policy in the folder ``path``.

    Nothing is unpickled, ray is not needed, and a class outside the package is
    imported only if the caller lists it in ``plugins``. Parameters are loaded as
    float32, whatever their dtype was.

    Args:
        path: folder written by `save_policy` or by training (``RUN/policy``),
            ``pretrained=NAME``, or ``hf://USER/NAME[@REVISION][/FOLDER]`` on the
            Hugging Face Hub.
        plugins: names ``package.module:Class`` that the file may use.

    Raises:
        InputError: a missing, damaged or foreign file; a class not listed in
            ``plugins``; several policies in one folder (use `load_policies`).
    """
    modules, _ = load_modules(path, plugins=plugins)
    if len(modules) != 1:
        raise InputError(
            f"{path}: expected one policy, found {', '.join(map(repr, modules))}; "
            "use load_policies"
        )
    return next(iter(modules.values()))


def load_policies(
    path: str | Path, *, plugins: Iterable[str] = ()
) -> dict[str, Policy]:
    """Read the policies in the folder ``path``, by group; see `load_policy`.

    Raises:
        InputError: as by `load_policy`; a policy of no group (use `load_policy`).
    """
    modules, groups = load_modules(path, plugins=plugins)
    if not groups:
        raise InputError(
            f"{path}: expected policies of groups, got {', '.join(map(repr, modules))} "
            "of none; use load_policy"
        )
    return {group: modules[module] for group, module in groups.items()}


def load_modules(
    path: str | Path, *, plugins: Iterable[str] = ()
) -> tuple[dict[str, SpecifiedPolicy], dict[str, str]]:
    """Read all modules in the folder ``path``; see `load_policy`.

    Returns:
        The policies by module name, and for each group the name of its module.
    """
    check_argument("path", path, str | Path)
    folder = _local_folder(path)
    config = _read_config(folder)
    weights = _read_weights(folder / WEIGHTS)
    modules = {}
    for name, options in config.modules.items():
        module_weights = {
            key.rpartition("/")[2]: tensor
            for key, tensor in weights.items()
            if key.rpartition("/")[0] == name
        }
        with trust(plugins, path):
            modules[name] = _build(folder, options, module_weights)
    # Checksums last, since the errors above are more specific.
    validate_intact(folder)
    return modules, config.groups


def load_env_config(path: str | Path) -> dict[str, Any] | None:
    """Read the environment of the policies in the folder ``path``.

    It is as passed to `save_policies`; None if not recorded. See `load_policy`.
    """
    return _read_config(_local_folder(path)).env


def _local_folder(path: str | Path) -> Path:
    """Return the folder that a path or name stands for, downloaded if need be."""
    if is_hub(path):
        return fetch_policy(str(path))[0]
    if str(path).startswith(PREFIX):
        return pretrained_path(str(path).removeprefix(PREFIX))
    return user_path(path)


@dataclass(frozen=True)
class _PolicyFile:
    modules: dict[str, dict[str, Any]]
    groups: dict[str, str]
    env: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        if not self.modules:
            raise InputError("modules: expected at least one, got {}")
        for name, options in self.modules.items():
            if not isinstance(options.get("class"), str):
                raise InputError(f"module {name!r} is not a policy: it has no class")
        for group, module in self.groups.items():
            if module not in self.modules:
                raise InputError(f"group {group!r} has no module {module!r}")
        if len(self.modules) > 1 and not self.groups:
            raise InputError("groups: expected the module of each group, got none")
        if self.env is not None and not isinstance(self.env.get("name"), str):
            raise InputError("env: expected a mapping with a name")


def _read_config(folder: Path) -> _PolicyFile:
    path = folder / CONFIG
    try:
        return _parse(read_json(path))
    except (FileNotFoundError, NotADirectoryError):
        inside = folder / "policy"  # of a run
        hint = f"; try {inside}" if (inside / CONFIG).is_file() else ""
        raise InputError(f"no policy in {folder}: {CONFIG} is missing{hint}") from None
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:  # InputError is a ValueError
        raise InputError(f"{path} is damaged or foreign: {error}") from None


def _parse(config: Any) -> _PolicyFile:
    # Compare the format first: other files may lack any key.
    if not isinstance(config, dict) or config.get("format") != FORMAT:
        actual = config.get("format") if isinstance(config, dict) else config
        raise InputError(f"expected policy format {FORMAT}, got {actual!r:.80}")
    options = options_of(_PolicyFile)
    values = {key: config[key] for key in options if key in config}
    return _PolicyFile(**check_options("", values, options))


def _read_weights(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise InputError(f"no policy in {path.parent}: {WEIGHTS} is missing")
    try:
        return load_file(path)
    except (SafetensorError, OSError) as error:
        raise InputError(f"{path} is damaged: {error}") from None


@contextmanager
def _limit_parameters(count: int) -> Iterator[None]:
    """Reject a network with more than ``count`` parameters while it is being built.

    Each option has a bound, but their product may still exceed the memory.
    """
    # Count only what this thread builds.
    thread, built = get_ident(), 0

    def register(module: nn.Module, name: str, parameter: Any) -> None:
        nonlocal built
        if parameter is None or get_ident() != thread:
            return
        built += parameter.numel()
        if built > count:
            raise InputError(
                f"{CONFIG}: expected a network that fits the weights of {WEIGHTS}, got "
                f"more than {count:,} parameters"
            )

    hook = register_module_parameter_registration_hook(register)
    try:
        yield
    finally:
        hook.remove()


def _build(
    folder: Path, options: Mapping[str, Any], weights: dict[str, Any]
) -> SpecifiedPolicy:
    options = dict(options)
    cls = options.pop("class")
    try:
        # Bound the sizes that the file claims before anything is allocated.
        spaces = {}
        for option, kind in SPACES.items():
            check_sizes(option, options[option], options_of(kind))
            spaces[option] = kind(**options.pop(option))
        stored = sum(tensor.numel() for tensor in weights.values())
        with _limit_parameters(SPARE_PARAMETERS + 4 * stored):
            policy: SpecifiedPolicy = build(
                cls, POLICIES, "policy", SpecifiedPolicy, options, spaces
            )
        # Without an option a default applies, which may have changed since.
        missing = policy.config.keys() - {*spaces, *options}
        if missing:
            raise InputError(
                f"{CONFIG}: expected the policy options {', '.join(sorted(missing))}, "
                "got none; another version of marl_pool wrote it"
            )
        # torch would cast integers, and drop imaginary parts.
        for key, parameter in policy.state_dict().items():
            dtype = weights[key].dtype if key in weights else parameter.dtype
            if dtype.is_floating_point != parameter.is_floating_point():
                raise InputError(
                    f"{WEIGHTS}: {key}: expected real numbers, got {dtype}"
                )
        # Names and shapes must match exactly.
        policy.load_state_dict(weights)
    except UntrustedError:
        raise  # its message names the folder
    except InputError as error:
        raise InputError(f"{folder}: {error}") from None
    except (AttributeError, LookupError, TypeError, ValueError, RuntimeError) as error:
        # With a manifest, a damaged file has a more specific message.
        validate_intact(folder)
        raise InputError(f"{folder} is damaged or foreign: {one_line(error)}") from None
    return policy.eval()
