"""The kernels in C under the compiler's sanitizers: their tests, in a process that ends at the first read or write past
an array and at the first operation without a meaning (C's undefined behaviour).

Not seen by them: what goes through the matrix registers of a CPU that has such. Compiling takes half a minute, once for
each version of the sources: libraries are kept.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.suites import run_suite

FLAGS = "-fsanitize=address,undefined -fno-sanitize-recover=all -fno-omit-frame-pointer -g -O1"
SUITES = ["tests/unit/stages/models/test_block_kernels.py", "tests/unit/stages/models/test_block_arguments.py"]
SUITES += [f"tests/unit/stages/engines/embedded/kernels/test_{each}.py" for each in ("kernels", "packed", "arguments")]

MISTAKES = """
#include <stdlib.h>
#include <stdint.h>
int past_the_end(int n) { char *a = malloc(n); a[n] = 1; int found = a[n]; free(a); return found; }
int overflow(int n) { return n + 2147483647; }
int fine(int n) { return n; }
"""
CALL = "import ctypes, sys; ctypes.CDLL(sys.argv[1])[sys.argv[2]](8)"


def library_of(compiler: str, name: str) -> str:
    """Its path; the bare name where the compiler has none."""
    found = subprocess.run([compiler, f"-print-file-name={name}"], capture_output=True, text=True, check=False)
    return found.stdout.strip() or name


@pytest.fixture(scope="module")
def environment() -> dict[str, str]:
    """Return the environment of a process that loads libraries compiled with `FLAGS`. The sanitizer must be loaded
    first."""
    compiler = shutil.which(os.environ.get("CC", "cc"))
    if compiler is None:
        pytest.skip("there is no C compiler")
    # libasan takes the place of functions of the C++ library, which must be there as well when torch throws
    runtimes = [library_of(compiler, name) for name in ("libasan.so", "libstdc++.so.6")]
    if missing := [name for name in runtimes if not Path(name).is_absolute()]:
        pytest.skip(f"{compiler} has no address sanitizer: {', '.join(missing)} not there (gcc's package libasan)")
    return {
        "STAGELINE_CFLAGS": FLAGS,
        "LD_PRELOAD": " ".join(runtimes),
        "ASAN_OPTIONS": "detect_leaks=0",  # Python keeps what it has
        "UBSAN_OPTIONS": "print_stacktrace=1",
    }


@pytest.mark.parametrize(
    ("function", "said"),
    [("past_the_end", "heap-buffer-overflow"), ("overflow", "signed integer overflow"), ("fine", "")],
)
def test_the_sanitizers_see_mistakes(environment: dict[str, str], tmp_path: Path, function: str, said: str) -> None:
    """Else the tests below would mean nothing."""
    source, library = tmp_path / "mistakes.c", tmp_path / "mistakes.so"
    source.write_text(MISTAKES)
    compiler = os.environ.get("CC", "cc")
    subprocess.run([compiler, *FLAGS.split(), "-shared", "-fPIC", str(source), "-o", str(library)], check=True)
    done = subprocess.run(
        [sys.executable, "-c", CALL, str(library), function],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode != 0) == bool(said)
    assert said in done.stderr


def test_the_kernels_read_and_write_only_what_is_theirs(environment: dict[str, str]) -> None:
    """On this CPU; the kernels as other CPUs would have them take as long again to compile each."""
    run_suite(SUITES, environment, "-s", "-k", "not x86")
