"""`tx status`: print a server's state."""

import argparse
import json
import os
import sys
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

TIMEOUT_SEC = 10
MAX_RUNS = 20


def main(arguments: Sequence[str]) -> None:
    """Query the server and print a report. Exit with status 1 if the server or its engine is unavailable."""
    parser = argparse.ArgumentParser(prog="tx status", description=__doc__)
    parser.add_argument(
        "--url",
        default=os.environ.get("TINKER_BASE_URL") or "http://127.0.0.1:8000",
        help="of the server (default: TINKER_BASE_URL, or %(default)s)",
    )
    url = parser.parse_args(arguments).url.rstrip("/")
    try:
        text, is_up = report(url)
    except urllib.error.HTTPError as error:
        sys.exit(
            f"tx status: {url} returned {error.code} {error.reason}; check that TINKER_API_KEY is a key of this server"
        )
    except (OSError, ValueError) as error:
        sys.exit(f"tx status: no response from {url} ({error}); start a server with tx serve, or set --url")
    sys.stdout.write(text)
    if not is_up:
        sys.exit(1)


def report(url: str) -> tuple[str, bool]:
    """Return the report, and True if the engine is up."""
    served = json.loads(_get(f"{url}/api/v1/get_server_capabilities"))["supported_models"]
    runs = json.loads(_get(f"{url}/api/v1/training_runs?limit={MAX_RUNS}"))
    metrics = parse_metrics(_get(f"{url}/metrics"))
    is_up = bool(metrics.get("tx_engine_up", {}).get("", 0))
    lines = [
        f"{url}: {', '.join(str(model['model_name']) for model in served) or 'no model yet'}",
        f"engine: {'up' if is_up else 'down; the server log has the reason'}",
        *_format_counts("pending requests", metrics.get("tx_requests_pending", {})),
        *_format_counts("engine", metrics.get("tx_engine", {})),
        f"training runs: {runs['cursor']['total_count']}",
        *(f"  {_format_run(run)}" for run in runs["training_runs"]),
    ]
    return "\n".join(lines) + "\n", is_up


def parse_metrics(text: str) -> dict[str, dict[str, float]]:
    """Parse `/metrics` to values by metric name, then by the label values joined with spaces."""
    found: dict[str, dict[str, float]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            found.setdefault(sample.name, {})[" ".join(sample.labels.values())] = sample.value
    return found


def _format_counts(title: str, counts: Mapping[str, float]) -> list[str]:
    metrics = [f"{name.replace('_', ' ')} {count:,.0f}" for name, count in counts.items() if count]
    return [f"{title}: {', '.join(metrics)}"] if metrics else []


def _format_run(run: Mapping[str, Any]) -> str:
    age = datetime.now(UTC) - datetime.fromisoformat(run["last_request_time"])
    rank = f"rank {run['lora_rank']}" if run.get("is_lora") else "all parameters"
    return f"{run['training_run_id']}  {run['base_model']}  {rank}  last request {age.total_seconds():,.0f} s ago"


def _get(url: str) -> str:
    headers = {"X-API-Key": os.environ["TINKER_API_KEY"]} if os.environ.get("TINKER_API_KEY") else {}
    request = urllib.request.Request(url, headers=headers)
    with urllib.request.urlopen(request, timeout=TIMEOUT_SEC) as answer:
        text: str = answer.read().decode()
        return text
