import copy
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
from safetensors.torch import load_file, save_file
from train_kit.merges import TOLERANCES, copy_folder, logits, logits_in, save_adapter, save_base
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from skyrl_train.checkpoint import model_folder
from skyrl_train.checkpoint.durable import folder_lock
from skyrl_train.checkpoint.merge import adapter as adapter_merge
from skyrl_train.checkpoint.merge import merge_adapter
from skyrl_train.entrypoints.cli import main
from skyrl_train.errors import CheckpointError, ConfigError
from skyrl_train.plan.forecast import count_parameters

pytestmark = pytest.mark.usefixtures("frozen_objects")  # a merge collects garbage


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_base(tmp_path_factory.mktemp("shared") / "base")


@pytest.fixture(scope="module")
def adapter(base: Path) -> Path:
    return save_adapter(base.with_name("adapter"), base)


@pytest.mark.parametrize(
    ("is_tied", "saved", "merged", "rank", "use_rslora", "targets", "shard_bytes"),
    [
        (False, "float32", "auto", 4, False, "all-linear", 10**9),
        (True, "bfloat16", "auto", 1, True, ["q_proj", "down_proj"], 10**9),
        (True, "float32", "bfloat16", 9, False, r".*layers\.1\.mlp\..*_proj", 5_000),
        (False, "bfloat16", "float32", 4, True, "all-linear", 5_000),
        pytest.param(False, "float32", "float32", 3, True, ["q_proj"], 5_000, marks=pytest.mark.nightly),
        pytest.param(True, "bfloat16", "bfloat16", 2, False, "all-linear", 5_000, marks=pytest.mark.nightly),
    ],
)
def test_a_merged_adapter_has_the_logits_of_the_adapter_on_its_base(
    tmp_path: Path,
    is_tied: bool,
    saved: str,
    merged: Any,
    rank: int,
    use_rslora: bool,
    targets: str | list[str],
    shard_bytes: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    base = save_base(tmp_path / "base", is_tied=is_tied, dtype=saved)
    adapter = save_adapter(tmp_path / "adapter", base, r=rank, use_rslora=use_rslora, target_modules=targets)
    monkeypatch.setattr(model_folder, "SHARD_BYTES", shard_bytes)
    report = merge_adapter(str(adapter), tmp_path / "merged", dtype=merged)
    dtype = saved if merged == "auto" else merged
    assert report.logit_gap < TOLERANCES[dtype]
    expected = logits(peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), str(adapter)))
    result = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    tolerance = max(TOLERANCES[dtype], TOLERANCES[saved])
    assert (logits(result) - expected).norm() < tolerance * expected.norm()
    assert (logits_in(base) - expected).norm() > 10 * TOLERANCES["float32"] * expected.norm()
    assert {str(parameter.dtype) for parameter in result.parameters()} == {f"torch.{dtype}"}
    assert report.n_changed == sum("lora_A" in name for name in load_file(adapter / "adapter_model.safetensors"))
    assert report.n_tensors == len(load_file(base / "model.safetensors"))
    if merged == "auto":
        assert (tmp_path / "merged/config.json").read_bytes() == (base / "config.json").read_bytes()
    assert (len(list((tmp_path / "merged").glob("*.safetensors"))) == 1) == (shard_bytes > 5_000)
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]


def test_every_linear_architecture_can_be_merged(other_model: PreTrainedModel, tmp_path: Path) -> None:
    other_model.save_pretrained(tmp_path / "base")
    adapter = save_adapter(tmp_path / "adapter", tmp_path / "base")
    assert merge_adapter(str(adapter), tmp_path / "merged").logit_gap < 1e-5


def test_an_adapter_of_a_tied_head_is_refused(tmp_path: Path) -> None:
    """The base's files have no matrix that it could change."""
    base = save_base(tmp_path / "base", is_tied=True)
    adapter = save_adapter(tmp_path / "adapter", base, target_modules=["lm_head"])
    file = adapter / "adapter_model.safetensors"
    tensors = load_file(file)
    without_copy = {name: tensor for name, tensor in tensors.items() if "base_layer" not in name}
    assert len(without_copy) < len(tensors)
    for kept in (tensors, without_copy):
        save_file(kept, file)
        with pytest.raises(ConfigError, match=r"base lacks lm_head\.weight, which the adapter .* needs"):
            merge_adapter(str(adapter), tmp_path / "merged")


def test_foreign_files_and_copies_beside_the_base_are_left_alone(adapter: Path, base: Path, tmp_path: Path) -> None:
    shutil.copytree(base, tmp_path / "base")
    weights = load_file(base / "model.safetensors")
    renamed = {name.replace("model.layers", "layers") + "_": weight for name, weight in weights.items()}
    save_file(renamed, tmp_path / "base/consolidated.safetensors")  # Mistral's second copy
    save_file({name: weight * 0 for name, weight in weights.items()}, tmp_path / "base/model.old.safetensors")
    merge_adapter(str(adapter), tmp_path / "merged", base=str(tmp_path / "base"))
    merge_adapter(str(adapter), tmp_path / "expected", base=str(base))
    assert (tmp_path / "merged/model.safetensors").read_bytes() == (
        tmp_path / "expected/model.safetensors"
    ).read_bytes()
    assert [file.name for file in (tmp_path / "merged").glob("*.safetensors")] == ["model.safetensors"]
    assert count_parameters(str(tmp_path / "base")) == count_parameters(str(base))


def test_a_merged_model_has_the_tokenizer_of_its_adapter_as_a_whole(
    adapter: Path, base: Path, tiny_tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    for name, source, template in (("base", base, "base: {{ messages }}"), ("adapter", adapter, "{{ messages }}")):
        shutil.copytree(source, tmp_path / name)
        tokenizer = copy.deepcopy(tiny_tokenizer)
        tokenizer.chat_template = {"default": template, "tool_use": f"{name}'s tools"}
        tokenizer.save_pretrained(tmp_path / name)
    (tmp_path / "base/vocab.txt").touch()  # of the base's tokenizer
    (tmp_path / "base/generation_config.json").write_text('{"top_k": 7, "eos_token_id": 5}')
    (tmp_path / "adapter/trainer_state.json").touch()  # neither settings nor tokenizer
    merge_adapter(str(tmp_path / "adapter"), tmp_path / "merged", base=str(tmp_path / "base"))
    files = {file.relative_to(tmp_path / "merged").as_posix() for file in (tmp_path / "merged").rglob("*")}
    settings = json.loads((tmp_path / "merged/generation_config.json").read_text())
    assert settings == {"top_k": 7, "eos_token_id": [5, tiny_tokenizer.eos_token_id]}
    assert not files & {"vocab.txt", "trainer_state.json", "adapter_config.json"}
    merged = AutoTokenizer.from_pretrained(tmp_path / "merged").chat_template
    assert merged == {"default": "{{ messages }}", "tool_use": "adapter's tools"}


def test_a_merged_model_that_lacks_a_tensor_is_refused(base: Path, adapter: Path, tmp_path: Path) -> None:
    incomplete = copy_folder(base, tmp_path / "base")
    tensors = load_file(base / "model.safetensors")
    tensors.pop("model.norm.weight")
    save_file(tensors, incomplete / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"the merged model lacks 1 tensors, among them model\.norm\.weight"):
        merge_adapter(str(adapter), tmp_path / "merged", base=str(incomplete))
    assert not (tmp_path / "merged").exists()


def change_settings(adapter: Path, **settings: Any) -> None:
    file = adapter / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | settings))


def break_verification(base: Path, adapter: Path, patch: pytest.MonkeyPatch) -> None:
    def scale(source: Any, *others: Any) -> Any:
        others[-1].n_changed = 1
        for spec in source.specs:
            yield spec.name, source.read(spec.name) * 1.01

    patch.setattr(adapter_merge, "_apply_changes", scale)


def change_base(base: Path, adapter: Path, patch: pytest.MonkeyPatch) -> None:
    save_adapter(adapter, save_base(base.with_name("wide"), hidden_size=64))
    change_settings(adapter, base_model_name_or_path=str(base))


def truncate_weights(base: Path, adapter: Path, patch: pytest.MonkeyPatch) -> None:
    (base / "model.safetensors").write_bytes((base / "model.safetensors").read_bytes()[:500])


@pytest.mark.parametrize(
    ("harm", "message"),
    [
        (break_verification, "nothing was written, because the merged model's logits differ from"),
        (
            lambda base, adapter, patch: patch.setattr(
                model_folder.shutil, "disk_usage", lambda _: model_folder.shutil._ntuple_diskusage(10, 10, 0)
            ),
            "failed to write .*: [0-9,]+ bytes are needed, but only 0 are free",
        ),
        (
            lambda base, adapter, patch: change_settings(adapter, lora_alpha=0),
            "would change none of the 25 tensors of .*: its alpha is 0",
        ),
        (
            lambda base, adapter, patch: save_adapter(adapter, base, scale=0.0),
            "would change none of the 25 tensors of .*: B·A is 0",
        ),
        (change_base, "does not fit"),
        (
            lambda base, adapter, patch: change_settings(adapter, base_model_name_or_path=None),
            "does not say which base model it belongs to; pass it with --base",
        ),
        (lambda base, adapter, patch: (base / "model.safetensors").unlink(), "has no .*safetensors; save the model"),
        (truncate_weights, "cannot read .*model.safetensors"),
    ],
    ids=["wrong logits", "full disk", "alpha 0", "B 0", "other base", "no base", "no weights", "cut weights"],
)
def test_nothing_is_left_of_a_merge_that_fails(
    base: Path,
    adapter: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    harm: Callable[[Path, Path, pytest.MonkeyPatch], object],
    message: str,
) -> None:
    base, adapter = copy_folder(base, tmp_path / "base"), copy_folder(adapter, tmp_path / "adapter")
    change_settings(adapter, base_model_name_or_path=str(base))
    harm(base, adapter, monkeypatch)
    with pytest.raises((CheckpointError, ConfigError), match=message):
        merge_adapter(str(adapter), tmp_path / "out/merged")
    assert not list((tmp_path / "out").glob(".*"))
    assert not (tmp_path / "out/merged").exists()


def test_a_folder_belongs_to_one_merge(adapter: Path, tmp_path: Path) -> None:
    (tmp_path / ".merged.partial/left").mkdir(parents=True)  # by a process that was killed
    (tmp_path / ".merged.partial/model.safetensors").write_text("half")
    with folder_lock(tmp_path / ".merged.partial", ""), pytest.raises(ConfigError, match="is in use by process"):
        merge_adapter(str(adapter), tmp_path / "merged")
    merge_adapter(str(adapter), tmp_path / "merged")
    assert not (tmp_path / ".merged.partial").exists()
    assert not {path.name for path in (tmp_path / "merged").iterdir()} & {"left", ".lock"}
    before = (tmp_path / "merged/model.safetensors").stat().st_mtime_ns
    with pytest.raises(ConfigError, match="merged already exists; choose a new folder"):
        merge_adapter(str(adapter), tmp_path / "merged")
    assert (tmp_path / "merged/model.safetensors").stat().st_mtime_ns == before


def test_the_command(base: Path, adapter: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    merged = str(tmp_path / "merged")
    assert main(["merge", "adapter", str(adapter), merged]) == 0
    assert "25 tensors, 14 of them changed; the logits differ from the sources by" in capsys.readouterr().out
    assert main(["merge", "average", str(base), merged, str(tmp_path / "mean"), "--dtype=bfloat16"]) == 0
    assert main(["merge", "average", str(base), str(base), str(tmp_path / "same")]) == 1
    assert main(["merge", "checkpoint", str(base), str(tmp_path / "same"), "--role=actor"]) == 1
    errors = capsys.readouterr().err
    assert "error: the average of" in errors
    assert "error: --role=actor must be one of policy, critic, reward" in errors
