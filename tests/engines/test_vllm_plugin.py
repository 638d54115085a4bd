"""The plugin over vLLM's own declarations where vLLM is installed, and over a double of them elsewhere.

``make test`` runs it over the double, ``make engines`` over vLLM. Whole engines are in ``test_vllm_engine.py``.
"""

from __future__ import annotations

import inspect
import json
import logging
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib import import_module
from importlib.metadata import EntryPoint
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec
import pytest
import zmq
from kit.waiting import wait_until

from scheduler_components import BlockStored, ConfigError, KVEventBatch, StartError
from scheduler_components.engines.settings import KV_EVENTS_VARIABLE
from scheduler_components.engines.vllm import (
    PLUGIN_NAME,
    VllmEventPublisher,
    VllmPublisherFactory,
    open_event_stream,
    register,
)
from scheduler_components.kv_events import write_key_pair

pytestmark = [pytest.mark.filterwarnings("default"), pytest.mark.timeout(300)]

POOL, SCHEDULER = "vllm.v1.core.block_pool", "vllm.v1.core.sched.scheduler"
STORED = BlockStored(block_hashes=(7,), parent_block_hash=None, token_ids=(1, 2), block_size=2, lora_id=None)
ASKED = {"VLLM_PLUGINS": f"another,{PLUGIN_NAME}"}


def variable(**settings: Any) -> dict[str, str]:
    return {KV_EVENTS_VARIABLE: json.dumps(settings)}


@pytest.fixture
def vllm(vllm_events: Any) -> Any:
    return vllm_events


@pytest.fixture(autouse=True)
def factory(vllm: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return vLLM's factory without the plugin and its patches, which the engine of other tests may have registered.

    Restores the table and the methods after each test.
    """
    pool, scheduler = import_module(POOL).BlockPool, import_module(SCHEDULER).Scheduler
    monkeypatch.setattr(pool, "_emit_block_removed_events", inspect.unwrap(pool._emit_block_removed_events))
    monkeypatch.setattr(scheduler, "reset_prefix_cache", inspect.unwrap(scheduler.reset_prefix_cache))
    table = dict(vllm.EventPublisherFactory._registry)
    if isinstance(table["zmq"], VllmPublisherFactory):
        table["zmq"] = table["zmq"].own
    monkeypatch.setattr(vllm.EventPublisherFactory, "_registry", table)
    return vllm.EventPublisherFactory


@pytest.fixture
def create(vllm: Any, tmp_path: Path) -> Iterator[Callable[..., Any]]:
    """Return a function that opens a publisher as vLLM's scheduler does. All publishers are shut down at the end."""
    opened = []

    def open_one(rank: int = 0, **settings: Any) -> Any:
        config = vllm.KVEventsConfig(
            **({"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": f"ipc://{tmp_path}/e"} | settings)
        )
        opened.append(vllm.EventPublisherFactory.create(config, rank))
        return opened[-1]

    yield open_one
    for each in opened:
        each.shutdown()


# --- when the plugin acts ---


@pytest.mark.parametrize(
    ("environ", "acts"),
    [
        ({}, False),
        ({"VLLM_PLUGINS": ""}, False),
        ({"VLLM_PLUGINS": "another"}, False),
        ({"VLLM_PLUGINS": f"{PLUGIN_NAME}_of_mine"}, False),
        ({KV_EVENTS_VARIABLE: " "}, False),
        (ASKED, True),
        (variable(), True),
        (variable(seq_base="clock"), True),
    ],
)
def test_the_plugin_acts_if_an_environment_variable_names_or_configures_it(
    vllm: Any, create: Callable[..., Any], environ: dict[str, str], acts: bool
) -> None:
    register(environ)
    assert (type(create()) is VllmEventPublisher) is acts


def test_an_inactive_plugin_imports_nothing_of_vllm() -> None:
    """vLLM loads every installed plugin in each of its processes."""
    script = "import sys\nfrom scheduler_components.engines.vllm import register\nregister({})\n"
    script += "print(*[name for name in sys.modules if name.split('.')[0] in ('vllm', 'torch')])"
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert ran.stdout.split() == []


def test_a_second_load_changes_only_the_settings(vllm: Any, factory: Any, create: Callable[..., Any]) -> None:
    first = factory._registry["zmq"]
    register(ASKED)
    register(ASKED)
    assert factory._registry["zmq"].own is first
    register(variable(seq_base="clock"))
    assert factory._registry["zmq"].own is first
    assert create().publisher.stats().last_sequence > 1_000_000  # the clock's microseconds


def test_each_method_is_patched_once(create: Callable[..., Any]) -> None:
    methods = []
    for _ in range(2):
        register(ASKED)
        create(endpoint="tcp://*:0")
        pool, scheduler = import_module(POOL).BlockPool, import_module(SCHEDULER).Scheduler
        methods.append((pool._emit_block_removed_events, scheduler.reset_prefix_cache))
    assert methods[0] == methods[1]


def test_the_entry_point_of_vllms_group_loads_the_plugin() -> None:
    text = (Path(__file__).parents[2] / "pyproject.toml").read_text()
    assert f'[project.entry-points."vllm.general_plugins"]\n{PLUGIN_NAME} = "scheduler_components.engines.vllm:' in text
    entry_point = EntryPoint(PLUGIN_NAME, "scheduler_components.engines.vllm:register", "vllm.general_plugins")
    assert entry_point.load() is register


def test_the_publisher_is_a_subclass_of_vllms(vllm: Any, create: Callable[..., Any]) -> None:
    register(ASKED)
    assert isinstance(create(), vllm.EventPublisher)


# --- addresses ---


@pytest.mark.parametrize("rank", [0, 1, 3])
def test_ports_are_offset_by_rank_as_in_vllm(
    vllm: Any, create: Callable[..., Any], free_ports: Callable[[int], int], rank: int
) -> None:
    base = free_ports(12)
    register(ASKED)
    settings = {"endpoint": f"tcp://*:{base}", "replay_endpoint": f"tcp://127.0.0.1:{base + 6}", "topic": "kv"}
    publisher = create(rank, **settings)
    config = publisher.get_publisher_config()
    assert type(config) is vllm.KVEventsConfig
    assert (config.endpoint, config.replay_endpoint) == (f"tcp://*:{base + rank}", f"tcp://127.0.0.1:{base + 6 + rank}")
    assert (config.topic, config.enable_kv_cache_events, config.publisher) == ("kv", True, "zmq")
    assert publisher.publisher.endpoint == f"tcp://0.0.0.0:{base + rank}"
    assert publisher.publisher.replay_endpoint == config.replay_endpoint


def test_port_0_binds_a_free_port_of_this_node_and_reports_it(vllm: Any, create: Callable[..., Any]) -> None:
    register(ASKED)
    publisher = create(2, endpoint="tcp://*:0", replay_endpoint="tcp://*:0")
    config = publisher.get_publisher_config()
    here = import_module("vllm.utils.network_utils").get_ip()
    for address in (config.endpoint, config.replay_endpoint):
        host, _, port = address.rpartition(":")
        assert host == f"tcp://{here}"
        assert int(port) > 0
    assert (config.endpoint, config.replay_endpoint) == (
        publisher.publisher.endpoint,
        publisher.publisher.replay_endpoint,
    )


def test_a_node_without_an_address_logs_a_hint(
    vllm: Any, create: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("vllm.utils.network_utils.get_ip", lambda: "0.0.0.0")
    register(variable(auth="none"))  # so that vLLM's own publisher does not replace it
    assert type(create(endpoint="tcp://*:0")) is vllm.NullEventPublisher
    assert "set VLLM_HOST_IP" in caplog.text


@pytest.mark.parametrize(
    ("endpoint", "bind", "at"),
    [
        ("tcp://127.0.0.1:{}", None, "tcp://127.0.0.1:{}"),
        ("tcp://0.0.0.0:{}", None, "tcp://127.0.0.1:{}"),  # vLLM connects to it, which reaches this machine
        ("tcp://0.0.0.0:{}", True, "tcp://0.0.0.0:{}"),
        ("tcp://[::1]:{}", None, "tcp://[::1]:{}"),
    ],
)
def test_an_address_that_vllm_connects_is_connected(
    create: Callable[..., Any], free_ports: Callable[[int], int], endpoint: str, bind: bool | None, at: str
) -> None:
    port = free_ports(1)
    register(variable(bind=bind) if bind is not None else ASKED)
    publisher = create(endpoint=endpoint.format(port))
    assert publisher.publisher.endpoint == at.format(port)
    assert publisher.get_publisher_config().endpoint == endpoint.format(port)


def test_a_limit_of_zero_means_no_limit_as_in_vllm(create: Callable[..., Any]) -> None:
    register(ASKED)
    assert type(create(hwm=0, max_queue_size=0)) is VllmEventPublisher


def test_an_address_in_use_raises_a_start_error(create: Callable[..., Any]) -> None:
    register(ASKED)
    create()
    with pytest.raises(StartError, match="another publisher is bound there"):
        create()


# --- invalid settings ---


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "is not JSON"),
        ('{"buffer_byts": 1}', "buffer_byts=1: is not a setting"),
        ('{"topic": "x"}', "give it in the engine's own --kv-events-config"),
    ],
)
def test_an_invalid_variable_keeps_vllms_own_publisher(
    vllm: Any, create: Callable[..., Any], caplog: pytest.LogCaptureFixture, text: str, words: str
) -> None:
    """Only the process that opens the stream logs it. vLLM loads the plugin in all its processes."""
    register({KV_EVENTS_VARIABLE: text})
    register({KV_EVENTS_VARIABLE: text})
    with caplog.at_level(logging.INFO, logger="vllm.scheduler_components"):
        assert caplog.records == []
        assert type(create()) is vllm.ZmqEventPublisher
    ours = [each.getMessage() for each in caplog.records if each.name == "vllm.scheduler_components"]
    assert [words in each and "vLLM publishes its KV events itself" in each for each in ours] == [True]


@pytest.mark.parametrize("text", ['{"auth": "required"', '{"auth": "required"}', '{"secret_key_file": 7}'])
def test_an_invalid_variable_that_requires_keys_opens_no_publisher(
    vllm: Any, create: Callable[..., Any], caplog: pytest.LogCaptureFixture, text: str
) -> None:
    register({KV_EVENTS_VARIABLE: text})
    publisher = create()
    assert type(publisher) is vllm.NullEventPublisher
    assert publisher.get_publisher_config() is None
    assert "because the settings require keys" in caplog.text


def test_missing_key_files_open_no_publisher(
    vllm: Any, create: Callable[..., Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    register(variable(auth="required", secret_key_file=str(tmp_path / "none"), client_keys_dir=str(tmp_path)))
    assert type(create()) is vllm.NullEventPublisher
    assert "secret_key_file" in caplog.text


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"endpoint": "udp://127.0.0.1:5557"}, "has the transport 'udp'"),
        ({"endpoint": "inproc://kv", "replay_endpoint": "inproc://kv"}, "overlaps"),
        ({"replay_endpoint": "inproc://r", "buffer_steps": 0}, "keeps no batches for the replay endpoint"),
    ],
)
def test_unsupported_settings_of_vllm_keep_its_own_publisher(
    vllm: Any, factory: Any, caplog: pytest.LogCaptureFixture, settings: dict[str, Any], words: str
) -> None:
    asked: list[dict[str, Any]] = []
    factory._registry["zmq"] = lambda **given: asked.append(given) or vllm.NullEventPublisher()
    register(ASKED)
    config = vllm.KVEventsConfig(enable_kv_cache_events=True, publisher="zmq", **settings)
    factory.create(config, 1)
    assert words in caplog.text
    assert [(each["data_parallel_rank"], each["endpoint"]) for each in asked] == [(1, config.endpoint)]


def test_an_unknown_setting_with_a_value_keeps_vllms_own_publisher(
    vllm: Any, factory: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    factory._registry["zmq"] = lambda **given: vllm.NullEventPublisher()
    register(ASKED)
    other = factory._registry["zmq"](data_parallel_rank=0, endpoint=f"ipc://{tmp_path}/e", compression="zstd")
    assert type(other) is vllm.NullEventPublisher
    assert "compression='zstd': is a setting of vLLM that scheduler-components does not know" in caplog.text


def test_a_stream_with_keys_opens(create: Callable[..., Any], tmp_path: Path) -> None:
    _, secret = write_key_pair(tmp_path / "engine", "engine")
    write_key_pair(tmp_path / "clients", "router")
    register(variable(auth="required", secret_key_file=str(secret), client_keys_dir=str(tmp_path / "clients")))
    assert type(create()) is VllmEventPublisher


def stored(vllm: Any, *hashes: int) -> Any:
    return vllm.BlockStored(list(hashes), None, [0] * len(hashes), 1, None, "GPU", None)


def batches_of(vllm: Any, *hashes: int) -> list[Any]:
    return [vllm.KVEventBatch(ts=1.0, events=[stored(vllm, each)]) for each in hashes]


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    ours = [each for each in caplog.records if each.name == "vllm.scheduler_components"]
    return [each.getMessage() for each in ours if each.levelno == logging.WARNING]


@pytest.mark.parametrize(
    ("settings", "has_method", "stores", "num_warnings"),
    [
        ({}, True, [7, 8], 0),
        ({"once_per_block": True}, True, [7, 8], 0),
        ({"once_per_block": False}, True, [7, 7, 8], 0),
        ({}, False, [7, 7, 8], 1),
        ({"once_per_block": True}, False, [7, 7, 8], 1),
        ({"once_per_block": False}, False, [7, 7, 8], 0),
    ],
)
def test_each_block_is_published_once_unless_the_setting_or_this_vllm_prevents_it(
    vllm: Any,
    create: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    settings: dict[str, bool],
    has_method: bool,
    stores: list[int],
    num_warnings: int,
) -> None:
    if not has_method:
        monkeypatch.delattr(import_module(POOL).BlockPool, "_emit_block_removed_events")
    register(variable(**settings))
    with caplog.at_level(logging.WARNING, logger="vllm.scheduler_components"):
        publisher = create(endpoint="tcp://*:0", replay_endpoint="tcp://*:0")
    warnings = warnings_of(caplog)
    assert len(warnings) == num_warnings
    assert all("rank 0 publishes an event for each copy of a block, as vLLM does" in each for each in warnings)
    live, _ = frames_of(vllm, publisher, batches_of(vllm, 7, 7, 8), num_sent=len(stores))
    assert [msgspec.msgpack.decode(payload)[1][0]["block_hashes"] for _, payload in live] == [[each] for each in stores]


def test_a_vllm_whose_reset_cannot_be_patched_is_logged_and_published(
    create: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, SCHEDULER, ModuleType(SCHEDULER))
    register(ASKED)
    with caplog.at_level(logging.WARNING, logger="vllm.scheduler_components"):
        assert type(create()) is VllmEventPublisher
    assert ["a reset of the prefix cache with vLLM's next step" in each for each in warnings_of(caplog)] == [True]


@pytest.mark.skipif(find_spec("vllm") is not None, reason="test_vllm_engine.py does it with a whole vLLM")
def test_a_reset_of_an_idle_scheduler_is_published_without_a_step(
    vllm: Any, factory: Any, create: Callable[..., Any]
) -> None:
    """Without the plugin's publisher the events wait for a step, as in vLLM."""
    register(ASKED)
    pool = import_module(POOL).BlockPool(4, True, 1, True)
    for publisher, num_left in ((create(), 0), (vllm.NullEventPublisher(), 1)):
        scheduler = import_module(SCHEDULER).Scheduler(pool, publisher)
        assert scheduler.reset_prefix_cache(reset_running_requests=True) is True
        assert [type(each).__name__ for each in pool.kv_event_queue] == ["AllBlocksCleared"] * num_left
        if isinstance(publisher, VllmEventPublisher):
            assert publisher.publisher.flush(10.0)
            assert publisher.publisher.stats().batches_sent == 1
            scheduler.update_from_output()
            assert publisher.publisher.stats().batches_pending == 0


# --- the wire ---


def every_field(vllm: Any) -> list[Any]:
    """Return batches with every field of this vLLM, hashes of both kinds and all media."""
    fields = vllm.BlockStored.__struct_fields__
    plain = {
        "block_hashes": [2**64 - 1, 5],
        "parent_block_hash": 2**63,
        "token_ids": list(range(32)),
        "block_size": 16,
        "lora_id": None,
        "medium": "GPU",
        "lora_name": None,
    }
    options = {
        "lora_id": 3,
        "lora_name": "adapter",
        "extra_keys": [("salt", ("image", 3)), None],
        "group_idx": 1,
        "kv_cache_spec_kind": "sliding_window",
        "kv_cache_spec_sliding_window": 128,
        "locality": "REMOTE",
        "ownership": "fs-1",
        "session_id": "s",
        "lookahead_token_ids": [7, 8],
    }
    stored = [vllm.BlockStored(**plain)]
    stored += [vllm.BlockStored(**plain | {name: value}) for name, value in options.items() if name in fields]
    stored.append(vllm.BlockStored(**plain | {name: value for name, value in options.items() if name in fields}))
    stored += [vllm.BlockStored(**plain | {"medium": each}) for each in (None, "CPU", "STORAGE", "FS", "OBJ")]
    stored.append(vllm.BlockStored(**plain | {"block_hashes": [b"\x01" * 32, b"\x02" * 32], "parent_block_hash": None}))
    removed = [vllm.BlockRemoved(block_hashes=[2**64 - 1], medium="GPU", group_idx=0)]
    removed += [vllm.BlockRemoved(block_hashes=[b"\x01" * 32, 5], medium=None, locality="LOCAL", ownership="o")]
    batches = [[each] for each in stored] + [removed, [vllm.AllBlocksCleared()], [*stored, *removed]]
    return [vllm.KVEventBatch(ts=number + 0.5, events=events) for number, events in enumerate(batches)]


def frames_of(
    vllm: Any, publisher: Any, batches: list[Any], *, num_sent: int | None = None
) -> tuple[list[list[bytes]], list[list[bytes]]]:
    """Return the frames of ``batches``: the live frames, and those of a plain replay with its end.

    The publisher sends ``num_sent`` of the batches; None for all.
    """
    num_sent = len(batches) if num_sent is None else num_sent
    config = publisher.get_publisher_config()
    with zmq.Context() as context, context.socket(zmq.SUB) as live, context.socket(zmq.DEALER) as asking:
        live.linger = asking.linger = 0
        live.subscribe(config.topic.encode())
        live.connect(config.endpoint)
        asking.connect(config.replay_endpoint)
        num_before = 0
        while not live.poll(20):  # a publisher does not report when a subscription arrives
            assert num_before < 500
            publisher.publish(vllm.KVEventBatch(ts=0.0, events=[vllm.AllBlocksCleared()]))
            num_before += 1
        for batch in batches:
            publisher.publish(msgspec.structs.replace(batch))
        received: list[list[bytes]] = []
        while not received or int.from_bytes(received[-1][1], "big") < num_before + num_sent - 1:
            assert live.poll(10_000), f"{len(received)} frames of {num_sent}"
            received.append(live.recv_multipart())
        asking.send_multipart([b"", num_before.to_bytes(8, "big")])
        replayed: list[list[bytes]] = []
        while len(replayed) <= num_sent:
            assert asking.poll(10_000), f"{len(replayed)} frames of {num_sent} and the end"
            replayed.append(asking.recv_multipart())
    numbers = range(num_before, num_before + num_sent)
    live_frames = [frames for frames in received if int.from_bytes(frames[1], "big") in numbers]
    assert [int.from_bytes(frames[1], "big") for frames in live_frames] == [*numbers]
    assert [frames[2:3] for frames in replayed[:-1]] == [frames[1:2] for frames in live_frames]
    without_numbers = [[topic, payload] for topic, _, payload in live_frames]
    return without_numbers, [[*frames[:2], *frames[3:]] for frames in replayed[:-1]] + replayed[-1:]


def test_live_frames_and_plain_replay_equal_those_of_vllm(vllm: Any, create: Callable[..., Any]) -> None:
    """Where vLLM is installed, its own publisher sends the same batches.

    With ``once_per_block`` this is true of a stream that stores each block once.
    """
    batches, rank = every_field(vllm), 3
    settings = {"topic": "kv@pod", "endpoint": "tcp://*:0", "replay_endpoint": "tcp://*:0"}
    if find_spec("vllm.config"):  # the double has none
        assert frames_of(vllm, create(rank, **settings), batches) == expected_frames(batches, rank)
    register(variable(once_per_block=False))
    assert frames_of(vllm, create(rank, **settings), batches) == expected_frames(batches, rank)
    register(ASKED)
    once = batches[:-1]  # the last repeats the others
    for number, batch in enumerate(once):
        for event in batch.events:
            if isinstance(event, vllm.BlockStored):
                event.block_hashes = [2 * number + 100, 2 * number + 101]
    assert frames_of(vllm, create(rank, **settings), once) == expected_frames(once, rank)


def expected_frames(batches: list[Any], rank: int) -> tuple[list[list[bytes]], list[list[bytes]]]:
    encode = msgspec.msgpack.Encoder().encode
    payloads = [encode(msgspec.structs.replace(batch, data_parallel_rank=rank)) for batch in batches]
    end = [b"", b"", (-1).to_bytes(8, "big", signed=True), b""]
    return [[b"kv@pod", each] for each in payloads], [*([b"", b"kv@pod", each] for each in payloads), end]


def test_an_invalid_event_is_dropped_alone(vllm: Any, create: Callable[..., Any]) -> None:
    """vLLM's own publisher loses the whole batch and its sequence number."""
    good = every_field(vllm)[0].events
    poison = [None, "text", vllm.BlockStored([1], None, [-1], 1, None, "GPU", None), vllm.BlockRemoved(["x"], "GPU")]
    for variable_given in (variable(), variable(once_per_block=False)):
        register(variable_given)
        publisher = create(endpoint="tcp://*:0", replay_endpoint="tcp://*:0")
        live, _ = frames_of(vllm, publisher, [vllm.KVEventBatch(ts=1.0, events=[*poison, *good])])
        assert live == [[b"", msgspec.msgpack.encode((1.0, good, 0))]]
        assert publisher.publisher.stats().events_refused == len(poison)


def test_a_closed_publisher_raises_runtime_error_as_vllms_own_does(vllm: Any, create: Callable[..., Any]) -> None:
    register(ASKED)
    publisher = create()
    publisher.shutdown()
    publisher.shutdown()
    with pytest.raises(RuntimeError):
        publisher.publish(vllm.KVEventBatch(ts=0.0, events=[vllm.AllBlocksCleared()]))


# --- the stream of a scheduler of the kit ---


def test_a_scheduler_of_the_kit_publishes_at_vllms_addresses(vllm: Any, tmp_path: Path) -> None:
    """It needs no plugin. The variable's settings hold, and events are in the form that vLLM's readers read."""
    config = vllm.KVEventsConfig(
        enable_kv_cache_events=True, publisher="zmq", endpoint="tcp://*:0", replay_endpoint=f"ipc://{tmp_path}/r"
    )
    stream = open_event_stream(config, 1, variable(seq_base="clock"))
    with zmq.Context() as context, context.socket(zmq.SUB) as reader:
        reader.subscribe(b"")
        reader.connect(stream.get_publisher_config().endpoint)
        stored: list[tuple[bytes, dict[str, Any], int]] = []

        def receive() -> bool:
            while reader.poll(10):
                _, sequence, payload = reader.recv_multipart()
                _, [event], rank = msgspec.msgpack.decode(payload)
                if event["type"] != "AllBlocksCleared":  # what a new epoch begins with, if the reader is early enough
                    stored.append((sequence, event, rank))
            return bool(stored)

        wait_until(receive, poll=lambda: stream.publisher.publish(KVEventBatch(1.5, (STORED,), 1)))
    stream.shutdown()
    sequence, event, rank = stored[0]
    assert int.from_bytes(sequence, "big") > 1_000_000  # the clock's microseconds
    assert (event["type"], event["block_hashes"], rank) == ("BlockStored", [7], 1)
    assert stream.get_publisher_config().replay_endpoint == f"ipc://{tmp_path}/r_dp1"


@pytest.mark.parametrize("publisher", ["zmq", "null", None])
def test_a_scheduler_of_the_kit_without_events_opens_nothing(vllm: Any, publisher: str | None) -> None:
    config = None if publisher is None else vllm.KVEventsConfig(publisher=publisher)
    stream = open_event_stream(config, 0, {})
    assert stream.get_publisher_config() is None
    stream.publish(KVEventBatch(1.5, (STORED,), 0))
    stream.shutdown()


def test_an_invalid_setting_of_a_scheduler_of_the_kit_is_an_error(vllm: Any) -> None:
    config = vllm.KVEventsConfig(enable_kv_cache_events=True, publisher="zmq")
    with pytest.raises(ConfigError, match="seq_base"):
        open_event_stream(config, 0, variable(seq_base="tomorrow"))
