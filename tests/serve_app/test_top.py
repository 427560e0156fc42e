"""What `fairstream-top` shows of a server, asked over HTTP."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import count

import pytest
from rich.console import Console

from serve_app.telemetry.readings import Readings, scrape
from serve_app.top import KEY, WINDOW, main, metrics_url, page
from tests.serve_app.told_service import Service

Answer = Callable[[BaseHTTPRequestHandler], None]
Site = Callable[[Answer], str]


def shown(readings: Readings, tenants: int = 20, width: int = 240) -> str:
    console = Console(width=width)
    with console.capture() as captured:
        console.print(page(readings, tenants))
    return captured.get()


def row(text: str, name: str) -> list[str]:
    """Cells of the line that begins with that name."""
    [found] = [line for line in text.splitlines() if line.strip().startswith(f"{name} ")]
    return re.split(r"  +", found.strip())


def two_seconds(service: Service) -> Readings:
    return Readings([scrape(service.text(), at) for at in (0.0, 2.0)])


def test_every_column_has_its_figure() -> None:
    """So that each metric that is asked for is one that is told."""
    text = shown(two_seconds(Service()))
    models, engines, _ = re.split(r"(?m)^ (?=model|tenant)", text)[1:]
    assert row(models, "tiny")[1:5] == ["1", "16", "11", "0.5"]
    assert row(models, "tiny")[5:] == ["1.75 s", "2.42 s", "40 ms", "49 ms"]
    assert row(engines, "tiny") == [
        *("tiny", "r1", "50.0%", "0.0%", "12.5%", "0.0%", "37.5%"),
        *("3", "2", "100%", "75"),
    ]
    assert row(text, "acme") == [
        *("acme", "3", "7", "fair share", "1,200", "100", "3.0", "18.00"),
        *("4,321 tokens", "$2.50 a day"),
    ]


def test_a_narrow_terminal_cuts_no_figure() -> None:
    service = Service(tenant="a-tenant-with-a-long-name")
    text = shown(two_seconds(service), width=80)
    wide = shown(two_seconds(service))
    for figure in re.findall(r"[\d.,]*\d(?:%| m?s\b)?", wide):
        assert re.search(rf"(?<![\d.,]){re.escape(figure)}(?![\d.,…])", text), figure
    assert "a-tena" in text


def test_many_tenants_are_cut_and_counted() -> None:
    text = shown(two_seconds(Service(tenants=30)), tenants=5)
    assert "and 25 more" in text
    assert "t29" not in text


def test_a_name_changes_neither_terminal_nor_colours() -> None:
    text = shown(two_seconds(Service(tenant="[red]a\x1b[2J")))
    assert "[red]a?[2J" in text
    assert "\x1b" not in text


def test_a_server_that_tells_nothing_yet_has_empty_tables() -> None:
    assert "tenant" in shown(Readings([scrape("", 0.0), scrape("", 2.0)]))


@pytest.fixture
def site() -> Iterator[Site]:
    """Serves what a function answers; its address."""
    servers = []

    def serve(answer: Answer) -> str:
        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                answer(self)

            def log_message(self, *_: object) -> None:
                pass

        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        servers.append(server)
        return f"http://127.0.0.1:{server.server_port}"

    yield serve
    for server in servers:
        server.shutdown()
        server.server_close()


def reply(to: BaseHTTPRequestHandler, status: int, body: str = "", **headers: str) -> None:
    to.send_response(status)
    for name, value in headers.items():
        to.send_header(name, value)
    to.end_headers()
    to.wfile.write(body.encode())


def test_a_page_is_printed(
    site: Site, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a whole window: between two readings a process may have told nothing, or twice."""
    service, asked = Service(), []

    def answer(request: BaseHTTPRequestHandler) -> None:
        asked.append((request.path, request.headers["Authorization"]))
        reply(request, 200, service.text())

    monkeypatch.setenv(KEY, "fs-admin")
    monkeypatch.setenv("COLUMNS", "240")
    url = site(answer)
    main([f"{url}/v1", "--once", "--every", "0.1"])
    assert asked == [("/metrics", "Bearer fs-admin")] * WINDOW
    text = capsys.readouterr().out
    assert f"{url}/metrics" in text
    assert "fair share" in row(text, "acme")
    assert "fs-admin" not in text


@pytest.mark.parametrize(
    ("status", "body", "words"),
    [(401, "", KEY), (503, "", "503"), (200, "<html>\x1b[2J</html>", "cannot be read")],
)
def test_why_there_is_nothing_to_show(site: Site, status: int, body: str, words: str) -> None:
    url = site(lambda request: reply(request, status, body))
    with pytest.raises(SystemExit, match=words) as ended:
        main([url, "--once"])
    assert "\x1b" not in str(ended.value)


def test_nobody_there() -> None:
    with pytest.raises(SystemExit, match="cannot be read"):
        main(["http://127.0.0.1:9", "--once"])


def test_the_key_follows_no_redirect(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(KEY, "fs-admin")
    stolen: list[str | None] = []

    def thief(request: BaseHTTPRequestHandler) -> None:
        stolen.append(request.headers["Authorization"])
        reply(request, 200)

    elsewhere = site(thief)
    url = site(lambda request: reply(request, 302, Location=elsewhere))
    with pytest.raises(SystemExit, match="302"):
        main([url, "--once"])
    assert stolen == []


def test_a_server_that_goes_away_leaves_the_last_figures(
    site: Site, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    service, answers = Service(), count()
    monkeypatch.setenv("COLUMNS", "240")

    def answer(request: BaseHTTPRequestHandler) -> None:
        if next(answers) < 2:
            reply(request, 200, service.text())
        else:
            reply(request, 503)

    seen: list[float] = []

    def sleep(seconds: float) -> None:
        seen.append(seconds)
        if len(seen) > 3:
            raise KeyboardInterrupt

    monkeypatch.setattr("time.sleep", sleep)
    main([site(answer), "--every", "2"])
    text = capsys.readouterr().out
    assert "answers 503 (what follows is older)" in text
    assert "fair share" in row(text, "acme")


@pytest.mark.parametrize(
    ("given", "url"),
    [
        ("http://a:8000", "http://a:8000/metrics"),
        ("https://a/v1/", "https://a/metrics"),
        ("http://a/metrics", "http://a/metrics"),
        ("http://a/llm/v1?x=1", "http://a/llm/metrics"),
    ],
)
def test_any_address_of_the_server_will_do(given: str, url: str) -> None:
    assert metrics_url(given) == url


@pytest.mark.parametrize("given", ["a:8000", "file:///etc/passwd", "http://", ""])
def test_what_is_no_address_is_refused(given: str) -> None:
    with pytest.raises(SystemExit):
        main([given])
