"""One rank's page of a metrics board: a head that names the layout, and a ``DoubleBuffer`` of reports. Pure.

Layout: magic 8, layout id 8, then the two buffers.
"""

from __future__ import annotations

from scheduler_components.errors import DecodeError
from scheduler_components.load.double_buffer import DoubleBuffer
from scheduler_components.metrics.report_codec import LAYOUT_ID, decode_report
from scheduler_components.metrics.stats import SchedulerStats

__all__ = ["PAGE_BYTES", "MetricsPage"]

_MAGIC = b"SCMETRIC"
_HEAD = _MAGIC + LAYOUT_ID
_BUFFER_BYTES = 16 * 1024

PAGE_BYTES = len(_HEAD) + 2 * _BUFFER_BYTES
"""A report with every part and all six histograms has some 3 KB; the rest is room for bounds of one's own."""


class MetricsPage:
    """A page in memory; one process writes to it, any number read.

    Args:
        memory: ``PAGE_BYTES`` bytes. The caller keeps it mapped for as long as the page is used.
    """

    __slots__ = ("_memory", "reports")

    def __init__(self, memory: memoryview) -> None:
        self._memory = memory
        self.reports = DoubleBuffer(memory, start=len(_HEAD), buffer_bytes=_BUFFER_BYTES)

    def claim(self) -> int:
        """Make the page one of this layout, for its new writer; returns the sequence of its last report, or 0.

        What another layout, or another program, left there is wiped: it must not be read as reports.
        """
        if self._memory[: len(_HEAD)] != _HEAD:
            self._memory[:PAGE_BYTES] = bytes(PAGE_BYTES)
            self._memory[: len(_HEAD)] = _HEAD
        last = self.reports.read()
        return 0 if last is None else last[0]

    def write(self, body: bytes, sequence: int) -> None:
        """Write encoded report ``sequence``, which must be one above the last written.

        Raises:
            ValueError: the report does not fit; the last one stands.
        """
        self.reports.write(body, sequence)

    def read(self) -> SchedulerStats | None:
        """Return the newest whole report; None when there is none yet, or the writer was quicker: look again.

        Raises:
            DecodeError: this is no page of reports, or one of another version's, or what is in it is no report.
        """
        head = bytes(self._memory[: len(_HEAD)])
        if not any(head):
            return None  # its writer is about to claim it
        if head != _HEAD:
            raise DecodeError(_what_is_wrong_with(head))
        found = self.reports.read()
        return None if found is None else decode_report(found[1])


def _what_is_wrong_with(head: bytes) -> str:
    if not head.startswith(_MAGIC):
        return "not a page of metrics"
    layout = head[len(_MAGIC) :].hex()
    return (
        f"its metrics have layout {layout}, this reader knows {LAYOUT_ID.hex()}; run both from one version of the kit"
    )
