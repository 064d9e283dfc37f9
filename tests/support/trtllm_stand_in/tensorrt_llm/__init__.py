"""Stands in for TensorRT-LLM: its interface as it was recorded from the sources of 1.2 to 1.4, and nothing more. An
argument, attribute or order of calls that the record does not have is refused. Behind it is the Llama of
served_llama.py, one token of every request at a time.

STAND_IN_TRTLLM in the environment changes it, words separated by commas:

    old       no SleepConfig, no memory of the weights' own, log-probs as plain numbers
    bare      no AsyncLLM at all
    rayless   AsyncLLM's module cannot be imported, for want of Ray
    fault=N   bucket N of a refit fails half-way
"""

from __future__ import annotations

import importlib
import os

CHANGES = os.environ.get("STAND_IN_TRTLLM", "").split(",")
__version__ = "1.2.1" if "old" in CHANGES else "1.3.0"


def __getattr__(name: str) -> object:
    if name != "SamplingParams":
        raise AttributeError(name)
    return importlib.import_module("tensorrt_llm.sampling_params").SamplingParams
