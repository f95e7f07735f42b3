"""Keys from a file: what each may take, whichever API process is asked, and what is told about it."""

from __future__ import annotations

import hashlib
import os
import pickle
import re
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from http_server import Server, http_client, refusal, running, wait_for

from mini_infer.core.errors import ConfigError
from mini_infer.serving import keys as module
from mini_infer.serving.keys import Accounts, Exceeded, Key, Keys
from mini_infer.serving.settings import ServerSettings

FILE = f"""
alice: {{key: alice-key}}
bob: {{sha256: "{hashlib.sha256(b"bob-key").hexdigest()}"}}
carol: {{key: carol-key}}
dave: {{key: dave-key}}
few: {{key: few-key, requests_per_minute: 2}}
rare: {{key: rare-key, requests_per_minute: 1}}
one: {{key: one-key, max_open: 1}}
tokens: {{key: tokens-key, tokens_per_minute: 60}}
"""


# --- the file -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "object"),
        ("{}", "no key"),
        ("a: {key: x, rate: 3}", "unknown field `rate`"),
        ("a: {requests_per_minute: 3}", "give either key or sha256"),
        ("a: {key: x, sha256: '" + "0" * 64 + "'}", "give either key or sha256"),
        ("a: {sha256: abc}", "64 digits"),
        ("a: {key: x, requests_per_minute: 0}", "> 0"),
        ("a: {key: x, max_open: -1}", ">= 1"),
        ("a: {key: x, max_open: some}", "Expected `int"),
        ("a b: {key: x}", "'a b'"),
        ("default: {key: x}", "'default'"),
        ("a: {key: x}\nb: {key: x}", "two names have the same key"),
        ("a: {key: [", "api_keys"),
    ],
)
def test_files_that_cannot_be(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "keys.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match="api_keys") as error:
        Keys(None, str(path))
    assert said in str(error.value)


def test_whose_key_it_is(tmp_path: Path) -> None:
    path = tmp_path / "keys.yaml"
    path.write_text(FILE)
    keys = Keys("plain", str(path))
    assert name_of(keys, "Bearer bob-key") == "bob"
    assert name_of(keys, "bearer  plain ") == "default"
    for nobody in ("", "Bearer ", "Bearer none", "Basic bob-key", "bob-key", "Bearer \udc80"):
        assert name_of(keys, nobody) is None
    assert not Keys(None, None)


def name_of(keys: Keys, authorization: str) -> str | None:
    found = keys.find(authorization)
    return None if found is None else found[0]


def test_a_file_that_changes_is_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(module, "LOOK_S", 0.0)
    path = tmp_path / "keys.yaml"
    path.write_text(FILE)
    keys = pickle.loads(pickle.dumps(ServerSettings(api_keys=str(path)))).keys  # as an API process gets it
    assert name_of(keys, "Bearer alice-key") == "alice"
    path.write_text("zoe: {key: zoe-key, max_open: 1}")
    assert name_of(keys, "Bearer alice-key") is None
    assert keys.find("Bearer zoe-key") == ("zoe", Key(key="zoe-key", max_open=1))
    for broken in ("zoe: {rate: 1}", None):
        if broken is None:
            path.unlink()
        else:
            path.write_text(broken)
        assert name_of(keys, "Bearer zoe-key") == "zoe", "what cannot be used changes nothing"
        assert "the keys stay as they were" in caplog.text
        caplog.clear()
    path.write_text("zoe: {key: new-key}")
    assert name_of(keys, "Bearer new-key") == "zoe"


def test_settings_that_need_keys(tmp_path: Path) -> None:
    for flag in ("--isolate-keys", "--key-everywhere"):
        code, said = refusal("--dry-run", flag)
        assert (code, "needs keys" in said) == (2, True)
    code, said = refusal("--dry-run", "--api-keys", str(tmp_path / "none"))
    assert (code, "names no file" in said) == (2, True)
    wrong = tmp_path / "wrong.yaml"
    wrong.write_text("a: {rate: 1}")
    code, said = refusal("--dry-run", "--port", "0", "--api-keys", str(wrong))
    assert (code, "unknown field" in said) == (2, True)


# --- accounts -----------------------------------------------------------------------------------------------------


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


def taken(accounts: Accounts, limits: Key, times: int, completions: int = 1, name: str = "x") -> int:
    """How many requests of so many are taken."""
    for number in range(times):
        try:
            accounts.take(name, limits, 1, completions)
        except Exceeded:
            return number
    return times


def test_a_minutes_requests_may_come_at_once_and_then_one_after_another() -> None:
    clock = Clock()
    accounts, limits = Accounts(None, 1, clock), Key(key="x", requests_per_minute=6)
    assert taken(accounts, limits, 10) == 6
    with pytest.raises(Exceeded, match="requests_per_minute is 6") as error:
        accounts.take("x", limits, 1, 1)
    assert error.value.retry_after == pytest.approx(10)
    clock.now += 10.01
    assert taken(accounts, limits, 10) == 1
    clock.now += 3600
    assert taken(accounts, limits, 10) == 6


def test_less_than_one_a_minute() -> None:
    clock = Clock()
    accounts, limits = Accounts(None, 1, clock), Key(key="x", requests_per_minute=0.5)
    assert taken(accounts, limits, 3) == 1
    clock.now += 119
    assert taken(accounts, limits, 3) == 0
    clock.now += 1.01
    assert taken(accounts, limits, 3) == 1


def test_tokens_are_owed() -> None:
    clock = Clock()
    accounts, limits = Accounts(None, 1, clock), Key(key="x", tokens_per_minute=60)
    accounts.take("x", limits, 50, 1)
    accounts.give_back("x", limits, 40, 1)  # 30 more than there are
    with pytest.raises(Exceeded, match="tokens_per_minute is 60") as error:
        accounts.take("x", limits, 1, 1)
    assert error.value.retry_after == pytest.approx(30)
    clock.now += 30.5
    accounts.take("x", limits, 1, 1)


def test_what_is_open() -> None:
    accounts, limits = Accounts(None, 1, Clock()), Key(key="x", max_open=3)
    assert taken(accounts, limits, 5) == 3
    accounts.give_back("x", limits, 0, 2)
    assert taken(accounts, limits, 1, completions=3) == 0
    accounts.give_back("x", limits, 0, 1)
    assert taken(accounts, limits, 1, completions=9) == 1  # alone it is served, as with --max-queued


def test_who_owes_nothing_makes_room_for_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_KEYS", 2)
    clock = Clock()
    accounts, limits = Accounts(None, 1, clock), Key(key="x", requests_per_minute=1, max_open=1)
    assert [taken(accounts, limits, 2, name=name) for name in "abc"] == [1, 1, 0]
    accounts.give_back("a", limits, 0, 1)
    clock.now += 61
    assert [taken(accounts, limits, 2, name=name) for name in "cab"] == [1, 0, 0]  # b's is still open


def test_processes_share_them_and_a_killed_one_owes_nothing(tmp_path: Path) -> None:
    path = tmp_path / "accounts"
    limits = Key(key="x", max_open=4, requests_per_minute=100)
    accounts = Accounts(os.open(path, os.O_RDWR | os.O_CREAT), 2)
    child = os.fork()
    if child == 0:  # ends without giving anything back
        os._exit(taken(Accounts(os.open(path, os.O_RDWR), 2), limits, 3))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 3
    assert taken(accounts, limits, 4) == 1
    child = os.fork()
    if child == 0:  # takes the place of the one before it
        os._exit(taken(Accounts(os.open(path, os.O_RDWR), 2), limits, 9))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 3


# --- the server ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    path = tmp_path_factory.mktemp("keys") / "keys.yaml"
    path.write_text(FILE)
    flags = ("--api-keys", str(path), "--isolate-keys", "--key-everywhere", "--api-processes", "2")
    root = ("--root-path", "/m")  # the beginning of /metrics, which is not under it
    with running(*flags, *root, "--model.dry.step_ms", "2") as server:
        yield server


def ask(server: Server, key: str, prompt: str = "hello", **body: object) -> tuple[int, dict[str, object]]:
    """From a connection of its own, so that either API process may answer."""
    headers = {"authorization": f"Bearer {key}", "connection": "close"}
    response = server.http.post("/v1/completions", json={"prompt": prompt, "max_tokens": 2, **body}, headers=headers)
    if response.status_code == 429:
        assert int(response.headers["retry-after"]) >= 1
    return response.status_code, response.json()


def test_each_key_has_its_own_limits(server: Server) -> None:
    assert ask(server, "nobody")[0] == 401
    assert server.http.get("/v1/models", headers={"x": "x" * 2**17}).status_code == 431, "before any key is looked at"
    assert [ask(server, "few-key")[0] for _ in range(4)] == [200, 200, 429, 429]
    assert ask(server, "few-key")[1]["error"]["code"] == "rate_limit_exceeded"  # type: ignore[index]
    assert [ask(server, "bob-key")[0] for _ in range(4)] == [200] * 4
    assert ask(server, "tokens-key", "a" * 100)[0] == 200
    status, answer = ask(server, "tokens-key")
    assert (status, "tokens_per_minute is 60" in str(answer)) == (429, True)


def test_what_ends_is_no_longer_open(server: Server) -> None:
    headers = {"authorization": "Bearer one-key", "connection": "close"}
    body = {"prompt": "x", "max_tokens": 2000, "ignore_eos": True, "stream": True}
    for _ in range(2):
        with server.http.stream("POST", "/v1/completions", json=body, headers=headers) as response:
            lines = response.iter_lines()
            next(lines)
            status, answer = ask(server, "one-key")
            assert (status, "max_open is 1" in str(answer)) == (429, True)
        wait_for(lambda: ask(server, "one-key")[0] == 200)  # it has left, and so has its answer
    assert ask(server, "one-key", max_tokens=-1)[0] == 400
    assert ask(server, "one-key")[0] == 200


def test_a_key_finds_its_own_prefixes_alone(server: Server) -> None:
    def cached(key: str) -> int:
        usage = ask(server, key, "b" * 200)[1]["usage"]
        return usage["prompt_tokens_details"]["cached_tokens"]  # type: ignore[index]

    assert cached("alice-key") == 0
    assert cached("alice-key") > 0
    assert cached("bob-key") == 0


def counts(server: Server, key: str) -> dict[str, float]:
    text = server.http.get("/metrics", headers={"authorization": "Bearer alice-key"}).text
    found = re.findall(rf'^mini_infer:(\w+){{.*key="{key}".*}} (\S+)$', text, re.MULTILINE)
    return {name: float(value) for name, value in found}


def test_who_leaves_pays_for_what_was_computed(server: Server) -> None:
    """Also for a whole answer, of which nothing had come."""
    body = {"prompt": "hello", "max_tokens": 2000, "ignore_eos": True}
    with http_client(server.url, 0.3) as client, pytest.raises(httpx.TimeoutException):
        client.post("/v1/completions", json=body, headers={"authorization": "Bearer dave-key"})
    wait_for(lambda: 10 < counts(server, "dave").get("key_generation_tokens_total", 0) < 2000)


def test_metrics_count_by_key_and_ask_for_one(server: Server) -> None:
    for path in ("/metrics", "/docs", "/openapi.json"):
        assert server.http.get(path).status_code == 401
        assert server.http.get(path, headers={"authorization": "Bearer alice-key"}).status_code == 200
    for path in ("/healthz", "/readyz", "/version"):
        assert server.http.get(path).status_code == 200

    assert ask(server, "carol-key", "c" * 30, max_tokens=5, ignore_eos=True)[0] == 200
    wait_for(lambda: counts(server, "carol").get("key_generation_tokens_total") == 5)
    assert counts(server, "carol") == {
        "key_requests_total": 1,
        "key_prompt_tokens_total": 30,
        "key_generation_tokens_total": 5,
    }
    assert [ask(server, "rare-key")[0] for _ in range(3)] == [200, 429, 429]
    wait_for(lambda: counts(server, "rare").get("key_refusals_total") == 2)
