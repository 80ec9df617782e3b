"""`skyrl doctor`: check what a run needs before you pay for a machine. Each failed check says how to fix it."""

import os
import socket
from collections.abc import Iterable, Iterator, Sequence
from importlib import metadata
from pathlib import Path
from typing import Literal, NamedTuple

import typer
from packaging.requirements import InvalidRequirement, Requirement

from skyrl_report.remote import STORAGE_ERRORS, RemoteFolder
from skyrl_train.checkpoint import find_credentials_fault
from skyrl_train.config import SkyRLConfig
from skyrl_train.entrypoints.command import parse_cli
from skyrl_train.entrypoints.memory_plan import check_memory, forecast_here, plan_run
from skyrl_train.entrypoints.preflight import check_data, find_missing
from skyrl_train.errors import ConfigError, DataError, SkyRLError
from skyrl_train.plan import TrainingPlan
from skyrl_train.plan.forecast import format_bytes, free_bytes

RAY_PORT = 6379
PROBE = ".skyrl-doctor"

Status = Literal["ok", "warning", "failed"]


class CheckResult(NamedTuple):
    """The result of one check, with the fix, if any."""

    name: str
    status: Status
    text: str
    fix: str = ""

    def __str__(self) -> str:
        return f"{self.status:<8} {self.name:<13} {self.text}" + (f"\n{'':<23}{self.fix}" if self.fix else "")


def print_checks(checks: Iterable[CheckResult]) -> None:
    """Print each result, and raise SkyRLError if a check fails."""
    results = []
    for result in checks:
        typer.echo(result)
        results.append(result)
    if failed := [result.name for result in results if result.status == "failed"]:
        raise SkyRLError(f"{len(failed)} of {len(results)} checks failed: {', '.join(dict.fromkeys(failed))}")


def examine(overrides: Sequence[str], file: Path | None = None) -> Iterator[CheckResult]:
    """Check a training run. Yield the result of each check."""
    yield _check_versions()
    try:
        cfg = parse_cli(overrides, file)
    except ConfigError as error:
        yield CheckResult("configuration", "failed", str(error), "the other checks need a valid configuration")
    else:
        yield CheckResult("configuration", "ok", "every key and value is valid")
        data = list(_check_data(cfg))
        yield from data
        can_count = all(result.status != "failed" for result in data)
        plan = plan_run(cfg)
        yield _check_disk(plan, counts_steps=can_count)
        yield _check_memory(plan)
        yield from _check_storage(cfg)
        yield _check_token()
        if cfg.trainer.placement.uses_ray and not os.environ.get("RAY_ADDRESS"):
            yield _check_port()


def _check_versions() -> CheckResult:
    """Compare installed packages with the requirements of skyrl-train."""
    wrong = []
    for text in metadata.requires("skyrl-train") or ():
        try:
            requirement = Requirement(text)
            if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
                continue
            version = metadata.version(requirement.name)
        except InvalidRequirement:
            continue
        except metadata.PackageNotFoundError:
            wrong.append(f"{requirement.name} is missing")
            continue
        if not requirement.specifier.contains(version, prereleases=True):
            wrong.append(f"{requirement.name} {version} is not {requirement.specifier}")
    if wrong:
        return CheckResult("versions", "failed", "; ".join(wrong), "pip install -c constraints.txt -e skyrl-train")
    versions = ", ".join(f"{name} {metadata.version(name)}" for name in ("torch", "transformers"))
    return CheckResult("versions", "ok", f"{versions}, and all other requirements of skyrl-train")


def _check_data(cfg: SkyRLConfig) -> Iterator[CheckResult]:
    missing = list(find_missing(cfg, trains=True))
    for sentence in missing:
        text, _, fix = sentence.rpartition("; ")
        yield CheckResult("files", "failed", text or sentence, fix if text else "")
    if missing:
        return
    yield CheckResult("files", "ok", "data, model and folders exist")
    try:
        is_complete = check_data(cfg, trains=True)
    except (ConfigError, DataError) as error:
        yield CheckResult("data", "failed", str(error))
        return
    if is_complete:
        yield CheckResult("data", "ok", "every row fits its environment")
    else:
        yield CheckResult("data", "warning", "rows on the Hub, or of a custom class, are checked when the run starts")


def _check_disk(plan: TrainingPlan, *, counts_steps: bool) -> CheckResult:
    forecast = plan.forecast_disk(counts_steps=counts_steps)
    if forecast is None:
        return CheckResult("disk", "warning", "the size of the model is unknown before the download")
    free = free_bytes(plan.cfg.trainer.ckpt_path)
    text = f"{forecast.describe()} · {format_bytes(free)} free"
    if free < forecast.min_bytes:
        return CheckResult("disk", "failed", text, "set trainer.ckpt_path and trainer.export_path to a larger disk")
    if free < forecast.total_bytes:
        fix = "set trainer.max_ckpts_to_keep=1, or trainer.remote_ckpt_url to upload them; export less often"
        return CheckResult("disk", "warning", text, fix)
    return CheckResult("disk", "ok", text)


def _check_memory(plan: TrainingPlan) -> CheckResult:
    import torch

    n_gpus, n_configured = torch.cuda.device_count(), plan.cfg.trainer.placement.size("policy")[1]
    if n_gpus and n_gpus < n_configured:
        key = "trainer.placement.policy_num_gpus_per_node"
        text = f"{key}={n_configured}, but this machine has {n_gpus}"
        return CheckResult("GPU", "failed", text, f"set {key}={n_gpus}")
    device = f"{n_gpus} × {torch.cuda.get_device_name(0)}" if n_gpus else "no GPU: the run uses the CPU"
    if not plan.has_known_sizes:
        return CheckResult("memory", "warning", f"{device} · the size of the model is unknown before the download")
    if (memory := forecast_here(plan)) is None:
        reason = "training may be on other machines of a Ray cluster, or the driver does not report it"
        return CheckResult("memory", "warning", f"{device} · the free memory is unknown: {reason}")
    if (found := check_memory(plan)) is not None:
        text, _, fix = found[0].partition(": ")
        return CheckResult("memory", "failed" if found[1] else "warning", f"{device} · {text}", fix)
    peaks = (
        f"{format_bytes(memory.peak(place)[1])} of {format_bytes(memory.capacity(place))}" for place in memory.places
    )
    return CheckResult("memory", "ok", f"{device} · {' and '.join(peaks)} at the peak")


def _check_storage(cfg: SkyRLConfig) -> Iterator[CheckResult]:
    """Check that the run can upload: write and remove a small file at each URL."""
    urls = {key: getattr(cfg.trainer, key) for key in ("remote_ckpt_url", "remote_trajectory_url")}
    for key, url in urls.items():
        if url is None:
            continue
        if fault := find_credentials_fault(url, os.environ):
            yield CheckResult(
                "storage", "failed", f"trainer.{key}={url}: {fault}", "export both AWS keys, or AWS_PROFILE"
            )
            continue
        folder = RemoteFolder(url)
        try:
            folder.write(PROBE, b"")
            folder.remove(PROBE)
        except STORAGE_ERRORS as error:
            fix = "check the bucket's name and region, and that the key may list, write and delete there"
            yield CheckResult("storage", "failed", f"trainer.{key}={url} cannot be written: {error}", fix)
        else:
            yield CheckResult("storage", "ok", f"trainer.{key}={url} can be written")


def _check_token() -> CheckResult:
    """Check the Hugging Face token. (The rules of the configuration check the key for Weights & Biases.)"""
    from huggingface_hub import get_token, whoami
    from huggingface_hub.errors import HfHubHTTPError, LocalTokenNotFoundError, OfflineModeIsEnabled

    if get_token() is None:
        return CheckResult("keys", "ok", "no Hub token: gated and private models cannot be downloaded")
    try:
        return CheckResult("keys", "ok", f"the Hub knows the token of {whoami()['name']}")
    except (HfHubHTTPError, LocalTokenNotFoundError) as error:
        fix = "run `hf auth login`, or unset HF_TOKEN"
        return CheckResult("keys", "failed", f"the Hub refuses the token: {error}", fix)
    except (OfflineModeIsEnabled, OSError) as error:
        return CheckResult("keys", "warning", f"the token could not be checked: {error}")


def _check_port() -> CheckResult:
    with socket.socket() as probe:
        probe.settimeout(1)
        is_free = probe.connect_ex(("127.0.0.1", RAY_PORT)) != 0
    if is_free:
        return CheckResult("ports", "ok", f"{RAY_PORT} is free for Ray")
    text = f"port {RAY_PORT} is in use: the run joins the Ray cluster there, or fails if another program uses it"
    return CheckResult("ports", "warning", text, "run `ray status`; `ray stop` ends a cluster of yours")
