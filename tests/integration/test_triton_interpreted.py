"""Triton's kernels where there is no GPU: compiled for one, and run in Triton's interpreter.

The interpreter is chosen when Triton is imported, so a process of its own has it. Triton itself may lie in a folder of
its own (`make pytest` installs it there), which only that process looks into.
"""

from __future__ import annotations

import os
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from tests.support.suites import run_suite

OWN_FOLDER = Path(sys.prefix) / "triton"

pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu runs on this machine's GPU"),
    pytest.mark.skipif(
        find_spec("triton") is None and not OWN_FOLDER.exists(), reason="Triton is not installed (make pytest does)"
    ),
]


def environment(interpret: bool) -> dict[str, str]:
    path = [*([] if find_spec("triton") else [str(OWN_FOLDER)]), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {"PYTHONPATH": os.pathsep.join(path), "TRITON_INTERPRET": "1" if interpret else "0"}


def test_what_the_kernels_compute() -> None:
    assert "skipped" not in run_suite(["tests/gpu/test_triton_kernels.py"], environment(interpret=True))


def test_that_the_kernels_compile() -> None:
    assert "skipped" not in run_suite(["tests/gpu/test_triton_compiles.py"], environment(interpret=False))
