"""Settings of generation. Standard library only."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal


@dataclass
class SamplingConfig:
    max_new_tokens: int = 64
    min_new_tokens: int = 0
    """EOS cannot be sampled before this many tokens."""
    temperature: float = 1.0
    """Divides the logits here and in every log-prob of the run. 0: greedy (evaluation only)."""
    suppress_token_ids: list[int] = field(default_factory=list)
    """Tokens never sampled; the trainer's distributions exclude them too."""


@dataclass
class SpeculationConfig:
    """Drafting tokens ahead and verifying several in one pass: the same tokens, sooner."""

    drafter: Literal["none", "ngram"] = "none"
    """`ngram`: what followed the same two or three tokens before, in the row or in earlier rows of its prompt."""
    max_tokens: int = 6
    """Longest draft of a row in a pass."""
    lengths: Literal["measured", "longest"] = "measured"
    """`measured`: what maximises expected tokens per second, 0 included. `longest`: as long as there are drafts."""


@dataclass
class EngineConfig:
    kind: Literal["torch"] = "torch"
    slots: int = 16
    """Rows decoded together at most."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    kv_budget_mb: int = 512
    """Memory of all keys and values. Where rows outgrow it, the youngest wait and are resumed."""
    kernels: Literal["auto", "native", "torch"] = "auto"
    """What runs between the matrix products: C compiled on this machine, or plain torch. `auto` takes the former on a
    CPU where a C compiler is found. Engines whose log-probs must agree to the last bit need the same."""
    update: Literal["drain", "inflight"] = "drain"
    """How new weights come in: after the rows in flight have finished, or between two tokens, which the rows go on
    from (they are fed again: no token is made from keys of older weights)."""
    speculation: SpeculationConfig = field(default_factory=SpeculationConfig)
