"""Key files. Property: a file yields a valid key, or a ConfigError that names the setting, and nothing is opened."""

from __future__ import annotations

import json
import stat
from collections.abc import Callable
from pathlib import Path

import pytest
import zmq.auth
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from kit.searches import num_examples

from scheduler_components import ConfigError, StartError
from scheduler_components.kv_events import (
    CurveClientKeys,
    CurveServerKeys,
    EventPublisherFactory,
    KVEventsConfig,
    write_key_pair,
)
from scheduler_components.kv_events.zmq_auth import read_key_pair, read_public_key

pytestmark = pytest.mark.sockets


def test_a_pair_is_written_for_its_owner_alone_and_read_back(tmp_path: Path) -> None:
    public_file, secret_file = write_key_pair(tmp_path / "new" / "keys", "router-1")
    assert stat.S_IMODE(secret_file.stat().st_mode) == 0o600
    assert stat.S_IMODE((tmp_path / "new" / "keys").stat().st_mode) == 0o700
    pair = read_key_pair(secret_file, field="secret_key_file")
    assert pair.public == read_public_key(public_file, field="key")
    assert (pair.public, pair.secret) == zmq.auth.load_certificate(secret_file)
    assert pair.secret.decode() not in public_file.read_text() + repr(pair)


def test_keys_are_never_overwritten(tmp_path: Path) -> None:
    public_file, secret_file = write_key_pair(tmp_path, "a")
    before = secret_file.read_bytes()
    with pytest.raises(ConfigError, match="has keys in"):
        write_key_pair(tmp_path, "a")
    secret_file.unlink()
    with pytest.raises(ConfigError, match="has keys in"):
        write_key_pair(tmp_path, "a")
    assert [path.name for path in tmp_path.iterdir()] == [public_file.name]
    assert before not in public_file.read_bytes()


@pytest.mark.parametrize("name", ["", "../a", "a/b", ".hidden", "a\0", "x" * 101, "a b"])
def test_a_name_that_is_no_file_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match="does not fit the name of a key file"):
        write_key_pair(tmp_path, name)
    assert not list(tmp_path.iterdir())


def test_a_directory_that_cannot_be_is_a_start_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StartError, match="cannot write keys"):
        write_key_pair(tmp_path / "file" / "below", "a")


@pytest.fixture
def paths(tmp_path: Path) -> dict[str, Path]:
    """A publisher's secret, its public key, and the directory of one client."""
    public_file, secret_file = write_key_pair(tmp_path / "own", "publisher")
    client_public, client_secret = write_key_pair(tmp_path / "made", "client")
    clients = tmp_path / "clients"
    clients.mkdir(mode=0o755)
    client_public.rename(clients / "client.key")
    return {"secret": secret_file, "public": public_file, "clients": clients, "client_secret": client_secret}


def test_both_halves_are_read(paths: dict[str, Path]) -> None:
    access = CurveServerKeys.read(str(paths["secret"]), str(paths["clients"]))
    client = CurveClientKeys.read(str(paths["client_secret"]), str(paths["public"]))
    assert client.publisher == access.keys.public
    assert access.allowed == {client.keys.public}


Break = Callable[[dict[str, Path]], object]


def _make_fifo_like(paths: dict[str, Path]) -> None:
    paths["secret"].unlink()
    paths["secret"].mkdir()


@pytest.mark.parametrize(
    ("spoil", "field", "said"),
    [
        (lambda p: p["secret"].unlink(), "secret_key_file", "No such file"),
        (lambda p: p["secret"].chmod(0o640), "secret_key_file", "chmod 600"),
        (lambda p: p["secret"].chmod(0o604), "secret_key_file", "chmod 600"),
        (_make_fifo_like, "secret_key_file", "not a key file"),
        (lambda p: p["secret"].write_text(""), "secret_key_file", "no public key"),
        (lambda p: p["secret"].write_text(p["public"].read_text()), "secret_key_file", "no secret key"),
        (lambda p: p["secret"].write_bytes(b"x" * 70_000), "secret_key_file", "not a key file"),
        (
            lambda p: p["secret"].write_text(p["secret"].read_text().replace('secret-key = "', 'secret-key = "x')),
            "secret_key_file",
            "not a pair",
        ),
        (
            lambda p: p["secret"].write_text(
                p["client_secret"].read_text().split("public-key")[0]
                + p["public"].read_text().split("curve\n")[1]
                + p["client_secret"].read_text().rsplit("\n", 2)[1]
            ),
            "secret_key_file",
            "not a pair",
        ),
        (lambda p: p["clients"].chmod(0o757), "client_keys_dir", "chmod go-w"),
        (lambda p: p["clients"].chmod(0o770), "client_keys_dir", "chmod go-w"),
        (lambda p: p["clients"].chmod(0o1777), "client_keys_dir", "chmod go-w"),
        (lambda p: (p["clients"] / "client.key").chmod(0o664), "client_keys_dir", "chmod go-w"),
        (lambda p: p["secret"].parent.chmod(0o777), "secret_key_file", "chmod go-w"),
        (lambda p: p["secret"].parent.chmod(0o770), "secret_key_file", "chmod go-w"),
        (lambda p: (p["clients"] / "client.key").unlink(), "client_keys_dir", "holds no key"),
        (
            lambda p: (p["clients"] / "b.key").write_text('public-key = "short"'),
            "client_keys_dir",
            "no valid public key",
        ),
        (
            lambda p: (p["clients"] / "b.key").write_text(p["client_secret"].read_text()),
            "client_keys_dir",
            "another party's secret",
        ),
    ],
)
def test_a_spoilt_file_is_a_config_error_before_anything_opens(
    paths: dict[str, Path], free_ports: Callable[[int], int], spoil: Break, field: str, said: str
) -> None:
    spoil(paths)
    config = KVEventsConfig(
        publisher="zmq",
        endpoint=f"tcp://127.0.0.1:{free_ports(1)}",
        bind=True,
        auth="required",
        secret_key_file=str(paths["secret"]),
        client_keys_dir=str(paths["clients"]),
    )
    with pytest.raises(ConfigError) as refused:
        EventPublisherFactory.create(config)
    assert refused.value.field == field
    assert said in str(refused.value)


@pytest.mark.soak
@settings(deadline=None, max_examples=num_examples(4), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(content=st.binary(max_size=200) | st.binary(max_size=60).map(lambda key: b'public-key = "' + key + b'"'))
@example(content=b'public-key = "' + b"#" * 40 + b'"')
@example(content=b"public-key")
@example(content=b'public-key = "' + b"\xff" * 40 + b'"')
def test_any_file_is_a_key_or_a_config_error(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "any.key"
    path.write_bytes(content)
    try:
        key = read_public_key(path, field="key")
    except ConfigError as error:
        assert error.field == "key"
    else:
        assert len(key) == 40


@pytest.mark.parametrize("path", ["", "\0", "\ud800", "/nowhere/at/all"])
def test_a_path_that_is_none_is_a_config_error(path: str) -> None:
    with pytest.raises(ConfigError):
        CurveServerKeys.read(path, path)


@pytest.mark.parametrize(
    ("given_settings", "field", "said"),
    [
        ({"auth": "yes"}, "auth", "give one of none, required"),
        ({"auth": "require"}, "auth", "did you mean 'required'?"),
        ({"auth": None}, "auth", "give a string"),
        ({"auth": "required"}, "secret_key_file", "is missing"),
        ({"auth": "required", "secret_key_file": "a"}, "client_keys_dir", "is missing"),
        ({"auth": "required", "secret_key_file": "", "client_keys_dir": "b"}, "secret_key_file", "is missing"),
        ({"secret_key_file": "a"}, "auth", "does not use secret_key_file"),
        ({"client_keys_dir": "a"}, "auth", "does not use client_keys_dir"),
        (
            {"auth": "required", "secret_key_file": "a", "client_keys_dir": "b", "endpoint": "inproc://x"},
            "endpoint",
            "has no keys",
        ),
        (
            {"auth": "required", "secret_key_file": "a", "client_keys_dir": "b", "replay_endpoint": "inproc://x"},
            "replay_endpoint",
            "has no keys",
        ),
    ],
)
def test_auth_settings_require_each_other(given_settings: dict[str, object], field: str, said: str) -> None:
    with pytest.raises(ConfigError) as refused:
        KVEventsConfig.from_cli(json.dumps(given_settings))
    assert refused.value.field == field
    assert said in str(refused.value)


def test_auth_is_not_promised_for_publishers_of_others() -> None:
    class Factory(EventPublisherFactory):
        pass

    def open_other(**_: object) -> None:
        raise AssertionError("must not be opened without the protection that was asked for")

    Factory.register_publisher("other", open_other)  # type: ignore[arg-type]
    config = KVEventsConfig(publisher="other", auth="required", secret_key_file="a", client_keys_dir="b")
    with pytest.raises(ConfigError, match="not known to reach"):
        Factory.create(config)
