"""`stageline check CONFIG [key=value...] | RUN`: what a run would be refused for, or whether its directory is sound.

Nothing is started and nothing is written. Of a config it also prints the memory that the run would take.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

from pipeline.cli.answers import output, print_line
from pipeline.cli.exit_codes import BAD_INPUT, DONE
from pipeline.cli.sources import config_of, saved_config
from pipeline.cli.verification import verify_run
from pipeline.config.guarantees import engine_line, unproven
from pipeline.config.host_limits import memory_limits, planned_run
from pipeline.config.memory import DRIVER_BYTES, host_bytes, published_bytes, workers_memory
from pipeline.config.preflight import check_run
from pipeline.config.role_models import role_models
from pipeline.config.run import RunConfig
from pipeline.observe.tables import MemoryColumn, memory_table
from stages.engines.capabilities import Device
from stages.models.spec import read_spec


def command(options: argparse.Namespace) -> int:
    if Path(options.target).is_dir():
        report = verify_run(saved_config(options.target))
        output().print(report.render(), crop=False)  # a problem is one line, however long
        return DONE if report.sound else BAD_INPUT
    config = config_of([options.target, *options.more])
    prompts = check_run(config, resume=False).prompts
    _show_memory(config)
    _show_engine(config)
    train, held_out = len(prompts.train), len(prompts.held_out)
    per_step = config.rollout.rows // config.rollout.responses_per_prompt
    if per_step > train:
        print_line(
            f"note: a step has {per_step} prompts (rollout.rows={config.rollout.rows}), but there are {train} to train "
            "on: every step repeats some"
        )
    print_line(f"{options.target}: would run ({train} prompts to train on, {held_out} held out)")
    return DONE


def _show_engine(config: RunConfig) -> None:
    """What the engine can do on this host, and what the run may therefore not prove."""
    device: Device = "cuda" if torch.cuda.is_available() else "cpu"
    print_line(engine_line(config, device))
    for missing in unproven(config, device):
        print_line(f"not proven: {missing}")


def _show_memory(config: RunConfig) -> None:
    """The prediction: of each gang its largest worker, by what the memory is for."""
    limits = memory_limits(config)
    run = planned_run(config, role_models(config, read_spec(config.model.path)), limits)
    workers = workers_memory(run)
    columns = []
    for gang in config.gangs():
        of_gang = [worker for worker in workers if worker.worker[0] == gang.name]
        largest = max(of_gang, key=lambda worker: worker.total)
        columns.append(MemoryColumn(gang.name, len(of_gang), largest.items, largest.total))
    shared = {"published weights": published_bytes(run), "driver": DRIVER_BYTES}
    output().print(memory_table(columns, shared, host_bytes(run, workers), limits.host))
