import httpx
from tx_kit.servers import SAMPLE, Running


def test_text_with_expected_tokens_has_its_own_length(server: Running, http: httpx.Client) -> None:
    counter = server.service.metrics.tokens.labels("prompt")
    before = counter._value.get()
    prompt = {"chunks": [{"tokens": [1, 2], "expected_tokens": -5}]}
    assert http.post("asample", json={**SAMPLE, "prompt": prompt}).status_code == 200
    assert counter._value.get() == before + 2
