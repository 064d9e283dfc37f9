"""A run's identity on the disk: it comes back as it was, damage is seen, and what does not belong to it is named."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from pipeline.config.identity import (
    FILE,
    GangNumerics,
    Identity,
    Statement,
    config_sections,
    edited_settings,
    fingerprint,
    identity_faults,
    read_identity,
    write_identity,
)
from pipeline.config.loading import config_hash, load_config
from pipeline.config.run import RunConfig
from storage.address import Address
from storage.commits import Commit, provenance_here
from storage.errors import StoreError
from tests.support.paths import TINY

ITEMS = {"instructions": "avx2", "torch": "2.0"}


def load(*overrides: str) -> RunConfig:
    return load_config([TINY], overrides)


def stated(config: RunConfig, **changes: object) -> Statement:
    first = Statement(1.0, "started", config_sections(config), config_hash(config), {"torch": "2.0"})
    return replace(first, **changes)  # type: ignore[arg-type]


def identity_of(*statements: Statement, gangs: tuple[GangNumerics, ...] = ()) -> Identity:
    return Identity({"policy": {"config.json": "ab"}}, "cd", statements, gangs)


def numerics(gang: str, items: dict[str, str], statement: int = 0) -> GangNumerics:
    return GangNumerics(gang, fingerprint(items), items, f"{gang}-0", 1.0, statement)


def commit_of(config_digest: str, numerics_digest: str) -> Commit:
    made = provenance_here(seed=0, config_hash=config_digest, numerics=numerics_digest)
    return Commit(Address("publish", 0), "a", None, 0, {}, made, 1.0)


def test_it_comes_back_as_it_was_written(tmp_path: Path) -> None:
    assert read_identity(tmp_path) is None
    config = load("model.policy.lr=1e-7")
    later = stated(config, why="resumed", changed=("cluster.attempts=3 (was 2)",))
    identity = identity_of(stated(config), later, gangs=(numerics("train", ITEMS),))
    write_identity(tmp_path, identity)
    assert read_identity(tmp_path) == identity


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: data[: len(data) // 2],
        lambda data: data.replace(b'"seed": 0', b'"seed": 1'),
        lambda data: b"[]",
        lambda data: b"",
        lambda data: data.replace(b'"format": 1', b'"format": 9'),
    ],
)
def test_damage_is_seen(tmp_path: Path, damage) -> None:  # type: ignore[no-untyped-def]
    write_identity(tmp_path, identity_of(stated(load())))
    file = tmp_path / FILE
    file.write_bytes(damage(file.read_bytes()))
    with pytest.raises(StoreError, match=r"identity\.json"):
        read_identity(tmp_path)


def test_an_edited_config_is_told_from_one_that_a_dying_driver_left() -> None:
    old, new = load(), load("cluster.attempts=9")
    identity = identity_of(stated(old), stated(new))
    assert edited_settings(identity, config_sections(new)) == []
    assert edited_settings(identity, config_sections(old)) == [], (
        "it died between stating the change and writing the config"
    )
    assert edited_settings(identity, config_sections(load("name=moved", "runs_dir=/x", "cluster.attempts=9"))) == []
    (change,) = edited_settings(identity, config_sections(load("model.policy.lr=0.5", "cluster.attempts=9")))
    assert str(change) == "model.policy.lr=0.5 (was 0.001)"


def test_commits_of_another_config_or_other_numerics_are_named() -> None:
    config, other = load(), load("evaluate.every=4")
    identity = identity_of(stated(config), stated(other), gangs=(numerics("train", ITEMS),))
    own = [commit_of(config_hash(each), fingerprint(ITEMS)) for each in (config, other)]
    assert list(identity_faults(identity, config_sections(other), own)) == []
    strange, elsewhere = commit_of("beef", fingerprint(ITEMS)), commit_of(config_hash(config), "cafe")
    faults = list(identity_faults(identity, config_sections(load("seed=1", "evaluate.every=4")), [strange, elsewhere]))
    assert faults == [
        "config.yaml is not what was stated: seed=1 (was 0)",
        f"{strange.address}: made under config beef, which {FILE} does not list",
        f"{strange.address}: made on numerics cafe, which {FILE} does not list",
    ]
    assert "is missing" in next(identity_faults(None, config_sections(config), own))


def test_numerics_from_before_a_new_beginning_are_no_measure() -> None:
    old, new = numerics("train", ITEMS), numerics("train", ITEMS | {"instructions": "avx512f"}, statement=1)
    config = load()
    assert identity_of(stated(config), gangs=(old,)).numerics_of("train") == [old]
    anew = identity_of(stated(config), stated(config, anew=True), gangs=(old, new))
    assert anew.numerics_of("train") == [new]
    assert anew.numerics_of("generate") == []
