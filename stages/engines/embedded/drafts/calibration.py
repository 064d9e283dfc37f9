"""Build an engine's speculation: its drafters, and its cost model. The cost model comes from passes of several sizes
that are timed before the first row."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Sequence
from typing import Literal

import numpy as np
import psutil
import torch

from stages.engines.config import HIDDEN_STATES_BYTES, EngineConfig
from stages.engines.embedded.batch import Batch
from stages.engines.embedded.cache import BlockPool
from stages.engines.embedded.drafts.costs import CALIBRATED, PassCosts
from stages.engines.embedded.drafts.distillation import Student, Teacher
from stages.engines.embedded.drafts.draft_head import LearnedDrafter
from stages.engines.embedded.drafts.drafters import Drafter, NgramDrafter
from stages.engines.embedded.drafts.speculation import Speculation
from stages.engines.embedded.kernels.blocks import blocks_for
from stages.engines.embedded.kernels.cpu.native import load_native_kernels
from stages.engines.embedded.kernels.reference import TorchKernels
from stages.engines.embedded.runner import Runner
from stages.models.hf_weights import read_weights
from stages.models.spec import EMBEDDING, FINAL_NORM, read_spec

_GUESSES = 32
"""Number of tokens of the pass that measures the cost of a long context. It is so large that attention takes a large
part of the pass's time. If the largest timed size (`CALIBRATED`) is smaller, that size is used."""
_PROPORTIONAL = 3.0
"""If a pass of n tokens takes more than this many times as long as a pass of n / 4 tokens, larger passes are not timed.
The time of larger passes grows nearly in proportion to their size, so drafts do not pay there. Timing larger passes
would take seconds on a slow processor."""
HEAD_VOCAB = 4096
"""Number of tokens in the learned head's vocabulary: the most frequent tokens of the responses."""
LENGTHS: Literal["measured", "longest"] = "measured"
"""Choice of the length of drafts. measured: the length with the highest expected tokens per second, possibly 0.
longest: the maximum that the drafters make. longest is slower if many guesses are wrong, but tests use it to get drafts
on any machine."""
BRANCHES = 4
"""Maximum number of the learned head's guesses per position. Of these, one pass verifies all that are likely enough. A
fifth guess would rarely be right. Kernels that do not support trees of guesses (Triton) get one guess per position."""
TRAIN_SHARE = 0.5
"""Maximum share of the engine's idle time that is spent on training the head."""
BUSY_TRAIN_SHARE = 0.02
"""Maximum share of the engine's idle time that is spent on training the head while all cores of this process are busy.
Training would then slow down the other processes on these cores."""
_MEASURED_S = 0.25
"""Minimum length of an interval in which idle cores are measured. The system counts CPU time in steps of 10 ms."""


class TrainingShare:
    """The share of the engine's idle time in which the draft head may be trained.

    Training is done in lessons of some tens of milliseconds. Between two lessons the engine waits. During these waits,
    the idle time of the cores that this process may use is measured. If on average one core or more is idle, the share
    is `TRAIN_SHARE`. Otherwise the share is `BUSY_TRAIN_SHARE`.
    """

    def __init__(self) -> None:
        self._wait_began: tuple[float, float] | None = None
        self._waited = self._idle = 0.0
        """Seconds of waits since `_is_spare` was last set, and idle core-seconds during these waits."""
        self._is_spare = False

    def __call__(self, lesson_begins: bool) -> float:
        """Return the share of the engine's idle time in which the draft head may be trained now. Call this with True
        before each training step of some tens of milliseconds (a lesson), and with False after it."""
        at, idle = self._sample()
        if lesson_begins and self._wait_began is not None:
            self._waited += at - self._wait_began[0]
            self._idle += idle - self._wait_began[1]
            if self._waited >= _MEASURED_S:
                self._is_spare = self._idle >= self._waited
                self._waited = self._idle = 0.0
        self._wait_began = None if lesson_begins else (at, idle)
        return TRAIN_SHARE if self._is_spare else BUSY_TRAIN_SHARE

    def _sample(self) -> tuple[float, float]:
        """Return the time, and the idle seconds so far of the cores that this process may use."""
        cores = psutil.cpu_times(percpu=True)
        own = [cores[number] for number in os.sched_getaffinity(0) if number < len(cores)]
        return time.perf_counter(), sum(core.idle + core.iowait for core in own)


def training_share(device: torch.device) -> Callable[[bool], float]:
    """Return a function that returns the share of idle time in which the draft head may be trained (see
    `TrainingShare`). On a GPU the share is constant, since the GPU belongs to the engine alone. An engine on CPUs may
    share its cores with a busy trainer."""
    return (lambda lesson_begins: TRAIN_SHARE) if device.type == "cuda" else TrainingShare()


def build_speculation(
    engine: EngineConfig,
    drafters: Sequence[Drafter],
    path: str,
    runner: Runner,
    pool: BlockPool,
    *,
    max_seq: int,
    threads: int,
    device: torch.device,
) -> Speculation | None:
    """Return the object that does an engine's speculative decoding. It uses the given drafters. If `drafters` is empty,
    it uses the drafters that `engine.embedded.speculation.drafter` names. Return None if the config names no drafter
    either."""
    config = engine.embedded.speculation
    drafters = drafters or named_drafters(engine, path, runner, device)
    if not drafters:
        return None
    costs = PassCosts({1: 1.0, 2: 1.0})
    if LENGTHS == "measured":
        costs = measure_costs(runner, pool, max_seq=max_seq, threads=threads)
    return Speculation(
        drafters,
        costs,
        config.max_tokens,
        LENGTHS,
        time.perf_counter,
        training_share(device),
        branching=runner.supports_trees,
    )


def named_drafters(engine: EngineConfig, path: str, runner: Runner, device: torch.device) -> list[Drafter]:
    """Return the drafters that `engine.embedded.speculation.drafter` names."""
    config = engine.embedded.speculation
    drafters: list[Drafter] = []
    if config.drafter in ("ngram", "both"):
        drafters.append(NgramDrafter())
    if config.drafter in ("learned", "both"):
        own = load_native_kernels() if runner.kernels == "native" else TorchKernels()
        branches = BRANCHES if runner.supports_trees else 1
        drafters.append(LearnedDrafter(make_student(path, device), own, getattr(torch, engine.dtype), branches))
    return drafters


def make_student(path: str, device: torch.device, head_vocab: int = HEAD_VOCAB) -> Student:
    """Return an untrained draft head for the model in `path`."""
    return Student(read_teacher(path), read_spec(path).vocab_size, head_vocab, HIDDEN_STATES_BYTES, device)


def read_teacher(path: str) -> Teacher:
    """Return the parts of the model in `path` that the draft head learns from. The large parts are read when they are
    needed."""
    spec = read_spec(path)
    return Teacher(
        embedding=lambda tokens: read_weights(path)[EMBEDDING][torch.tensor(tokens)],
        out=lambda tokens: read_weights(path)[spec.output_tensor][torch.tensor(tokens)],
        out_name=spec.output_tensor,
        norm=read_weights(path)[FINAL_NORM].float().clone(),
        norm_name=FINAL_NORM,
        norm_eps=spec.norm_eps,
    )


def measure_costs(runner: Runner, pool: BlockPool, *, max_seq: int, threads: int) -> PassCosts:
    """Time forward passes, and return a cost model of passes.

    Passes of the sizes (numbers of tokens) in `CALIBRATED` are timed at a short context, the smallest size first.
    Timing stops early if a pass takes more than `_PROPORTIONAL` times as long as a pass of a quarter of its size. From
    there on, time grows nearly in proportion to the size. One size is also timed at the longest context.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    seconds: dict[int, float] = {}
    try:
        for size in CALIBRATED:
            seconds[size] = time_pass(runner, pool, size)
            if seconds[size] > _PROPORTIONAL * seconds.get(size // 4, math.inf):
                break
        guesses = min(_GUESSES, size)
        longest = time_pass(runner, pool, guesses, max_seq - 1)
    finally:
        torch.set_num_threads(before)
    return PassCosts(seconds, (longest - seconds[guesses]) / (guesses * max_seq))


def time_pass(runner: Runner, pool: BlockPool, num_tokens: int, position: int = 0, repeats: int = 5) -> float:
    """Return the time in seconds of a pass that feeds `num_tokens` tokens and draws a token after each. Every token is
    a row of its own, and all rows read the same blocks up to `position`. The result is the minimum of several runs,
    since other processes can only slow a pass down."""
    blocks = [pool.take() for _ in range(blocks_for(position + 1))]
    index = np.arange(num_tokens)
    batch = Batch(
        ids=np.zeros(num_tokens, np.int64),
        positions=np.full(num_tokens, position, np.int64),
        rows=index.astype(np.int32),
        tables=np.tile(np.array(blocks, np.int32), (num_tokens, 1)),
        drawn=index,
        keys=index.astype(np.uint64),
        temperatures=[1.0] * num_tokens,
        banned=[()] * num_tokens,
    )
    seconds = []
    for _ in range(repeats):
        started = time.perf_counter()
        for _ in range(runner.depth):
            runner.submit(batch)
        for _ in range(runner.depth):
            runner.collect()
        seconds.append((time.perf_counter() - started) / runner.depth)
    pool.release(blocks)
    return min(seconds)
