"""SchedulerSections: the optional sections of a scheduler's load report."""

from __future__ import annotations

from dataclasses import dataclass

from scheduler_components.values import LoadSections
from scheduler_components.waiting.lora_queue import LoraQueue
from scheduler_engine.engine.scheduler.request import Request

__all__ = ["SchedulerSections"]

_NO_SECTIONS = LoadSections()


@dataclass(slots=True, kw_only=True)
class SchedulerSections:
    """The load sections of a scheduler.

    Attributes:
        lora: its adapters. Without any the report has no section about them.
    """

    lora: LoraQueue[Request]

    def load_sections(self) -> LoadSections:
        """Return the sections; read in every step."""
        return LoadSections(lora=self.lora.lora_load()) if self.lora.adapters else _NO_SECTIONS
