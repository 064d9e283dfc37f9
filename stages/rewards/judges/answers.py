"""A judge's answers on disk: what was asked is never asked again, whatever became of the process that asked.

    DIRECTORY/answers-*.jsonl    one file for each process that ever asked; whole lines are appended
      {key, model, messages, text, likeliest, time, seconds, attempts}

`key` is a digest of all that was sent, so that files of several judges and runs may lie together. A last line that is
cut short, or a damaged one, is a question that is asked again. May import storage.retries and this folder.
"""

from __future__ import annotations

import hashlib
import json
import os
import uuid
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from stages.rewards.judges.verdicts import Answer
from storage.retries import patiently

_PATIENCE_S = 60.0
"""For a filesystem that says no for a while."""


def question_key(body: Mapping[str, Any]) -> str:
    """Of what is sent to a judge: its model, the messages, how it is to answer."""
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()[:32]


class AnswerCache:
    """Owns this process's file of answers, and knows what all files of a directory hold."""

    def __init__(self, directory: Path | None) -> None:
        """None: answers are kept in this process alone. Nothing is made before the first answer."""
        self._directory = directory
        self._answers: dict[str, Answer] = {}
        self._read: dict[str, int] = {}
        """Bytes read of each file."""
        self._file: Path | None = None
        self._descriptor = -1
        self._end = 0

    def find(self, key: str) -> Answer | None:
        return self._answers.get(key)

    def refresh(self) -> None:
        """Reads what other processes have added."""
        if self._directory is None or not self._directory.is_dir():
            return
        for path in sorted(self._directory.glob("answers-*.jsonl")):
            if path != self._file:
                self._read_more(path)

    def add(self, key: str, answer: Answer, about: Mapping[str, Any]) -> None:
        """Keeps an answer; `about`: what else is to be known of it. Raises StoreRefused for a full disk."""
        self._answers[key] = answer
        if self._directory is None:
            return
        record = {"key": key, **about, "text": answer.text, "likeliest": answer.likeliest}
        data = (json.dumps(record, ensure_ascii=False) + "\n").encode(errors="backslashreplace")
        patiently(lambda: self._append(data), str(self._directory), _PATIENCE_S)
        self._end += len(data)

    def close(self) -> None:
        """Twice is harmless; what is added later begins another file."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
        self._descriptor = -1

    def _append(self, data: bytes) -> None:
        if self._descriptor < 0:
            assert self._directory is not None
            self._directory.mkdir(parents=True, exist_ok=True)
            file = self._directory / f"answers-{os.getpid()}-{uuid.uuid4().hex[:8]}.jsonl"
            self._descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
            self._file, self._end = file, 0
        try:
            written = 0
            while written < len(data):
                written += os.pwrite(self._descriptor, data[written:], self._end + written)
        except OSError:
            with suppress(OSError):
                os.ftruncate(self._descriptor, self._end)
            raise

    def _read_more(self, path: Path) -> None:
        start = self._read.get(path.name, 0)
        if path.stat().st_size <= start:
            return
        with path.open("rb") as stream:
            stream.seek(start)
            data = stream.read()
        whole = data[: data.rfind(b"\n") + 1]
        self._read[path.name] = start + len(whole)
        for line in whole.splitlines():
            try:
                record = json.loads(line)
                likeliest = record["likeliest"]
                pairs = None if likeliest is None else tuple((str(text), float(p)) for text, p in likeliest)
                self._answers[str(record["key"])] = Answer(str(record["text"]), pairs)
            except (ValueError, KeyError, TypeError):
                continue  # damaged: asked again
