"""Declare the settings of a config with the values that they take, and report the values that cannot work.

A section is a dataclass. Each of its settings states the constraints on its own value (`setting`), and
`setting_problems` checks them all. Rules between several settings are pure functions beside the dataclass,
`NAME_problems(config)`, that yield a `Problem` for each value that cannot work. Standard library only.
"""

from __future__ import annotations

import difflib
import math
import re
import types
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any, Literal, Union, get_args, get_origin

LONGEST_NAME = 100
"""Maximum number of characters of a name. Names become part of longer file names, and most filesystems limit these to
255 bytes."""
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")
_URL_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")
_CONSTRAINTS = "constraints"
WORDS = {int: "a whole number", float: "a number", bool: "true or false", str: "a text"}
"""Type of a setting with a single value -> its values, in words."""


def value_text(value: object) -> str:
    """Return a setting's value on one line, spelled as in YAML: `null`, `true`, `0`, `'a'`, `[1, 2]`, `{a: 1}`."""
    if value is None or isinstance(value, bool):
        return "null" if value is None else str(value).lower()
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key}: {value_text(one)}" for key, one in value.items()) + "}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(value_text, value))}]"
    return repr(value).removesuffix(".0") if type(value) is float else repr(value)


def type_text(kind: Any) -> str:
    """Return the values that a setting of this type takes, in words; "" if there are no words for the type."""
    origin, arguments = get_origin(kind), get_args(kind)
    if origin is Literal:
        return f"one of {', '.join(map(str, arguments))}"
    if origin in (Union, types.UnionType):
        return ", or ".join("null" if a is type(None) else type_text(a) for a in arguments)
    if origin in (list, tuple, Sequence):
        one = WORDS.get(arguments[0], "") if arguments else ""
        return f"a list ([a, b]), each element {one}" if one else "a list ([a, b])"
    return "a mapping of names to settings" if origin in (dict, Mapping) else WORDS.get(kind, "")


@dataclass(frozen=True)
class Problem:
    """A setting with a value that cannot work, and a description of a value that would work."""

    key: str
    """Path of the setting, as a user writes it: `engine.max_rows`."""
    given: object
    need: str
    """Description of a value that would work."""


@dataclass(frozen=True)
class Constraint:
    """A condition that the value of a setting must meet."""

    need: str
    """The allowed values, in words that follow "must be": `1 or more`."""
    holds: Callable[[Any], bool]
    """Function that returns True for a value that works. It is never called with None: the type says whether null is
    allowed."""
    of_elements: bool = False
    """True: the constraint is on each element of a list."""

    def problems(self, values: Mapping[str, Any]) -> Iterator[Problem]:
        """Yield a problem for each value that does not work. `values`: key path -> value."""
        if self.of_elements:
            values = {f"{key}[{number}]": one for key, value in values.items() for number, one in enumerate(value)}
        for key, value in values.items():
            if value is None:
                continue
            infinite = isinstance(value, float) and not math.isfinite(value)
            if infinite or not self.holds(value):
                need = self.need if not infinite or self.need.startswith("finite") else f"finite, and {self.need}"
                yield Problem(key, value, f"must be {need}")


def at_least(least: float, hint: str = "") -> Constraint:
    """Return the constraint on a finite number of `least` or more. `hint` follows the condition in the message."""
    return Constraint(f"{least} or more{hint}", lambda value: value >= least)


def above(bound: float, hint: str = "") -> Constraint:
    """Return the constraint on a finite number above `bound`."""
    return Constraint(f"above {bound}{hint}", lambda value: value > bound)


def between(least: float, most: float, hint: str = "", *, ends: bool = True) -> Constraint:
    """Return the constraint on a number from `least` to `most`. `ends`: True if these two are allowed."""
    if ends:
        return Constraint(f"from {least} to {most}{hint}", lambda value: least <= value <= most)
    return Constraint(f"between {least} and {most}{hint}", lambda value: least < value < most)


def finite(hint: str = "") -> Constraint:
    """Return the constraint that a number is finite. `hint` follows the condition in the message."""
    return Constraint(f"finite{hint}", math.isfinite)


def plain_name(*, dots: bool = True) -> Constraint:
    """Return the constraint on a name that becomes part of a file name and of a command. Such a name has at most
    `LONGEST_NAME` letters, digits and marks (`_`, `-`, `.`), and does not begin with `-` or `.`. `dots`: True if the
    name may contain dots."""
    marks = "._-, and begins with none of . and -" if dots else "_-, and does not begin with - (dots part keys)"
    return Constraint(
        f"a name of up to {LONGEST_NAME} letters, digits and {marks}",
        lambda name: bool(_NAME.fullmatch(name) and len(name) <= LONGEST_NAME and (dots or "." not in name)),
    )


def local_directory() -> Constraint:
    """Return the constraint on a path that is no URL. A URL would become a local directory named `s3:`."""
    need = "a directory on this host, or on a filesystem that is mounted here (NFS, Lustre, a bucket through FUSE)"
    return Constraint(f"{need}: URLs are not supported", lambda path: not _URL_SCHEME.match(path))


def bucket_url(*protocols: str) -> Constraint:
    """Return the constraint on the URL of a bucket, or of a prefix in it, for one of these protocols. The URL must not
    hold credentials: the clients of object stores read them from the environment."""
    wanted = " or ".join(f"{protocol}://BUCKET/PREFIX" for protocol in protocols[:2])
    url = re.compile(rf"({'|'.join(protocols)})://[A-Za-z0-9][A-Za-z0-9._-]+(/[^/?#@\s]+)*")
    return Constraint(
        f"{wanted}, without credentials (the environment has them); other protocols cannot create a file only if there "
        "is none",
        lambda given: url.fullmatch(given) is not None,
    )


def setting(default: Any, *constraints: Constraint) -> Any:
    """Declare a setting of a section with its default and its constraints. If the default is a list or dict, each
    section gets a copy."""
    metadata = {_CONSTRAINTS: constraints}
    if isinstance(default, list | dict):
        return field(default_factory=lambda: copy(default), metadata=metadata)
    return field(default=default, metadata=metadata)


def constraints_of(section: Any) -> dict[str, tuple[Constraint, ...]]:
    """Return name of a setting -> its constraints, for a section (a dataclass or an instance)."""
    return {one.name: one.metadata.get(_CONSTRAINTS, ()) for one in fields(section)}


def unread_problems(key: str, section: Any, why: str, names: Collection[str] | None = None) -> Iterator[Problem]:
    """Yield a problem for each setting of a section, and of the sections in it, that differs from its default although
    nothing reads it.

    `key`: the section's path. `why`: why nothing reads the setting, and what would change that. `names`: settings to
    check; None: all.
    """
    default = type(section)()
    for name in [one.name for one in fields(section)] if names is None else names:
        path, value, usual = f"{key}.{name}", getattr(section, name), getattr(default, name)
        if is_dataclass(value):
            yield from unread_problems(path, value, why)
        elif value != usual:
            yield Problem(path, value, f"{why}; or leave it at {value_text(usual)}")


def setting_problems(section: Any, key: str = "") -> Iterator[Problem]:
    """Yield a problem for each value in a section, and in the sections in it, that breaks a constraint of its own
    setting. `key`: the section's path."""
    for name, constraints in constraints_of(section).items():
        path, value = f"{key}.{name}" if key else name, getattr(section, name)
        for constraint in constraints:
            yield from constraint.problems({path: value})
        inside = value if isinstance(value, Mapping) else {"": value}
        for part, one in inside.items():
            if is_dataclass(one):
                yield from setting_problems(one, f"{path}.{part}" if part else path)


def mentions(problem: Problem, keys: Collection[str]) -> bool:
    """Return True if a problem is about one of these settings, or names one of them in its text."""
    about = "|".join(rf"(?<![\w.]){re.escape(key)}(?!\w)" for key in keys)
    return bool(keys) and re.search(about, f"{problem.key}: {problem.need}") is not None


def unknown_problems(key: str, given: Sequence[str], known: Sequence[str], what: str) -> Iterator[Problem]:
    """Yield a problem if a list names something that is not `known`. It suggests the names that are spelled alike.
    `what`: what the names are, such as "tracker"."""
    unknown = [name for name in given if name not in known]
    near = [*dict.fromkeys(meant for name in unknown for meant in difflib.get_close_matches(name, known, 1))]
    if unknown:
        hint = f"did you mean {', '.join(near)}? There are " if near else "there are "
        yield Problem(key, unknown, f"no such {what}; {hint}{', '.join(known)}")


def divides(key: str, part: int, whole_key: str, whole: int) -> Iterator[Problem]:
    """Yield a problem of setting `key` if its value `part` does not divide `whole`, the value of setting `whole_key`.
    Numbers below 1 are left to other checks."""
    if part >= 1 and whole >= 1 and whole % part:
        divisors = ", ".join(str(number) for number in range(1, whole + 1) if whole % number == 0)
        yield Problem(key, part, f"must divide {whole_key} = {whole}: one of {divisors}")
