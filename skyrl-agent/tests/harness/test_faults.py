"""Faults in every phase of trajectories: each one is accounted for by its cause, and nothing is left."""

import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from agent_kit.harnesses import PREFIX, fake_harness, leftovers, play, reply
from agent_kit.scripted import CharacterEngine, hermes_tokenizer

from skyrl_agent.leases import lease_folder, remove_abandoned
from skyrl_train.errors import EngineError
from skyrl_train.inference_engines.base import EngineRequest, EngineResult

FAULTS: dict[str, list[tuple[dict[str, Any], str]]] = {
    "start": [({"task": "x", "files": {"/etc/x": "x"}}, "workspace_error"), ({"task": "fault=crash."}, "agent_exit")],
    "model": [({"task": "engine fails"}, "engine_error"), ({"task": "fault=silent."}, "agent_silent")],
    "tool": [({"task": "run=[kill -9 $PPID]"}, "agent_killed"), ({"task": "run=[sleep 4003]"}, "agent_timeout")],
    "exit": [({"task": "fault=hang."}, "agent_timeout"), ({"task": "fault=killed."}, "agent_killed")],
    "verifier": [
        ({"task": "x", "verifier": "kill -9 $$"}, "verifier_error"),
        ({"task": "x", "verifier": "sleep 4004"}, "verifier_timeout"),
        ({"task": "x", "verifier": "echo {} > /logs/verifier/reward.json"}, "verifier_error"),
    ],
}
"""Rows by the phase of their fault, with the stop reason."""


class FailingEngine(CharacterEngine):
    """An engine that fails for some prompts."""

    async def generate(self, requests: list[EngineRequest]) -> list[EngineResult]:
        if any("engine fails" in str(self._tokenizer.decode(request.prompt_ids)) for request in requests):
            raise EngineError("the engine failed")
        return await super().generate(requests)


@pytest.mark.parametrize("n_rows", [60, pytest.param(500, marks=pytest.mark.nightly)])
async def test_every_trajectory_is_accounted_for(n_rows: int) -> None:
    rng = random.Random(n_rows)
    rows, expected = [], []
    for i in range(n_rows):
        row, reason = {"task": f"task {i}"}, "stop"
        for faults in FAULTS.values():
            if rng.random() < 0.2 and reason == "stop":
                row, reason = rng.choice(faults)
        rows.append(row)
        expected.append(reason)
    cfg = fake_harness(agent_timeout=4, verifier_timeout=2, max_concurrent_agents=8)
    trajectories, metrics = await play(cfg, rows, engine=FailingEngine(hermes_tokenizer(), reply))
    assert [t.stop_reason for t in trajectories] == expected
    assert all(t.total_reward == 1.0 for t in trajectories if t.is_valid)
    counts = Counter(reason for reason in expected if reason != "stop")
    found = {name.rpartition("/")[2]: n for name, n in metrics.items() if name.startswith("agent/failures/")}
    assert found == counts
    assert leftovers() == []


OWNER = """
import sys, tempfile, time
tempfile.tempdir = sys.argv[1]
from skyrl_agent import workspaces
workspaces.new_name = lambda: sys.argv[2] + sys.argv[3]
workspace = getattr(workspaces, sys.argv[3])()
workspace.start()
workspace.write_bytes("a", b"x")
print("started", flush=True)
workspace.execute("setsid sleep 4005 & sleep 4006", 600)
"""


@pytest.mark.parametrize("kind", ["IsolatedWorkspace", "LocalWorkspace"])
def test_a_killed_process_leaves_nothing_for_longer_than_the_next_start(kind: str, tmp_path: Path) -> None:
    command = [sys.executable, "-c", OWNER, str(tmp_path), PREFIX, kind]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=os.environ) as owner:
        assert owner.stdout is not None
        assert owner.stdout.readline() == b"started\n"
        time.sleep(0.5)
        assert remove_abandoned() == 0  # its owner lives
        assert (lease_folder() / f"{PREFIX}{kind}/workspace/a").is_file()
        owner.send_signal(signal.SIGKILL)
    assert leftovers() != []
    assert remove_abandoned() == 1
    assert leftovers() == []
