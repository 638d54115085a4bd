"""``keygen`` on the command line: two files, told where; a mistake is one line."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from scheduler_components.kv_events import ClientKeys
from scheduler_components.reference.cli import main as cli


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int | str:
    monkeypatch.setattr(sys, "argv", ["scheduler-components", *arguments])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    return ended.value.code or 0


def test_keygen_writes_what_the_kit_reads(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert run(monkeypatch, "keygen", str(tmp_path / "keys"), "router-1") == 0
    public_file, secret_file = (line.split(":", 1)[1].strip() for line in capsys.readouterr().out.splitlines())
    assert ClientKeys.read(secret_file, public_file).publisher
    assert run(monkeypatch, "keygen", str(tmp_path / "keys"), "router-1") == 2
    assert "has keys in" in capsys.readouterr().err
    assert run(monkeypatch, "keygen", str(tmp_path / "keys"), "../router") == 2
    complaint = capsys.readouterr().err
    assert complaint.startswith("scheduler-components: ")
    assert complaint.count("\n") == 1
