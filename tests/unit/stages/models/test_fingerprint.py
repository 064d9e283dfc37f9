"""A process's statement of everything that its last bits depend on: constant, and different after a change."""

from __future__ import annotations

import platform
from pathlib import Path

import pytest
import torch

from stages.models.weights import machine_numerics, software
from stages.native import compile as native
from stages.native.compile import build_library, compiler_version


def test_software_has_versions() -> None:
    here = software()
    assert here["torch"].split("+")[0] == torch.__version__.split("+")[0]
    assert here["python"] == platform.python_version()
    assert {"numpy", "megatron-core"} <= here.keys()


def test_it_is_the_same_each_time_and_all_text() -> None:
    first = machine_numerics()
    assert machine_numerics() == first
    assert all(isinstance(value, str) for value in first.values())
    assert first["machine"] == platform.machine()
    assert "-march=native" in first["compiler.flags"]
    assert first["amx"] in ("none", "granted", "refused")


@pytest.mark.parametrize("name", ["ONEDNN_MAX_CPU_ISA", "MKL_CBWR"])
def test_variables_that_change_bits_are_part_of_it(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    before = machine_numerics()
    monkeypatch.setenv(name, "AVX2")
    after = machine_numerics()
    assert {item for item in before if before[item] != after[item]} == {"environment"}
    assert f"{name}=AVX2" in after["environment"]


def fake_compiler(folder: Path, release: str) -> None:
    compiler = folder / "cc"
    compiler.write_text(
        f"""#!/bin/sh
if [ "$1" = --version ]; then echo "{release}"; echo more; exit; fi
while [ $# -gt 0 ]; do [ "$1" = -o ] && echo "{release}" > "$2"; shift; done
"""
    )
    compiler.chmod(0o755)


def test_another_compiler_at_the_path_builds_another_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("CC", str(tmp_path / "cc"))
    (tmp_path / "a.c").write_text("")
    libraries = set()
    for release in ("cc 1.0", "cc 2.0"):
        fake_compiler(tmp_path, release)
        native._version_of.cache_clear()  # as a new process has it
        assert compiler_version() == release
        assert machine_numerics()["compiler"] == release
        libraries.add(build_library("a", tmp_path, ("a.c",)))
    assert len(libraries) == 2


def test_no_compiler_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", "no-such-compiler")
    assert compiler_version() is None
    assert machine_numerics()["compiler"] == "none"
