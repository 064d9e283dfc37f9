"""Results of a run: summary, samples, plots, report and tracking. Loads no Dask, so commands that only read a run start
faster.

    ledger, store ──History──┬──► summary.json
    events.jsonl ────────────┤    samples.json   ──► tracker (spool ──► MLflow)
                             ├──► plots/*.png
                             └──► report.html

    config.yaml, identity.json ──► settings, keys that tell which runs can be compared ─┐
    ledger, store, events.jsonl ────────────────────────────────────────────────────────┴──► RunSource ──► report.html
"""

from __future__ import annotations

import getpass
import importlib
import json
import os
import platform
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from pipeline.config.identity import Identity, config_sections, flatten_sections, read_identity
from pipeline.config.loading import config_hash
from pipeline.config.paths import RunPaths
from pipeline.config.run import RunConfig
from pipeline.driver.tracked import meaningless_metrics, tracked_params
from pipeline.graph.graph import run_nodes
from pipeline.observe.curves import read_curves
from pipeline.observe.evaluations import VariantSummary, best_evaluation
from pipeline.observe.graph_view import ordered_gang_names
from pipeline.observe.history import EVALUATION_METRIC, STEP_METRIC, History, evaluation_metrics
from pipeline.observe.incidents import find_worker_losses
from pipeline.observe.journal import journal_exists, read_events, read_run_starts
from pipeline.observe.live import Screen
from pipeline.observe.provenance import (
    driver_origin,
    git_commit,
    markdown_code,
    result_text,
    run_description,
    short_command,
    slurm_job,
    software_versions,
)
from pipeline.observe.report.page import build_report
from pipeline.observe.report.source import RunSource, Sameness, Source, VariantSource
from pipeline.observe.rows import response_pairs, samples_table
from pipeline.observe.summary import Summary, summarise
from pipeline.observe.timeline import overlap_by_step, run_timeline
from pipeline.observe.tracking import (
    Dataset,
    MlflowTracker,
    RunStatus,
    Tracker,
    experiment_id,
    opening_hint,
    sink_hints,
)
from stages.models.hf_files import read_tokenizer
from stages.prompts import last_questions
from storage.errors import StoreError
from storage.redaction import redacted, redacted_text
from storage.rollouts import Decode, RolloutStore

_CHANGED = "+changes"
_NOTE, _ENDED = "mlflow.note.content", "stageline.ended"
_LOST_DRIVER_TEXT = "killed, or left to go on: its driver ended without closing it"


def open_history(config: RunConfig) -> History:
    """Open the ledger and store of a run."""
    stored = config.stored
    ledger = stored.ledger()
    store = RolloutStore(stored.place, ledger, config.layouts(), durability=stored.durability)
    return History(config.graph(), ledger, store, config.rollout.rows)


def open_tracker(config: RunConfig) -> Tracker:
    """Open tracking for a run that starts or resumes. `conclude_run` closes it."""
    if config.tracking.uri is None:
        return Tracker()
    paths = RunPaths(config.run_dir)
    commit = git_commit()
    resumes = len(read_run_starts(paths.events))
    running = f"running, resumed for the {resumes}. time" if resumes else "running"
    gone = f"{_LOST_DRIVER_TEXT}; {markdown_code(f'stageline resume {paths.root}')} goes on with it"
    tags = {
        "host": platform.node(),
        "config_hash": config_hash(config),
        "run_dir": str(paths.root.resolve()),
        "stageline.resumes": str(resumes) if resumes else None,
        _ENDED: "not yet" if resumes else None,  # replaces the reason why an earlier driver ended
        "mlflow.parentRunId": config.tracking.parent,
        "mlflow.user": _user(),
        "mlflow.source.name": short_command(),
        "mlflow.source.type": "LOCAL" if slurm_job(os.environ) is None else "JOB",
        "mlflow.source.git.commit": commit.removesuffix(_CHANGED),
        "mlflow.source.git.dirty": "true" if commit.endswith(_CHANGED) else None,
        _NOTE: _note(config, commit, running),
    }
    tracker = MlflowTracker(
        uri=config.tracking.uri,
        experiment=config.tracking.experiment,
        run_name=config.name,
        params=tracked_params(config),
        tags={name: value for name, value in tags.items() if value},
        spool_path=paths.mlflow_spool,
        meaningless_metrics=meaningless_metrics(config),
        tags_if_abandoned={_ENDED: _LOST_DRIVER_TEXT, _NOTE: _note(config, commit, gone)},
        further_trackers=config.tracking.also,
    )
    tracker.log_artifact(_config_to_show(config, paths), "")
    return tracker


def track_prompts(config: RunConfig, tracker: Tracker, digest: str, num_train: int, num_held_out: int) -> None:
    """Track the training and held-out prompts as datasets of the run. `digest`: digest of all prompts together."""
    source, own = redacted_text(config.prompts.url), config.evaluate.prompts.url
    name = Path(source).name
    tracker.log_dataset(Dataset(name, digest[:36], source, "training", num_train))
    if num_held_out:
        evaluated = source if own is None else redacted_text(own)
        label = f"{name} held out" if own is None else Path(evaluated).name
        tracker.log_dataset(Dataset(label, digest[:36], evaluated, "evaluation", num_held_out))


def _user() -> str | None:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a container may run under a user id without a name
        return None


def _config_to_show(config: RunConfig, paths: RunPaths) -> Path:
    """Write the config without secrets, as a file that others may read. Return the file's path."""
    copy = paths.root / "without_secrets" / paths.config.name
    copy.parent.mkdir(exist_ok=True)
    copy.write_text(OmegaConf.to_yaml(redacted(config_sections(config)), sort_keys=False), "utf8")
    return copy


def _note(config: RunConfig, commit: str, result: str) -> str:
    kind, weights = "" if config.has_critic else ", no critic", RunPaths(config.run_dir).weights(config.steps)
    what = f"PPO ({config.ppo.advantage}{kind}) on the task graph, staleness {config.staleness}, {config.steps} steps."
    facts = {
        "model": config.model.path,
        "prompts": config.prompts.url,
        "command": driver_origin()["command"],
        "host": platform.node(),
        "commit": commit,
        "directory": str(RunPaths(config.run_dir).root.resolve()),
        "weights": str(weights.resolve()) if weights.is_dir() else "",
    }
    return run_description(what, facts, result)


def report_missed_metrics(history: History, tracker: Tracker, driver_starts: Sequence[float]) -> list[int]:
    """Track metrics that earlier drivers did not report before they ended. Return the steps that are done."""
    steps = history.finished_steps()
    for step in steps:
        if not tracker.has_metric(step, STEP_METRIC):
            tracker.log_metrics(step, history.read_step_metrics(step, driver_starts))
    first = None
    for version in history.evaluated_versions():
        needed = first is None or not tracker.has_metric(version, EVALUATION_METRIC)
        evaluation = history.read_evaluation(version) if needed else None
        if evaluation is not None:
            first = first or evaluation
            tracker.log_metrics(version, evaluation_metrics(evaluation, first))
    return steps


def conclude_run(
    config: RunConfig, history: History, tracker: Tracker, status: RunStatus, decode: Decode, ended: str = ""
) -> Summary:
    """Write and track the run's results so far, and close tracking. Return the summary. The results are the summary,
    the samples and, under `tracking.report`, the plots and the report. `ended`: the reason if the run ended before its
    last step."""
    paths = RunPaths(config.run_dir)
    summary = summarise_run(config, history)
    paths.summary.write_text(summary.to_json(), "utf8")
    if config.tracking.uri is not None and journal_exists(paths.events):
        for step, fraction in overlap_by_step(read_events(paths.events)).items():
            tracker.log_metrics(step, {"overlap": fraction})
    tracker.log_artifact(paths.summary, "")
    pairs = response_pairs(history, decode, last_questions(paths.prompts))
    if pairs:
        paths.samples.write_text(samples_table(pairs), "utf8")
        tracker.log_table(paths.samples)
    if config.tracking.report:
        for plot in draw_plots(config, history) if history.finished_steps() else ():
            tracker.log_artifact(plot, "plots")
        written = write_report([report_source(config, history, summary)], paths.report)
        tracker.log_artifact(written, "plots")
    note = _note(config, git_commit(), result_text(status, summary, ended))
    tracker.set_tags({_ENDED: ended[:400] or status.lower(), _NOTE: note})
    if status == "FINISHED":
        tracker.set_tags({"stageline.weights": str(paths.weights(config.steps).resolve())})
        if config.tracking.register is not None:
            weights = config.stored.exports().fetch(config.steps)
            tracker.log_model(config.tracking.register, weights or paths.weights(config.steps))
    tracker.close(status)
    return summary


def conclude_despite_error(
    config: RunConfig,
    history: History,
    tracker: Tracker,
    decode: Decode,
    screen: Screen,
    error: BaseException,
) -> None:
    """Call `conclude_run` while `error` is being raised, and close tracking even if that call fails. A second error
    (from the same full disk, say) becomes a note of `error`, and does not replace it."""
    status: RunStatus = "FAILED" if isinstance(error, Exception) else "KILLED"
    ended = f"{type(error).__name__}: {error}".removesuffix(": ")
    with report_second_error(error, screen, "no summary could be made of what there is"):
        conclude_run(config, history, tracker, status, decode, ended)
    with report_second_error(error, screen, "the tracking could not be closed"):
        tracker.close(status)


@contextmanager
def report_second_error(error: BaseException, screen: Screen, action: str) -> Iterator[None]:
    """A context manager for clean-up while the exception `error` is already being raised. If the block raises an
    Exception too, this second exception is suppressed. It is printed as a warning, and added as a note to `error`.

    `action`: beginning of the warning and of the note. It says what could not be done.
    """
    try:
        yield
    except Exception as again:
        text = f"{action}: {type(again).__name__}: {again}"
        error.add_note(text)
        screen.print_event("warning", text, text=text)


def experiment_page(config: RunConfig) -> str | None:
    """Return a text that tells how to open the run's experiment in MLflow. Return None if the run is not tracked, or if
    its experiment does not exist yet."""
    uri = config.tracking.uri
    number = None if uri is None else experiment_id(RunPaths(config.run_dir).mlflow_spool, uri)
    return None if uri is None or number is None else opening_hint(uri, number)


def tracking_links(config: RunConfig) -> dict[str, str]:
    """Return label -> text that tells how to open the run in MLflow. Empty if the run is not tracked."""
    uri = config.tracking.uri
    return {} if uri is None else {"MLflow": experiment_page(config) or opening_hint(uri)}


def summarise_run(config: RunConfig, history: History) -> Summary:
    """Return the content of `summary.json`, computed from a run's directory."""
    paths = RunPaths(config.run_dir)
    parents = {node.address: node.parents for node in run_nodes(config.graph())}
    steps = [one for one in map(history.read_step_numbers, history.finished_steps()) if one is not None]
    evaluations = history.read_evaluations()
    best = best_evaluation(evaluations, config.evaluate.select.max_kl)
    events = read_events(paths.events) if journal_exists(paths.events) else ()
    together = ordered_gang_names(config.gangs())
    return summarise(events, steps, evaluations, parents, software_versions(), best, together, config.predicted_s)


def draw_plots(config: RunConfig, history: History) -> list[Path]:
    """Draw the learning curves and the stage timeline as PNG files in the run's directory, and return both paths. If no
    node has run, the timeline's file is not written, but its path is returned too."""
    paths = RunPaths(config.run_dir)
    # imported late, since matplotlib takes a second
    plots: Any = importlib.import_module("pipeline.observe.plots")
    curves, timeline = paths.plots / "curves.png", paths.plots / "timeline.png"
    events = list(read_events(paths.events))
    plots.plot_curves(
        read_curves(history, read_run_starts(paths.events), history.read_evaluations()), curves, config.name
    )
    losses = [(loss.lost_at, loss.worker) for loss in find_worker_losses(events).losses]
    drawn = run_timeline(events)
    if drawn is not None:
        plots.plot_timeline(drawn, losses, timeline, config.name)
    return [curves, timeline]


def result_paths(config: RunConfig, summary: Summary) -> dict[str, Path | str]:
    """Return label -> place of a result of a finished run. The place is a path, or a text that tells how to open or
    export the result."""
    paths = RunPaths(config.run_dir)
    paths_by_label: dict[str, Path | str] = {"summary": paths.summary}
    if config.tracking.report:
        paths_by_label |= {"learning curves": paths.plots / "curves.png", "timeline": paths.plots / "timeline.png"}
        paths_by_label["report"] = paths.report
    paths_by_label["weights"] = paths.weights(config.steps)
    if summary.best is not None and summary.best.version != config.steps:
        exported = paths.weights(summary.best.version)
        command = f"stageline export {paths.root} --version best"
        paths_by_label["best weights"] = exported if exported.is_dir() else command
    paths_by_label["rollouts"] = config.stored.rollouts
    return paths_by_label | tracking_links(config) | sink_hints(config.tracking.also, paths.root)


# ---- Report ----------------------------------------------------------------------------------------------

_SAMPLING = ("sampling.", "evaluate.temperature", "seed")
_TOKENIZER = ("token", "vocab", "merges")


def write_report(sources: Sequence[Source], file: Path) -> Path:
    """Write one HTML report of one or several runs, replacing the file, and return its path. Raises OSError."""
    staged = file.with_name(f".{file.name}.{os.getpid()}")
    try:
        staged.write_bytes(build_report(sources))
        staged.replace(file)
    except BaseException:
        staged.unlink(missing_ok=True)
        raise
    return file


def report_source(config: RunConfig, history: History, summary: Summary) -> RunSource:
    """Return a run's data for the report, read from its directory."""
    paths, remarks = RunPaths(config.run_dir), []
    try:
        decode: Decode = partial(read_tokenizer(config.model.path).decode, skip_special=False)
    except (OSError, ValueError) as error:
        decode = _token_numbers_text
        reason = str(error).splitlines()[0]
        remarks.append(f"the tokenizer of {config.model.path} cannot be read ({reason}): tokens are shown as numbers")
    try:
        identity = read_identity(paths.root)
    except StoreError as error:
        identity = None
        remarks.append(str(error))
    return RunSource(
        name=config.name,
        directory=str(paths.root.resolve()),
        settings=flatten_sections(redacted(config_sections(config))),
        history=history,
        summary=summary,
        events=list(read_events(paths.events)) if journal_exists(paths.events) else [],
        decode=decode,
        sameness=_comparable_facts(config, identity),
        software=identity.latest.software if identity is not None else {},
        rebuilt_together=ordered_gang_names(config.gangs()),
        user_messages=last_questions(paths.prompts),
        remarks=tuple(remarks),
    )


def variant_source(config: RunConfig) -> VariantSource:
    """Return a variant's data for the report, read from the variant's directory. A variant was trained on the rollouts
    of another run, its parent."""
    summary = VariantSummary.from_json(RunPaths(config.run_dir).summary.read_text("utf8"))
    return VariantSource(
        name=config.name,
        directory=str(config.run_dir.resolve()),
        settings=flatten_sections(redacted(config_sections(config))),
        summary=summary,
        sameness=_comparable_facts(config, read_identity(Path(summary.parent))),
    )


def _comparable_facts(config: RunConfig, identity: Identity | None) -> Sameness:
    """Return the facts that decide which numbers of two runs can be compared: settings, and digests of the models'
    files. If there is no identity, paths replace the digests."""
    models: Mapping[str, Mapping[str, str]] = identity.models if identity is not None else {}
    flat, whole = flatten_sections(config_sections(config)), config_sections(config)
    policy = models.get("policy", {"path": config.model.path})
    reference = models.get("reference", {"path": config.model.reference_path or config.model.path})
    tokenizer = {name: digest for name, digest in policy.items() if any(part in name for part in _TOKENIZER)}
    key, _ = config.held_out_reward
    learned = {name: digests for name, digests in models.items() if "." in name}
    sampling = {name: value for name, value in flat.items() if name.startswith(_SAMPLING)}
    return Sameness(
        model=_text(policy),
        tokenizer=_text(tokenizer or policy),
        reference=_text(reference),
        reward=_text([_scoring_settings(whole["reward"]), learned]),
        held_out_reward=_text(
            [_scoring_settings(whole["evaluate"]["reward"] if key != "reward" else whole["reward"]), learned]
        ),
        held_out_sampling=_text(sampling),
    )


def _scoring_settings(section: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a reward's section that decide the scores."""
    return {key: section.get(key) for key in ("kind", "args", "parts")}


def _text(value: object) -> str:
    return json.dumps(value, sort_keys=True)


def _token_numbers_text(tokens: Sequence[int]) -> str:
    return " ".join(map(str, tokens)) + " " if tokens else ""
