"""The adapter of TensorRT-LLM where there is no GPU: a device is said to be there, and its memory."""

from __future__ import annotations

import importlib.metadata
import sys
from pathlib import Path

import torch

sys.path.append(str(Path(__file__).resolve().parents[1]))  # served_llama

from stages.engines.remote.serving.trtllm_adapter import TrtllmAdapter

_version = importlib.metadata.version
importlib.metadata.version = lambda name: "0" if name == "tensorrt-llm" else _version(name)


class OnCpu(TrtllmAdapter):
    def devices(self) -> dict[str, torch.device]:
        return {"GPU-stand-in": torch.device("cpu")}

    def free_bytes(self) -> int:
        return 1 << 30
