"""What a hierarchical cache is told: when it writes, and when it stops to prefetch."""

from __future__ import annotations

from typing import Literal, TypeAlias

import attrs

from scheduler_components.errors import ConfigError

__all__ = ["HiCachePolicy", "PrefetchStop", "WritePolicy"]

WritePolicy: TypeAlias = Literal["write_through", "write_back"]
PrefetchStop: TypeAlias = Literal["best_effort", "wait_complete", "timeout"]


def _check_write(_: object, attribute: attrs.Attribute[str], value: str) -> None:
    _check_choice(attribute.name, value, ("write_through", "write_back"))


def _check_stop(_: object, attribute: attrs.Attribute[str], value: str) -> None:
    _check_choice(attribute.name, value, ("best_effort", "wait_complete", "timeout"))


def _check_choice(field: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ConfigError(field, value, "is not a policy", f"give one of {', '.join(choices)}")


def _check_count(_: object, attribute: attrs.Attribute[int], value: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ConfigError(attribute.name, value, "is not a count", "give an integer of at least 1")


def _check_seconds(_: object, attribute: attrs.Attribute[float], value: float) -> None:
    if not 0 <= value < float("inf"):
        raise ConfigError(attribute.name, value, "is not a time", "give a finite number of at least 0")


@attrs.frozen(kw_only=True)
class HiCachePolicy:
    """Policies and thresholds; the same on every rank of a replica.

    Attributes:
        write: copy pages to the host as soon as they are cached (``write_through``), or when they near eviction from
            the device (``write_back``).
        clean_ahead_pages: with ``write_back``, how many of the next pages to evict are kept copied ahead of need.
            What is evicted uncopied is lost, never waited for.
        prefetch: when a prefetch from storage ends before it is complete: as soon as its request could run
            (``best_effort``), never (``wait_complete``), or when any rank's clock says so (``timeout``).
        prefetch_threshold_pages: shorter hits are not worth a transfer and are revoked.
        prefetch_timeout_s, prefetch_timeout_s_per_page: with ``timeout``, how long reading may take.
        load_threshold_pages: shorter runs are computed anew instead of loaded from the host.

    Raises:
        ConfigError: naming the value that cannot work.
    """

    write: WritePolicy = attrs.field(default="write_through", validator=_check_write)
    clean_ahead_pages: int = attrs.field(default=64, validator=_check_count)
    prefetch: PrefetchStop = attrs.field(default="best_effort", validator=_check_stop)
    prefetch_threshold_pages: int = attrs.field(default=4, validator=_check_count)
    prefetch_timeout_s: float = attrs.field(default=1.0, validator=_check_seconds)
    prefetch_timeout_s_per_page: float = attrs.field(default=0.001, validator=_check_seconds)
    load_threshold_pages: int = attrs.field(default=1, validator=_check_count)

    def reading_bound_s(self, num_pages: int) -> float:
        """Longest time that reading ``num_pages`` may take; infinite unless the policy is ``timeout``."""
        if self.prefetch != "timeout":
            return float("inf")
        return self.prefetch_timeout_s + self.prefetch_timeout_s_per_page * num_pages
