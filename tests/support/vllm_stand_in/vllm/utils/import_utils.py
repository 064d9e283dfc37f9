"""NVML as vLLM brings it along: the memory of the stand-in's GPUs."""

from __future__ import annotations

from types import SimpleNamespace

from vllm.platforms import GPUS, Gpu


def import_pynvml() -> SimpleNamespace:
    return SimpleNamespace(
        nvmlInit=lambda: None,
        nvmlShutdown=lambda: None,
        nvmlDeviceGetHandleByUUID=_by_uuid,
        nvmlDeviceGetMemoryInfo=lambda gpu: SimpleNamespace(total=gpu.total, free=gpu.free_now()),
    )


def _by_uuid(uuid: str) -> Gpu:
    return next(gpu for gpu in GPUS if gpu.uuid == uuid)
