"""The command line, run in this process."""

from kit.command_line import command_line, log_of_the_tests

__all__ = ["command_line", "log_of_the_tests"]
