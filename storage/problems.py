"""What of a config cannot work: the form in which every section's checks say it, and the checks that several share.

A section's checks are a pure function beside its dataclass, `NAME_problems(config)`, that yields a `Problem` for each
value that cannot work. Standard library only.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

LONGEST_NAME = 100
"""Characters: a name becomes part of longer file names, of which most filesystems take 255 bytes."""
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")
_URL_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")


@dataclass(frozen=True)
class Problem:
    """A value that cannot work."""

    key: str
    """Path of the setting, as a user writes it: `engine.slots`."""
    given: object
    need: str
    """What would work."""


def at_least(least: int, values: Mapping[str, float | None], hint: str = "") -> Iterator[Problem]:
    """Of numbers by their keys: those below `least`, and those that are not finite. None is no number."""
    for key, value in values.items():
        if value is not None and not (math.isfinite(value) and value >= least):
            yield Problem(key, value, f"must be {_finite(value)}{least} or more{hint}")


def above(bound: int, values: Mapping[str, float | None], hint: str = "") -> Iterator[Problem]:
    """Of numbers by their keys: those not above `bound`, and those that are not finite. None is no number."""
    for key, value in values.items():
        if value is not None and not (math.isfinite(value) and value > bound):
            yield Problem(key, value, f"must be {_finite(value)}above {bound}{hint}")


def finite(values: Mapping[str, float | None], hint: str = "") -> Iterator[Problem]:
    """Of numbers by their keys: infinities, and what is no number at all. None is none of them."""
    for key, value in values.items():
        if value is not None and not math.isfinite(value):
            yield Problem(key, value, f"must be finite{hint}")


def _finite(value: float) -> str:
    return "" if math.isfinite(value) else "finite, and "


def divides(key: str, part: int, whole_key: str, whole: int) -> Iterator[Problem]:
    """A `part` of 1 or more that does not divide the `whole`, which is 1 or more too: else it is what is wrong."""
    if part >= 1 and whole >= 1 and whole % part:
        divisors = ", ".join(str(number) for number in range(1, whole + 1) if whole % number == 0)
        yield Problem(key, part, f"must divide {whole_key} = {whole}: one of {divisors}")


def plain_name(key: str, name: str, *, dots: bool = True) -> Iterator[Problem]:
    """A name that is to be one component of file names, and of commands, and can be neither: with a separator, hidden,
    or taken for an option."""
    allowed = _NAME.fullmatch(name) and len(name) <= LONGEST_NAME and (dots or "." not in name)
    if not allowed:
        marks = "._-, and begins with none of . and -" if dots else "_-, and does not begin with - (dots part keys)"
        yield Problem(key, name, f"a name has up to {LONGEST_NAME} characters, which are letters, digits and {marks}")


def local_directory(key: str, given: str | None) -> Iterator[Problem]:
    """A URL where only a directory of this host's filesystem works: it would become a local directory `s3:`."""
    if given is not None and (scheme := _URL_SCHEME.match(given)):
        need = (
            f"{scheme[0]} is not supported: a directory on this host, or on a filesystem that is mounted here (NFS, "
            "Lustre, a bucket through FUSE)"
        )
        yield Problem(key, given, need)
