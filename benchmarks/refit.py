"""Seconds to bring new weights into a running engine: all tensors, and those of six blocks (a partly frozen policy).

Beside them, in turn in every repeat: one copy of the same bytes into memory that is there already (the least that any
refit takes), and packing alone. `while decoding`: 16 rows run meanwhile, and weights are swapped between two tokens.
The cold start is the engine made from files. Tensors are float32, as the trainer publishes them.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import closing
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.harness import arguments, measured_load, report, write_json
from stages.engines.config import EngineConfig, SamplingConfig
from stages.engines.protocol import Request
from stages.engines.runner import LocalRunner
from stages.engines.torch_engine import TorchEngine
from stages.hf_files import read_weights

CORES = os.cpu_count() or 1
CPU = torch.device("cpu")
MODEL = Path("assets/smollm2-135m-instruct")
DTYPES = ("float32", "bfloat16")
SLOTS, MAX_SEQ, NEW_TOKENS = 16, 256, 64
NUM_BLOCKS = 6


def seconds_of(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def copy_seconds(tensors: Mapping[str, torch.Tensor], room: Mapping[str, torch.Tensor]) -> float:
    def copy() -> None:
        for name, tensor in tensors.items():
            room[name].copy_(tensor)

    return seconds_of(copy)


def load_while_decoding(engine: TorchEngine, version: int, tensors: Mapping[str, torch.Tensor]) -> float:
    """Seconds of `load_weights` beside as many rows as there are slots, which then run to their end."""
    sampling = SamplingConfig(NEW_TOKENS, NEW_TOKENS)
    engine.stats()
    running = engine.generate(Request(i, 1, 1, (5, 6, 7 + i), engine.version, sampling) for i in range(SLOTS))
    while not engine.stats().tokens:
        time.sleep(0.005)
    seconds = seconds_of(lambda: engine.load_weights(version, tensors))
    for _ in running:
        pass
    return seconds


def measure(path: Path, dtype: str, repeats: int) -> tuple[list[tuple[str, ...]], dict[str, float]]:
    """Rows of the table and figures by name, for weights of one dtype."""
    tensors = {name: tensor.float() for name, tensor in read_weights(str(path)).items()}
    few = {n: t for n, t in tensors.items() if n.startswith(tuple(f"model.layers.{i}." for i in range(NUM_BLOCKS)))}
    room = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
    settings = EngineConfig(slots=SLOTS, dtype=dtype, update="inflight")  # type: ignore[arg-type]
    seconds: dict[str, list[float]] = {}
    started = time.perf_counter()
    with closing(TorchEngine(str(path), settings, max_seq=MAX_SEQ, threads=CORES, device=CPU)) as engine:
        cold = time.perf_counter() - started
        runner = LocalRunner(str(path), settings, max_seq=MAX_SEQ, device=CPU)
        version = 0
        with measured_load() as load:
            for _ in range(1 + repeats):
                for kind, given in (("all", tensors), (f"{NUM_BLOCKS} blocks", few)):
                    version += 2
                    arms: dict[str, Callable[[], float]] = {
                        "copy": lambda given=given: copy_seconds(given, room),
                        "pack": lambda given=given: seconds_of(lambda: runner.prepare(given)),
                        "load": lambda given=given, v=version: seconds_of(lambda: engine.load_weights(v, given)),
                        "load while decoding": lambda given=given, v=version: load_while_decoding(engine, v + 1, given),
                    }
                    for arm, run in arms.items():
                        seconds.setdefault(f"{kind}/{arm}", []).append(run())
        runner.close()
    figures = {
        f"{dtype}/{name}_s": statistics.median(taken[1:]) for name, taken in seconds.items()
    }  # the first warms up
    figures[f"{dtype}/cold_start_s"] = cold
    rows = []
    for kind in ("all", f"{NUM_BLOCKS} blocks"):
        arms_s = [figures[f"{dtype}/{kind}/{arm}_s"] for arm in ("copy", "pack", "load", "load while decoding")]
        rows.append((dtype, kind, *(f"{s * 1e3:.0f}" for s in arms_s), f"{cold * 1e3:.0f}", f"{load().others:.0%}"))
    return rows, figures


def main() -> None:
    options = arguments(__doc__ or "")
    torch.set_num_threads(CORES)
    repeats = 1 if options.quick else options.repeats
    rows: list[tuple[str, ...]] = []
    figures: dict[str, float] = {}
    with tempfile.TemporaryDirectory(prefix="stageline-refit-") as scratch:
        path = MODEL
        if options.quick:
            path = Path(scratch)
            config = LlamaConfig(
                vocab_size=512, hidden_size=64, intermediate_size=176, num_hidden_layers=8, num_attention_heads=4
            )
            LlamaForCausalLM(config).save_pretrained(path)
        for dtype in DTYPES:
            more_rows, more_figures = measure(path, dtype, repeats)
            rows += more_rows
            figures |= more_figures
    report(
        f"refit: {CORES} threads, milliseconds",
        ("engine", "tensors", "copy", "pack", "load", "while decoding", "cold start", "others' load"),
        rows,
        [f"{repeats} repeats, medians"],
    )
    write_json(options.json, figures)


if __name__ == "__main__":
    main()
