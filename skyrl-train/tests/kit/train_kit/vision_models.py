"""Tiny vision-language models with their tokenizers and image processors."""

import io
import json
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from PIL import Image
from transformers import AutoConfig, AutoModelForImageTextToText, AutoProcessor, AutoTokenizer, PreTrainedTokenizerBase

from skyrl_gym.envs.base_text_env import BaseTextEnv, BaseTextEnvStepOutput
from skyrl_gym.runtime.validation import validate_prompt
from skyrl_train.dataset.batch import build_training_batch
from skyrl_train.entrypoints.tiny import DEFAULT_TEXT, train_tokenizer
from skyrl_train.generators.chat_template import ChatEncoder
from skyrl_train.models.loading import load_tokenizer, model_class
from skyrl_train.types import Segment, TrainingBatch, Trajectory, TrajectoryID
from train_kit.batches import score_off_policy
from train_kit.models import load_on_cpu
from train_kit.runs import small_run

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

VISION: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "patch_size": 8,
    "initializer_range": 0.2,
}
"""Sizes of the image encoders, except Qwen's."""


def _tokenizer(image: str, tokens: list[str]) -> PreTrainedTokenizerBase:
    tokenizer = train_tokenizer([DEFAULT_TEXT])
    tokenizer.add_special_tokens({"additional_special_tokens": tokens})
    tokenizer.chat_template = TEMPLATE.replace("IMAGE", image)
    return tokenizer


def _text(tokenizer: PreTrainedTokenizerBase, **more: Any) -> dict[str, Any]:
    ids = {"vocab_size": len(tokenizer), "eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    return TEXT | ids | more


def _idefics3(image_size: int = 32, **text: Any) -> tuple[Any, Any]:
    from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil

    tokenizer = _tokenizer("<image>", ["<image>", "<fake_token_around_image>", "<global-img>", "<end_of_utterance>"])
    size = {"longest_edge": image_size}
    images = Idefics3ImageProcessorPil(do_image_splitting=False, size=size, max_image_size=size)
    n_features = (image_size // 8 // 2) ** 2
    processor = transformers.Idefics3Processor(images, tokenizer, image_seq_len=n_features)
    config = transformers.Idefics3Config(
        vision_config={**VISION, "image_size": image_size},
        text_config={"model_type": "llama", **_text(tokenizer, **text)},
        image_token_id=tokenizer.convert_tokens_to_ids("<image>"),
        scale_factor=2,
        pad_token_id=tokenizer.pad_token_id,
        tie_word_embeddings=False,
    )
    return config, processor


def _gemma3(**text: Any) -> tuple[Any, Any]:
    from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil

    tokenizer = _tokenizer("<start_of_image>", ["<start_of_image>", "<end_of_image>", "<image_soft_token>"])
    names = {"boi_token": "<start_of_image>", "eoi_token": "<end_of_image>", "image_token": "<image_soft_token>"}
    tokenizer = _with_tokens(tokenizer, names)
    images = Gemma3ImageProcessorPil(size={"height": 32, "width": 32}, do_pan_and_scan=False)
    processor = transformers.Gemma3Processor(images, tokenizer, image_seq_length=4)
    config = transformers.Gemma3Config(
        vision_config={**VISION, "image_size": 32},
        text_config=_text(tokenizer, **{"sliding_window": 64} | text),
        mm_tokens_per_image=4,
        image_token_id=tokenizer.convert_tokens_to_ids("<image_soft_token>"),
        boi_token_index=tokenizer.convert_tokens_to_ids("<start_of_image>"),
        eoi_token_index=tokenizer.convert_tokens_to_ids("<end_of_image>"),
        initializer_range=0.2,
    )
    return config, processor


def _smolvlm(image_size: int = 32, **text: Any) -> tuple[Any, Any]:
    from transformers.models.smolvlm.image_processing_pil_smolvlm import SmolVLMImageProcessorPil

    config, processor = _idefics3(image_size, **text)
    settings = config.to_dict()
    del settings["model_type"], settings["vision_config"]["model_type"]
    size = {"longest_edge": image_size}
    images = SmolVLMImageProcessorPil(do_image_splitting=False, size=size, max_image_size=size)
    names = {
        "fake_image_token": "<fake_token_around_image>",
        "image_token": "<image>",
        "global_image_token": "<global-img>",
        "end_of_utterance_token": "<end_of_utterance>",
    }
    tokenizer, videos = _with_tokens(processor.tokenizer, names), transformers.SmolVLMVideoProcessor()
    n_features, template = processor.image_seq_len, processor.tokenizer.chat_template
    processor = transformers.SmolVLMProcessor(images, tokenizer, videos, n_features, chat_template=template)
    return transformers.SmolVLMConfig(**settings), processor


def _gemma4(**text: Any) -> tuple[Any, Any]:
    from transformers.models.gemma4.image_processing_pil_gemma4 import Gemma4ImageProcessorPil

    names = {
        "boi_token": "<|image>",
        "eoi_token": "<image|>",
        "image_token": "<|image|>",
        "audio_token": "<|audio|>",
        "boa_token": "<|audio>",
        "eoa_token": "<audio|>",
        "video_token": "<|video|>",
    }
    tokenizer = _with_tokens(_tokenizer("<|image|>", list(names.values())), names)
    processor = transformers.Gemma4Processor(
        feature_extractor=transformers.Gemma4AudioFeatureExtractor(),
        image_processor=Gemma4ImageProcessorPil(patch_size=8, pooling_kernel_size=2, max_soft_tokens=70),
        tokenizer=tokenizer,
        video_processor=transformers.Gemma4VideoProcessor(),
        chat_template=tokenizer.chat_template,
    )
    sizes = {
        "sliding_window": 64,
        "vocab_size_per_layer_input": len(tokenizer),
        "hidden_size_per_layer_input": 8,
        "global_head_dim": 16,
        "use_bidirectional_attention": "vision",
    }
    config = transformers.Gemma4Config(
        vision_config={
            **VISION,
            "num_key_value_heads": 4,
            "head_dim": 8,
            "pooling_kernel_size": 2,
            "position_embedding_size": 64,
        },
        text_config=_text(tokenizer, **sizes | text),
        audio_config=None,
        **{
            f"{name}_id": tokenizer.convert_tokens_to_ids(names[name])
            for name in ("image_token", "boi_token", "eoi_token", "audio_token", "video_token")
        },
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


def _qwen2_5_vl(**text: Any) -> tuple[Any, Any]:
    rope = {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 10000.0}
    vision = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "depth": 2,
        "out_hidden_size": 32,
        "fullatt_block_indexes": [1],
        "window_size": 32,
    }
    return _qwen("qwen2_5_vl", vision, {"rope_parameters": rope} | text)


QWEN3_VISION = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "depth": 3,
    "out_hidden_size": 32,
    "num_position_embeddings": 64,
}


def _qwen3_vl(**text: Any) -> tuple[Any, Any]:
    rope = {"rope_type": "default", "mrope_section": [2, 1, 1], "mrope_interleaved": True, "rope_theta": 10000.0}
    return _qwen("qwen3_vl", QWEN3_VISION | {"deepstack_visual_indexes": [0, 1]}, {"rope_parameters": rope} | text)


def _qwen3_5(**sizes: Any) -> tuple[Any, Any]:
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
    return _qwen("qwen3_5", QWEN3_VISION, text | sizes)


VISION_FAMILIES: dict[str, Callable[..., tuple[Any, Any]]] = {
    "idefics3": _idefics3,
    "gemma3": _gemma3,
    "gemma4": _gemma4,
    "smolvlm": _smolvlm,
    "qwen2_5_vl": _qwen2_5_vl,
    "qwen3_vl": _qwen3_vl,
    "qwen3_5": _qwen3_5,
}
"""Configuration and processor by family."""

USUAL = ("idefics3", "gemma3")
"""Families whose image processors need only Pillow."""

needs_torchvision = pytest.mark.skipif(
    find_spec("torchvision") is None, reason="the image processor needs torchvision: run make test-vision"
)


def family_param(family: str) -> Any:
    """Return a parameter of a test, skipped if the family's processor cannot be loaded here."""
    return pytest.param(family, marks=() if family in USUAL else needs_torchvision)


each_family = pytest.mark.parametrize("family", [family_param(family) for family in VISION_FAMILIES])


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
    inputs, n_tokens = _read_pictured(path, messages, images)
    model = AutoModelForImageTextToText.from_pretrained(path, dtype=torch.float32).eval()
    with torch.no_grad():
        logprobs = model(**inputs).logits[0].double().log_softmax(dim=-1)
    return logprobs[-1 - n_tokens : -1].gather(1, inputs["input_ids"][0, -n_tokens:, None])[:, 0]


def pictured_reward(path: Path, messages: Sequence[Any], images: Sequence[Path]) -> float:
    """Return the reward of a conversation, from the reward model's own forward pass."""
    auto_class = model_class("reward", AutoConfig.from_pretrained(path))
    model = auto_class.from_pretrained(path, dtype=torch.float32).eval()
    with torch.no_grad():
        return float(model(**_read_pictured(path, messages, images)[0]).logits[0, 0])


def _read_pictured(path: Path, messages: Sequence[Any], images: Sequence[Path]) -> tuple[Any, int]:
    """Return what a model's processor makes of a conversation, and the number of tokens of its last message."""
    processor, tokenizer = AutoProcessor.from_pretrained(path), AutoTokenizer.from_pretrained(path)
    *prompt, last = messages
    text = tokenizer.apply_chat_template(prompt, add_generation_prompt=True, tokenize=False)
    answer = f"{last['content']}{tokenizer.eos_token}"
    pictures = [Image.open(image).convert("RGB") for image in images] or None
    inputs = processor(text=text + answer, images=pictures, add_special_tokens=False, return_tensors="pt")
    return inputs, len(tokenizer(answer, add_special_tokens=False)["input_ids"])


def save_vision_model(folder: Path, family: str, *, seed: int = 0, **text: Any) -> Path:
    """Save a vision-language model with random weights. `text` has settings of the language model."""
    config, processor = VISION_FAMILIES[family](**text)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = AutoModelForImageTextToText.from_config(config)
        for parameter in model.parameters():
            if parameter.dim() > 1 and not parameter.any():  # Gemma 3's projection of images starts at zero
                parameter.data.normal_(std=0.2)
    model.save_pretrained(folder)
    processor.save_pretrained(folder)
    return folder


def picture(seed: int, width: int = 48, height: int = 32) -> Image.Image:
    """Return an image of random pixels."""
    pixels = torch.randint(256, (height, width, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))
    return Image.fromarray(pixels.numpy())


def ask(*parts: Image.Image | str) -> list[dict[str, Any]]:
    """Return a user message with images and texts, as an environment's messages are read."""
    forms = [
        {"type": "text", "text": part} if isinstance(part, str) else {"type": "image", "image": part} for part in parts
    ]
    return validate_prompt(([{"role": "user", "content": forms}], {}))


def conversation_row(chat: ChatEncoder, *turns: list[dict[str, Any]], reply: Sequence[int] = (5, 9, 7)) -> Segment:
    """Return a row in which the model answers each turn with the tokens `reply`."""
    first, *rest = turns
    token_ids = chat.prompt_ids(first)
    row = Segment.start(token_ids, chat.find_spans(token_ids, first))
    row.append_sampled(list(reply), [0.0] * len(reply), None)
    for messages in rest:
        token_ids = chat.observation_ids(messages, row.token_ids[-1])
        row.append_observed(token_ids, chat.find_spans(token_ids, messages))
        row.append_sampled(list(reply), [0.0] * len(reply), None)
    return row


class PictureEnv(BaseTextEnv):
    """Three turns, each with a picture. The reward is the number of different characters of the reply."""

    def __init__(self, env_config: Any, extras: Any) -> None:
        super().__init__()
        self._seed = 10 * int(extras["extra_info"]["seed"])

    def init(self, prompt: Any) -> Any:
        return [*prompt, self._look()], {}

    def step(self, action: str) -> BaseTextEnvStepOutput:
        self.turns += 1
        return BaseTextEnvStepOutput(
            observations=[self._look()], reward=len(set(action)) / 10, done=self.turns == 3, metadata={}
        )

    def _look(self) -> dict[str, Any]:
        content = [{"type": "image", "image": picture(self._seed + self.turns)}, {"type": "text", "text": "What?"}]
        return {"role": "user", "content": content}


def rows_with_images(chat: ChatEncoder) -> list[Segment]:
    """Return rows with three images, with one that another row has, too, and without any."""
    return [
        conversation_row(chat, ask(picture(0), "What is it? ", picture(1, 64, 32)), ask("And this? ", picture(2))),
        conversation_row(chat, ask(picture(2), "Where?")),
        conversation_row(chat, ask("Only text."), reply=(4, 4, 8, 8)),
    ]


def as_batch(rows: Sequence[Segment]) -> TrainingBatch:
    """Return a batch with a trajectory per row."""
    ids = (TrajectoryID(str(i), 0, draw=i) for i in range(len(rows)))
    return build_training_batch(
        [Trajectory(i, "env", "data", (row,), "stop") for i, row in zip(ids, rows, strict=True)], 0
    )


def image_batch(folder: Path) -> TrainingBatch:
    """Return a batch for an update of the model in a folder, with advantages and scores of other policies."""
    batch = as_batch(rows_with_images(ChatEncoder(load_tokenizer(str(folder)))))
    generator = torch.Generator().manual_seed(0)
    batch.advantages = torch.randn(batch.loss_mask.shape, generator=generator) * batch.loss_mask
    return score_off_policy(load_on_cpu(folder), batch)


def picture_run(folder: Path, *overrides: str, model: Path, name: str = "test_run") -> list[str]:
    """Return the overrides of a run of two steps of four groups in `PictureEnv`."""
    prompt = [{"role": "system", "content": "Look."}]
    rows = [{"prompt": prompt, "extra_info": {"seed": seed}} for seed in range(8)]
    data = folder / "rows.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings = [
        "environment.env_class=train_kit.vision_models:PictureEnv",
        "generator.max_turns=3",
        "generator.n_samples_per_prompt=4",
        "trainer.policy.optimizer_config.lr=1e-2",
        "trainer.max_training_steps=2",
        "trainer.hf_save_interval=10",
    ]
    return small_run(folder, *settings, *overrides, model=model, data=data, name=name)
