"""The constraints of single settings: what each takes, refuses and says, and in which sections they are checked."""

from __future__ import annotations

import math
import typing
from collections.abc import Iterator
from dataclasses import dataclass, field, fields, is_dataclass

import pytest

from pipeline.config.run import RunConfig
from storage.problems import (
    Constraint,
    above,
    at_least,
    between,
    constraints_of,
    finite,
    local_directory,
    plain_name,
    setting,
    setting_problems,
    value_text,
)


@pytest.mark.parametrize(
    ("constraint", "fine", "wrong", "need"),
    [
        (at_least(1), [1, 7], [0, -1], "must be 1 or more"),
        (above(0, ", or null"), [1e-9, 3.0], [0.0, -1.0], "must be above 0, or null"),
        (between(0, 1), [0.0, 0.5, 1.0], [-0.1, 1.1], "must be from 0 to 1"),
        (between(0, 1, ends=False), [0.5], [0.0, 1.0], "must be between 0 and 1"),
        (plain_name(), ["a", "a.b-_1", "n" * 100], ["", "..", ".x", "-a", "a/b", "läuft", "n" * 101], "must be a name"),
        (plain_name(dots=False), ["a", "a-b"], ["a.b", "-a"], "must be a name"),
        (local_directory(), ["runs", "/a/b", "a:b"], ["s3://b", "file:///a"], "must be a directory on this host"),
    ],
)  # fmt: skip
def test_each_kind_of_constraint(constraint: Constraint, fine: list, wrong: list, need: str) -> None:
    assert not [problem for value in fine for problem in constraint.problems({"key": value})]
    for value in wrong:
        (problem,) = constraint.problems({"key": value})
        assert (problem.key, problem.given) == ("key", value)
        assert problem.need.startswith(need)


@pytest.mark.parametrize(
    ("value", "text"),
    [(None, "null"), (True, "true"), (2.0, "2"), (0.5, "0.5"), (2, "2"), ("a b", "'a b'"), ([None, "x"], "[null, 'x']"),
     ({"a": {"b": False}}, "{a: {b: false}}"), (math.nan, "nan")],
)  # fmt: skip
def test_a_value_is_spelled_as_in_yaml(value: object, text: str) -> None:
    assert value_text(value) == text


@pytest.mark.parametrize("constraint", [at_least(0), above(0), between(0, 1), finite()])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_number_is_finite(constraint: Constraint, value: float) -> None:
    (problem,) = constraint.problems({"key": value})
    assert problem.need.startswith("must be finite")


@dataclass
class Inner:
    """A section of the section below."""

    rate: float | None = setting(None, above(0))


@dataclass
class Outer:
    """A section with every place where a setting can be."""

    count: int = setting(1, at_least(1))
    betas: list[float] = setting([0.9], Constraint("below 1", lambda beta: beta < 1, of_elements=True))
    inner: Inner = field(default_factory=Inner)
    named: dict[str, Inner] = field(default_factory=dict)


def test_the_settings_of_inner_sections_are_checked_under_their_whole_path() -> None:
    assert not list(setting_problems(Outer()))
    outer = Outer(0, [0.5, 1.0], Inner(-1.0), {"a": Inner(1.0), "b": Inner(0.0)})
    assert [problem.key for problem in setting_problems(outer, "top")] == [
        "top.count",
        "top.betas[1]",
        "top.inner.rate",
        "top.named.b.rate",
    ]


def numbers_without_a_range(section: type, key: str = "") -> Iterator[str]:
    """Yield the key paths of a section's numbers that declare no constraint."""
    hints, constraints = typing.get_type_hints(section), constraints_of(section)
    for one in fields(section):
        path = f"{key}.{one.name}" if key else one.name
        kinds = (hints[one.name], *typing.get_args(hints[one.name]))
        for kind in kinds:
            if is_dataclass(kind) and isinstance(kind, type):
                yield from numbers_without_a_range(kind, path)
        if {int, float} & {*kinds} and not constraints[one.name]:
            yield path


def test_every_number_of_a_run_states_its_range() -> None:
    """Except these: their range follows from other settings, from the model or from the vocabulary."""
    assert {*numbers_without_a_range(RunConfig)} == {
        "model.critic_blocks",
        "model.eos_token_ids",
        "ppo.dual_clip",
        "sampling.suppress_token_ids",
    }
