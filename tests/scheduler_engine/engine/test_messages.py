"""Messages between the engine's processes survive encoding, and any other frame is a DecodeError."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from scheduler_components import DecodeError
from scheduler_components.values import (
    BeginWeightUpdate,
    CheckWeights,
    ClearStorageIndex,
    ContinueGeneration,
    ControlReply,
    EndWeightUpdate,
    FinishReason,
    FlushCache,
    InputKind,
    LoadSnapshot,
    LoadWeights,
    MemoryTag,
    OutputBatch,
    OutputDelta,
    PauseGeneration,
    PauseMode,
    ReleaseMemory,
    ResumeMemory,
    RollBackWeights,
    TokenOutput,
)
from scheduler_engine.device.sampling import SamplingLimits, SamplingParams
from scheduler_engine.engine.messages import (
    FRONTEND_DISPATCHER,
    AbortRequest,
    BlockInput,
    CacheDump,
    ControlCompleted,
    DrainInput,
    DumpCache,
    LoadReport,
    PoolMediumGroup,
    PoolSnapshot,
    RankCommand,
    RankHeartbeat,
    RankReady,
    RankReport,
    ReadPool,
    RequestRefused,
    SubmitControl,
    SubmitRequest,
    UnblockInput,
    decode_command,
    decode_outputs,
    decode_report,
    encode,
    encode_outputs,
    pack_hashes,
    pack_tokens,
    unpack_hashes,
    unpack_tokens,
)
from scheduler_engine.engine.rank.loop import CommandDecoder

tokens = st.lists(st.integers(0, 2**32 - 1), max_size=20)
hashes = st.frozensets(st.integers(-(2**63), 2**63 - 1), max_size=20)
counts = st.integers(0, 2**40)
rids = st.text(min_size=1, max_size=20)

seconds = st.floats(0, 1e6)
tags = st.lists(st.sampled_from(MemoryTag), max_size=2).map(tuple)
control_requests = st.one_of(
    st.builds(PauseGeneration, st.sampled_from(PauseMode), seconds),
    st.sampled_from([ContinueGeneration(), CheckWeights(), RollBackWeights()]),
    st.builds(FlushCache, seconds),
    st.builds(ClearStorageIndex, seconds),
    st.builds(BeginWeightUpdate, rids, seconds),
    st.builds(LoadWeights, rids, st.binary(max_size=20)),
    st.builds(EndWeightUpdate, st.integers(0, 2**63 - 1)),
    st.builds(ReleaseMemory, tags, st.booleans(), seconds),
    st.builds(ResumeMemory, tags),
)
commands = st.one_of(
    st.builds(SubmitControl, counts, control_requests),
    st.builds(BlockInput),
    st.builds(UnblockInput),
    st.builds(DrainInput),
    st.builds(
        SubmitRequest,
        rids,
        tokens.map(pack_tokens),
        st.builds(SamplingLimits, st.integers(1, 2**31), tokens.map(tuple), st.booleans()),
        counts,
        counts,
        st.builds(
            SamplingParams,
            st.floats(0, 100),
            st.floats(0.01, 1),
            st.integers(0, 2**31),
            st.floats(0, 1),
            st.none() | st.integers(0, 2**63 - 1),
            st.none() | st.integers(0, 20),
        ),
    ),
    st.builds(AbortRequest, rids),
    st.builds(DumpCache, counts),
    st.builds(ReadPool, counts),
)
outputs = st.builds(
    OutputDelta,
    rids,
    counts,
    counts,
    st.none() | st.sampled_from(FinishReason),
    st.builds(
        TokenOutput,
        tokens.map(tuple),
        counts,
        counts,
        counts,
        logprobs=st.none() | st.lists(st.floats(-50, 0), max_size=3).map(tuple),
        top_logprobs=st.none() | st.just((((5, -0.5), (6, -1.0)), ())),
    ),
)
reports = st.one_of(
    st.builds(RankReady, counts, *[st.none() | st.text()] * 3),
    st.builds(
        PoolSnapshot,
        counts,
        counts,
        st.none() | st.integers(-1, 2**40),
        st.lists(st.builds(PoolMediumGroup, st.text(), st.none() | counts, hashes.map(pack_hashes)), max_size=3).map(
            tuple
        ),
    ),
    st.builds(RankHeartbeat, st.text(), counts),
    st.builds(RequestRefused, rids, st.text(), st.booleans()),
    st.builds(ControlCompleted, counts, st.builds(ControlReply, counts, st.text(), counts, st.integers(0, 2**63 - 1))),
    st.builds(
        LoadReport,
        st.builds(LoadSnapshot, sequence=counts, dispatched_watermarks=st.just(((FRONTEND_DISPATCHER, 7),))),
    ),
    st.builds(
        CacheDump, counts, counts, counts, st.integers(0, 2**32 - 1), st.integers(-1, 2**60), hashes.map(pack_hashes)
    ),
)


@given(commands)
def test_a_command_survives_encoding(command: RankCommand) -> None:
    assert decode_command(encode(command)) == command
    read = CommandDecoder().read(encode(command))
    assert read.message == command
    assert (read.kind in (InputKind.REQUEST, InputKind.ABORT)) == bool(read.rid)


@given(reports)
def test_a_report_survives_encoding(report: RankReport) -> None:
    assert decode_report(encode(report)) == report


@given(st.builds(OutputBatch, counts, st.lists(outputs, max_size=5).map(tuple)))
def test_outputs_survive_encoding(batch: OutputBatch) -> None:
    assert decode_outputs(encode_outputs(batch)) == batch


@given(tokens)
def test_tokens_are_packed_in_four_bytes_each(token_ids: list[int]) -> None:
    packed = pack_tokens(token_ids)
    assert len(packed) == 4 * len(token_ids)
    assert list(unpack_tokens(packed)) == token_ids


def test_tokens_are_packed_little_endian() -> None:
    assert pack_tokens([1, 0x01020304]) == b"\x01\x00\x00\x00\x04\x03\x02\x01"


def test_a_token_beyond_u32_is_refused() -> None:
    with pytest.raises(OverflowError):
        pack_tokens([2**32])


@given(hashes)
def test_hashes_are_packed_in_eight_bytes_each(block_hashes: frozenset[int]) -> None:
    packed = pack_hashes(block_hashes)
    assert len(packed) == 8 * len(block_hashes)
    assert unpack_hashes(packed) == block_hashes


@pytest.mark.parametrize("decode", [decode_command, decode_report, decode_outputs])
@given(noise=st.binary(max_size=40))
@example(noise=b"\x91\xa1\x80")  # bad UTF-8 where the tag belongs
def test_noise_is_a_decode_error(decode, noise: bytes) -> None:
    try:
        decode(noise)
    except DecodeError:
        return
    raise AssertionError("noise was taken for a message")


@pytest.mark.parametrize("unpack", [unpack_tokens, unpack_hashes])
def test_incomplete_packed_values_are_a_decode_error(unpack) -> None:
    with pytest.raises(DecodeError, match="3 bytes"):
        unpack(b"abc")
