"""Packed weights where a sanitizer sees their ends: each in memory of its own, not in a mapping with others."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch

from stages.engines.embedded.kernels.packed import Slabs


@pytest.fixture(scope="session", autouse=True)
def _weights_apart() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        if "sanitize" in os.environ.get("STAGELINE_CFLAGS", ""):
            patch.setattr(Slabs, "take", lambda self, num_bytes: torch.zeros(num_bytes, dtype=torch.uint8))
        yield
