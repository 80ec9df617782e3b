"""`tx status`: what a server does, in a terminal."""

from __future__ import annotations

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
MOST_RUNS = 20


def main(arguments: Sequence[str]) -> None:
    """Ask, and print; status 1 where nobody answers, or the engine is not there."""
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
        sys.exit(f"tx status: {url} answers {error.code} {error.reason}; is TINKER_API_KEY a key of this server?")
    except (OSError, ValueError) as error:
        sys.exit(f"tx status: nobody answers at {url} ({error}); start a server with tx serve, or give its --url")
    sys.stdout.write(text)
    if not is_up:
        sys.exit(1)


def report(url: str) -> tuple[str, bool]:
    """What to print, and whether the engine is there."""
    served = json.loads(_get(f"{url}/api/v1/get_server_capabilities"))["supported_models"]
    runs = json.loads(_get(f"{url}/api/v1/training_runs?limit={MOST_RUNS}"))
    told = numbers(_get(f"{url}/metrics"))
    is_up = bool(told.get("tx_engine_up", {}).get("", 0))
    lines = [
        f"{url}: {', '.join(str(one['model_name']) for one in served) or 'no model yet'}",
        f"engine: {'up' if is_up else 'not there; the server log says why'}",
        *_counted("requests that wait", told.get("tx_requests_pending", {})),
        *_counted("engine", told.get("tx_engine", {})),
        f"training runs: {runs['cursor']['total_count']}",
        *(f"  {_line(run)}" for run in runs["training_runs"]),
    ]
    return "\n".join(lines) + "\n", is_up


def numbers(text: str) -> dict[str, dict[str, float]]:
    """What `/metrics` says: by the name of a gauge or counter, and by its labels in one string."""
    found: dict[str, dict[str, float]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            found.setdefault(sample.name, {})[" ".join(sample.labels.values())] = sample.value
    return found


def _counted(title: str, counts: Mapping[str, float]) -> list[str]:
    told = [f"{name.replace('_', ' ')} {count:,.0f}" for name, count in counts.items() if count]
    return [f"{title}: {', '.join(told)}"] if told else []


def _line(run: Mapping[str, Any]) -> str:
    age = datetime.now(UTC) - datetime.fromisoformat(run["last_request_time"])
    rank = f"rank {run['lora_rank']}" if run.get("is_lora") else "all parameters"
    return f"{run['training_run_id']}  {run['base_model']}  {rank}  last request {age.total_seconds():,.0f} s ago"


def _get(url: str) -> str:
    headers = {"X-API-Key": os.environ["TINKER_API_KEY"]} if os.environ.get("TINKER_API_KEY") else {}
    request = urllib.request.Request(url, headers=headers)
    with urllib.request.urlopen(request, timeout=TIMEOUT_SEC) as answer:
        text: str = answer.read().decode()
        return text
