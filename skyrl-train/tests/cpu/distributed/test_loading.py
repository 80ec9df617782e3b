"""Loading on several ranks: each reads its shards alone, and models that cannot be read so are loaded whole."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from train_kit.models import load_on_cpu
from train_kit.ranks import close, load_group, spec
from train_kit.workers import config
from transformers import AutoModelForCausalLM, AutoModelForTokenClassification, PreTrainedTokenizerBase

from skyrl_train.entrypoints.tiny import tiny_qwen3
from skyrl_train.errors import ConfigError
from skyrl_train.launch.process import start_ranks as start_real_ranks
from skyrl_train.models.deferred import create_without_weights, deferring
from skyrl_train.types.specs import ModelSpec


def frozen(path: Path) -> ModelSpec:
    """Return the spec of a frozen model in float32."""
    return replace(spec("ref", path, config().trainer), optimizer=None)


def peak_bytes(pid: int) -> int:
    """Return the largest resident memory that a process has had."""
    (line,) = (x for x in Path(f"/proc/{pid}/status").read_text().splitlines() if x.startswith("VmHWM"))
    return int(line.split()[1]) * 1024


@pytest.mark.nightly
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs Linux's counters of memory")
async def test_no_rank_ever_holds_the_whole_model(
    tiny_model_path: Path, tiny_tokenizer: PreTrainedTokenizerBase, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MALLOC_MMAP_THRESHOLD_", "131072")  # freed memory is returned at once
    model = tiny_qwen3(tiny_tokenizer, seed=0, hidden_size=512, head_dim=64, n_layers=24)
    model.save_pretrained(tmp_path / "model", max_shard_size="50MB")
    n_bytes = sum(file.stat().st_size for file in (tmp_path / "model").glob("*.safetensors"))
    assert n_bytes > 300e6
    peaks = {}
    for n_ranks in (1, 2):
        ranks = start_real_ranks(n_ranks)
        await load_group(ranks, frozen(tiny_model_path))  # imports
        before = [peak_bytes(rank._process.pid or 0) for rank in ranks]
        await load_group(ranks, frozen(tmp_path / "model"))
        peaks[n_ranks] = max(peak_bytes(rank._process.pid or 0) - n for rank, n in zip(ranks, before, strict=True))
        await close(ranks)
    assert peaks[1] > 0.9 * n_bytes, "the counter does not see the weights"
    assert peaks[2] < 0.7 * n_bytes, f"{peaks[2] / n_bytes:.2f} of the model"


def create(path: Path) -> torch.nn.Module | None:
    return create_without_weights(AutoModelForCausalLM, f"key={path}", str(path), torch.float32)


def test_parts_of_tensors_are_those_of_the_files(tiny_model_path: Path) -> None:
    with deferring() as weights:
        model = create(tiny_model_path)
    expected = AutoModelForCausalLM.from_pretrained(tiny_model_path, dtype=torch.float32).state_dict()
    for name, parameter in model.named_parameters():
        for first in (0, 1, len(parameter) - 1):
            part = torch.full_like(parameter[first:], torch.nan)
            weights.read(name, part, (first, *(0,) * (parameter.ndim - 1)))
            assert torch.equal(part, expected[name][first:]), name


def test_a_critic_without_a_value_head_starts_with_zeros(tiny_model_path: Path) -> None:
    with deferring() as weights:
        critic = create_without_weights(
            AutoModelForTokenClassification, "key", str(tiny_model_path), torch.float32, optional="score.", num_labels=1
        )
    head = torch.full_like(critic.score.weight, torch.nan)
    weights.read("score.weight", head, (0, 0))
    assert not head.any()


def test_other_models_are_loaded_whole(tiny_model_path: Path, tmp_path: Path) -> None:
    assert create(tiny_model_path) is None, "nothing asks for it"
    AutoModelForCausalLM.from_pretrained(tiny_model_path).save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["model.norm.weight"]
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with deferring() as weights:
        assert create(tmp_path) is None, "a tensor is missing"
        (tmp_path / "model.safetensors").write_bytes(b"")
        assert create(tmp_path) is None, "the file is broken"
        assert create(tmp_path / "nowhere") is None
        with pytest.raises(ConfigError, match="cannot load the model"):
            load_on_cpu(tmp_path)
    assert weights.source is None
