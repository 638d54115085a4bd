"""MooncakePageStore: Mooncake's distributed store, from the package ``mooncake-transfer-engine-non-cuda``.

Measured with version 0.3.13 on a CPU over TCP: the client answers a read with empty bytes both for a missing key
and when the master is unreachable, so both are a miss here. It has no deadlines (``close`` took 10 s after the master
had died): wrap it with ``open_deadline_page_store``.
"""

from __future__ import annotations

import socket
from collections.abc import Sequence
from importlib import import_module
from typing import Any

import attrs

from scheduler_components.errors import ConfigError, StartError, StorageError
from scheduler_components.ports import PageBytes

__all__ = ["MooncakeAddress", "MooncakePageStore", "open_mooncake_page_store"]


def _check_master(_: object, attribute: attrs.Attribute[str], value: str) -> None:
    host, _colon, port = value.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 1 << 16:
        raise ConfigError(attribute.name, value, "is not host:port", "give the master's RPC address")


@attrs.frozen(kw_only=True)
class MooncakeAddress:
    """The address of a Mooncake cluster and this process's resources for it.

    Attributes:
        master: ``host:port`` of ``mooncake_master``'s RPC.
        metadata: URL of the metadata server, for example ``http://127.0.0.1:58080/metadata``.
        host: address of this host for other clients.
        segment_bytes: memory of this process that the cluster may use; 0 for a client that only reads and writes.
        buffer_bytes: memory for transfers, the limit of a batch.
        protocol: ``tcp`` or ``rdma``.
        devices: RDMA devices, comma-separated.
        connect_timeout_s: longest wait for a connection to the master.

    Raises:
        ConfigError: ``master`` is not ``host:port``.
    """

    master: str = attrs.field(validator=_check_master)
    metadata: str
    host: str = "127.0.0.1"
    segment_bytes: int = 512 << 20
    buffer_bytes: int = 128 << 20
    protocol: str = "tcp"
    devices: str = ""
    connect_timeout_s: float = 5.0


class MooncakePageStore:
    """Pages in a Mooncake cluster. Create it with ``open_mooncake_page_store``.

    ``delete`` does not remove keys that are leased to a reader (code -706). The cluster evicts pages itself.
    """

    def __init__(self, client: Any) -> None:
        self._client = client  # noqa: SCH006 mooncake.store.MooncakeDistributedStore is C++ without type information

    def batch_exists(self, keys: Sequence[str]) -> int:
        held = self._held("batch_exists", keys)
        return next((at for at, is_held in enumerate(held) if not is_held), len(held))

    def batch_get(self, keys: Sequence[str]) -> list[bytes | None]:
        if not keys:
            return []
        pages: list[bytes] = self._client.get_batch(list(keys))
        return [page or None for page in pages]

    def batch_set(self, keys: Sequence[str], pages: Sequence[PageBytes]) -> list[bool]:
        if not keys or self._client.put_batch(list(keys), list(pages)) == 0:
            return [True] * len(keys)
        # There is one code for the batch: query which pages are held. This fails if the master does not answer.
        return self._held("batch_set", keys)

    def register(self, memory: memoryview) -> None:
        code = self._client.register_buffer(_address_of(memory), memory.nbytes)
        if code != 0:
            raise StorageError("mooncake", "register", f"code {code} for {memory.nbytes} bytes")

    def batch_get_into(self, keys: Sequence[str], pages: Sequence[memoryview]) -> list[bool]:
        if not keys:
            return []
        counts: list[int] = self._client.batch_get_into(list(keys), *_buffers_of(pages))
        return [count == page.nbytes for count, page in zip(counts, pages, strict=True)]

    def batch_put_from(self, keys: Sequence[str], pages: Sequence[memoryview]) -> list[bool]:
        if not keys:
            return []
        codes: list[int] = self._client.batch_put_from(list(keys), *_buffers_of(pages))
        return [code == 0 for code in codes]

    def delete(self, keys: Sequence[str]) -> int:
        return sum(self._client.remove(key) == 0 for key in keys)

    def close(self) -> None:
        code = self._client.close()
        if code != 0:
            raise StorageError("mooncake", "close", f"code {code}")

    def _held(self, operation: str, keys: Sequence[str]) -> list[bool]:
        if not keys:
            return []
        codes: list[int] = self._client.batch_is_exist(list(keys))
        failed = [code for code in codes if code < 0]
        if failed:
            raise StorageError("mooncake", operation, f"code {failed[0]} for {len(failed)} of {len(keys)} keys")
        return [code == 1 for code in codes]


def _address_of(memory: memoryview) -> int:
    # Imported here because a rank without tiers imports MooncakeAddress and may lack numpy.
    import numpy as np

    return int(np.frombuffer(memory, np.uint8).ctypes.data)


def _buffers_of(pages: Sequence[memoryview]) -> tuple[list[int], list[int]]:
    """Return the addresses and sizes of pages."""
    return [_address_of(page) for page in pages], [page.nbytes for page in pages]


def open_mooncake_page_store(address: MooncakeAddress) -> MooncakePageStore:
    """Join a Mooncake cluster.

    Raises:
        ConfigError: the package or one of its system libraries is not installed.
        StartError: the cluster refuses this client or cannot be reached.
    """
    _check_master_reachable(address)
    try:
        package = import_module("mooncake.store")
    except ImportError as error:
        raise ConfigError(
            "storage",
            "mooncake",
            f"cannot be loaded ({error})",
            "install scheduler-components[mooncake] and the system libraries that its documentation lists",
        ) from error
    client = package.MooncakeDistributedStore()
    code = client.setup(
        address.host,
        address.metadata,
        address.segment_bytes,
        address.buffer_bytes,
        address.protocol,
        address.devices,
        address.master,
    )
    if code != 0:
        raise StartError(f"mooncake master {address.master}", f"code {code}", "read the logs of client and master")
    return MooncakePageStore(client)


def _check_master_reachable(address: MooncakeAddress) -> None:
    # The client itself retries for a minute and a half.
    host, _, port = address.master.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=address.connect_timeout_s).close()
    except OSError as error:
        raise StartError(
            f"mooncake master {address.master}", str(error), "start mooncake_master, or give its address"
        ) from error
