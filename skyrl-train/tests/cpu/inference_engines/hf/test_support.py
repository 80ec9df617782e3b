from pathlib import Path
from typing import Any

import pytest
from train_kit.architectures import ARCHITECTURES, stated, tiny_config
from train_kit.models import create_model, load_on_cpu
from transformers import PreTrainedTokenizerBase
from transformers.cache_utils import DynamicSlidingWindowLayer

from skyrl_train.errors import EngineError
from skyrl_train.inference_engines.hf import attention
from skyrl_train.inference_engines.hf.support import check_cache, check_supported
from skyrl_train.models.attributes import WINDOWS, with_attribute
from skyrl_train.models.prefix_sharing import AttentionCall, find_sharing_fault

WINDOWED = [name for name, sizes in ARCHITECTURES.items() if sizes.keys() & set(WINDOWS)]


@pytest.mark.parametrize("name", WINDOWED)
def test_an_engine_that_forgets_a_window_of_4096_tokens_is_rejected(
    name: str, tmp_path: Path, tiny_tokenizer: PreTrainedTokenizerBase, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tiny_config(name, tiny_tokenizer)
    config.update({field: 4096 for field in WINDOWS if getattr(config, field, None)})
    create_model(config).save_pretrained(tmp_path)
    model, is_packed, is_padded = load_on_cpu(tmp_path), stated()[name]["engine"] == "packed", name != "llama4_text"
    assert check_cache(model, False, is_padded=is_padded)
    if is_packed:
        check_supported(model, False)
        assert find_sharing_fault(model) is None

    update, mask, attend = DynamicSlidingWindowLayer.update, AttentionCall.mask, attention._attend

    def keep_all(layer: DynamicSlidingWindowLayer, *args: Any) -> Any:
        with with_attribute([layer], "sliding_window", 10**6):
            return update(layer, *args)

    monkeypatch.setattr(DynamicSlidingWindowLayer, "update", keep_all)
    monkeypatch.setattr(AttentionCall, "mask", lambda call, _, dtype: mask(call, None, dtype))
    monkeypatch.setattr(attention, "_attend", lambda *args: attend(*args[:-1], None))
    with pytest.raises(EngineError, match="the embedded engine cannot run"):
        check_cache(model, False, is_padded=is_padded)
    if is_packed:
        with pytest.raises(EngineError, match="cannot be packed"):
            check_supported(model, False)
        assert "would change its hidden states" in str(find_sharing_fault(model))
