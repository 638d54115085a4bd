"""A promise to users: who embeds one part loads few modules and lines of this project."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.processes

ROOT = Path(__file__).parent.parent
CACHE = """
from scheduler_components import RadixCache
cache = RadixCache(page_size=2, capacity_tokens=16, record=True)
cache.insert([1, 2, 3, 4], cache.allocate(2))
"""
PUBLISHER = """
from scheduler_components import ParallelState, SchedulerKvEventsPublisher
class Source:
    def take_events(self):
        return []
config = '{"publisher": "zmq", "endpoint": "tcp://127.0.0.1:*", "bind": true}'
publisher = SchedulerKvEventsPublisher.open(config, parallel=ParallelState.trivial(), source=Source())
publisher.publish_kv_events()
publisher.shutdown()
"""
(SCHEDULER, *_) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
COUNT = """
import sys
from pathlib import Path
packages = ("scheduler_components", "observability")
own = [Path(module.__file__) for name, module in sys.modules.items() if name.partition(".")[0] in packages]
print(len(own), sum(len(path.read_text().splitlines()) for path in own))
"""


@pytest.mark.parametrize(
    ("code", "max_modules", "max_lines"),
    [(CACHE, 20, 3_500), (PUBLISHER, 45, 9_500), (SCHEDULER, 65, 13_000)],
    ids=["a cache", "a publisher", "the scheduler of the README"],
)
def test_one_part_loads_little(code: str, max_modules: int, max_lines: int) -> None:
    command = [sys.executable, "-c", code + COUNT]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    num_modules, num_lines = map(int, ran.stdout.split()[-2:])
    assert num_modules <= max_modules
    assert num_lines <= max_lines
