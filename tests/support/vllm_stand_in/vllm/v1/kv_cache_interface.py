"""What the adapter changes of the cache's config."""

from __future__ import annotations


class KVCacheConfig:
    @property
    def needs_kv_cache_zeroing(self) -> bool:
        return False
