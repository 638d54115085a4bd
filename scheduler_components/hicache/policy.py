"""HiCachePolicy: when a hierarchical cache writes, prefetches and loads pages."""

from __future__ import annotations

import math
from typing import Literal, TypeAlias

import attrs

from scheduler_components.errors import ConfigError
from scheduler_components.validators import integer_validator, number_validator

__all__ = ["HiCachePolicy", "LoadBackMode", "PrefetchPolicy", "WritePolicy"]

WritePolicy: TypeAlias = Literal["write_through", "write_through_selective", "write_back"]
PrefetchPolicy: TypeAlias = Literal["best_effort", "wait_complete", "timeout"]
LoadBackMode: TypeAlias = Literal["whole", "by_layer"]


def _check_write(_: object, attribute: attrs.Attribute[str], value: str) -> None:
    _check_choice(attribute.name, value, ("write_through", "write_through_selective", "write_back"))


def _check_stop(_: object, attribute: attrs.Attribute[str], value: str) -> None:
    _check_choice(attribute.name, value, ("best_effort", "wait_complete", "timeout"))


def _check_load(_: object, attribute: attrs.Attribute[str], value: str) -> None:
    _check_choice(attribute.name, value, ("whole", "by_layer"))


def _check_choice(field: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ConfigError(field, value, "is not a policy", f"give one of {', '.join(choices)}")


@attrs.frozen(kw_only=True)
class HiCachePolicy:
    """When a hierarchical cache writes, and when it stops prefetching; the same on every rank of a replica.

    Attributes:
        write: copy pages to the host as soon as they are cached (``write_through``), once enough requests have found
            them (``write_through_selective``), or when they near eviction from the device (``write_back``).
        write_threshold_hits: with ``write_through_selective``, how many requests must have found a page in the cache.
            ``PrefetchQueue.is_done`` counts, once per request. What is evicted before is lost.
        clean_ahead_pages: with ``write_back``, how many of the next pages to evict are kept copied ahead of need.
            What is evicted uncopied is lost, never waited for.
        prefetch: when a prefetch from storage ends before it is complete: as soon as its request could run
            (``best_effort``), never (``wait_complete``), or when any rank's clock says so (``timeout``). Whatever the
            prefetch is at then: waiting for others, asking, or reading. What has landed by then is used.
        prefetch_threshold_pages: shorter hits are not worth a transfer and are revoked.
        prefetch_retry_steps: how many steps a request waits after a prefetch that brought nothing, until storage is
            asked again: another request may have been writing the same prefix. ``PrefetchQueue.is_done`` counts them.
            0 asks once. A request that is the next to run asks no more.
        prefetch_max_retries: how often at most.
        prefetch_timeout_s, prefetch_timeout_s_per_ki_token: with ``timeout``, how long a request that could run waits:
            a base, and as much for each 1,024 tokens that storage holds. SGLang's formula and its defaults.
        load: whether the request that is next to run waits until its pages are on the device (``whole``), or runs at
            once while they come, and its forward waits before each layer (``by_layer``). That is for devices which
            wait at a ``LayerDoneCounter``. A load that fails then fails the batch that reads it; before, it is computed
            anew.
        load_threshold_pages: shorter runs are computed anew instead of loaded from the host.

    Raises:
        ConfigError: naming the value that cannot work.
    """

    write: WritePolicy = attrs.field(default="write_through", validator=_check_write)
    # SGLang writes at the second use; the first is the computing, which is no hit here.
    write_threshold_hits: int = attrs.field(default=1, validator=integer_validator("is not a count"))
    clean_ahead_pages: int = attrs.field(default=64, validator=integer_validator("is not a count"))
    prefetch: PrefetchPolicy = attrs.field(default="best_effort", validator=_check_stop)
    prefetch_threshold_pages: int = attrs.field(default=4, validator=integer_validator("is not a count"))
    # SGLang's defaults (``hicache_storage_prefetch_retry_*`` in 0.5.23).
    prefetch_retry_steps: int = attrs.field(default=8, validator=integer_validator("is not a count", at_least=0))
    prefetch_max_retries: int = attrs.field(default=8, validator=integer_validator("is not a count", at_least=0))
    prefetch_timeout_s: float = attrs.field(default=1.0, validator=number_validator(or_zero=True))
    prefetch_timeout_s_per_ki_token: float = attrs.field(default=0.25, validator=number_validator(or_zero=True))
    load: LoadBackMode = attrs.field(default="whole", validator=_check_load)  # any device can do with it
    load_threshold_pages: int = attrs.field(default=1, validator=integer_validator("is not a count"))

    def prefetch_max_wait_s(self, num_tokens: int) -> float:
        """Longest time that a prefetch of ``num_tokens`` may block its request; infinite unless it is ``timeout``.

        While nobody knows how much storage has, the tokens are 0: an answer that takes longer than that is given up.
        """
        if self.prefetch != "timeout":
            return math.inf
        return self.prefetch_timeout_s + self.prefetch_timeout_s_per_ki_token * num_tokens / 1024
