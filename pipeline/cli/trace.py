"""`stageline check CONFIG --trace`: trace one rank of each pipeline stage of each gang that holds models. Print the
rank's memory beside the predicted memory, and print its collectives.

A traced rank runs without GPUs and without the other ranks (`stages.models.trace`). Traces run in other processes,
because a process that used the fake GPU cannot use a real GPU afterwards. Two traces run at the same time if there are
two cores.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from itertools import groupby

from rich.table import Table

from pipeline.cli.answers import output_console, print_line
from pipeline.config.run import RunConfig
from pipeline.graph.graph import Gang
from stages.models.fake_gpu import DEVICE, FILES, HOST, PINNED, Collective
from stages.models.memory import (
    DTYPE_BYTES,
    GangModels,
    RowsSize,
    checkpoint_bytes,
    offloaded_bytes,
    publication_bytes,
    published_tensors,
    rank_bytes,
)
from stages.models.protocol import MODEL_ROLES, Role
from stages.models.spec import read_spec
from stages.models.trace import TracedGang, TracedRank, trace_stage, worst_batch

_MIB = 1 << 20
_NAMES = {DEVICE: "GPU", HOST: "host", PINNED: "pinned"}


def show_trace(config: RunConfig) -> None:
    """For each gang that holds models, run one rank of each pipeline stage on a fake GPU. Print the rank's memory,
    beside the predicted memory, and its collectives."""
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # torch warns that the device has no backend of its own
    os.environ.setdefault("PYTHONWARNINGS", "ignore")
    gangs = {gang.name: traced_gang(config, gang) for gang in config.gangs() if gang.roles & MODEL_ROLES}
    with ProcessPoolExecutor(min(2, os.cpu_count() or 1), multiprocessing.get_context("spawn")) as processes:
        traced = {
            name: [processes.submit(trace_stage, gang, stage) for stage in range(gang.layout.pipeline)]
            for name, gang in gangs.items()
        }
        for name, gang in gangs.items():
            ranks = [future.result() for future in traced[name]]
            for rank in ranks:
                _show_rank(name, gang, rank)
            versions, published = config.staleness + 2, sum(rank.published_bytes for rank in ranks)
            if published:
                of_formula = DTYPE_BYTES[config.model.dtype] * sum(
                    published_tensors(read_spec(config.model.path), config.model).values()
                )
                print_line(f"{name}: a published version: {_comparison_text(published, of_formula)}")
                shared = _comparison_text(versions * published, versions * of_formula)
                print_line(f"{name}: {versions} versions in shared memory: {shared}")


def traced_gang(config: RunConfig, gang: Gang) -> TracedGang:
    """Return the settings with which the ranks of a gang are traced."""
    settings = config.placement.gangs[gang.name]
    return TracedGang(
        config.model,
        config.sampling,
        config.ppo,
        settings.layout,
        gang.roles & MODEL_ROLES,
        gang.workers,
        config.prompts.max_tokens,
        settings.offload,
    )


def predicted_bytes(gang: TracedGang, stage: int) -> dict[str, int]:
    """Return the predicted bytes of the first rank of a pipeline stage, for the rows that the trace runs. The keys are:

    - DEVICE: all memory on the rank's GPU
    - HOST: host memory for a publication
    - PINNED: pinned host memory for checkpoints and offloaded tensors"""
    model = gang.model
    own = {role: read_spec(model.path_of(role)) for role in gang.roles if model.path_of(role) != model.path}
    models = GangModels(
        read_spec(model.path),
        model,
        gang.layout,
        gang.roles,
        gang.data_ranks,
        gang.offload,
        own,
        portable=True,
        on_gpu=True,
    )
    batches = {role: worst_batch(gang, role) for role in (Role.POLICY, Role.CRITIC)}
    width = max(batch.length for batch in batches.values())
    num_rows = max(batch.rows for batch in batches.values()) * gang.data_ranks * gang.num_batches
    rows = RowsSize(width, num_rows, num_rows)
    sizes = {role: batch.size for role, batch in batches.items()}
    publishes = Role.POLICY in gang.roles
    _, on_host = publication_bytes(models, stage, on_gpu=True) if publishes else (0, 0)
    return {
        DEVICE: sum(rank_bytes(models, sizes, stage, rows=rows, device="cuda").values()),
        HOST: on_host,
        PINNED: checkpoint_bytes(models, stage, is_pinned=True) + offloaded_bytes(models, stage),
    }


def _comparison_text(traced: int, of_formula: int) -> str:
    """Return a text with a traced number of bytes, a predicted number (`of_formula`), and their difference."""
    difference = f" ({of_formula / traced - 1:+.1%})" if traced else ""
    return f"traced {_mebibytes(traced) or 0} MiB, predicted {_mebibytes(of_formula) or 0} MiB{difference}"


def _show_rank(name: str, gang: TracedGang, rank: TracedRank) -> None:
    layout = gang.layout
    title = f"{name}, rank {rank.index} of {gang.num_ranks}, stage {rank.stage} of {layout.pipeline}, MiB"
    table = Table(title=title, title_justify="left")
    table.add_column("")
    for heading in ("GPU", "host", "pinned", "files", "calls", "moved"):
        table.add_column(heading, justify="right")
    for phase in rank.phases:
        places = (_mebibytes(phase.peak.get(place, 0)) for place in (DEVICE, HOST, PINNED, FILES))
        moved = sum(collective.num_bytes for collective in phase.collectives)
        table.add_row(phase.name, *places, str(len(phase.collectives)), _mebibytes(moved))
    output_console().print(table)
    for place, of_formula in predicted_bytes(gang, rank.stage).items():
        print_line(f"{_NAMES[place]} at most: {_comparison_text(rank.peak(place), of_formula)}")
    for phase in rank.phases:
        for times, collectives in group_repeats(phase.collectives):
            again = f"{times} x " if times > 1 else ""
            print_line(f"  {phase.name}: {again}{'; '.join(map(_collective, collectives))}")


def group_repeats(collectives: Sequence[Collective], longest: int = 16) -> Iterator[tuple[int, Sequence[Collective]]]:
    """Yield the collectives in order as pairs (number of times, sequence). A sequence that occurs several times in a
    row is yielded once. There are many repetitions, because all blocks of a model make the same few calls.

    `longest` is the maximum length of a repeated sequence."""
    start = 0
    while start < len(collectives):
        best = 1, 1
        for length in range(1, min(longest, len(collectives) - start) + 1):
            pattern, times = collectives[start : start + length], 1
            while collectives[start + times * length : start + (times + 1) * length] == pattern:
                times += 1
            if times > 1 and times * length > best[0] * best[1]:
                best = times, length
        times, length = best
        yield times, collectives[start : start + length]
        start += times * length


def _collective(collective: Collective) -> str:
    shapes = ", ".join(f"{len(list(same))} x {list(shape)}" for shape, same in groupby(collective.shapes)).replace(
        "1 x ", ""
    )
    size = (
        f"{collective.num_bytes / _MIB:,.1f} MiB" if collective.num_bytes >= _MIB else f"{collective.num_bytes} bytes"
    )
    return f"{collective.operation} over {collective.group} ({collective.num_ranks}) {shapes or 'objects'}, {size}"


def _mebibytes(number: int) -> str:
    return f"{number / _MIB:,.0f}" if number else ""
