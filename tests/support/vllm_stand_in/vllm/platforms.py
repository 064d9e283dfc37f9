"""A platform that can sleep, with two GPUs of 80 GB."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass
class Gpu:
    uuid: str
    total: int = 80 * 10**9
    free_now: Callable[[], int] = lambda: 80 * 10**9
    """Returns its free bytes."""


GPUS = [Gpu("GPU-b"), Gpu("GPU-a")]


class Platform:
    device_type = "cuda"

    def is_sleep_mode_available(self) -> bool:
        return self.device_type == "cuda"

    @classmethod
    def get_device_total_memory(cls, device_id: int = 0) -> int:
        return GPUS[device_id].total

    @classmethod
    def get_device_uuid(cls, device_id: int = 0) -> str:
        return GPUS[device_id].uuid


current_platform = Platform()
