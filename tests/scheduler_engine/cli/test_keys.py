"""A command needs both key files of a client, or neither."""

from __future__ import annotations

import pytest

from scheduler_components import ConfigError
from scheduler_engine.cli.keys import read_client_keys


def test_without_key_files_there_are_no_keys() -> None:
    assert read_client_keys(None, None) is None


@pytest.mark.parametrize(
    ("secret", "public", "missing"), [("s", None, "publisher_key_file"), (None, "p", "secret_key_file")]
)
def test_one_key_file_alone_is_refused_and_the_other_is_named(
    secret: str | None, public: str | None, missing: str
) -> None:
    with pytest.raises(ConfigError, match="give both key files, or neither") as error:
        read_client_keys(secret, public)
    assert error.value.field == missing
