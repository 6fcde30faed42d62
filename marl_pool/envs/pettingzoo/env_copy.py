"""Building, stepping, replaying and rendering of third-party environments."""

import importlib
import inspect
import itertools
import pkgutil
import sys
import weakref
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple

import gymnasium
import numpy as np
import pettingzoo
from pettingzoo import AECEnv, ParallelEnv
from pettingzoo.env_registry.exceptions import PettingZooRegistryError
from pettingzoo.utils.conversions import aec_to_parallel_wrapper
from typing_extensions import override

from marl_pool.envs.drawing.frames import to_rgb
from marl_pool.envs.pettingzoo.gymnasium_agents import GymnasiumAgents
from marl_pool.envs.pettingzoo.life import (
    RESET_PARTS,
    STEP_PARTS,
    Lives,
    agent_names,
    place,
    split,
)
from marl_pool.envs.pettingzoo.turn_based import TurnBasedAgents, parallel_of
from marl_pool.envs.simulation import (
    ActionLog,
    LoggedSimulator,
    ReplayCursor,
    Simulator,
)
from marl_pool.observations.masks import MASK
from marl_pool.options.names import nearest, validate_trusted
from marl_pool.utils.errors import InputError, UnfitTokensError, described, source

Factory = Callable[..., Any]
SIGNATURES = {"reset": "reset(seed=None, options=None)", "step": "step(action)"}
"""Methods that a user's environment has to have."""
EXTRA_OF = {"mpe2": "mpe"} | dict.fromkeys(
    ("chess", "lbforaging", "magent2", "pymunk", "rlcard", "rware", "shimmy"), "zoo"
)
"""Extra that installs each third-party module."""
UNDEFINED_STATES = (ParallelEnv.state, AECEnv.state)
"""PettingZoo's defaults, which raise `NotImplementedError`."""
LOCAL_FACTORIES: dict[str, Factory] = {}
"""Functions of this process that make environments, by their names in options."""


def name_factory(factory: Factory) -> str:
    """Return a name under which `find_factory` finds a function in this process."""
    module, kind = getattr(factory, "__module__", ""), type(factory).__name__
    name = f"{module}:{getattr(factory, '__qualname__', kind)}"
    numbered = (f"{name}#{number}" for number in itertools.count(2))
    for candidate in itertools.chain([name], numbered):
        if LOCAL_FACTORIES.setdefault(candidate, factory) is factory:
            break
    return candidate


def find_factory(module: str) -> Factory:
    """Return the callable that builds the environments of ``module``.

    Raises:
        InputError: the module cannot be imported, has no such callable, or is named in
            a file and not allowed by the user; see `marl_pool.options.names.trust`.
    """
    if module in LOCAL_FACTORIES:
        return LOCAL_FACTORIES[module]
    validate_trusted(module, "env.module")
    # A name such as butterfly/pistonball_v6 is in PettingZoo's registry.
    if "/" in module.partition(":")[0]:
        return partial(_make_registered, module)
    # Otherwise it is a module, with or without the name of a callable.
    path, _, attribute = module.partition(":")
    names = [attribute] if attribute else ["parallel_env", "env"]
    try:
        imported = importlib.import_module(path)
    except (Exception, SystemExit) as error:  # third-party code may raise any exception
        missing = error.name if isinstance(error, ModuleNotFoundError) else None
        raise InputError(
            f"env.module: {path!r} cannot be imported: {described(error)}"
            f"{_import_hint(missing or '')}"
        ) from error
    attribute = next((name for name in names if hasattr(imported, name)), names[0])
    factory: Factory | None = getattr(imported, attribute, None)
    # Importing a package may have registered environments with Gymnasium.
    if factory is None and attribute in gymnasium.registry:
        factory = partial(gymnasium.make, attribute, disable_env_checker=True)
    if not callable(factory):
        callables = [name for name, value in vars(imported).items() if callable(value)]
        names = [*callables, *gymnasium.registry] if ":" in module else []
        near = nearest(attribute, names)
        hint = f". Did you mean {near!r}?" if near else ""
        raise InputError(
            f"env.module: expected a module with parallel_env or env, or "
            f"package.module:callable, or package:id of Gymnasium; {path!r} has no "
            f"{attribute!r}{hint}"
        )
    return factory


def _import_hint(missing: str) -> str:
    """Return a hint to mend the import of a missing module; "" if unknown."""
    top = missing.partition(".")[0]
    if sys.modules.get(top) is None:
        extra = EXTRA_OF.get(top)
        return f'; pip install "marl-pool[{extra}]"' if extra else ""
    package, _, name = missing.rpartition(".")
    folders = getattr(sys.modules.get(package), "__path__", ())
    near = nearest(name, [module.name for module in pkgutil.iter_modules(folders)])
    return f". Did you mean {f'{package}.{near}'!r}?" if near else ""


def _make_registered(module: str, **options: Any) -> Any:
    """Build an environment of PettingZoo's registry, preferably a parallel one."""
    try:
        return pettingzoo.make("parallel", module, **options)
    except PettingZooRegistryError:
        return pettingzoo.make("aec", module, **options)


def build_env(module: str, options: Mapping[str, Any]) -> ParallelEnv[Any, Any, Any]:
    """Build one environment.

    Raises:
        InputError: no such environment, rejected options, another kind of object, or
            methods that cannot be called as in the API.
    """
    factory = find_factory(module)
    try:
        env = factory(**options)
    except InputError:
        raise
    except PettingZooRegistryError as error:
        raise InputError(f"env.module: {described(error)}") from error
    except Exception as error:  # third-party code may raise any exception
        problem = f"{module} rejects {dict(options)}" if options else str(module)
        key = "env.options" if options else "env.module"
        raise InputError(f"{key}: {problem}: {described(error)}") from error
    if isinstance(env, aec_to_parallel_wrapper):
        env = env.aec_env  # more of it can be checked
    if isinstance(env, gymnasium.Env | AECEnv | ParallelEnv):
        _validate_methods(env)
    if isinstance(env, gymnasium.Env):
        return GymnasiumAgents(env)
    if isinstance(env, AECEnv):
        return parallel_of(env)
    if not isinstance(env, ParallelEnv):
        raise InputError(
            f"env.module: expected {module} to return a PettingZoo ParallelEnv or "
            f"AECEnv, or a Gymnasium Env, got {type(env).__name__}"
        )
    return env


def _validate_methods(env: Any) -> None:
    """Raise an `InputError` if ``reset`` or ``step`` do not take their arguments.

    Here, ``reset`` is called with a seed; wrappers pass on options too.
    """
    inner, seed = getattr(env, "unwrapped", env), {"seed": 0}
    _validate_method(env, "step", None)
    _validate_method(env, "reset", **seed)
    if inner is not env:
        _validate_method(inner, "step", None)
        _validate_method(inner, "reset", **seed, options=None)


def _validate_method(env: Any, name: str, *arguments: Any, **keywords: Any) -> None:
    method = getattr(env, name, None)
    try:
        signature = inspect.signature(method)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return  # nothing can be checked without a signature
    try:
        signature.bind(*arguments, **keywords)
    except TypeError as error:
        raise InputError(
            f"env.module: {type(env).__name__}: expected {SIGNATURES[name]}, got "
            f"{name}{signature}{source(method)}"
        ) from error


class ParallelStep(NamedTuple):
    """Results of ``ParallelEnv.step`` or ``reset`` that are used; see `Lives`."""

    observations: Mapping[Any, Any] = {}
    """Of agents that act in the next step, or whose truncation ended the episode."""
    rewards: Mapping[Any, float] = {}
    """Of agents that acted."""
    terminated: bool = False
    truncated: bool = False
    where: str = ""
    """Start of error messages about this step."""
    alive: Iterable[Any] = ()
    """Agents of a turn-based environment whose episode goes on, or whose truncation
    ended it."""
    masks: Mapping[Any, Any] = {}
    """Action masks in the infos of the agents that are observed."""
    place: int = -1
    """Row of the shared arrays in which another process wrote this step, or -1."""
    state: Any = None
    """Result of ``env.state()``, if requested."""


class ParallelSimulator(Simulator[ParallelStep]):
    """A PettingZoo environment, stepped by flat arrays, and closed with this object.

    It is not closed where pygame is imported.

    Args:
        env: the environment.
        decode: converts a flat array to the action of each agent.

    Raises:
        InputError: in `reset` and `step`, the environment breaks a rule of `Lives`.
    """

    def __init__(
        self,
        env: ParallelEnv[Any, Any, Any],
        decode: Callable[[np.ndarray], dict[Any, Any]],
    ) -> None:
        self.env, self.decode = env, decode
        weakref.finalize(self, _close, env)
        self.lives = Lives(agent_names(env))

    @override
    def reset(self, seed: int) -> ParallelStep:
        result = self.env.reset(seed=seed)
        observations, infos = split(result, RESET_PARTS, 0)
        self.lives.begin(self._agents())
        return self._step(observations, infos)

    @override
    def step(self, action: np.ndarray) -> ParallelStep:
        lives = self.lives
        if not lives.alive:  # the episode is over
            return ParallelStep(terminated=True)
        by_agent = self.decode(action)
        result = self.env.step({agent: by_agent[agent] for agent in lives.listed})
        parts = split(result, STEP_PARTS, lives.number + 1)
        observations, rewards, ended, late, infos = parts
        lives.advance(self._agents(), ended, late)
        return self._step(
            observations,
            infos,
            rewards=lives.earned(rewards),
            terminated=not (lives.alive or lives.timed_out),
            truncated=bool(lives.timed_out),
        )

    def state(self) -> ParallelStep:
        """Return a step that holds the environment's state alone.

        Raises:
            UnfitTokensError: the environment does not define ``state()``.
            InputError: ``state()`` raises another error.
        """
        cls = type(self.env.unwrapped)
        method = getattr(cls, "state", None)
        if callable(method) and method not in UNDEFINED_STATES:
            try:
                return ParallelStep(state=self.env.state())
            except NotImplementedError:
                pass
            except Exception as error:  # a user's environment may raise anything
                raise InputError(
                    f"env.module: state() of {cls.__name__} raised {described(error)}"
                ) from error
        raise UnfitTokensError(
            f"env.module: expected an environment that defines state(), got "
            f"{cls.__name__}, which does not"
        )

    def _step(
        self, observations: Mapping[Any, Any], infos: Mapping[Any, Any], **results: Any
    ) -> ParallelStep:
        """Return a step with the observations and masks after it."""
        lives, turn_based = self.lives, isinstance(self.env, TurnBasedAgents)
        lives.require_infos(infos)
        observed = lives.seen(observations, self.env.in_turn if turn_based else None)
        alive = (lives.alive or lives.timed_out) if turn_based else ()
        masks = {agent: infos.get(agent, {}).get(MASK) for agent in observed}
        return ParallelStep(
            observed,
            where=place(lives.number),
            alive=alive,
            masks={agent: mask for agent, mask in masks.items() if mask is not None},
            **results,
        )

    def _agents(self) -> Any:
        return getattr(self.env, "agents", None)


def _close(env: ParallelEnv[Any, Any, Any]) -> None:
    # Those that draw by pygame quit it for the whole process, whoever else draws.
    if "pygame" in sys.modules:
        return
    # An environment that cannot be closed is no reason to stop.
    with suppress(Exception):
        env.close()


class FrameRenderer:
    """An additional environment, built at the first picture, that only renders.

    It replays the log of the environment to be drawn. So the batch needs no render
    mode, and a picture may show an earlier state.
    """

    def __init__(self, module: str, build: Callable[[], ParallelSimulator]) -> None:
        self.module, self.build = module, build
        self._copy: LoggedSimulator[ParallelStep] | None = None
        self._env: Any = None
        self._source: ActionLog | None = None
        """The log that the copy follows."""

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_copy": None, "_env": None, "_source": None}

    def render(self, cursor: ReplayCursor[ParallelStep]) -> np.ndarray:
        """Render the state of a cursor, ``(height, width, 3)`` uint8."""
        try:
            # Bring the copy to the state, from its current one where possible.
            if self._copy is None:
                simulator = self.build()
                self._copy, self._env = LoggedSimulator(simulator), simulator.env
            copy = self._copy
            replayed = copy.log.actions if copy.log else []
            if cursor.log is not self._source or cursor.length < len(replayed):
                copy.replay(ActionLog(cursor.log.seed))
                self._source, replayed = cursor.log, []
            for actions in cursor.log.actions[len(replayed) : cursor.length]:
                copy.step(actions)
            image: Any = self._env.render()
            return to_rgb(image)
        except Exception as error:  # third-party code may raise any exception
            problem = str(error) if isinstance(error, InputError) else described(error)
            raise InputError(
                f"env.module: {self.module} cannot be drawn: {problem}"
            ) from error
