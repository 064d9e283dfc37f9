"""Build rewards by their kind. Modules are imported when they are needed, since some take a second.

built-in kind      REWARDS ──► `module:name` ──► called with `args`, in this process
module:function    a user's own ──► a process of its own (user.py)
"""

from __future__ import annotations

import importlib
import inspect
import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Literal, get_origin

from beartype import BeartypeConf
from beartype.door import is_bearable

from stages.rewards.config import NO_PERMISSIONS, Permissions, RewardPartsConfig
from stages.rewards.protocol import Part, Reward
from stages.rewards.sandbox.answers import UnconfinedAnswers
from stages.rewards.sandbox.process import Confinement
from stages.rewards.user import UserReward
from storage.problems import Problem, type_text, value_text

REWARDS: dict[str, str] = {
    "answer": "stages.rewards.rules:AnswerReward",
    "characters": "stages.rewards.rules:CharacterReward",
    "ensemble": "stages.rewards.learned:EnsembleReward",
    "format": "stages.rewards.rules:FormatReward",
    "judge": "stages.rewards.judges.rewards:JudgeReward",
    "length": "stages.rewards.rules:LengthReward",
    "local_judge": "stages.rewards.judges.rewards:LocalJudgeReward",
    "missing_eos": "stages.rewards.rules:MissingEosPenalty",
    "model": "stages.rewards.learned:ModelReward",
    "overlong": "stages.rewards.rules:OverlongPenalty",
    "reasoning_gym": "stages.rewards.reasoning:ReasoningReward",
    "repetition": "stages.rewards.rules:RepetitionPenalty",
    "vader": "stages.rewards.rules:VaderReward",
}
"""Kind -> class of the reward, as `module:name`. The class is called with `args`."""
KEYS = "attached"
"""Folder in a run's directory with secret keys (`RunPaths.attached`). Whoever has such a key can join the run as a
worker. The folder is hidden from users' own rewards if the host allows namespaces."""
_NUMBERS = BeartypeConf(is_pep484_tower=True)
"""Settings of the type check of arguments: an integer is accepted as a float."""
_SECRET = re.compile(r"(^|_)(key|apikey|secret|password|auth|authorization|bearer|token)($|_)", re.IGNORECASE)
"""Names of arguments that may hold a secret; messages do not show their values."""


class UnfitReward(ValueError):
    """Settings from which no reward can be built. `problem`: the key, the given value and what would work."""

    def __init__(self, problem: Problem) -> None:
        super().__init__(f"{problem.key}: given {value_text(problem.given)}; {problem.need}")
        self.problem = problem


def build_parts(
    config: RewardPartsConfig, key: str, directory: Path | None = None, *, trust_answers: bool = False
) -> tuple[Part, ...]:
    """Build the parts of a reward. The caller closes them with `close_parts`.

    Args:
        config: the section that lists the parts.
        key: key path of the section.
        directory: the run's directory, for files of a reward. None: no files are written.
        trust_answers: `reward.trust_answers` of the config.

    Raises:
        UnfitReward: a part cannot be built (see `build_reward`). Also raised if a part may evaluate sampled text, this
            host cannot sandbox such text, and `trust_answers` is False.
    """
    with closing_on_error() as undo:
        parts = []
        for name, (where, part) in config.parts_by_name(key).items():
            allowed = Permissions(part.network, (*part.environment,), (*part.writes,), trust_answers)
            try:
                reward = build_reward(part.kind, part.args, where, part.timeout_s, directory, allowed)
            except UnconfinedAnswers as error:
                need = (
                    f"{where} ({part.kind}) may evaluate sampled text, and {error}; true scores without that protection"
                )
                raise UnfitReward(Problem("reward.trust_answers", False, need)) from error
            undo.callback(reward.close)
            parts.append(Part(name, part.weight, reward))
        return tuple(parts)


def build_reward(
    kind: str,
    args: Mapping[str, Any],
    key: str,
    timeout_s: float = 60.0,
    directory: Path | None = None,
    allowed: Permissions = NO_PERMISSIONS,
) -> Reward:
    """Build a reward.

    Args:
        kind: kind of the reward: a name in `REWARDS`, or a user's own reward as `module:name`.
        args: arguments of the reward.
        key: key path of the reward's settings.
        timeout_s: time limit of a batch in a user's own reward, in seconds.
        directory: see `build_parts`.
        allowed: permissions of the reward's code.

    Raises:
        UnconfinedAnswers: the reward may evaluate answers, the config does not trust them, and this host cannot confine
            them.
        UnfitReward: the kind is unknown, or an argument is unknown, is missing, or cannot work. For an unknown name,
            the message lists the known names.
    """
    if ":" in kind:
        if kind.startswith("__main__:"):
            need = "a worker cannot import a notebook or script: put it in a module file, my_reward.py for my_reward:"
            raise UnfitReward(Problem(f"{key}.kind", kind, need + kind.partition(":")[2]))
        if not all(word.isidentifier() for word in kind.replace(":", ".", 1).split(".")):
            need = "your own reward must be module:function or module:Class, with the module named as in an import"
            raise UnfitReward(Problem(f"{key}.kind", kind, need))
        reward = UserReward(kind, dict(args), timeout_s, _confinement(allowed, key, directory))
        if reward.refusal is not None:
            setting, need = reward.refusal
            raise UnfitReward(Problem(f"{key}.{setting}", kind if setting == "kind" else dict(args), need))
        return reward
    if kind not in REWARDS:
        module, _, name = kind.removesuffix(".py").rpartition(".")
        yours = f"{module}:{name}" if module else "module:function or module:Class"
        need = f"known are {', '.join(sorted(REWARDS))}, and your own as {yours}"
        raise UnfitReward(Problem(f"{key}.kind", kind, need))
    module, _, name = REWARDS[kind].partition(":")
    make: Callable[..., Reward] = getattr(importlib.import_module(module), name)
    _check_arguments(make, kind, args, key)
    ours = {"_directory": directory, "_allowed": allowed}
    own = {name: value for name, value in ours.items() if name in inspect.signature(make).parameters}
    try:
        return make(**args, **own)
    except UnfitReward as error:  # its key is relative to `args`
        inner = error.problem
        raise UnfitReward(Problem(f"{key}.args.{inner.key}", inner.given, inner.need)) from error
    except (ValueError, TypeError) as error:
        raise UnfitReward(Problem(f"{key}.args", dict(args), str(error))) from error


def _confinement(allowed: Permissions, key: str, directory: Path | None) -> Confinement:
    """Return the confinement of a user's own code. Raises UnfitReward if the config allows an environment variable or a
    path that does not exist."""
    for name in allowed.environment:
        if name not in os.environ:
            raise UnfitReward(Problem(f"{key}.environment", name, "there is no such environment variable here"))
    for path in allowed.writes:
        if not Path(path).exists():
            raise UnfitReward(Problem(f"{key}.writes", path, "there is no such file or folder: make it first"))
    hidden = () if directory is None else (str(directory.resolve() / KEYS),)
    writes = tuple(str(Path(path).resolve()) for path in allowed.writes)
    return Confinement(network=allowed.network, environment=allowed.environment, writes=writes, hidden=hidden)


def close_parts(*groups: tuple[Part, ...]) -> None:
    """Close the rewards of these parts. Closing twice is harmless."""
    for parts in groups:
        for part in parts:
            part.reward.close()


@contextmanager
def closing_on_error() -> Iterator[ExitStack]:
    """Yield an `ExitStack`. Its callbacks run only if the `with` block raises an error."""
    with ExitStack() as undo:
        yield undo
        undo.pop_all()


def _check_arguments(make: Callable[..., Reward], kind: str, args: Mapping[str, Any], key: str) -> None:
    """Raise UnfitReward if an argument is unknown, has a wrong type, or is missing."""
    taken = {n: p for n, p in inspect.signature(make, eval_str=True).parameters.items() if not n.startswith("_")}
    names = ", ".join(taken) or "no arguments"
    for name, value in args.items():
        if name not in taken:
            shown = "(not shown)" if _SECRET.search(name) else value
            raise UnfitReward(Problem(f"{key}.args.{name}", shown, f"no such argument; {kind} takes {names}"))
        wanted = taken[name].annotation
        if get_origin(wanted) is not Literal and not is_bearable(value, wanted, conf=_NUMBERS):
            need = f"must be {type_text(wanted) or inspect.formatannotation(wanted)}"
            raise UnfitReward(Problem(f"{key}.args.{name}", value, need))
    for name, parameter in taken.items():
        if parameter.default is parameter.empty and name not in args:
            raise UnfitReward(Problem(f"{key}.args.{name}", None, f"must be given; {kind} takes {names}"))
