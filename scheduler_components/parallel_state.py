"""ParallelState: the ranks and sizes of one scheduler process, and the tasks of its rank.

Only this module decides whether a rank publishes, reports metrics or leads its replica.

Layout (SGLang's): tensor-parallel ranks of one pipeline stage are numbered
``tp_rank = (attn_dp_rank * attn_cp_size + attn_cp_rank) * attn_tp_size + attn_tp_rank``: attention-DP is the
outermost axis, then attention context parallelism (CP), and attention-TP is the innermost. The expert layers divide
the same ranks once more: ``tp_rank = (moe_dp_rank * moe_ep_size + moe_ep_rank) * moe_tp_size + moe_tp_rank``, with
expert data parallelism outermost and expert tensor parallelism (the remainder) innermost. Source: SGLang 0.5.x,
``_compute_parallelism_ranks``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs

from scheduler_components._internal.validators import check_integer, integer_validator
from scheduler_components.errors import ConfigError

__all__ = ["ParallelState"]


_SIZE = integer_validator("is not a size")
_RANK = integer_validator("is not a rank", at_least=0)


def _quotient(tp_size: int, divisor_name: str, divisor: int) -> int:
    """Return the size of one of `divisor` equal groups of a stage."""
    if tp_size % divisor:
        raise ConfigError(
            "tp_size", tp_size, f"is not a multiple of {divisor_name} = {divisor}", "give sizes that divide it"
        )
    return tp_size // divisor


@attrs.frozen(kw_only=True)
class ParallelState:
    """Ranks and sizes of one scheduler process; frozen, validated at construction.

    `dp_rank` is None in an engine without data parallelism. With DP attention (`attn_dp_size > 1`) the data-parallel
    replicas share one tensor-parallel world, so `dp_size == attn_dp_size`. Without it each data-parallel replica is a
    separate world and `attn_dp_rank` is 0 on every rank.

    Raises:
        ConfigError: naming the invalid rank or size, and a valid value.
    """

    tp_rank: int = attrs.field(default=0, validator=_RANK)
    tp_size: int = attrs.field(default=1, validator=_SIZE)
    pp_rank: int = attrs.field(default=0, validator=_RANK)
    pp_size: int = attrs.field(default=1, validator=_SIZE)
    dp_rank: int | None = attrs.field(default=None, validator=attrs.validators.optional(_RANK))
    dp_size: int = attrs.field(default=1, validator=_SIZE)
    attn_tp_rank: int = attrs.field(default=0, validator=_RANK)
    attn_tp_size: int = attrs.field(default=1, validator=_SIZE)
    attn_cp_rank: int = attrs.field(default=0, validator=_RANK)
    attn_cp_size: int = attrs.field(default=1, validator=_SIZE)
    attn_dp_rank: int = attrs.field(default=0, validator=_RANK)
    attn_dp_size: int = attrs.field(default=1, validator=_SIZE)
    moe_ep_rank: int = attrs.field(default=0, validator=_RANK)
    moe_ep_size: int = attrs.field(default=1, validator=_SIZE)
    moe_dp_rank: int = attrs.field(default=0, validator=_RANK)
    moe_dp_size: int = attrs.field(default=1, validator=_SIZE)
    dcp_size: int = attrs.field(default=1, validator=_SIZE)
    gpu_id: int = attrs.field(default=0, validator=_RANK)

    def __attrs_post_init__(self) -> None:
        self._check_ranks_below_sizes()
        self._check_attention_grid()
        self._check_data_parallelism()
        self._check_expert_grid()
        if self.attn_tp_size % self.dcp_size:
            raise ConfigError(
                "dcp_size",
                self.dcp_size,
                f"does not divide attn_tp_size={self.attn_tp_size}",
                "decode context parallelism splits the attention-TP group evenly: give a divisor",
            )

    def _check_ranks_below_sizes(self) -> None:
        for axis in ("tp", "pp", "dp", "attn_tp", "attn_cp", "attn_dp", "moe_ep", "moe_dp"):
            rank, size = getattr(self, f"{axis}_rank"), getattr(self, f"{axis}_size")
            if rank is not None and rank >= size:
                raise ConfigError(f"{axis}_rank", rank, f"is not below {axis}_size={size}", f"give 0 to {size - 1}")

    def _check_attention_grid(self) -> None:
        grid = self.attn_dp_size * self.attn_cp_size * self.attn_tp_size
        if grid != self.tp_size:
            raise ConfigError(
                "tp_size",
                self.tp_size,
                f"is not attn_dp_size * attn_cp_size * attn_tp_size = {grid}",
                f"give {grid}, or sizes whose product is {self.tp_size}",
            )
        rank = (self.attn_dp_rank * self.attn_cp_size + self.attn_cp_rank) * self.attn_tp_size + self.attn_tp_rank
        if rank != self.tp_rank:
            raise ConfigError(
                "tp_rank",
                self.tp_rank,
                "is not (attn_dp_rank * attn_cp_size + attn_cp_rank) * attn_tp_size + attn_tp_rank",
                f"give {rank}, or derive the attention ranks with ParallelState.from_tp_rank",
            )

    def _check_data_parallelism(self) -> None:
        if self.attn_dp_size > 1 and self.dp_size != self.attn_dp_size:
            raise ConfigError(
                "dp_size",
                self.dp_size,
                f"differs from attn_dp_size={self.attn_dp_size} under DP attention",
                f"give {self.attn_dp_size}",
            )
        if self.attn_dp_size > 1 and self.dp_rank not in (None, self.attn_dp_rank):
            raise ConfigError(
                "dp_rank",
                self.dp_rank,
                f"differs from attn_dp_rank={self.attn_dp_rank} under DP attention",
                f"give {self.attn_dp_rank} or None",
            )
        if self.attn_dp_size == 1 and self.dp_size > 1 and self.dp_rank is None:
            raise ConfigError(
                "dp_rank", None, f"is missing with dp_size={self.dp_size}", f"give 0 to {self.dp_size - 1}"
            )

    def _check_expert_grid(self) -> None:
        grid = self.moe_ep_size * self.moe_dp_size
        if self.tp_size % grid:
            raise ConfigError(
                "moe_ep_size",
                self.moe_ep_size,
                f"times moe_dp_size={self.moe_dp_size} does not divide tp_size={self.tp_size}",
                "give sizes whose product divides tp_size",
            )
        dp_rank, ep_rank = divmod(self.tp_rank // (self.tp_size // grid), self.moe_ep_size)
        if self.moe_dp_rank != dp_rank:
            raise ConfigError(
                "moe_dp_rank", self.moe_dp_rank, f"is not that of tp_rank={self.tp_rank}", f"give {dp_rank}"
            )
        if self.moe_ep_rank != ep_rank:
            raise ConfigError(
                "moe_ep_rank", self.moe_ep_rank, f"is not that of tp_rank={self.tp_rank}", f"give {ep_rank}"
            )

    @classmethod
    def trivial(cls, **overrides: Any) -> ParallelState:
        """Return the state of a single process, with the given fields replaced and validated."""
        return cls(**overrides)

    @classmethod
    def from_tp_rank(
        cls,
        tp_rank: int,
        *,
        tp_size: int,
        attn_dp_size: int = 1,
        attn_cp_size: int = 1,
        moe_ep_size: int = 1,
        moe_dp_size: int = 1,
        **overrides: Any,
    ) -> ParallelState:
        """Derive all attention and expert ranks of `tp_rank` in a world of `tp_size` ranks.

        `attn_tp_size` is `tp_size` divided by the sizes of attention-DP and attention-CP. `overrides` are the fields
        that a tp_rank does not determine: pp, dp without DP attention, dcp_size, gpu_id.

        Raises:
            ConfigError: a size or rank is invalid, or the sizes do not divide `tp_size`.
        """
        check_integer("tp_rank", tp_rank, "is not a rank", at_least=0)
        check_integer("tp_size", tp_size)
        check_integer("attn_dp_size", attn_dp_size)
        check_integer("attn_cp_size", attn_cp_size)
        check_integer("moe_ep_size", moe_ep_size)
        check_integer("moe_dp_size", moe_dp_size)
        attn_tp_size = _quotient(tp_size, "attn_dp_size * attn_cp_size", attn_dp_size * attn_cp_size)
        moe_tp_size = _quotient(tp_size, "moe_dp_size * moe_ep_size", moe_dp_size * moe_ep_size)
        group, attn_tp_rank = divmod(tp_rank, attn_tp_size)
        attn_dp_rank, attn_cp_rank = divmod(group, attn_cp_size)
        moe_dp_rank, moe_ep_rank = divmod(tp_rank // moe_tp_size, moe_ep_size)
        if attn_dp_size > 1:
            overrides.setdefault("dp_size", attn_dp_size)
            overrides.setdefault("dp_rank", attn_dp_rank)
        overrides.setdefault("gpu_id", tp_rank)
        return cls(
            tp_rank=tp_rank,
            tp_size=tp_size,
            attn_tp_rank=attn_tp_rank,
            attn_tp_size=attn_tp_size,
            attn_cp_rank=attn_cp_rank,
            attn_cp_size=attn_cp_size,
            attn_dp_rank=attn_dp_rank,
            attn_dp_size=attn_dp_size,
            moe_ep_rank=moe_ep_rank,
            moe_ep_size=moe_ep_size,
            moe_dp_rank=moe_dp_rank,
            moe_dp_size=moe_dp_size,
            **overrides,
        )

    @classmethod
    def from_torchrun(
        cls, environ: Mapping[str, str], *, pp_size: int = 1, attn_dp_size: int = 1, attn_cp_size: int = 1
    ) -> ParallelState:
        """Derive the state from torchrun's ``RANK``, ``WORLD_SIZE`` and ``LOCAL_RANK``.

        The world consists of `pp_size` stages of equal size, stage 0 first. The global rank within a stage is the
        tp_rank. Pass `os.environ`; this function does not read it.

        Raises:
            ConfigError: a variable is missing or is no number, or the sizes do not divide the world.
        """
        check_integer("pp_size", pp_size)
        values: dict[str, int] = {}
        for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
            text = environ.get(name)
            if text is None or not (text.isascii() and text.isdecimal()):
                raise ConfigError(
                    name, text, "is not set to a number", "start the process with torchrun, or derive from tp_rank"
                )
            values[name] = int(text)
        rank, world = values["RANK"], values["WORLD_SIZE"]
        if rank >= world:
            raise ConfigError("RANK", rank, f"is not below WORLD_SIZE={world}", "start the process with torchrun")
        if world % pp_size:
            raise ConfigError(
                "pp_size", pp_size, f"does not divide WORLD_SIZE={world}", "give a divisor of the world's size"
            )
        tp_size = world // pp_size
        return cls.from_tp_rank(
            rank % tp_size,
            tp_size=tp_size,
            attn_dp_size=attn_dp_size,
            attn_cp_size=attn_cp_size,
            pp_rank=rank // tp_size,
            pp_size=pp_size,
            gpu_id=values["LOCAL_RANK"],
        )

    @property
    def world_rank(self) -> int:
        """Global rank of this process, stage by stage, in the order of `from_torchrun`."""
        return self.pp_rank * self.tp_size + self.tp_rank

    @property
    def owns_kv_stream(self) -> bool:
        """True on exactly one rank of each independent KV cache. `reports_metrics` and `leads_replica` equal it.

        Ranks along attention-TP and attention-CP hold shards or copies of one logical cache, and pipeline stages hold
        its layers. The first rank of each axis represents all of them.
        """
        return self.pp_rank == 0 and self.attn_tp_rank == 0 and self.attn_cp_rank == 0

    @property
    def kv_stream_index(self) -> int:
        """Index of this rank's KV stream, 0 to `kv_stream_count - 1`: the offset of its ports."""
        if self.attn_dp_size > 1:
            return self.attn_dp_rank
        return self.dp_rank or 0

    @property
    def kv_stream_count(self) -> int:
        """Number of independent KV caches, and therefore of streams, of the whole engine."""
        return self.dp_size  # equal to attn_dp_size with DP attention

    @property
    def reports_metrics(self) -> bool:
        """True on exactly one rank of each replica, so that no gauge is multiplied by CP, TP or PP."""
        return self.owns_kv_stream

    @property
    def leads_replica(self) -> bool:
        """True on the rank that receives and answers a replica's requests."""
        return self.owns_kv_stream

    @property
    def metric_labels(self) -> tuple[tuple[str, str], ...]:
        """Bounded labels of this rank's metrics, as sorted (name, value) pairs."""
        return (
            ("dp_rank", str(self.kv_stream_index)),
            ("pp_rank", str(self.pp_rank)),
            ("tp_rank", str(self.tp_rank)),
        )

    def __str__(self) -> str:
        return (
            f"dp{self.kv_stream_index}/pp{self.pp_rank}/tp{self.tp_rank}"
            f"(attn_cp{self.attn_cp_rank}, attn_tp{self.attn_tp_rank})"
        )
