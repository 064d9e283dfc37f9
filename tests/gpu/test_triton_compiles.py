"""Triton's kernels compile for the GPUs they are meant for. Needs Triton but no GPU: its compiler comes with it.

So a kernel that the interpreter runs but the compiler refuses is found without a device, and so are loads that are not
wide. With the interpreter switched on (`TRITON_INTERPRET=1`) there is nothing to compile.
"""

from __future__ import annotations

import importlib
import os
import re
import subprocess
import tempfile
from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any

import pytest

pytestmark = [
    pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed"),
    pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="Triton's interpreter is on"),
]
HOPPER = 90
SHARED_BYTES = {80: 163 << 10, 90: 227 << 10, 100: 227 << 10}
"""Most shared memory of a program on A100, H100 and B200, by compute capability (CUDA programming guide, technical
specifications per compute capability)."""
SPILLED_BYTES = 4
"""Most of what a thread may keep in memory for want of registers: one number, which attention spills on H100."""
INTEGER, FLOAT = "i32", "fp32"
MULTIPLES = ("width", "vocab")
WIDE = "v4.b32"
"""16 bytes by one thread."""


@pytest.fixture(scope="module")
def kernels() -> Any:
    return importlib.import_module("stages.engines.embedded.kernels.cuda.triton_kernels")


ONES = {"kv_heads": 1, "table_width": 1, "num_splits": 1}
"""Numbers that are 1 are compiled in."""


def compiled(
    kernel: Any, types: Mapping[str, str], constants: Mapping[str, Any], num_warps: int, architecture: int = HOPPER
) -> str:
    """PTX of a kernel, which the assembler has taken with hardly a spilled register; its programs fit into the GPU's
    shared memory. Memory is aligned to 16 bytes, `MULTIPLES` divide by 16."""
    compiler = importlib.import_module("triton.compiler")
    targets = importlib.import_module("triton.backends.compiler")
    signature = {name: "constexpr" if name in constants else types[name] for name in kernel.arg_names}
    values = {(i,): constants[name] for i, name in enumerate(kernel.arg_names) if name in constants}
    multiples = [i for i, (name, kind) in enumerate(signature.items()) if kind.startswith("*") or name in MULTIPLES]
    aligned = {(i,): [["tt.divisibility", 16]] for i in multiples}
    source = compiler.ASTSource(kernel, signature, values, aligned)
    done = compiler.compile(
        source, target=targets.GPUTarget("cuda", architecture, 32), options={"num_warps": num_warps, "num_stages": 3}
    )
    assert done.asm["cubin"]
    ptx: str = done.asm["ptx"]
    assert done.metadata.shared <= SHARED_BYTES[architecture]
    assert spilled_bytes(ptx, architecture) <= SPILLED_BYTES
    return ptx


def spilled_bytes(ptx: str, architecture: int) -> int:
    """Bytes that a thread writes to memory for want of registers, according to the assembler."""
    nvidia = importlib.import_module("triton.backends.nvidia.compiler")
    command = [nvidia.get_ptxas(architecture).path, "-v", f"--gpu-name={nvidia.sm_arch_from_capability(architecture)}"]
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
        file.write(ptx)
        file.flush()
        told = subprocess.run([*command, file.name, "-o", os.devnull], check=True, capture_output=True, text=True)
    (spilled,) = re.findall(r"(\d+) bytes spill stores", told.stderr)
    return int(spilled)


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


@pytest.mark.parametrize("architecture", SHARED_BYTES)
@pytest.mark.parametrize(("group", "width"), [(4, 4096), (8, 8192)], ids=["8B", "70B"])
def test_llama_fits_every_gpu(kernels: Any, architecture: int, group: int, width: int) -> None:
    """Llama 3.1 in bfloat16: heads of 128 numbers, 32 or 64 of them, in groups that share one of 8 keys."""
    types, size = attention_types("bf16"), {"DIM": 128, "PADDED_DIM": 128}
    compiled(kernels._write, types, size, 1, architecture)
    compiled(kernels._combine, types, size | {"SPLIT_": kernels.SPLIT}, 1, architecture)
    share = {"GROUP": group, "PADDED_GROUP": 16, "SPLIT_": kernels.SPLIT, "TILE": kernels._TILE}
    for writes, direct in ((True, True), (True, False), (False, True), (False, False)):
        compiled(kernels._attend, types, size | share | {"WRITES": writes, "DIRECT": direct}, 4, architecture)
    pointers = {"x": "*fp32", "delta": "*bf16", "weight": "*bf16", "out": "*bf16", "gate_up": "*bf16"}
    types = pointers | {"eps": FLOAT, "width": INTEGER}
    compiled(kernels._add_norm, types, {"HAS_DELTA": True, "BLOCK": width}, min(width // 512, 16), architecture)
    compiled(kernels._gate, types, {"BLOCK": kernels._GATE_BLOCK}, 4, architecture)


def test_choose(kernels: Any) -> None:
    types = dict.fromkeys(("logits", "temperatures", "found", "logprobs"), "*fp32")
    types |= dict.fromkeys(("keys", "words", "banned", "places"), "*i32") | {"chosen": "*i64"}
    types |= dict.fromkeys(("vocab", "num_banned", "num_chunks"), INTEGER)
    assert WIDE in compiled(kernels._look, types, {"CHUNK": kernels._CHUNK}, 8)
    compiled(kernels._look, types, {"CHUNK": kernels._CHUNK, "num_banned": 1}, 8)
    compiled(kernels._pick, types, {"PADDED": 32}, 1)
    compiled(kernels._pick, types, {"PADDED": 1, "num_chunks": 1}, 1)
