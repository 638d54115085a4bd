"""The consoles of the command line print text as it is, and report a reader that has gone."""

from __future__ import annotations

import io

import pytest

from scheduler_engine.cli.terminal import make_console


def test_text_is_printed_as_it_is_to_the_chosen_stream(capsys: pytest.CaptureFixture[str]) -> None:
    make_console().print("rank :smile: 12 'a'")
    make_console(stderr=True).print("rank 3")
    assert capsys.readouterr() == ("rank :smile: 12 'a'\n", "rank 3\n")


class GoneReader(io.StringIO):
    """The writing end of a pipe that nothing reads any more."""

    def write(self, text: str) -> int:
        raise BrokenPipeError


def test_a_reader_that_is_gone_is_an_error_of_the_caller() -> None:
    """Rich alone would end the process."""
    console = make_console()
    console.file = GoneReader()
    with pytest.raises(BrokenPipeError):
        console.print("one line")
