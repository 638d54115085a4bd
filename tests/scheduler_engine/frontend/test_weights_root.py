"""A client names paths below one directory only, and learns nothing about others."""

from __future__ import annotations

from pathlib import Path

import pytest

from scheduler_components import ConfigError
from scheduler_engine.frontend.weights_root import default_weights_root, resolve_below


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "models" / "tiny").mkdir(parents=True)
    (tmp_path / "secret").mkdir()
    (tmp_path / "models" / "out").symlink_to(tmp_path / "secret")
    (tmp_path / "models" / "alias").symlink_to(tmp_path / "models" / "tiny")
    (tmp_path / "models" / "loop").symlink_to(tmp_path / "models" / "loop")
    (tmp_path / "models-other").mkdir()
    return tmp_path / "models"


def refusal(root: Path | None, text: str) -> str:
    with pytest.raises(ConfigError) as raised:
        resolve_below(root, text)
    return str(raised.value).replace(repr(text), "PATH")


def test_paths_below_the_root_are_found(root: Path) -> None:
    tiny = (root / "tiny").resolve()
    for text in ("tiny", "./tiny/", str(root / "tiny"), "alias", "tiny/../tiny"):
        assert resolve_below(root, text) == tiny
    assert resolve_below(root, ".") == root.resolve()


def test_missing_and_forbidden_paths_get_one_message(root: Path, tmp_path: Path) -> None:
    texts = [
        str(tmp_path / "secret"),
        str(tmp_path / "absent"),
        "absent",
        "../secret",
        "out",
        "loop",
        "../models-other",
        str(tmp_path / "models-other"),
        "/",
        "tiny\0",
        "x" * 5000,
    ]
    messages = {refusal(root, text) for text in texts[:-1]}
    assert len(messages) == 1, messages
    assert "x" * 300 not in refusal(root, texts[-1])
    assert refusal(None, str(root / "tiny")) in messages
    assert refusal(tmp_path / "absent", "tiny") in messages


def test_by_default_the_root_is_the_served_model_s_own_folder(root: Path) -> None:
    file = root / "model.gguf"
    file.write_bytes(b"")
    assert default_weights_root(str(root / "tiny")) == root / "tiny"
    assert default_weights_root(str(file)) == root
