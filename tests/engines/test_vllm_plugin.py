"""The plugin over vLLM's own declarations where vLLM is installed, and over a double of them elsewhere.

``make test`` runs it over the double, ``make engines`` over vLLM. Whole engines are in ``test_vllm_engine.py``.
"""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib import import_module
from importlib.metadata import EntryPoint
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq

from scheduler_components import StartError
from scheduler_components.engines.settings import KV_EVENTS_VARIABLE
from scheduler_components.engines.vllm import PLUGIN_NAME, VllmEventPublisher, VllmPublisherFactory, register
from scheduler_components.kv_events import write_key_pair

pytestmark = [pytest.mark.filterwarnings("default"), pytest.mark.timeout(300)]

ASKED = {"VLLM_PLUGINS": f"another,{PLUGIN_NAME}"}


def variable(**settings: Any) -> dict[str, str]:
    return {KV_EVENTS_VARIABLE: json.dumps(settings)}


@pytest.fixture
def vllm(vllm_events: Any) -> Any:
    return vllm_events


@pytest.fixture(autouse=True)
def factory(vllm: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """vLLM's factory, in which an engine of other tests may have put the plugin already.

    Its table, and what ``once_per_block`` changes in vLLM's pool, are put back after each test.
    """
    pool = import_module("vllm.v1.core.block_pool").BlockPool
    monkeypatch.setattr(pool, "_emit_block_removed_events", pool._emit_block_removed_events)
    table = dict(vllm.EventPublisherFactory._registry)
    if isinstance(table["zmq"], VllmPublisherFactory):
        table["zmq"] = table["zmq"].own
    monkeypatch.setattr(vllm.EventPublisherFactory, "_registry", table)
    return vllm.EventPublisherFactory


@pytest.fixture
def create(vllm: Any, tmp_path: Path) -> Iterator[Callable[..., Any]]:
    """Open a publisher as vLLM's scheduler does; it is shut down at the end."""
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


# --- when it acts ---


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
def test_it_acts_when_it_is_asked_to(
    vllm: Any, create: Callable[..., Any], environ: dict[str, str], acts: bool
) -> None:
    register(environ)
    assert (type(create()) is VllmEventPublisher) is acts


def test_unasked_it_imports_nothing_of_vllm() -> None:
    """vLLM loads every plugin that is installed, in each of its processes."""
    script = "import sys\nfrom scheduler_components.engines.vllm import register\nregister({})\n"
    script += "print(*[name for name in sys.modules if name.split('.')[0] in ('vllm', 'torch')])"
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert ran.stdout.split() == []


def test_a_second_load_changes_nothing_but_the_settings(vllm: Any, factory: Any, create: Callable[..., Any]) -> None:
    first = factory._registry["zmq"]
    register(ASKED)
    register(ASKED)
    assert factory._registry["zmq"].own is first
    register(variable(seq_base="clock"))
    assert factory._registry["zmq"].own is first
    assert create().publisher.stats().last_sequence > 1_000_000  # the clock's microseconds


def test_the_entry_point_is_vllms_and_leads_to_the_plugin() -> None:
    text = (Path(__file__).parents[2] / "pyproject.toml").read_text()
    assert f'[project.entry-points."vllm.general_plugins"]\n{PLUGIN_NAME} = "scheduler_components.engines.vllm:' in text
    offer = EntryPoint(PLUGIN_NAME, "scheduler_components.engines.vllm:register", "vllm.general_plugins")
    assert offer.load() is register


def test_the_publisher_is_one_of_vllms(vllm: Any, create: Callable[..., Any]) -> None:
    register(ASKED)
    assert isinstance(create(), vllm.EventPublisher)


# --- addresses, as vLLM has them ---


@pytest.mark.parametrize("rank", [0, 1, 3])
def test_ranks_are_offset_as_vllm_does(
    vllm: Any, create: Callable[..., Any], free_ports: Callable[[int], int], rank: int
) -> None:
    base = free_ports(12)
    register(ASKED)
    settings = {"endpoint": f"tcp://*:{base}", "replay_endpoint": f"tcp://127.0.0.1:{base + 6}", "topic": "kv"}
    publisher = create(rank, **settings)
    told = publisher.get_publisher_config()
    assert type(told) is vllm.KVEventsConfig
    assert (told.endpoint, told.replay_endpoint) == (f"tcp://*:{base + rank}", f"tcp://127.0.0.1:{base + 6 + rank}")
    assert (told.topic, told.enable_kv_cache_events, told.publisher) == ("kv", True, "zmq")
    assert publisher.publisher.endpoint == f"tcp://0.0.0.0:{base + rank}"
    assert publisher.publisher.replay_endpoint == told.replay_endpoint


def test_port_0_is_a_port_of_this_nodes_address_and_is_told(vllm: Any, create: Callable[..., Any]) -> None:
    register(ASKED)
    publisher = create(2, endpoint="tcp://*:0", replay_endpoint="tcp://*:0")
    told = publisher.get_publisher_config()
    here = import_module("vllm.utils.network_utils").get_ip()
    for address in (told.endpoint, told.replay_endpoint):
        host, _, port = address.rpartition(":")
        assert host == f"tcp://{here}"
        assert int(port) > 0
    assert (told.endpoint, told.replay_endpoint) == (publisher.publisher.endpoint, publisher.publisher.replay_endpoint)


def test_a_node_without_an_address_is_told_so(
    vllm: Any, create: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("vllm.utils.network_utils.get_ip", lambda: "0.0.0.0")
    register(variable(auth="none"))  # so that nothing is opened instead
    assert type(create(endpoint="tcp://*:0")) is vllm.NullEventPublisher
    assert "set VLLM_HOST_IP" in caplog.text


@pytest.mark.parametrize(
    ("endpoint", "bind", "at"),
    [
        ("tcp://127.0.0.1:{}", None, "tcp://127.0.0.1:{}"),
        ("tcp://0.0.0.0:{}", None, "tcp://127.0.0.1:{}"),  # vLLM dials it, which leads to this machine
        ("tcp://0.0.0.0:{}", True, "tcp://0.0.0.0:{}"),
        ("tcp://[::1]:{}", None, "tcp://[::1]:{}"),
    ],
)
def test_what_vllm_dials_is_dialled(
    create: Callable[..., Any], free_ports: Callable[[int], int], endpoint: str, bind: bool | None, at: str
) -> None:
    port = free_ports(1)
    register(variable(bind=bind) if bind is not None else ASKED)
    publisher = create(endpoint=endpoint.format(port))
    assert publisher.publisher.endpoint == at.format(port)
    assert publisher.get_publisher_config().endpoint == endpoint.format(port)


def test_limits_of_zero_are_none_as_in_vllm(create: Callable[..., Any]) -> None:
    register(ASKED)
    assert type(create(hwm=0, max_queue_size=0)) is VllmEventPublisher


def test_an_address_in_use_stops_the_start_as_vllms_own_does(create: Callable[..., Any]) -> None:
    register(ASKED)
    create()
    with pytest.raises(StartError, match="another publisher is bound there"):
        create()


# --- what is wrong is said, and the engine goes on ---


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "is not JSON"),
        ('{"buffer_byts": 1}', "buffer_byts=1: is not a setting"),
        ('{"topic": "x"}', "give it in the engine's own --kv-events-config"),
    ],
)
def test_a_wrong_variable_leaves_vllms_own_publisher(
    vllm: Any, factory: Any, create: Callable[..., Any], caplog: pytest.LogCaptureFixture, text: str, words: str
) -> None:
    own = factory._registry["zmq"]
    register(ASKED)
    with caplog.at_level(logging.ERROR):
        register({KV_EVENTS_VARIABLE: text})
    assert factory._registry["zmq"] is own
    assert [words in each.getMessage() for each in caplog.records] == [True]
    assert "vLLM publishes its KV events itself" in caplog.text


@pytest.mark.parametrize("text", ['{"auth": "required"', '{"auth": "required"}', '{"secret_key_file": 7}'])
def test_a_wrong_variable_that_asks_for_keys_opens_nothing(
    vllm: Any, create: Callable[..., Any], caplog: pytest.LogCaptureFixture, text: str
) -> None:
    register({KV_EVENTS_VARIABLE: text})
    publisher = create()
    assert type(publisher) is vllm.NullEventPublisher
    assert publisher.get_publisher_config() is None
    assert "because the settings require keys" in caplog.text


def test_missing_key_files_open_nothing(
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
def test_settings_of_vllms_that_do_not_fit_leave_its_own_publisher(
    vllm: Any, factory: Any, caplog: pytest.LogCaptureFixture, settings: dict[str, Any], words: str
) -> None:
    asked: list[dict[str, Any]] = []
    factory._registry["zmq"] = lambda **given: asked.append(given) or vllm.NullEventPublisher()
    register(ASKED)
    config = vllm.KVEventsConfig(enable_kv_cache_events=True, publisher="zmq", **settings)
    factory.create(config, 1)
    assert words in caplog.text
    assert [(each["data_parallel_rank"], each["endpoint"]) for each in asked] == [(1, config.endpoint)]


def test_a_setting_of_a_later_vllm_counts_where_it_says_something(
    vllm: Any, factory: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    factory._registry["zmq"] = lambda **given: vllm.NullEventPublisher()
    register(ASKED)
    other = factory._registry["zmq"](data_parallel_rank=0, endpoint=f"ipc://{tmp_path}/e", compression="zstd")
    assert type(other) is vllm.NullEventPublisher
    assert "compression='zstd': is a setting of vLLM that scheduler-components does not know" in caplog.text


def test_keys_reach_the_stream(create: Callable[..., Any], tmp_path: Path) -> None:
    _, secret = write_key_pair(tmp_path / "engine", "engine")
    write_key_pair(tmp_path / "clients", "router")
    register(variable(auth="required", secret_key_file=str(secret), client_keys_dir=str(tmp_path / "clients")))
    assert type(create()) is VllmEventPublisher


def test_a_vllm_that_cannot_tell_once_per_block_keeps_its_own_publisher(
    vllm: Any,
    factory: Any,
    create: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    pool = import_module("vllm.v1.core.block_pool").BlockPool
    monkeypatch.delattr(pool, "_emit_block_removed_events")
    factory._registry["zmq"] = lambda **given: vllm.NullEventPublisher()
    register(variable(once_per_block=True))
    assert type(create()) is vllm.NullEventPublisher
    assert "once_per_block=True: does not support this version of vLLM" in caplog.text
    register(variable())
    assert type(create()) is VllmEventPublisher  # the address was let go


# --- what is on the wire ---


def every_field(vllm: Any) -> list[Any]:
    """Batches with every field that this vLLM has, hashes of both kinds and all media."""
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


def frames_of(vllm: Any, publisher: Any, batches: list[Any]) -> tuple[list[list[bytes]], list[list[bytes]]]:
    """All frames of ``batches``, live and by a plain replay with its end; both read until they are there."""
    told = publisher.get_publisher_config()
    with zmq.Context() as context, context.socket(zmq.SUB) as live, context.socket(zmq.DEALER) as asking:
        live.linger = asking.linger = 0
        live.subscribe(told.topic.encode())
        live.connect(told.endpoint)
        asking.connect(told.replay_endpoint)
        num_before = 0
        while not live.poll(20):  # nobody tells when a subscription has arrived
            assert num_before < 500
            publisher.publish(vllm.KVEventBatch(ts=0.0, events=[vllm.AllBlocksCleared()]))
            num_before += 1
        for batch in batches:
            publisher.publish(msgspec.structs.replace(batch))
        heard: list[list[bytes]] = []
        while not heard or int.from_bytes(heard[-1][1], "big") < num_before + len(batches) - 1:
            assert live.poll(10_000), f"{len(heard)} frames of {len(batches)}"
            heard.append(live.recv_multipart())
        asking.send_multipart([b"", num_before.to_bytes(8, "big")])
        replayed: list[list[bytes]] = []
        while len(replayed) <= len(batches):
            assert asking.poll(10_000), f"{len(replayed)} frames of {len(batches)} and the end"
            replayed.append(asking.recv_multipart())
    numbers = range(num_before, num_before + len(batches))
    live_frames = [frames for frames in heard if int.from_bytes(frames[1], "big") in numbers]
    assert [int.from_bytes(frames[1], "big") for frames in live_frames] == [*numbers]
    assert [frames[2:3] for frames in replayed[:-1]] == [frames[1:2] for frames in live_frames]
    without_numbers = [[topic, payload] for topic, _, payload in live_frames]
    return without_numbers, [[*frames[:2], *frames[3:]] for frames in replayed[:-1]] + replayed[-1:]


def test_live_frames_and_plain_replay_are_those_of_vllms_own(vllm: Any, create: Callable[..., Any]) -> None:
    """Where vLLM is installed its own publisher sends the same batches."""
    batches, rank = every_field(vllm), 3
    encode = msgspec.msgpack.Encoder().encode
    payloads = [encode(msgspec.structs.replace(batch, data_parallel_rank=rank)) for batch in batches]
    end = [b"", b"", (-1).to_bytes(8, "big", signed=True), b""]
    expected = [[b"kv@pod", each] for each in payloads], [*([b"", b"kv@pod", each] for each in payloads), end]
    settings = {"topic": "kv@pod", "endpoint": "tcp://*:0", "replay_endpoint": "tcp://*:0"}
    if find_spec("vllm.config"):  # the double has none
        assert frames_of(vllm, create(rank, **settings), batches) == expected
    register(ASKED)
    assert frames_of(vllm, create(rank, **settings), batches) == expected


def test_what_is_no_event_costs_itself_and_raises_nothing(vllm: Any, create: Callable[..., Any]) -> None:
    """vLLM's own publisher loses the whole batch, and its number."""
    good = every_field(vllm)[0].events
    poison = [None, "text", vllm.BlockStored([1], None, [-1], 1, None, "GPU", None), vllm.BlockRemoved(["x"], "GPU")]
    for variable_given in (variable(), variable(once_per_block=True)):
        register(variable_given)
        publisher = create(endpoint="tcp://*:0", replay_endpoint="tcp://*:0")
        heard, _ = frames_of(vllm, publisher, [vllm.KVEventBatch(ts=1.0, events=[*poison, *good])])
        assert heard == [[b"", msgspec.msgpack.encode((1.0, good, 0))]]
        assert publisher.publisher.stats().events_refused == len(poison)


def test_a_closed_publisher_raises_what_vllms_own_raises(vllm: Any, create: Callable[..., Any]) -> None:
    register(ASKED)
    publisher = create()
    publisher.shutdown()
    publisher.shutdown()
    with pytest.raises(RuntimeError):
        publisher.publish(vllm.KVEventBatch(ts=0.0, events=[vllm.AllBlocksCleared()]))
