"""Memory and seconds that a publication takes on every rank of a gang, beside a plain copy of the same bytes.

A random policy with its gradients and no moments, since a publication reads only weights. `--size` chooses its shape:
0.5B is Qwen2.5-0.5B in float32. 1.5B is Qwen2.5-1.5B in bfloat16 with gradients in bfloat16, which needs 22 GB of
memory. Each rank is a process of a gloo gang. A version is published, released, and published
again into the memory of the first: the second one is timed, from one barrier to the next.

    beyond     peak of the resident set during the second publication (VmHWM, set back before), less what it was before
    allowed    two buckets of 256 MB, the aim: a stream of tensors needs no more beside the state
    copy       the published file's bytes from one file in memory into another that has its pages, in pieces of 16 MB

`python -m benchmarks.refit` has the other half: a refit from the board beside an engine made from files.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist

from benchmarks.harness import arguments, environment, measured_load, report, write_json
from benchmarks.predicted_memory import ONE_THREAD, RETURNED, reset_peak, run_ranks, status_bytes, write_random
from stages.models.config import LayoutConfig, ModelConfig, OptimizerConfig, SamplingConfig
from stages.models.host import MegatronHost
from stages.models.protocol import Rank, Role
from stages.ppo.config import PPOConfig
from stages.publish import publish
from storage.weights import WeightBoard

Dtype = Literal["float32", "bfloat16"]
SHAPES: dict[str, dict[str, Any]] = {
    "0.5B": {
        "hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24, "num_attention_heads": 14,
        "num_key_value_heads": 2, "head_dim": 64, "vocab_size": 151936, "tie_word_embeddings": True,
    },
    "1.5B": {
        "hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28, "num_attention_heads": 12,
        "num_key_value_heads": 2, "head_dim": 128, "vocab_size": 151936, "tie_word_embeddings": True,
    },
}  # fmt: skip
DTYPES: dict[str, Dtype] = {"0.5B": "float32", "1.5B": "bfloat16"}
LAYOUTS = {
    "1": LayoutConfig(),
    "TP2": LayoutConfig(tensor=2),
    "PP2": LayoutConfig(pipeline=2),
    "TP2 PP2": LayoutConfig(tensor=2, pipeline=2),
}
ALLOWED_BYTES = 2 * 256 << 20
PIECE_BYTES = 16 << 20


@dataclass(frozen=True)
class Measured:
    """A rank's publications."""

    beyond: int
    """Most bytes of a publication beside what the rank held before."""
    seconds: list[float]
    copy_seconds: list[float]
    """Empty except on rank 0."""
    num_bytes: int


def measure(path: Path, dtype: Dtype, layout: LayoutConfig, repeats: int) -> list[Measured]:
    """Run all ranks of a gang and return what each measured, in the order of the ranks."""
    num_ranks = layout.tensor * layout.pipeline
    with (
        tempfile.TemporaryDirectory(prefix="stageline-publish-", dir="/dev/shm") as folder,
        environment({**RETURNED, **ONE_THREAD}),
    ):
        return run_ranks(_rank, num_ranks, path, dtype, layout, repeats, Path(folder), num_ranks)


def _rank(
    path: Path, dtype: Dtype, layout: LayoutConfig, repeats: int, folder: Path, num_ranks: int, index: int, answer: Any
) -> None:
    torch.set_num_threads(1)
    model = ModelConfig(
        path=str(path), dtype=dtype, policy=OptimizerConfig(gradients_dtype=dtype),
        kernels="portable", products="torch", peak_tflops=1.0,
    )  # fmt: skip
    rank = Rank(index, num_ranks, f"file://{folder}/rendezvous", 1)
    host = MegatronHost(
        model, SamplingConfig(max_new_tokens=8), PPOConfig(), layout, frozenset({Role.POLICY}), rank,
        seed=0, total_steps=1,
    )  # fmt: skip
    board = WeightBoard(folder / "board")
    beyond, seconds, copies, num_bytes = 0, list[float](), list[float](), 0
    for version in range(1 + repeats):
        before = status_bytes("VmRSS")
        reset_peak()
        dist.barrier()
        started = time.perf_counter()
        manifest = publish(host, board, version)
        dist.barrier()
        if version:
            seconds.append(time.perf_counter() - started)
            beyond = max(beyond, status_bytes("VmHWM") - before)
        if manifest is not None:
            num_bytes = manifest.num_bytes
            if version:
                copies.append(_copy_seconds(board.directory / manifest.file, folder / "copy"))
            board.release(version)
    answer.send(Measured(beyond, seconds, copies, num_bytes))
    dist.barrier()
    host.close()


def _copy_seconds(source: Path, target: Path) -> float:
    """Return the seconds of a copy into a file that has its pages; the first call makes the file."""
    seconds, buffer = 0.0, memoryview(bytearray(PIECE_BYTES))
    for _ in range(1 if target.exists() else 2):
        started = time.perf_counter()
        with source.open("rb", 0) as given, target.open("r+b" if target.exists() else "xb", 0) as taken:
            while num_bytes := given.readinto(buffer):
                taken.write(buffer[:num_bytes])
        seconds = time.perf_counter() - started
    return seconds


def _add_size(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--size", choices=SHAPES, default="0.5B", help="parameters of the policy")


def main() -> None:
    options = arguments(__doc__ or "", _add_size)
    repeats = 1 if options.quick else options.repeats
    rows: list[tuple[str, ...]] = []
    figures: dict[str, float] = {}
    with tempfile.TemporaryDirectory(prefix="stageline-publish-") as scratch:
        path = Path(scratch, "model")
        write_random(path, {} if options.quick else SHAPES[options.size])
        for name, layout in LAYOUTS.items():
            with measured_load() as load:
                ranks = measure(path, DTYPES[options.size], layout, repeats)
            seconds, copy = statistics.median(ranks[0].seconds), statistics.median(ranks[0].copy_seconds)
            figures |= {f"{name}/{index}/beyond_bytes": float(rank.beyond) for index, rank in enumerate(ranks)}
            figures |= {f"{name}/publish_s": seconds, f"{name}/copy_s": copy, f"{name}/bytes": ranks[0].num_bytes}
            rows.append(
                (
                    name,
                    f"{ranks[0].num_bytes / 1e6:.0f}",
                    ", ".join(f"{rank.beyond / 1e6:.0f}" for rank in ranks),
                    f"{ALLOWED_BYTES / 1e6:.0f}",
                    f"{seconds:.2f}",
                    f"{copy:.2f}",
                    f"{seconds / copy:.1f}x",
                    f"{load().others:.0%}",
                )
            )
    report(
        "publication: MB and seconds",
        ("layout", "published", "beyond, by rank", "allowed", "publish", "copy", "of a copy", "others' load"),
        rows,
        [f"{repeats} repeats, medians of seconds, most of bytes"],
    )
    write_json(options.json, figures)


if __name__ == "__main__":
    main()
