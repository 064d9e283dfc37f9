"""What an engine counts of its batches, for `EngineStats`. May import stages.engines.protocol; of
stages.engines.embedded extensions and scheduler."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from stages.engines.embedded.extensions import DraftCounts
from stages.engines.embedded.scheduler import Chunk, Scheduler
from stages.engines.protocol import EngineStats


@dataclass
class Counters:
    """Owns what was counted since `stats` was last called."""

    tokens: int = 0
    rows: int = 0
    decode_steps: int = 0
    decoded_rows: int = 0
    peak_blocks: int = 0
    prompt_tokens: int = 0
    shared_tokens: int = 0
    preemptions: int = 0
    refit_s: float = 0.0
    busy_s: float = 0.0

    def add_batch(self, chunks: Sequence[Chunk], num_tokens: int, num_in_flight: int, seconds: float) -> None:
        """A batch that drew so many tokens which are rows' own, with so many rows in flight."""
        self.tokens += num_tokens
        self.decode_steps += 1
        self.decoded_rows += num_in_flight
        self.prompt_tokens += sum(chunk.count for chunk in chunks if not chunk.decodes)
        self.busy_s += seconds

    def add_scheduling(self, scheduler: Scheduler) -> None:
        """What the scheduler counted; it begins anew."""
        self.peak_blocks = max(self.peak_blocks, scheduler.pool.peak_used)
        self.preemptions += scheduler.num_preemptions
        self.shared_tokens += scheduler.num_shared_tokens
        scheduler.num_preemptions = scheduler.num_shared_tokens = 0
        scheduler.pool.reset_peak()

    def stats(self, scheduler: Scheduler, drafts: DraftCounts, rank_busy_s: Collection[float]) -> EngineStats:
        """Of this stretch, in which each rank computed for `rank_busy_s`."""
        decoded = scheduler.num_slots * self.decode_steps
        return EngineStats(
            tokens=self.tokens,
            rows=self.rows,
            decode_steps=self.decode_steps,
            mean_occupancy=self.decoded_rows / decoded if decoded else 0.0,
            kv_peak_fraction=self.peak_blocks / scheduler.pool.num_blocks,
            preemptions=self.preemptions,
            refit_s=self.refit_s,
            busy_s=self.busy_s,
            prompt_tokens=self.prompt_tokens,
            shared_tokens=self.shared_tokens,
            drafted_tokens=dict(drafts.drafted),
            accepted_tokens=dict(drafts.accepted),
            draft_lengths=dict(drafts.lengths),
            rank_busy_s=tuple(rank_busy_s),
            accepted_positions=dict(drafts.accepted_at),
        )
