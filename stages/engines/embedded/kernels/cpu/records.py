"""The records that the kernels in C take, field by field as there: `compile.load_library` compares the layouts.

May import kernels.protocol.
"""

from __future__ import annotations

import ctypes
from dataclasses import fields

from stages.engines.embedded.kernels.protocol import Guessed

_P, _I, _L = ctypes.c_void_p, ctypes.c_int, ctypes.c_int64


class WeightRecord(ctypes.Structure):
    """kernels.h: struct weight."""

    _fields_ = (("tiles", _P), ("out", _L), ("in", _L), ("dtype", _I))


class ContextRecord(ctypes.Structure):
    """kernels.c: struct context."""

    _fields_ = (
        *((name, _P) for name in ("cosines", "sines", "positions", "rows", "tables", "keys", "values")),
        *((name, _P) for name in ("cells", "starts", "paths")),
        *((name, _I) for name in ("cache", "table_width", "path_width", "longest", "heads", "kv_heads", "dim")),
    )


class GuessesRecord(ctypes.Structure):
    """drafts.c: struct guesses."""

    _fields_ = tuple((each.name, _P) for each in fields(Guessed))


class BlockRecord(ctypes.Structure):
    """kernels.c: struct block."""

    _fields_ = (
        *((name, _P) for name in ("attention_norm", "mlp_norm", "qkv", "out", "gate_up", "down", "keys", "values")),
        *((name, _P) for name in ("qkv_bias", "q_norm", "k_norm")),
    )


class BuffersRecord(ctypes.Structure):
    """kernels.c: struct buffers."""

    _fields_ = tuple((name, _P) for name in ("normed", "projected", "queries", "read", "gated"))


RECORDS = {
    "weight": WeightRecord,
    "context": ContextRecord,
    "guesses": GuessesRecord,
    "block": BlockRecord,
    "buffers": BuffersRecord,
}
"""By their names in C, whose layout is compared when the library is loaded."""
