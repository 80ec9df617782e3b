"""`skyrl plan`: the memory of a run by phase, its speed and cost, and what makes it fit."""

import json
import logging
import math
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from skyrl_train.config import SkyRLConfig
from skyrl_train.config.supervised import SupervisedConfig
from skyrl_train.entrypoints.preflight import find_missing
from skyrl_train.entrypoints.prompts import check_prompts
from skyrl_train.errors import ConfigError
from skyrl_train.plan import RunPlan, TrainingPlan
from skyrl_train.plan.fit import Change, find_fit
from skyrl_train.plan.forecast import format_bytes
from skyrl_train.plan.hardware import GIB, GPUS, Hardware, find_gpu, this_machine
from skyrl_train.plan.memory import MemoryForecast, Phase, Place, forecast_memory
from skyrl_train.plan.speed import ERROR, SpeedForecast, forecast_speed

logger = logging.getLogger(__name__)

Config = SkyRLConfig | SupervisedConfig
BAR = 40
TOLERANCE = 1.05
"""Factor by which a forecast must exceed the free memory before a run is refused. Forecasts are inexact."""


def plan_run(cfg: Config, hardware: Hardware | None = None, longest_prompt: int | None = None) -> TrainingPlan:
    """Return the plan of a run, on this machine unless `hardware` is given."""
    import torch  # slow, so only after the configuration is checked

    if not isinstance(cfg, SkyRLConfig):
        return TrainingPlan(cfg)
    has_gpus = torch.cuda.is_available() if hardware is None else hardware.has_gpus
    return RunPlan(cfg, has_gpus, longest_prompt=longest_prompt)


def forecast_here(plan: TrainingPlan) -> MemoryForecast | None:
    """Return the memory of a run on this machine.

    Return None if a cluster runs it, if GPUs report no memory, or if the size of a model is unknown.
    """
    ranks = plan.ranks
    if ranks and os.environ.get("RAY_ADDRESS", "local") != "local":
        return None
    n_processes = max((n_per_node for _, n_per_node in ranks.values()), default=1)
    try:
        return forecast_memory(plan, this_machine(n_processes if ranks else None))
    except RuntimeError as error:
        logger.info("The free memory of the GPUs is unknown, so the forecast is left out: %s", error)
        return None


def choose_hardware(gpu: str | None, gpu_memory: float | None, host_memory: float | None) -> Hardware:
    """Return the hardware that `skyrl plan` is asked for. Sizes are in GiB. Raise ConfigError for an unknown GPU."""
    here = this_machine()
    if gpu is None and gpu_memory is None:
        return here if host_memory is None else replace(here, host_bytes=host_memory * GIB)
    known = None if gpu is None else find_gpu(gpu)
    if gpu_memory is None:
        if known is None:
            names = ", ".join(sorted(known.name for known in GPUS))
            raise ConfigError(f"--gpu {gpu} is not known; use one of {names}, or give its memory: --gpu-memory 24")
        gpu_memory = known.memory_bytes / GIB
    name = known.name if known is not None else f"a GPU with {gpu_memory:g} GiB"
    return Hardware(name, gpu_memory * GIB, math.inf if host_memory is None else host_memory * GIB, known)


def fit(plan: TrainingPlan, hardware: Hardware) -> tuple[TrainingPlan, list[Change]]:
    """Return a plan that fits, and its changes. Raise ConfigError if no known changes suffice."""

    def forecast(cfg: Config) -> MemoryForecast | None:
        return forecast_memory(replace(plan, cfg=cfg), hardware)

    if (found := find_fit(plan.cfg, forecast)) is None:
        raise ConfigError(
            "no known settings make this run fit into memory; use a smaller model, shorter rows, more GPUs "
            "(trainer.placement), or a larger machine"
        )
    return replace(plan, cfg=found[0]), found[1]


def fit_to_machine(cfg: Any) -> Any:
    """Return the settings with which a run fits this machine, and log the changes.

    Settings that fit stay as they are, as does a run of unknown size. Raise ConfigError if no known changes suffice.
    """
    plan = plan_run(cfg, longest_prompt=check_prompts(cfg) if isinstance(cfg, SkyRLConfig) else None)
    if (memory := forecast_here(plan)) is None:
        return cfg
    plan, changes = fit(plan, memory.hardware)
    for change in changes:
        logger.info("--fit sets %s: %s", change, change.price)
    return plan.cfg


def describe_shortage(plan: TrainingPlan, memory: MemoryForecast, shortage: tuple[Place, Phase]) -> str:
    """Return what is missing where, and the changes of the plan with which it fits, if there are any."""
    place, phase = shortage
    needed, free = memory.total(place, phase), memory.capacity(place)
    parts = sorted((p for p in memory.parts if p.place == place), key=lambda p: -p.phases.get(phase, 0))[:3]
    largest = ", ".join(f"{part.name} {format_bytes(part.phases.get(phase, 0))}" for part in parts)
    name = {"load": "loading", "save": "a checkpoint", "sync": "the weight sync"}.get(phase, f"the {phase}")
    where = "the GPU" if place == "device" else "host memory" if memory.hardware.has_gpus else "this machine"
    try:
        _, changes = fit(plan, memory.hardware)
        fix = f"set {' '.join(map(str, changes))} ({'; '.join(change.price for change in changes)})"
    except ConfigError:
        fix = "use a smaller model, or more GPUs (trainer.placement)"
    return f"{name} takes {format_bytes(needed)} of {where} ({largest}), and {format_bytes(free)} are free: {fix}"


def check_memory(plan: TrainingPlan) -> tuple[str, bool] | None:
    """Return why a run may not fit into the free memory, and if it certainly does not. Return None if it fits."""
    memory = forecast_here(plan)
    if memory is None or (shortage := memory.find_shortage()) is None:
        return None
    place, phase = shortage
    is_clear = memory.certain_total(place, phase) > TOLERANCE * memory.capacity(place)
    return describe_shortage(plan, memory, shortage), memory.is_certain and is_clear


def warn_of_shortage(plan: TrainingPlan) -> None:
    """Log a warning if a run may not fit into the free memory.

    Raise ConfigError if it certainly does not, unless `trainer.preflight=warn`.
    """
    if (found := check_memory(plan)) is not None:
        text, is_certain = found
        if is_certain and plan.cfg.trainer.preflight == "error":
            raise ConfigError(f"{text}. Set trainer.preflight=warn to run anyway")
        logger.warning("Out of memory is likely: %s", text)


def describe_memory(memory: MemoryForecast) -> Iterator[str]:
    """Yield the lines of a table with a row per part and a column per phase, and a bar per phase."""
    for place in memory.places:
        parts = [part for part in memory.parts if part.place == place]
        capacity = memory.capacity(place)
        free = "" if capacity == math.inf else f", {format_bytes(capacity)} free"
        title = f"memory of {'each GPU' if place == 'device' else 'the host'} ({memory.hardware.device})"
        yield f"{title if place == 'device' or not memory.hardware.has_gpus else 'host memory'}{free}"
        width = max(len(part.name) for part in parts)
        yield f"  {'':<{width}}" + "".join(f"{phase:>10}" for phase in memory.phases)
        for part in parts:
            values = (part.phases.get(phase, 0) for phase in memory.phases)
            yield f"  {part.name:<{width}}" + "".join(f"{format_bytes(v) if v else '·':>10}" for v in values)
        totals = [memory.total(place, phase) for phase in memory.phases]
        yield f"  {'total':<{width}}" + "".join(f"{format_bytes(total):>10}" for total in totals)
        scale = max(*totals, 0 if capacity == math.inf else capacity)
        for phase, total in zip(memory.phases, totals, strict=True):
            n_used, n_free = round(BAR * total / scale), round(BAR * min(capacity, scale) / scale)
            bar = "█" * min(n_used, n_free) + "▓" * max(0, n_used - n_free) + "·" * max(0, n_free - n_used)
            over = f"  {format_bytes(total - capacity)} too much" if total > capacity else ""
            yield f"  {phase:<10}{bar:<{BAR}} {format_bytes(total):>8}{over}"
        yield ""


def describe_speed(speed: SpeedForecast, price: float | None) -> str:
    """Return the time of a step by phase, and its cost at a `price` per GPU and hour, in one line."""
    phases = ", ".join(f"{name} {seconds:.3g} s" for name, seconds in speed.seconds.items())
    text = f"about {speed.step_seconds:.3g} s per step ({phases}), {speed.tokens_per_second:,.0f} tokens/s"
    cost = "" if price is None else f" · {speed.cost(price):.3g} per step at {price:g} per GPU hour"
    return f"{text}{cost}; expect an error of up to a factor of {ERROR:g}"


def to_json(memory: MemoryForecast, speed: SpeedForecast | None, price: float | None, changes: list[Change]) -> str:
    """Return the plan as JSON. Sizes are in bytes."""
    content: dict[str, Any] = {
        "device": memory.hardware.device,
        "capacity": {place: size if (size := memory.capacity(place)) < math.inf else None for place in memory.places},
        "parts": [{"name": p.name, "place": p.place, "phases": dict(p.phases)} for p in memory.parts],
        "totals": {place: {phase: memory.total(place, phase) for phase in memory.phases} for place in memory.places},
        "peaks": {place: dict(zip(("phase", "bytes"), memory.peak(place), strict=True)) for place in memory.places},
        "fits": memory.find_shortage() is None,
        "changes": [str(change) for change in changes],
    }
    if speed is not None:
        content |= {"seconds": speed.seconds, "tokens_per_second": speed.tokens_per_second}
        content["cost_per_step"] = None if price is None else speed.cost(price)
    return json.dumps(content, indent=2)


def show_plan(
    cfg: Config, hardware: Hardware, *, price: float | None, applies_fit: bool, as_json: bool, picture: Path | None
) -> None:
    """Print the plan of a run. Raise ConfigError if it does not fit, unless `applies_fit` finds settings that do."""
    longest = check_prompts(cfg) if isinstance(cfg, SkyRLConfig) and not any(find_missing(cfg, trains=True)) else None
    plan = plan_run(cfg, hardware, longest)
    changes: list[Change] = []
    if applies_fit:
        plan, changes = fit(plan, hardware)
    if (memory := forecast_memory(plan, hardware)) is None:
        raise ConfigError(
            f"the size of {plan.models[0].path} is unknown; download its description first: hf download "
            f"{plan.models[0].path} config.json"
        )
    speed = forecast_speed(plan, hardware, memory)
    if picture is not None:
        draw_memory(memory, picture)
    if as_json:
        print(to_json(memory, speed, price, changes))
    else:
        print("\n".join(describe_memory(memory)))
        if speed is not None:
            print(describe_speed(speed, price))
        for change in changes:
            print(f"{change}  # {change.price}")
    if (shortage := memory.find_shortage()) is not None:
        raise ConfigError(describe_shortage(plan, memory, shortage))


def draw_memory(memory: MemoryForecast, file: Path) -> None:
    """Draw a stacked bar per phase, and a line at the free memory."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, len(memory.places), figsize=(6 * len(memory.places) + 2, 5), squeeze=False)
    for axis, place in zip(axes[0], memory.places, strict=True):
        bottom = [0.0] * len(memory.phases)
        parts = [part for part in memory.parts if part.place == place]
        colors = matplotlib.colormaps["tab20"]
        for i, part in enumerate(parts):
            heights = [part.phases.get(phase, 0) / 1e9 for phase in memory.phases]
            axis.bar(memory.phases, heights, bottom=bottom, label=part.name, color=colors(i % 20), width=0.7)
            bottom = [low + height for low, height in zip(bottom, heights, strict=True)]
        capacity = memory.capacity(place)
        if capacity < 3 * 1e9 * max(bottom):
            axis.axhline(
                capacity / 1e9, color="black", linestyle="--", linewidth=1, label=f"free: {format_bytes(capacity)}"
            )
        axis.set_title("each GPU" if place == "device" else "host memory")
        axis.set_ylabel("GB")
        axis.spines[["top", "right"]].set_visible(False)
        axis.legend(loc="upper left", bbox_to_anchor=(1, 1), frameon=False, fontsize=8)
    figure.tight_layout()
    figure.savefig(file, dpi=120)
    pyplot.close(figure)
