"""Load reports have a section about adapters if the engine has any."""

from __future__ import annotations

from scheduler_components.values import AdapterLoad, LoadSections
from scheduler_components.waiting.lora_queue import LoraQueue
from scheduler_engine.engine.scheduler.request import Request
from scheduler_engine.engine.scheduler.scheduler_sections import SchedulerSections


def test_the_section_lists_the_registered_adapters() -> None:
    lora = LoraQueue[Request]()
    sections = SchedulerSections(lora=lora)
    assert sections.load_sections() == LoadSections()
    lora.register("poems", "/poems")
    found = sections.load_sections().lora
    assert found is not None
    assert found.by_adapter == (AdapterLoad("poems"),)
