"""Decoding on a CUDA device: tokens per second of the engine and of transformers, and shares of the memory roofline.

Random-weight Llamas of 1, 3 and 8 billion parameters in bfloat16; 1, 8 and 64 rows with prompts of 512 random tokens.
A step's seconds are those of a long response less those of a short one, per token: prompts do not count. Medians.

The roofline: a step reads all weights once and the keys and values of all rows, and cannot be faster than those bytes
at the bandwidth of a large copy or sum, whichever was faster in the same run. Shares are given of whole steps
(`generate`, planning and all), of passes alone (a runner's, laid out beforehand), and of their parts: where time goes
is seen there.

On a machine without a GPU only `--quick` runs, on a tiny shape: it shows that this file works, and nothing else.
Needs torch, triton, transformers, safetensors, rich, psutil, jaxtyping and beartype.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaForCausalLM

from benchmarks.harness import arguments, report, write_json
from stages.engines.config import EmbeddedConfig, EngineConfig
from stages.engines.embedded.batch import Batch
from stages.engines.embedded.build import build_embedded
from stages.engines.embedded.engine import EmbeddedEngine
from stages.engines.embedded.kernels.blocks import BLOCK_TOKENS, blocks_for
from stages.engines.embedded.kernels.cuda.graphs import GraphCapture, size_for
from stages.engines.embedded.kernels.protocol import Tokens
from stages.engines.embedded.model import logits
from stages.engines.embedded.runner import LocalRunner
from stages.engines.embedded.sampling import noise_keys
from stages.engines.protocol import Request
from stages.models.config import SamplingConfig
from stages.models.spec import spec_of, tensor_shapes

CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda" if CUDA else "cpu")
SHORT = 8
"""New tokens of the responses whose time is taken off."""
MEMORY = Path("/dev/shm")
"""Folder for models if it has space: faster than a disk."""


@dataclass(frozen=True)
class Shape:
    """Sizes of a Llama."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab: int
    tied: bool

    def config(self, max_positions: int) -> dict[str, Any]:
        """Return the contents of config.json."""
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "hidden_size": self.hidden,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "intermediate_size": self.ffn,
            "vocab_size": self.vocab,
            "max_position_embeddings": max_positions,
            "rms_norm_eps": 1e-5,
            "rope_theta": 500000.0,
            "rope_parameters": {"rope_theta": 500000.0, "rope_type": "default"},
            "hidden_act": "silu",
            "tie_word_embeddings": self.tied,
            "bos_token_id": 1,
            "eos_token_id": 2,
        }


SHAPES = {
    "1B": Shape(2048, 16, 32, 8, 64, 8192, 128_256, True),
    "3B": Shape(3072, 28, 24, 8, 128, 8192, 128_256, True),
    "8B": Shape(4096, 32, 32, 8, 128, 14_336, 128_256, False),
}
TINY = Shape(64, 2, 4, 2, 16, 96, 512, True)


@dataclass(frozen=True)
class Plan:
    """The measurements of one benchmark."""

    shapes: dict[str, Shape]
    batches: tuple[int, ...]
    prompt: int
    new: int
    """Tokens of a long response beyond a short one's."""
    repeats: int
    dtype: str
    compiled: bool

    @property
    def max_seq(self) -> int:
        return self.prompt + SHORT + self.new

    @property
    def mean_context(self) -> float:
        """Positions that a token of the counted part attends to."""
        return self.prompt + SHORT + self.new / 2


@dataclass(frozen=True)
class Cost:
    """Bytes that a step has to read."""

    weights: int
    per_position: int
    """Keys and values of one row, all layers."""

    def step(self, rows: int, context: float) -> float:
        return self.weights + rows * context * self.per_position


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--models", nargs="+", choices=sorted(SHAPES), default=sorted(SHAPES))
    parser.add_argument("--prompt", type=int, default=512, help="tokens of a prompt")
    parser.add_argument(
        "--compiled", action="store_true", help="transformers also with a static cache and torch.compile"
    )


def make_plan(options: argparse.Namespace) -> Plan:
    """Return the measurements to make. Raises SystemExit if there is nothing to measure."""
    if not CUDA:
        if not options.quick:
            sys.exit("benchmarks.decode_gpu needs a CUDA device; without one, --quick shows that it works")
        return Plan({"tiny": TINY}, (1, 3), 24, 8, 1, "float32", False)
    shapes = {name: SHAPES[name] for name in (["1B"] if options.quick else options.models)}
    repeats = 1 if options.quick else options.repeats
    return Plan(shapes, (1, 8, 64), options.prompt, 32 if options.quick else 96, repeats, "bfloat16", options.compiled)


def synchronize() -> None:
    if CUDA:
        torch.cuda.synchronize()


def seconds_of(run: Callable[[], object], repeats: int) -> float:
    """Return the median seconds of a run. The first run warms up and does not count."""
    run()
    seconds = []
    for _ in range(repeats):
        synchronize()
        started = time.perf_counter()
        run()
        synchronize()
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds)


def bandwidths() -> dict[str, float]:
    """Return the bytes per second of a large copy (read and written) and of a large sum (read)."""
    numbers = torch.ones(2**30 if CUDA else 2**24, device=DEVICE)
    other = torch.empty_like(numbers)
    return {
        "copy": 2 * numbers.nbytes / seconds_of(lambda: other.copy_(numbers), 10),
        "sum": numbers.nbytes / seconds_of(numbers.sum, 10),
    }


@contextmanager
def written_model(shape: Shape, plan: Plan) -> Iterator[Path]:
    """Yield a directory with random weights. Their numbers are about as large as a trained model's."""
    numbers = torch.Generator(DEVICE).manual_seed(0)
    config = shape.config(plan.max_seq)
    tensors = {}
    for name, size in tensor_shapes(spec_of(config)).items():
        tensor = torch.ones(size) if len(size) == 1 else torch.randn(size, generator=numbers, device=DEVICE) * 0.02
        tensors[name] = tensor.to("cpu", getattr(torch, plan.dtype))
    needed_bytes = sum(tensor.nbytes for tensor in tensors.values()) * 1.1
    in_memory = MEMORY.is_dir() and os.statvfs(MEMORY).f_bavail * os.statvfs(MEMORY).f_frsize > needed_bytes
    with tempfile.TemporaryDirectory(prefix="stageline-decode-", dir=MEMORY if in_memory else None) as folder:
        path = Path(folder)
        (path / "config.json").write_text(json.dumps({**config, "dtype": plan.dtype}), "utf8")
        save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
        yield path


def cost_of(shape: Shape, plan: Plan) -> Cost:
    sizes = tensor_shapes(spec_of(shape.config(plan.max_seq)))
    itemsize = getattr(torch, plan.dtype).itemsize
    numbers = sum(int(np.prod(size)) for size in sizes.values())
    looked_up = 0 if shape.tied else shape.vocab * shape.hidden
    return Cost((numbers - looked_up) * itemsize, 2 * shape.layers * shape.kv_heads * shape.head_dim * itemsize)


def prompts(batch: int, plan: Plan, vocab: int) -> np.ndarray:
    return np.random.default_rng(0).integers(3, vocab, (batch, plan.prompt))


def make_engine(path: Path, plan: Plan, cost: Cost, cuda_graphs: bool = True, **settings: Any) -> EmbeddedEngine:
    max_rows = max(plan.batches)
    budget = 64 + max_rows * blocks_for(plan.max_seq) * BLOCK_TOKENS * cost.per_position * 2 // 2**20
    config = EngineConfig(
        max_rows=max_rows,
        dtype=plan.dtype,  # type: ignore[arg-type]
        kv_budget_mb=budget,
        cuda_graphs=cuda_graphs,
        embedded=EmbeddedConfig(**settings),
    )
    engine = build_embedded(str(path), config, max_seq=plan.max_seq, threads=1, device=DEVICE)
    assert isinstance(engine, EmbeddedEngine)
    return engine


def run_engine(engine: EmbeddedEngine, rows: np.ndarray, new: int) -> None:
    settings = SamplingConfig(new, new)
    requests = [Request(i, 1, 1, tuple(row.tolist()), engine.version, settings) for i, row in enumerate(rows)]
    for _ in engine.generate(requests):
        pass


def run_transformers(model: LlamaForCausalLM, rows: np.ndarray, new: int, **options: Any) -> None:
    ids = torch.from_numpy(rows).to(DEVICE)
    model.generate(
        input_ids=ids,
        attention_mask=torch.ones_like(ids),
        min_new_tokens=new,
        max_new_tokens=new,
        do_sample=True,
        top_k=0,
        pad_token_id=0,
        **options,
    )


def step_seconds(run: Callable[[np.ndarray, int], None], rows: np.ndarray, plan: Plan) -> float:
    """Return the seconds of a decode step: long responses less short ones, per token."""
    short = seconds_of(lambda: run(rows, SHORT), plan.repeats)
    return (seconds_of(lambda: run(rows, SHORT + plan.new), plan.repeats) - short) / plan.new


def steady_batch(rows: int, plan: Plan, vocab: int) -> Batch:
    """Return a decode pass in the middle of the counted part. Each row has blocks of its own."""
    position, index = int(plan.mean_context), np.arange(rows)
    width = blocks_for(plan.max_seq)
    return Batch(
        ids=np.random.default_rng(1).integers(3, vocab, rows),
        positions=np.full(rows, position, np.int64),
        rows=index.astype(np.int32),
        tables=(1 + index[:, None] * width + np.arange(blocks_for(position + 1))).astype(np.int32),
        drawn=index,
        keys=noise_keys(0, 1, index, position + 1),
        temperatures=[1.0] * rows,
        banned=[(2,)] * rows,
    )


def run_batch(runner: LocalRunner, batch: Batch) -> None:
    runner.submit(batch)
    runner.collect()


@torch.inference_mode()
def parts_of_a_batch(runner: LocalRunner, batch: Batch, plan: Plan) -> dict[str, float]:
    """Return the seconds of the matrix products and of the attention of all layers. Each is a graph of its own, so this
    needs CUDA."""
    weights, spec, kernels, cache = runner._weights, runner._spec, runner._kernels, runner._cache
    size = size_for(len(batch.ids))
    hidden_size, intermediate_size = spec.hidden_size, spec.intermediate_size
    widths = {"qkv": hidden_size, "out": spec.q_size, "gate_up": hidden_size, "down": intermediate_size}
    inputs = {
        name: torch.randn(size, width, device=DEVICE).to(weights.embedding.dtype) for name, width in widths.items()
    }
    hidden = torch.randn(size, hidden_size, device=DEVICE)
    every = torch.arange(size, device=DEVICE)
    num = len(batch.ids)
    tables = torch.zeros(size, blocks_for(plan.max_seq), dtype=torch.int32)
    tables[:num, : batch.tables.shape[1]] = torch.from_numpy(batch.tables)
    positions = torch.zeros(size, dtype=torch.int64)
    positions[:num] = torch.from_numpy(batch.positions)
    tokens = Tokens(
        ids=every,
        positions=positions.to(DEVICE),
        rows=every.int(),
        tables=tables.to(DEVICE),
        longest=plan.max_seq,
        independent=True,
    )
    dtype = weights.embedding.dtype
    qkv = kernels.linear(inputs["qkv"], weights.blocks[0].qkv, dtype)

    def products() -> None:
        for block in weights.blocks:
            for name, x in inputs.items():
                kernels.linear(x, getattr(block, name), dtype)
        logits(weights, spec, kernels, hidden, every)

    def attention() -> None:
        for keys, values in cache.layers:
            kernels.attend(qkv, weights.angles, tokens, keys, values)

    def seconds(run: Callable[[], None]) -> float:
        replay = GraphCapture(DEVICE)(run)
        return seconds_of(lambda: [replay() for _ in range(10)], 5) / 10

    return {"products": seconds(products), "attention": seconds(attention)}


def refits(engine: EmbeddedEngine, tensors: dict[str, torch.Tensor]) -> dict[str, float]:
    """Return the seconds of new weights from the host's memory, from the device's, and of a copy within the device."""

    def load(new: dict[str, torch.Tensor]) -> None:
        engine.load_weights(engine.version + 1, new)

    found = {"from host": seconds_of(lambda: load(tensors), 1)}
    here = {name: tensor.to(DEVICE) for name, tensor in tensors.items()}
    found["from device"] = seconds_of(lambda: load(here), 3)
    found["copy alone"] = seconds_of(lambda: [tensor.clone() for tensor in here.values()], 3)
    return found


class Results:
    """Owns the rows of the table and the figures by name."""

    def __init__(self, name: str, cost: Cost, bytes_per_s: float, plan: Plan) -> None:
        self.name, self.cost, self.bytes_per_s, self.plan = name, cost, bytes_per_s, plan
        self.rows: list[tuple[str, ...]] = []
        self.figures: dict[str, float] = {}

    def add(self, side: str, batch: int, seconds: float, num_bytes: float | None = None) -> None:
        floor = (self.cost.step(batch, self.plan.mean_context) if num_bytes is None else num_bytes) / self.bytes_per_s
        self.rows.append(
            (self.name, str(batch), side, f"{1e3 * seconds:.3f}", f"{batch / seconds:.0f}", f"{floor / seconds:.0%}")
        )
        print(*self.rows[-1], file=sys.stderr, flush=True)
        key = f"{self.name}/{batch}/{side}"
        self.figures |= {f"{key}/step_s": seconds, f"{key}/roofline_share": floor / seconds}


def measure(name: str, shape: Shape, plan: Plan, bytes_per_s: float) -> Results:
    """Measure one model: the engine with and without what makes it fast, new weights, and transformers."""
    results = Results(name, cost_of(shape, plan), bytes_per_s, plan)
    sides: dict[str, dict[str, Any]] = {"plain torch": {"kernels": "torch"}}
    if CUDA:
        sides = {"engine": {"kernels": "triton"}}
        if name == next(iter(plan.shapes)):  # enough to see what each is worth
            sides["without graphs"] = {"kernels": "triton", "cuda_graphs": False}
            sides["plain torch"] = {"kernels": "torch"}
    with written_model(shape, plan) as path:
        for side, settings in sides.items():
            started = time.perf_counter()
            with closing(make_engine(path, plan, results.cost, **settings)) as engine:
                results.figures[f"{name}/{side}/cold_start_s"] = time.perf_counter() - started
                measure_engine(engine, side, shape, results)
                if side == next(iter(sides)):
                    for source, seconds in refits(engine, load_file(path / "model.safetensors")).items():
                        results.figures[f"{name}/refit {source}_s"] = seconds
            gc.collect()
        measure_transformers(path, shape, results)
    gc.collect()
    if CUDA:
        torch.cuda.empty_cache()
    return results


def measure_engine(engine: EmbeddedEngine, side: str, shape: Shape, results: Results) -> None:
    plan, cost, runner = results.plan, results.cost, engine._runner
    assert isinstance(runner, LocalRunner)
    for batch in plan.batches:
        rows, steady = prompts(batch, plan, shape.vocab), steady_batch(batch, plan, shape.vocab)
        results.add(side, batch, step_seconds(partial(run_engine, engine), rows, plan))
        results.add(f"{side}: pass", batch, seconds_of(partial(run_batch, runner, steady), 20))
        if side == "engine":
            parts = parts_of_a_batch(runner, steady, plan)
            results.add(f"{side}: products", batch, parts["products"], cost.weights)
            results.add(f"{side}: attention", batch, parts["attention"], batch * plan.mean_context * cost.per_position)


def measure_transformers(path: Path, shape: Shape, results: Results) -> None:
    plan = results.plan
    model = LlamaForCausalLM.from_pretrained(path, dtype=getattr(torch, plan.dtype)).to(DEVICE).eval()
    sides: dict[str, dict[str, Any]] = {"transformers": {}}
    if plan.compiled:
        sides["transformers compiled"] = {"cache_implementation": "static"}
    for side, options in sides.items():
        for batch in plan.batches:
            run = partial(run_transformers, model, **options)
            results.add(side, batch, step_seconds(run, prompts(batch, plan, shape.vocab), plan))


def main() -> None:
    options = arguments(__doc__ or "", add_arguments)
    plan = make_plan(options)
    rates = bandwidths()
    rows: list[tuple[str, ...]] = []
    figures = {f"{name}_gb_per_s": rate / 1e9 for name, rate in rates.items()}
    with torch.inference_mode():
        for name, shape in plan.shapes.items():
            results = measure(name, shape, plan, max(rates.values()))
            rows += results.rows
            figures |= results.figures
            write_json(options.json, figures)  # after every model: a run may be cut short
    notes = [", ".join(f"{name} {rate / 1e9:.0f} GB/s" for name, rate in rates.items())]
    notes += [f"{name}: {value:.3f}" for name, value in figures.items() if "refit" in name or "cold_start" in name]
    report(
        f"decode: prompts of {plan.prompt} tokens, {plan.dtype}, {plan.repeats} repeats",
        ("model", "rows", "side", "ms a step", "tok/s", "of roofline"),
        rows,
        notes,
    )


if __name__ == "__main__":
    main()
