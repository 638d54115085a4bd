"""Generate the parts of ``docs/spec/`` that come from the code: ``python docs/make_spec.py``.

Each of these comments starts a generated part of a page. All other text is written by hand:

- ``<!-- rules: CHAPTER -->``: the table of a chapter's rules, from ``scheduler_components.testing.rules``;
- ``<!-- index -->``: all rules, each with its page;
- ``<!-- fields: EVENT -->``: an event's fields, from ``FIELD_FACTS``;
- ``<!-- golden: FILE: NAME -->``: one golden vector, part by part.

A test fails if a page differs from the generated text.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from scheduler_components.testing.golden import (
    BatchVector,
    DigestVector,
    ForwardPassVector,
    FrameVector,
    NamespacedHashVector,
    PageHashVector,
    PeerVector,
    batch_vectors,
    digest_vectors,
    forward_pass_vectors,
    namespaced_hash_vectors,
    page_hash_vectors,
    peer_vectors,
    replay_frame_vectors,
)
from scheduler_components.testing.rules import SPECIFICATION, Rule

SPEC = Path(__file__).parent / "spec"
PAGES = {
    "streams.md": ("frames", "sequence", "replay", "proof"),
    "events.md": ("batches", "events", "identity", "places"),
    "workers.md": ("discovery", "load", "pool"),
}
"""Each page and its chapters."""

_Vector = (
    BatchVector | PeerVector | ForwardPassVector | FrameVector | PageHashVector | NamespacedHashVector | DigestVector
)
_VECTORS: dict[str, Callable[[], Mapping[str, _Vector]]] = {
    "batches.json": lambda: {each.name: each for each in batch_vectors()},
    "peers.json": lambda: {each.name: each for each in peer_vectors()},
    "replay_frames.json": replay_frame_vectors,
    "page_hashes.json": lambda: {each.name: each for each in page_hash_vectors()},
    "namespaced_hashes.json": lambda: {each.name: each for each in namespaced_hash_vectors()},
    "digests.json": lambda: {each.name: each for each in digest_vectors()},
    "forward_passes.json": lambda: {each.name: each for each in forward_pass_vectors()},
}

_BLOCK = re.compile(r"(<!-- (rules|index|fields|golden)(?:: ([^>]+?))? -->\n).*?(<!-- end -->)", re.DOTALL)


class FieldInfo(NamedTuple):
    """One field of an event: the engine versions that send it, and its meaning."""

    sglang: str
    vllm: str
    meaning: str


_BOTH = "all"
FIELD_FACTS: dict[str, dict[str, FieldInfo]] = {
    "BlockStored": {
        "block_hashes": FieldInfo(_BOTH, "all; unsigned, or bytes", "one hash per block, parents first"),
        "parent_block_hash": FieldInfo(_BOTH, _BOTH, "hash of the block before the first one; nil at a root"),
        "token_ids": FieldInfo(_BOTH, _BOTH, "`len(block_hashes) * block_size` ids, each below 2^32"),
        "block_size": FieldInfo(_BOTH, _BOTH, "tokens per block"),
        "lora_id": FieldInfo(_BOTH, "all; deprecated", "adapter number, nil for the base model"),
        "medium": FieldInfo("0.5.x", "0.9 on; always there in maps", "medium of the blocks; nil means the device"),
        "lora_name": FieldInfo("0.5.23", "0.2x on; always there in maps", "adapter name"),
        "extra_keys": FieldInfo("", "0.2x on", "other inputs of the hashes, one entry per block or nil"),
        "group_idx": FieldInfo("", "0.32", "KV-cache group of a hybrid model"),
        "cache_salt": FieldInfo("0.5.2x on", "", "isolates tenants that send the same tokens"),
        "session_id": FieldInfo("0.5.2x on", "0.32", "the session that caused the store; not part of the identity"),
        "kv_cache_spec_kind": FieldInfo("", "0.32", "attention kind of the group, such as `full_attention`"),
        "kv_cache_spec_sliding_window": FieldInfo("", "0.32", "size of the group's sliding window in tokens"),
        "locality": FieldInfo("", "0.32", "`LOCAL` or `REMOTE`, seen from the publisher"),
        "ownership": FieldInfo("", "0.32", "the tier, if one medium has several"),
        "lookahead_token_ids": FieldInfo("", "0.33", "tokens after the blocks, for drafting"),
    },
    "BlockRemoved": {
        "block_hashes": FieldInfo(_BOTH, "all; unsigned, or bytes", "the removed blocks"),
        "medium": FieldInfo("0.5.x", "0.9 on; always there in maps", "medium of the blocks; nil means the device"),
        "group_idx": FieldInfo("", "0.32", "KV-cache group"),
        "locality": FieldInfo("", "0.32", "as in `BlockStored`"),
        "ownership": FieldInfo("", "0.32", "as in `BlockStored`"),
    },
    "AllBlocksCleared": {},
}
"""Fields by event, in the order of this kit's structs. A test compares the order with the structs."""


def write(page: str) -> str:
    """Return the page with its generated parts replaced."""
    return _BLOCK.sub(lambda found: found[1] + "\n" + _generate(found[2], found[3] or "") + "\n\n" + found[4], page)


def _generate(kind: str, argument: str) -> str:
    if kind == "rules":
        return "\n".join(_rule_table(rule for rule in SPECIFICATION if rule.chapter == argument))
    if kind == "fields":
        return "\n".join(_field_table(argument))
    if kind == "golden":
        return "\n".join(["```text", *_golden(*argument.split(": ", 1)), "```"])
    return "\n".join(_index())


def _rule_table(rules: Iterable[Rule]) -> Iterator[str]:
    yield "| id | rule | harm of a violation | verified by |"
    yield "| --- | --- | --- | --- |"
    for rule in rules:
        name = f"{rule.id} `{rule.name}`, {rule.weight}"
        yield f"| {name} | {_sentence(rule.holds)} | {_sentence(rule.harms)} | {_verifier(rule)} |"


def _sentence(text: str) -> str:
    text = text.replace("|", "\\|")
    return f"{text[0].upper()}{text[1:]}." if text[0].isascii() and not text.startswith(("kv@", "/")) else f"{text}."


def _verifier(rule: Rule) -> str:
    kind, _, name = rule.verified_by.partition(": ")
    return f"`{kind}`" + (f": `{name}`" if name else "")


def _index() -> Iterator[str]:
    page_of = {chapter: page for page, chapters in PAGES.items() for chapter in chapters}
    yield "| id | rule | page |"
    yield "| --- | --- | --- |"
    for rule in SPECIFICATION:
        page = page_of[rule.chapter]
        yield f"| {rule.id} | {_sentence(rule.holds)} | [{rule.chapter}]({page}#{rule.chapter}) |"


def _field_table(event: str) -> Iterator[str]:
    yield "| field | place in arrays | SGLang | vLLM | meaning |"
    yield "| --- | --- | --- | --- | --- |"
    for place, (name, facts) in enumerate(FIELD_FACTS[event].items(), start=1):
        yield f"| `{name}` | {place} | {facts.sglang or 'no'} | {facts.vllm or 'no'} | {facts.meaning} |"


def _golden(file: str, name: str) -> Iterator[str]:
    vector = _VECTORS[file]()[name]
    if isinstance(vector, BatchVector | PeerVector | ForwardPassVector):
        yield from _columns(vector.parts)
    elif isinstance(vector, FrameVector):
        yield from _columns((f"[{frame}]", meaning) for frame, meaning in vector.frames)
    elif isinstance(vector, PageHashVector):
        yield f"tokens {list(vector.token_ids)}, page size {vector.page_size}, digest before: {vector.prior or 'none'}"
        yield f"hashes {list(vector.block_hashes)}"
    elif isinstance(vector, NamespacedHashVector):
        yield f"extra key {vector.extra_key!r}, salt {vector.cache_salt!r}, plain hash {vector.block_hash}"
        yield f"seed {vector.seed}"
        yield f"hash {vector.namespaced_hash}"
    else:
        yield f"epoch {vector.epoch}, first number {vector.first_sequence}"
        yield f"digest {vector.chains[0]}"
        for payload, chain in zip(vector.payloads, vector.chains[1:], strict=True):
            yield f"digest {chain} after payload {payload or '(empty)'}"


def _columns(parts: Iterable[tuple[str, str]]) -> Iterator[str]:
    parts = tuple(parts)
    width = min(36, max(len(part) for part, _ in parts))
    for part, meaning in parts:
        yield f"{part:<{width}}  {meaning}"


def main() -> None:
    for page in SPEC.glob("*.md"):
        page.write_text(write(page.read_text()))


if __name__ == "__main__":
    main()
