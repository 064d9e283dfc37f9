"""Tokens per second of the engine against transformers: `generate` on padded batches, and continuous batching.

32 uneven rows (prompts of 8 to 48 tokens, 16 to 128 new ones), 16 at a time, no end of sequence: every side makes the
same number of tokens. Sides are taken in turn in every repeat, on all cores; a figure is the median of its repeats.
With `--engines embedded,vllm` the sides are the engine and vLLM (`benchmarks/other_engines.py`) instead.

The roofline: a pass over the weights cannot take less than its bytes / memory bandwidth, nor less than its arithmetic
/ the rate of a large matrix product, both measured in the same run, as the best that torch or the engine's own products
reach; at the batch the engine achieved, and with the
prompts at the product's rate. Bytes and arithmetic are the model's own (weights once per pass in their dtype, keys and
values not counted), so what an implementation adds counts against it.
"""

from __future__ import annotations

import argparse
import gc
import math
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, GenerationConfig, LlamaConfig, LlamaForCausalLM
from transformers.generation.configuration_utils import ContinuousBatchingConfig

from benchmarks.harness import arguments, gemm_gflops, measured_load, report, write_json
from benchmarks.other_engines import BOUNDARY, KEYED, OWN, Row, Side, run_rows, vllm_sides
from stages.engines.config import EngineConfig
from stages.engines.embedded.build import build_embedded
from stages.engines.embedded.kernels.cpu.native import load_native_kernels
from stages.engines.embedded.runner import choose_kernels
from stages.engines.protocol import EngineStats
from stages.models.spec import read_eos_ids
from stages.native.compile import NoNativeKernelsError

CORES = os.cpu_count() or 1
SLOTS = 16
MODEL = Path("assets/smollm2-135m-instruct")
MAX_SEQ = 192
DTYPES = ("float32", "bfloat16")
TIE = 1e-3
"""Logits that are no further apart may come in either order."""
PADDED, CONTINUOUS, ENGINE = "transformers padded", "transformers continuous", "engine"


@dataclass(frozen=True)
class Roofline:
    """The machine's limits, and the model's needs."""

    bytes_per_s: float
    flops_per_s: float
    weight_bytes: int
    flops_per_token: int

    def seconds(self, stats: EngineStats, prompt_tokens: int) -> float:
        """Return the fewest seconds that the decode steps and the prompts behind `stats` can take."""
        rows = stats.mean_occupancy * SLOTS
        step_s = max(self.weight_bytes / self.bytes_per_s, rows * self.flops_per_token / self.flops_per_s)
        return stats.decode_steps * step_s + prompt_tokens * self.flops_per_token / self.flops_per_s


def workload(num_rows: int, vocab: int, longest: int, seed: int = 0) -> list[Row]:
    """Return uneven rows: 8 to 48 random prompt tokens, and 16 to `longest` new ones."""
    rng = random.Random(seed)
    return [
        Row([rng.randrange(3, vocab) for _ in range(rng.randint(8, 48))], rng.randint(16, longest))
        for _ in range(num_rows)
    ]


def run_padded(
    model: LlamaForCausalLM, prompts: Sequence[Row], sampled: bool, banned: list[int] | None = None
) -> list[list[int]]:
    """Generate in batches of SLOTS rows, left-padded, each as long as its longest row. Return the rows' new tokens.
    `banned`: tokens that are never made. (The engine does not make the end of sequence either, since no row ends
    there.)"""
    made: list[list[int]] = []
    for start in range(0, len(prompts), SLOTS):
        batch = prompts[start : start + SLOTS]
        width = max(len(p.tokens) for p in batch)
        ids = torch.tensor([[0] * (width - len(p.tokens)) + [*p.tokens] for p in batch])
        mask = torch.tensor([[0] * (width - len(p.tokens)) + [1] * len(p.tokens) for p in batch])
        new = max(p.new for p in batch)
        out = model.generate(
            input_ids=ids,
            attention_mask=mask,
            max_new_tokens=new,
            do_sample=sampled,
            eos_token_id=None,
            pad_token_id=0,
            **({"top_k": 0} if sampled else {}),
            **({"suppress_tokens": banned} if banned else {}),
        )
        made += [row[width : width + p.new].tolist() for row, p in zip(out, batch, strict=True)]
    return made


def widest_tie(
    model: LlamaForCausalLM, prompts: Sequence[Row], ours: list[list[int]], theirs: list[list[int]]
) -> tuple[int, float]:
    """Return the number of rows that differ, and the widest tie: over these rows, at the first different token, the
    largest distance between the logits of the two chosen tokens. Rounding may decide between logits within 1e-3."""
    differing, widest = 0, 0.0
    for prompt, mine, other in zip(prompts, ours, theirs, strict=True):
        at = next((i for i, (a, b) in enumerate(zip(mine, other, strict=True)) if a != b), None)
        if at is not None:
            differing += 1
            logits = model(torch.tensor([*prompt.tokens, *mine[:at]])).logits[0, -1]
            widest = max(widest, abs(float(logits[mine[at]] - logits[other[at]])))
    return differing, widest


def run_continuous(model: LlamaForCausalLM, prompts: Sequence[Row], sampled: bool) -> None:
    """Generate with transformers' own in-flight batching. Raises RuntimeError if it fails."""
    model.set_attn_implementation("paged|sdpa")
    config = GenerationConfig(do_sample=sampled, eos_token_id=-1, pad_token_id=0, max_new_tokens=128)
    if sampled:
        config.top_k = 0
    batching = ContinuousBatchingConfig(
        num_blocks=96,
        page_size=32,
        max_batch_tokens=256,
        max_requests_per_batch=SLOTS,
        allow_block_sharing=False,
        use_async_batching=False,
        use_cuda_graph=False,
        max_memory_percent=0.5,
    )
    done = 0
    try:
        with model.continuous_batching_context_manager(
            generation_config=config, continuous_batching_config=batching, warmup=False
        ) as manager:
            for prompt in prompts:
                manager.add_request(prompt.tokens, max_new_tokens=prompt.new)
            while done < len(prompts):
                result = manager.get_result(timeout=1)
                if result is None and not manager.is_running():
                    raise RuntimeError("transformers' continuous batching stopped")
                if result is not None and result.error:
                    raise RuntimeError(result.error)
                done += result is not None and result.is_finished()
    finally:
        model.set_attn_implementation("sdpa")


def best_seconds(work: Callable[[], object], repeats: int = 7) -> float:
    """Return the fewest seconds of some repeats: a limit is what the machine can do when nothing holds it up."""
    work()
    seconds = []
    for _ in range(repeats):
        started = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - started)
    return min(seconds)


def machine_limits(dtype: torch.dtype) -> tuple[float, float]:
    """Return the bytes per second of reading memory, and the operations per second of large products, with all cores.
    Each is the better of torch and of the engine's own products. Neither is the fastest on every machine, and a limit
    must not be below what the engine's parts can do."""
    memory = torch.ones(64 * 2**20)
    bytes_per_s = memory.nbytes / best_seconds(memory.sum)
    flops_per_s = gemm_gflops(CORES, dtype) * 1e9
    try:
        kernels = load_native_kernels()
    except NoNativeKernelsError:
        return bytes_per_s, flops_per_s
    wide, square = torch.randn(64 * 2**20 // 1024, 1024), torch.randn(1536, 1536)
    packed_wide, packed_square = kernels.pack({0: wide}, dtype), kernels.pack({0: square}, dtype)
    one, many = torch.randn(1, 1024).to(dtype), torch.randn(1536, 1536).to(dtype)
    read_s = best_seconds(lambda: kernels.linear(one, packed_wide, dtype))
    product_s = best_seconds(lambda: kernels.linear(many, packed_square, dtype))
    return max(bytes_per_s, wide.numel() * dtype.itemsize / read_s), max(flops_per_s, 2 * 1536**3 / product_s)


def measure_roofline(model: LlamaForCausalLM) -> Roofline:
    dtype = next(model.parameters()).dtype
    numbers = sum(p.numel() for p in model.parameters())
    embedding = 0 if model.config.tie_word_embeddings else model.get_input_embeddings().weight.numel()
    multiplied = numbers - embedding
    return Roofline(*machine_limits(dtype), multiplied * dtype.itemsize, 2 * multiplied)


@contextmanager
def model_directory(quick: bool) -> Iterator[Path]:
    """Yield the directory of the demo's model, or of a small random one."""
    if not quick:
        yield MODEL
        return
    with tempfile.TemporaryDirectory(prefix="stageline-generation-") as path:
        config = LlamaConfig(
            vocab_size=4096,
            hidden_size=128,
            intermediate_size=352,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=512,
            tie_word_embeddings=True,
            eos_token_id=2,
        )
        LlamaForCausalLM(config).save_pretrained(path)
        yield Path(path)


def lost_share(slower: Sequence[float], beside: Sequence[float]) -> tuple[float, float | None]:
    """Return the share of `beside`'s rate that `slower` loses, and its standard error: from the geometric mean over
    repeats of each repeat's own ratio, since a machine's speed drifts by more than the searched difference. Seconds,
    in the repeats' order; a single repeat has no error."""
    logs = [math.log(b / s) for s, b in zip(slower, beside, strict=True)]
    error = statistics.stdev(logs) / math.sqrt(len(logs)) if len(logs) > 1 else None
    return 1 - math.exp(statistics.fmean(logs)), error


def compare(
    path: Path, dtype: str, prompts: list[Row], repeats: int, engines: list[str]
) -> tuple[list[tuple[str, ...]], dict[str, float]]:
    """Compare all sides, greedy and sampled, with weights of one dtype. Return the rows of the table and the figures by
    name. `engines`: the engines to compare with; none: transformers."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=getattr(torch, dtype)).eval()
    roofline = measure_roofline(model)
    num_new, num_prompt = sum(p.new for p in prompts), sum(len(p.tokens) for p in prompts)
    rows: list[tuple[str, ...]] = []
    figures: dict[str, float] = {}
    settings = EngineConfig(max_rows=SLOTS, dtype=dtype)  # type: ignore[arg-type]
    kernels = choose_kernels(settings, torch.device("cpu"))
    started = time.perf_counter()
    with ExitStack() as stack:
        engine = stack.enter_context(
            closing(build_embedded(str(path), settings, max_seq=MAX_SEQ, threads=CORES, device=torch.device("cpu")))
        )
        figures[f"{dtype}/cold_start_s"] = time.perf_counter() - started
        sides: dict[str, Side] = {
            PADDED: lambda p, sampled: run_padded(model, p, sampled),
            CONTINUOUS: lambda p, sampled: run_continuous(model, p, sampled),
        }
        if "vllm" in engines:
            sides = stack.enter_context(vllm_sides(path, dtype, max_rows=SLOTS, max_seq=MAX_SEQ, threads=CORES))
        sides[ENGINE] = lambda p, sampled: run_rows(engine, p, sampled)
        for side in sides.values():
            side([Row(p.tokens, 4) for p in prompts[:4]], True)
        if dtype == "float32":
            ends = list(read_eos_ids(str(path)))
            ours, theirs = run_rows(engine, prompts, sampled=False), run_padded(model, prompts, False, ends)
            differing, widest = widest_tie(model, prompts, ours, theirs)
            assert widest < TIE, f"greedy tokens differ from transformers' where logits are {widest:.2e} apart"
            figures |= {f"{dtype}/greedy/rows_that_differ": differing, f"{dtype}/greedy/widest_tie": widest}
        for sampled in (False, True):
            seconds: dict[str, list[float]] = {name: [] for name in sides}
            others = []
            for _ in range(repeats):
                for name, side in sides.items():
                    engine.stats()
                    kernels.end_threads()  # idle ones of the side before would slow this one
                    with measured_load() as load:
                        started = time.perf_counter()
                        side(prompts, sampled)
                        seconds[name].append(time.perf_counter() - started)
                    others.append(load().others)
                    print(f"{dtype} {name}: {num_new / seconds[name][-1]:.0f} tok/s", file=sys.stderr, flush=True)
            of_limit = roofline.seconds(engine.stats(), num_prompt) / seconds[ENGINE][-1]
            rate = {name: num_new / statistics.median(s) for name, s in seconds.items()}
            kind = "sampled" if sampled else "greedy"
            for name in sides:
                ratio = f"{rate[ENGINE] / rate[name]:.2f}"
                of_roofline = f"{of_limit:.0%}" if name == ENGINE else ""
                rows.append((f"{dtype} {kind}", name, f"{rate[name]:.0f}", ratio, of_roofline, f"{max(others):.0%}"))
                figures[f"{dtype}/{kind}/{name}/tokens_per_s"] = rate[name]
            figures[f"{dtype}/{kind}/roofline_share"] = of_limit
            if BOUNDARY in rate:
                for what, beside in (("boundary", KEYED), ("draws_and_boundary", OWN)):
                    share, error = lost_share(seconds[BOUNDARY], seconds[beside])
                    figures[f"{dtype}/{kind}/lost_to_{what}"] = share
                    if error is not None:
                        figures[f"{dtype}/{kind}/lost_to_{what}/error"] = error
    figures[f"{dtype}/read_gb_per_s"] = roofline.bytes_per_s / 1e9
    figures[f"{dtype}/gemm_gflops"] = roofline.flops_per_s / 1e9
    return rows, figures


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--engines", default="embedded", help="embedded: beside transformers; embedded,vllm: beside vLLM"
    )


def main() -> None:
    options = arguments(__doc__ or "", add_arguments)
    engines = [name for name in options.engines.split(",") if name != "embedded"]
    if unknown := [name for name in engines if name != "vllm"]:
        raise SystemExit(f"--engines: given {unknown[0]!r}; the engines are embedded, vllm")
    torch.set_num_threads(CORES)
    repeats = 1 if options.quick else options.repeats
    rows: list[tuple[str, ...]] = []
    figures: dict[str, float] = {}
    with model_directory(options.quick) as path, torch.inference_mode():
        prompts = workload(*((8, 4096, 24) if options.quick else (32, 16_000, 128)))
        for dtype in DTYPES:
            more_rows, more_figures = compare(path, dtype, prompts, repeats, engines)
            rows += more_rows
            figures |= more_figures
            gc.collect()
    rates = {name: value for name, value in figures.items() if name.endswith(("gb_per_s", "gflops"))}
    lost = [f"{name} {value:+.1%}" for name, value in figures.items() if "/lost_to_" in name]
    machine = ", ".join(f"{name} {value:.0f}" for name, value in rates.items())
    report(
        f"generation: {len(prompts)} rows, {SLOTS} at a time, {CORES} threads",
        ("weights", "side", "tok/s", "engine is x", "of roofline", "others' load"),
        rows,
        [
            f"{repeats} repeats, medians; {machine}",
            *(["of tokens/s, " + ", ".join(lost)] if lost else []),
            f"float32, greedy: {figures['float32/greedy/rows_that_differ']:.0f} of {len(prompts)} rows differ from "
            f"transformers', first where its logits are at most {figures['float32/greedy/widest_tie']:.1e} apart",
        ],
    )
    write_json(options.json, figures)


if __name__ == "__main__":
    main()
