"""Leaves out, in one line of the summary, the files of this folder that the machine cannot run."""

from __future__ import annotations

import os
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

CUDA = torch.cuda.is_available()
TRITON = find_spec("triton") is not None
RUNS_WITHOUT_CUDA = {
    "test_triton_compiles.py": TRITON,
    "test_triton_kernels.py": TRITON and os.environ.get("TRITON_INTERPRET") == "1",
}
REASON = (
    "tests/gpu needs a CUDA device (without one: test_triton_compiles.py Triton, test_triton_kernels.py Triton and "
    "TRITON_INTERPRET=1)"
)


if CUDA:
    os.environ.setdefault("NCCL_RAS_ENABLE", "0")  # NCCL's monitor, whose sockets stay open until the process ends


@pytest.fixture(scope="session", autouse=True)
def _device_is_open() -> None:
    """Open the device, which CUDA keeps open until the process ends, before `tests/support/leaks.py` first looks."""
    if CUDA:
        ones = torch.ones(8, 8, pin_memory=True).to("cuda", non_blocking=True)
        with torch.cuda.stream(torch.cuda.Stream()):
            (ones @ ones).cpu()
        torch.cuda.synchronize()


class SkippedModule(pytest.Module):
    """A file that is not even imported. All of them skip in one place with one reason, so the summary has one line."""

    def collect(self) -> list[pytest.Item]:
        pytest.skip(REASON)


def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> pytest.Module | None:
    if CUDA or RUNS_WITHOUT_CUDA.get(module_path.name, False):
        return None
    module: pytest.Module = SkippedModule.from_parent(parent, path=module_path)
    return module
