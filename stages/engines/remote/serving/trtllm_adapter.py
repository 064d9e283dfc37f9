"""Serve TensorRT-LLM. This code has never run with TensorRT-LLM itself. It is tested with a stand-in, which has the
interface of versions 1.2 to 1.4 as recorded from their sources (tests/support/trtllm_stand_in). Below this is called
the recorded interface.

    rows ──► AsyncLLM.generate_async, ──► token ids, log-probs of the logits,
             one task per row             a reason to finish
    load ──► one bucket of tensors after the other: a copy on every device, whose handles go to
             `WorkerExtension.update_weights`; at the end one call with None

- **Draws**: TensorRT-LLM draws with a seed per row. So only the same engine repeats the tokens of a request (`draws:
  seeded`). With `draws: keyed`, the noise of a token would depend only on (seed, step, row, position). TensorRT-LLM
  computes log-probs from the raw logits. They are right only for rows drawn from all tokens at temperature 1, or by arg
  max. Other rows are refused before they are sent to the server.
- **Given tokens** cannot be scored: the recorded interface has no call for it.
- **Speculation** is off, since TensorRT-LLM refuses log-probs with it or returns wrong ones.
- **Weights** are loaded in place when no row is in flight. All recorded versions need Ray for this. A load that fails
  half-way leaves mixed weights. So any error ends the server, and the replica is built anew.
- **Compiled kernels** of torch and Triton are kept for the next start (`keep_compiled`).

TensorRT-LLM marks its calls for reinforcement learning as prototypes, and they differ between versions. So the function
`find_api` looks for each call. If a call is missing, an error names the call and the version.

Runs in the engine's own Python environment.
"""

from __future__ import annotations

import asyncio
import hashlib
import importlib
import importlib.metadata
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.multiprocessing.reductions import reduce_tensor

from stages.engines.remote.serving.adapter import Finished, Ready, ServedRow, Settings, map_tensors

_EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"
_POLL_S = 0.02
"""Maximum time between two looks at the client's messages."""
_MAX_NUM_TOKENS = 8192
"""TensorRT-LLM's default of `max_num_tokens`, the maximum number of tokens in a pass."""
_MOST_OF_FREE = 0.9
"""Largest share of a device's free memory that keys and values may take."""


class TrtllmAdapter:
    """Owns the engine and the event loop of its calls."""

    def __init__(self, settings: Settings) -> None:
        """Build the engine. Raises MissingFeatureError if the installed version lacks a feature. Raises RuntimeError if
        fewer GPUs than ranks are visible, if the cache does not fit beside the weights, or if TensorRT-LLM refuses the
        settings."""
        self._settings, self._dtype = settings, getattr(torch, settings.dtype)
        ranks = settings.tensor_parallel * settings.pipeline_parallel
        visible = self.devices()
        if len(visible) < ranks:
            raise RuntimeError(f"TensorRT-LLM needs {ranks} GPUs for this layout; {len(visible)} are visible")
        self._devices = dict(list(visible.items())[:ranks])
        keep_compiled(settings.extra["cache"], self._cache_key())
        self._api = find_api(sleeps=settings.extra["sleeps"])
        self._loop = asyncio.new_event_loop()
        self._tasks: dict[asyncio.Task[Finished], int] = {}
        """Task that waits for a row in flight -> id of the row. Aborted rows stay here until they end."""
        self._has_weights, self._asleep = True, False
        self._llm = self._loop.run_until_complete(self._start())
        facts = {"dtype": settings.dtype, "max_rows": str(settings.max_rows), "ranks": str(ranks)}
        self.ready = Ready("tensorrt_llm", self._api.version, facts, "cuda")

    # ---- methods that tests replace on a machine without a GPU ----

    def devices(self) -> dict[str, torch.device]:
        """Return name -> device for all visible GPUs. The name is "GPU-" followed by the GPU's UUID. New weights are
        copied to each GPU. The ranks get the IPC handles of all copies in a dictionary, and each rank finds the handles
        for its own GPU under the GPU's name."""
        gpus = [torch.cuda.get_device_properties(number) for number in range(torch.cuda.device_count())]
        return {f"GPU-{properties.uuid}": torch.device("cuda", number) for number, properties in enumerate(gpus)}

    def free_bytes(self) -> int:
        """Return the free bytes of the device with the least free memory. This device limits all ranks, since their
        caches have the same number of blocks."""
        return min(torch.cuda.mem_get_info(device)[0] for device in self._devices.values())

    # ---- `EngineAdapter` ----

    def add(self, row: ServedRow) -> None:
        if not self._has_weights:
            raise RuntimeError(f"TensorRT-LLM {self._api.version}: row {row.row} comes before the weights are back")
        task = self._loop.create_task(self._serve(row))
        self._tasks[task] = row.id

    def abort(self, ids: Sequence[int]) -> None:
        """Do nothing, since the recorded interface of TensorRT-LLM (see the module) has no call that cancels a request.
        The request runs to its end, and the server ignores its result."""

    def step(self) -> list[Finished]:
        """Wait a moment for rows to finish, and return the finished ones. TensorRT-LLM makes its steps by itself."""

        async def some() -> set[asyncio.Task[Finished]]:
            done, _ = await asyncio.wait(self._tasks, timeout=_POLL_S, return_when=asyncio.FIRST_COMPLETED)
            return done

        done = self._loop.run_until_complete(some()) if self._tasks else set()
        for task in done:
            del self._tasks[task]
        return [task.result() for task in done]

    def load(self, places: Sequence[Mapping[str, Any]]) -> None:
        """Load weights. Raises RuntimeError while the engine is asleep, since there is no memory for weights then."""
        if self._asleep:
            raise RuntimeError(f"TensorRT-LLM {self._api.version} is asleep: wake it, then load new weights")
        self._drain()
        stream = map_tensors(places)
        if _HEAD not in stream:  # tied: name the head too, or it may keep its old weights
            stream[_HEAD] = stream[_EMBEDDING]
        most = self._settings.extra["bucket_mb"] << 20
        for bucket in buckets(stream, self._dtype, most):
            self._load_bucket(bucket)
        self._call("update_weights", None)
        self._has_weights = True

    def sleep(self) -> None:
        if self._api.sleep_tags:
            self._drain()
            self._has_weights, self._asleep = False, True
            self._loop.run_until_complete(self._llm.release(list(self._api.sleep_tags)))

    def wake(self) -> None:
        if self._api.sleep_tags:
            self._loop.run_until_complete(self._llm.resume(list(self._api.sleep_tags)))
            self._asleep = False

    def load_now(self) -> tuple[float, int]:
        """Return 0.0 and 0 in place of the share of the cache in use and the number of preemptions. The recorded
        interface of TensorRT-LLM (see the module) has no call that returns these two numbers."""
        return 0.0, 0

    def close(self) -> None:
        self._llm.shutdown()
        self._loop.close()

    # ---- calls of TensorRT-LLM ----

    def _load_bucket(self, bucket: Mapping[str, torch.Tensor]) -> None:
        """Load one bucket of weights. When every rank has loaded it, its copies on the devices are freed. So copies of
        only one bucket exist at a time."""
        copies = {
            name: {key: tensor.to(device, self._dtype) for key, tensor in bucket.items()}
            for name, device in self._devices.items()
        }
        handles = {name: [(key, reduce_tensor(t)) for key, t in own.items()] for name, own in copies.items()}
        self._call("update_weights", handles)

    def _drain(self) -> None:
        """Wait for aborted rows, which use weights and cache until their end."""
        while self._tasks:
            self.step()

    async def _start(self) -> Any:
        settings, api = self._settings, self._api
        try:
            llm = api.make_llm(
                model=settings.model,
                dtype=settings.dtype,
                skip_tokenizer_init=True,
                tensor_parallel_size=settings.tensor_parallel,
                pipeline_parallel_size=settings.pipeline_parallel,
                max_batch_size=settings.max_rows,
                max_input_len=settings.max_seq,
                max_seq_len=settings.max_seq,
                # tokens of a pass: at least `max_seq`, since a prompt is fed in one pass
                max_num_tokens=max(_MAX_NUM_TOKENS, settings.max_seq),
                kv_cache_config=self._kv_cache(),
                ray_worker_extension_cls=EXTENSION,
                **api.sleep_options,
            )
            if hasattr(llm, "__await__"):
                llm = await llm
            elif hasattr(llm, "setup_async"):
                await llm.setup_async()
        except (ValueError, TypeError) as error:
            raise RuntimeError(f"TensorRT-LLM {api.version} refuses: {error}") from error
        return llm

    def _kv_cache(self) -> Any:
        """Return the settings of the cache. TensorRT-LLM takes the size of the cache only as a share of the memory that
        the weights leave free. So `engine.kv_budget_mb` is converted to such a share. Raises RuntimeError if the budget
        is too large."""
        ranks = self._settings.tensor_parallel * self._settings.pipeline_parallel
        free = self.free_bytes() - self._settings.extra["parameters"] * self._dtype.itemsize // ranks
        budget = (self._settings.kv_budget_mb << 20) // ranks
        if budget > _MOST_OF_FREE * free:
            raise RuntimeError(
                f"engine.kv_budget_mb = {self._settings.kv_budget_mb}: of a device {max(0, free) >> 20} MB are free "
                f"beside the weights, of which keys and values may take {_MOST_OF_FREE:.0%}"
            )
        return self._api.kv_cache_config(enable_block_reuse=True, free_gpu_memory_fraction=budget / free)

    async def _serve(self, row: ServedRow) -> Finished:
        version = self._api.version
        if row.forced or row.suppress or row.min_new_tokens or row.temperature not in (0, 1):
            raise RuntimeError(f"TensorRT-LLM {version}: row {row.row} asks for what its log-probs do not know")
        end = row.stop[0] if row.stop else -1  # required without a tokenizer, but unused because of `ignore_eos`
        drawn = {"top_k": 1} if row.temperature == 0 else {"temperature": 1.0, "top_k": 0, "top_p": 1.0}
        params = self._api.sampling_params(
            max_tokens=row.max_new_tokens,
            end_id=end,
            pad_id=end,
            ignore_eos=True,
            stop_token_ids=list(row.stop),
            include_stop_str_in_output=True,
            detokenize=False,
            seed=_seed(row),
            logprobs=1,
            **drawn,  # without top_k and top_p it would take the arg max
        )
        result = await self._llm.generate_async(list(row.tokens), params)
        (response,) = result.outputs
        tokens = [int(token) for token in response.token_ids]
        ended = response.finish_reason
        whole = len(tokens) == row.max_new_tokens if ended == "length" else bool(tokens) and tokens[-1] in row.stop
        if ended not in ("stop", "length") or not whole:
            raise RuntimeError(
                f"TensorRT-LLM {version}: row {row.row} has {len(tokens)} of {row.max_new_tokens} tokens and ended by "
                f"{ended!r}, with {tokens[-1:]}"
            )
        logprobs = _logprobs(response.logprobs, tokens, version)
        return Finished(row.id, np.array(tokens, np.int32), np.array(logprobs, np.float32))

    def _call(self, method: str, *arguments: Any) -> None:
        """Call a method on every rank, and wait until all have returned."""
        self._loop.run_until_complete(self._llm.collective_rpc(method, args=arguments))

    def _cache_key(self) -> dict[str, object]:
        settings = self._settings
        config = (Path(settings.model) / "config.json").read_bytes()
        return {
            "model": hashlib.sha256(config).hexdigest(),
            "dtype": settings.dtype,
            "layout": [settings.tensor_parallel, settings.pipeline_parallel, settings.max_rows, settings.max_seq],
            "versions": [importlib.metadata.version("tensorrt-llm"), torch.__version__],
            "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "none",
        }


def _seed(row: ServedRow) -> int:
    """Return a hash of 63 bits of the row's seed, step and number. In other engines these are the key of its noise."""
    key = f"{row.seed} {row.step} {row.row}".encode()
    return int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "big") >> 1


def _logprobs(given: Sequence[Any], tokens: Sequence[int], version: str) -> list[float]:
    """Return the log-prob of each drawn token. An entry of `given` may be a number, or a mapping that also lists other
    tokens. Raises RuntimeError if `given` does not have one entry per token."""
    if len(given) != len(tokens):
        raise RuntimeError(f"TensorRT-LLM {version} gave {len(given)} log-probs of {len(tokens)} tokens")
    return [
        float(at) if isinstance(at, int | float) else float(at[token].logprob)
        for at, token in zip(given, tokens, strict=True)
    ]


# ---- trtllm api ------------------------------------------------------------------------------------------

EXTENSION = "tensorrt_llm.llmapi.rlhf_utils.WorkerExtension"
"""Class that adds `update_weights` to every worker. That method is called once per bucket, and then once with None."""
_ASYNC_LLM = ("tensorrt_llm._torch.async_llm", "tensorrt_llm.llmapi", "tensorrt_llm")
_MEMORY = ("tensorrt_llm._torch.virtual_memory",)
_COMPILERS_FOLDERS = {"TORCHINDUCTOR_CACHE_DIR": "inductor", "TRITON_CACHE_DIR": "triton"}
"""Environment variable -> name of a folder inside the folder that `keep_compiled` returns. The variable tells torch or
Triton to keep its compiled kernels in this folder."""


class MissingFeatureError(RuntimeError):
    """The installed version of TensorRT-LLM lacks a feature that we need. The message names the version and the
    feature."""


@dataclass(frozen=True)
class TrtllmApi:
    """The parts of the interface of one version of TensorRT-LLM that we use."""

    version: str
    make_llm: Any
    """The class AsyncLLM, the only class whose weights can be replaced. It needs Ray."""
    sampling_params: Any
    kv_cache_config: Any
    sleep_options: Mapping[str, Any]
    """Arguments of AsyncLLM that make the engine able to sleep. Empty if it need not sleep."""
    sleep_tags: tuple[str, ...]
    """Tags of the memory to free in sleep: the tag of keys and values, and the tag of the weights. Empty if the engine
    need not sleep."""


def find_api(*, sleeps: bool) -> TrtllmApi:
    """Return the interface of the installed version. `sleeps`: True if the engine must be able to sleep. Raises
    MissingFeatureError if the version lacks a feature, and RuntimeError if one of its modules cannot be imported."""
    package = importlib.import_module("tensorrt_llm")
    version = str(package.__version__)
    llmapi = importlib.import_module("tensorrt_llm.llmapi")
    options: dict[str, Any] = {}
    tags: tuple[str, ...] = ()
    if sleeps:
        own_config = getattr(llmapi, "SleepConfig", None)
        options = {"enable_sleep": True} if own_config is None else {"sleep_config": own_config()}
        tags = _sleep_tags(_find_attribute(version, _MEMORY, "ExecutorMemoryType"), version)
    return TrtllmApi(
        version=version,
        make_llm=_find_attribute(version, _ASYNC_LLM, "AsyncLLM"),
        sampling_params=_attribute(version, package, "SamplingParams"),
        kv_cache_config=_attribute(version, llmapi, "KvCacheConfig"),
        sleep_options=options,
        sleep_tags=tags,
    )


def keep_compiled(folder: str, key: Mapping[str, object]) -> Path:
    """Make torch and Triton store their compiled kernels in a folder below `folder` that belongs to `key` (model,
    layout, versions), and return this folder. The next start with the same key then need not compile the kernels again.
    Call this before tensorrt_llm is imported."""
    name = hashlib.sha256(json.dumps(dict(key), sort_keys=True, default=str).encode()).hexdigest()[:16]
    place = Path(folder) / name
    for variable, inside in _COMPILERS_FOLDERS.items():
        (place / inside).mkdir(parents=True, exist_ok=True)
        os.environ[variable] = str(place / inside)
    (place / "key.json").write_text(json.dumps(dict(key), sort_keys=True, default=str, indent=1), "utf8")
    return place


def buckets(
    tensors: Mapping[str, torch.Tensor], dtype: torch.dtype, most_bytes: int
) -> Iterator[dict[str, torch.Tensor]]:
    """Yield tensors in groups of at most `most_bytes`, counted in the engine's dtype. The tensors of a transformer
    block stay together, since engines fuse them. If a block is larger than `most_bytes`, its group is larger too."""
    groups: dict[str, list[str]] = {}
    for name in tensors:
        parts = name.split(".")
        group = ".".join(parts[:3]) if parts[:2] == ["model", "layers"] else ".".join(parts[:2])
        groups.setdefault(group, []).append(name)
    bucket: dict[str, torch.Tensor] = {}
    size = 0
    for names in groups.values():
        more = sum(tensors[name].numel() for name in names) * dtype.itemsize
        if bucket and size + more > most_bytes:
            yield bucket
            bucket, size = {}, 0
        bucket |= {name: tensors[name] for name in names}
        size += more
    if bucket:
        yield bucket


def _sleep_tags(kinds: Any, version: str) -> tuple[str, ...]:
    """Return the tags of the memory to free: the tag of the cache, and the tag of the weights. If the weights have no
    tag of their own, the second tag is the tag of the whole model. Raises MissingFeatureError if a tag is missing."""
    named = {kind.name: str(kind.value) for kind in kinds}
    weights = "MODEL_WEIGHTS_MAIN" if "MODEL_WEIGHTS_MAIN" in named else "MODEL_ENGINE_MAIN"
    for name in ("KV_CACHE", weights):
        if name not in named:
            raise MissingFeatureError(f"TensorRT-LLM {version} has no memory called {name}: {', '.join(named)}")
    return named["KV_CACHE"], named[weights]


def _find_attribute(version: str, modules: tuple[str, ...], name: str) -> Any:
    """Return the attribute `name` of the first module that has it. Raises MissingFeatureError if no module has it.
    Raises RuntimeError if a module exists but cannot be imported, for example because it needs another package."""
    for module in modules:
        try:
            value = importlib.import_module(module)
        except ImportError as error:
            absent = error.name if isinstance(error, ModuleNotFoundError) else None
            if absent is not None and f"{module}.".startswith(f"{absent}."):
                continue
            raise RuntimeError(f"TensorRT-LLM {version}: {module} cannot be imported: {error}") from error
        if hasattr(value, name):
            return getattr(value, name)
    raise MissingFeatureError(f"TensorRT-LLM {version} has no {name} in {', '.join(modules)}")


def _attribute(version: str, module: Any, name: str) -> Any:
    try:
        return getattr(module, name)
    except AttributeError as error:
        raise MissingFeatureError(f"TensorRT-LLM {version} has no {module.__name__}.{name}") from error
