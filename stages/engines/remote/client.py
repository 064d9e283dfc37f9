"""A `GenerationEngine` whose engine runs in a server process, in another Python environment.

    callers' threads ──rows──► socket ──► server ──finished rows──► reader thread ──► each caller's queue

Weights do not go through the socket. The server maps the file that holds the weights (`protocol.MappedTensors`). If
tensors are in no file, the client writes one. New weights are loaded when no row is in flight (drain), or between two
steps of the engine (inflight).

A server is lost for good if it ends, fails, sends nothing for `message_timeout_s`, or breaks the protocol. Then all
waiting callers get EngineLost, and `on_lost` is called. The client does not notice if the server's loop hangs while its
process still sends a beat every second. In this case the node that waits for the rows passes its deadline
(`cluster.deadline_s`), and the server is ended.

The functions at the end check a server's messages against the protocol (`wire`).
"""

from __future__ import annotations

import dataclasses
import itertools
import queue
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from stages.engines.capabilities import Capabilities, Device
from stages.engines.protocol import (
    NO_VERSION,
    Completion,
    EngineLost,
    EngineStats,
    Request,
    check_ability,
    check_request,
    check_version,
    start_generator,
)
from stages.engines.remote.process import ServerProcess
from stages.engines.remote.weights import ModelFiles
from stages.engines.remote.wire import PROTOCOL, ProtocolError, frame, unpack_array
from storage.records import FinishReason

_START_MESSAGE_TIMEOUT_S = 30.0
"""A starting server counts as hung only after at least this many seconds without a message. Loading libraries from a
cold disk may block the server's interpreter for that long, and then the server sends no messages."""


@dataclass(frozen=True)
class RemoteSettings:
    """The engine's adapter, sizes and time limits. `server` holds the fields of `serving.adapter.Settings`."""

    adapter: str
    """Class that serves the engine, as `module:Class` in the server's environment."""
    stated: Callable[[Device], Capabilities]
    """Function that returns the engine's capabilities on a device."""
    server: Mapping[str, Any]
    max_seq: int
    max_rows: int
    eos_ids: Set[int]
    start_s: float
    """Maximum number of seconds until the engine has loaded its model."""
    message_timeout_s: float
    """Maximum number of seconds without a message from the server, which sends one every second. While the server
    starts, the maximum is at least 30 s."""
    in_flight: bool = False
    """True if rows in flight continue under new weights."""


@dataclass(eq=False)
class _Call:
    """One call of `generate`: its unfinished rows (id in messages -> request), and the queue of its results."""

    requests: dict[int, Request]
    results: queue.SimpleQueue[Completion | Exception]


class RemoteEngine:
    """Owns the server, the thread that receives its messages, and the rows in flight. Implements `GenerationEngine`."""

    def __init__(
        self,
        server: ServerProcess,
        files: ModelFiles,
        settings: RemoteSettings,
        *,
        version: int = 0,
        on_lost: Callable[[str], None] | None = None,
    ) -> None:
        """Start the engine, and wait until the server has loaded the model. If that fails, end the server and raise
        EngineLost with the last lines of its log."""
        self.version, self.engine = version, ""
        self._server, self._files, self._settings, self._on_lost = server, files, settings, on_lost
        self._ids = itertools.count()
        self._given = 0
        """Upper bound of ids: every row that was sent to the server has a smaller id."""
        self._calls: dict[int, _Call] = {}
        """Id of each row in flight -> its call."""
        self._answers: dict[int, queue.SimpleQueue[dict[str, Any] | EngineLost]] = {}
        self._changed = threading.Condition()
        """Lock for the rows, the weights and the state of the engine, notified when they change. The lock is not held
        while a thread waits for an answer of the server."""
        self._loading = self._asleep = self._closing = False
        self._failure: EngineLost | None = None
        self._load_lock = threading.Lock()
        with ExitStack() as stack:
            stack.callback(server.close)
            ready = self._start()
            stack.pop_all()
        self.engine = f"{ready.engine} {ready.version}"
        self.numerics: Mapping[str, str] = {"kernels": str(ready), "device": ready.device}
        self.capabilities = settings.stated(ready.device)
        self._thread = threading.Thread(target=self._hear, name="remote-engine", daemon=True)
        self._thread.start()

    # ---- `GenerationEngine` ----

    def generate(self, requests: Iterable[Request]) -> Iterator[Completion]:
        """See `GenerationEngine`.

        Raises:
            RequestError: a request cannot be served, for example because it asks for a newer version than the resident
                one. Requests for older versions are refused too, unless `RemoteSettings.in_flight` is set.
            RuntimeError: the engine is asleep.
            EngineLost: the engine has stopped. The iterator raises this too, if the engine stops later.
            FloatingPointError: raised by the iterator, if the logits of a row are not finite. The message names the
                row.
        """
        rows = list(requests)
        for request in rows:
            check_request(request, self._settings.max_seq, self._files.vocab, self._settings.eos_ids)
            check_ability(request, self.capabilities)
        call = _Call({next(self._ids): request for request in rows}, queue.SimpleQueue())
        message = frame("generate", rows=[self._on_the_wire(i, r) for i, r in call.requests.items()])
        with self._changed:
            self._changed.wait_for(lambda: not self._loading or self._failure is not None)
            self._check_running()
            for request in rows:
                check_version(request, self.version, in_flight=self._settings.in_flight)
            if rows:
                self._calls.update(dict.fromkeys(call.requests, call))
                self._given = max(self._given, 1 + max(call.requests))
                self._send(message)
        return start_generator(self._results(call, len(rows)))

    def load_weights(self, version: int, tensors: Mapping[str, torch.Tensor]) -> None:
        """See `GenerationEngine`. WeightsError is raised before anything is sent to the server. A server that fails
        while it loads weights is lost: then EngineLost is raised."""
        with self._changed:
            self._check_running()
        with self._load_lock, self._files.complete(tensors) as places:
            try:
                with self._changed:
                    self._loading = not self._settings.in_flight
                    self._changed.wait_for(lambda: not (self._loading and self._calls) or self._failure is not None)
                    self._check_running()
                self._ask("load", version=version, tensors=[dataclasses.asdict(place) for place in places])
                self.version = version
            finally:
                with self._changed:
                    self._loading = False
                    self._changed.notify_all()

    def sleep(self) -> None:
        """See `GenerationEngine`. Raises RuntimeError while rows are in flight."""
        with self._changed:
            if self._calls:
                raise RuntimeError(f"{len(self._calls)} rows are in flight: sleep() after them")
            self._asleep = True
            if self.capabilities.sleeps == "weights":
                self.version = NO_VERSION
        self._ask("sleep")

    def wake(self) -> None:
        self._ask("wake")
        with self._changed:
            self._asleep = False

    def stats(self) -> EngineStats:
        return read_stats(self._ask("stats"), self._settings.max_rows)

    def close(self) -> None:
        """End the server at once. Callers that still wait get EngineLost. A second call does nothing."""
        with self._changed:
            self._closing = True
        self._server.close()
        self._thread.join()

    # ---- the connection ----

    def _start(self) -> ServerReady:
        """Send `hello` to the server, and return its answer once the engine has started. Raises EngineLost if the
        engine does not start."""
        settings = self._settings
        try:
            hello = {"version": self.version, "adapter": settings.adapter, "settings": dict(settings.server)}
            self._server.channel.send("hello", protocol=PROTOCOL, **hello)
            message = self._first_answer()
            if message is None:
                raise ConnectionResetError
            if message["kind"] == "failed":
                raise self._lost_error(f"could not start: {message.get('error')}")
            if message.get("protocol") != PROTOCOL:
                raise self._lost_error(f"speaks protocol {message.get('protocol')}, this side {PROTOCOL}")
            return read_ready(message)
        except TimeoutError as error:
            raise self._lost_error(str(error)) from error
        except OSError as error:
            raise self._lost_error(f"ended at its start {self._server.describe_end()}") from error
        except ProtocolError as error:
            raise self._lost_error(f"cannot be talked to: {error}") from error

    def _first_answer(self) -> dict[str, Any] | None:
        """Return the server's answer to `hello`, or None if it has closed the connection. Raises TimeoutError if it
        sends nothing for too long, or no answer within `start_s`: beats do not extend this, since a hanging server
        sends them too."""
        settings, begun_at = self._settings, time.monotonic()
        timeout_s = max(settings.message_timeout_s, _START_MESSAGE_TIMEOUT_S)
        while (left_s := begun_at + settings.start_s - time.monotonic()) > 0:
            try:
                message = self._server.channel.receive(min(timeout_s, left_s))
            except TimeoutError as error:
                if timeout_s < left_s:
                    raise TimeoutError(f"sent nothing for {timeout_s:g} s while it started") from error
                break
            if message is None or message["kind"] != "beat":
                return message
        raise TimeoutError(f"did not come up in {settings.start_s:g} s")

    def _hear(self) -> None:
        """Read messages until the server is gone. The reader thread runs this."""
        try:
            reason = self._take_messages()
        except TimeoutError:
            reason = f"sent nothing for {self._settings.message_timeout_s:g} s"
        except ConnectionResetError:  # it was killed before it had read all that this side sent
            reason = f"ended {self._server.describe_end()}"
        except Exception as error:  # any error: the waiting callers must learn of it
            reason = f"cannot be talked to: {error}"
        lost = self._lost_error(reason)
        try:
            if not self._closing:
                self._server.close()
                if self._on_lost is not None:
                    self._on_lost(self._about_server(reason))  # first: it may end this process before a stage fails
        finally:
            with self._changed:
                self._failure = lost
                for call in set(self._calls.values()):
                    call.results.put(self._stopped())
                for answer in self._answers.values():
                    answer.put(self._stopped())
                self._changed.notify_all()

    def _take_messages(self) -> str:
        """Handle messages until the connection ends, and return the reason of its end. Raises ProtocolError for a
        message that is not allowed here."""
        while True:
            message = self._server.channel.receive(self._settings.message_timeout_s)
            if message is None:
                return f"ended {self._server.describe_end()}"
            kind = message["kind"]
            if kind == "failed":
                return f"failed: {message.get('error')}"
            if kind in ("row", "broken"):
                self._deliver(message)
            elif kind == "done":
                self._answer(message)
            elif kind != "beat":
                raise ProtocolError(f"a message of kind {kind!r:.80}")

    def _answer(self, message: dict[str, Any]) -> None:
        number = read_id(message, "call")
        if number not in self._answers:
            raise ProtocolError(f"an answer to call {number}, which was not made")
        self._answers[number].put(message)

    def _deliver(self, message: Mapping[str, Any]) -> None:
        number = read_id(message, "id")
        with self._changed:
            call = self._calls.get(number)
            if call is None:
                if not 0 <= number < self._given:
                    raise ProtocolError(f"a row with id {number}, which was not sent")
                return  # the row's caller left while the row finished
            request = call.requests[number]
            result = self._result(request, message)
            del self._calls[number], call.requests[number]
            if not self._calls:
                self._changed.notify_all()
        call.results.put(result)

    def _result(self, request: Request, message: Mapping[str, Any]) -> Completion | FloatingPointError:
        if message["kind"] == "broken":
            return FloatingPointError(f"row {request.row} {message.get('error')}")
        tokens, logprobs, versions = read_row(message, request.sampling.max_new_tokens)
        stopped = len(tokens) > 0 and int(tokens[-1]) in self._settings.eos_ids and not request.forced
        return Completion(
            row=request.row,
            tokens=tokens,
            logprobs=logprobs,
            versions=versions,
            finish_reason=FinishReason.STOP if stopped else FinishReason.LENGTH,
        )

    def _results(self, call: _Call, num_rows: int) -> Iterator[Completion | None]:
        try:
            yield None
            for _ in range(num_rows):
                result = call.results.get()
                if isinstance(result, Exception):
                    raise result
                yield result
        finally:
            self._give_up(call)

    def _give_up(self, call: _Call) -> None:
        """Abort the unfinished rows of a call."""
        with self._changed:
            left = [i for i in call.requests if self._calls.pop(i, None) is not None]
            if left and self._failure is None:
                self._send(frame("abort", ids=left))
            self._changed.notify_all()

    def _ask(self, kind: str, **fields: Any) -> dict[str, Any]:
        """Send a message that needs an answer, and return the answer. Raises EngineLost if the server is lost."""
        number, answer = next(self._ids), queue.SimpleQueue[dict[str, Any] | EngineLost]()
        message = frame(kind, call=number, **fields)
        with self._changed:
            if self._failure is not None:
                raise self._stopped()
            self._answers[number] = answer
            self._send(message)
        received = answer.get()
        with self._changed:
            del self._answers[number]
        if isinstance(received, EngineLost):
            raise received
        return received

    def _send(self, message: bytes) -> None:
        """Send a message. If the server is lost, wait until the reason is known, and raise EngineLost. The caller holds
        the lock of `_changed`."""
        try:
            self._server.channel.send_frame(message)
        except OSError as error:
            self._changed.wait_for(lambda: self._failure is not None)
            raise self._stopped() from error

    def _check_running(self) -> None:
        if self._failure is not None:
            raise self._stopped()
        if self._asleep:
            raise RuntimeError("the engine is asleep: wake() it first")

    def _stopped(self) -> EngineLost:
        """Return a new error for each caller: one that is raised twice would collect both tracebacks."""
        return EngineLost(f"the engine has stopped: {self._failure}" if not self._closing else "the engine has stopped")

    def _lost_error(self, event: str) -> EngineLost:
        return EngineLost(f"{self._about_server(event)}; its last output:{self._server.last_lines()}")

    def _about_server(self, event: str) -> str:
        who = f"{self.engine} ({self._settings.adapter})" if self.engine else self._settings.adapter
        return f"the server of {who} {event}"

    def _on_the_wire(self, number: int, request: Request) -> dict[str, Any]:
        """Return a request as the fields of `serving.adapter.ServedRow`. `number`: id of the row."""
        sampling = request.sampling
        return {
            "id": number,
            "row": request.row,
            "seed": request.seed,
            "step": request.step,
            "tokens": list(request.tokens),
            "max_new_tokens": sampling.max_new_tokens,
            "min_new_tokens": sampling.min_new_tokens,
            "temperature": float(sampling.temperature),
            "suppress": list(sampling.suppress_token_ids),
            "stop": sorted(self._settings.eos_ids),
            "forced": list(request.forced),
        }


# ---- answers ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ServerReady:
    """A server's description of its engine, sent when the engine has started."""

    engine: str
    version: str
    device: Device
    facts: Mapping[str, str]

    def __str__(self) -> str:
        """Return one line with the facts that the last bits of the engine's results depend on."""
        facts = {"version": self.version, **self.facts}
        return ", ".join([self.engine, *(f"{name} {value}" for name, value in sorted(facts.items()))])


def read_ready(message: Mapping[str, Any]) -> ServerReady:
    """Read a `ready` message. Raises ProtocolError if it is not valid."""
    device, facts = _text(message, "device"), message.get("facts")
    if device not in ("cpu", "cuda") or not isinstance(facts, dict):
        raise ProtocolError(f"it is ready on {device!r} with facts {facts!r:.80}")
    computes_on: Device = "cuda" if device == "cuda" else "cpu"
    return ServerReady(_text(message, "engine"), _text(message, "version"), computes_on, facts)


def read_id(message: Mapping[str, Any], name: str) -> int:
    """Return the id of a call or row in a message from the server. Raises ProtocolError if field `name` is not an
    integer."""
    value = message.get(name)
    if not isinstance(value, int):
        raise ProtocolError(f"a message {message['kind']!r} whose {name} is {value!r:.80}")
    return value


def read_row(message: Mapping[str, Any], longest: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Read a finished response of at most `longest` tokens. Return its tokens, log-probs and versions: int32, float32
    and int32 [new]. Raises ProtocolError if the message is not valid."""
    names = {"tokens": np.int32, "logprobs": np.float32, "versions": np.int32}
    arrays = {name: unpack_array(message.get(name)) for name in names}
    tokens, logprobs, versions = arrays.values()
    is_row = all(arrays[name].dtype == dtype for name, dtype in names.items()) and tokens.ndim == 1
    if not is_row or not tokens.shape == logprobs.shape == versions.shape or not 1 <= len(tokens) <= longest:
        shapes = ", ".join(f"{name} {array.dtype} {list(array.shape)}" for name, array in arrays.items())
        raise ProtocolError(f"a row of {shapes}; at most {longest} tokens were requested")
    return tokens, logprobs, versions


def read_stats(message: Mapping[str, Any], max_rows: int) -> EngineStats:
    """Read the statistics of a `done` message. Raises ProtocolError if they are not valid."""
    names = ("tokens", "rows", "steps", "in_flight", "kv_peak", "preemptions", "refit_s", "busy_s", "prompt_tokens")
    counted: dict[str, Any] = {name: message.get(name) for name in names}
    if not all(isinstance(number, int | float) for number in counted.values()):
        raise ProtocolError(f"counters that are not numbers: {counted}")
    steps = counted["steps"]
    return EngineStats(
        tokens=counted["tokens"],
        rows=counted["rows"],
        decode_steps=steps,
        mean_occupancy=min(1.0, counted["in_flight"] / (steps * max_rows)) if steps else 0.0,
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
