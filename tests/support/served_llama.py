"""A Llama of forty lines as `EngineAdapter`: what the boundary between two environments is tested with, where
no engine of another project is installed. Every step computes every row anew. It runs in the server's process, whose
path this folder is added to; it imports neither transformers nor anything of tests/."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from torch.nn import functional

import storage
from stages.engines.remote.serving.adapter import Finished, Ready, ServedRow, Settings, map_tensors
from stages.engines.remote.serving.draws import draw, fastest_choice


class ServedLlama:
    """Owns the weights and the rows in flight. `extra` may ask for a fault: {"fault": name, "at": step}."""

    def __init__(self, settings: Settings) -> None:
        torch.set_num_threads(settings.threads)
        self._config = json.loads((Path(settings.model) / "config.json").read_text())
        self._weights = load_file(Path(settings.model) / "model.safetensors")
        self._rows: dict[int, tuple[ServedRow, list[int], list[float]]] = {}
        self._slots, self._fault, self._steps = settings.max_rows, dict(settings.extra), 0
        if self._fault.get("fault") == "start":
            print("there is not enough memory for anything")
            raise MemoryError("of 3 bytes, 4 are taken")
        if self._fault.get("at") == 0:
            self._fail()
        if self._fault.get("fault") == "stuck":
            threading.Event().wait()
        if self._fault.get("fault") == "helped":
            print("helper", subprocess.Popen(["sleep", "600"]).pid, flush=True)
        draws, self._choose = fastest_choice("cpu")
        facts = {"dtype": settings.dtype, "draws": draws, "storage": str(storage.__file__)}
        self.ready = Ready("llama", "1", facts, "cpu")

    def add(self, row: ServedRow) -> None:
        self._rows[row.id] = (row, [], [])

    def abort(self, ids: Sequence[int]) -> None:
        for number in ids:
            del self._rows[number]

    def step(self) -> list[Finished]:
        self._steps += 1
        if self._steps == self._fault.get("at"):
            self._fail()
        running = list(self._rows.values())[: self._slots]
        logits = torch.stack([self._logits([*row.tokens, *made]) for row, made, _ in running])
        rows, lengths = [row for row, _, _ in running], [len(made) for _, made, _ in running]
        tokens, logprobs = draw(logits, rows, lengths, self._choose)
        finished = []
        for (row, made, made_logprobs), token, logprob in zip(running, tokens, logprobs, strict=True):
            made.append(int(token))
            made_logprobs.append(float(logprob))
            if len(made) == row.max_new_tokens or (made[-1] in row.stop and not row.forced):
                del self._rows[row.id]
                finished.append(Finished(row.id, np.array(made, np.int32), np.array(made_logprobs, np.float32)))
        return finished

    def load(self, places: Sequence[Mapping[str, Any]]) -> None:
        self._weights = {name: tensor.float().clone() for name, tensor in map_tensors(places).items()}

    def made(self) -> dict[int, int]:
        return {number: len(made) for number, (_, made, _) in self._rows.items()}

    def sleep(self) -> None:
        pass

    def wake(self) -> None:
        pass

    def load_now(self) -> tuple[float, int]:
        return min(1.0, (1 + len(self._rows)) / 64), 0

    def close(self) -> None:
        self._rows.clear()

    def _fail(self) -> None:
        if self._fault["fault"] == "raise":
            raise RuntimeError("the machine is on fire")
        os.kill(os.getpid(), getattr(signal, self._fault["fault"]))

    @torch.inference_mode()
    def _logits(self, tokens: list[int]) -> torch.Tensor:
        """float32 [vocab] at the last position."""
        config, w = self._config, self._weights
        heads, groups, dim = config["num_attention_heads"], config["num_key_value_heads"], config["head_dim"]
        theta = config["rope_parameters"]["rope_theta"]
        x = w["model.embed_tokens.weight"][tokens]
        angles = torch.arange(len(tokens))[:, None] * theta ** (-torch.arange(0, dim, 2) / dim)
        cos, sin = angles.cos().repeat(1, 2), angles.sin().repeat(1, 2)

        def norm(values: torch.Tensor, name: str) -> torch.Tensor:
            scale = torch.rsqrt(values.pow(2).mean(-1, keepdim=True) + config["rms_norm_eps"])
            return values * scale * w[f"{name}.weight"]

        def turned(values: torch.Tensor) -> torch.Tensor:
            first, second = values.chunk(2, -1)
            return values * cos + torch.cat([-second, first], -1) * sin

        for layer in range(config["num_hidden_layers"]):
            at = f"model.layers.{layer}"
            y = norm(x, f"{at}.input_layernorm")
            q, k, v = (
                functional.linear(y, w[f"{at}.self_attn.{n}_proj.weight"]).unflatten(-1, (-1, dim)).transpose(0, 1)
                for n in "qkv"
            )
            k, v = (part.repeat_interleave(heads // groups, 0) for part in (turned(k), v))
            attended = functional.scaled_dot_product_attention(turned(q), k, v, is_causal=True)
            x = x + functional.linear(attended.transpose(0, 1).flatten(1), w[f"{at}.self_attn.o_proj.weight"])
            y = norm(x, f"{at}.post_attention_layernorm")
            gate, up = (functional.linear(y, w[f"{at}.mlp.{n}_proj.weight"]) for n in ("gate", "up"))
            x = x + functional.linear(functional.silu(gate) * up, w[f"{at}.mlp.down_proj.weight"])
        head = w.get("lm_head.weight", w["model.embed_tokens.weight"])
        return functional.linear(norm(x[-1], "model.norm"), head)
