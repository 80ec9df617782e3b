"""The memory agent: its data, its random attempts, and a run too short to learn anything."""

import dataclasses
import random
from pathlib import Path

import pytest
from agent_kit.engines import TOKENIZER, ScriptedEngine, tool_call
from memory_agent.learn import AGENT, NOTHING, RECIPE, MemoryExp, attempt, row, write_data

from examples import learning, tiny_model
from skyrl_agent import AutoAgentRunner
from skyrl_train.dataset.files import read_rows


@pytest.mark.parametrize("memory", [NOTHING, "3"])
async def test_attempts_show_what_the_agent_reads(memory: str) -> None:
    rng = random.Random(0)
    question = row(rng)
    attempts = [attempt(question, rng)[:-1] for _ in range(300)]
    shown = {TOKENIZER.apply_chat_template(a, tokenize=False, add_generation_prompt=True) for a in attempts}
    changes = {"num_trajectories": 1, "max_response_length": 4096, "sampling_params": {}}  # of a tokenizer of bytes
    cfg = AGENT.model_copy(update={"generator": AGENT.generator.model_copy(update=changes)})
    replies = [tool_call("next_with_summary", summary=memory)] * 2 + [tool_call("finish", answer=question["answer"])]
    engine = ScriptedEngine(replies)
    runner = AutoAgentRunner.from_task(cfg, engine, TOKENIZER)
    output = await runner.run([question])
    await runner.close()
    assert output["traj_rewards"] == [1.0]
    prompts = engine.prompts()
    assert len(prompts) == 3
    assert set(prompts) <= shown


def test_no_text_of_training_is_in_validation(tmp_path: Path) -> None:
    write_data(tmp_path)
    train, validation = (read_rows(str(tmp_path / f"{name}.parquet")) for name in ("train", "validation"))
    assert not {one["context"] for one in train} & {one["context"] for one in validation}
    assert all(f"{one['prompt'][0]['content'].split()[-2]} box has {one['answer']}." in one["context"] for one in train)


def test_a_short_run_trains_the_agent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(learning, "N_CONVERSATIONS", 64)
    monkeypatch.setattr(tiny_model, "BATCH_SIZE", 8)
    tiny = dataclasses.replace(RECIPE, n_start_steps=2, n_steps=1)
    argv = ["--output_dir", str(tmp_path), "--seed", "3", "trainer.train_batch_size=4"]
    with pytest.raises(SystemExit) as status:
        learning.main(tiny, "A test.", argv, experiment=MemoryExp)
    assert status.value.code == 1
    assert (tmp_path / "memory_agent/seed3/report.html").stat().st_size > 0
