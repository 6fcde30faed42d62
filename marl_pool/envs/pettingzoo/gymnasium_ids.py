"""Options of environments that are given by an id of Gymnasium or by a function."""

import re
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import gymnasium

from marl_pool.envs.pettingzoo.env_copy import name_factory
from marl_pool.utils.errors import InputError

EnvFactory = Callable[..., Any]
"""Function that makes an env of Gymnasium or PettingZoo; for pictures it takes
``render_mode``."""


def env_options(env: Any) -> dict[str, Any]:
    """Return the options ``{"name": …, **options}`` of an environment.

    Args:
        env: a name, an id of Gymnasium such as ``"CartPole-v1"`` or
            ``"package:Env-v0"``, a function that makes an environment, an env that
            `gymnasium.make` made, or options, of which ``module`` may be any of these.

    Raises:
        InputError: anything else.
    """
    if isinstance(env, Mapping):
        options = dict(env)
        if options.get("name") == "pettingzoo" and "module" in options:
            options["module"] = _module(options["module"])
        return options
    module = _module(env)
    is_name = isinstance(env, str) and module == env and not _is_id(env)
    return {"name": env} if is_name else {"name": "pettingzoo", "module": module}


def _module(env: Any) -> str:
    """Return the name under which `find_factory` finds an environment."""
    if isinstance(env, str):
        # Without a package, an id of Gymnasium's registry.
        bare = ":" not in env and (env in gymnasium.registry or "/" not in env)
        return f"gymnasium:{env}" if _is_id(env) and bare else env
    if isinstance(env, gymnasium.Env):
        if env.spec is None:
            raise InputError(
                "env: expected a function that makes environments, since many are "
                f"played, got a single {type(env.unwrapped).__name__} without a spec"
            )
        return name_factory(partial(gymnasium.make, env.spec))
    if callable(env):
        return name_factory(env)
    raise InputError(
        "env: expected a name, an id of Gymnasium, a function that makes an env, or a "
        f"mapping of options, got {type(env).__name__}"
    )


def _is_id(text: str) -> bool:
    return re.search(r"-v\d+$", text) is not None
