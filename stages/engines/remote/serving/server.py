"""The server: an engine of another project behind `wire`, in that project's Python environment.

    reader thread ──messages──► loop: rows in, a token for each, finished rows out ──► socket
    beat thread   ──once a second, whatever the loop is in the middle of──────────────► socket

Started by `process.py` as `python -m stages.engines.remote.serving.server FD PARENT`, where FD is its end of a socket
pair (no port, no path, no one else can connect) and PARENT the process that starts it. It ends when the other end
closes, and (on Linux) with its parent whatever happens. What it prints goes to its log.

May import the standard library, numpy, msgpack, this folder, `remote.wire` and stages.native.parent.
"""

from __future__ import annotations

import importlib
import os
import queue
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from stages.engines.remote.serving.adapter import EngineAdapter, ServedRow, Settings
from stages.engines.remote.serving.facts import machine_facts
from stages.engines.remote.serving.tensors import map_tensors
from stages.engines.remote.wire import BEAT_S, PROTOCOL, Channel, pack_array
from stages.native.parent import end_with_parent


@dataclass
class _Counters:
    """Since the last `stats`."""

    tokens: int = 0
    rows: int = 0
    steps: int = 0
    in_flight: int = 0
    """Rows in flight, summed over steps."""
    kv_peak: float = 0.0
    preemptions: int = 0
    refit_s: float = 0.0
    busy_s: float = 0.0
    prompt_tokens: int = 0


class Server:
    """Owns the adapter from hello to close."""

    def __init__(self, channel: Channel, adapter: EngineAdapter) -> None:
        self._channel, self._adapter = channel, adapter
        self._rows: set[int] = set()
        self._counters = _Counters()

    def run(self, messages: queue.SimpleQueue[dict[str, Any] | None]) -> None:
        """Until the other side closes."""
        while True:
            waiting = not self._rows
            while waiting or not messages.empty():
                message = messages.get()
                if message is None or message["kind"] == "close":
                    return
                self._handle(message)
                waiting = not self._rows
            self._step()

    def _handle(self, message: Mapping[str, Any]) -> None:
        kind = message["kind"]
        if kind == "generate":
            for fields in message["rows"]:
                given: dict[str, Any] = {name: tuple(v) if isinstance(v, list) else v for name, v in fields.items()}
                row = ServedRow(**given)
                self._adapter.add(row)
                self._rows.add(row.id)
                self._counters.prompt_tokens += len(row.tokens)
        elif kind == "abort":
            ids = [i for i in message["ids"] if i in self._rows]
            self._adapter.abort(ids)
            self._rows.difference_update(ids)
        else:
            handle: Callable[[Mapping[str, Any]], dict[str, Any]] = {
                "load": self._load,
                "sleep": self._sleep,
                "wake": self._wake,
                "stats": self._stats,
            }[kind]
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
            if row.id not in self._rows:
                continue  # nobody waits for it any more
            self._rows.discard(row.id)
            if not np.isfinite(row.logprobs).all():
                self._channel.send("broken", id=row.id, error="has logits that are not finite")
                continue
            counters.rows += 1
            counters.tokens += len(row.tokens)
            tokens, logprobs = row.tokens.astype(np.int32), row.logprobs.astype(np.float32)
            self._channel.send("row", id=row.id, tokens=pack_array(tokens), logprobs=pack_array(logprobs))

    def _load(self, message: Mapping[str, Any]) -> dict[str, Any]:
        started = time.perf_counter()
        self._adapter.load(map_tensors(message["tensors"]))
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


def _beat(channel: Channel, closed: threading.Event) -> None:
    while not closed.wait(BEAT_S):
        try:
            channel.send("beat")
        except OSError:
            return


def _read(channel: Channel, messages: queue.SimpleQueue[dict[str, Any] | None]) -> None:
    while True:
        try:
            message = channel.receive()
        except OSError:
            message = None
        messages.put(message)
        if message is None:
            return


def _build(hello: Mapping[str, Any]) -> EngineAdapter:
    """The adapter that the client names, `module:Class`, with the settings that it gives."""
    if hello["protocol"] != PROTOCOL:
        raise RuntimeError(f"this server speaks protocol {PROTOCOL}, the client {hello['protocol']}")
    module, _, name = hello["adapter"].partition(":")
    kind: Callable[[Settings], EngineAdapter] = getattr(importlib.import_module(module), name)
    return kind(Settings(**hello["settings"]))


def main(descriptor: int, parent: int) -> int:
    """Serves until the other end closes; 1 where the engine could not be started, or failed."""
    end_with_parent(parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole terminal; the driver ends the run
    channel = Channel(socket.socket(fileno=descriptor))
    closed = threading.Event()
    try:
        hello = channel.receive()
        if hello is None:
            return 0
        threading.Thread(target=_beat, args=(channel, closed), daemon=True).start()
        adapter = _build(hello)
        try:
            ready = adapter.ready
            messages: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
            threading.Thread(target=_read, args=(channel, messages), daemon=True).start()
            facts = {**machine_facts(), **ready.facts}
            channel.send(
                "ready",
                protocol=PROTOCOL,
                engine=ready.engine,
                version=ready.version,
                device=ready.device,
                facts=facts,
            )
            Server(channel, adapter).run(messages)
        finally:
            adapter.close()
    except (BrokenPipeError, ConnectionResetError):
        return 0  # nobody is there to hear of it
    except BaseException as error:  # whatever it is: the client is told, the log has the rest
        traceback.print_exc()
        channel.send("failed", error=f"{type(error).__name__}: {error}")
        return 1
    finally:
        closed.set()
        channel.close()
    return 0


if __name__ == "__main__":
    # Without waiting for threads and exit handlers of the engine: nothing here is left to be saved.
    sys.stderr.flush()
    status = main(int(sys.argv[1]), int(sys.argv[2]))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
