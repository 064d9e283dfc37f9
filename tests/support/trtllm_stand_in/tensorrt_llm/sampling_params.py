"""Recorded: keyword only, these and no others; without top_k and top_p the arg max is taken."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(kw_only=True)
class SamplingParams:
    max_tokens: int = 32
    end_id: int | None = None
    pad_id: int | None = None
    seed: int | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    stop: list[str] | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    detokenize: bool = True
    logprobs: int | None = None
    prompt_logprobs: int | None = None

    def __post_init__(self) -> None:
        if self.temperature is not None and self.temperature <= 0:
            raise ValueError("require temperature > 0")
        if self.end_id is None:
            raise ValueError("tokenizer is required to reset end_id if it is None")

    @property
    def greedy(self) -> bool:
        return self.top_k in (None, 1) and self.top_p in (None, 0.0)
