"""What the adapter of vLLM calls of vLLM 0.32 on a GPU, which was never at hand: it records the calls, and refuses what
vLLM would. test_vllm_sleep.py holds its signatures against the real ones."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

__version__ = "0.32.0"


class LLM:
    """Owns the calls that were made."""

    def __init__(self, model: str, **kwargs: Any) -> None:
        self.calls: list[tuple[str, Any]] = []
        self.settings = kwargs
        self.asleep: int | None = None
        self.model_config = SimpleNamespace(hf_config=SimpleNamespace(tie_word_embeddings=True))
        scheduler = SimpleNamespace(requests={}, kv_cache_manager=SimpleNamespace(usage=0.0))
        core = SimpleNamespace(engine_core=SimpleNamespace(scheduler=scheduler))
        self.llm_engine = SimpleNamespace(engine_core=core)

    def sleep(self, level: int = 1, mode: str = "abort") -> None:
        if not self.settings["enable_sleep_mode"] or self.asleep is not None or level not in (1, 2):
            raise RuntimeError(f"sleep({level}) of {self.settings}, asleep at {self.asleep}")
        self.asleep = level
        self.calls.append(("sleep", level))

    def wake_up(self, tags: list[str] | None = None) -> bool:
        if self.asleep is None:
            raise RuntimeError("wake_up() of one that is awake")
        self.asleep = None
        self.calls.append(("wake_up", tags))
        return True

    def collective_rpc(
        self,
        method: str,
        timeout: float | None = None,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> list[Any]:
        if self.asleep is not None:
            raise RuntimeError(f"{method} of one that is asleep")
        self.calls.append((method, sorted(name for name, _ in kwargs["weights_iterator"])))
        return [None]

    def reset_prefix_cache(self, reset_running_requests: bool = False, reset_connector: bool = False) -> bool:
        self.calls.append(("reset_prefix_cache", reset_running_requests))
        return True


class SamplingParams:
    """Rows are not made here."""
