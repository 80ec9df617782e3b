"""Weights that vLLM can and cannot receive."""

from collections.abc import Callable

import pytest
import torch
from train_kit.architectures import stated, tiny_config
from train_kit.engines import EngineKit, distance
from train_kit.weight_sync import NamedTensors, TensorSource, sync_weights
from transformers import (
    CohereConfig,
    Gemma2Config,
    GPT2Config,
    GraniteConfig,
    LlamaConfig,
    MixtralConfig,
    OlmoeConfig,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    Qwen2Config,
    Qwen2MoeConfig,
    Qwen3MoeConfig,
)

from skyrl_train.errors import EngineError
from skyrl_train.inference_engines.base import EngineRequest, SamplingParams
from skyrl_train.inference_engines.vllm.engine import VLLMEngine
from skyrl_train.weight_sync import SyncOptions, WeightSync

NewEngine = Callable[..., VLLMEngine]
Start = Callable[[PretrainedConfig], tuple[VLLMEngine, EngineKit]]

SMALL = {
    "vocab_size": 488,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2}
ARCHITECTURES = {
    "llama": LlamaConfig(**SMALL, tie_word_embeddings=True),
    "qwen2": Qwen2Config(**SMALL),
    "gemma2": Gemma2Config(
        **SMALL, head_dim=32, final_logit_softcapping=2.0, attn_logit_softcapping=None, sliding_window=64
    ),
    "granite": GraniteConfig(**SMALL, logits_scaling=3.0, embedding_multiplier=2.0),
    "cohere": CohereConfig(**SMALL, logit_scale=0.25),
    "qwen3_moe": Qwen3MoeConfig(**SMALL, **EXPERTS, head_dim=32, moe_intermediate_size=48),  # 48 is padded on a CPU
    "qwen2_moe": Qwen2MoeConfig(**SMALL, **EXPERTS, moe_intermediate_size=32, shared_expert_intermediate_size=64),
    "olmoe": OlmoeConfig(**SMALL, **EXPERTS),
    "gpt2": GPT2Config(vocab_size=488, n_embd=64, n_layer=2, n_head=2, n_positions=256, initializer_range=0.2),
}


@pytest.mark.parametrize("name", ARCHITECTURES)
async def test_weights_of_other_architectures_are_received(start: Start, name: str) -> None:
    engine, kit = start(ARCHITECTURES[name])
    assert await distance(engine, kit) < 1e-4
    for version in (1, 2):
        kit.add_noise(seed=version)
        assert await distance(engine, kit) > 1e-2
        await kit.sync(engine, version)
        assert await distance(engine, kit) < 1e-4


@pytest.mark.nightly
@pytest.mark.parametrize("name", [name for name, cells in stated().items() if cells["vLLM"] in ("yes", "no")])
async def test_each_architecture_receives_weights_as_the_page_says(
    start: Start, tiny_tokenizer: PreTrainedTokenizerBase, name: str
) -> None:
    """Where the page says no, the sync fails, or the check after it finds other log-probs."""
    wide = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 2, "num_key_value_heads": 1}
    engine, kit = start(tiny_config(name, tiny_tokenizer, **wide, head_dim=32))
    assert await distance(engine, kit) < 1e-4
    kit.add_noise(seed=1)
    try:
        await kit.sync(engine, 1)
        has_weights = await distance(engine, kit) < 2e-4
    except EngineError:
        has_weights = False
    assert has_weights == (stated()[name]["vLLM"] == "yes")


async def test_a_tied_head_may_be_sent_as_well(start: Start) -> None:
    engine, kit = start(ARCHITECTURES["llama"])
    assert "lm_head.weight" in kit.model.state_dict().keys() - dict(kit.model.named_parameters()).keys()
    kit.add_noise()
    await sync_weights(engine, lambda: kit.model.state_dict().items(), 1)
    assert await distance(engine, kit) < 1e-4


async def test_experts_whose_weights_have_other_names_are_refused_in_the_first_sync(start: Start) -> None:
    engine, kit = start(MixtralConfig(**SMALL, num_local_experts=4))
    with pytest.raises(EngineError, match=r"cannot take over the policy's weights: .*'layers\.0\.mlp' in Mixtral"):
        await kit.sync(engine, 0)
    assert await distance(engine, kit) < 1e-4  # it still has its own


async def test_a_policy_in_float32_sends_bfloat16_to_an_engine_in_bfloat16(
    new_engine: NewEngine, policy: PreTrainedModel, tiny_tokenizer: PreTrainedTokenizerBase
) -> None:
    engine = new_engine(dtype="bfloat16")
    assert engine.info.weight_dtype == torch.bfloat16
    kit = EngineKit(new_engine, policy, tiny_tokenizer, 1e-4, 32, "shared")
    kit.add_noise()
    request = kit.request(40, 20, temperature=0.8, ignore_eos=True)
    await kit.sync(engine, 1)
    (expected,) = await engine.generate([request])
    assert await distance(engine, kit) < 0.1
    source, options = TensorSource(policy.named_parameters), SyncOptions("gloo", timeout_s=20.0)
    sync = WeightSync(source, {"the engine": engine}, options, dtype=engine.info.weight_dtype)
    metrics = (await sync(2)).numbers()
    assert metrics["sync/megabytes"] == pytest.approx(2 * policy.num_parameters() / 1e6, rel=0.01)
    (result,) = await engine.generate([request])
    assert (result.token_ids, result.logprobs) == (expected.token_ids, expected.logprobs), "other weights"


async def test_a_layer_that_arrives_in_several_pieces_is_complete(
    new_engine: NewEngine, policy: PreTrainedModel, tiny_tokenizer: PreTrainedTokenizerBase
) -> None:
    engine = new_engine()
    kit = EngineKit(new_engine, policy, tiny_tokenizer, 1e-4, 32)
    kit.add_noise()
    options = SyncOptions("shared_memory", chunk_bytes=20_000, timeout_s=20.0)
    await WeightSync(TensorSource(policy.named_parameters), {"the engine": engine}, options)(1)
    assert await distance(engine, kit) < 1e-4


async def test_a_missing_tensor_is_named(new_engine: NewEngine, policy: PreTrainedModel) -> None:
    def weights() -> NamedTensors:
        yield from ((name, tensor) for name, tensor in policy.named_parameters() if "layers.1.mlp" not in name)

    engine = new_engine()
    message = r"no tensor for model\.layers\.1\.mlp\.down_proj\.weight and 1 other"
    with pytest.raises(EngineError, match=message):
        await sync_weights(engine, weights, 1)


async def test_an_unknown_tensor_is_an_error(new_engine: NewEngine, policy: PreTrainedModel) -> None:
    names = {"model.norm.weight": "model.standard.weight"}

    def weights() -> NamedTensors:
        yield from ((names.get(name, name), tensor) for name, tensor in policy.named_parameters())

    engine = new_engine()
    with pytest.raises(EngineError, match=r"cannot take over the policy's weights: .*standard"):
        await sync_weights(engine, weights, 1)
    names.clear()
    await sync_weights(engine, weights, 1)
    request = EngineRequest([5, 6, 7], SamplingParams(4, ignore_eos=True), seed=0)
    (result,) = await engine.generate([request])
    assert result.weight_spans == ((1, 4),)
