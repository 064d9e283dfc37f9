"""The parts of the cache's config that the adapter changes."""

from __future__ import annotations


class KVCacheConfig:
    @property
    def needs_kv_cache_zeroing(self) -> bool:
        return False
