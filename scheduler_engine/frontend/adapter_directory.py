"""AdapterDirectory: the adapters that clients may name, and the requests that load and unload them."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from scheduler_components import ConfigError
from scheduler_engine.engine.config import AdapterSpec, LoraConfig
from scheduler_engine.frontend.control_queue import ControlQueue


@dataclass(slots=True, kw_only=True)
class AdapterDirectory:
    """Loads and unloads adapters on all replicas, one at a time.

    Attributes:
        control: sends the commands to the replicas.
        config: None for an engine without adapters, which refuses both.
        model_name: name of the served model, which no adapter may have.
        adapters: the adapters that requests may name, by name.
    """

    control: ControlQueue
    config: LoraConfig | None
    model_name: str
    adapters: dict[str, AdapterSpec] = field(default_factory=dict)
    _changing: asyncio.Lock = field(default_factory=asyncio.Lock, init=False, repr=False)

    def __post_init__(self) -> None:
        if self.config is not None:
            self.adapters.update({each.name: each for each in self.config.adapters})

    async def load(self, spec: AdapterSpec) -> None:
        """Load an adapter on all ranks or on none. Requests may name it from then on.

        Raises:
            ConfigError: the engine has no adapters, or one of this name.
            ControlFailedError: a rank could not load it.
        """
        limits = self._enabled().limits
        async with self._changing:
            if spec.name == self.model_name:
                raise ConfigError("lora_name", spec.name, "is the name of the model", "give another name")
            if spec.name in self.adapters:
                raise ConfigError("lora_name", spec.name, "is loaded already", "unload it first, or give another name")
            await self.control.load_adapter(spec.name, spec.path, pinned=spec.pinned, deadline_s=limits.max_wait_s)
            self.adapters[spec.name] = spec

    async def unload(self, name: str) -> None:
        """Refuse new requests for an adapter. Those that use it finish.

        Raises:
            ConfigError: the engine has no adapters, or none of this name.
        """
        self._enabled()
        async with self._changing:
            if self.adapters.pop(name, None) is None:
                raise ConfigError("lora_name", name, "is no loaded adapter", "see /v1/models")
            await self.control.unload_adapter(name)

    def _enabled(self) -> LoraConfig:
        if self.config is None:
            raise ConfigError("lora_name", None, "cannot be loaded without adapters", "start with --enable-lora")
        return self.config
