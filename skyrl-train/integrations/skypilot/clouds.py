"""Balances and capacity at clouds that SkyPilot rents GPUs from, as far as their HTTP APIs report them."""

import json
import os
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from skyrl_train.entrypoints.doctor import CheckResult, Status

TIMEOUT_S = 10.0


class Wallet(NamedTuple):
    """The account status at a provider. It never contains a key."""

    status: Literal["ok", "empty", "refused", "unknown"]
    text: str


@dataclass(frozen=True, slots=True)
class Provider:
    """A cloud, under SkyPilot's name for it."""

    name: str
    key_name: str
    """Environment variable of the API key. Empty if the cloud has no single key."""
    url: str
    """URL of the balance. Empty if no API reports it."""
    describe: Callable[[Any], tuple[float | None, str]]
    """Maps the response to (balance in dollars, summary). The balance is None if the response lacks it."""
    query: Mapping[str, str] | None = None
    """Body of a POST request. None sends a GET request."""

    def ask(self, environ: Mapping[str, str]) -> Wallet:
        """Request the balance. Wait at most `TIMEOUT_S` seconds."""
        if not self.url:
            return Wallet("unknown", "its API does not report the balance")
        key = environ.get(self.key_name)
        if not key:
            return Wallet("unknown", f"{self.key_name} is not set")
        headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json", "User-Agent": "skyrl"}
        body = None if self.query is None else json.dumps(self.query).encode()
        try:
            request = urllib.request.Request(self.url, body, headers)
            with urllib.request.urlopen(request, timeout=TIMEOUT_S) as response:
                balance, text = self.describe(json.load(response))
        except urllib.error.HTTPError as error:
            if error.code in (401, 403):
                return Wallet("refused", f"the key in {self.key_name} is refused (HTTP {error.code})")
            return Wallet("unknown", f"{self.url} answered HTTP {error.code}")
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            cause = error.reason if isinstance(error, urllib.error.URLError) else type(error).__name__
            return Wallet("unknown", f"{self.url} gave no answer that can be read ({cause})")
        if balance is None:
            return Wallet("unknown", text)
        return Wallet("ok" if balance > 0 else "empty", text)


def _runpod(answer: Any) -> tuple[float, str]:
    account = answer["data"]["myself"]
    balance, spend = float(account["clientBalance"]), float(account["currentSpendPerHr"])
    limit = account.get("spendLimit")
    return balance, (
        f"${balance:,.2f}"
        + (f", enough for {balance / spend:,.0f} h of what runs now" if spend > 0 else "")
        + (f", spend limit ${limit}" if limit else "")
    )


def _lambda(answer: Any) -> tuple[None, str]:
    available = sorted(name for name, kind in answer["data"].items() if kind["regions_with_capacity_available"])
    capacity = ", ".join(available) or "nothing"
    return None, f"the key is valid, but the API does not report the balance; available now: {capacity}"


def _dollars(field: str) -> Callable[[Any], tuple[float, str]]:
    def describe(answer: Any) -> tuple[float, str]:
        balance = float(answer[field])
        return balance, f"${balance:,.2f}"

    return describe


PROVIDERS = (
    Provider("lambda", "LAMBDA_API_KEY", "https://cloud.lambda.ai/api/v1/instance-types", _lambda),
    Provider(
        "runpod",
        "RUNPOD_API_KEY",
        "https://api.runpod.io/graphql",
        _runpod,
        {"query": "query { myself { clientBalance currentSpendPerHr spendLimit } }"},
    ),
    Provider("vast", "VAST_API_KEY", "https://console.vast.ai/api/v0/users/current/", _dollars("balance")),
    Provider(
        "primeintellect",
        "PRIME_INTELLECT_API_KEY",
        "https://api.primeintellect.ai/api/v1/billing/wallet?limit=1",
        _dollars("balance_usd"),
    ),
    Provider("nebius", "", "", _dollars("")),
)


def check_wallets(clouds: Sequence[str]) -> Iterator[CheckResult]:
    """Check the balance at the clouds of a task, or else at all clouds with a key in the environment."""
    statuses = []
    for provider in PROVIDERS:
        if provider.name in clouds or (not clouds and os.environ.get(provider.key_name)):
            status, text = provider.ask(os.environ)
            statuses.append(status)
            fix = {
                "empty": "add funds; until then, SkyPilot has to find a machine in another cloud",
                "refused": f"export a valid {provider.key_name}",
                "unknown": "look at its console; `sky check` tests the login",
            }
            result: Status = "ok" if status == "ok" else "failed" if status == "refused" else "warning"
            yield CheckResult("wallet", result, f"{provider.name}: {text}", fix.get(status, ""))
    if statuses and set(statuses) <= {"empty", "refused"}:
        yield CheckResult("wallet", "failed", "no cloud would start a machine", "add funds to one of them")
