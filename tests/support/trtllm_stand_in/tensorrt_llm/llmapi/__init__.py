"""Recorded: `KvCacheConfig`; `SleepConfig` in newer versions."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from tensorrt_llm import CHANGES


@dataclass(kw_only=True)
class KvCacheConfig:
    enable_block_reuse: bool = True
    enable_partial_reuse: bool = True
    copy_on_partial_reuse: bool = True
    free_gpu_memory_fraction: float = 0.9
    tokens_per_block: int = 32

    def __post_init__(self) -> None:
        if not 0 < self.free_gpu_memory_fraction <= 1:
            raise ValueError("free_gpu_memory_fraction must be between 0 and 1")


if "old" not in CHANGES:

    @dataclass(kw_only=True)
    class SleepConfig:
        restore_modes: dict[Any, Any] = field(default_factory=dict)
