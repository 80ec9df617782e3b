"""`skyrl eval` with a tiny model."""

import json
from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerBase

from skyrl_train.entrypoints.cli import main
from skyrl_train.entrypoints.tiny import tiny_qwen3


@pytest.fixture
def settings(tiny_tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> list[str]:
    tiny_tokenizer.save_pretrained(tmp_path / "model")
    tiny_qwen3(tiny_tokenizer, seed=0, context_length=8192).save_pretrained(tmp_path / "model")
    return [
        f"trainer.policy.model.path='{tmp_path / 'model'}'",
        f"trainer.output_dir='{tmp_path}'",
        "trainer.logger=jsonl",
        "generator.eval_sampling_params.max_generate_length=8",
        "generator.eval_sampling_params.temperature=1",
    ]


def test_benchmarks_are_played_whole(settings: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["eval", "gsm8k=sample", "gpqa=sample", "--samples", "2", "--limit", "2", *settings]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[:4] for line in lines[-3:-1]] == [["gpqa", "2", "2", "0.0%"], ["gsm8k", "2", "2", "0.0%"]]
    (folder,) = tmp_path.rglob("eval_only")
    rows = [json.loads(line) for line in (folder / "gsm8k.jsonl").read_text().splitlines()]
    assert {row["uid"] for row in rows} == {"0_0", "0_1", "1_0", "1_1"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["gsm9k"], "there is no benchmark 'gsm9k'. Did you mean 'gsm8k'"),
        (["trainer.epochs=1"], "there is no benchmark; write skyrl eval gsm8k"),
        (["gsm8k=sample", "trainer.max_prompt_length=122"], "problems are longer than trainer.max_prompt_length=122"),
    ],
)
def test_mistakes(settings: list[str], arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["eval", *settings, *arguments]) == 1
    assert message in capsys.readouterr().err
