"""A stand-in for the parts of vLLM 0.32 on a GPU that the adapter calls. vLLM on a GPU was never at hand, so the
stand-in records the calls, and refuses what vLLM would. test_vllm_on_gpus.py holds its signatures against the real
ones."""

from __future__ import annotations

import math
import os
import pickle
from importlib import import_module
from types import SimpleNamespace
from typing import Any

from vllm.platforms import GPUS, current_platform
from vllm.v1.sample.logits_processor import LogitsProcessor

__version__ = "0.32.0"


class LLM:
    """Owns the calls that were made."""

    def __init__(self, model: str, **kwargs: Any) -> None:
        self.calls: list[tuple[str, Any]] = []
        self.settings = kwargs
        self.started_with = {name: os.environ.get(name) for name in ("VLLM_WORKER_MULTIPROC_METHOD",)}
        self.sent_bytes = 0
        """Bytes that went to the ranks' processes."""
        chosen = os.environ.get("VLLM_USE_V2_MODEL_RUNNER")
        uses_v2 = current_platform.device_type == "cuda" if chosen is None else chosen == "1"
        if uses_v2 and any(issubclass(kind, LogitsProcessor) for kind in kwargs["logits_processors"]):
            raise ValueError("it is not a subclass of vllm.v1.worker.gpu.sample.logits_processor.LogitsProcessor")
        self._ranks = kwargs["tensor_parallel_size"] * kwargs["pipeline_parallel_size"]
        if current_platform.device_type == "cuda":
            for gpu in GPUS[: self._ranks]:
                if gpu.free_now() < math.ceil(gpu.total * kwargs.get("gpu_memory_utilization", 0.92)):
                    raise ValueError("Free memory on device on startup is less than desired GPU memory utilization")
        module, _, name = kwargs["worker_extension_cls"].rpartition(".")
        extension = getattr(import_module(module), name)
        self._worker = type("Worker", (_Worker, extension), {})()
        self._worker.calls = self.calls
        self.asleep: int | None = None
        self.model_config = SimpleNamespace(hf_config=SimpleNamespace(tie_word_embeddings=True))
        scheduler = SimpleNamespace(requests={}, kv_cache_manager=SimpleNamespace(usage=0.0))
        core = SimpleNamespace(engine_core=SimpleNamespace(scheduler=scheduler))
        config = SimpleNamespace(use_v2_model_runner=uses_v2)
        self.llm_engine = SimpleNamespace(engine_core=core, vllm_config=config)

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
        kwargs = kwargs or {}
        if self._ranks > 1:
            message = pickle.dumps((method, args, kwargs))
            self.sent_bytes += len(message)
            method, args, kwargs = pickle.loads(message)
        return [getattr(self._worker, method)(*args, **kwargs)] * self._ranks

    def reset_prefix_cache(self, reset_running_requests: bool = False, reset_connector: bool = False) -> bool:
        self.calls.append(("reset_prefix_cache", reset_running_requests))
        return True


class _Worker:
    """One rank's, or all of them: they do the same."""

    calls: list[tuple[str, Any]]

    def reload_weights(self, weights_iterator: Any = None, weights_path: str | None = None) -> None:
        self.calls.append(("reload_weights", {name: float(tensor.sum()) for name, tensor in weights_iterator}))


class SamplingParams:
    """Rows are not made here."""
