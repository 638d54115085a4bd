"""RoutingCostModel: what it costs to serve a request on a replica, in KV blocks."""

from __future__ import annotations

import attrs
import msgspec

from scheduler_components.validators import check_share, number_validator

__all__ = ["CandidateFacts", "ReplicaId", "RoutingCostModel"]

ReplicaId = int | str
"""The name of a replica: the index of a simulation, or the URL of a worker and its rank."""

_weight = number_validator("is not a weight", or_zero=True)


def _check_tier_weight(_: object, attribute: attrs.Attribute[float], value: float) -> None:
    check_share(attribute.name, value)


class CandidateFacts(msgspec.Struct, frozen=True, gc=False):
    """What a router knows of one replica when it places one request. Sizes are in blocks of one page.

    Attributes:
        replica: its id.
        prompt_blocks: length of the prompt; the last block may be a fraction.
        device_blocks: leading blocks of the prompt on the device.
        host_blocks, storage_blocks: blocks that follow these on the host, and then in storage.
        decode_blocks: blocks that its requests hold or will hold for their prompts.
        queued_blocks: blocks that it still has to compute for requests that wait.
        has_adapter: the adapter of the request is loaded there, or it needs none.
        num_dispatched: requests that were sent there so far.
    """

    replica: ReplicaId
    prompt_blocks: float
    device_blocks: int = 0
    host_blocks: int = 0
    storage_blocks: int = 0
    decode_blocks: float = 0.0
    queued_blocks: float = 0.0
    has_adapter: bool = True
    num_dispatched: int = 0

    @property
    def load_blocks(self) -> float:
        """The blocks that wait there or are held."""
        return self.queued_blocks + self.decode_blocks


@attrs.frozen(kw_only=True)
class RoutingCostModel:
    """The weights of a cost in blocks. The terms, and the defaults of the tiers, are those of Dynamo's KV router.

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

    def uncached_blocks(self, facts: CandidateFacts) -> float:
        """Return the blocks to compute. A block on a lower tier counts as a part of one."""
        cached = facts.device_blocks + self.host_weight * facts.host_blocks + self.storage_weight * facts.storage_blocks
        return max(0.0, facts.prompt_blocks - cached)

    def cost(self, facts: CandidateFacts) -> float:
        """Return the cost in blocks; the lowest is best."""
        cost = (
            self.prefill_weight * self.uncached_blocks(facts)
            + self.queue_weight * facts.queued_blocks
            + self.decode_weight * facts.decode_blocks
        )
        return cost if facts.has_adapter else cost + self.lora_weight
