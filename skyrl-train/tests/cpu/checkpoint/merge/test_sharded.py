from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from train_kit.merges import TOLERANCES, logits, logits_in, save_base, save_experts, train_and_save
from train_kit.models import ROUTER_BIAS, load_on_cpu, save_biased_router
from train_kit.workers import complete, make_worker
from transformers import PreTrainedTokenizerBase

from skyrl_train.checkpoint.manifest import write_manifest
from skyrl_train.checkpoint.merge import merge_checkpoint
from skyrl_train.entrypoints.cli import main
from skyrl_train.errors import CheckpointError, ConfigError

pytestmark = pytest.mark.usefixtures("frozen_objects")  # a merge collects garbage

ATTENTION_LORA = {"rank": 4, "target_modules": ["q_proj", "v_proj"]}


@pytest.mark.parametrize(
    ("is_tied", "lora", "saved"),
    [(False, {}, "float32"), (True, {"rank": 4}, "float32"), (True, {}, "bfloat16"), (False, {"rank": 4}, "bfloat16")],
)
def test_a_checkpoint_becomes_the_model_that_was_trained(
    tmp_path: Path, tiny_tokenizer: PreTrainedTokenizerBase, is_tied: bool, lora: dict[str, Any], saved: str
) -> None:
    base = save_base(tmp_path / "base", is_tied=is_tied, dtype=saved)
    model, _ = train_and_save(tmp_path / "step", base, tiny_tokenizer, **lora)
    report = merge_checkpoint(tmp_path / "step", tmp_path / "merged", dtype="float32")
    assert (logits_in(tmp_path / "merged") - logits_in(base)).abs().max() > 1e-2
    torch.testing.assert_close(logits_in(tmp_path / "merged"), logits(model), rtol=1e-5, atol=1e-5)
    assert report.n_tensors == len(load_file(base / "model.safetensors"))
    assert (tmp_path / "merged/tokenizer.json").exists()
    assert (tmp_path / "merged/generation_config.json").exists()
    assert (tmp_path / "merged/lora_adapter").exists() == bool(lora)


def test_files_may_hold_a_copy_of_a_tied_head(tmp_path: Path, tiny_tokenizer: PreTrainedTokenizerBase) -> None:
    """Published models such as Qwen3-0.6B store the head beside the embeddings that it shares its weight with."""
    base = save_base(tmp_path / "base", is_tied=True)
    tensors = load_file(base / "model.safetensors")
    save_file(tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"].clone()}, base / "model.safetensors")
    model, _ = train_and_save(tmp_path / "step", base, tiny_tokenizer, rank=4)
    merge_checkpoint(tmp_path / "step", tmp_path / "merged", dtype="float32")
    torch.testing.assert_close(logits_in(tmp_path / "merged"), logits(model), rtol=1e-5, atol=1e-5)


def test_the_adapter_of_a_mixture_of_experts_is_merged_into_the_base_that_was_trained(
    tmp_path: Path, tiny_tokenizer: PreTrainedTokenizerBase
) -> None:
    base, other = (save_experts(tmp_path / str(seed), seed=seed) for seed in range(2))
    model, _ = train_and_save(tmp_path / "step", base, tiny_tokenizer, **ATTENTION_LORA)
    merge_checkpoint(tmp_path / "step", tmp_path / "merged")
    torch.testing.assert_close(logits_in(tmp_path / "merged"), logits(model), rtol=1e-5, atol=1e-5)
    with pytest.raises(CheckpointError, match="trained on weights that differ"):
        merge_checkpoint(tmp_path / "step", tmp_path / "again", base=str(other))


@pytest.mark.parametrize(("lora", "dtype"), [({}, "float32"), (ATTENTION_LORA | {"merge_on_export": True}, "bfloat16")])
def test_buffers_are_exported_and_merged(
    tmp_path: Path, tiny_tokenizer: PreTrainedTokenizerBase, lora: dict[str, Any], dtype: str
) -> None:
    base = save_biased_router(tmp_path / "base")
    model, worker = train_and_save(tmp_path / "step", base, tiny_tokenizer, dtype=dtype, **lora)
    complete(worker.group.export(tmp_path / "export"))
    assert merge_checkpoint(tmp_path / "step", tmp_path / "merged").logit_gap < TOLERANCES[dtype]
    files = [load_file(tmp_path / name / "model.safetensors") for name in ("base", "export", "merged")]
    assert files[0].keys() == files[1].keys() == files[2].keys()
    for tensors in files:
        assert torch.equal(tensors[ROUTER_BIAS], model.get_buffer(ROUTER_BIAS))


@pytest.mark.parametrize("dtype", [pytest.param("float32", marks=pytest.mark.nightly), "bfloat16"])
def test_a_checkpoint_of_an_untrained_model_is_refused(
    tmp_path: Path, tiny_tokenizer: PreTrainedTokenizerBase, capsys: pytest.CaptureFixture[str], dtype: str
) -> None:
    """Weights that were only rounded when the run started are untrained."""
    base = save_base(tmp_path / "base")
    model = load_on_cpu(base, dtype=getattr(torch, dtype))
    make_worker(model, tokenizer=tiny_tokenizer, policy={"model": {"path": str(base)}}).save(tmp_path / "step/policy")
    command = ["merge", "checkpoint", str(tmp_path / "step")]
    assert main([*command, str(tmp_path / "merged")]) == 1
    assert f"has the same weights as {base}, the model its run started from" in capsys.readouterr().err
    assert not list(tmp_path.glob("*merged*"))
    assert main([*command, str(tmp_path / "merged"), "--allow-unchanged"]) == 0
    assert "25 tensors, 0 of them changed" in capsys.readouterr().out
    assert {str(one.dtype) for one in load_file(tmp_path / "merged/model.safetensors").values()} == {f"torch.{dtype}"}
    base.rename(tmp_path / "moved")
    assert main([*command, str(tmp_path / "copy")]) == 0
    assert "25 tensors, not compared with the base" in capsys.readouterr().out
    assert main([*command, str(tmp_path / "other"), "--base", str(tmp_path / "moved")]) == 1
    assert f"has the same weights as {tmp_path / 'moved'}" in capsys.readouterr().err


def test_the_base_of_a_checkpoint_must_be_the_one_that_was_trained(
    tmp_path: Path, tiny_tokenizer: PreTrainedTokenizerBase
) -> None:
    base, other = save_base(tmp_path / "base"), save_base(tmp_path / "other", seed=1)
    train_and_save(tmp_path / "step", base, tiny_tokenizer, rank=4)
    with pytest.raises(CheckpointError, match=r"trained on weights that differ from .*other .*--base"):
        merge_checkpoint(tmp_path / "step", tmp_path / "merged", base=str(other))
    base.rename(tmp_path / "moved")
    with pytest.raises(ConfigError, match=r"there is no model .*base"):
        merge_checkpoint(tmp_path / "step", tmp_path / "merged")
    merge_checkpoint(tmp_path / "step/policy", tmp_path / "merged", base=str(tmp_path / "moved"))


def test_a_damaged_checkpoint_is_refused(tmp_path: Path, tiny_tokenizer: PreTrainedTokenizerBase) -> None:
    step = tmp_path / "ckpts/global_step_2"
    train_and_save(step, save_base(tmp_path / "base"), tiny_tokenizer)
    write_manifest(step)
    (tmp_path / "ckpts/latest_ckpt_global_step.txt").write_text("2\n")
    merge_checkpoint(tmp_path / "ckpts", tmp_path / "merged")
    file = step / "policy/__0_0.distcp"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match=r"__0_0.distcp has [\d,]+ bytes instead of"):
        merge_checkpoint(tmp_path / "ckpts", tmp_path / "again")
    with pytest.raises(CheckpointError, match="has no critic checkpoint"):
        merge_checkpoint(tmp_path / "ckpts", tmp_path / "again", role="critic")
    (step / "checksums.json").unlink()
    with pytest.raises(ConfigError, match="there is no model x"):
        merge_checkpoint(tmp_path / "ckpts", tmp_path / "again", base="x")
