"""A forked child notifies the registered objects that still exist."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from pathlib import Path

import pytest

from scheduler_components._internal.fork_hook import register_for_fork

pytestmark = pytest.mark.processes


class Owner:
    def __init__(self, notes: list[str], name: str) -> None:
        self.notes, self.name = notes, name
        register_for_fork(self.after_fork_in_child)

    def after_fork_in_child(self) -> None:
        self.notes.append(self.name)


@pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")  # Python 3.12 warns of what is tested here
def test_a_child_is_notified_and_its_parent_is_not() -> None:
    notes: list[str] = []
    kept, lost = Owner(notes, "kept"), Owner(notes, "lost")
    del lost
    gc.collect()
    child = os.fork()
    if child == 0:
        os._exit(0 if notes == ["kept"] else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert (notes, kept.name) == ([], "kept")


SENDING = """
import os, sys
from scheduler_components import ForkedPublisherError
from scheduler_components.values import KvMetrics, LoadSnapshot
from scheduler_components.kv_events import Endpoint
from scheduler_components.load import open_zmq_load_sink
from scheduler_components.metrics.zmq_kv_metrics import open_zmq_kv_metrics_sink

name, path = sys.argv[1:]
if name == "load":
    sink, value = open_zmq_load_sink(Endpoint(transport="ipc", path=path)), LoadSnapshot()
else:
    sink, value = open_zmq_kv_metrics_sink(f"ipc://{path}"), KvMetrics()
sink.send(value)
child = os.fork()
if child == 0:
    try:
        sink.send(value)
    except ForkedPublisherError as error:
        sink.close()
        sys.exit(7 if error.owner_pid == os.getppid() else 1)  # the regular exit
    sys.exit(1)
code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
sink.send(value)
sink.close()
print(code)
"""


@pytest.mark.parametrize("name", ["load", "metrics"])
def test_a_senders_child_cannot_send_and_its_parent_does_not_notice(name: str, tmp_path: Path) -> None:
    run = subprocess.run(
        [sys.executable, "-W", "ignore:.*multi-threaded:DeprecationWarning", "-c", SENDING, name, f"{tmp_path}/x"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (run.stdout, run.stderr) == ("7\n", "")
