import pytest
from agent_kit.engines import TOKENIZER, tool_call
from agent_kit.trajectories import FINISH, play_one


async def test_each_prompt_is_the_previous_one_the_sampled_tokens_and_every_new_message() -> None:
    replies = ["no call", tool_call("code_interpreter", code="print(6 * 7)"), FINISH]
    trajectory, engine = await play_one(replies)
    assert trajectory.total_reward == 1.0
    assert trajectory.stop_reason == "FINISH_TOOL"
    (segment,) = trajectory.segments
    for request, turn in zip(engine.requests, segment.turns, strict=True):
        assert request.prompt_ids == segment.token_ids[: segment.n_prompt + turn.start]
    sampled = [token for token, mask in zip(segment.response_ids, segment.loss_mask, strict=True) if mask]
    assert TOKENIZER.decode(sampled) == "".join(f"{reply}<|im_end|>" for reply in replies)
    observed = TOKENIZER.decode(segment.response_ids)
    assert "Your reply has no function call" in observed
    assert "EXECUTION RESULT of [code_interpreter]:\n42" in observed
    assert segment.rewards == [0.0] * (len(segment.rewards) - 1) + [1.0]
    assert engine.n_ended == 1


@pytest.mark.parametrize(
    ("reply", "expected"),
    [
        (tool_call("finish"), "'answer' is a required property"),
        (tool_call("finish", answer="Paris", note="x"), "Additional properties are not allowed"),
        (tool_call("look", query="Paris"), "There is no function look; there are code_interpreter, finish."),
        (FINISH * 2, "Your reply has 2 function calls, and none was carried out"),
        ("<tool_call>{broken</tool_call>", "is not valid JSON"),
        ("<think>" + tool_call("finish", answer="Rome"), "Your reply has no function call"),
    ],
    ids=["missing", "unknown", "tool", "two", "json", "thought"],
)
async def test_mistakes_of_the_model_are_explained_to_it(reply: str, expected: str) -> None:
    trajectory, engine = await play_one([reply, FINISH])
    assert expected in engine.prompts()[1]
    assert trajectory.total_reward == 1.0


@pytest.mark.parametrize(
    "reply",
    [
        "<function=finish>\n<parameter=answer>\nParis is the capital of France, and so on, and so on",
        "<function=finish>\n<parameter=answer>Rome</parameter>\n" + " " * 80,
        "I think about Paris, and about France, and about Paris, and about France, and about Paris.",
    ],
)
async def test_a_call_that_is_cut_off_is_not_carried_out(reply: str) -> None:
    trajectory, engine = await play_one(
        [reply * 3, FINISH], sampling_params={"max_tokens": len(TOKENIZER(FINISH)["input_ids"]) + 1}
    )
    assert (
        "ERROR: Your reply was cut off at the maximum number of tokens, so no tool calls were executed"
        in engine.prompts()[1]
    )
    assert (trajectory.total_reward, trajectory.stop_reason) == (1.0, "FINISH_TOOL")


async def test_without_tools_the_first_reply_is_the_answer() -> None:
    trajectory, engine = await play_one(["<think>Hm.</think>Paris"], tools=())
    assert (trajectory.total_reward, trajectory.stop_reason) == (1.0, "FINISH")
    assert "function" not in engine.prompts()[0]


async def test_reminders_count_down() -> None:
    replies = ["no call"] * 3 + [FINISH]
    _, engine = await play_one(replies, enable_turn_reminder=True, max_iterations=4, early_step_threshold=2)
    prompts = engine.prompts()
    assert "Steps remaining: 3. Take at least 1 more steps before you finish." in prompts[1]
    assert "\n\nSteps remaining: 1. This is your last step: finish now.<|im_end|>" in prompts[3]
    _, without = await play_one(replies, max_iterations=4)
    assert "Steps remaining" not in "".join(without.prompts())
