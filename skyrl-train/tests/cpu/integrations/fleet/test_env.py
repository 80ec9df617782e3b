import asyncio
import json
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from train_kit.fleet.tasks import write_tasks
from train_kit.processes import wait_until

from integrations.fleet.env import FleetTaskEnv, ProvisioningError, is_transient
from skyrl_gym.envs.base_text_env import BaseTextEnvStepOutput
from skyrl_gym.images import find_images, join_texts
from skyrl_gym.runtime.validation import validate_prompt, validate_step_output

TASK = {
    "key": "notes_1",
    "env_id": "notes",
    "version": "v2",
    "prompt": "Write a note.",
    "verifier_code": "def verify(env, conversation): return 1.0",
    "env_variables": {"LOGGED_IN_USER": "ann", "CURRENT_DATE": "2026-01-31", "ZONE": "UTC"},
}


@pytest.fixture
def tasks_file(tmp_path: Path) -> Path:
    return write_tasks(tmp_path / "tasks.json", [TASK, TASK | {"key": "screen_1", "task_modality": "computer_use"}])


def make(
    tasks_file: Path, key: str = "notes_1", max_turns: int = 5, reads_images: bool = False, **settings: Any
) -> FleetTaskEnv:
    config = {"tasks_file": str(tasks_file), "provisioning_wait_s": 0.0, **settings}
    return FleetTaskEnv(config, {"task_key": key, "max_turns": max_turns, "reads_images": reads_images})


async def play(env: FleetTaskEnv, *replies: str) -> list[BaseTextEnvStepOutput]:
    await env.init_async([{"role": "user", "content": "ignored"}])
    return [await env.step_async(reply) for reply in replies]


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


async def test_an_episode_from_the_prompt_to_the_grade(openenv: Any, tasks_file: Path) -> None:
    env = make(tasks_file)
    prompt, facts = await env.init_async([{"role": "user", "content": "ignored"}])
    assert [message["role"] for message in prompt] == ["system", "user"]
    assert prompt[1]["content"] == "Write a note."
    system = prompt[0]["content"]
    facts_and_tools = [system.index(text) for text in ("2026-01-31", "LOGGED_IN_USER: ann", "ZONE", "add_note")]
    assert facts_and_tools == sorted(facts_and_tools)
    assert '"computer"' not in system
    assert facts == {"task_key": "notes_1", "env_key": "notes", "modality": "tool_use"}
    step = await env.step_async(
        "<function=add_note><parameter=text>milk</parameter><parameter=n_copies>2</parameter></function>"
    )
    assert not step["done"]
    assert "milk" in step["observations"][0]["content"]
    last = await env.step_async("Done. <done>")
    assert (last["done"], last["reward"], last["observations"]) == (True, 1.0, [])
    await env.close_async()
    (server,) = openenv.created
    assert (server.n_verified, server.is_closed, server.notes) == (1, True, ["milk"] * 2)
    assert server.software.is_closed
    assert server.task_config["env_version"] == "v2"
    assert env.get_metrics() | {"turns": 2, "tool_calls": 1, "tool_errors": 0, "is_verified": 1} == env.get_metrics()


@pytest.mark.parametrize(
    ("reply", "is_done"),
    [
        ("<think>I write <done> later</think>Not yet", False),
        ("<think>then <done>", False),
        (call("add_note", text="<done>"), False),
        ("<think>all is well</think> [DONE]", True),
        (call("add_note", text="a") + " <done>", True),
        (call("submit_final_answer", answer="4"), True),
    ],
)
async def test_which_replies_end_an_episode(reply: str, is_done: bool, openenv: Any, tasks_file: Path) -> None:
    (output,) = await play(make(tasks_file), reply)
    assert (output["done"], output["reward"] == 1.0) == (is_done, is_done)


async def test_the_verifier_grades_the_last_turn_and_unfinished_episodes(openenv: Any, tasks_file: Path) -> None:
    outputs = await play(make(tasks_file, max_turns=2), "hm", "hm")
    assert [output["reward"] for output in outputs] == [0.0, 1.0]
    env = make(tasks_file)
    await play(env, "hm")
    assert await env.grade_unfinished_async() == 0.5  # the second instance's grade
    assert [server.n_verified for server in openenv.created] == [1, 1]


async def test_an_unknown_grade_is_no_reward(openenv: Any, tasks_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for failure in (None, RuntimeError("no orchestrator")):

        async def verify(self: Any, failure: Any = failure) -> None:
            if failure:
                raise failure

        monkeypatch.setattr(openenv, "_verify", verify)
        env = make(tasks_file)
        (output,) = await play(env, "<done>")
        assert (output["done"], output["reward"]) == (True, None)
        assert env.get_metrics()["is_verified"] == 0
    with pytest.raises(RuntimeError, match="this episode is over"):
        await env.step_async("more")


async def test_only_transient_provisioning_failures_are_repeated(
    openenv: Any, tasks_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLEET_STAND_IN_FAULTS", "1")
    with pytest.raises(ProvisioningError, match=r"health check timed out.*attempt 3 of 3"):
        await make(tasks_file).init_async([])
    assert len(openenv.created) == 3
    assert all(server.is_closed for server in openenv.created)

    async def refuse(self: Any) -> dict[str, Any]:
        raise RuntimeError("401: invalid API key")

    monkeypatch.setattr(openenv, "reset_async", refuse)
    with pytest.raises(ProvisioningError, match="attempt 1 of 3"):
        await make(tasks_file).init_async([])
    assert len(openenv.created) == 4
    assert is_transient(TimeoutError())
    assert is_transient(RuntimeError("Too many in-flight requests"))


async def test_software_that_starts_after_a_cancel_is_stopped(
    openenv: Any, tasks_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started, may_continue = threading.Event(), threading.Event()
    create = openenv.__init__

    def slow(self: Any, *args: Any, **options: Any) -> None:
        started.set()
        may_continue.wait()
        create(self, *args, **options)

    monkeypatch.setattr(openenv, "__init__", slow)
    task = asyncio.create_task(make(tasks_file).init_async([]))
    await asyncio.to_thread(started.wait)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    may_continue.set()
    await asyncio.to_thread(wait_until, lambda: openenv.created and openenv.created[0].is_closed)


async def test_errors_of_calls_are_shown_and_counted(openenv: Any, tasks_file: Path) -> None:
    env = make(tasks_file, max_turns=9)
    replies = [call("add_note"), call("fly"), "<tool_call>{", "hello", call("list_notes")]
    texts = [output["observations"][0]["content"] for output in await play(env, *replies)]
    assert "Error: KeyError: 'text'" in texts[0]
    assert "no tool fly" in texts[1]
    assert "not valid JSON" in texts[2]
    assert "No tool call found" in texts[3]
    assert "notes" in texts[4]
    metrics = env.get_metrics()
    assert (metrics["tool_calls"], metrics["tool_errors"]) == (4, 3)
    totals = FleetTaskEnv.aggregate_metrics([metrics, {**metrics, "env_key": "b", "tool_errors": 0}])
    assert (totals["notes/tool_error_rate"], totals["tool_error_rate"], totals["total_episodes"]) == (0.75, 0.375, 2)


@pytest.mark.parametrize("modality", ["computer_use", "browser_use"])
def test_a_text_model_refuses_tasks_with_screenshots(modality: str, openenv: Any, tmp_path: Path) -> None:
    tasks = write_tasks(tmp_path / "tasks.json", [TASK | {"task_modality": modality}])
    with pytest.raises(ValueError, match=f"modality {modality}, whose screenshots a text model cannot see"):
        make(tasks)
    FleetTaskEnv({"tasks_file": str(tasks)}, {"task_key": "notes_1"})  # while rows are checked


async def test_a_model_that_reads_images_uses_the_computer(openenv: Any, tasks_file: Path) -> None:
    env = make(tasks_file, "screen_1", reads_images=True, enable_context_tools=True)
    prompt = validate_prompt(await env.init_async([]))
    assert "The screenshot has 64 x 48 pixels." in prompt[0]["content"]
    assert '"add_note"' not in prompt[0]["content"]
    assert '"name": "computer"' in prompt[0]["content"]
    (red,) = find_images(prompt)
    assert red.open().getpixel((0, 0)) == (255, 0, 0)
    step = validate_step_output(await env.step_async(call("computer", action="left_click", coordinate=[5, 6])))
    content = step["observations"][0]["content"]
    (blue,) = find_images(step["observations"])
    assert blue.open().getpixel((0, 0)) == (0, 0, 255)
    assert join_texts(content) == "<tool_response>\n\nDid left_click.\n</tool_response>"
    context = (await env.step_async(call("check_context")))["observations"][0]["content"]
    assert json.loads(context.split("\n")[1])["characters"] < 5000  # without the images
    dropped = await env.step_async(call("manage_context", keep_recent_turns=3))
    assert len(find_images(validate_step_output(dropped)["metadata"]["modified_chat_history"])) == 2
    await env.step_async("<done>")
    (server,) = openenv.created
    assert server.clicks == [[5, 6]]
    assert [message["content"] for message in server.conversation_messages[1:4:2]] == [
        "Write a note.[Image]",
        "<tool_response>\n[Image]\nDid left_click.\n</tool_response>",
    ]
    await env.close_async()


async def test_coordinates_in_thousandths_become_pixels(openenv: Any, tasks_file: Path) -> None:
    env = make(tasks_file, "screen_1", reads_images=True, coordinates="thousandths")
    prompt, _ = await env.init_async([])
    assert "thousandths" in prompt[0]["content"]
    outside = await env.step_async(call("computer", action="left_click", coordinate=[1001, 0]))
    assert "Error: coordinate=[1001, 0] is outside the screenshot" in outside["observations"][0]["content"]
    await env.step_async(call("computer", action="left_click", coordinate=[500, 250]))
    assert openenv.created[0].clicks == [[32, 12]]
    await env.close_async()


@pytest.mark.parametrize("reads_images", [False, True])
async def test_images_in_the_results_of_other_tools(
    reads_images: bool, openenv: Any, tasks_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(openenv, "_call", lambda self, tool, params: [self._screenshot()[0], "A chart."])
    env = make(tasks_file, reads_images=reads_images)
    (step,) = await play(env, call("list_notes"))
    assert len(find_images(validate_step_output(step)["observations"])) == reads_images
    shown = join_texts(step["observations"][0]["content"])
    notice = "" if reads_images else "[Image: text models cannot see it]"
    assert shown == f"<tool_response>\n{notice}\nA chart.\n</tool_response>"
    await env.close_async()


async def test_software_with_nothing_but_a_computer_is_refused(
    openenv: Any, tasks_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("envs.fleet_env.task_env.TOOLS", ("computer",))
    with pytest.raises(ProvisioningError, match="no tool for the modality tool_use; it has: computer"):
        await make(tasks_file).init_async([])
    assert openenv.created[-1].is_closed


@pytest.mark.parametrize("reply", ["<done>", call("submit_final_answer", answer="4"), "hm"])
@pytest.mark.parametrize("orchestrator", [None, SimpleNamespace(_fleet_env=None)])
async def test_a_grade_without_software_is_no_reward(
    reply: str, orchestrator: Any, openenv: Any, tasks_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(openenv, "_verify", return_zero)
    env = make(tasks_file, max_turns=1)
    await env.init_async([])
    openenv.created[-1]._orch = orchestrator
    output = await env.step_async(reply)
    assert (output["done"], output["reward"], env.get_metrics()["is_verified"]) == (True, None, 0)


async def return_zero(self: Any) -> float:
    """Grade as OpenEnv does without running the verifier."""
    return 0.0


async def test_the_verifier_receives_the_whole_conversation(openenv: Any, tasks_file: Path) -> None:
    env = make(tasks_file, max_turns=9, enable_context_tools=True)
    replies = [call("add_note", text="milk"), "hm", call("manage_context", keep_recent_turns=1), "Done. <done>"]
    outputs = await play(env, *replies)
    assert len(outputs[2]["metadata"]["modified_chat_history"]) < 6
    messages = openenv.created[-1].conversation_messages
    assert [message["role"] for message in messages] == ["system", "user", *["assistant", "user"] * 3, "assistant"]
    assert [message["content"] for message in messages if message["role"] == "assistant"] == replies


async def test_context_tools(openenv: Any, tasks_file: Path) -> None:
    env = make(tasks_file, max_turns=20, enable_context_tools=True, max_output_chars=120)
    lines = "\n".join(f"line {i}" for i in range(100))
    outputs = await play(
        env,
        call("add_note", text=lines),
        call("view_tool_output", page=2, page_size=3),
        call("search_history", pattern="WRITE"),
        call("manage_context", keep_recent_turns=2),
        call("check_context"),
        call("view_tool_output", page=99),
    )
    texts = [output["observations"][0]["content"] for output in outputs]
    assert "[Truncated: 120 of" in texts[0]
    assert "Page 2 of" in texts[1] or "does not exist" in texts[1]
    assert "user: Write a note." in texts[2]
    history = outputs[3]["metadata"]["modified_chat_history"]
    assert [message["role"] for message in history] == ["system", "user", "assistant", "user", "assistant"]
    assert history[1]["content"] == "Write a note."
    assert '"dropped_turns": 2' in texts[4]
    assert "Error: page=99 does not exist" in texts[5]
    assert all("modified_chat_history" not in output["metadata"] for output in (*outputs[:3], *outputs[4:]))


@pytest.mark.parametrize(
    ("config", "row", "message"),
    [
        ({"api_key": "k"}, {"task_key": "notes_1"}, "export FLEET_API_KEY"),
        ({}, {}, "task_key=None must name"),
        ({}, {"task_key": "x"}, "is not in .* begin with notes_1, screen_1"),
        ({"tasks_file": None}, {"task_key": "x"}, "tasks_file is missing"),
        ({"ttl_second": 1}, {"task_key": "x"}, "did you mean ttl_seconds"),
        ({"max_output_chars": 0}, {"task_key": "x"}, "must be at least 1"),
    ],
)
def test_rows_and_settings_are_checked(
    config: dict[str, Any], row: dict[str, Any], message: str, openenv: Any, tasks_file: Path
) -> None:
    with pytest.raises(ValueError, match=message):
        FleetTaskEnv({"tasks_file": str(tasks_file), **config}, row)


async def test_without_openenv_the_error_says_what_to_install(
    tasks_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLEET_API_KEY", "test")
    with pytest.raises(
        ImportError, match=r"No module named 'envs'.*-r skyrl-train/integrations/fleet/requirements.txt"
    ):
        await make(tasks_file).init_async([])


def test_the_reason_that_openenv_hides_is_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With mcp 2, OpenEnv says that an optional dependency is missing."""
    package = tmp_path / "envs/fleet_env"
    package.mkdir(parents=True)
    for folder in (package.parent, package):
        (folder / "__init__.py").touch()
    (package / "task_env.py").write_text(
        "try:\n    from json import streams\nexcept ImportError as error:\n    raise ImportError('extra') from error\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ImportError, match="cannot import name 'streams' from 'json'"):
        FleetTaskEnv.check_packages()
    for name in [name for name in sys.modules if name.partition(".")[0] == "envs"]:
        del sys.modules[name]


def test_the_blocking_methods(openenv: Any, tasks_file: Path) -> None:
    with make(tasks_file) as env:
        env.init([])
        assert env.step("<done>")["reward"] == 1.0
    assert openenv.created[0].is_closed
