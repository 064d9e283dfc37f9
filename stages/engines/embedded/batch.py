"""Batches. `lay_out` turns chunks of rows into the arrays that a runner computes on. `keep` appends the drawn tokens to
the rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from jaxtyping import Float32, Int32, Int64, UInt64

from stages.engines.embedded.kernels.blocks import NO_BLOCK, blocks_for
from stages.engines.embedded.rows import Row
from stages.engines.embedded.sampling import position_keys
from stages.engines.embedded.scheduler import Chunk

Draw = tuple[int, float]
"""A token and its log-prob."""


@dataclass(frozen=True, eq=False)
class Batch:
    """The input of one forward pass: N tokens of R rows, and a draw after M of these tokens. It holds only numbers, so
    it can be sent to the ranks of a model."""

    ids: Int64[np.ndarray, " N"]
    positions: Int64[np.ndarray, " N"]
    rows: Int32[np.ndarray, " N"]
    """For each token, the index of its row in `tables`."""
    tables: Int32[np.ndarray, "R W"]
    """Cache blocks of each row in order. Each block holds 16 positions."""
    drawn: Int64[np.ndarray, " M"]
    """For each draw, the index in `ids` of the token after which it is made."""
    keys: UInt64[np.ndarray, " M"]
    """Noise key of each draw."""
    temperatures: list[float]
    banned: list[tuple[int, ...]]
    """Tokens that each draw must not give."""
    wants_hidden: bool = False
    """True if the hidden states from which tokens are drawn are needed (`Draws.hidden`)."""
    tree_paths: BatchTreePaths | None = None
    """For each token, the cache places of the keys that it reads. None if the guesses of every row form a chain. Then
    the place of every key equals its position."""
    forced: Mapping[int, int] = field(default_factory=dict)
    """Index in `drawn` -> token that the request prescribes. This token is not drawn; only its log-prob is computed."""


@dataclass(frozen=True, eq=False)
class BatchTreePaths:
    """NumPy arrays with the meaning of the same fields in `kernels.protocol.TreePaths`."""

    cells: Int64[np.ndarray, " N"]
    starts: Int64[np.ndarray, " N"]
    paths: Int64[np.ndarray, "N L"]


@dataclass(frozen=True, eq=False)
class Draws:
    """The tokens that a batch drew, and their log-probs."""

    tokens: Int64[np.ndarray, " M"]
    logprobs: Float32[np.ndarray, " M"]
    hidden: Float32[np.ndarray, "M C"] | None = None
    """Hidden state from which each token was drawn: the output of the last block, before the final norm. None unless
    `Batch.wants_hidden`."""


NO_DRAWS = Draws(np.zeros(0, np.int64), np.zeros(0, np.float32))
"""Empty draws: the result of a batch that feeds only parts of prompts, so that no token is drawn."""


def lay_out(chunks: Sequence[Chunk], wants_hidden: bool = False) -> Batch:
    """Return a batch of these chunks, one after the other.

    A chunk has some tokens of a row, and possibly guesses of the tokens that follow. If it contains the row's last
    token (`Chunk.samples`), a token is drawn after the last token and after each guess. A draw uses the noise of the
    drawn token's position. The function `keep` decides later which draws are valid.

    `wants_hidden`: True if the batch must also return the hidden states from which tokens are drawn.
    """
    ids: list[int] = []
    positions: list[int] = []
    counts: list[int] = []
    tables: list[Int32[np.ndarray, " W"]] = []
    drawn: list[int] = []
    places: list[tuple[Row, int]] = []
    branches = False
    for chunk in chunks:
        row, start, drafts = chunk.row, chunk.start, chunk.drafts
        stop, num_guesses = start + chunk.count, len(drafts.tokens)
        ids += row.tokens[start:stop]
        positions += range(start, stop)
        if chunk.samples:
            drawn.append(len(ids) - 1)
            places.append((row, 0))
        if num_guesses:
            depths = drafts.depths
            if chunk.samples:
                drawn += range(len(ids), len(ids) + num_guesses)
                places += [(row, 1 + depth) for depth in depths]
            ids += drafts.tokens
            positions += [stop + depth for depth in depths]
            branches |= not drafts.is_chain
        counts.append(chunk.count + num_guesses)
        tables.append(row.table(blocks_for(stop + num_guesses)))
    numbers = np.array(positions, np.int64)
    row_noise = np.array([row.noise for row, _ in places], np.uint64)
    return Batch(
        ids=np.array(ids, np.int64),
        positions=numbers,
        rows=np.repeat(np.arange(len(chunks), dtype=np.int32), counts),
        tables=_padded(tables),
        drawn=np.array(drawn, np.int64),
        keys=position_keys(row_noise, np.array([len(row.tokens) + ahead for row, ahead in places], np.int64)),
        temperatures=[row.request.sampling.temperature for row, _ in places],
        banned=[row.banned(ahead) for row, ahead in places],
        wants_hidden=wants_hidden,
        tree_paths=_tree_paths(chunks, numbers) if branches else None,
        forced={i: token for i, (row, ahead) in enumerate(places) if (token := row.forced(ahead)) is not None},
    )


def _padded(tables: Sequence[Int32[np.ndarray, " _"]]) -> Int32[np.ndarray, "R W"]:
    """Return the block tables of all rows as one array, filled up with `NO_BLOCK`."""
    padded = np.full((len(tables), max(map(len, tables))), NO_BLOCK, np.int32)
    for i, table in enumerate(tables):
        padded[i, : len(table)] = table
    return padded


def _tree_paths(chunks: Sequence[Chunk], positions: Int64[np.ndarray, " N"]) -> BatchTreePaths:
    """Return the tree paths of a batch: the places in the cache of the keys that each token reads. Guesses with the
    same position need different places. So the key of guess j of a chunk is written at place `chunk.stop + j` of the
    row, whatever the guess's position is."""
    cells, starts = positions.copy(), positions + 1
    paths = np.zeros((len(positions), max(max(chunk.drafts.depths, default=0) for chunk in chunks) + 1), np.int64)
    offset = 0
    for chunk in chunks:
        offset += chunk.count
        for guess in range(len(chunk.drafts)):
            path = chunk.drafts.path_to(guess)
            if path != list(range(len(path))):
                cells[offset + guess], starts[offset + guess] = chunk.stop + guess, chunk.stop
                paths[offset + guess, : len(path)] = np.array(path) + chunk.stop
        offset += len(chunk.drafts)
    return BatchTreePaths(cells, starts, paths)


def keep(chunks: Sequence[Chunk], draws: Draws, version: int) -> list[list[int]]:
    """Append the valid draws of each sampling chunk to its row. The first draw of a chunk is valid. A draw after a
    guess is valid if the guess and all guesses before it on its path are right. After the row's end no draw is valid.

    Return the indices of the valid draws for each sampling chunk. Index 0 is the draw after the chunk's own tokens, and
    index 1 + j the draw after guess j.

    If the model's output for a row is not finite, the row gets a `failure` and no more tokens.

    Keys of wrong guesses stay in the cache until they are overwritten. So do keys of right guesses outside the main
    chain, which are at the wrong place (see the module `rows`). Such a guess is fed again.
    """
    pairs: list[Draw] = list(zip(draws.tokens.tolist(), draws.logprobs.tolist(), strict=True))
    kept, start = [], 0
    for chunk in chunks:
        if chunk.samples:
            stop = start + 1 + len(chunk.drafts)
            kept.append(_keep(chunk, pairs[start:stop], version))
            start = stop
    return kept


def _keep(chunk: Chunk, draws: Sequence[Draw], version: int) -> list[int]:
    row = chunk.row
    row.num_to_refeed = 0
    kept: list[int] = []
    place = 0
    while True:
        token, logprob = draws[place]
        if not -float("inf") < logprob <= 1e-3:
            row.failure = FloatingPointError(f"row {row.request.row}: the model's output is not finite ({logprob=})")
            break
        row.append(token, logprob, version)
        kept.append(place)
        if not chunk.drafts.tokens or row.finished is not None:
            break
        right = chunk.drafts.find_child(place - 1, token)
        if right is None:
            break
        if right == len(kept) - 1 and not row.num_to_refeed:  # in the main chain
            row.num_cached += 1
        else:
            row.num_to_refeed += 1
        place = right + 1
    return kept
