"""From its import on, the engine's drafts, ranks and migration cannot be imported in this process. As pytest's plugin
(`-p tests.support.plain_engine_only`) it is there before any test is collected."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

REMOVED = tuple(f"stages.engines.embedded.{part}" for part in ("drafts", "ranks", "migration"))


class Removed(MetaPathFinder):
    """Finds, before anyone else, that they are not there."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name in REMOVED:  # what lies below is asked for only after its package
            raise ModuleNotFoundError(f"{name} has been removed", name=name)
        return None


assert not [name for name in sys.modules if name.startswith(REMOVED)], "too late: they have been imported"
sys.meta_path.insert(0, Removed())
