import pytest
from gym_kit.http_server import Request, serving

from integrations.fleet import slack


def test_messages_are_posted_and_answered_in_a_thread(
    slack_requests: list[Request], capsys: pytest.CaptureFixture[str]
) -> None:
    slack.main(["Started"])
    slack.main(["Finished", "--thread", capsys.readouterr().out.strip()])
    assert {request.headers["authorization"] for request in slack_requests} == {"Bearer secret-token"}
    assert [request.body for request in slack_requests] == [
        {"channel": "#fleet-training-runs", "text": "Started"},
        {"channel": "#fleet-training-runs", "text": "Finished", "thread_ts": "12.5"},
    ]


def test_refusals_and_missing_tokens_and_networks(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLACK_BOT_TOKEN", "secret-token")
    with serving(lambda request: (200, {"ok": False, "error": "not_in_channel"})) as (url, _):
        monkeypatch.setenv("SLACK_API_URL", url)
        slack.main(["Hello"])
    output = capsys.readouterr()
    assert "not_in_channel" in output.err
    assert "secret-token" not in output.err + output.out
    monkeypatch.delenv("SLACK_BOT_TOKEN", raising=False)
    assert slack.post("Hello") is None
    monkeypatch.setenv("SLACK_BOT_TOKEN", "x")
    monkeypatch.setenv("SLACK_API_URL", "http://127.0.0.1:9")
    with pytest.raises(slack.SlackError, match="cannot be reached"):
        slack.post("Hello")
