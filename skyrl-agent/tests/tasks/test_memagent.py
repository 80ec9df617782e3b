import pytest
from agent_kit.engines import TOKENIZER, tool_call
from agent_kit.trajectories import ROW, play_one
from hypothesis import given
from hypothesis import strategies as st

from skyrl_agent.tasks.memagent import MemAgentTask, find_token_starts, split_sections


@given(st.lists(st.text(alphabet="ab \n日本", max_size=40)), st.integers(5, 60), st.integers(2, 20))
def test_sections_hold_the_whole_text_within_their_limits(texts: list[str], max_chars: int, max_tokens: int) -> None:
    context = "".join(f"Document {i}:{text}" if i else text for i, text in enumerate(texts))  # the first: a preface
    starts = find_token_starts(context, TOKENIZER)
    limited = split_sections(context, max_chars, starts, max_tokens)
    for sections in (split_sections(context, max_chars), limited):
        assert all(len(section) <= max_chars for section in sections)
        assert "".join("".join(sections).split()) == "".join(context.split())
    for section in limited:
        start = context.index(section)
        n_tokens = sum(start <= token < start + len(section) for token in starts)
        assert n_tokens <= max_tokens or len(section) == 1  # a character may be several tokens


@pytest.mark.parametrize("is_fast", [True, False])
def test_a_language_with_more_tokens_gets_shorter_sections(is_fast: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(type(TOKENIZER), "is_fast", is_fast)
    sections = MemAgentTask.initialize_runtime({**ROW, "context": "日本語の文章。" * 5_000}, TOKENIZER)._sections
    assert len(sections) > 3
    n_tokens = [len(TOKENIZER(section)["input_ids"]) for section in sections]
    assert max(n_tokens) <= 4_010
    assert min(n_tokens[:-1]) > 3_000
    english = MemAgentTask.initialize_runtime({**ROW, "context": "word " * 30_000}, TOKENIZER)._sections
    assert all(len(section) <= 16_000 for section in english)


class ShortSections(MemAgentTask):
    """A memory task with one document in each section."""

    max_section_chars = 31


async def test_a_memory_agent_reads_on_and_each_section_is_a_row() -> None:
    row = {
        "prompt": [{"role": "user", "content": "Who lives in Rome?"}],
        "context": "Document 1: Ada lives in Rome.\nDocument 2: Bob has a dog.\nDocument 3: The end.",
        "data_source": "nq",
        "answer": "Ada",
    }
    replies = [
        tool_call("next_with_summary", summary="Ada: Rome"),
        tool_call("next_with_summary", summary="Ada: Rome, still"),
        tool_call("next_with_summary", summary="more"),
        tool_call("finish", answer="Ada"),
    ]
    trajectory, engine = await play_one(
        replies, row, task=f"{__name__}.ShortSections", tools=("finish", "next_with_summary")
    )
    first, second, third, last = engine.prompts()
    assert "Document 1: Ada lives in Rome.\n\nMore sections follow." in first
    assert "Your memory of earlier sections:\nAda: Rome\n" in second
    assert "Document 1" not in second
    assert "Your memory of earlier sections:\nAda: Rome, still\n" in third
    assert "This is the last section. Finish with your answer." in third
    assert "ERROR: This is the last section; finish with your answer." in last
    assert [len(segment.turns) for segment in trajectory.segments] == [1, 1, 2]
    assert [sum(segment.rewards) for segment in trajectory.segments] == [0.0, 0.0, 1.0]
    for segment, reply in zip(trajectory.segments, replies, strict=False):
        sampled = [token for token, mask in zip(segment.response_ids, segment.loss_mask, strict=True) if mask]
        assert TOKENIZER.decode(sampled).startswith(reply)
        assert "next_with_summary: Continue" in TOKENIZER.decode(segment.prompt_ids)
