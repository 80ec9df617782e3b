"""Memory that merges take."""

from pathlib import Path

import pytest
import torch
from train_kit.merges import save_adapter
from train_kit.processes import run_python
from train_kit.workers import SingleRankGroup, config
from transformers import Qwen3Config, Qwen3ForCausalLM

MEASURE = """
import re
from pathlib import Path
from skyrl_train.checkpoint import merge

def read_peak():
    return int(re.search(r"VmHWM:\\s+([0-9]+)", Path("/proc/self/status").read_text())[1]) * 1024

Path("/proc/self/clear_refs").write_text("5")  # resets the peak
before = read_peak()
merge.{call}
print(read_peak() - before)
"""
"""Prints the memory that a merge takes, with the pages of files that it maps. `ru_maxrss` starts at pytest's peak."""

N_MODELS = {"adapter": 1.3, "average": 1.3, "checkpoint": 2.1}
"""Memory that each kind of merge may take, in sizes of the model. Pages of libraries take up to 180 MB more."""


@pytest.mark.parametrize("kind", ["adapter", pytest.param("checkpoint", marks=pytest.mark.nightly), "average"])
@pytest.mark.parametrize("n_layers", [2, pytest.param(72, marks=pytest.mark.nightly)])
def test_a_merge_takes_little_more_memory_than_the_models_it_loads(tmp_path: Path, kind: str, n_layers: int) -> None:
    """Models of 48 million and 1.1 billion parameters. The merged model is loaded to compare its logits."""
    shape = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": n_layers, "vocab_size": 16_000}
    shape |= {"num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 64}
    model = Qwen3ForCausalLM(Qwen3Config(**shape, tie_word_embeddings=True))
    n_bytes, target = 4 * model.num_parameters(), f"Path({str(tmp_path / 'merged')!r})"
    assert round(model.num_parameters() / 1e6) == (48 if n_layers == 2 else 1149)
    if kind == "adapter":
        model.save_pretrained(tmp_path / "base")
        call = f"merge_adapter({str(save_adapter(tmp_path / 'adapter', tmp_path / 'base', r=8))!r}, {target})"
    elif kind == "checkpoint":
        model.save_pretrained(tmp_path / "base")
        model.config.name_or_path = str(tmp_path / "base")  # which is compared with the checkpoint
        torch.nn.init.normal_(model.get_parameter("model.norm.weight"))
        SingleRankGroup("ref", model, config().trainer, None).save(tmp_path / "step/policy")
        call = f"merge_checkpoint(Path({str(tmp_path / 'step')!r}), {target})"
    else:
        for name in ("one", "other"):
            model.save_pretrained(tmp_path / name)
            torch.nn.init.normal_(model.get_parameter("model.norm.weight"))
        call = f"average_models([{str(tmp_path / 'one')!r}, {str(tmp_path / 'other')!r}], {target})"
    del model
    peak = int(run_python("-c", MEASURE.format(call=call)).split()[-1])
    assert peak < N_MODELS[kind] * n_bytes + 180e6, f"{peak:,} of {n_bytes:,}"
    assert (tmp_path / "merged/config.json").is_file()
