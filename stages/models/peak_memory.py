"""The most memory that this process has taken so far. May import torch and the standard library."""

from __future__ import annotations

import resource
import sys

import torch


def peak_bytes() -> int:
    """On CUDA what torch had allocated on this process's device at most; otherwise the largest resident set, which
    holds the libraries, and the pages of files that were mapped, too."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated()
    largest = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return largest if sys.platform == "darwin" else 1024 * largest
