"""`stageline plan CONFIG [key=value...] --devices 64xH100-80`: search for the fastest way to place a run on devices,
and print the best synchronous and asynchronous plans.

This host need not have the devices. No run is started, and only the file of `--write` is written.
"""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Callable, Iterator
from dataclasses import replace

from rich.console import Console
from rich.table import Table

from pipeline.cli.answers import (
    SUCCESS,
    checked_output_path,
    config_from_sources,
    output_console,
    print_line,
    read_saved_config,
)
from pipeline.cli.calibrate import read_observed_run
from pipeline.cli.check import fullest_gpu_lines
from pipeline.cli.simulate import assumptions, calibration_of, lengths_of
from pipeline.config.hardware import HardwareCluster, load_hardware
from pipeline.config.loading import load_yaml, to_yaml, write_config
from pipeline.config.memory import planned_run, workers_memory
from pipeline.config.preflight import check_shapes
from pipeline.config.rules import validate
from pipeline.config.run import RunConfig
from pipeline.errors import ConfigError
from pipeline.launch.target_cluster import check_target
from pipeline.observe.text import format_duration, plain_text
from pipeline.plan.calibrate import calibrate
from pipeline.plan.calibration import Calibration
from pipeline.plan.lengths import EmpiricalLengths, Lengths
from pipeline.plan.search import DEVICES, Objective, Plan, SearchResult, search
from pipeline.plan.space import CRITIC, GENERATE, REFERENCE, STEPS, TRAIN, space_of

_MOST_DEVICES = 16_384
_TEXT = re.compile(r"(\d+)x(?!\d+x)(\S+)")


def command(options: argparse.Namespace) -> int:
    if not 0 <= options.staleness_price < math.inf:
        raise ConfigError("--staleness-price", f"given {options.staleness_price:g}; must be 0 or more")
    if (options.objective == "time_to_samples") != (options.samples is not None and options.samples > 0):
        need = "a number above 0 with --objective time_to_samples, and none otherwise"
        raise ConfigError("--samples", f"given {options.samples}; must be {need}")
    file = None if options.write is None else checked_output_path("--write", options.write, ".yaml")
    hardware, cluster, devices = devices_of(options.devices, options.nodes_of)
    config, calibration, lengths = _read_inputs(options, hardware, cluster)
    on_gpus = cluster.gpus_per_node > 0
    run = planned_run(config, check_shapes(config, on_gpus=on_gpus), on_gpus=on_gpus)
    objective = Objective(options.objective == "samples_per_device_hour", options.staleness_price)
    space = space_of(run, cluster, calibration, lengths, devices)
    with Console(stderr=True).status("") as status:
        result = search(space, objective, _refusals(cluster, options.devices), watch=status.update)
    what = ("GPU" + "s" * (devices > 1)) if on_gpus else "cores of one node"
    print_line(f"{devices} {what}: {cluster.hardware.description}; speeds: {calibration.description}")
    fixed = options.lengths is None and options.from_run is None
    for line in assumptions(config, calibration, fixed=fixed):
        print_line(line)
    output_console().print(_table(result, config, options.staleness_price))
    for number, plan in enumerate(result.plans, 1):
        print_line(f"{number}: {'; '.join(_placement(plan, on_gpus))}")
    if on_gpus:
        first = check_target(result.plans[0].config, cluster, options.devices)
        for line in fullest_gpu_lines(first.run, workers_memory(first.run), first.hosts, first.limits):
            print_line(f"1: {line}")
    priced = "; in brackets with the price of staleness" if options.staleness_price else ""
    print_line(f"s/step: wall time / steps of {STEPS} simulated steps, of which the first fill the pipeline{priced}")
    print_line("limited by latency: by the chain of weights, responses, update and new weights")
    of = ((n, config.steps * plan.result.mean_s * plan.devices / 3600) for n, plan in enumerate(result.plans, 1))
    print_line(f"device-hours of {config.steps:,} steps: {', '.join(f'plan {n} {hours:,.3g}' for n, hours in of)}")
    if options.samples is not None:
        steps = math.ceil(options.samples / config.rollout.rows)
        times = ", ".join(f"plan {n} {format_duration(steps * plan.value)}" for n, plan in enumerate(result.plans, 1))
        print_line(f"time to {options.samples:,} samples, with the price of staleness: {times}")
    for line in _conclusion_lines(result, objective):
        print_line(line)
    if file is not None:
        write_config(file, _with_predictions(result.plans[0]))
        print_line(f"the first plan: {file}, for `stageline run` or `stageline submit`")
    return SUCCESS


def _read_inputs(
    options: argparse.Namespace, hardware: str, cluster: HardwareCluster
) -> tuple[RunConfig, Calibration, Lengths]:
    """Return the config to plan, the speeds and the lengths of responses. With `--from`, all three come from that run,
    except for the values that other options give. Raises ConfigError if an option or a config is wrong, or if options
    contradict one another."""
    if options.from_run is None:
        if not options.sources:
            raise ConfigError("CONFIG", "none given; a plan needs a config file, or a run (--from RUN)")
        config = config_from_sources(options.sources, runs_here=False)
        calibration = calibration_of(options.calibration, hardware, cluster)
        return config, calibration, lengths_of(options.lengths, config, options.seed)
    if files := [source for source in options.sources if "=" not in source]:
        raise ConfigError("--from", f"given with {', '.join(files)}; the run's own config counts: give key=value only")
    saved = read_saved_config(options.from_run)
    # a new run cannot have the old one's directory
    config = load_yaml(to_yaml(saved), [f"name={saved.name}-planned", *options.sources])
    whole_nodes = replace(cluster, gpus_per_node=cluster.hardware.gpus_per_node)  # the run used whole nodes
    observed = read_observed_run(options.from_run, whole_nodes)
    if options.calibration is None:
        calibration = calibrate([observed], whole_nodes, hardware)
    else:
        calibration = calibration_of(options.calibration, hardware, cluster)
    if options.lengths is not None:
        return config, calibration, lengths_of(options.lengths, config, options.seed)
    most, before = config.sampling.max_new_tokens, saved.sampling.max_new_tokens
    if not observed.lengths:
        raise ConfigError("--from", f"{options.from_run} has no rows any more: give their lengths (--lengths)")
    if most > before:
        need = f"the run's responses end at {before} tokens: give their lengths (--lengths)"
        raise ConfigError("sampling.max_new_tokens", f"given {most}; {need}")
    return config, calibration, EmpiricalLengths([min(length, most) for length in observed.lengths], options.seed)


def _with_predictions(plan: Plan) -> RunConfig:
    """Return a plan's config with its predicted seconds, which the run's summary compares with the measured ones."""
    by_stage = {stage: seconds / STEPS for stage, seconds in plan.result.stage_s.items() if seconds}
    predicted = {"step": plan.result.mean_s, **by_stage}
    return replace(plan.config, predicted_s={name: float(f"{seconds:.4g}") for name, seconds in predicted.items()})


def devices_of(text: str, nodes_of: int | None) -> tuple[str, HardwareCluster, int]:
    """Return the hardware, the cluster and the number of devices that a text like `64xH100-80` names.

    Args:
        text: number of devices and name of the hardware.
        nodes_of: number of devices to use on each node. None: as many as possible.

    Raises:
        ConfigError: the text has another form, the hardware is unknown, or the number of devices is not a multiple of
            the number on each node. Or a node has fewer devices than `nodes_of`, or fewer cores than the text asks for.
    """
    match = _TEXT.fullmatch(text)
    if match is None or int(match[1]) < 1:
        raise ConfigError(DEVICES, f"given {text!r}; must be DEVICESxHARDWARE, as in 64xH100-80 or 2xcpu (2 cores)")
    devices, hardware = int(match[1]), load_hardware(match[2], DEVICES)
    if devices > _MOST_DEVICES:
        raise ConfigError(DEVICES, f"given {text!r}; at most {_MOST_DEVICES:,} devices")
    most = hardware.gpus_per_node or hardware.cores
    if devices > most and not hardware.gpus_per_node:
        raise ConfigError(DEVICES, f"given {text!r}; plans without GPUs are for one node: at most {most} cores")
    per_node = min(devices, most) if nodes_of is None else nodes_of
    if not 1 <= per_node <= most:
        raise ConfigError("--nodes-of", f"given {nodes_of}; a node of {match[2]} has {most} devices: from 1 to {most}")
    if devices % per_node:
        whole = devices // per_node * per_node or per_node
        need = f"must be a multiple of the {per_node} devices of a node, for example {whole}x{match[2]}, or --nodes-of"
        raise ConfigError(DEVICES, f"given {text!r}; {need}")
    if not hardware.gpus_per_node:
        return match[2], HardwareCluster(1, 0, hardware, devices), devices
    return match[2], HardwareCluster(devices // per_node, per_node, hardware), devices


def _refusals(cluster: HardwareCluster, text: str) -> Callable[[RunConfig], str | None]:
    """Return a function that takes a config, and returns the reason why its run would be refused on the cluster. The
    function returns None if the run would start. `text`: the cluster as the user wrote it, for messages."""

    def refuse(config: RunConfig) -> str | None:
        try:
            validate(config)
            problems = check_target(config, cluster, text).problems
        except ConfigError as error:
            return str(error).splitlines()[0]
        return f"{problems[0].key}: {problems[0].need}" if problems else None

    return refuse


def _table(result: SearchResult, config: RunConfig, staleness_price: float) -> Table:
    """Return a table of the plans. The best plan comes first. If staleness has a price, the column `s/step` also has
    the seconds with this price, by which plans are compared."""
    table = Table(title="Plans", title_justify="left", title_style="bold", box=None, pad_edge=False)
    for heading in ("", "gangs", "staleness", "devices", "s/step", "samples /\ndevice-hour", "limited by"):
        table.add_column(heading, no_wrap=True)
    for number, plan in enumerate(result.plans, 1):
        per_hour = 3600 * config.rollout.rows / plan.result.mean_s / plan.devices
        row = (
            str(number),
            plan.grouping,
            str(plan.config.staleness),
            str(plan.devices),
            f"{plan.result.mean_s:.3g}" + (f" ({_priced_s(plan, staleness_price):.3g})" if staleness_price else ""),
            f"{per_hour:,.0f}",
            plan.limit,
        )
        table.add_row(*map(plain_text, row))
    return table


def _priced_s(plan: Plan, staleness_price: float) -> float:
    """Return the seconds of a step with the price of the staleness that its rows have on average."""
    return Objective(staleness_price=staleness_price).value(
        plan.result.mean_s, plan.devices, plan.result.mean_staleness
    )


def _placement(plan: Plan, on_gpus: bool) -> Iterator[str]:
    """Yield texts about a plan: its number of shards, then the workers and layout of each gang."""
    config = plan.config
    yield f"shards {config.rollout.shards}"
    for name in (GENERATE, TRAIN, CRITIC, REFERENCE):
        gang = config.placement.gangs.get(name)
        if gang is None:
            continue
        words = [f"{name} {gang.workers}"] + [f"threads {gang.threads}"] * (not on_gpus)
        if name == GENERATE:
            engine = config.engine
            words += [f"ranks {engine.tensor_parallel}"] * (engine.tensor_parallel > 1)
            words += [f"rows {engine.max_rows}", f"shards at once {gang.concurrent_shards}"]
        elif on_gpus:
            layout = gang.layout
            numbers = {"tensor": layout.tensor, "pipeline": layout.pipeline}
            numbers["data"] = gang.workers // (layout.tensor * layout.pipeline)
            words += [f"{what} {ranks}" for what, ranks in numbers.items() if ranks > 1]
            words += ["ZeRO-1"] * layout.distributed_optimizer
            words += [f"recompute {layout.recompute}"] * (layout.recompute != "none")
            model = config.model.critic if name == CRITIC else config.model.policy
            words += [f"micro-batch {model.micro_batch_tokens} tokens"] * (not model.micro_batch_rows)
        yield ", ".join(words)


def _conclusion_lines(result: SearchResult, objective: Objective) -> Iterator[str]:
    """Yield lines about the result of a search: the best synchronous and asynchronous step times, the price of
    staleness from which on asynchrony is worse, and how many combinations fit, were simulated, or were left out, and
    why. The price is the fraction of additional samples that a run needs for each version of staleness."""
    synchronous, asynchronous = result.best(synchronous=True), result.best(synchronous=False)
    if synchronous is not None and asynchronous is not None:
        slow, fast = synchronous.result.mean_s, asynchronous.result.mean_s
        eta = asynchronous.config.staleness
        yield f"synchronous: {slow:.3g} s a step; asynchronous: {fast:.3g} s with staleness {eta}"
        age = asynchronous.result.mean_staleness
        # without the price of staleness, of which the line below says where it is too high
        ratio = objective.value(slow, synchronous.devices, 0) / objective.value(fast, asynchronous.devices, 0)
        if ratio <= 1:
            yield "asynchrony loses: there is no time to hide that is worth what it costs"
        else:
            yield (
                f"asynchrony loses if one version of staleness needs {(ratio - 1) / age:.1%} more samples or more "
                f"(--staleness-price, given {objective.staleness_price:g})"
            )
    whole = "the whole space" if result.exact else "a bounded search: better plans may exist"
    yield f"{result.considered} combinations fit, {result.simulated} were simulated ({whole})"
    for reason, count in result.refused.items():
        yield f"{count} left out: {reason}"
