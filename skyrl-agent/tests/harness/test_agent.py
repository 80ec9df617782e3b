"""One trajectory of a program: what it sees, how it ends, and how it is graded."""

import pytest
from agent_kit.harnesses import FAKE_AGENT, GRADER, fake_harness, leftovers, play

from skyrl_agent.harness.agent import HarnessAgent
from skyrl_agent.harness.config import HarnessConfig, WorkspaceConfig
from skyrl_train.errors import ConfigError


async def test_an_agent_works_in_isolation_and_its_tokens_are_trained_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET_TOKEN", "abc")
    look = "env > env.txt; ls / > root.txt; (echo > /dev/tcp/1.1.1.1/80) 2>>root.txt; echo right > answer.txt"
    check = (
        f"{GRADER} && cat given/a.txt && ! grep -q SECRET env.txt && ! grep -q -e repo -e tests root.txt "
        '&& grep -q unreachable root.txt && mkdir -p /logs/verifier && echo \'{"reward": 0.5, "style": 2}\' '
        ">/logs/verifier/reward.json"
    )
    (t,), metrics = await play(
        fake_harness(), [{"task": f"run=[{look}]", "files": {"given/a.txt": "x"}, "verifier": check}]
    )
    assert (t.total_reward, t.reward_components, t.error) == (0.5, {"style": 2.0}, None)
    assert sum(t.loss_mask) == sum(turn.end - turn.start for turn in t.turns) > 0
    assert len(t.segments) == 1
    assert t.env_metrics["requests"] == 2
    assert metrics["agent/no_tool_calls"] == 0
    assert leftovers() == []


async def test_what_the_agent_leaves_running_or_writes_as_a_reward_does_not_count() -> None:
    forge = "mkdir -p /logs/verifier; echo 1 > /logs/verifier/reward.txt; echo wrong > answer.txt"
    rows = [{"task": "fault=leftover."}, {"task": f"run=[{forge}]"}]
    (leftover, forged), _ = await play(fake_harness(), rows)
    assert (leftover.error, forged.total_reward) == (None, 0.0)
    assert leftovers() == []


@pytest.mark.parametrize(
    "attack",
    [
        "mkdir -p /logs/verifier/a; echo 1 > /logs/verifier/reward.txt; chmod 111 /logs/verifier /logs",
        "ln -s /workspace /logs/verifier; echo 1 > reward.txt; chmod 555 /logs",
        "ln -s /dev/null check.py; chmod 555 .",
        "mkfifo check.py; chmod 000 /tmp",
    ],
)
async def test_an_agent_cannot_prevent_its_grading(attack: str) -> None:
    row = {"task": f"run=[{attack}]", "verifier": "python3 check.py", "verifier_files": {"check.py": "assert 0"}}
    (t,), _ = await play(fake_harness(), [row])
    assert (t.error, t.total_reward) == (None, 0.0)
    assert leftovers() == []


@pytest.mark.parametrize(
    ("row", "reason", "text"),
    [
        ({"task": "fault=crash."}, "agent_exit", "status 3"),
        ({"task": "fault=status."}, "agent_exit", "status 160"),
        ({"task": "fault=silent."}, "agent_silent", "never called the model"),
        ({"task": "fault=killed."}, "agent_killed", "SIGKILL"),
        ({"task": "fault=hang."}, "agent_timeout", "did not finish within 2 s"),
        ({"task": "fault=flood."}, "agent_output", "printed more than 20,000,000 bytes"),
        ({"task": "run=[sleep 4001]"}, "agent_timeout", "did not finish within 2 s"),
        (
            {"task": "x", "verifier": "cat /dev/zero > /proc/$(cut -d' ' -f4 /proc/$PPID/stat)/fd/1"},
            "workspace_error",
            "64 MiB",
        ),
        ({"task": "x", "verifier": "no-such-program"}, "verifier_error", "status 127"),
        ({"task": "x", "verifier": "sleep 4002"}, "verifier_timeout", "longer than 1 s"),
        ({"task": "x", "verifier": "echo NaN > /logs/verifier/reward.txt"}, "verifier_error", "write numbers"),
        ({"task": "x", "files": {"/etc/passwd": "x"}}, "workspace_error", "cannot be written"),
    ],
)
async def test_a_failure_ends_its_own_trajectory_with_a_reason(row: dict[str, str], reason: str, text: str) -> None:
    cfg = fake_harness(agent_timeout=2, verifier_timeout=1, max_output_bytes=20_000_000)
    (bad, good), metrics = await play(cfg, [row, {"task": "x"}])
    assert (bad.is_valid, bad.stop_reason) == (False, reason)
    assert text in str(bad.error)
    assert good.total_reward == 1.0
    assert metrics[f"agent/failures/{reason}"] == 1.0
    assert leftovers() == []


async def test_an_agent_at_its_turn_limit_is_graded() -> None:
    (t,), metrics = await play(fake_harness(max_turns=3), [{"task": "again"}])
    assert (t.total_reward, len(t.turns), t.env_metrics["turn_limit"]) == (1.0, 3, 1.0)
    assert metrics["agent/failures/turn_limit"] == 1.0
    (t,), metrics = await play(fake_harness(max_turns=3, graded_failures=()), [{"task": "again"}], phase="eval")
    assert t.stop_reason == "turn_limit"
    assert {name: n for name, n in metrics.items() if "failures" in name} == {"eval/agent/failures/turn_limit": 1.0}


async def test_ten_megabytes_of_text_do_not_hurt() -> None:
    command = "yes | head -c 10000000; yes | head -c 10000000 >&2; echo right > answer.txt"
    harness = ("bash", "-c", f"{command}; /usr/bin/python3 -IS {FAKE_AGENT} x")
    (t,), _ = await play(fake_harness(harness=harness), [{"task": "x"}])
    assert t.total_reward == 1.0
    assert t.env_metrics["output_bytes"] >= 20_000_000


async def test_agents_and_verifiers_may_be_functions() -> None:
    kit = "agent_kit.harnesses"
    cfg = HarnessConfig(harness=f"{kit}:solve", verifier=f"{kit}:verify", workspace=WorkspaceConfig(kind="unisolated"))
    (good, bad), _ = await play(cfg, [{"task": "x"}, {"task": "fails"}])
    assert good.total_reward == 1.0
    assert bad.stop_reason == "agent_exit"
    assert leftovers() == []


def test_a_missing_program_is_named_before_the_run() -> None:
    with pytest.raises(ConfigError, match=r"there is no program no-such-agent; install it, or set workspace.path"):
        HarnessAgent(HarnessConfig(harness=("no-such-agent", "{task}")))
