"""One rank's page of a metrics board: a head that names the layout, and a ``DoubleBuffer`` of reports. Pure.

Layout: magic 8, layout id 8, then the two buffers.
"""

from __future__ import annotations

from scheduler_components.errors import DecodeError
from scheduler_components.load.double_buffer import DoubleBuffer, ReadAt, read_newest
from scheduler_components.metrics.report_codec import LAYOUT_ID

__all__ = ["PAGE_BYTES", "MetricsPage", "look_at_metrics_page"]

_MAGIC = b"SCMETRIC"
_HEAD = _MAGIC + LAYOUT_ID
_BUFFER_BYTES = 16 * 1024

PAGE_BYTES = len(_HEAD) + 2 * _BUFFER_BYTES
"""A report with every part and all six histograms has some 3 KB; the rest is room for bounds of one's own."""


class MetricsPage:
    """The writer's end of a page, of which there is one.

    Args:
        memory: ``PAGE_BYTES`` bytes. The caller keeps it mapped for as long as the page is used.

    Attributes:
        reports: where encoded reports are written, once the page is claimed.
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
        return self.reports.last_sequence()


def look_at_metrics_page(read_at: ReadAt, known_sequence: int = 0) -> tuple[int, bytes] | None:
    """Return the newest whole report of a page and its sequence, as ``read_newest`` does, which says more.

    Raises:
        DecodeError: this is no page of reports, or one of another version's, or it is cut short.
    """
    head = read_at(len(_HEAD), 0)
    if not any(head):
        return None  # its writer is about to claim it
    if head != _HEAD:
        raise DecodeError(_what_is_wrong_with(head))
    return read_newest(read_at, len(_HEAD), _BUFFER_BYTES, known_sequence)


def _what_is_wrong_with(head: bytes) -> str:
    if len(head) < len(_HEAD) or not head.startswith(_MAGIC):
        return "not a page of metrics"
    layout = head[len(_MAGIC) :].hex()
    return (
        f"its metrics have layout {layout}, this reader knows {LAYOUT_ID.hex()}; run both from one version of the kit"
    )
