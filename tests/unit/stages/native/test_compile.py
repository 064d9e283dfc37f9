"""The folder of compiled kernels, the libraries that are loaded from it, and records that are laid out as in C."""

from __future__ import annotations

import ctypes
import os
import platform
import stat
import tempfile
from pathlib import Path

import pytest

from stages.native import compile as native
from stages.native.compile import NoNativeKernelsError, build_library, cache_folder, compiler_version, load_library
from stages.native.fingerprint import machine_numerics
from tests.support.processors import needs_compiler

SOURCE = """
#include "numbers.h"
struct pair { char first; int64_t second; };
LAYOUT(pair, AT(pair, first), AT(pair, second))
int answer(void) { return 42; }
"""


class Pair(ctypes.Structure):
    _fields_ = (("first", ctypes.c_char), ("second", ctypes.c_int64))


class Packed(ctypes.Structure):
    _pack_ = 1
    _fields_ = Pair._fields_


class Shorter(ctypes.Structure):
    _fields_ = Pair._fields_[:1]


class Longer(ctypes.Structure):
    _fields_ = (*Pair._fields_, ("third", ctypes.c_int64))


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "pair.c").write_text(SOURCE)
    return tmp_path


@pytest.fixture
def homeless(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the temporary folder of a user with a number and no name, as in a container."""

    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", no_home)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def test_without_a_home_the_cache_is_in_the_temporary_folder(homeless: Path) -> None:
    folder = cache_folder()
    assert folder == homeless / f"stageline-cache-{os.geteuid()}"
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700


def test_a_home_that_cannot_be_written_is_passed_over(homeless: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "home", lambda: Path("/dev/null"))
    assert cache_folder().parent == homeless


def test_another_users_folder_is_not_loaded_from(homeless: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its name can be guessed, and everybody may write to the temporary folder."""
    me = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: me + 1)
    (homeless / f"stageline-cache-{me + 1}").mkdir()
    with pytest.raises(NoNativeKernelsError, match=f"stageline-cache-{me + 1} belongs to user {me}"):
        cache_folder()


@needs_compiler
def test_without_a_path_the_compiler_finds_its_linker(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(source / "another"))
    monkeypatch.delenv("PATH")
    assert build_library("pair", source, ("pair.c",)).exists()


@needs_compiler
def test_a_library_of_another_user_is_compiled_anew(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may have been put there while the folder was open to others."""
    library = build_library("pair", source, ("pair.c",))
    assert build_library("pair", source, ("pair.c",)) == library
    first = library.stat()
    lstat = Path.lstat

    def theirs(path: Path) -> os.stat_result:
        found = lstat(path)
        return os.stat_result([*found[:4], found.st_uid + 1, *found[5:10]]) if path == library else found

    monkeypatch.setattr(Path, "lstat", theirs)
    assert build_library("pair", source, ("pair.c",)) == library
    assert library.stat().st_ino != first.st_ino


@needs_compiler
def test_more_flags_make_another_library(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = build_library("pair", source, ("pair.c",))
    monkeypatch.setenv("STAGELINE_CFLAGS", "-g -O1")
    assert build_library("pair", source, ("pair.c",)) != plain


@needs_compiler
def test_a_record_as_c_has_it_is_loaded(source: Path) -> None:
    assert load_library("pair", source, ("pair.c",), (), {"pair": Pair}).answer() == 42


@needs_compiler
@pytest.mark.parametrize("record", [Packed, Shorter, Longer])
def test_a_record_laid_out_otherwise_is_refused(source: Path, record: type[ctypes.Structure]) -> None:
    with pytest.raises(RuntimeError, match="struct pair: offsets and size are"):
        load_library("pair", source, ("pair.c",), (), {"pair": record})


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
