"""The program that serves a user's reward, in its sandbox.

    start        {kind, args}   import the function, or make the object ──► ready, or which setting is wrong, and why
    each batch   {samples}      call the function ──► the scores, or the exception and the row that raised it

The working directory is searched for modules before installed packages. This module imports only two parts of
Stageline: the channel, and the types of a reward's arguments and results.
"""

from __future__ import annotations

import importlib
import inspect
import os
import socket
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from functools import partial
from types import ModuleType
from typing import Any

from stages.rewards.protocol import Sample, Scored
from stages.rewards.sandbox.channel import SandboxChannel

_SEARCH_S = 10.0
"""Time limit in seconds of the search for the row at which a batch raises."""
_MAX_NAMES = 10
"""Maximum number of functions that an error message lists."""

Function = Callable[[Sequence[Sample]], Any]


class _Refused(Exception):
    """The function cannot be used. Arguments: the setting at fault (`kind` or `args`), and what is wrong."""


def serve(channel: SandboxChannel, start: Mapping[str, Any]) -> None:
    """Load the function that `start` names, and answer batches until the channel is closed."""
    try:
        function = _load(start["kind"], start["args"])
        ready = _function_attributes(function)
    except _Refused as error:
        setting, need = error.args
        channel.send({"refused": setting, "need": need})
        return
    channel.send(ready)
    serving = os.getpid()
    while True:
        samples = [_sample(fields) for fields in channel.receive()["samples"]]
        answer = _answer(function, samples)
        if os.getpid() != serving:  # the function forked, and this is the child: the parent answers
            os._exit(1)
        channel.send(answer)


def _load(kind: str, args: Mapping[str, Any]) -> Function:
    """Return the user's function with its arguments bound, or an object of the user's class. Raises _Refused if the
    function or the object cannot be made."""
    module_name, _, name = kind.partition(":")
    try:
        module = importlib.import_module(module_name)
    except Exception as error:
        if isinstance(error, ModuleNotFoundError) and error.name in (module_name, module_name.partition(".")[0]):
            need = f"there is no module {module_name} in {os.getcwd()}, nor is one installed"
            if module_name.endswith(".py"):
                need += f": did you mean {module_name.removesuffix('.py').replace('/', '.')}:{name}?"
        else:
            need = f"importing {module_name} raised {_one_line(error)}"
        raise _Refused("kind", need) from error
    target = getattr(module, name, None)
    if not callable(target):
        need = f"{module_name} has no function or class {name!r}; it has {_own_names(module)}"
        raise _Refused("kind", need)
    arguments = dict(args)
    _check_arguments(kind, target, arguments)
    if not inspect.isclass(target):
        return partial(target, **arguments) if arguments else target
    try:
        made = target(**arguments)
    except Exception as error:
        raise _Refused("args", f"{name} raised {_one_line(error)}") from error
    if not callable(made):
        raise _Refused("kind", f"an object of class {name} cannot be called: it needs a method __call__(samples)")
    return made


def _own_names(module: ModuleType) -> str:
    """Return a text that lists the public callables that a module defines."""
    own = [n for n, v in vars(module).items() if callable(v) and getattr(v, "__module__", None) == module.__name__]
    public = [name for name in own if not name.startswith("_")]
    others = f" and {len(public) - _MAX_NAMES} others" if len(public) > _MAX_NAMES else ""
    return ", ".join(public[:_MAX_NAMES]) + others or "none"


def _function_attributes(function: Function) -> dict[str, Any]:
    """Return the function's attributes `deterministic`, `batch_tokens` and `early`. Raises _Refused for an invalid
    `batch_tokens`."""
    owner = function.func if isinstance(function, partial) else function
    budget = getattr(owner, "batch_tokens", None)
    if budget is not None and not (isinstance(budget, int) and budget >= 1):
        raise _Refused("kind", f"its batch_tokens is {budget!r}: must be an integer of 1 or more, or None")
    flags = {name: bool(getattr(owner, name, default)) for name, default in (("deterministic", True), ("early", False))}
    return {**flags, "batch_tokens": budget}


def _check_arguments(kind: str, target: Function, arguments: Mapping[str, Any]) -> None:
    """Raise _Refused if an argument is unknown or missing, or if the parameters of `target` cannot be inspected. Also
    raise it for a function without a parameter for the samples."""
    try:
        parameters = [*inspect.signature(target).parameters.values()]
    except ValueError as error:
        raise _Refused("kind", f"the arguments of {kind} cannot be inspected: write a function in Python") from error
    first = parameters[0].name if parameters else ""
    if not inspect.isclass(target):
        if not parameters:
            raise _Refused("kind", f"{kind} takes no argument: the first must be the list of samples")
        parameters = parameters[1:]
    names = [p.name for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    takes = f"{kind} takes {', '.join(names) or 'no arguments'}"
    unknown = [n for n in arguments if n not in names and not any(p.kind is p.VAR_KEYWORD for p in parameters)]
    missing = [p.name for p in parameters if p.name in names and p.default is p.empty and p.name not in arguments]
    if unknown:
        raise _Refused("args", f"no such argument: {', '.join(unknown)}; {takes}")
    if missing and not inspect.isclass(target):
        called = f"a reward function is called with one list of `Sample`, as its first argument ({first})"
        raise _Refused("args", f"{called}, and with args; {', '.join(missing)} must be given; {takes}")
    if missing:
        raise _Refused("args", f"{', '.join(missing)} must be given; {takes}")


def _answer(function: Function, samples: Sequence[Sample]) -> dict[str, Any]:
    """Return the function's result as JSON, or the exception that the function raised, with the row that caused it. To
    find this row in a batch, the samples are tried one by one, for up to `_SEARCH_S`. The row is None if it was not
    found."""
    try:
        return _numbers(function(samples))
    except Exception as error:
        raised, row = error, None
    if len(samples) == 1:
        row = 0
    until = time.monotonic() + _SEARCH_S
    for number, sample in enumerate(samples if row is None else ()):
        if time.monotonic() > until:
            break
        try:
            function([sample])
        except Exception as error:
            raised, row = error, number
            break
    trace = "".join(traceback.format_exception(raised)[-4:]).rstrip()
    return {"error": _one_line(raised) + _hint(raised), "row": row, "traceback": trace}


def _hint(raised: BaseException) -> str:
    """Return advice for an exception that the sandbox, or a mistaken view of the samples, may have caused. "" if there
    is none."""
    causes = [raised]
    while (before := causes[-1].__cause__ or causes[-1].__context__) is not None and before not in causes:
        causes.append(before)
    if any(isinstance(one, socket.gaierror | ConnectionError) for one in causes):
        return " (the sandbox has no network; `network: true` in reward.parts.NAME allows it)"
    if any(isinstance(one, PermissionError) for one in causes):
        return " (the sandbox allows few files; `writes: [PATH]` in reward.parts.NAME allows more)"
    if any(isinstance(one, TypeError | AttributeError) and "'Sample'" in str(one) for one in causes):
        return f" (each sample is an object with the fields {', '.join(f.name for f in fields(Sample))})"
    return ""


def _numbers(answer: Any) -> dict[str, Any]:
    """Return the scores as JSON. Raises TypeError, with the given value, if they are not numbers."""
    if isinstance(answer, Scored):
        spread = None if answer.disagreement is None else _floats(answer.disagreement)
        parts, measured = ({str(n): _floats(v) for n, v in of.items()} for of in (answer.parts, answer.measured))
        return {"parts": parts, "disagreement": spread, "measured": measured}
    if isinstance(answer, Mapping):
        return {"parts": {str(name): _floats(values) for name, values in answer.items()}, "disagreement": None}
    return {"scores": _floats(answer)}


def _floats(answer: Any) -> list[float]:
    if isinstance(answer, str | bytes) or not hasattr(answer, "__iter__"):
        raise TypeError(
            f"it returned {answer!r:.80}; it must return a list of one number per sample, or a dict of such lists"
        )
    numbers = []
    for position, value in enumerate(answer):
        try:
            if isinstance(value, str | bytes):  # float() would accept "1.0", which is more likely a mistake
                raise TypeError
            numbers.append(float(value))
        except (TypeError, ValueError):
            raise TypeError(f"it returned {value!r:.80} for sample {position}, which is not a number") from None
    return numbers


def _sample(fields: dict[str, Any]) -> Sample:
    """Return a sample from its JSON."""
    for name in ("prompt_ids", "response_ids", "messages"):
        fields[name] = tuple(fields[name])
    return Sample(**fields)


def _one_line(error: BaseException) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())
