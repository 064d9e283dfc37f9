"""A row as it travels between embedded engines: packed, unpacked, and looked at before it is accepted.

May import numpy, stages.engines.migration, stages.engines.protocol, stages.engines.embedded.rows.
"""

from __future__ import annotations

from collections.abc import Set

import numpy as np

from stages.engines.embedded.rows import GenerateCall, Row
from stages.engines.migration import MigratedRow
from stages.engines.protocol import RequestError


def pack_row(row: Row, ticket: int, version: int, cache: np.ndarray | None) -> MigratedRow:
    """A row as it travels."""
    return MigratedRow(
        ticket=ticket,
        request=row.request,
        version=version,
        tokens=np.array(row.tokens[len(row.request.tokens) :], np.int32),
        logprobs=np.array(row.logprobs, np.float32),
        versions=np.array(row.versions, np.int32),
        cache=cache,
    )


def unpack_row(migrated: MigratedRow, call: GenerateCall, eos_ids: Set[int]) -> Row:
    """The row that `pack_row` packed, without its blocks."""
    row = Row(migrated.request, call, eos_ids)
    for token, logprob, version in zip(
        migrated.tokens.tolist(), migrated.logprobs.tolist(), migrated.versions.tolist(), strict=True
    ):
        row.append(token, logprob, version)
    return row


def check_migrated(migrated: MigratedRow, version: int, cache_shape: tuple[int, int, int]) -> None:
    """Raises RequestError, naming the row, if this engine cannot go on with it. `cache_shape`: layers, key/value heads,
    head dimension."""
    problem = None
    layers, heads, dim = cache_shape
    if migrated.version != version:
        problem = f"goes on with version {migrated.version} of the weights; version {version} is resident"
    elif (
        not len(migrated.tokens)
        == len(migrated.logprobs)
        == len(migrated.versions)
        < migrated.request.sampling.max_new_tokens
    ):
        problem = f"arrives with {len(migrated.tokens)} tokens of {migrated.request.sampling.max_new_tokens}"
    elif migrated.cache is not None:
        positions = migrated.cache.shape[3] if migrated.cache.ndim == 5 else 0
        expected = (layers, 2, heads, positions, dim)
        if migrated.cache.shape != expected or not 0 < positions < migrated.num_tokens:
            problem = f"brings keys and values of shape {migrated.cache.shape}; here they are {expected}"
    if problem is not None:
        raise RequestError(f"row {migrated.request.row} {problem}")
