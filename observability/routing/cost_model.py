"""RoutingCostModel: what it costs to serve a request on a replica, in KV blocks."""

from __future__ import annotations

import attrs

from scheduler_components._internal.validators import check_share, number_validator

__all__ = ["ReplicaId", "RoutingCostModel"]

ReplicaId = int | str
"""The name of a replica: the index of a simulation, or the URL of a worker and its rank."""

_weight = number_validator("is not a weight", or_zero=True)


def _check_tier_weight(_: object, attribute: attrs.Attribute[float], value: float) -> None:
    check_share(attribute.name, value)


@attrs.frozen(kw_only=True)
class RoutingCostModel:
    """The weights of a cost in blocks. The terms, and the defaults of the tiers, are those of Dynamo's KV router.

    The cost of a request on a replica is the sum of ``prefill_cost``, ``load_cost`` and, if its adapter is not loaded
    there, ``lora_weight``. The lowest cost is best.

    Attributes:
        prefill_weight: per block of the prompt that is not cached.
        queue_weight: per block that waits to be computed.
        decode_weight: per block that requests hold. Each step reads all of them.
        host_weight, storage_weight: share of a block's prefill that a hit on the tier saves, from 0 to 1. A hit on the
            device saves all of it.
        lora_weight: blocks that could be computed while an adapter is loaded.

    Raises:
        ConfigError: a weight is negative or not finite, or a share is outside 0 to 1.
    """

    prefill_weight: float = attrs.field(default=1.0, validator=_weight)
    queue_weight: float = attrs.field(default=1.0, validator=_weight)
    decode_weight: float = attrs.field(default=1.0, validator=_weight)
    host_weight: float = attrs.field(default=0.75, validator=_check_tier_weight)
    storage_weight: float = attrs.field(default=0.25, validator=_check_tier_weight)
    lora_weight: float = attrs.field(default=64.0, validator=_weight)

    def uncached_blocks(self, prompt_blocks: float, overlap: tuple[int, int, int]) -> float:
        """Return the blocks of a prompt to compute. A block on a lower tier counts as a part of one.

        Args:
            prompt_blocks: length of the prompt; the last block may be a fraction.
            overlap: its leading blocks on the device, those that follow on the host, and then in storage.
        """
        on_device, on_host, in_storage = overlap
        cached = on_device + self.host_weight * on_host + self.storage_weight * in_storage
        return max(0.0, prompt_blocks - cached)

    def prefill_cost(self, prompt_blocks: float, overlap: tuple[int, int, int]) -> float:
        """Return the part of the cost that depends on the prompt. The arguments are those of ``uncached_blocks``."""
        return self.prefill_weight * self.uncached_blocks(prompt_blocks, overlap)

    def load_cost(self, queued_blocks: float, decode_blocks: float) -> float:
        """Return the part of the cost that depends on what the replica does already.

        Args:
            queued_blocks: that it still has to compute for requests that wait.
            decode_blocks: that its requests hold, or will hold for their prompts.
        """
        return self.queue_weight * queued_blocks + self.decode_weight * decode_blocks
