"""The contents of the page about one run, read from its directory in one pass.

ledger ──► commits of the steps that are drawn ──► curves, versions of the timeline
store ───► rows of some steps, held-out rows ────► samples, mismatches, headline
journal ─────────────────────────────────────────► timeline, incidents, facts
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from pipeline.observe.curves import (
    MAX_POINTS,
    HeldOutPoint,
    RunCurves,
    even_indices,
    read_curves,
    round_or_none,
    run_curves,
)
from pipeline.observe.evaluations import Evaluation
from pipeline.observe.history import EVALUATION_METRIC, History
from pipeline.observe.incidents import Incident, find_worker_losses, incident_of_event, worst_incidents
from pipeline.observe.journal import Event, EventKind
from pipeline.observe.report.comparison import HeldOutScores, TokenMismatch, worst_mismatches
from pipeline.observe.report.facts import Fact, failure_texts, headlines, progress_text, run_facts
from pipeline.observe.report.samples import SampleBudget, Samples, choose_samples, shorten
from pipeline.observe.report.source import RunSource, Source, VariantSource
from pipeline.observe.rows import ResponsePair, StageRows, read_step, response_pairs, stored_steps
from pipeline.observe.summary import Headline
from pipeline.observe.text import format_number
from pipeline.observe.timeline import run_timeline, total_length
from storage.address import Address
from storage.commits import Commit
from storage.errors import StoreError

MAX_EXECUTIONS = 20_000
"""Maximum number of executions in a timeline."""
_MAX_READ_BYTES, _TOKEN_BYTES = 512 << 20, 64
"""Maximum number of bytes of rows to read, and the estimated number of bytes that all arrays together store for one
token."""
_MIN_STEPS = 3
_MAX_TEXT_CHARS = 1600
"""Maximum number of characters of a held-out prompt or response."""


@dataclass(frozen=True)
class HeldOutPairs:
    """Responses of the first and of the last evaluated version to the held-out prompts."""

    versions: tuple[int, int]
    pairs: Sequence[ResponsePair]
    of_pairs: int


@dataclass(frozen=True)
class RunIncidents:
    """Incidents of a run, in order of time."""

    shown: Sequence[Incident]
    of_all: int
    """Number of all incidents. If there are very many, `shown` has only the most severe ones."""


@dataclass(frozen=True)
class TimelineLane:
    gang: str
    worker: str


@dataclass(frozen=True)
class TimelineMark:
    """A moment that is marked in the timeline: an incident, or the start of a driver that resumed the run."""

    ms: int
    kind: str
    text: str


@dataclass(frozen=True)
class RunTimeline:
    """A `Timeline` for the page. The fields `lane` to `versions` are columns: each has one entry per execution. This is
    a compact form for tens of thousands of executions. Times are in milliseconds since `start`."""

    start: float
    """Start time of the first execution, seconds since the epoch."""
    duration_ms: int
    window_ms: tuple[int, int]
    """The part of the timeline that is shown first: the middle steps, or everything if there are few steps."""
    lanes: Sequence[TimelineLane]
    stages: Sequence[str]
    lane: Sequence[int]
    stage: Sequence[int]
    """Index of the stage in `stages`."""
    step: Sequence[int]
    shard: Sequence[int]
    begin_ms: Sequence[int]
    length_ms: Sequence[int]
    versions: Sequence[str]
    """Versions of the weights that each execution used, as text. The text is empty if the execution's commit was not
    read, or if it used no weights."""
    marks: Sequence[TimelineMark]
    of_executions: int
    """Number of all executions. If the run is long, only the first and the last ones are drawn."""
    gaps_ms: int
    """Total length of the periods in which no driver worked. The timeline leaves out these periods."""


@dataclass(frozen=True)
class RunContents:
    """The contents of the page about one run."""

    name: str
    directory: str
    state: str
    facts: Sequence[Fact]
    settings: Sequence[tuple[str, str]]
    headlines: Sequence[Headline]
    curves: RunCurves
    timeline: RunTimeline | None
    staleness: Mapping[str, int]
    """Staleness -> number of rows (`summary.StepNumbers.staleness`)."""
    stage_s: Mapping[str, float | None]
    samples: Samples
    held_out: HeldOutPairs | None
    mismatches: Sequence[TokenMismatch] | None
    """The tokens with the largest mismatch. None for a variant, because it has no rows of its own. Also None if the
    run's config does not let the trainer recompute log-probs. Empty if no recomputed log-probs were read."""
    incidents: RunIncidents
    remarks: Sequence[str]


@dataclass(frozen=True)
class Gathered:
    """The page's contents about one run, and the run's held-out scores, which are compared with the scores of other
    runs."""

    contents: RunContents
    held_out: HeldOutScores | None


def read_contents(source: Source, budget: SampleBudget, max_executions: int = MAX_EXECUTIONS) -> Gathered:
    """Read from a run everything that the report page shows about it. If the rows of a step cannot be read, they are
    left out, and a remark about them is added to `RunContents.remarks`.

    Args:
        budget: limits on the rows that the page shows.
        max_executions: maximum number of executions of nodes in the timeline.

    Raises:
        StoreError: an evaluation or a commit record is damaged.
    """
    if isinstance(source, VariantSource):
        return Gathered(_variant_contents(source), None)
    history, events = source.history, source.events
    remarks = [*failure_texts(events), *source.remarks]
    done = history.finished_steps()
    evaluations = history.read_evaluations()
    drawn = [done[i] for i in even_indices(len(done), MAX_POINTS)]
    commits = _commits(history, [*drawn, *([] if not done else [done[-1] + 1])])
    read, stored, missing = _read_rows(history, budget.steps)
    remarks += missing + _missing_part_remarks(source, evaluations)
    by_step = {rows.step: rows for rows in read}
    incidents = run_incidents(source)
    worst = worst_mismatches(read, source.decode)
    hosts = Counter(commit.provenance.host for commit in commits.values())
    contents = RunContents(
        name=source.name,
        directory=source.directory,
        state=progress_text(events, len(done), history.spec.steps),
        facts=run_facts(source.settings, events, source.software, hosts),
        settings=[(key, str(value)) for key, value in source.settings.items()],
        headlines=headlines(
            source.summary, evaluations, by_step.get(done[0]) if done else None, by_step.get(done[-1]) if done else None
        ),
        curves=read_curves(
            history,
            (event.t for event in events if event.kind is EventKind.RUN_STARTED),
            evaluations,
            {address: commit.ref() for address, commit in commits.items()},
        ),
        timeline=timeline_columns(events, _versions(commits), incidents.shown, max_executions),
        staleness=source.summary.staleness.histogram,
        stage_s={stage: round_or_none(seconds) for stage, seconds in source.summary.stage_s.items()},
        samples=choose_samples(
            read,
            stored,
            source.decode,
            budget,
            {(one.step, one.row) for one in worst or ()},
            source.user_messages,
        ),
        held_out=_held_out(source, evaluations, budget.held_out),
        mismatches=(worst or []) if history.spec.recompute_logprobs else None,
        incidents=incidents,
        remarks=remarks,
    )
    return Gathered(contents, _held_out_scores(source, evaluations))


def _variant_contents(source: VariantSource) -> RunContents:
    """Return the page's contents about a variant: settings, curves, and the held-out rewards of the variant and its
    parent."""
    summary, compared = source.summary, source.summary.comparison
    start, stop = summary.updates
    curves = run_curves({one["step"]: one["metrics"] for one in summary.steps}, len(summary.steps), ())
    held_out, lines = {}, []
    if compared is not None:
        t = "-" if compared.paired_t is None else f"{compared.paired_t:.1f}"
        parent = format_number(compared.parent)
        about = f"v{stop}, {compared.num_prompts} prompts; its parent's v{stop}: {parent}, paired t {t}"
        held_out = {EVALUATION_METRIC: [HeldOutPoint(stop, round_or_none(compared.variant), None)]}
        lines = [Headline("held_out", "held-out reward", format_number(compared.variant), about)]
    facts = run_facts(source.settings, (), summary.versions, ())
    return RunContents(
        name=source.name,
        directory=source.directory,
        state=f"variant: updates {start}:{stop} on the rollouts of {summary.parent}",
        facts=[Fact("changed", ", ".join(summary.changed) or "nothing"), *facts],
        settings=[(key, str(value)) for key, value in source.settings.items()],
        headlines=lines,
        curves=replace(curves, held_out=held_out),
        timeline=None,
        staleness={},
        stage_s={},
        samples=Samples([], 0, 0, 0),
        held_out=None,
        mismatches=None,
        incidents=RunIncidents([], 0),
        remarks=["a variant has no rows of its own: it was trained on those of its parent"],
    )


def _commits(history: History, steps: Sequence[int]) -> dict[Address, Commit]:
    """Return the commits of the nodes of some steps. For step i they include the canary of version i of the weights,
    and the rollouts and scores of the evaluation of version i."""
    spec = history.spec
    commits = {}
    for step in steps:
        evaluated = [Address(f"evaluate{part}", step, s) for part in ("", "_score") for s in range(spec.eval_shards)]
        for address in {*history.addresses(step), *(evaluated if spec.eval_every else [])}:
            commit = history.ledger.find(address)
            if commit is not None:
                commits[address] = commit
    return commits


def run_incidents(source: RunSource, max_count: int = 300) -> RunIncidents:
    """Return up to `max_count` incidents of a run. If there are more, the most severe kinds are kept."""
    losses = find_worker_losses(source.events, source.rebuilt_together)
    lost_s = {(one.gang, one.t): one.lost_s for one in source.summary.trainer_losses if one.lost_s is not None}
    incidents = [
        one for one in (incident_of_event(event, losses, lost_s) for event in source.events) if one is not None
    ]
    return RunIncidents(worst_incidents(incidents, max_count), len(incidents))


def timeline_columns(
    events: Sequence[Event], versions: Mapping[Address, str], incidents: Sequence[Incident], max_executions: int
) -> RunTimeline | None:
    """Return a timeline of up to `max_executions` executions, or None if nothing was executed.

    Args:
        events: all events of the journal.
        versions: node -> versions of the weights that the node used, as text.
        incidents: the incidents to mark in the timeline.
        max_executions: maximum number of executions in the timeline."""
    drawn = run_timeline(events, max_executions)
    if drawn is None:
        return None
    start = drawn.start_s

    def ms(t: float) -> int:
        return round((t - start) * 1000)

    placed = [(number, box) for number, lane in enumerate(drawn.lanes) for box in lane.boxes]
    stages = sorted({box.address.stage for _, box in placed})
    resumes = [event for event in events if event.kind is EventKind.RUN_STARTED][1:]
    left, right = drawn.middle_period or (start, drawn.end_s)
    return RunTimeline(
        start=start,
        duration_ms=ms(drawn.end_s),
        window_ms=(ms(left), ms(right)),
        lanes=[TimelineLane(lane.gang, lane.worker) for lane in drawn.lanes],
        stages=stages,
        lane=[lane for lane, _ in placed],
        stage=[stages.index(box.address.stage) for _, box in placed],
        step=[box.address.step for _, box in placed],
        shard=[box.address.shard for _, box in placed],
        begin_ms=[ms(box.start_s) for _, box in placed],
        length_ms=[round((box.end_s - box.start_s) * 1000) for _, box in placed],
        versions=[versions.get(box.address, "") for _, box in placed],
        marks=[
            *(TimelineMark(ms(drawn.without_gaps(event.t)), "resumed", event.detail or "") for event in resumes),
            *(TimelineMark(ms(drawn.without_gaps(one.at)), one.kind, one.text) for one in incidents),
        ],
        of_executions=drawn.num_boxes,
        gaps_ms=round(1000 * total_length(drawn.gaps)),
    )


def _versions(commits: Mapping[Address, Commit]) -> dict[Address, str]:
    """Return a dictionary: node -> versions of the weights that the node used, as text. The text is "v3", or "v3-4" if
    the version changed from 3 to 4 while the node ran. Nodes that used no weights are left out."""
    texts = {}
    for address, commit in commits.items():
        versions = commit.provenance.weight_versions
        if versions:
            texts[address] = "v" + "-".join(str(v) for v in dict.fromkeys((versions[0], versions[-1])))
    return texts


def _read_rows(history: History, max_steps: int) -> tuple[list[StageRows], int, list[str]]:
    """Read the rows of up to `max_steps` steps. Return the rows, the number of stored steps, and remarks about missing
    rows."""
    steps, before = stored_steps(history, complete_only=True), history.store.dropped_before()
    remarks = [f"the rows of steps before {before} were deleted (storage.keep.rollouts)"] if before else []
    read = []
    for step in [steps[i] for i in even_indices(len(steps), min(max_steps, _count_affordable_steps(history, steps)))]:
        try:
            read.append(read_step(history, step))
        except StoreError as error:
            remarks.append(f"the rows of step {step} cannot be read: {error}")
    return read, len(steps), remarks


def _count_affordable_steps(history: History, steps: Sequence[int]) -> int:
    """Return the number of steps whose rows together stay within `_MAX_READ_BYTES`, but at least `_MIN_STEPS`. Return 0
    if no rows are stored."""
    commit = history.ledger.find(Address("generate", steps[-1])) if steps else None
    if commit is None:
        return 0
    rows, seq = commit.arrays["tokens"].shape
    return max(_MIN_STEPS, _MAX_READ_BYTES // (rows * history.spec.shards * seq * _TOKEN_BYTES))


def _missing_part_remarks(source: RunSource, evaluations: Sequence[Evaluation]) -> list[str]:
    """Return remarks about the parts of the page that this run lacks, each with the reason."""
    spec, remarks = source.history.spec, []
    if not source.summary.steps:
        remarks.append("no step was finished: there are no curves")
    if not evaluations:
        why = "before this was written" if spec.eval_every else "(evaluate.every=0)"
        remarks.append(f"no version was evaluated {why}: there are no held-out scores")
    if not spec.has_critic:
        remarks.append(f"there is no critic (ppo.advantage={source.settings.get('ppo.advantage')}), so no values")
    if not spec.recompute_logprobs:
        remarks.append("the trainer's log-probs are not recomputed (ppo.proximal): there is no mismatch by token")
    return remarks


def _held_out(source: RunSource, evaluations: Sequence[Evaluation], max_pairs: int) -> HeldOutPairs | None:
    pairs = response_pairs(source.history, source.decode, source.user_messages)
    if not pairs:
        return None
    chosen = [pairs[i] for i in even_indices(len(pairs), max_pairs)]
    short = [
        replace(
            pair,
            prompt=shorten(pair.prompt, _MAX_TEXT_CHARS),
            before=shorten(pair.before, _MAX_TEXT_CHARS),
            after=shorten(pair.after, _MAX_TEXT_CHARS),
        )
        for pair in chosen
    ]
    return HeldOutPairs((evaluations[0].version, evaluations[-1].version), short, len(pairs))


def _held_out_scores(source: RunSource, evaluations: Sequence[Evaluation]) -> HeldOutScores | None:
    if not evaluations:
        return None
    version = evaluations[-1].version
    rollout, scores = source.history.read_evaluated_rows(version)
    seen: Counter[str] = Counter()
    by_prompt = {}
    for row in range(rollout.num_rows):
        text = source.decode(rollout.tokens[row, : rollout.prompt_lengths[row]].tolist())
        by_prompt[text, seen[text]] = float(scores.scores[row])
        seen[text] += 1
    return HeldOutScores(version, by_prompt)
