import io

import pytest
import tinker
from train_kit.vision_models import picture

from skyrl_agent.integrations.tinker.inputs import model_input
from skyrl_gym.images import EncodedImage, read_image
from skyrl_train.media.spans import ImageSpan

TOKENS = [1, 2, 90, 90, 3, 90, 90, 90]
FIRST, SECOND = (read_image(picture(seed)) for seed in range(2))


def test_chunks_replace_the_tokens_of_images() -> None:
    spans = [ImageSpan(2, 4, FIRST), ImageSpan(5, 8, SECOND)]
    chunks = model_input(TOKENS, spans).chunks
    assert [chunk.length for chunk in chunks] == [2, 2, 1, 3]
    before, first, between, second = chunks
    assert isinstance(before, tinker.EncodedTextChunk)
    assert isinstance(between, tinker.EncodedTextChunk)
    assert (before.tokens, between.tokens) == ([1, 2], [3])
    assert (first.data, second.data) == (FIRST.content, SECOND.content)  # type: ignore[union-attr]


def test_an_image_that_is_cut_off_stays_text() -> None:
    spans = [ImageSpan(2, 4, FIRST), ImageSpan(5, 8, SECOND)]
    assert [chunk.length for chunk in model_input(TOKENS[:-1], spans).chunks] == [2, 2, 3]
    assert model_input(TOKENS, []).to_ints() == TOKENS


@pytest.mark.parametrize(("kind", "sent"), [("PNG", "png"), ("JPEG", "jpeg"), ("BMP", "png"), ("WEBP", "png")])
def test_files_of_other_formats_are_sent_as_png(kind: str, sent: str) -> None:
    file = io.BytesIO()
    picture(0).save(file, kind)
    image: EncodedImage = read_image(file.getvalue())
    (chunk,) = model_input([90], [ImageSpan(0, 1, image)]).chunks
    assert isinstance(chunk, tinker.types.ImageChunk)
    assert (chunk.format, chunk.data == image.content) == (sent, sent == kind.lower())
    assert read_image(chunk.data).open().tobytes() == image.open().tobytes()
