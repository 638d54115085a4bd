"""HiCachePolicy: when a hierarchical cache writes, prefetches and loads pages."""

from __future__ import annotations

import math
from typing import Literal, TypeAlias, get_args

import attrs

from scheduler_components._internal.validators import choice_validator, integer_validator, number_validator

__all__ = ["HiCachePolicy", "LoadBackMode", "PrefetchPolicy", "WritePolicy"]

WritePolicy: TypeAlias = Literal["write_through", "write_through_selective", "write_back"]
PrefetchPolicy: TypeAlias = Literal["best_effort", "wait_complete", "timeout"]
LoadBackMode: TypeAlias = Literal["whole", "by_layer"]


@attrs.frozen(kw_only=True)
class HiCachePolicy:
    """When a hierarchical cache writes, prefetches and loads pages; the same on every rank of a replica.

    Attributes:
        write: when to copy pages to the host: as soon as they are cached (``write_through``), once enough requests have
            found them (``write_through_selective``), or when they are about to be evicted from the device
            (``write_back``).
        write_threshold_hits: with ``write_through_selective``, the number of requests that must have found a page in
            the cache. ``PrefetchQueue.is_done`` counts each request once. Pages evicted earlier are lost.
        clean_ahead_pages: with ``write_back``, how many of the pages that will be evicted next are copied ahead of
            time. A page evicted without a copy is lost; eviction never waits for a copy.
        prefetch: when to stop an incomplete prefetch: as soon as its request could run (``best_effort``), never
            (``wait_complete``), or when the clock of any rank passes a deadline (``timeout``). This applies in every
            phase of a prefetch. The pages that have arrived on all ranks are used.
        prefetch_threshold_pages: the shortest storage hit that is worth a transfer; shorter hits are revoked.
        prefetch_retry_steps: how many steps a request waits after a prefetch without pages before it queries storage
            again, because another request may be writing the same prefix. ``PrefetchQueue.is_done`` counts the steps.
            0 queries once. A request that is next to run does not query again.
        prefetch_max_retries: the largest number of repeated queries.
        prefetch_timeout_s, prefetch_timeout_s_per_ki_token: with ``timeout``, how long a request that could run waits:
            a constant plus a time for each 1,024 tokens that storage holds. Formula and defaults are SGLang's.
        load: whether a request waits until its pages are on the device (``whole``), or runs while they are copied and
            its forward waits before each layer (``by_layer``). ``by_layer`` needs a device that waits at a
            ``LayerDoneCounter``, and a failed load fails the batch that reads its pages. With ``whole``, the pages of a
            failed load are recomputed.
        load_threshold_pages: the shortest run to load from the host; shorter runs are recomputed.

    Raises:
        ConfigError: a value cannot work; the error names the field.
    """

    write: WritePolicy = attrs.field(default="write_through", validator=choice_validator(*get_args(WritePolicy)))
    # SGLang writes at the second use. Here the first use, which computes the page, is not a hit.
    write_threshold_hits: int = attrs.field(default=1, validator=integer_validator("is not a count"))
    clean_ahead_pages: int = attrs.field(default=64, validator=integer_validator("is not a count"))
    prefetch: PrefetchPolicy = attrs.field(default="best_effort", validator=choice_validator(*get_args(PrefetchPolicy)))
    prefetch_threshold_pages: int = attrs.field(default=4, validator=integer_validator("is not a count"))
    # SGLang's defaults (``hicache_storage_prefetch_retry_*`` in 0.5.23).
    prefetch_retry_steps: int = attrs.field(default=8, validator=integer_validator("is not a count", at_least=0))
    prefetch_max_retries: int = attrs.field(default=8, validator=integer_validator("is not a count", at_least=0))
    prefetch_timeout_s: float = attrs.field(default=1.0, validator=number_validator(or_zero=True))
    prefetch_timeout_s_per_ki_token: float = attrs.field(default=0.25, validator=number_validator(or_zero=True))
    load: LoadBackMode = attrs.field(
        default="whole", validator=choice_validator(*get_args(LoadBackMode))
    )  # works on every device
    load_threshold_pages: int = attrs.field(default=1, validator=integer_validator("is not a count"))

    def prefetch_max_wait_s(self, num_tokens: int) -> float:
        """Return the longest time that a prefetch of ``num_tokens`` may block its request.

        Pass 0 tokens while the length of the hit is unknown. Infinite unless ``prefetch`` is ``timeout``.
        """
        if self.prefetch != "timeout":
            return math.inf
        return self.prefetch_timeout_s + self.prefetch_timeout_s_per_ki_token * num_tokens / 1024
