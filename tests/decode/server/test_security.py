"""Keys, names of the host, and what a page may do."""

import re

import openai
import pytest
from live_server import serving
from starlette.requests import Request

from decode.server import security
from decode.server.errors import ApiError
from laneformer_jax.errors import UserError

KEYS = (b"first-key", "schlüssel".encode())


@pytest.fixture(scope="module")
def locked(loaded, engine):
    with serving(loaded, engine, keys=KEYS) as running:
        yield running


def test_a_key_opens(locked, expected):
    answer = locked.client("first-key").completions.create(
        model="tiny", prompt="def f(", max_tokens=4, temperature=0
    )
    assert answer.choices[0].text == expected("def f(", 4)


@pytest.mark.parametrize(
    "header",
    [
        None,
        b"",
        b"Bearer",
        b"Bearer first-ke",
        b"Bearer first-key2",
        b"Basic first-key",
        b"first-key",
        "Bearer schlüsse".encode(),
        b"Bearer \xff\xfe",
    ],
)
@pytest.mark.parametrize(
    "path", ["/v1/models", "/v1/completions", "/v1/chat/completions", "/metrics"]
)
def test_anything_else_does_not(locked, header, path):
    headers = {} if header is None else {b"Authorization": header}
    method = "POST" if "completions" in path else "GET"
    response = locked.http.request(method, path, headers=headers)
    assert response.status_code == 401
    assert response.json()["error"]["code"] == "invalid_api_key"
    assert response.headers["www-authenticate"] == "Bearer"
    assert "first-key" not in response.text


def test_keys_are_bytes(locked):
    for key in KEYS:
        response = locked.http.get("/v1/models", headers={b"Authorization": b"bearer " + key})
        assert response.status_code == 200
    with pytest.raises(openai.AuthenticationError, match="wrong API key"):
        locked.client("other").models.list()


def test_all_keys_are_compared_in_constant_time(monkeypatch):
    compared = []

    def compare(a, b):
        compared.append((a, b))
        return a == b

    monkeypatch.setattr(security.hmac, "compare_digest", compare)
    request = Request({"type": "http", "headers": [(b"authorization", b"Bearer first-key")]})
    security.check_key(request, KEYS)
    assert compared == [(b"first-key", key) for key in KEYS]


def test_health_and_the_page_need_no_key(locked):
    assert locked.http.get("/health").status_code == 200
    page = locked.http.get("/")
    assert page.status_code == 200
    assert "tiny" not in page.text


def test_keys_come_from_a_file_or_the_environment(tmp_path, monkeypatch):
    monkeypatch.delenv(security.KEY_VARIABLE, raising=False)
    assert security.load_keys(None) == ()
    monkeypatch.setenv(security.KEY_VARIABLE, "from-env ")
    assert security.load_keys(None) == (b"from-env",)
    file = tmp_path / "keys"
    file.write_bytes(b"a\n\n b \r\n\xff\n")
    assert security.load_keys(file) == (b"a", b"b", b"\xff")
    file.write_text("\n \n")
    with pytest.raises(UserError, match="holds no key"):
        security.load_keys(file)
    with pytest.raises(UserError, match="cannot be read"):
        security.load_keys(tmp_path)
    monkeypatch.setenv(security.KEY_VARIABLE, " ")
    with pytest.raises(UserError, match="is set but empty"):
        security.load_keys(None)


def test_only_names_of_this_machine_are_answered(server):
    """A page elsewhere may point a name of its own here; the browser then sends that name."""
    for host in (
        "localhost",
        "localhost:1",
        "127.0.0.1:8000",
        "[::1]:8000",
        "[::1]",
        "a.localhost",
    ):
        assert server.http.get("/v1/models", headers={"Host": host}).status_code == 200, host
    for host in ("evil.example", "evil.example:80", "localhost.evil.example", "10.0.0.1", ""):
        for path in ("/", "/v1/models", "/metrics"):
            response = server.http.get(path, headers={"Host": host})
            assert response.status_code == 403, host
        response = server.http.post("/v1/completions", json={"prompt": "a"}, headers={"Host": host})
        assert response.json()["error"]["code"] == "wrong_host"


def test_a_server_for_other_machines_answers_to_any_name(loaded, engine):
    with serving(loaded, engine, only_loopback=False) as open_server:
        headers = {"Host": "models.example"}
        assert open_server.http.get("/v1/models", headers=headers).status_code == 200


@pytest.mark.parametrize(
    ("host", "loopback"),
    [("127.0.0.1", True), ("::1", True), ("localhost", True), ("0.0.0.0", False), ("::", False)],
)
def test_which_addresses_are_this_machine_only(host, loopback):
    assert security.is_loopback(host) == loopback


def test_the_page_loads_nothing_and_runs_only_its_own_script(server):
    page = server.http.get("/")
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    policy = dict(
        part.strip().split(" ", 1) for part in page.headers["content-security-policy"].split(";")
    )
    assert policy["default-src"] == "'none'"
    assert policy["connect-src"] == "'self'"
    assert policy["script-src"].startswith("'sha256-")
    assert "unsafe" not in page.headers["content-security-policy"]
    assert not re.search(r"""(src|href)=["'](?!data:)""", page.text)
    assert not re.search(
        r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(", page.text
    )
    assert not re.search(r"""https?://(?!www\.w3\.org/2000/svg)""", page.text)
    assert not re.search(r"\son\w+=|style=", page.text)


def test_other_pages_may_not_read_answers(server):
    headers = {"Origin": "https://evil.example", "Access-Control-Request-Method": "POST"}
    asked = server.http.options("/v1/completions", headers=headers)
    assert asked.status_code == 405
    assert not any(name.startswith("access-control") for name in asked.headers)


def test_errors_name_no_secret():
    request = Request({"type": "http", "headers": [(b"authorization", b"Bearer x")]})
    with pytest.raises(ApiError) as refused:
        security.check_key(request, KEYS)
    assert all(key.decode() not in str(refused.value.body()) for key in KEYS)
