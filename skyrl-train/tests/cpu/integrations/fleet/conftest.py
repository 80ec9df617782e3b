import datetime
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from gym_kit.http_server import Request, serving
from train_kit.fleet.openenv.envs.fleet_env.task_env import describe_tools
from train_kit.fleet.tasks import OPENENV

from integrations.fleet.prompts import system_prompt
from skyrl_train.entrypoints.tiny import tiny_qwen3, train_tokenizer


@pytest.fixture(scope="session")
def fleet_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model whose tokenizer merges the system prompt into few tokens."""
    folder = tmp_path_factory.mktemp("fleet-model")
    prompt = system_prompt("github", {}, describe_tools()[:-1], datetime.date(2026, 1, 31))
    tokenizer = train_tokenizer([[{"role": "system", "content": prompt}]] * 2, vocab_size=1024)
    for saved in (tokenizer, tiny_qwen3(tokenizer, seed=0, context_length=8192)):
        saved.save_pretrained(folder)
    return folder


@pytest.fixture
def openenv(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Install the stand-in for OpenEnv, and return its class."""
    monkeypatch.syspath_prepend(str(OPENENV))
    monkeypatch.setenv("FLEET_API_KEY", "test")
    from envs.fleet_env.task_env import FleetTaskEnv

    FleetTaskEnv.faults = random.Random(0)
    yield FleetTaskEnv
    for name in [name for name in sys.modules if name.partition(".")[0] == "envs"]:
        del sys.modules[name]


@pytest.fixture
def slack_requests(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Request]]:
    """The requests to Slack, which accepts all messages."""
    with serving(lambda request: (200, {"ok": True, "ts": "12.5"})) as (url, requests):
        monkeypatch.setenv("SLACK_API_URL", url)
        monkeypatch.setenv("SLACK_BOT_TOKEN", "secret-token")
        yield requests
