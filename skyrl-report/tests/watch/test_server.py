import http.client
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from report_kit.example import write_example
from report_kit.runs import write_metrics

from skyrl_report.errors import DataError
from skyrl_report.run_folder import RunFolder
from skyrl_report.watch.server import Server, Site, serving


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    return write_example(tmp_path / "catch/shaped")


@pytest.fixture
def server(folder: RunFolder) -> Iterator[Server]:
    with serving(Site(folder)) as server:
        yield server


def ask(server: Server, path: str, method: str = "GET", **headers: str) -> tuple[int, http.client.HTTPMessage, str]:
    connection = http.client.HTTPConnection("127.0.0.1", server.server_address[1], timeout=30)
    try:
        names = {name.replace("_", "-"): value for name, value in headers.items()}
        connection.request(method, path, headers=names)
        response = connection.getresponse()
        return response.status, response.headers, response.read().decode()
    finally:
        connection.close()


def test_the_page_and_the_state_follow_the_run(server: Server, folder: RunFolder) -> None:
    status, headers, _ = ask(server, "/")
    assert (status, headers["Location"], headers["Set-Cookie"]) == (303, "/report.html", None)
    status, headers, page = ask(server, "/report.html")
    assert status == 200
    assert "<script>" in page
    assert ask(server, "/report.html", If_None_Match=headers["ETag"])[0] == 304
    before = json.loads(ask(server, "/state.json")[2])
    assert before["progress"].startswith("step 8 of 20 · running")
    write_metrics(folder.metrics, [{"reward/avg_raw_reward": 0.125}] * 10)
    after = json.loads(ask(server, "/state.json")[2])
    assert after["progress"].startswith("step 9 of 20")
    assert after["version"] != before["version"]
    assert "9 training steps" in ask(server, "/report.html")[2]
    assert not folder.report.exists(), "a reader writes nothing"


@pytest.mark.parametrize(
    "path",
    ["/config.yaml", "/evals/images/../../config.yaml", "/evals/images/%2e%2e/config.yaml", "//etc/passwd", "/ckpts/"],
)
def test_only_pages_and_images_are_served(server: Server, path: str) -> None:
    assert ask(server, path)[0] == 404


def test_nothing_can_be_written(server: Server) -> None:
    assert {ask(server, "/report.html", method)[0] for method in ("POST", "PUT", "DELETE")} == {501}
    status, headers, text = ask(server, "/report.html", "HEAD")
    assert (status, text) == (200, "")
    assert int(headers["Content-Length"]) > 1000


def test_another_site_cannot_read_the_run_through_a_browser(server: Server) -> None:
    """With DNS rebinding, the browser believes that the server belongs to the site."""
    assert ask(server, "/report.html", Host="evil.example:8300")[0] == 403
    assert ask(server, "/report.html", Host="[half")[0] == 403
    assert ask(server, "/report.html", Host="localhost:9999")[0] == 200, "a forwarded port"


def test_a_slow_page_is_served_for_a_while(folder: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("skyrl_report.watch.server.FAST_S", 0.0)
    site = Site(folder)
    before = site.find("/report.html")
    write_metrics(folder.metrics, [{"reward/avg_raw_reward": 0.125}] * 10)
    assert site.find("/report.html") is before
    assert before is not None
    assert before.version != site.version()


def test_other_interfaces_need_the_token(folder: RunFolder) -> None:
    with serving(Site(folder), "0.0.0.0") as server:
        assert server.token is not None
        assert server.address.endswith(f"/?token={server.token}")
        assert ask(server, "/report.html")[0] == 401
        assert ask(server, "/report.html?token=wrong")[0] == 401
        status, headers, _ = ask(server, f"/?token={server.token}", Host="gpu-box:8300")
        assert status == 303
        cookie = headers["Set-Cookie"].partition(";")[0]
        assert ask(server, "/report.html", Cookie=cookie, Host="gpu-box:8300")[0] == 200
        with pytest.raises(DataError, match="choose another --port"):
            Server(Site(folder), "127.0.0.1", server.server_address[1])


def test_broken_metrics_are_an_answer(server: Server, folder: RunFolder) -> None:
    folder.metrics.write_text("{torn\n{}\n")
    status, _, text = ask(server, "/report.html")
    assert status == 500
    assert "metrics.jsonl:1 is not a JSON object" in text
