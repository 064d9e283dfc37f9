"""Names that the adapter imports."""

from __future__ import annotations


class BatchUpdate:
    """Rows are not made here."""


class LogitsProcessor:
    """Rows are not made here."""


def process_dict_updates(req_entries: object, batch_update: object, new_state: object) -> bool:
    raise NotImplementedError
