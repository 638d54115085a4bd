"""Keys come from an option, a variable or a file, and what cannot work is refused with the option's name."""

from __future__ import annotations

from pathlib import Path

import pytest
from cyclopts import App

from scheduler_components import ConfigError
from scheduler_engine.cli.keys import read_api_key
from scheduler_engine.cli.server_options import ServerOptions
from scheduler_engine.cli.session import ServerConfig


def parse(*arguments: str) -> ServerConfig:
    app = App(result_action="return_value", exit_on_error=False, print_error=False)

    @app.default
    def command(server: ServerOptions = ServerOptions()) -> ServerConfig:  # noqa: B008
        return server.config()

    found = app(list(arguments))
    assert isinstance(found, ServerConfig)
    return found


def test_without_options_there_are_no_keys() -> None:
    assert parse() == ServerConfig()


def test_a_key_comes_from_the_option_the_variable_or_a_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file = tmp_path / "key"
    file.write_text("from-file\n")
    assert parse("--api-key", "given").access.api_key == "given"
    assert parse("--api-key-file", str(file)).access.api_key == "from-file"
    assert parse("--admin-api-key-file", str(file)).access.admin_api_key == "from-file"
    monkeypatch.setenv("SCHEDULER_COMPONENTS_API_KEY", "from-variable")
    monkeypatch.setenv("SCHEDULER_COMPONENTS_ADMIN_API_KEY", "admin")
    access = parse().access
    assert (access.api_key, access.admin_api_key) == ("from-variable", "admin")


def test_a_key_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    for file in ("absent", "binary", "."):
        with pytest.raises(ConfigError, match="api_key_file"):
            read_api_key("api_key", None, tmp_path / file)
    with pytest.raises(ConfigError, match="one of the two"):
        read_api_key("api_key", "given", tmp_path / "binary")


def test_hosts_may_be_repeated_and_the_root_must_be_a_directory(tmp_path: Path) -> None:
    config = parse("--allowed-host", "a.example", "--allowed-host", "B.example", "--weights-root", str(tmp_path))
    assert config.access.allowed_hosts == {"a.example", "b.example"}
    assert config.weights_root == tmp_path
    with pytest.raises(ConfigError, match="weights_root"):
        parse("--weights-root", str(tmp_path / "absent"))


def test_options_do_not_show_their_keys() -> None:
    assert "secret" not in repr(ServerOptions(api_key="secret", admin_api_key="secret"))
