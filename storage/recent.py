"""The records a process read or wrote last, so that stages of one worker do not read the same rows again.

Committed records never change, so a kept one is as good as the file; it was checked when it was read. May import the
standard library and storage.records.
"""

from __future__ import annotations

import threading
from collections import OrderedDict

from storage.address import Address
from storage.records import Record

Key = tuple[Address, str]
"""An output and the attempt that was committed."""


class RecentRecords:
    """Owns up to `max_bytes` of records, least recently used dropped first; threads may share it."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._records: OrderedDict[Key, tuple[Record, int]] = OrderedDict()
        self._bytes = 0
        self._lock = threading.Lock()

    def get(self, key: Key) -> Record | None:
        with self._lock:
            if key not in self._records:
                return None
            self._records.move_to_end(key)
            return self._records[key][0]

    def put(self, key: Key, record: Record) -> None:
        """Keeps a record, which nobody may write to from now on; one that is larger than all the space is not kept."""
        size = sum(array.nbytes for array in record.arrays().values())
        with self._lock:
            if size > self._max_bytes or key in self._records:
                return
            self._records[key] = (record, size)
            self._bytes += size
            while self._bytes > self._max_bytes:
                _, (_, dropped) = self._records.popitem(last=False)
                self._bytes -= dropped
