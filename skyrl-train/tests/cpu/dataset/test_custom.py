import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml
from train_kit.runs import expect_error, run_of
from transformers import PreTrainedTokenizerBase

from skyrl_train.config import load_config
from skyrl_train.dataset.prompts import CustomDataset
from skyrl_train.entrypoints.main_base import main, parse_cli
from skyrl_train.errors import ConfigError, DataError

FILE = '''
class Sums:
    """In the form of verl: rows with raw_prompt and reward_model."""

    def __init__(self, data_files, tokenizer, processor, config, max_samples):
        self.files, self.options = list(data_files), config.custom_cls.config
        self.max_prompt_length = config.max_prompt_length

    def __len__(self):
        return self.options.get("n", 8)

    def __getitem__(self, index):
        if index == self.options.get("bad"):
            raise RuntimeError("no such sum")
        unknown = {"env_class": "kaboom"} if index == self.options.get("unknown") else {}
        return {
            "raw_prompt": [{"role": "user", "content": f"{index} + 1"}],
            "data_source": "sums",
            "reward_model": {"style": "rule", "ground_truth": str(index + 1)},
            "input_ids": object(),
        } | dict(self.options.get("columns", {})) | unknown


class Splits(Sums):
    def __init__(self, data_files, tokenizer, processor, config, max_samples, split):
        super().__init__(data_files, tokenizer, processor, config, max_samples)
        self.split = split


def compute_score(data_source, solution_str, ground_truth, extra_info):
    return {"score": len(solution_str) / 100, "truth": int(ground_truth)}


def sometimes(data_source, solution_str, ground_truth, extra_info):
    if ground_truth == "3":
        raise RuntimeError("the judge is gone")
    return 1.0
'''

PICTURES = """
class Pictures(Sums):
    def __getitem__(self, index):
        from PIL import Image

        return super().__getitem__(index) | {"images": [Image.new("RGB", (8, 8), "red")]}
"""


@pytest.fixture
def file(tmp_path: Path) -> str:
    path = tmp_path / "my-dataset.py"
    path.write_text(FILE)
    return str(path)


def custom(file: str, name: str = "Sums", **config: Any) -> CustomDataset:
    """Return a dataset. The tokenizer is only passed to the class."""
    section = {"path": file, "name": name, "config": config}
    return CustomDataset(load_config({"data": {"custom_cls": section}}), object(), "validation")  # type: ignore[arg-type]


def test_rows_of_verls_form_are_prompts(file: str) -> None:
    dataset = custom(file)
    assert len(dataset) == 8
    row = dataset[3]
    assert (row.uid, row.prompt, row.env_class) == ("3", [{"role": "user", "content": "3 + 1"}], None)
    assert row.env_extras == {"data_source": "sums", "reward_model": {"style": "rule", "ground_truth": "4"}}
    assert [row.uid for row in dataset] == [str(i) for i in range(8)]
    assert dataset._dataset.max_prompt_length == 512
    assert dataset._dataset.files == ["$HOME/data/gsm8k/validation.parquet"]
    assert custom(file, "Splits")._dataset.split == "validation", "passed because the class has such a parameter"


def test_the_fingerprint_covers_the_options_and_the_file_but_not_its_folder(file: str, tmp_path: Path) -> None:
    assert custom(file).fingerprint == custom(file).fingerprint != custom(file, n=9).fingerprint
    copy = tmp_path / "moved/other.py"
    copy.parent.mkdir()
    shutil.copy(file, copy)
    assert custom(str(copy)).fingerprint == custom(file).fingerprint
    copy.write_text(copy.read_text() + "\n# changed")
    assert custom(str(copy)).fingerprint != custom(file).fingerprint


def test_images_of_a_row_are_read(
    file: str, vision_tokenizer: PreTrainedTokenizerBase, tiny_tokenizer: PreTrainedTokenizerBase
) -> None:
    Path(file).write_text(FILE + PICTURES)
    cfg = load_config({"data": {"custom_cls": {"path": file, "name": "Pictures"}}})
    row = CustomDataset(cfg, vision_tokenizer, "validation")[0]
    image, text = row.prompt[0]["content"]
    assert image["image"].open().getpixel((0, 0)) == (255, 0, 0)
    assert (text["text"], "images" in row.env_extras) == ("0 + 1", False)
    with pytest.raises(
        DataError, match=r"row 0 of Pictures of .* has images in the column 'images', but .* reads only"
    ):
        CustomDataset(cfg, tiny_tokenizer, "validation")[0]


@pytest.mark.parametrize(
    ("config", "error", "words"),
    [
        ({"n": 0}, DataError, "no validation rows"),
        ({"n": -1}, ConfigError, "failed to construct data.custom_cls.name=Sums"),
        ({"bad": 0}, DataError, "cannot read row 0 of Sums of .*: .*no such sum"),
        ({"columns": {"raw_prompt": "text"}}, DataError, "row 0 of Sums .*not a list of messages"),
        ({"columns": {"env_class": 3}}, DataError, "env_class=3"),
    ],
)
def test_mistakes_of_a_class_are_named(file: str, config: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        custom(file, **config)[0]


def test_an_unknown_key_of_a_reward_function_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"custom_reward_function\.reward_kwargs"):
        parse_cli(["custom_reward_function.reward_kwargs={a:1}"])


def test_nested_options_reach_the_class_and_the_run_folder() -> None:
    name = "+data.custom_cls.config.adapter_config"
    paths = ["data.custom_cls.path=$HOME/x.py", "data.custom_cls.name=X", "custom_reward_function.path=r.py"]
    cfg = parse_cli([*paths, f"{name}.num_tasks_per_case=200", f"{name}.max_random_steps=5", "data.train_files=[]"])
    assert cfg.data.custom_cls.config == {"adapter_config": {"num_tasks_per_case": 200, "max_random_steps": 5}}
    assert cfg.environment.env_class == "reward_function"
    assert cfg.environment.skyrl_gym.env_config("reward_function") == {"path": "r.py", "name": "compute_score"}
    assert "$" not in str(cfg.data.custom_cls.path)
    assert load_config(yaml.safe_load(yaml.safe_dump(cfg.model_dump(mode="json")))) == cfg


def run(catch_run: list[str], file: str, *more: str) -> list[str]:
    rows = [argument for argument in catch_run if not argument.startswith(("data.", "generator.max_turns"))]
    return [
        *rows,
        *(f"data.custom_cls.path='{file}'", "data.custom_cls.name=Sums", f"custom_reward_function.path='{file}'"),
        *("trainer.algorithm.advantage_estimator=grpo", "generator.n_samples_per_prompt=2", "trainer.epochs=1"),
        *more,
    ]


def test_a_run_with_a_class_and_a_function(catch_run: list[str], file: str) -> None:
    arguments = run(catch_run, file)
    main(arguments)
    first, *steps = run_of(arguments).metrics
    assert first["eval/sums/avg_score"] > 0
    assert [step["generate/n_invalid"] for step in steps] == [0, 0]
    assert 1 <= steps[0]["environment/reward_function/truth"] <= 8


def test_rows_that_cannot_be_used_are_skipped_when_they_are_drawn(
    catch_run: list[str], file: str, caplog: pytest.LogCaptureFixture
) -> None:
    arguments = [argument for argument in run(catch_run, file) if "reward_function" not in argument]
    options = ["n=16", "bad=9", "unknown=11", "columns={env_class: gsm8k, reward_spec: {ground_truth: 3}}"]
    main([*arguments, *(f"+data.custom_cls.config.{option}" for option in options), "trainer.eval_interval=-1"])
    assert "Skipped: cannot read row 9 of Sums" in caplog.text
    assert "Skipped: row 11 of Sums" in caplog.text
    assert "env_class=kaboom" in caplog.text
    last = run_of(arguments).metrics[-1]
    assert (last["step"], last["data/n_skipped"], last.get("generate/n_invalid", 0)) == (4, 2, 0)


def test_errors_of_a_function_are_counted_and_are_no_rewards(catch_run: list[str], file: str) -> None:
    arguments = run(catch_run, file, "custom_reward_function.name=sometimes", "trainer.eval_interval=-1")
    main(arguments)
    _, *steps = run_of(arguments).metrics
    assert sum(step.get("generate/n_invalid/env_error", 0) for step in steps) == 2  # samples of one sum
    assert all(step["reward/avg_raw_reward"] == 1 for step in steps)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("data.custom_cls.name=Summs", ["data.custom_cls.name=Summs", "Did you mean 'Sums'"]),
        ("custom_reward_function.name=score", ["has no attribute 'score'", "compute_score"]),
        ("+data.custom_cls.config.columns={env_class: aime}", ["env_class=aime", "custom_reward_function"]),
    ],
)
def test_missing_parts_are_named_before_models_are_loaded(
    catch_run: list[str], file: str, tmp_path: Path, change: str, words: list[str]
) -> None:
    arguments = run(catch_run, file, change)
    for message in (expect_error(*arguments), expect_error(*arguments, "--dry-run")):
        assert all(word in message for word in words), message
    assert not (tmp_path / "skyrl/test_run/metrics.jsonl").exists()
