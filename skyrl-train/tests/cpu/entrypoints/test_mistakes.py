"""Mistakes of the configuration: each is answered with the value and the fix, before PyTorch is imported."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from train_kit.datasets import prompt_row
from train_kit.processes import TRAIN_FOLDER

from skyrl_train.dataset.files import write_jsonl

MODEL = {"max_position_embeddings": 128, "vocab_size": 500, "num_hidden_layers": 4, "num_attention_heads": 4}
TRAIN_MISTAKES: dict[str, list[str]] = {
    "trainer.epoch=3": ["there is no key trainer.epoch; did you mean trainer.epochs?"],
    "trainer.polcy.model.path=x": ["there is no key trainer.polcy.model.path", "trainer.policy.model.path"],
    "learning_rate=1e-6": ["there is no key learning_rate"],
    "trainer.epochs=three": ["trainer.epochs=three must be an integer >= 1"],
    "trainer.epochs=0": ["trainer.epochs=0 must be an integer >= 1"],
    "trainer.policy.optimizer_config.lr=-1": ["lr=-1 must be a number >= 0"],
    "trainer.bf16=yes": ["trainer.bf16=yes must be true or false"],
    "trainer.logger=wanbd": ["trainer.logger=wanbd must be one of console, jsonl, tensorboard, wandb"],
    "trainer.logger=wandb": ["WANDB_API_KEY", "WANDB_MODE=offline", "trainer.logger=tensorboard"],
    "--trainer.epochs=3": ["--trainer.epochs=3 is not an override; write trainer.epochs=3"],
    "epochs": ["epochs is not an override; write trainer.epochs=<value>"],
    "trainer.seed=1,2": ["is a sweep over several runs"],
    "--multirun": ["--multirun is not an override"],
    "trainer.run_name='a": ["cannot be read", "quote the value"],
    "trainer.policy_mini_batch_size=3": ["must divide trainer.train_batch_size=4; try 2 or 4"],
    "trainer.algorithm.advantage_estimator=grop": ["advantage_estimator='grop' is not registered; available: gae"],
    "trainer.algorithm.advantage_estimator=gae": ["reads the values of a critic", "set trainer.critic.model.path="],
    "trainer.algorithm.policy_loss_type=ppo": ["policy_loss_type='ppo' is not registered", "dual_clip"],
    "trainer.algorithm.kl_estimator_type=k4": ["kl_estimator_type=k4 must be one of k1, k2, k3"],
    "trainer.algorithm.use_kl_in_reward=true": ["would count the KL divergence twice"],
    "generator.n_samples_per_prompt=1 trainer.algorithm.advantage_estimator=rloo": ["leaves nothing to compare"],
    "generator.sampling_params.temperature=0": ["cannot divide the logits in training"],
    "generator.backend=vllm": ["vLLM is not installed", "generator.backend=auto"],
    "generator.backend=sglang": ["SGLang is not installed", "generator.backend=auto"],
    "generator.engine_init_kwargs.block_size=32": ["are options of vLLM or SGLang"],
    "trainer.placement.policy_num_gpus_per_node=8 trainer.placement.launcher=inline": [
        "trainer.placement.policy_num_gpus_per_node=8 takes several processes",
        "set trainer.placement.launcher=ray",
    ],
    "generator.num_inference_engines=4": ["num_inference_engines=4 needs Ray, which starts a process for each engine"],
    "trainer.strategy=megatron trainer.policy.megatron_config.pipeline_model_parallel_size=3 "
    "trainer.placement.policy_num_gpus_per_node=3": [
        "pipeline_model_parallel_size=3 must divide the 4 layers of model; try trainer.policy.megatron_config.",
    ],
    "trainer.policy.sequence_parallel_size=3 trainer.placement.policy_num_gpus_per_node=3": [
        "trainer.policy.sequence_parallel_size=3 must divide the 4 attention heads of model; try trainer.policy.",
    ],
    "trainer.policy_mini_batch_size=3 trainer.algorithm.advantage_estimator=foo trainer.epochs=0 "
    "data.val_data=[no.json]": [
        "4 problems in the configuration",
        "trainer.epochs=0 must be an integer >= 1",
        "must divide trainer.train_batch_size=4",
        "advantage_estimator='foo' is not registered",
        "the file no.json does not exist",
    ],
    "trainer.train_batch_size=x trainer.policy_mini_batch_size=3": [
        "trainer.train_batch_size=x must be an integer >= 1"
    ],
    "environment.imports=[no_module]": ["environment.imports=no_module: ModuleNotFoundError"],
    "environment.imports=[os:no_function]": ["environment.imports=os:no_function: InvalidSpec", "module:function"],
    "trainer.resume_mode=from_path": ["needs trainer.resume_path=null to be a folder"],
    "data.train_data=[]": ["data.train_data=[] leaves nothing to train on"],
    "data.train_data=[missing.jsonl]": ["data.train_data=missing.jsonl: the file missing.jsonl does not exist"],
    "data.val_data=[folder.parquet]": ["the file folder.parquet is a folder"],
    "data.val_data=[pipe.json]": ["the file pipe.json is not a regular file"],
    "data.train_data=[wrong_type.jsonl]": [
        "row 2 of wrong_type.jsonl: the environment gsm8k refuses it: AssertionError: ground_truth is required in "
        "reward_spec field; got reward_spec='42'. Fix or remove the row"
    ],
    "data.train_data=[no_truth.jsonl]": ["row 0 of no_truth.jsonl", "reward_spec", "; 2 of 4 rows are refused"],
    "data.train_data=[null_info.jsonl] environment.env_class=openspiel": ["row 0 of null_info.jsonl", "extra_info"],
    "data.train_data=[$UNGRADED]": ["row 0 of $UNGRADED", "; 2 of 4 rows are refused"],
    "data.train_data=[unknown_env.jsonl]": ["row 1 of unknown_env.jsonl: env_class=gms8k", "Did you mean 'gsm8k'?"],
    "data.train_data=[number_env.jsonl]": ["row 0 of number_env.jsonl: env_class=5 is a int"],
    "data.train_data=[no_prompt.jsonl]": ["row 0 of no_prompt.jsonl", "'prompt'", "question"],
    "data.train_data=[null_prompt.jsonl]": ["row 0 of null_prompt.jsonl: prompt=null is not a list of messages"],
    "environment.skyrl_gym.gsm8k.grder=strict": [
        "environment.skyrl_gym.gsm8k.grder is unknown; the only key is grader"
    ],
    "environment.skyrl_gym.gsm8k.grader=lenient": ["environment.skyrl_gym.gsm8k.grader=lenient is unknown; use one of"],
    "environment.skyrl_gym.gms8k.grader=strict": ["section of an environment that does not exist", "'gsm8k'?"],
    "trainer.policy.model.path=./missing": ["path=./missing: there is no such folder"],
    "trainer.policy.model.path=modle": ["path=modle: there is no such folder", "Did you mean 'model'?"],
    "trainer.policy.model.path=run": ["is the folder of a run", "skyrl merge checkpoint run/ckpts <new folder>"],
    "trainer.policy.model.path=run/ckpts/global_step_3": ["skyrl merge checkpoint run/ckpts/global_step_3 <new"],
    "trainer.policy.model.lora.lora_path=model/adaptre": ["lora_path=model/adaptre: there is no such folder"],
    "trainer.output_dir=/proc/x": ["the run folder /proc/x", "/proc belongs to the kernel"],
    "trainer.policy.model.path=without_tokenizer": ["the folder has no tokenizer.json"],
    "trainer.policy.model.path=without_weights": ["the folder has no model.safetensors"],
    "trainer.policy.model.path=without_index": ["the folder has no model.safetensors.index.json"],
    "trainer.policy.model.path=without_shard": ["without_shard: shard.safetensors is missing; download or save"],
    "trainer.policy.model.path=lfs": ["model.safetensors is a Git LFS pointer; run git lfs pull\n"],
    "trainer.policy.model.path=cut_off": ["model.safetensors is cut off after 76 bytes; download or save"],
    "trainer.policy.model.path=list_config": ["list_config/config.json is a list", "save_pretrained"],
    "trainer.policy.model.path=folder_config": ["folder_config/config.json cannot be read", "save_pretrained"],
    "generator.sampling_params.max_generate_length=128": [
        "max_generate_length=128 leaves no room for a prompt in the context of model, 128 tokens",
    ],
    "generator.sampling_params.stop_token_ids=[7,500]": ["stop_token_ids has 500", "a vocabulary of 500 tokens"],
    "trainer.ref.model.path=small_vocabulary": ["small_vocabulary has a vocabulary of 100 tokens", "500 of the policy"],
    "environment.skyrl_gym.isolation=process environment.skyrl_gym.python=/no/python": [
        "environment.skyrl_gym.python=/no/python cannot be run",
    ],
    "environment.skyrl_gym.python=/usr/bin/python3": ["isolation=process"],
    "trainer.run_name=.": ["trainer.run_name=. must be the name of a folder"],
    "trainer.seed=9223372036854775808": ["trainer.seed=9223372036854775808 must be an integer >= 0 and <="],
    "generator.sampling_params.temperature=1e30": ["temperature=1e+30 must be a number >= 0 and <= 100"],
    "trainer.policy.model.path=rows.jsonl": ["rows.jsonl is a file; use the folder"],
    "trainer.output_dir=rows.jsonl": [
        "the run folder rows.jsonl/skyrl/",
        "/rows.jsonl is not a folder; set trainer.output",
    ],
    "trainer.output_dir=broken_link/x": ["/broken_link is a broken link"],
    "trainer.output_dir=$UNDEFINED/x": ["the run folder $UNDEFINED/x/", "variable $UNDEFINED is not set"],
    f"trainer.run_name={'n' * 300}": ["names of files have at most 255 bytes; set trainer.output_dir, trainer.pro"],
    f"trainer.output_dir={'/d' * 1990}": ["paths have at most 4,096 bytes"],
    "trainer.ckpt_path=rows.jsonl/x": [
        "trainer.ckpt_path=rows.jsonl/x cannot be written: ",
        "rows.jsonl is not a folder",
    ],
    "trainer.ckpt_path=$UNDEFINED": ["trainer.ckpt_path=$UNDEFINED cannot be written: ", "is not set"],
    "trainer.export_path=rows.jsonl trainer.hf_save_interval=5": ["trainer.export_path=rows.jsonl cannot be written"],
    "--config nul.yaml": ["the run folder 'out\\x00put/skyrl/", "contains a NUL character"],
    "--config missing.yaml": ["--config missing.yaml cannot be read"],
    "--config broken.yaml": ["--config broken.yaml cannot be read"],
    "--help trainer.epoch": ["there is no key or section trainer.epoch; did you mean trainer.epochs?"],
}

SFT_MISTAKES: dict[str, list[str]] = {
    "data.trunkation=left": ["there is no key data.trunkation; did you mean data.truncation"],
    "generator.backend=hf": ["generator.backend=hf: there is no key generator.backend"],
    "data.max_length=129": ["data.max_length=129 is more than the context of"],
    "data.chat_template=/nowhere.jinja": ["data.chat_template=/nowhere.jinja does not exist"],
    "data.chat_template=/dev/null": ["data.chat_template=/dev/null is not a regular file"],
    "data.val_data=/nowhere.jsonl": ["data.val_data=/nowhere.jsonl: the file /nowhere.jsonl does not exist"],
    "data.train_data=[]": ["data.train_data=[] leaves nothing to train on"],
    "data.response_key=reply": ["row 0 of"],
    "trainer.train_batch_size=32": ["data.train_data has 3 usable rows, fewer than trainer.train_batch_size=32"],
    "trainer.train_batch_size=32 --dry-run": ["has 3 usable rows, fewer than trainer.train_batch_size=32"],
    "trainer.policy.model.path=/nowhere": ["there is no such folder"],
}
MISTAKES = {("train", mistake): words for mistake, words in TRAIN_MISTAKES.items()} | {
    ("sft", mistake): words for mistake, words in SFT_MISTAKES.items()
}
"""Words of the answer by command and mistake."""

GOOD = {
    "train": [
        "data.train_data=[rows.jsonl]",
        "data.val_data=[rows.jsonl]",
        "trainer.policy.model.path=model",
        "trainer.train_batch_size=4",
        "trainer.policy_mini_batch_size=4",
        "generator.sampling_params.max_generate_length=16",
    ],
    "sft": [
        "data.train_data=answers.jsonl",
        "data.val_data=answers.jsonl",
        "trainer.policy.model.path=model",
        "trainer.train_batch_size=3",
    ],
}
"""Overrides without a mistake, for each command."""

SCRIPT = """
import contextlib, io, json, sys
from skyrl_train.entrypoints.cli import main
answers = []
for argv in json.load(sys.stdin):
    stderr = io.StringIO()
    with contextlib.redirect_stderr(stderr):
        status = main(argv)
    answers.append([status, stderr.getvalue()])
heavy = sorted({"torch", "transformers", "datasets", "matplotlib"} & set(sys.modules))
json.dump([answers, heavy], sys.stdout)
"""


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], str]:
    """Standard error of the command for each mistake, all in one process that must not import PyTorch."""
    folder = tmp_path_factory.mktemp("mistakes")
    write_inputs(folder)
    commands = [
        [command, *([] if mistake.startswith("--help") else GOOD[command]), *mistake.split()]
        for command, mistake in MISTAKES
    ]
    env = {name: value for name, value in os.environ.items() if not name.startswith("WANDB")}
    env |= {"PYTHONPATH": os.pathsep.join([str(TRAIN_FOLDER), env.get("PYTHONPATH", "")]), "HOME": str(folder)}
    env["UNGRADED"] = "no_truth.jsonl"
    names = {entry.name for entry in folder.iterdir()}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        input=json.dumps(commands),
        cwd=folder,
        env=env,
        capture_output=True,
        text=True,
        timeout=250,
        check=True,
    )
    results, heavy = json.loads(done.stdout)
    assert heavy == [], "a mistake must be answered before these are imported"
    assert {entry.name for entry in folder.iterdir()} == names, "a mistake must create nothing"
    assert [status for status, _ in results] == [1] * len(MISTAKES)
    return dict(zip(MISTAKES, [text for _, text in results], strict=True))


def write_inputs(folder: Path) -> None:
    """Write the files that `GOOD` and the mistakes name."""
    row = prompt_row("Hi", reward_spec={"ground_truth": "42"})
    for name, rows in {
        "rows": [row],
        "answers": [{"prompt": "Hi", "response": "Hello"}] * 3,
        "wrong_type": [row, row, row | {"reward_spec": "42"}],
        "no_truth": [row | {"reward_spec": None}, row, row | {"reward_spec": {}}],
        "null_info": [row | {"extra_info": None}],
        "unknown_env": [row, row | {"env_class": "gms8k"}],
        "number_env": [row | {"env_class": 5}],
        "no_prompt": [{"question": "2 + 2?"}],
        "null_prompt": [row | {"prompt": None}],
    }.items():
        write_jsonl(folder / f"{name}.jsonl", rows)
    os.mkfifo(folder / "pipe.json")
    (folder / "broken.yaml").write_text("trainer: {epochs: ")
    (folder / "nul.yaml").write_text('trainer: {output_dir: "out\\0put"}')
    (folder / "broken_link").symlink_to("nowhere")
    (folder / "run/ckpts/global_step_3").mkdir(parents=True)
    (folder / "folder.parquet").mkdir()
    for name, files in {
        "model": ["config.json", "model.safetensors", "tokenizer.json"],
        "without_tokenizer": ["config.json", "model.safetensors"],
        "without_weights": ["config.json", "tokenizer.json"],
        "list_config": ["config.json", "model.safetensors", "tokenizer.json"],
        "folder_config": ["model.safetensors", "tokenizer.json"],
        "small_vocabulary": ["config.json", "model.safetensors", "tokenizer.json"],
        "without_index": ["config.json", "model-00001-of-00002.safetensors", "tokenizer.json"],
        "without_shard": ["config.json", "model.safetensors.index.json", "tokenizer.json"],
        "lfs": ["config.json", "model.safetensors", "tokenizer.json"],
        "cut_off": ["config.json", "model.safetensors", "tokenizer.json"],
    }.items():
        (folder / name).mkdir()
        for file in files:
            content = json.dumps(MODEL if file != "model.safetensors" else {}).encode()
            header = len(content).to_bytes(8, "little") if file == "model.safetensors" else b""
            (folder / name / file).write_bytes(header + content)
    (folder / "list_config/config.json").write_text("[]")
    (folder / "without_shard/model.safetensors.index.json").write_text('{"weight_map": {"a": "shard.safetensors"}}')
    (folder / "lfs/model.safetensors").write_text("version https://git-lfs.github.com/spec/v1")
    header = json.dumps({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}).encode()
    (folder / "cut_off/model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(7))
    (folder / "folder_config/config.json").mkdir()
    (folder / "small_vocabulary/config.json").write_text(json.dumps({"vocab_size": 100}))


@pytest.mark.parametrize(("command", "mistake"), MISTAKES)
def test_a_mistake_is_answered_with_its_fix(command: str, mistake: str, answers: dict[tuple[str, str], str]) -> None:
    answer = answers[command, mistake]
    for words in MISTAKES[command, mistake]:
        assert words in answer
    assert "Traceback" not in answer
