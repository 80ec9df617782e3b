"""Images in rows of prompts: their forms, their checks, and when they are read."""

import base64
import gc
import json
import re
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from train_kit.datasets import write_rows
from train_kit.messages import system, user
from train_kit.runs import supervised_run
from train_kit.vision_models import draw
from transformers import PreTrainedTokenizerBase

from skyrl_gym.data import files
from skyrl_gym.images import EncodedImage, find_images, read_image
from skyrl_train.config.cli import parse
from skyrl_train.config.supervised import DPO, SFT
from skyrl_train.dataset.files import JoinedRows, open_source
from skyrl_train.dataset.prompts import PromptDataset
from skyrl_train.entrypoints.command import parse_cli
from skyrl_train.entrypoints.preflight import check_answers, check_data
from skyrl_train.errors import DataError, InvalidRow, StorageError
from skyrl_train.generators.chat_template import TEMPLATES, ChatEncoder

LONG = 10_000
RED, BLUE = draw("red"), draw("blue")
TEXT = {"type": "text", "text": "Compare."}


def data_url(content: bytes) -> str:
    return f"data:image/png;base64,{base64.b64encode(content).decode()}"


def image(source: Any) -> dict[str, Any]:
    return {"type": "image", "image": source}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with two images."""
    (tmp_path / "red.png").write_bytes(RED)
    (tmp_path / "blue.png").write_bytes(BLUE)
    return tmp_path


PLACE = {"type": "image"}
FORMS: dict[str, dict[str, Any]] = {
    "paths": {"prompt": [user([image("red.png"), image("FOLDER/blue.png"), TEXT])]},
    "file and data URLs": {"prompt": [user([image("file://FOLDER/red.png"), image(data_url(BLUE)), TEXT])]},
    "OpenAI's chat": {
        "prompt": [
            user([{"type": "image_url", "image_url": {"url": source}} for source in ("red.png", "blue.png")] + [TEXT])
        ]
    },
    "OpenAI's responses": {
        "prompt": [
            user(
                [{"type": "input_image", "image_url": source} for source in ("red.png", "blue.png")]
                + [{"type": "input_text", "text": "Compare."}]
            )
        ]
    },
    "a column, filled into parts": {"prompt": [user([PLACE, PLACE, TEXT])], "images": ["red.png", "blue.png"]},
    "a column and a path": {"prompt": [user([PLACE, image("blue.png"), TEXT])], "image": "red.png"},
    "a column before the text": {"prompt": [user("Compare.")], "images": ["red.png", "blue.png"]},
    "a column before text parts": {"prompt": [user([TEXT])], "images": ["red.png", "blue.png"]},
    "markers": {"prompt": [user("<image><image>Compare.")], "images": ["red.png", "blue.png"]},
    "a container beside it": {
        "prompt": [user([PLACE, PLACE, TEXT])],
        "images": ["red.png", "blue.png"],
        "image": "python:3.12",
    },
}


@pytest.mark.parametrize("row", FORMS.values(), ids=FORMS)
def test_every_form_of_images_is_the_same_prompt(
    row: dict[str, Any], folder: Path, vision_tokenizer: PreTrainedTokenizerBase
) -> None:
    row = json.loads(json.dumps(row).replace("FOLDER", str(folder)))
    (read,) = PromptDataset(write_rows(folder, [row]), vision_tokenizer, LONG)
    assert read.prompt == [user([image(read_image(RED)), image(read_image(BLUE)), TEXT])]
    assert read.env_extras == ({"image": "python:3.12"} if row.get("image") == "python:3.12" else {})


def test_images_in_the_columns_of_hugging_face_datasets_are_read(
    folder: Path, vision_tokenizer: PreTrainedTokenizerBase
) -> None:
    """Embedded in parquet as bytes, or as paths, and in a folder of `save_to_disk`."""
    features = datasets.Features(
        {
            "prompt": [{"role": datasets.Value("string"), "content": datasets.Value("string")}],
            "images": [datasets.Image()],
        }
    )
    rows = {"prompt": [[user("<image>\nWhere?")]], "images": [[str(folder / "red.png")]]}
    table = datasets.Dataset.from_dict(rows, features=features)
    table.to_parquet(folder / "embedded.parquet")
    table.save_to_disk(folder / "saved")
    paths = [{"prompt": [user("<image>\nWhere?")], "images": [{"bytes": None, "path": "red.png"}]}]
    write_rows(folder, paths, "paths.parquet")
    fields = [user([{"type": "image", "image": {"bytes": RED, "path": None}, "text": None}, {**TEXT, "image": None}])]
    write_rows(folder, [{"prompt": fields}], "parts.parquet")
    for name in ("embedded.parquet", "saved", "paths.parquet"):
        (row,) = PromptDataset(str(folder / name), vision_tokenizer, LONG)
        assert row.prompt == [user([image(read_image(RED)), {"type": "text", "text": "\nWhere?"}])]
    (row,) = PromptDataset(str(folder / "parts.parquet"), vision_tokenizer, LONG)
    assert row.prompt == [user([image(read_image(RED)), TEXT])]


def test_markers_are_replaced_in_order_in_all_messages_but_replies(
    folder: Path, vision_tokenizer: PreTrainedTokenizerBase
) -> None:
    replied = {"role": "assistant", "content": "Not an <image"}
    prompt = [system("As in <image>:"), user("A"), replied, user("B <image> C")]
    (row,) = PromptDataset(
        write_rows(folder, [{"prompt": prompt, "images": ["red.png", "blue.png"]}]), vision_tokenizer, LONG
    )
    assert [source.digest for source in find_images(row.prompt)] == [read_image(RED).digest, read_image(BLUE).digest]
    assert row.prompt[0]["content"][0] == {"type": "text", "text": "As in "}
    assert row.prompt[2] == replied
    assert row.prompt[3]["content"][::2] == [{"type": "text", "text": "B "}, {"type": "text", "text": " C"}]


def test_text_parts_are_a_string_with_every_template(tmp_path: Path, tiny_tokenizer: PreTrainedTokenizerBase) -> None:
    template = (TEMPLATES / "qwen3_with_thinking.jinja").read_text()
    parts = [system([{"type": "text", "text": "Be "}, {"type": "text", "text": "brief."}]), user([TEXT])]
    text = [system("Be brief."), user("Compare.")]
    for options in ({}, {"chat_template": template}):
        n_tokens = len(ChatEncoder(tiny_tokenizer, *options.values()).prompt_ids(text))
        source = write_rows(tmp_path, [{"prompt": parts}])
        assert [row.prompt for row in PromptDataset(source, tiny_tokenizer, n_tokens, **options)] == [text]
        with pytest.raises(DataError, match=f"the shortest has {n_tokens}"):
            PromptDataset(source, tiny_tokenizer, n_tokens - 1, **options)


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        (
            {"prompt": [user("<image>?")], "images": ["red.png", "red.png"]},
            "has 2 images in the column 'images', but its messages have 1 places for them; write one part .* or one",
        ),
        ({"prompt": [user([PLACE, TEXT])]}, 'has 1 parts {"type": "image"} without an image, and no column images; w'),
        ({"prompt": [user([PLACE, TEXT])], "images": []}, "has 1 parts .* without an image, and no column images"),
        ({"prompt": [user([image("red.png")])], "image": "red.png"}, "has 1 images in the column 'image', .* 0 places"),
        ({"prompt": [system("?")], "images": ["red.png"]}, "has 1 images in the column 'images', .* 0 places"),
        ({"prompt": [user("?")], "images": ["red.png"], "image": "red.png"}, "in the columns image and images; remove"),
        ({"prompt": [user("?")], "images": ["none.png"]}, "message 0: the image '.*/none.png' cannot be read: No such"),
        ({"prompt": [user("?")], "images": ["text.png"]}, "message 0: the image 'text.png' has an unknown format"),
        ({"prompt": [user("?")], "images": ["cut.png"]}, "message 0: the image 'cut.png' cannot be decoded: .*truncat"),
        ({"prompt": [user("?")], "images": ["big.png"]}, "the image 'big.png' has 60 x 60 pixels; scale it to at most"),
        ({"prompt": [user("?")], "images": ["https://x.org/a.png"]}, "is on the web; download it before training"),
        ({"prompt": [user("?")], "images": [7]}, "message 0: an image is a int; give a Pillow image"),
    ],
)
def test_an_image_that_cannot_be_used_is_refused_with_its_row(
    row: dict[str, Any],
    reason: str,
    folder: Path,
    vision_tokenizer: PreTrainedTokenizerBase,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("skyrl_gym.images.MAX_PIXELS", 50 * 50)
    (folder / "text.png").write_text("not an image")
    (folder / "cut.png").write_bytes(draw("red", (50, 50))[:80])
    (folder / "big.png").write_bytes(draw("red", (60, 60)))
    source = write_rows(folder, [{"prompt": [user("fine")]}, row])
    with pytest.raises(DataError, match=f"row 1 of {source}:? .*{reason}"):
        PromptDataset(source, vision_tokenizer, LONG)


def test_images_of_a_text_model_are_refused_before_anything_is_loaded(
    folder: Path, catch_run: list[str], tiny_model_path: Path
) -> None:
    """The message names the row, the column and the model."""
    rows = {"images": {"prompt": [user("?")], "images": ["red.png"]}, "prompt": {"prompt": [user([image("red.png")])]}}
    for column, row in rows.items():
        source = write_rows(folder, [{"prompt": [user("fine")]}, row])
        refusal = f"row 1 of {source} has images in the column '{column}', but {tiny_model_path} reads only text; use a"
        with pytest.raises(DataError, match=re.escape(refusal)):
            check_data(parse_cli([*catch_run, f"data.train_data=['{source}']"]), trains=True)
    for column, row in {
        "images": {"prompt": "?", "response": "!", "images": ["red.png"]},
        "prompt": rows["prompt"],
    }.items():
        source = write_rows(folder, [{"prompt": "fine", "response": "!"}, {**row, "response": "!"}])
        overrides = supervised_run(folder, f"data.train_data='{source}'", model=tiny_model_path, data=folder)
        with pytest.raises(DataError, match=f"row 1 of {source} has images in the column '{column}', but "):
            check_answers(parse(overrides, SFT))


def test_images_of_a_text_reference_are_refused_before_anything_is_loaded(
    folder: Path, vision_model_path: Path, tiny_model_path: Path
) -> None:
    pair = {"prompt": [user([image("red.png")])], "chosen": "Left", "rejected": "Right"}
    source = write_rows(folder, [pair, pair])
    reference = [f"data.train_data='{source}'", "trainer.train_batch_size=1", "trainer.eval_interval=-1"]
    check_answers(parse(supervised_run(folder, *reference, model=vision_model_path, data=folder), DPO))
    reference.append(f"trainer.ref.model.path='{tiny_model_path}'")
    with pytest.raises(DataError, match=f"has images in the column 'prompt', but {tiny_model_path} reads only text"):
        check_answers(parse(supervised_run(folder, *reference, model=vision_model_path, data=folder), DPO))


def test_the_container_of_a_coding_task_is_not_an_image(
    tmp_path: Path, tiny_tokenizer: PreTrainedTokenizerBase
) -> None:
    rows = [{"prompt": [user("An <image> tag")], "image": name} for name in ("python:3.12", "ghcr.io/a/b.c:latest", "")]
    read = list(PromptDataset(write_rows(tmp_path, rows), tiny_tokenizer, LONG))
    assert [row.prompt for row in read] == [row["prompt"] for row in rows]
    assert [row.env_extras["image"] for row in read] == ["python:3.12", "ghcr.io/a/b.c:latest", ""]


def test_the_length_of_a_prompt_counts_all_tokens_of_its_images(
    folder: Path, vision_tokenizer: PreTrainedTokenizerBase
) -> None:
    source = write_rows(folder, [{"prompt": [user("?" * 40)], "images": ["red.png", "blue.png"]}])
    (row,) = PromptDataset(source, vision_tokenizer, LONG)
    n_tokens = len(ChatEncoder(vision_tokenizer).prompt_ids(row.prompt))
    n_written = len(vision_tokenizer.apply_chat_template(row.prompt, add_generation_prompt=True, return_dict=False))
    assert n_tokens > n_written, "the template writes one token for an image"
    assert len(PromptDataset(source, vision_tokenizer, n_tokens)) == 1
    with pytest.raises(DataError, match=f"the shortest has {n_tokens}"):
        PromptDataset(source, vision_tokenizer, n_tokens - 1)


def count_images() -> int:
    gc.collect()
    return sum(type(item) is EncodedImage for item in gc.get_objects())


def test_images_are_read_when_a_row_is_checked_or_drawn_and_not_kept(
    folder: Path, vision_tokenizer: PreTrainedTokenizerBase
) -> None:
    for i in range(8):
        (folder / f"{i}.png").write_bytes(draw("red", (20 + i, 20)))
    source = write_rows(folder, [{"prompt": [user(f"{i}?")], "images": [f"{i}.png"]} for i in range(8)])
    n_before = count_images()
    checked = PromptDataset(source, vision_tokenizer, LONG)
    assert len(list(checked.checked_rows())) == len(checked) == 8
    assert count_images() == n_before
    row = checked[3]
    assert count_images() == n_before + 1
    for i in range(8):
        (folder / f"{i}.png").unlink()
        if i == 0:
            drawn = PromptDataset(source, vision_tokenizer, LONG, max_checked_rows=1)
    assert not drawn.is_checked
    for dataset in (checked, drawn):
        with pytest.raises(
            InvalidRow, match=f"row 3 of {source}: message 0: the image '{folder}/3.png' cannot be read"
        ):
            dataset[3]
    assert find_images(row.prompt)[0].width == 23


def test_a_fingerprint_depends_on_the_images_and_not_on_the_folder(
    tmp_path: Path, vision_tokenizer: PreTrainedTokenizerBase
) -> None:
    def fingerprint(name: str, content: bytes) -> str:
        (tmp_path / name).mkdir()
        (tmp_path / name / "a.png").write_bytes(content)
        source = write_rows(tmp_path / name, [{"prompt": [user("?")], "images": ["a.png"]}])
        return PromptDataset(source, vision_tokenizer, LONG).fingerprint

    assert fingerprint("first", RED) == fingerprint("second", RED) != fingerprint("third", BLUE)


def test_a_large_parquet_file_with_images_stays_on_disk(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    rows = [{"prompt": f"{i}", "images": [{"bytes": draw("red", (10 + i, 10)), "path": None}]} for i in range(50)]
    path = folder / "rows.parquet"
    pq.write_table(pa.Table.from_pylist(rows), path, row_group_size=7)
    whole = JoinedRows([str(path), write_rows(folder, [{"prompt": "last"}])])
    monkeypatch.setattr(files, "MAX_BYTES_IN_MEMORY", 100)
    lazy = JoinedRows([str(path), str(folder / "rows.jsonl")])
    assert isinstance(lazy._sources[0], files._ParquetSource)
    for indices in (range(51), [0, 6, 7, 13, 49, 50], [20], []):
        assert list(lazy.read(indices)) == list(whole.read(indices))
    assert list(lazy.read_column("prompt")) == list(whole.read_column("prompt"))
    assert list(lazy.read_column("none")) == [None] * 51
    assert [lazy.folder(index) for index in (0, 49, 50)] == [folder] * 3
    assert lazy.digest == JoinedRows([str(path), str(folder / "rows.jsonl")]).digest != whole.digest
    monkeypatch.setattr(files, "MAX_GROUP_BYTES", 100)
    assert len(open_source(str(path))) == 50
    assert f"{path} has groups of rows of up to 0.0 GB, so all images stay in memory; write it with" in caplog.text
    path.write_bytes(path.read_bytes() + b"?")
    with pytest.raises(StorageError, match=f"{path} changed while it was used; restore it"):
        lazy[30]
