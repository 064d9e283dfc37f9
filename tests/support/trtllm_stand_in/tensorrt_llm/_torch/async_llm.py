"""Recorded: `AsyncLLM`, with the worker extension's `update_weights` behind `collective_rpc`."""

from __future__ import annotations

import asyncio
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from served_llama import ServedLlama

from stages.engines.remote.serving.adapter import Settings
from tensorrt_llm import CHANGES
from tensorrt_llm._torch.virtual_memory import ExecutorMemoryType
from tensorrt_llm.sampling_params import SamplingParams

if "bare" in CHANGES:
    raise ModuleNotFoundError(f"No module named {__name__!r}", name=__name__)
if "rayless" in CHANGES:
    raise ModuleNotFoundError("No module named 'ray'", name="ray")
FAULT = next((int(word.partition("=")[2]) for word in CHANGES if word.startswith("fault=")), None)


@dataclass
class Logprob:
    logprob: float
    rank: int | None = None


@dataclass
class CompletionOutput:
    token_ids: list[int]
    logprobs: list[Any]
    finish_reason: str | None = None


@dataclass
class RequestOutput:
    outputs: list[CompletionOutput]


class AsyncLLM:
    def __init__(
        self,
        model: str,
        tokenizer: Any = None,
        tokenizer_mode: str = "auto",
        skip_tokenizer_init: bool = False,
        trust_remote_code: bool = False,
        tensor_parallel_size: int = 1,
        dtype: str = "auto",
        revision: str | None = None,
        tokenizer_revision: str | None = None,
        **kwargs: Any,
    ) -> None:
        known = {
            "pipeline_parallel_size", "max_batch_size", "max_input_len", "max_seq_len", "max_num_tokens",
            "kv_cache_config", "speculative_config", "enable_chunked_prefill", "load_format", "cuda_graph_config",
            "disable_overlap_scheduler", "allreduce_strategy", "sampler_type", "orchestrator_type",
            "ray_worker_extension_cls", "enable_sleep" if "old" in CHANGES else "sleep_config",
        }  # fmt: skip
        if set(kwargs) - known:
            raise ValueError(f"Unknown arguments: {sorted(set(kwargs) - known)}")
        # The folder in which the real one's compilers would keep what they make is known by now.
        if not Path(os.environ["TRITON_CACHE_DIR"]).is_dir():
            raise ValueError("nowhere to compile")
        self._max_input, self._max_seq = kwargs.get("max_input_len", 1024), kwargs["max_seq_len"]
        self._max_fed = None if kwargs.get("enable_chunked_prefill") else kwargs.get("max_num_tokens", 8192)
        extra: dict[str, Any] = {}
        settings = Settings(model, dtype, self._max_seq, kwargs["max_batch_size"], 0, 1, 1, 1, extra)
        self._llama = ServedLlama(settings)
        self._names = set(self._llama._weights)
        self._tied = bool(json.loads((Path(model) / "config.json").read_text()).get("tie_word_embeddings"))
        self._can_sleep = bool(kwargs.get("enable_sleep") or kwargs.get("sleep_config"))
        self._ready, self._requests, self._buckets = False, 0, 0
        self._new: dict[str, torch.Tensor] | None = None
        self._asleep: set[str] = set()

    if "old" in CHANGES:

        async def setup_async(self) -> None:
            await self._start()

    else:

        def __await__(self) -> Any:
            return self._start().__await__()

    async def _start(self) -> AsyncLLM:
        self._ready = True
        return self

    def generate_async(
        self,
        inputs: list[int],
        sampling_params: SamplingParams | None = None,
        lora_request: Any = None,
        prompt_adapter_request: Any = None,
        streaming: bool = False,
    ) -> Any:
        if not self._ready or self._new is not None or self._asleep:
            raise RuntimeError("not ready, in the middle of a refit, or asleep")
        if len(inputs) > self._max_input or len(inputs) + sampling_params.max_tokens > self._max_seq:
            raise ValueError("The sum of prompt length and max_tokens is too large")
        if self._max_fed is not None and len(inputs) > self._max_fed:
            raise ValueError(f"The prompt length ({len(inputs)}) should not exceed max_num_tokens ({self._max_fed})")
        self._requests += 1
        return asyncio.ensure_future(self._run(list(inputs), sampling_params))

    async def release(self, tags: list[str]) -> None:
        if not self._can_sleep:
            raise ValueError("enable_sleep is false")
        if self._requests:
            raise RuntimeError("rows are running")
        self._asleep |= {ExecutorMemoryType(tag).value for tag in tags}
        self._llama._weights = {name: torch.full_like(t, 1e4) for name, t in self._llama._weights.items()}

    async def resume(self, tags: list[str]) -> None:
        self._asleep -= {ExecutorMemoryType(tag).value for tag in tags}

    async def collective_rpc(
        self, method: str, args: tuple[Any, ...] = (), kwargs: Any = None, unique_reply_rank: int | None = None
    ) -> list[Any]:
        if method != "update_weights":
            raise AttributeError(f"workers have no {method}")
        return [self._update_weights(*args)]

    def shutdown(self) -> None:
        self._ready = False

    def _update_weights(self, ipc_handles: dict[str, Any] | None) -> None:
        if self._requests or self._asleep:
            raise RuntimeError("requests must be drained")
        if ipc_handles is None:
            missing = self._names - self._new.keys()
            if missing:
                raise RuntimeError(f"{sorted(missing)[0]} did not come")
            self._llama._weights = self._new
            self._new, self._buckets = None, 0
            return
        self._buckets += 1
        if self._buckets == FAULT:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        self._new = {} if self._new is None else self._new
        for name, (rebuild, arguments) in ipc_handles["GPU-stand-in"]:
            if name not in self._names and not (self._tied and name == "lm_head.weight"):
                raise KeyError(name)
            self._new[name] = rebuild(*arguments).float().clone()

    async def _run(self, prompt: list[int], params: SamplingParams) -> RequestOutput:
        """Log-probs are of the logits as they are, whatever is drawn from."""
        made = CompletionOutput([], [])
        generator = torch.Generator().manual_seed((params.seed or 0) % 2**63)
        try:
            while made.finish_reason is None:
                await asyncio.sleep(0)
                logits = self._llama._logits([*prompt, *made.token_ids])
                logprobs = logits.log_softmax(-1)
                token = int(logits.argmax())
                if not params.greedy:
                    token = int(torch.multinomial((logits / (params.temperature or 1.0)).softmax(-1), 1, True,
                                                  generator=generator))  # fmt: skip
                made.token_ids.append(token)
                if "old" in CHANGES:
                    made.logprobs.append(float(logprobs[token]))
                else:  # the likeliest first, whichever was drawn
                    best = int(logits.argmax())
                    made.logprobs.append({i: Logprob(float(logprobs[i])) for i in dict.fromkeys((best, token))})
                if token in (params.stop_token_ids or []) or (token == params.end_id and not params.ignore_eos):
                    made.finish_reason = "stop"
                    if not params.include_stop_str_in_output:
                        made.token_ids.pop()
                elif len(made.token_ids) == params.max_tokens:
                    made.finish_reason = "length"
        finally:
            self._requests -= 1
        return RequestOutput([made])
