"""Triton's kernels compile for the GPUs they are meant for. Needs Triton but no GPU: its compiler comes with it.

So a kernel that the interpreter runs but the compiler refuses is found without a device, and so are loads that are not
wide. With the interpreter switched on (`TRITON_INTERPRET=1`) there is nothing to compile.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any

import pytest

pytestmark = [
    pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed"),
    pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="Triton's interpreter is on"),
]
HOPPER = 90
INTEGER, FLOAT = "i32", "fp32"
MULTIPLES = ("width", "vocab")
WIDE = "v4.b32"
"""16 bytes by one thread."""


@pytest.fixture(scope="module")
def kernels() -> Any:
    return importlib.import_module("stages.engines.embedded.kernels.cuda.triton_kernels")


ONES = {"kv_heads": 1, "table_width": 1, "num_splits": 1}
"""Numbers that are 1 are compiled in."""


def compiled(kernel: Any, types: Mapping[str, str], constants: Mapping[str, Any], num_warps: int) -> str:
    """PTX of a kernel, which the assembler has taken; memory is aligned to 16 bytes, `MULTIPLES` divide by 16."""
    compiler = importlib.import_module("triton.compiler")
    targets = importlib.import_module("triton.backends.compiler")
    signature = {name: "constexpr" if name in constants else types[name] for name in kernel.arg_names}
    values = {(i,): constants[name] for i, name in enumerate(kernel.arg_names) if name in constants}
    multiples = [i for i, (name, kind) in enumerate(signature.items()) if kind.startswith("*") or name in MULTIPLES]
    aligned = {(i,): [["tt.divisibility", 16]] for i in multiples}
    source = compiler.ASTSource(kernel, signature, values, aligned)
    done = compiler.compile(
        source, target=targets.GPUTarget("cuda", HOPPER, 32), options={"num_warps": num_warps, "num_stages": 3}
    )
    assert done.asm["cubin"]
    ptx: str = done.asm["ptx"]
    return ptx


def attention_types(element: str) -> dict[str, str]:
    pointers = dict.fromkeys(("qkv", "keys", "values", "out"), f"*{element}")
    pointers |= dict.fromkeys(("cos", "sin", "sums", "scales"), "*fp32") | {"positions": "*i64"}
    pointers |= dict.fromkeys(("rows", "tables"), "*i32")
    return pointers | dict.fromkeys(("heads", "kv_heads", "table_width", "num_splits"), INTEGER) | {"scale": FLOAT}


@pytest.mark.parametrize("element", ["bf16", "fp32"])
@pytest.mark.parametrize(("dim", "padded_dim", "group"), [(128, 128, 4), (64, 64, 3), (24, 32, 1)])
def test_attention(kernels: Any, element: str, dim: int, padded_dim: int, group: int) -> None:
    types, size = attention_types(element), {"DIM": dim, "PADDED_DIM": padded_dim}
    compiled(kernels._write, types, size, 1)
    compiled(kernels._write, types, size | {name: ONES[name] for name in ("kv_heads", "table_width")}, 1)
    compiled(kernels._combine, types, size | {"SPLIT_": kernels.SPLIT}, 1)
    compiled(kernels._combine, types, size | {"SPLIT_": kernels.SPLIT, "heads": 1}, 1)
    for alone in (True, False):
        constants = size | {"GROUP": group, "PADDED_GROUP": 16, "SPLIT_": kernels.SPLIT, "TILE": kernels._TILE}
        ptx = compiled(kernels._attend, types, constants | {"WRITES": alone, "DIRECT": alone}, 4)
        compiled(kernels._attend, types, constants | ONES | {"WRITES": alone, "DIRECT": True}, 4)
        assert "cp.async.cg" in ptx, "keys and values are fetched ahead, 16 bytes at a time"
        assert ("mma" in ptx) == (element == "bf16"), "float32 is multiplied as float32"


@pytest.mark.parametrize("element", ["bf16", "fp32"])
def test_norm_and_gate(kernels: Any, element: str) -> None:
    types = {"x": "*fp32", "delta": f"*{element}", "weight": "*fp32", "out": f"*{element}", "eps": FLOAT}
    sizes = types | {"gate_up": f"*{element}", "width": INTEGER}
    for constants in ({"HAS_DELTA": True}, {"HAS_DELTA": False, "delta": None}):
        compiled(kernels._add_norm, sizes, constants | {"BLOCK": 4096}, 8)
    assert WIDE in compiled(kernels._gate, sizes, {"BLOCK": kernels._GATE_BLOCK}, 4)


def test_choose(kernels: Any) -> None:
    types = dict.fromkeys(("logits", "temperatures", "found", "logprobs"), "*fp32")
    types |= dict.fromkeys(("keys", "words", "banned", "places"), "*i32") | {"chosen": "*i64"}
    types |= dict.fromkeys(("vocab", "num_banned", "num_chunks"), INTEGER)
    assert WIDE in compiled(kernels._look, types, {"CHUNK": kernels._CHUNK}, 8)
    compiled(kernels._look, types, {"CHUNK": kernels._CHUNK, "num_banned": 1}, 8)
    compiled(kernels._pick, types, {"PADDED": 32}, 1)
    compiled(kernels._pick, types, {"PADDED": 1, "num_chunks": 1}, 1)
