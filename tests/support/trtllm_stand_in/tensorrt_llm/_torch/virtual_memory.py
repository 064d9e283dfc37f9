"""Recorded: the names of memory that can be given back."""

from __future__ import annotations

from enum import StrEnum

from tensorrt_llm import CHANGES

_NAMES = {"KV_CACHE": "kv_cache", "MODEL_ENGINE_MAIN": "model", "MODEL_EXTRA": "model_extra"}
if "old" not in CHANGES:
    _NAMES["MODEL_WEIGHTS_MAIN"] = "model_weights"
ExecutorMemoryType = StrEnum("ExecutorMemoryType", _NAMES)
