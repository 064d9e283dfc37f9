"""A runtime whose engines draft as far as they can, with a draft head that is sure to learn."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from pipeline.workers.messages import WorkerSpec
from pipeline.workers.runtime import StageRuntime
from stages.engines.embedded.drafts import calibration
from stages.engines.embedded.drafts.draft_head import LearnedDrafter
from stages.engines.embedded.rows import DraftTree, Row

LESSONS = "lessons.jsonl"
"""File in a run's directory, with a line for each copy of the head that drafts: the norm of its teacher."""


class DraftingRuntime(StageRuntime):
    """A runtime. Its engine drafts wherever it can, and not only where that pays on this machine. Before each pass its
    head learns all that there is to learn, and not only while the engine is idle."""

    def __init__(self, spec: WorkerSpec) -> None:
        calibration.LENGTHS = "longest"
        super().__init__(spec)
        if self.parts.engine is None or self.parts.engine._engine.drafts is None:
            return
        drafts, file = self.parts.engine._engine.drafts, self.parts.config.run_dir / LESSONS
        [head] = [drafter for drafter in drafts._drafters if isinstance(drafter, LearnedDrafter)]
        propose = drafts.propose

        def learn_and_propose(rows: Sequence[Row], num_other_tokens: int) -> Mapping[Row, DraftTree]:
            learned = head.generation
            while drafts.train() is not None:
                pass
            if head.generation > learned:
                with file.open("a", encoding="utf8") as lines:
                    print(json.dumps(head._student._norm.tolist()), file=lines)
            return propose(rows, num_other_tokens)

        drafts.propose = learn_and_propose
