"""Checks of tasks, and of balances from a local server that answers as the documentation of GPU clouds says."""

import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from gym_kit.http_server import Request, serving

from integrations.skypilot import clouds as module
from integrations.skypilot.__main__ import examine
from integrations.skypilot.clouds import PROVIDERS, Wallet, check_wallets
from integrations.skypilot.task import check_task, read_clouds
from skyrl_train.entrypoints.doctor import CheckResult

KEYS = ("LAMBDA_API_KEY", "RUNPOD_API_KEY", "VAST_API_KEY", "PRIME_INTELLECT_API_KEY")
KEY = "a-secret-key"
RUNPOD = {"data": {"myself": {"clientBalance": 120.5, "currentSpendPerHr": 2.5, "spendLimit": 80}}}
LAMBDA = {
    "data": {
        "gpu_1x_h100_pcie": {"regions_with_capacity_available": [{"name": "us-west-3"}]},
        "gpu_8x_a100": {"regions_with_capacity_available": []},
    }
}
PRIME = {"wallet_id": "w", "balance_usd": 12.25, "currency": "USD", "total_billings": 0, "recent_billings": []}
VAST = {"id": 1, "email": "a@b", "balance": 7.0, "ssh_key": "", "sid": ""}


@dataclass
class Clouds:
    """A local server in the place of all providers: one answer for each, and the requests so far."""

    answers: dict[str, Any]
    requests: list[Request] = field(default_factory=list)

    def answer(self, request: Request) -> tuple[int, Any]:
        answer = self.answers[request.path.partition("?")[0].strip("/")]
        return (answer, "") if isinstance(answer, int) else (200, answer)


@pytest.fixture
def clouds(monkeypatch: pytest.MonkeyPatch) -> Iterator[Clouds]:
    """A local server that replaces all providers with a URL. Their keys are set."""
    clouds = Clouds({"lambda": LAMBDA, "runpod": RUNPOD, "vast": VAST, "primeintellect": PRIME})
    with serving(clouds.answer) as (address, clouds.requests):
        local = [replace(p, url=f"{address}/{p.name}?limit=1") if p.url else p for p in PROVIDERS]
        monkeypatch.setattr(module, "PROVIDERS", local)
        for name in KEYS:
            monkeypatch.setenv(name, KEY)
        yield clouds


def wallets(task: Path) -> list[CheckResult]:
    return list(check_wallets(read_clouds(task)))


def write_task(folder: Path, *clouds: str) -> Path:
    choices = "".join(f"    - {{infra: {cloud}, accelerators: H100:1}}\n" for cloud in clouds)
    (folder / "task.yaml").write_text(f"resources:\n  any_of:\n{choices}")
    return folder / "task.yaml"


def test_each_cloud_of_a_task_is_requested_as_documented(clouds: Clouds, tmp_path: Path) -> None:
    task = write_task(tmp_path, "lambda", "runpod", "vast/us", "primeintellect", "nebius")
    found = wallets(task)
    assert [(result.status, result.text) for result in found] == [
        (
            "warning",
            "lambda: the key is valid, but the API does not report the balance; available now: gpu_1x_h100_pcie",
        ),
        ("ok", "runpod: $120.50, enough for 48 h of what runs now, spend limit $80"),
        ("ok", "vast: $7.00"),
        ("ok", "primeintellect: $12.25"),
        ("warning", "nebius: its API does not report the balance"),
    ]
    assert [(request.method, request.headers["authorization"]) for request in clouds.requests] == [
        (method, f"Bearer {KEY}") for method in ("GET", "POST", "GET", "GET")
    ]
    assert clouds.requests[1].body["query"].startswith("query { myself { clientBalance")
    assert KEY not in "".join(map(str, found))


def test_without_a_task_all_clouds_with_a_key_are_requested(clouds: Clouds, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in KEYS[:3]:
        monkeypatch.delenv(name)
    assert [result.text for result in examine(None)] == ["primeintellect: $12.25"]


def test_empty_wallets_and_refused_keys_fail_if_no_cloud_is_left(clouds: Clouds, tmp_path: Path) -> None:
    clouds.answers |= {"vast": VAST | {"balance": 0}, "primeintellect": 401}
    task = write_task(tmp_path, "vast", "primeintellect")
    empty, refused, none_left = wallets(task)
    assert (empty.status, empty.text) == ("warning", "vast: $0.00")
    assert (refused.status, refused.text) == (
        "failed",
        "primeintellect: the key in PRIME_INTELLECT_API_KEY is refused (HTTP 401)",
    )
    assert (none_left.status, none_left.text) == ("failed", "no cloud would start a machine")
    assert [result.status for result in wallets(write_task(tmp_path, "vast", "runpod"))] == ["ok", "warning"]


@pytest.mark.parametrize("answer", [500, "<html>", [], {"data": None}, {"errors": [{"message": "Unauthorized"}]}])
@pytest.mark.parametrize("name", ["lambda", "runpod", "vast", "primeintellect"])
def test_an_undocumented_answer_is_unknown(clouds: Clouds, name: str, answer: Any, tmp_path: Path) -> None:
    clouds.answers[name] = answer
    (result,) = wallets(write_task(tmp_path, name))
    assert result.status == "warning"
    assert "HTTP 500" in result.text if answer == 500 else "gave no answer that can be read" in result.text


def test_a_cloud_that_cannot_be_reached_or_has_no_key_is_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    vast = replace(PROVIDERS[2], url="http://127.0.0.1:9")
    assert vast.ask({}) == Wallet("unknown", "VAST_API_KEY is not set")
    status, text = vast.ask({"VAST_API_KEY": KEY})
    assert (status, "Connection refused" in text, KEY in text) == ("unknown", True, False)


# -- tasks


def check(task: Path) -> dict[str, CheckResult]:
    return {result.name: result for result in check_task(task)}


def test_the_ref_of_a_task_must_be_the_pushed_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLEET_API_KEY", "key")
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    remote, local = tmp_path / "remote.git", tmp_path / "local"

    def git(*arguments: str, cwd: Path = local) -> None:
        identity = ("-c", "user.name=a", "-c", "user.email=a@b")
        subprocess.run(["git", *identity, *arguments], cwd=cwd, check=True, capture_output=True)

    git("init", "--bare", str(remote), cwd=tmp_path)
    git("init", "-b", "main", str(local), cwd=tmp_path)
    task = local / "task.yaml"
    variables = "envs:\n  FLEET_API_KEY:\n  WANDB_API_KEY: null\n  ENV_KEYS: ''\n  MODALITY: tool_use\n"
    task.write_text(f"workdir:\n  url: {remote}\n  ref: main\n{variables}")
    git("add", ".")
    git("commit", "-m", "one")
    assert check(task)["workdir.ref"].text == f"{remote} has no branch or tag main"
    git("push", str(remote), "main")
    assert check(task)["workdir.ref"].status == "ok"
    git("commit", "--allow-empty", "-m", "two")
    stale = check(task)["workdir.ref"]
    assert (stale.status, f"git push {remote} main" in stale.fix, "--git-url" in stale.fix) == ("failed", True, True)
    assert check(task)["task"].text == f"{task}: WANDB_API_KEY must have a value"
    monkeypatch.setenv("WANDB_API_KEY", "key")
    assert "task" not in check(task)


TRAIN = Path(__file__).parents[4]
TASK_FILES = [*sorted(TRAIN.glob("tasks/*.yaml")), TRAIN / "examples/cluster/skypilot.yaml"]


@pytest.mark.parametrize("path", TASK_FILES, ids=lambda path: path.stem)
def test_a_task_file_of_this_repository_needs_nothing_but_keys(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("FLEET_API_KEY", "WANDB_API_KEY", "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "HF_TOKEN"):
        monkeypatch.setenv(name, "key")
    assert [result for result in check_task(path) if result.name == "task"] == []
