"""`stageline dashboard RUN`: serve the page `/stageline` of a run that has ended, or that another process drives. The
page is made from the files in the run's directory."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

from pipeline.cli.answers import SUCCESS, print_line, read_saved_config
from pipeline.config.paths import RunPaths
from pipeline.config.run import RunConfig
from pipeline.driver.results import tracking_links
from pipeline.errors import ConfigError
from pipeline.observe.graph_page import HEADERS, PATH, log_names, read_log_end, render_fragment, render_page
from pipeline.observe.graph_view import GraphView, RunFacts, recorded_view
from pipeline.observe.journal import journal_exists, read_events
from storage.locks import holder

HOST = "127.0.0.1"
PORT = 8788
"""Port if the user gives none. If it is taken, any free port is used."""
HTML, TEXT = "text/html; charset=utf-8", "text/plain; charset=utf-8"


def command(options: argparse.Namespace) -> int:
    with open_server(read_saved_config(options.run_dir), options.port) as server:
        print_line(f"{options.run_dir}: http://{HOST}:{server.server_port}/{PATH} (Ctrl-C ends it)")
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            return SUCCESS
    return SUCCESS


def open_server(config: RunConfig, port: int | None) -> ThreadingHTTPServer:
    """Return a server that listens on a port and serves a run's page. `port` None: `PORT`, or any free port if `PORT`
    is taken.

    Raises:
        ConfigError: the directory holds no journal, or the server cannot use the port.
    """
    paths = RunPaths(config.run_dir)
    if not journal_exists(paths.events):
        raise ConfigError(str(paths.root), f"holds no journal ({paths.events.name}): this run never began")
    if port is not None and not 0 <= port <= 65535:
        raise ConfigError("--port", f"given {port}; a port is 0 (any that is free) to 65535")
    handler = partial(_Handler, CachedRunView(config), paths.logs)
    try:
        return ThreadingHTTPServer((HOST, PORT if port is None else port), handler)
    except OSError as error:
        if port is None:
            return ThreadingHTTPServer((HOST, 0), handler)
        raise ConfigError("--port", f"given {port}; {error.strerror}: another, or 0 for any that is free") from error


class CachedRunView:
    """A function that returns the view of a run, and caches it. The run's directory is read again when the size of its
    journal has changed. Whether a driver is running is looked up at each call."""

    def __init__(self, config: RunConfig) -> None:
        self._config = config
        self._paths = RunPaths(config.run_dir)
        self._size = -1
        self._view: GraphView | None = None

    def __call__(self) -> GraphView:
        size = self._paths.events.stat().st_size if self._paths.events.exists() else 0
        if self._view is None or size != self._size:
            self._view, self._size = read_run_view(self._config), size
        return replace(self._view, is_driven=holder(self._paths.lock) is not None)


def read_run_view(config: RunConfig) -> GraphView:
    """Read a run's directory, and return the view of the run."""
    paths = RunPaths(config.run_dir)
    links = tracking_links(config)
    facts = RunFacts(config.name, config.steps, config.staleness, tuple(links.items()), log_names(paths.logs))
    return recorded_view(facts, config.graph(), config.gangs(), config.stored.ledger(), read_events(paths.events))


class _Handler(BaseHTTPRequestHandler):
    """A request handler that serves the same page as the driver of a live run (`driver.dashboard`)."""

    def __init__(self, view: Callable[[], GraphView], logs: Path, *arguments: object) -> None:
        self._view = view
        self._logs = logs
        super().__init__(*arguments)  # type: ignore[arg-type]

    def do_GET(self) -> None:
        path = unquote(urlsplit(self.path).path).removeprefix("/")
        log = read_log_end(self._logs, path.removeprefix(f"{PATH}/logs/")) if path.startswith(f"{PATH}/logs/") else None
        if path == PATH:
            self._answer(render_page(self._view()), HTML)
        elif path == f"{PATH}/view":
            self._answer(render_fragment(self._view()), HTML)
        elif log is not None:
            self._answer(log, TEXT)
        elif not path:
            self.send_response(HTTPStatus.FOUND)
            self.send_header("Location", f"/{PATH}")
            self.end_headers()
        else:
            self.send_error(HTTPStatus.NOT_FOUND)

    def _answer(self, text: str, kind: str) -> None:
        body = text.encode()
        self.send_response(HTTPStatus.OK)
        for name, value in {**HEADERS, "Content-Type": kind, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *arguments: object) -> None:
        """Print nothing, because the lines would disturb the user's terminal."""
