"""Tiny vision-language models with their tokenizers and image processors."""

import io
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from PIL import Image
from transformers import AutoModelForImageTextToText, AutoProcessor, AutoTokenizer, PreTrainedTokenizerBase

from skyrl_train.entrypoints.tiny import DEFAULT_TEXT, train_tokenizer

TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' }}"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}IMAGE{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}"
    "{{ '<|im_end|>\\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
"""ChatML. `IMAGE` stands for the family's placeholder."""

TEXT: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 2048,
    "initializer_range": 0.2,
    "bos_token_id": None,
}


def _tokenizer(image: str, tokens: list[str]) -> PreTrainedTokenizerBase:
    tokenizer = train_tokenizer([DEFAULT_TEXT])
    tokenizer.add_special_tokens({"additional_special_tokens": tokens})
    tokenizer.chat_template = TEMPLATE.replace("IMAGE", image)
    return tokenizer


def _text(tokenizer: PreTrainedTokenizerBase, **more: Any) -> dict[str, Any]:
    ids = {"vocab_size": len(tokenizer), "eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    return TEXT | ids | more


def _idefics3(image_size: int = 32) -> tuple[Any, Any]:
    from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil

    tokenizer = _tokenizer("<image>", ["<image>", "<fake_token_around_image>", "<global-img>", "<end_of_utterance>"])
    size = {"longest_edge": image_size}
    images = Idefics3ImageProcessorPil(do_image_splitting=False, size=size, max_image_size=size)
    n_features = (image_size // 8 // 2) ** 2
    processor = transformers.Idefics3Processor(images, tokenizer, image_seq_len=n_features)
    config = transformers.Idefics3Config(
        vision_config={
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "image_size": image_size,
            "patch_size": 8,
            "initializer_range": 0.2,
        },
        text_config={"model_type": "llama", **_text(tokenizer)},
        image_token_id=tokenizer.convert_tokens_to_ids("<image>"),
        scale_factor=2,
        pad_token_id=tokenizer.pad_token_id,
        tie_word_embeddings=False,
    )
    return config, processor


def _gemma3() -> tuple[Any, Any]:
    from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil

    tokenizer = _tokenizer("<start_of_image>", ["<start_of_image>", "<end_of_image>", "<image_soft_token>"])
    names = {"boi_token": "<start_of_image>", "eoi_token": "<end_of_image>", "image_token": "<image_soft_token>"}
    tokenizer = _with_tokens(tokenizer, names)
    images = Gemma3ImageProcessorPil(size={"height": 32, "width": 32}, do_pan_and_scan=False)
    processor = transformers.Gemma3Processor(images, tokenizer, image_seq_length=4)
    config = transformers.Gemma3Config(
        vision_config={
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "image_size": 32,
            "patch_size": 8,
            "initializer_range": 0.2,
        },
        text_config=_text(tokenizer, sliding_window=64),
        mm_tokens_per_image=4,
        image_token_id=tokenizer.convert_tokens_to_ids("<image_soft_token>"),
        boi_token_index=tokenizer.convert_tokens_to_ids("<start_of_image>"),
        eoi_token_index=tokenizer.convert_tokens_to_ids("<end_of_image>"),
        initializer_range=0.2,
    )
    return config, processor


def _with_tokens(tokenizer: PreTrainedTokenizerBase, names: dict[str, str]) -> PreTrainedTokenizerBase:
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer.backend_tokenizer,
        eos_token=tokenizer.eos_token,
        pad_token=tokenizer.pad_token,
        chat_template=tokenizer.chat_template,
        extra_special_tokens=names,
    )


QWEN_TOKENS = ["<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"]


def _qwen(family: str, vision: dict[str, Any], text: dict[str, Any]) -> tuple[Any, Any]:
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    tokenizer = _tokenizer("<|vision_start|><|image_pad|><|vision_end|>", QWEN_TOKENS)
    size = {"shortest_edge": 256, "longest_edge": 4096}
    images = Qwen2VLImageProcessorPil(patch_size=8, temporal_patch_size=2, merge_size=2, size=size)
    is_old = family == "qwen2_5_vl"
    videos = (transformers.Qwen2VLVideoProcessor if is_old else transformers.Qwen3VLVideoProcessor)()
    processor_class = transformers.Qwen2_5_VLProcessor if is_old else transformers.Qwen3VLProcessor
    processor = processor_class(images, tokenizer, videos, chat_template=tokenizer.chat_template)
    ids = dict(
        zip(
            ("vision_start_token_id", "vision_end_token_id", "image_token_id", "video_token_id"),
            QWEN_TOKENS,
            strict=True,
        )
    )
    config_class = {
        "qwen2_5_vl": transformers.Qwen2_5_VLConfig,
        "qwen3_vl": transformers.Qwen3VLConfig,
        "qwen3_5": transformers.Qwen3_5Config,
    }[family]
    config = config_class(
        vision_config={"num_heads": 4, "patch_size": 8, "initializer_range": 0.2, **vision},
        text_config=_text(tokenizer, **text),
        tie_word_embeddings=False,
        **{name: tokenizer.convert_tokens_to_ids(token) for name, token in ids.items()},
    )
    return config, processor


def _qwen2_5_vl() -> tuple[Any, Any]:
    rope = {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 10000.0}
    vision = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "depth": 2,
        "out_hidden_size": 32,
        "fullatt_block_indexes": [1],
        "window_size": 32,
    }
    return _qwen("qwen2_5_vl", vision, {"rope_parameters": rope})


QWEN3_VISION = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "depth": 3,
    "out_hidden_size": 32,
    "num_position_embeddings": 64,
}


def _qwen3_vl() -> tuple[Any, Any]:
    rope = {"rope_type": "default", "mrope_section": [2, 1, 1], "mrope_interleaved": True, "rope_theta": 10000.0}
    return _qwen("qwen3_vl", QWEN3_VISION | {"deepstack_visual_indexes": [0, 1]}, {"rope_parameters": rope})


def _qwen3_5() -> tuple[Any, Any]:
    rope = {
        "rope_type": "default",
        "mrope_section": [2, 1, 1],
        "mrope_interleaved": True,
        "rope_theta": 10000.0,
        "partial_rotary_factor": 1.0,
    }
    text = {
        "rope_parameters": rope,
        "layer_types": ["linear_attention", "full_attention", "linear_attention"],
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
    }
    return _qwen("qwen3_5", QWEN3_VISION, text)


VISION_FAMILIES: dict[str, Callable[[], tuple[Any, Any]]] = {
    "idefics3": _idefics3,
    "gemma3": _gemma3,
    "qwen2_5_vl": _qwen2_5_vl,
    "qwen3_vl": _qwen3_vl,
    "qwen3_5": _qwen3_5,
}
"""Configuration and processor by family. Qwen's processors need torchvision."""


def draw(color: str, size: tuple[int, int] = (40, 30)) -> bytes:
    """Return a PNG file of one color."""
    file = io.BytesIO()
    Image.new("RGB", size, color).save(file, "PNG")
    return file.getvalue()


def write_pictures(folder: Path) -> None:
    """Write the images 0.png to 3.png of random pixels, in different sizes."""
    rng = np.random.default_rng(0)
    for i, size in enumerate([(32, 32), (30, 40), (48, 20), (33, 31)]):
        Image.fromarray(rng.integers(0, 256, (*size, 3), dtype=np.uint8)).save(folder / f"{i}.png")


def pictured_logprobs(path: Path, messages: Sequence[Any], images: Sequence[Path]) -> torch.Tensor:
    """Return the log-probs of the tokens of the last message, an answer, from the model's own forward pass.

    The processor encodes the conversation with the images that its parts {"type": "image"} show, in order.
    """
    processor, tokenizer = AutoProcessor.from_pretrained(path), AutoTokenizer.from_pretrained(path)
    model = AutoModelForImageTextToText.from_pretrained(path, dtype=torch.float32).eval()
    *prompt, last = messages
    text = tokenizer.apply_chat_template(prompt, add_generation_prompt=True, tokenize=False)
    answer = f"{last['content']}{tokenizer.eos_token}"
    pictures = [Image.open(image).convert("RGB") for image in images] or None
    inputs = processor(text=text + answer, images=pictures, add_special_tokens=False, return_tensors="pt")
    n_tokens = len(tokenizer(answer, add_special_tokens=False)["input_ids"])
    with torch.no_grad():
        logprobs = model(**inputs).logits[0].double().log_softmax(dim=-1)
    return logprobs[-1 - n_tokens : -1].gather(1, inputs["input_ids"][0, -n_tokens:, None])[:, 0]


def save_vision_model(folder: Path, family: str, *, seed: int = 0) -> Path:
    """Save a vision-language model with random weights as a Hugging Face folder."""
    config, processor = VISION_FAMILIES[family]()
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = AutoModelForImageTextToText.from_config(config)
    model.save_pretrained(folder)
    processor.save_pretrained(folder)
    return folder
