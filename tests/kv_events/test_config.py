"""Configuration. Property: an operator's text becomes a valid config or one ConfigError that names the setting."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from scheduler_components import ConfigError
from scheduler_components.kv_events import KVEventsConfig
from scheduler_components.kv_events.codec import DIALECTS
from scheduler_components.kv_events.config import SEND_MODES, SEQ_BASES
from scheduler_components.kv_events.replay import REPLAY_FRAMINGS

SETTINGS = sorted(KVEventsConfig.model_fields)
JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=5,
)
NEAR_VALUES = st.sampled_from(["zmq", "null", "map", "seed", "clock", "tcp://*:5557", "tcp://*:65535", "ipc:///x", "*"])


def test_the_defaults_are_those_of_the_seed() -> None:
    config = KVEventsConfig.from_cli("{}")
    assert config == KVEventsConfig()
    seed_settings = {"publisher", "endpoint", "replay_endpoint", "buffer_steps", "hwm", "max_queue_size", "topic"}
    assert config.model_dump(include=seed_settings) == {
        "publisher": "null",
        "endpoint": "tcp://*:5557",
        "replay_endpoint": None,
        "buffer_steps": 10_000,
        "hwm": 100_000,
        "max_queue_size": 100_000,
        "topic": "",
    }
    assert (config.dialect, config.bind, config.replay_framing, config.seq_base) == ("array", None, "seed", "zero")
    assert (config.load_endpoint, config.buffer_bytes, config.options) == (None, 256 * 1024 * 1024, {})
    assert config.send_mode == "background"


@settings(deadline=None)
@given(st.text() | st.dictionaries(st.sampled_from(SETTINGS) | st.text(), JSON_VALUES | NEAR_VALUES).map(json.dumps))
@example("[" * 100_000)
@example('{"hwm": ' + "9" * 5_000 + "}")
@example('{"self": 1}')
@example('{"hwm": NaN}')
@example('{"topic": "\\ud800"}')
@example('{"options": {"\\ud800": 1}}')
def test_any_text_is_a_config_or_a_config_error(text: str) -> None:
    try:
        config = KVEventsConfig.from_cli(text)
    except ConfigError as error:
        assert "\n" not in error.hint
        assert len(str(error)) < 1_000
    else:
        assert KVEventsConfig(**config.model_dump()) == config
        assert config.port_plan(1).events.host is not None


@pytest.mark.parametrize(
    ("given_settings", "field", "said"),
    [
        ({"endpiont": "tcp://*:5557"}, "endpiont", "did you mean 'endpoint'?"),
        ({"replay": "tcp://*:5557"}, "replay", "did you mean"),
        ({"wholly_unlike": 1}, "wholly_unlike", "give one of publisher, endpoint"),
        ({"dialect": "aray"}, "dialect", "did you mean 'array'?"),
        ({"dialect": "json"}, "dialect", "give one of array, map, vllm"),
        ({"dialect": None}, "dialect", "give a string"),
        ({"replay_framing": "topics"}, "replay_framing", "did you mean 'topic'?"),
        ({"seq_base": "time"}, "seq_base", "give one of zero, clock"),
        ({"seq_floor_file": "floor"}, "seq_floor_file", "is not used with seq_base 'zero'"),
        ({"seq_base": "clock", "seq_floor_file": ""}, "seq_floor_file", "is not the path of a file"),
        ({"seq_base": "clock", "seq_floor_file": "/"}, "seq_floor_file", "is not the path of a file"),
        ({"seq_base": "clock", "seq_floor_file": "a\0b"}, "seq_floor_file", "is not the path of a file"),
        ({"publisher": ""}, "publisher", "is empty"),
        ({"publisher": None}, "publisher", "give a string"),
        ({"publisher": ["zmq"]}, "publisher", "give a string"),
        ({"endpoint": None}, "endpoint", "give a string"),
        ({"endpoint": ""}, "endpoint", "no transport"),
        ({"endpoint": "tcp://*"}, "endpoint", "no port"),
        ({"endpoint": "tcp://*:65536"}, "endpoint", "65535"),
        ({"endpoint": 5557}, "endpoint", "give a string"),
        ({"endpoint": "tcp://10.0.0.7:0"}, "endpoint", "port 0"),
        ({"bind": False}, "endpoint", "wildcard"),
        ({"bind": "false"}, "bind", "give true or false"),
        ({"bind": 0}, "bind", "give true or false"),
        ({"replay_endpoint": ""}, "replay_endpoint", "no transport"),
        ({"replay_endpoint": "tcp://*:5557"}, "replay_endpoint", "overlaps endpoint"),
        ({"load_endpoint": "*:5560"}, "load_endpoint", "no transport"),
        ({"load_endpoint": "tcp://*:5560", "replay_endpoint": "tcp://*:5560"}, "load_endpoint", "overlaps replay_en"),
        ({"buffer_steps": "10000"}, "buffer_steps", "give an integer"),
        ({"buffer_steps": 10.0}, "buffer_steps", "give an integer"),
        ({"buffer_steps": -1}, "buffer_steps", "at least 0"),
        ({"buffer_steps": 2**31}, "buffer_steps", "at most 2147483647"),
        ({"buffer_steps": 0, "replay_endpoint": "tcp://*:5567"}, "buffer_steps", "at least 1"),
        ({"buffer_bytes": 0}, "buffer_bytes", "at least 1"),
        ({"buffer_bytes": 2**63}, "buffer_bytes", "at most"),
        ({"hwm": 0}, "hwm", "at least 1"),
        ({"hwm": True}, "hwm", "give an integer"),
        ({"hwm": 2**31}, "hwm", "at most 2147483647"),
        ({"max_queue_size": 0}, "max_queue_size", "at least 1"),
        ({"max_queue_size": None}, "max_queue_size", "give an integer"),
        ({"send_mode": "thread"}, "send_mode", "give one of"),
        ({"topic": None}, "topic", "give a string"),
        ({"topic": "\ud800"}, "topic", "UTF-8"),
        ({"topic": "kv\0"}, "topic", "contains a NUL"),
        ({"options": []}, "options", "give an object"),
        ({"options": {"brokers": 3}}, "options", "remove them"),
        ({"publisher": "zmq", "options": {"brokers": 3}}, "options", "remove them"),
    ],
)
def test_a_bad_setting_is_named_with_its_hint(given_settings: dict[str, Any], field: str, said: str) -> None:
    for make in (lambda: KVEventsConfig(**given_settings), lambda: KVEventsConfig.from_cli(json.dumps(given_settings))):
        with pytest.raises(ConfigError) as refused:
            make()
        assert refused.value.field == field
        assert said in str(refused.value)


@pytest.mark.parametrize("text", ["", "zmq", "{", "{'publisher': 'zmq'}", "[]", "null", "1", '"zmq"', "NaN"])
def test_text_that_is_no_json_object_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="JSON") as refused:
        KVEventsConfig.from_cli(text)
    assert refused.value.field == "kv_events_config"
    assert '"publisher": "zmq"' in refused.value.hint


def test_a_key_given_twice_is_refused() -> None:
    with pytest.raises(ConfigError, match="twice"):
        KVEventsConfig.from_cli('{"endpoint": "tcp://*:5557", "endpoint": "tcp://*:5558"}')


def test_a_config_does_not_change() -> None:
    with pytest.raises(ValueError, match="frozen"):
        KVEventsConfig().endpoint = "tcp://*:1"  # type: ignore[misc]


def test_the_plan_of_a_config_is_refused_for_the_engine_that_it_does_not_fit() -> None:
    config = KVEventsConfig(publisher="zmq", replay_endpoint="tcp://*:5559")
    assert str(config.port_plan(2).replay_endpoint(1)) == "tcp://*:5560"
    with pytest.raises(ConfigError, match="overlaps"):
        config.port_plan(3)


def test_options_are_kept_for_publishers_of_others() -> None:
    assert KVEventsConfig(publisher="kafka", options={"brokers": ["a"]}).options == {"brokers": ["a"]}


_COUNTS = st.integers(1, 2**31 - 1)
_STREAMS = 64


@st.composite
def config_texts(draw: st.DrawFn) -> str:
    """A configuration of a ZMQ publisher that is valid for up to 64 streams, with a random subset of settings."""
    settings = draw(
        st.fixed_dictionaries(
            {"publisher": st.just("zmq")},
            optional={
                "endpoint": st.integers(1024, 9000).map(lambda port: f"tcp://*:{port}"),
                "replay_endpoint": st.integers(9000 + _STREAMS, 20_000).map(lambda port: f"tcp://*:{port}"),
                "load_endpoint": st.integers(20_000 + _STREAMS, 40_000).map(lambda port: f"tcp://127.0.0.1:{port}"),
                "buffer_steps": _COUNTS,
                "hwm": _COUNTS,
                "max_queue_size": _COUNTS,
                "topic": st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=8),
                "dialect": st.sampled_from(DIALECTS),
                "bind": st.sampled_from([None, True]),
                "replay_framing": st.sampled_from(REPLAY_FRAMINGS),
                "seq_base": st.sampled_from(SEQ_BASES),
                "send_mode": st.sampled_from(SEND_MODES),
                "buffer_bytes": st.integers(1, 2**40),
            },
        )
    )
    return json.dumps(settings)


@settings(deadline=None)
@given(text=config_texts(), streams=st.integers(1, 64))
def test_valid_configs_are_accepted(text: str, streams: int) -> None:
    assert KVEventsConfig.from_cli(text).port_plan(streams).stream_count == streams


READERS = {
    "text": lambda given: KVEventsConfig.read(json.dumps(given)),
    "mapping": KVEventsConfig.read,
    "model_validate": KVEventsConfig.model_validate,
    "model_validate_json": lambda given: KVEventsConfig.model_validate_json(json.dumps(given)),
    "model_validate_json of bytes": lambda given: KVEventsConfig.model_validate_json(json.dumps(given).encode()),
}


@pytest.mark.parametrize("read", READERS.values(), ids=READERS)
@pytest.mark.parametrize(
    "given_settings",
    [
        {"publisher": "zmq", "bind": True, "endpoint": "tcp://127.0.0.1:0"},
        {"publisher": "other", "options": {"depth": [1, {"a": None}]}},
        {"endpont": "tcp://*:1"},
        {"hwm": "5"},
        {"hwm": 0},
        {"publisher": "", "topic": 1},
        {"replay_endpoint": "tcp://*:5557"},
        {"topic": "a\0"},
    ],
)
def test_every_reader_gives_the_same_config_or_the_same_error(
    read: Callable[[dict[str, Any]], KVEventsConfig], given_settings: dict[str, Any]
) -> None:
    def outcome(reader: Callable[[dict[str, Any]], KVEventsConfig]) -> KVEventsConfig | tuple[str, str]:
        try:
            return reader(given_settings)
        except ConfigError as error:
            return error.field, str(error)

    assert outcome(read) == outcome(lambda given: KVEventsConfig(**given))


@pytest.mark.parametrize("text", ["{", "[]", "5", '{"hwm": 1, "hwm": 2}', b"\xff{}", b"{"])
def test_json_that_is_no_config_is_a_config_error_of_one_line(text: str | bytes) -> None:
    with pytest.raises(ConfigError) as raised:
        KVEventsConfig.model_validate_json(text)
    assert "\n" not in str(raised.value)
    assert raised.value.field in ("kv_events_config", "hwm")


def test_a_key_that_is_no_text_is_an_unknown_setting() -> None:
    with pytest.raises(ConfigError, match=r"^1=2: is not a setting of kv_events_config"):
        KVEventsConfig.read({1: 2})  # type: ignore[dict-item]
