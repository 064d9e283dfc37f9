"""What a server says, held against the protocol (`wire`) before anybody relies on it.

May import numpy, stages.engines.capabilities and protocol, and remote.wire.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from stages.engines.capabilities import Device
from stages.engines.protocol import EngineStats
from stages.engines.remote.wire import ProtocolError, unpack_array


@dataclass(frozen=True)
class ServerReady:
    """What a server says of its engine once it is up."""

    engine: str
    version: str
    device: Device
    facts: Mapping[str, str]

    def __str__(self) -> str:
        """With all that its last bits depend on."""
        facts = {"version": self.version, **self.facts}
        return ", ".join([self.engine, *(f"{name} {value}" for name, value in sorted(facts.items()))])


def read_ready(message: Mapping[str, Any]) -> ServerReady:
    """Raises ProtocolError for anything else."""
    device, facts = _text(message, "device"), message.get("facts")
    if device not in ("cpu", "cuda") or not isinstance(facts, dict):
        raise ProtocolError(f"it is ready on {device!r} with facts {facts!r:.80}")
    computes_on: Device = "cuda" if device == "cuda" else "cpu"
    return ServerReady(_text(message, "engine"), _text(message, "version"), computes_on, facts)


def read_id(message: Mapping[str, Any], name: str) -> int:
    """A number that this side gave. Raises ProtocolError for anything else."""
    value = message.get(name)
    if not isinstance(value, int):
        raise ProtocolError(f"a message {message['kind']!r} whose {name} is {value!r:.80}")
    return value


def read_row(message: Mapping[str, Any], longest: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Tokens, log-probs and versions of a response of at most `longest` tokens, int32, float32 and int32 [new]. Raises
    ProtocolError for anything else."""
    names = {"tokens": np.int32, "logprobs": np.float32, "versions": np.int32}
    arrays = {name: unpack_array(message.get(name)) for name in names}
    tokens, logprobs, versions = arrays.values()
    is_row = all(arrays[name].dtype == dtype for name, dtype in names.items()) and tokens.ndim == 1
    if not is_row or not tokens.shape == logprobs.shape == versions.shape or not 1 <= len(tokens) <= longest:
        shapes = ", ".join(f"{name} {array.dtype} {list(array.shape)}" for name, array in arrays.items())
        raise ProtocolError(f"a row of {shapes}, where {longest} tokens at most were asked for")
    return tokens, logprobs, versions


def read_stats(message: Mapping[str, Any], slots: int) -> EngineStats:
    """Raises ProtocolError for anything else."""
    names = ("tokens", "rows", "steps", "in_flight", "kv_peak", "preemptions", "refit_s", "busy_s", "prompt_tokens")
    counted: dict[str, Any] = {name: message.get(name) for name in names}
    if not all(isinstance(number, int | float) for number in counted.values()):
        raise ProtocolError(f"counters that are not numbers: {counted}")
    steps = counted["steps"]
    return EngineStats(
        tokens=counted["tokens"],
        rows=counted["rows"],
        decode_steps=steps,
        mean_occupancy=min(1.0, counted["in_flight"] / (steps * slots)) if steps else 0.0,
        kv_peak_fraction=counted["kv_peak"],
        preemptions=counted["preemptions"],
        refit_s=counted["refit_s"],
        busy_s=counted["busy_s"],
        prompt_tokens=counted["prompt_tokens"],
        rank_busy_s=(counted["busy_s"],),
    )


def _text(message: Mapping[str, Any], name: str) -> str:
    value = message.get(name)
    if not isinstance(value, str):
        raise ProtocolError(f"a message {message['kind']!r} whose {name} is {value!r:.80}")
    return value
