"""Write the trained weights of a gang to a board. Each rank that writes puts its parts of the tensors at their offsets
in the version's file.

    rank 0        lists ─► begins a write ─► writes ─► receives from other hosts ─► sums some ─► links the manifest
    same host     lists ──────────┴──────────► writes ────────────────┤               sums some ──┘
    another host  lists ──────────┴──────────► sends its parts ───────┘

A rank lists the parts of tensors that it writes (`Slab`). A write is a version that is being written
(`WeightWrite`). To sum tensors is to compute their checksums from the file.

Without LoRA no rank gathers a tensor. Beside the model's state a rank then needs one block of `BLOCK_BYTES` on the
device and one on the host. Only ranks with data-parallel rank 0 write. With LoRA the tensor-parallel ranks of a stage
gather one whole tensor at a time, and one of them merges and writes it. The tensors' order in the file, and so the
manifest's digest, is the same in every layout.

The calls are collective. A rank whose write fails goes on with the calls, so that no other rank waits for it. At the
end rank 0 raises the first error of all ranks.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from megatron.core.models.gpt import GPTModel
from torch import Tensor

from stages.models.build import Blueprint
from stages.models.hf_conversion import PARTS, HFPart, adapted_weight, hf_parts, named_by_block
from stages.models.weights import as_numpy, from_all_ranks, merged_tensors, row_blocks
from storage.errors import StoreError
from storage.weights import BFLOAT16, FilePlace, Manifest, WeightBoard, WeightWrite, placed

_ERRORS = (StoreError, OSError, ValueError)
"""Errors that the methods of `WeightBoard` raise."""


@dataclass(frozen=True)
class Slab:
    """Part of a published tensor that one rank writes."""

    name: str
    shape: tuple[int, ...]
    """Shape of the whole tensor."""
    dtype: torch.dtype
    rows: int
    row: int
    """Number of elements in a row of this part."""
    start: int
    """Index of this part's first element in the flattened tensor."""
    stride: int
    """Distance, in elements of the flattened tensor, between the starts of consecutive rows."""

    @property
    def blocks(self) -> Iterator[slice]:
        return row_blocks(self.rows, self.row * self.dtype.itemsize)


def publish(model: GPTModel, blueprint: Blueprint, board: WeightBoard, version: int) -> Manifest | None:
    """Write the trained weights to the board as version `version`. Return the version's manifest on rank 0, None on the
    other ranks.

    Only rank 0 raises errors of the board. If such an error occurs on another rank, that rank sends it to rank 0.
    ValueError means that the version exists with other bits. StoreRefused means that the board's memory is full.
    """
    is_first = dist.get_rank() == 0
    slabs = own_slabs(model, blueprint)
    of_ranks: list[list[Slab]] = from_all_ranks(slabs)
    whole = {slab.name: slab for listed in of_ranks for slab in listed}
    errors: list[Exception] = []
    with ExitStack() as undo:
        begun: list[WeightWrite | None] = [None]
        if is_first:
            try:
                places = placed((slab.name, _dtype_name(slab.dtype), slab.shape) for slab in whole.values())
                begun = [undo.enter_context(board.begin_write(version, places))]
            except _ERRORS as error:
                errors.append(error)
        dist.broadcast_object_list(begun)
        write = begun[0]
        if write is not None:
            present = [index for index, sees in enumerate(from_all_ranks(board.sees(write))) if sees]
            senders = {*range(len(of_ranks))} - {*present}
            sent = {source: of_ranks[source] for source in sorted(senders)} if is_first else {}
            _fill(board, write, own_blocks(model, blueprint, slabs), sent, blueprint.parallel_rank.device, errors)
            errors = [error for of_rank in from_all_ranks(errors) for error in of_rank]
        sums: dict[str, int] = {}
        if write is not None and not errors:
            try:
                share = _share(write.places, present)
                sums = board.sums(write, share) if share else {}  # a rank of another host has no file
            except _ERRORS as error:
                errors.append(error)
            gathered: list[tuple[dict[str, int], list[Exception]]] = from_all_ranks((sums, errors))
            sums = {name: number for of_rank, _ in gathered for name, number in of_rank.items()}
            errors = [error for _, of_rank in gathered for error in of_rank]
        if not is_first:
            return None
        if errors:
            raise errors[0]
        assert write is not None
        return board.finish(write, sums)


def own_slabs(model: GPTModel, blueprint: Blueprint) -> list[Slab]:
    """Return the parts that this rank writes, in the order of the file."""
    if blueprint.model.lora.rank:
        return [_slab(p.name, p.shape, p.tensor.dtype, p.shape, 0, None) for p in _own_parts(model, blueprint)]
    slabs = []
    for part in _own_parts(model, blueprint):
        first, local = part.local_part(blueprint.parallel_rank.tensor_rank)
        slabs.append(_slab(part.name, part.shape, local.dtype, tuple(local.shape), first, part.axis))
    return slabs


def own_blocks(model: GPTModel, blueprint: Blueprint, slabs: list[Slab]) -> Iterator[tuple[Slab, slice, np.ndarray]]:
    """Yield the weights that this rank publishes, in blocks of rows. A block has at most `BLOCK_BYTES`, or is a single
    larger row. Each item is (the part of a tensor, the slice of the part's rows, these rows as an array). `slabs`: the
    parts that this rank writes, from `own_slabs`. With LoRA the call is collective."""
    rank, tensors = blueprint.parallel_rank, iter(list[Tensor]())
    if not blueprint.model.lora.rank:
        tensors = (part.local_part(rank.tensor_rank)[1] for part in _own_parts(model, blueprint))
    elif not rank.data_rank:
        tensors = (tensor for _, tensor in merged_tensors(model, blueprint))
    for tensor, slab in zip(tensors, slabs, strict=True):  # tensors first: all ranks must take part in the merging
        for rows in slab.blocks:
            yield slab, rows, as_numpy(tensor[rows])


def _own_parts(model: GPTModel, blueprint: Blueprint) -> Iterator[HFPart]:
    """Yield the parts of published tensors that this rank writes. A pipeline stage publishes its trained tensors, or
    with LoRA the weights that adapters are merged into."""
    rank, with_lora = blueprint.parallel_rank, bool(blueprint.model.lora.rank)
    named = list(named_by_block(model, blueprint.model.frozen_blocks))
    adapted = {adapted_weight(name)[0] for name, _, p in named if p.requires_grad} & PARTS.keys()
    for name, block, parameter in named if not rank.data_rank else ():
        is_trained = parameter.requires_grad and not getattr(parameter, "shared", False)
        if name in adapted if with_lora else is_trained:
            for part in hf_parts(name, block, parameter.detach(), blueprint.spec, rank.tensor_rank):
                if not rank.tensor_rank or (part.axis is not None and not with_lora):
                    yield part


def _fill(
    board: WeightBoard,
    write: WeightWrite,
    blocks: Iterable[tuple[Slab, slice, np.ndarray]],
    sent: Mapping[int, list[Slab]],
    device: torch.device,
    errors: list[Exception],
) -> None:
    """Write this rank's blocks, and on rank 0 also the blocks that ranks of other hosts send. A rank that does not see
    the write's file sends its blocks to rank 0. `sent`: rank of another host -> parts that it sends. The board's
    errors are appended to `errors`. After an error the remaining blocks are computed or received, but not written."""
    places = {place.name: place for place in write.places}

    def put(slab: Slab, rows: slice, block: np.ndarray) -> None:
        number = slab.dtype.itemsize
        start = number * (slab.start + rows.start * slab.stride)
        try:
            if not errors:
                board.put(write, places[slab.name], block, start, number * slab.stride)
        except _ERRORS as error:
            errors.append(error)

    here = board.sees(write)
    for slab, rows, block in blocks:
        if here:
            put(slab, rows, block)
        else:
            dist.send(torch.from_numpy(block.reshape(-1).view(np.uint8)).to(device), dst=0)
    for source, slabs in sent.items():
        for slab in slabs:
            for rows in slab.blocks:
                num_rows = rows.stop - rows.start
                received = torch.empty(num_rows * slab.row * slab.dtype.itemsize, dtype=torch.uint8, device=device)
                dist.recv(received, src=source)
                put(slab, rows, received.cpu().numpy().reshape(num_rows, -1))


def _slab(
    name: str, shape: tuple[int, ...], dtype: torch.dtype, own: tuple[int, ...], first: int, axis: int | None
) -> Slab:
    """Return the part of a tensor that has the shape `own` and begins at index `first` of `axis`; None: the whole."""
    row = math.prod(own[1:])
    if axis == 1:
        return Slab(name, shape, dtype, own[0], row, first, shape[1])
    return Slab(name, shape, dtype, own[0], row, first * row, row)


def _share(places: tuple[FilePlace, ...], present: list[int]) -> list[FilePlace]:
    """Return the tensors whose checksums this rank computes. `present`: the ranks that see the file. Tensors are
    assigned to these ranks, largest first, each to the rank with the fewest bytes so far."""
    loads = dict.fromkeys(present, 0)
    own = []
    for place in sorted(places, key=lambda place: -place.nbytes):
        index = min(loads, key=lambda index: loads[index])
        loads[index] += place.nbytes
        if index == dist.get_rank():
            own.append(place)
    return own


def _dtype_name(dtype: torch.dtype) -> str:
    return BFLOAT16 if dtype is torch.bfloat16 else str(dtype).removeprefix("torch.")
