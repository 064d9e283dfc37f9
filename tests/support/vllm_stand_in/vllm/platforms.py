"""Of a platform that can sleep."""

from __future__ import annotations


class Platform:
    device_type = "cuda"

    def is_sleep_mode_available(self) -> bool:
        return self.device_type == "cuda"


current_platform = Platform()
