"""A judge behind an OpenAI-compatible endpoint: a real HTTP server on loopback, in threads of this process."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import torch


@dataclass(frozen=True)
class Reply:
    """The server's reply."""

    body: str
    status: int = 200
    headers: Mapping[str, str] = field(default_factory=dict)
    cut: bool = False
    """The connection ends before the answer."""


Judge = Callable[[Mapping[str, Any]], Reply]
"""Function from a request's body to the reply. It is called in a thread of its own."""


@dataclass
class Served:
    """Owns a server; `asked` are the bodies that came, `headers` theirs."""

    url: str
    asked: list[dict[str, Any]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    most_at_once: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)
    now: int = 0


@contextmanager
def serving(judge: Judge) -> Iterator[Served]:
    served = Served("")

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            with served.lock:
                served.asked.append(body)
                served.headers.append(dict(self.headers))
                served.now += 1
                served.most_at_once = max(served.most_at_once, served.now)
            try:
                reply = judge(body)
            finally:
                with served.lock:
                    served.now -= 1
            if reply.cut:
                self.close_connection = True
                return
            data = reply.body.encode()
            self.send_response(reply.status)
            for name, value in {"Content-Length": str(len(data)), **reply.headers}.items():
                self.send_header(name, value)
            with suppress(OSError):  # who asked has gone
                self.end_headers()
                self.wfile.write(data)

        def log_message(self, *_: object) -> None:
            """Nothing."""

    class Server(ThreadingHTTPServer):
        daemon_threads = True
        request_queue_size = 1024
        """Connections that may come at once."""

    server = Server(("127.0.0.1", 0), Handler)
    served.url = f"http://127.0.0.1:{server.server_address[1]}/v1"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield served
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def completion(
    text: str, likeliest: Sequence[tuple[str, float]] | None = None, tokens: tuple[int, int] | None = None
) -> Reply:
    """A chat completion, with the first token's likeliest and the tokens of prompt and completion where they are
    given."""
    choice: dict[str, Any] = {"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": "stop"}
    if likeliest is not None:
        top = [{"token": token, "logprob": log_prob} for token, log_prob in likeliest]
        choice["logprobs"] = {"content": [{**top[0], "top_logprobs": top}]}
    usage = {} if tokens is None else {"usage": {"prompt_tokens": tokens[0], "completion_tokens": tokens[1]}}
    return Reply(json.dumps({"object": "chat.completion", "choices": [choice], **usage}))


def asked_text(body: Mapping[str, Any]) -> str:
    """The last message of a request."""
    return str(body["messages"][-1]["content"])


def language_model(model: Any, encode: Callable[[Any], list[int]], decode: Callable[[list[int]], str]) -> Judge:
    """A server's answers by a transformers model: its likeliest next token, with as many others as are asked for."""
    lock = threading.Lock()

    def answer(body: Mapping[str, Any]) -> Reply:
        with lock, torch.no_grad():
            logits = model(torch.tensor([encode(body["messages"])])).logits[0, -1].float()
        top = torch.log_softmax(logits, -1).topk(min(int(body["top_logprobs"]), logits.shape[-1]))
        pairs = [(decode([int(token)]), float(p)) for token, p in zip(top.indices, top.values, strict=True)]
        return completion(pairs[0][0], pairs)

    return answer
