"""Opening publishers. Property: a rank opens its own stream or nothing, and an invalid config fails on every rank
alike.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from kit.sockets import LOOPBACK

from scheduler_components import ConfigError, EventBatch, ParallelState
from scheduler_components.errors import PublisherNameTakenError
from scheduler_components.kv_events import (
    EventPublisher,
    EventPublisherFactory,
    KVEventsConfig,
    NullEventPublisher,
    ZmqEventPublisher,
    open_event_publisher,
)


class SeedStylePublisher(EventPublisher):
    """Written for SGLang's factory: accepts exactly the seed's seven arguments."""

    def __init__(
        self,
        attn_dp_rank: int,
        endpoint: str = "tcp://*:5557",
        replay_endpoint: str | None = None,
        buffer_steps: int = 10_000,
        hwm: int = 100_000,
        max_queue_size: int = 100_000,
        topic: str = "",
    ) -> None:
        super().__init__(attn_dp_rank)
        self.given = (attn_dp_rank, endpoint, replay_endpoint, buffer_steps, hwm, max_queue_size, topic)

    def publish(self, events: EventBatch) -> None: ...

    def shutdown(self) -> None: ...


class BrokerPublisher(NullEventPublisher):
    """Accepts an option of its own."""

    def __init__(self, attn_dp_rank: int, *, brokers: list[str], **_: Any) -> None:
        super().__init__(attn_dp_rank)
        self.brokers = brokers


@pytest.fixture
def factory() -> type[EventPublisherFactory]:
    class Fresh(EventPublisherFactory):
        """A factory with the kit's publishers; registrations end with the test."""

    return Fresh


@pytest.mark.parametrize("config", [None, "", "{}", '{"publisher": "null", "topic": "kv"}', KVEventsConfig()])
def test_nothing_configured_publishes_nothing(config: str | KVEventsConfig | None) -> None:
    assert isinstance(EventPublisherFactory.create(config), NullEventPublisher)
    opened = open_event_publisher(config, parallel=ParallelState.trivial())
    assert isinstance(opened, NullEventPublisher)


def test_a_publisher_written_for_the_seed_gets_the_seeds_arguments(factory: type[EventPublisherFactory]) -> None:
    factory.register_publisher("mine", SeedStylePublisher)
    config = '{"publisher": "mine", "replay_endpoint": "tcp://*:5567", "hwm": 5, "topic": "kv", "dialect": "map"}'
    publisher = factory.create(config, attn_dp_rank=3)
    assert isinstance(publisher, SeedStylePublisher)
    assert publisher.given == (3, "tcp://*:5557", "tcp://*:5567", 10_000, 5, 100_000, "kv")


def test_options_are_passed_to_the_publisher_that_accepts_them(factory: type[EventPublisherFactory]) -> None:
    factory.register_publisher("broker", BrokerPublisher)
    publisher = factory.create('{"publisher": "broker", "options": {"brokers": ["a", "b"]}}')
    assert isinstance(publisher, BrokerPublisher)
    assert publisher.brokers == ["a", "b"]


@pytest.mark.parametrize("options", ['{"borkers": ["a"]}', '{"brokers": ["a"], "endpoint": "x", "attn_dp_rank": 1}'])
def test_options_that_do_not_fit_are_refused_before_the_call(
    factory: type[EventPublisherFactory], options: str
) -> None:
    factory.register_publisher("broker", BrokerPublisher)
    factory.register_publisher("seed", SeedStylePublisher)
    for name in ("broker", "seed"):
        with pytest.raises(ConfigError) as refused:
            factory.create(f'{{"publisher": "{name}", "options": {options}}}')
        assert refused.value.field == "options"


def test_a_type_error_inside_a_publisher_is_not_reported_as_a_bad_option(factory: type[EventPublisherFactory]) -> None:
    def broken(**_: Any) -> EventPublisher:
        raise TypeError("inside")

    factory.register_publisher("broken", broken)
    with pytest.raises(TypeError, match=r"^inside$"):
        factory.create('{"publisher": "broken"}')


@pytest.mark.parametrize("name", ["null", "zmq", "mine"])
def test_a_name_is_registered_once(factory: type[EventPublisherFactory], name: str) -> None:
    factory.register_publisher("mine", SeedStylePublisher)
    with pytest.raises(KeyError):
        factory.register_publisher(name, SeedStylePublisher)
    with pytest.raises(PublisherNameTakenError, match=f"^publisher '{name}' is already registered$"):
        factory.register_publisher(name, SeedStylePublisher)


def test_a_name_is_registered_in_one_registry_only(factory: type[EventPublisherFactory]) -> None:
    factory.register_publisher("mine", SeedStylePublisher)
    with pytest.raises(ConfigError, match="not a known publisher"):
        EventPublisherFactory.create('{"publisher": "mine"}')


def test_a_misspelt_publisher_is_a_value_error_with_a_hint() -> None:
    with pytest.raises(ValueError, match="did you mean 'zmq'") as refused:
        EventPublisherFactory.create('{"publisher": "zqm"}')
    assert isinstance(refused.value, ConfigError)
    assert refused.value.field == "publisher"


@pytest.mark.parametrize("rank", [-1, True, "0"])
def test_a_rank_is_a_rank(rank: int) -> None:
    with pytest.raises(ConfigError, match="attn_dp_rank"):
        EventPublisherFactory.create('{"publisher": "zmq"}', attn_dp_rank=rank)


def test_a_rank_whose_existence_makes_ranges_overlap_is_refused() -> None:
    with pytest.raises(ConfigError, match="overlaps"):
        EventPublisherFactory.create('{"publisher": "zmq", "replay_endpoint": "tcp://*:5558"}', attn_dp_rank=1)


def offer(location: Path, package: str, name: str, target: str, source: str = "") -> None:
    """Install a package that offers a publisher, as pip would leave it in ``location``."""
    (location / f"{package}.py").write_text(source)
    info = location / f"{package}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[scheduler_components.event_publishers]\n{name} = {target}\n")


GOOD_SOURCE = """
from scheduler_components.kv_events import NullEventPublisher
class Offered(NullEventPublisher):
    def __init__(self, *, attn_dp_rank, topic, **_):
        super().__init__(attn_dp_rank)
        self.topic = topic
"""


def test_an_installed_package_offers_its_publisher(
    factory: type[EventPublisherFactory], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    offer(tmp_path, "offering_package", "offered", "offering_package:Offered", GOOD_SOURCE)
    monkeypatch.syspath_prepend(tmp_path)
    publisher = factory.create('{"publisher": "offered", "topic": "kv"}')
    assert type(publisher).__name__ == "Offered"
    assert publisher.topic == "kv"  # type: ignore[attr-defined]
    with pytest.raises(ConfigError, match="did you mean 'offered'"):
        factory.create('{"publisher": "oferred"}')


@pytest.mark.parametrize(
    ("target", "source", "said"),
    [
        ("broken_package:Missing", "", "AttributeError"),
        ("broken_package:Any", "raise RuntimeError('no licence')", "RuntimeError: no licence"),
        ("broken_package_that_is_absent:Any", "", "ModuleNotFoundError"),
        ("broken_package:number", "number = 3", "cannot be called"),
    ],
)
def test_a_broken_package_is_a_config_error_that_gives_the_cause(
    factory: type[EventPublisherFactory],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    target: str,
    source: str,
    said: str,
) -> None:
    offer(tmp_path, "broken_package", "offered", target, source)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "broken_package", raising=False)
    with pytest.raises(ConfigError) as refused:
        factory.create('{"publisher": "offered"}')
    assert said in refused.value.problem
    assert target in refused.value.hint


def test_two_packages_that_offer_one_name_are_refused(
    factory: type[EventPublisherFactory], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    offer(tmp_path, "first_package", "offered", "first_package:A")
    offer(tmp_path, "second_package", "offered", "second_package:B")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError, match="first_package:A and second_package:B"):
        factory.create('{"publisher": "offered"}')


def every_rank() -> list[ParallelState]:
    """2 DP x 2 CP x 2 TP under DP attention: two streams, eight ranks."""
    return [ParallelState.from_tp_rank(rank, tp_size=8, attn_dp_size=2, attn_cp_size=2) for rank in range(8)]


def test_only_owners_open_and_each_opens_its_own_stream(factory: type[EventPublisherFactory]) -> None:
    factory.register_publisher("mine", SeedStylePublisher)
    config = '{"publisher": "mine", "replay_endpoint": "tcp://*:5567"}'
    opened = [open_event_publisher(config, parallel=rank, factory=factory) for rank in every_rank()]
    streams = {rank: made.given[0] for rank, made in enumerate(opened) if isinstance(made, SeedStylePublisher)}
    assert streams == {0: 0, 4: 1}
    assert all(isinstance(made, NullEventPublisher) for rank, made in enumerate(opened) if rank not in streams)


@pytest.mark.parametrize(
    ("config", "field"),
    [
        ('{"publisher": "mine", "replay_endpoint": "tcp://*:5558"}', "replay_endpoint"),
        ('{"publisher": "mine", "endpoint": "tcp://*:65535"}', "endpoint"),
        ('{"publisher": "mein"}', "publisher"),
        ('{"publisher": "mine", "endpiont": "x"}', "endpiont"),
        ("{", "kv_events_config"),
    ],
)
def test_a_bad_config_fails_on_every_rank_alike(factory: type[EventPublisherFactory], config: str, field: str) -> None:
    factory.register_publisher("mine", SeedStylePublisher)
    messages = set()
    for parallel in every_rank():
        with pytest.raises(ConfigError) as refused:
            open_event_publisher(config, parallel=parallel, factory=factory)
        assert refused.value.field == field
        messages.add(str(refused.value))
    assert len(messages) == 1


def test_zmq_is_the_kits_publisher_with_all_its_settings() -> None:
    options = {"dialect": "map", "replay_framing": "topic", "seq_base": "clock", "buffer_bytes": 1024}
    config = KVEventsConfig(publisher="zmq", **LOOPBACK, **options)
    publisher = open_event_publisher(config, parallel=ParallelState.trivial())
    try:
        assert isinstance(publisher, ZmqEventPublisher)
        assert publisher.endpoint.startswith("tcp://127.0.0.1:")
        assert not publisher.endpoint.endswith(":0")
    finally:
        publisher.shutdown()


@pytest.mark.processes
def test_finding_a_publisher_does_not_import_zmq() -> None:
    code = (
        "import sys; from scheduler_components.kv_events.registry import open_event_publisher;"
        "from scheduler_components.parallel_state import ParallelState;"
        'open_event_publisher(\'{"publisher": "zmq"}\', parallel=ParallelState.from_tp_rank(1, tp_size=2));'
        "print('zmq' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "False"


@pytest.mark.parametrize(
    ("text", "warned"),
    [
        ('{"endpoint": "tcp://*:5557"}', True),
        ('{"topic": "kv", "hwm": 5}', True),
        ('{"publisher": "null", "endpoint": "tcp://*:5557"}', False),
        ("{}", False),
    ],
)
def test_settings_without_a_publisher_publish_nothing_and_log_a_warning(
    text: str, warned: bool, caplog: pytest.LogCaptureFixture
) -> None:
    assert isinstance(open_event_publisher(text, parallel=ParallelState.trivial()), NullEventPublisher)
    assert ("no KV events are published" in caplog.text) == warned
    assert len(caplog.records) == warned
