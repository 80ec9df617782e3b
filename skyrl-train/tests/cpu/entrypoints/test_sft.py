import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from train_kit.datasets import write_answers, write_rows
from train_kit.runs import Run, expect_error, supervised_run, train
from transformers import AutoModelForCausalLM, AutoTokenizer

from skyrl_train.entrypoints.cli import main

Overrides = Callable[..., list[str]]


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return write_answers(tmp_path)


@pytest.fixture
def overrides_of(data: Path, tiny_model_path: Path, tmp_path: Path) -> Overrides:
    return lambda *overrides: supervised_run(tmp_path / "out", *overrides, model=tiny_model_path, data=data)


def test_the_plan_the_configuration_and_the_keys_are_printed(
    overrides_of: Overrides, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def read_output(*arguments: str) -> str:
        assert main(["sft", *arguments]) == 0
        return capsys.readouterr().out

    plan = read_output(*overrides_of("--dry-run"))
    assert "steps        6 (3 epochs × 2 batches)" in plan
    assert "each step    5 rows of ≤ 200 tokens" in plan
    assert "each step    5 rows of ≤ 512 tokens" in read_output(*overrides_of("data.max_length=null", "--dry-run"))
    config = yaml.safe_load(read_output(*overrides_of("--print-config")))
    assert config["trainer"]["policy"]["optimizer_config"]["adam_betas"] == [0.9, 0.98]
    assert "data.truncation=error  one of error, left, right" in read_output("--help", "data.truncation")
    assert "skyrl sft --help SECTION" in read_output("--help")
    assert not (tmp_path / "out").exists()


def test_rows_are_as_long_as_the_context_by_default(overrides_of: Overrides, data: Path) -> None:
    with (data / "train.jsonl").open("a") as file:
        file.write(json.dumps({"prompt": "Count!", "response": "1" * 600}))
    short = overrides_of("data.max_length=null", "trainer.max_training_steps=1")
    message = expect_error(*short, command="sft")
    assert "tokens, more than data.max_length=512; raise it, or set data.truncation" in message
    train(*short, "data.truncation=right", command="sft")


def test_the_command_line_of_verl_is_read(data: Path, tiny_model_path: Path, tmp_path: Path) -> None:
    command = f"""
        data.train_files={data}/train.jsonl data.val_files={data}/val.jsonl data.prompt_key=prompt
        data.response_key=response data.train_batch_size=5 data.micro_batch_size_per_gpu=8 data.max_length=200
        model.partial_pretrain={tiny_model_path} model.fsdp_config.model_dtype=bf16
        optim.lr=2e-4 optim.betas=[0.9,0.95] optim.weight_decay=0.1 optim.lr_scheduler=wsd
        trainer.default_local_dir={tmp_path}/ckpts trainer.experiment_name=test_run trainer.total_epochs=1
        trainer.save_freq=50 trainer.test_freq=50 trainer.logger=jsonl trainer.output_dir={tmp_path}/out
    """
    assert main(["sft", *command.split()]) == 0
    assert "val/loss" in Run(tmp_path / "out/skyrl/test_run").metrics[-1]
    assert (tmp_path / "ckpts/global_step_2").is_dir()


def test_a_chat_template_without_text_is_refused(overrides_of: Overrides, data: Path) -> None:
    for content, fault in ((b"\xff", "cannot be read"), (b"\n", "is empty")):
        (data / "template.jinja").write_bytes(content)
        message = expect_error(*overrides_of(f"data.chat_template='{data}/template.jinja'"), command="sft")
        assert f"template.jinja {fault}" in message


def test_a_custom_template_replaces_a_broken_one_and_is_trained_and_exported(
    overrides_of: Overrides, data: Path, tiny_model_path: Path, tmp_path: Path
) -> None:
    model = shutil.copytree(tiny_model_path, tmp_path / "model")
    (model / "chat_template.jinja").write_text("{{ broken }")
    template = "{% for m in messages %}[{{ m.role }}] {{ m.content }}<|im_end|>{% endfor %}"
    template += "{% if add_generation_prompt %}[assistant] {% endif %}"
    (data / "template.jinja").write_text(template)
    short = overrides_of(f"trainer.policy.model.path='{model}'", "trainer.max_training_steps=1")
    expect_error(*short, command="sft")
    run = train(*short, f"data.chat_template='{data}/template.jinja'", command="sft")
    assert AutoTokenizer.from_pretrained(run.export(1)).chat_template == template


def test_an_export_stops_where_its_training_ended_the_turns(
    overrides_of: Overrides, data: Path, tiny_model_path: Path, tmp_path: Path
) -> None:
    model = shutil.copytree(tiny_model_path, tmp_path / "model")
    settings = {"eos_token_id": 5, "max_new_tokens": 30, "temperature": 0.6, "do_sample": False}  # not valid together
    (model / "generation_config.json").write_text(json.dumps(settings))
    write_rows(data, [{"prompt": "Play", "response": "123"}] * 5, "train.jsonl")
    run = train(*overrides_of(f"trainer.policy.model.path='{model}'", "trainer.epochs=20"), command="sft")
    tokenizer = AutoTokenizer.from_pretrained(run.export(20))
    for folder in (run.export(20), run.folder / "ckpts/global_step_20/policy/huggingface"):
        exported = json.loads((folder / "generation_config.json").read_text())
        assert exported.items() >= (settings | {"eos_token_id": [5, tokenizer.eos_token_id]}).items()
    trained = AutoModelForCausalLM.from_pretrained(run.export(20))
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Play"}], add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    assert tokenizer.decode(trained.generate(**prompt)[0]).endswith("123<|im_end|>")
