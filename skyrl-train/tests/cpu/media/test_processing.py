"""Placeholders of images in text and tokens."""

from collections.abc import Callable
from pathlib import Path
from threading import Barrier, Thread
from typing import Any

import pytest
from train_kit.vision_models import ask, each_family, picture, save_vision_model
from transformers import AutoProcessor, PreTrainedTokenizerBase

from skyrl_gym.images import find_images, read_image
from skyrl_train.errors import ConfigError, DataError
from skyrl_train.generators.chat_template import ChatEncoder
from skyrl_train.media import processing
from skyrl_train.media.processing import ImageProcessor, load_image_processor
from skyrl_train.models.loading import load_tokenizer


@each_family
def test_only_placeholders_of_images_are_filled(family: str, tmp_path: Path) -> None:
    """Someone may write a placeholder as text, or a model may sample it."""
    folder = save_vision_model(tmp_path, family)
    tokenizer = load_tokenizer(str(folder))
    chat, processor = ChatEncoder(tokenizer), load_image_processor(str(folder))
    assert processor is not None
    reserved = [processor.placeholder, tokenizer.convert_ids_to_tokens(processor.token_id)]
    messages = ask("What is ", *reserved, "? ", picture(0), picture(1, 64, 32))
    token_ids = chat.prompt_ids(messages)
    spans = chat.find_spans(token_ids, messages)
    assert [span.image for span in spans] == find_images(messages)
    filled = [token_ids[span.start : span.end].count(processor.token_id) for span in spans]
    assert filled == [processor.tokens(span.image).n_tokens for span in spans]
    assert token_ids.count(processor.token_id) == sum(filled)


@each_family
def test_collapsed_tokens_have_one_placeholder_per_image(family: str, tmp_path: Path) -> None:
    """They are the tokens of the template's text, also if images follow each other."""
    tokenizer = load_tokenizer(str(save_vision_model(tmp_path, family)))
    chat, processor = ChatEncoder(tokenizer), load_image_processor(str(tmp_path))
    assert processor is not None
    messages = ask("What is ", picture(0), picture(1, 64, 32), "? ", picture(0))
    token_ids = chat.prompt_ids(messages)
    spans = [span.shift(2) for span in chat.find_spans(token_ids, messages)]
    template = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    expected = tokenizer(template, add_special_tokens=False)["input_ids"]
    assert processor.collapse([5, 6, *token_ids, 7], spans) == [5, 6, *expected, 7]
    assert processor.collapse([5, 6], []) == [5, 6]


def test_newlines_beside_images_are_collapsed(tmp_path: Path) -> None:
    """Gemma's vocabulary has tokens for several newlines, and its processor puts two around an image."""
    folder = save_vision_model(tmp_path, "gemma3")
    tokenizer = load_tokenizer(str(folder))
    tokenizer.add_tokens(["\n" * n for n in (4, 3, 2)])
    tokenizer.save_pretrained(folder)
    chat, processor = ChatEncoder(tokenizer), load_image_processor(str(folder))
    assert processor is not None
    messages = ask(picture(0), picture(1), "\nWhat?")
    token_ids = chat.prompt_ids(messages)
    vocabulary = tokenizer.get_vocab()
    assert [token_ids.count(vocabulary["\n" * n]) for n in (2, 3, 4)] == [0, 2, 1]
    template = f"<|im_start|>user\n{2 * processor.placeholder}\nWhat?<|im_end|>\n<|im_start|>assistant\n"
    expected = tokenizer(template, add_special_tokens=False)["input_ids"]
    assert processor.collapse(token_ids, chat.find_spans(token_ids, messages)) == expected


def test_equal_texts_with_different_images_are_not_confused(tmp_path: Path) -> None:
    chat = ChatEncoder(load_tokenizer(str(save_vision_model(tmp_path, "gemma3"))))
    for seed in (0, 1, 0):
        messages = ask(picture(seed), "What?")
        (span,) = chat.find_spans(chat.prompt_ids(messages), messages)
        assert span.image == find_images(messages)[0]


def test_a_template_that_drops_an_image_is_refused(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(str(save_vision_model(tmp_path, "idefics3")))
    template = tokenizer.chat_template.replace("<image>", "")
    with pytest.raises(
        DataError, match=r"has 1 images, but its text has 0 placeholders '<image>'; use a chat template"
    ):
        ChatEncoder(tokenizer, template).prompt_ids(ask(picture(0), "What?"))


def test_a_template_that_reads_only_parts_gets_parts(tmp_path: Path) -> None:
    """Idefics 3's template iterates over the characters of a string, and writes none of them."""
    tokenizer = load_tokenizer(str(save_vision_model(tmp_path, "idefics3")))
    template = tokenizer.chat_template.replace("message['content'] is string", "false")
    messages: list[Any] = [{"role": "system", "content": "Look."}, *ask(picture(0), "What?")]
    assert ChatEncoder(tokenizer, template).prompt_ids(messages) == ChatEncoder(tokenizer).prompt_ids(messages)


def test_a_text_model_refuses_images(tiny_tokenizer: PreTrainedTokenizerBase) -> None:
    with pytest.raises(DataError, match=r"a message has an image, but .* reads only text; use a vision-language model"):
        ChatEncoder(tiny_tokenizer).prompt_ids(ask(picture(0), "What?"))


def test_a_model_without_its_processor_is_refused(tmp_path: Path) -> None:
    folder = save_vision_model(tmp_path, "idefics3")
    for file in folder.glob("*processor*"):
        file.unlink()
    with pytest.raises(ConfigError, match=r"cannot load the image processor of .*needs its preprocessor_config\.json"):
        load_image_processor(str(folder))


class CountedProcessor:
    """A processor of Transformers that counts its calls. Each call first calls `wait`."""

    def __init__(self, path: Path, wait: Callable[[], Any] = lambda: None) -> None:
        self._processor, self._wait = AutoProcessor.from_pretrained(path), wait
        self.n_calls = 0

    def __call__(self, **options: Any) -> Any:
        self._wait()
        self.n_calls += 1
        return self._processor(**options)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._processor, name)


def test_threads_that_process_the_same_image_count_it_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both miss the cache, which has room for two images."""
    token_id = load_tokenizer(str(save_vision_model(tmp_path, "idefics3"))).convert_tokens_to_ids("<image>")
    first, second = read_image(picture(0)), read_image(picture(1))
    n_bytes = ImageProcessor(CountedProcessor(tmp_path), token_id).process(first).n_bytes
    monkeypatch.setattr(processing, "CACHED_BYTES", 2 * n_bytes)
    barrier = Barrier(2)
    counted = CountedProcessor(tmp_path, lambda: barrier.wait(30) if counted.n_calls < 2 else None)
    processor = ImageProcessor(counted, token_id)
    threads = [Thread(target=processor.process, args=[first]) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert counted.n_calls == 2
    processor.process(second)
    processor.process(first)
    assert counted.n_calls == 3


def test_tokens_outlast_tensors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only tensors fill the cache, so a text with images that do not fit is expanded without processing them again."""
    tokenizer = load_tokenizer(str(save_vision_model(tmp_path, "idefics3")))
    monkeypatch.setattr(processing, "CACHED_BYTES", 1)
    counted = CountedProcessor(tmp_path)
    processor = ImageProcessor(counted, tokenizer.convert_tokens_to_ids("<image>"))
    images, text = [read_image(picture(seed)) for seed in range(3)], 3 * processor.placeholder
    for _ in range(2):
        token_ids = tokenizer(processor.expand(text, images), add_special_tokens=False)["input_ids"]
        processor.collapse(token_ids, processor.find_spans(token_ids, images))
    assert counted.n_calls == 3
