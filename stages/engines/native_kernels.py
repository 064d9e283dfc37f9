"""The kernels as C, compiled on the machine they run on. May import torch, numpy, stages.engines.

`kernels.c` needs no header of Python or torch, so a C compiler suffices and a second does. The library is kept in the
user's cache folder under a digest of source, flags and processor. It shares torch's OpenMP threads where both use the
GNU runtime (as torch's own packages for Linux do).
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from jaxtyping import UInt64

from stages.engines.kernels import Angles, Tokens
from stages.engines.noise import token_words

_SOURCE = Path(__file__).with_name("kernels.c")
_FLAGS = ("-O3", "-march=native", "-fopenmp", "-fno-math-errno", "-fno-trapping-math", "-shared", "-fPIC")
_COMPILE_TIMEOUT_S = 120
_CPU = torch.device("cpu")
_P, _I, _F = ctypes.c_void_p, ctypes.c_int, ctypes.c_float


class NoNativeKernelsError(RuntimeError):
    """This machine cannot build or load them; says why."""


def load_native_kernels() -> NativeKernels:
    """Compiles if need be. Raises NoNativeKernelsError."""
    try:
        library = ctypes.CDLL(str(_build()))
    except OSError as error:
        raise NoNativeKernelsError(f"the compiled kernels cannot be loaded: {error}") from error
    library.add_norm.argtypes = [_P, _P, _I, _P, _F, _P, _I, _I, _I]
    library.gate.argtypes = [_P, _P, _I, _I, _I]
    library.attend.argtypes = [_P, _I, _I, _I, _I, _I, _P, _P, _P, _P, _P, _I, _P, _P, _P, _I, _P]
    library.choose.argtypes = [_P, _P, _P, _P, _I, _I, _P, _P]
    for function in (library.add_norm, library.gate, library.choose):
        function.restype = None
    return NativeKernels(library)


@dataclass(frozen=True)
class NativeKernels:
    """See `Kernels`. All tensors on the CPU and contiguous."""

    library: ctypes.CDLL
    name: str = "native"

    def add_norm(
        self, x: torch.Tensor, delta: torch.Tensor | None, weight: torch.Tensor, eps: float, dtype: torch.dtype
    ) -> torch.Tensor:
        out = torch.empty(x.shape, dtype=dtype)
        address, kind = (None, 0) if delta is None else (delta.data_ptr(), _kind(delta.dtype))
        rows, width = x.shape
        self.library.add_norm(
            x.data_ptr(), address, kind, weight.data_ptr(), eps, out.data_ptr(), _kind(dtype), rows, width
        )
        return out

    def attend(
        self, qkv: torch.Tensor, angles: Angles, tokens: Tokens, keys: torch.Tensor, values: torch.Tensor
    ) -> torch.Tensor:
        _, kv_heads, dim, _ = keys.shape
        num, width = qkv.shape
        heads = width // dim - 2 * kv_heads
        out = torch.empty(num, heads * dim, dtype=qkv.dtype)
        queries = torch.empty(num, heads * dim, dtype=torch.float32)
        failed = self.library.attend(
            qkv.data_ptr(),
            _kind(qkv.dtype),
            num,
            heads,
            kv_heads,
            dim,
            angles.cos.data_ptr(),
            angles.sin.data_ptr(),
            tokens.positions.data_ptr(),
            tokens.rows.data_ptr(),
            tokens.tables.data_ptr(),
            tokens.tables.shape[1],
            keys.data_ptr(),
            values.data_ptr(),
            queries.data_ptr(),
            tokens.longest,
            out.data_ptr(),
        )
        if failed:
            raise MemoryError(f"no memory for the attention weights of {tokens.longest} positions")
        return out

    def gate(self, gate_up: torch.Tensor) -> torch.Tensor:
        rows, width = gate_up.shape
        out = torch.empty(rows, width // 2, dtype=gate_up.dtype)
        self.library.gate(gate_up.data_ptr(), out.data_ptr(), _kind(gate_up.dtype), rows, width // 2)
        return out

    def choose(
        self, logits: torch.Tensor, temperatures: list[float], keys: UInt64[np.ndarray, " N"]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        rows, vocab = logits.shape
        chosen, logprobs = torch.empty(rows, dtype=torch.int64), torch.empty(rows, dtype=torch.float32)
        divisors = torch.tensor(temperatures, dtype=torch.float32)
        words = token_words(vocab, _CPU)
        keys = np.ascontiguousarray(keys)
        self.library.choose(
            logits.data_ptr(),
            divisors.data_ptr(),
            keys.ctypes.data,
            words.data_ptr(),
            rows,
            vocab,
            chosen.data_ptr(),
            logprobs.data_ptr(),
        )
        return chosen, logprobs


def _kind(dtype: torch.dtype) -> int:
    """kernels.c: FLOAT32, BFLOAT16."""
    return {torch.float32: 0, torch.bfloat16: 1}[dtype]


def _build() -> Path:
    """The library's path; compiled under another name and moved, so that several processes may do this at once."""
    compiler = shutil.which(os.environ.get("CC", "cc"))
    if compiler is None:
        raise NoNativeKernelsError("there is no C compiler (cc, or what $CC names)")
    digest = hashlib.sha256("\0".join([compiler, *_FLAGS, _processor()]).encode() + _SOURCE.read_bytes()).hexdigest()
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "stageline"
    library = folder / f"kernels-{digest[:20]}.so"
    if library.exists():
        return library
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            built = Path(scratch) / library.name
            command = [compiler, *_FLAGS, str(_SOURCE), "-o", str(built), "-lm"]
            subprocess.run(command, check=True, capture_output=True, text=True, timeout=_COMPILE_TIMEOUT_S)
            built.replace(library)
    except subprocess.CalledProcessError as error:
        raise NoNativeKernelsError(f"{compiler} refuses kernels.c: {error.stderr.strip()[-500:]}") from error
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NoNativeKernelsError(f"kernels.c cannot be compiled into {folder}: {error}") from error
    return library


def _processor() -> str:
    """What -march=native depends on, where it can be read: a shared cache folder may serve unlike machines."""
    cpuinfo = Path("/proc/cpuinfo")
    if not cpuinfo.is_file():
        return f"{platform.machine()} {platform.processor()}"
    wanted = ("model name", "flags", "Features", "CPU part")
    lines = cpuinfo.read_text("utf8", "replace").splitlines()
    return "\n".join(sorted({line for line in lines if line.startswith(wanted)}))
