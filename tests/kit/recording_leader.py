"""A rank's end of the frontend's command socket, for tests of a frontend without ranks."""

from __future__ import annotations

from scheduler_engine.engine.messages import RankCommand, decode_command


class RecordingLeader:
    """Keeps the commands that a frontend sends to the leader of a replica."""

    def __init__(self) -> None:
        self.commands: list[RankCommand] = []

    def send(self, frame: bytes, flags: int) -> None:
        self.commands.append(decode_command(frame))
