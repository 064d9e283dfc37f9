"""The server's loop: receive rows, generate a token for each row in flight, and send the finished rows."""

from __future__ import annotations

import importlib
import queue
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from stages.engines.remote.serving.adapter import EngineAdapter, ServedRow, Settings, machine_facts
from stages.engines.remote.wire import PROTOCOL, Channel, ProtocolError, pack_array

Messages = queue.SimpleQueue[dict[str, Any] | Exception | None]
"""Queue of messages from the reader thread. The last item is None if the client has closed the connection. Otherwise it
is the exception that ended the reading."""


@dataclass
class _Counters:
    """Counts since the last `stats` message."""

    tokens: int = 0
    rows: int = 0
    steps: int = 0
    in_flight: int = 0
    """Number of rows in flight, summed over steps."""
    kv_peak: float = 0.0
    preemptions: int = 0
    refit_s: float = 0.0
    busy_s: float = 0.0
    prompt_tokens: int = 0


class Server:
    """Serves one client with an adapter, until the client closes the connection."""

    def __init__(self, channel: Channel, adapter: EngineAdapter, version: int) -> None:
        """`version`: the version of the adapter's weights."""
        self._channel, self._adapter, self._version = channel, adapter, version
        self._rows: dict[int, list[tuple[int, int]]] = {}
        """Id of a row in flight -> list of (version, number of tokens). There is one entry for each load of new weights
        while the row ran: the replaced version, and the row's number of tokens at that time."""
        self._counters = _Counters()

    def run(self, messages: Messages) -> None:
        """Serve until the client closes the connection or sends `close`. Raises ProtocolError for a message that is not
        allowed here."""
        while True:
            waiting = not self._rows
            while waiting or not messages.empty():
                message = messages.get()
                if isinstance(message, Exception):
                    raise message
                if message is None or message["kind"] == "close":
                    return
                self._handle(message)
                waiting = not self._rows
            self._step()

    def _handle(self, message: Mapping[str, Any]) -> None:
        kind = message["kind"]
        if kind == "generate":
            for fields in message["rows"]:
                arguments: dict[str, Any] = {name: tuple(v) if isinstance(v, list) else v for name, v in fields.items()}
                row = ServedRow(**arguments)
                self._adapter.add(row)
                self._rows[row.id] = []
                self._counters.prompt_tokens += len(row.tokens)
        elif kind == "abort":
            ids = [i for i in message["ids"] if i in self._rows]
            self._adapter.abort(ids)
            for row_id in ids:
                del self._rows[row_id]
        else:
            calls: dict[str, Callable[[Mapping[str, Any]], dict[str, Any]]] = {
                "load": self._load,
                "sleep": self._sleep,
                "wake": self._wake,
                "stats": self._stats,
            }
            if kind not in calls:
                raise ProtocolError(f"a message of kind {kind!r:.80}")
            handle = calls[kind]
            self._channel.send("done", call=message["call"], **handle(message))

    def _step(self) -> None:
        started = time.perf_counter()
        in_flight = len(self._rows)
        counters = self._counters
        finished = self._adapter.step()
        kv_fraction, preempted = self._adapter.load_now()
        counters.busy_s += time.perf_counter() - started
        counters.steps += 1
        counters.in_flight += in_flight
        counters.kv_peak = max(counters.kv_peak, kv_fraction)
        counters.preemptions += preempted
        for row in finished:
            replaced = self._rows.pop(row.id, None)
            if replaced is None:
                continue  # it was aborted
            if not np.isfinite(row.logprobs).all():
                self._channel.send("broken", id=row.id, error="has logits that are not finite")
                continue
            counters.rows += 1
            counters.tokens += len(row.tokens)
            self._channel.send(
                "row",
                id=row.id,
                tokens=pack_array(row.tokens.astype(np.int32)),
                logprobs=pack_array(row.logprobs.astype(np.float32)),
                versions=pack_array(self._versions(len(row.tokens), replaced)),
            )

    def _versions(self, num_tokens: int, replaced: Sequence[tuple[int, int]]) -> np.ndarray:
        """Return the version that generated each token of a row. `replaced`: (version, tokens so far) at each load of
        new weights while the row ran, the oldest first."""
        versions = np.full(num_tokens, self._version, np.int32)
        for version, made in reversed(replaced):
            versions[:made] = version
        return versions

    def _load(self, message: Mapping[str, Any]) -> dict[str, Any]:
        started = time.perf_counter()
        for row_id, made in self._adapter.made().items() if self._rows else ():
            if row_id in self._rows:
                self._rows[row_id].append((self._version, made))
        self._adapter.load(message["tensors"])
        self._version = message["version"]
        self._counters.refit_s += time.perf_counter() - started
        return {}

    def _sleep(self, message: Mapping[str, Any]) -> dict[str, Any]:
        self._adapter.sleep()
        return {}

    def _wake(self, message: Mapping[str, Any]) -> dict[str, Any]:
        self._adapter.wake()
        return {}

    def _stats(self, message: Mapping[str, Any]) -> dict[str, Any]:
        counted, self._counters = self._counters, _Counters()
        return vars(counted)


def serve(channel: Channel, hello: Mapping[str, Any], messages: Messages) -> None:
    """Build the engine that the client's message `hello` names, and serve until the client closes the connection.
    `messages`: the messages after `hello`."""
    adapter = _build(hello)
    try:
        ready = adapter.ready
        channel.send(
            "ready",
            protocol=PROTOCOL,
            engine=ready.engine,
            version=ready.version,
            device=ready.device,
            facts={**machine_facts(), **ready.facts},
        )
        Server(channel, adapter, hello["version"]).run(messages)
    finally:
        adapter.close()


def _build(hello: Mapping[str, Any]) -> EngineAdapter:
    """Build the adapter that the client names as `module:Class`, with the client's settings. Raises RuntimeError if the
    client speaks another version of the protocol."""
    if hello["protocol"] != PROTOCOL:
        raise RuntimeError(f"this server speaks protocol {PROTOCOL}, the client {hello['protocol']}")
    module, _, name = hello["adapter"].partition(":")
    kind: Callable[[Settings], EngineAdapter] = getattr(importlib.import_module(module), name)
    return kind(Settings(**hello["settings"]))
