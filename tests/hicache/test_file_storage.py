"""FilePageStore: whole pages after a crash, a size limit, and several processes in one directory."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from kit.searches import num_examples

from scheduler_components import ConfigError, StartError
from scheduler_components.errors import StorageError
from scheduler_components.hicache import CheckedPageStore, FilePageStore, open_file_page_store
from scheduler_components.hicache.storage import FRAME_BYTES
from scheduler_components.testing.interfaces import PAGE_BYTES, page_of

MANY = 1 << 30
WRITER = """
import os, signal, sys
from scheduler_components.hicache import file_storage
from scheduler_components.hicache.storage import CheckedPageStore
from scheduler_components.testing.interfaces import PAGE_BYTES, page_of

directory, where = sys.argv[1:]
store = CheckedPageStore(
    store=file_storage.open_file_page_store(directory, capacity_bytes=1 << 30), page_bytes=PAGE_BYTES
)
store.batch_set(["before"], [page_of("before")])
if where != "anywhere":
    places = {"open": (file_storage.Path, "open"), "fsync": (os, "fsync"), "rename": (file_storage.Path, "replace")}
    module, name = places[where]
    original = getattr(module, name)

    def die(*arguments):
        if where != "fsync":
            original(*arguments)  # the page is in its place, the count of used bytes does not include it
        os.kill(os.getpid(), signal.SIGKILL)

    setattr(module, name, die)
print("ready", flush=True)
for batch in range(1_000_000):
    keys = [f"{batch}-{at}" for at in range(8)]
    store.batch_set(keys, [page_of(key) for key in keys])
    print(batch, flush=True)
"""


def checked(store: FilePageStore) -> CheckedPageStore:
    return CheckedPageStore(store=store, page_bytes=PAGE_BYTES)


def pages_on_disk(folder: Path) -> list[Path]:
    return sorted((folder / "pages").glob("*/*"))


@pytest.mark.processes
@pytest.mark.parametrize("where", ["anywhere", "open", "fsync", "rename"])
def test_a_killed_writer_leaves_whole_pages_only(tmp_path: Path, where: str) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", WRITER, str(tmp_path), where], stdout=subprocess.PIPE, text=True
    ) as writer:
        assert writer.stdout is not None
        for line in writer.stdout:
            if line == "20\n":
                writer.kill()
    assert writer.returncode == -signal.SIGKILL
    assert any((tmp_path / "unfinished").iterdir())
    bare = open_file_page_store(tmp_path, capacity_bytes=MANY)
    store = checked(bare)
    keys = ["before", *(f"{batch}-{at}" for batch in range(40) for at in range(8))]
    held = [key for key in keys if store.batch_exists([key])]
    assert [bytes(page) for page in store.batch_get(held) if page is not None] == [page_of(key) for key in held]
    assert "before" in held
    assert len(held) >= (169 if where == "anywhere" else 1)
    assert store.stats().pages_corrupt == 0
    assert bare.used_bytes == sum(path.stat().st_size for path in pages_on_disk(tmp_path))
    assert len(list((tmp_path / "unfinished").iterdir())) == 1  # this store's own
    store.close()
    assert not any((tmp_path / "unfinished").iterdir())


@pytest.mark.parametrize("damage", ["cut", "empty", "changed", "longer", "swapped"])
def test_a_damaged_page_is_a_miss_and_can_be_stored_again(tmp_path: Path, damage: str) -> None:
    store = checked(open_file_page_store(tmp_path, capacity_bytes=MANY))
    store.batch_set(["a"], [page_of("a")])
    [path] = pages_on_disk(tmp_path)
    store.batch_set(["b"], [page_of("b")])
    [other] = set(pages_on_disk(tmp_path)) - {path}
    whole = path.read_bytes()
    path.write_bytes(
        {
            "cut": whole[:-1],
            "empty": b"",
            "changed": whole[:-1] + bytes([whole[-1] ^ 1]),
            "longer": whole + b"x",
            "swapped": other.read_bytes(),
        }[damage]
    )
    assert store.batch_exists(["a"]) == 1
    assert store.batch_get(["a", "b"]) == [None, page_of("b")]
    assert store.stats().pages_corrupt == 1
    assert store.batch_exists(["a"]) == 0
    assert store.batch_set(["a"], [page_of("a")]) == [True]
    assert store.batch_get(["a"]) == [page_of("a")]
    store.close()


def test_the_least_recently_used_page_is_evicted_first_also_after_a_restart(tmp_path: Path) -> None:
    clock = count(1)
    room_for_three = 3 * PAGE_BYTES * 16 // 15 + 16

    def open_store() -> FilePageStore:
        return open_file_page_store(tmp_path, capacity_bytes=room_for_three, clock_ns=lambda: next(clock))

    store = open_store()
    for key in ("a", "b", "c"):
        assert store.batch_set([key], [page_of(key)]) == [True]
    store.batch_get(["a"])
    store.close()
    store = open_store()
    assert store.batch_set(["d"], [page_of("d")]) == [True]
    assert [store.batch_exists([key]) for key in ("a", "b", "c", "d")] == [1, 0, 1, 1]
    store.batch_set(["c"], [page_of("c")])  # already stored, counts as a use
    assert store.batch_set(["e"], [page_of("e")]) == [True]
    assert [store.batch_exists([key]) for key in ("a", "c", "d", "e")] == [0, 1, 1, 1]
    store.close()


def test_two_stores_of_one_directory_share_pages_and_one_limit(tmp_path: Path) -> None:
    capacity = 40 * PAGE_BYTES
    stores = [open_file_page_store(tmp_path, capacity_bytes=capacity) for _ in range(2)]
    for at in range(100):
        key = f"page {at}"
        assert stores[at % 2].batch_set([key], [page_of(key)]) == [True]
        assert stores[1 - at % 2].batch_get([key]) == [page_of(key)]
        on_disk = sum(path.stat().st_size for path in pages_on_disk(tmp_path))
        assert on_disk == stores[0].used_bytes == stores[1].used_bytes <= capacity
    for store in stores:
        store.close()


def test_files_of_dead_writers_are_removed_next_to_running_writers(tmp_path: Path) -> None:
    living = [open_file_page_store(tmp_path, capacity_bytes=MANY) for _ in range(4)]
    theirs = set((tmp_path / "unfinished").iterdir())
    for number in range(8):
        dead = tmp_path / "unfinished" / f"{number}{'0' * 31}"
        dead.mkdir()
        (dead / "writer").touch()
    (tmp_path / "unfinished" / "no folder").touch()
    new = open_file_page_store(tmp_path, capacity_bytes=MANY)
    left = {path for path in (tmp_path / "unfinished").iterdir() if path.is_dir()}
    assert (left > theirs, len(left)) == (True, 5)
    for store in (*living, new):
        store.close()
    assert [path.name for path in (tmp_path / "unfinished").iterdir()] == ["no folder"]


def test_pages_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    store = open_file_page_store(tmp_path, capacity_bytes=PAGE_BYTES * 2)
    assert store.batch_set(["large"], [bytes(PAGE_BYTES * 3)]) == [False]
    keys = ["a", "b", "c"]
    assert store.batch_set(keys, [page_of(key) for key in keys]) == [True, True, False]
    assert store.used_bytes == 2 * PAGE_BYTES
    store.close()


def test_an_eviction_frees_a_sixteenth_more_than_needed(tmp_path: Path) -> None:
    store = open_file_page_store(tmp_path, capacity_bytes=PAGE_BYTES * 32)
    keys = [str(number) for number in range(31)]
    store.batch_set(keys, [page_of(key) for key in keys])
    assert store.batch_set(["fits"], [page_of("fits")]) == [True]
    assert store.used_bytes == 32 * PAGE_BYTES
    more = ["x", "y"]
    assert store.batch_set(more, [page_of(key) for key in more]) == [True, True]
    assert store.used_bytes == 30 * PAGE_BYTES
    store.close()


def test_fewer_pages_than_keys_raise(tmp_path: Path) -> None:
    store = open_file_page_store(tmp_path, capacity_bytes=MANY)
    with pytest.raises(ValueError, match="shorter"):
        store.batch_set(["a", "b"], [page_of("a")])
    store.close()


def test_only_the_owner_may_read_the_pages(tmp_path: Path) -> None:
    store = open_file_page_store(tmp_path / "cache", capacity_bytes=MANY)
    store.batch_set(["a"], [page_of("a")])
    for path in (tmp_path / "cache" / "pages", *(tmp_path / "cache" / "pages").iterdir()):
        assert path.stat().st_mode & 0o077 == 0
    store.close()


@pytest.mark.processes
def test_a_forked_child_cannot_change_its_parents_store(tmp_path: Path) -> None:
    script = """
import os, sys
from scheduler_components.errors import StorageError
from scheduler_components.hicache import open_file_page_store

store = open_file_page_store(sys.argv[1], capacity_bytes=1 << 30)
child = os.fork()
if child == 0:
    refused = 0
    for change in (lambda: store.batch_set(["a"], [b"child"]), lambda: store.delete(["a"])):
        try:
            change()
        except StorageError:
            refused += 1
    store.close()
    os._exit(refused)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 2
print(store.batch_set(["a"], [b"parent"]), store.batch_get(["a"]))
"""
    command = [sys.executable, "-c", script, str(tmp_path)]
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=60)
    assert done.stdout == "[True] [b'parent']\n"


def test_a_frame_adds_its_stated_size(tmp_path: Path) -> None:
    bare = open_file_page_store(tmp_path, capacity_bytes=MANY)
    checked(bare).batch_set(["a"], [page_of("a")])
    assert bare.used_bytes == PAGE_BYTES + FRAME_BYTES
    bare.close()


def test_a_failing_directory_raises_a_storage_error(tmp_path: Path) -> None:
    store = open_file_page_store(tmp_path, capacity_bytes=MANY)
    (tmp_path / "pages").rename(tmp_path / "gone")
    (tmp_path / "pages").write_text("a file where the pages were")
    with pytest.raises(StorageError, match=r"^file batch_set: .Errno"):
        store.batch_set(["a"], [page_of("a")])
    assert checked(store).batch_get(["a"]) == [None]
    store.close()


@pytest.mark.parametrize("is_empty", [True, False])
def test_a_directory_that_was_removed_is_used_again_when_it_returns(tmp_path: Path, is_empty: bool) -> None:
    root, away = tmp_path / "store", tmp_path / "away"
    store = open_file_page_store(root, capacity_bytes=MANY)
    store.batch_set(["a"], [page_of("a")])
    root.rename(away)
    for _ in range(2):
        with pytest.raises(StorageError, match="the directory was removed"):
            store.batch_set(["b"], [page_of("b")])
        with pytest.raises(StorageError, match="the directory was removed"):
            store.batch_exists(["a"])
    if is_empty:
        root.mkdir()
    else:
        copied = shutil.copytree(away, root)  # other files of the same names, as after a mount
        assert (copied / "ledger").stat().st_ino != (away / "ledger").stat().st_ino
    assert store.batch_exists(["a"]) == (0 if is_empty else 1)
    assert store.batch_set(["b"], [page_of("b")]) == [True]
    assert store.batch_get(["b"]) == [page_of("b")]
    assert store.used_bytes == len(page_of("b")) * (1 if is_empty else 2)
    store.close()
    assert list((root / "unfinished").iterdir()) == []
    assert store.batch_exists(["b"]) == 1, "a closed store is not opened again"


def test_invalid_arguments_of_open_raise(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="capacity_bytes=0"):
        open_file_page_store(tmp_path, capacity_bytes=0)
    (tmp_path / "file").write_text("in the way")
    place = tmp_path / "file"
    with pytest.raises(StartError) as caught:
        open_file_page_store(place, capacity_bytes=1)
    assert str(caught.value) == f"{place}: [Errno 20] Not a directory: '{place}/pages'; " + (
        "give a directory that this account may write to"
    )


@pytest.mark.parametrize("num_pages", [1, 3, 40])
def test_pages_are_renamed_only_after_the_whole_batch_is_on_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_pages: int
) -> None:
    """A loss of power therefore loses only whole pages."""
    store = open_file_page_store(tmp_path, capacity_bytes=MANY)
    synchronised: dict[int, int] = {}
    named: list[int] = []
    fsync, replace = os.fsync, Path.replace

    def note_fsync(descriptor: int) -> None:
        fsync(descriptor)
        status = os.fstat(descriptor)
        synchronised[status.st_ino] = status.st_size

    def note_name(source: Path, target: Path) -> Path:
        status = source.stat()
        assert synchronised[status.st_ino] == status.st_size == PAGE_BYTES
        assert len(synchronised) == num_pages, "a page of this batch may still be lost"
        named.append(status.st_ino)
        return replace(source, target)

    monkeypatch.setattr(os, "fsync", note_fsync)
    monkeypatch.setattr(Path, "replace", note_name)
    keys = [str(at) for at in range(num_pages)]
    assert store.batch_set(keys, [page_of(key) for key in keys]) == [True] * num_pages
    assert sorted(named) == sorted(synchronised)
    store.close()


def test_a_failed_write_of_one_page_stores_no_page_of_its_batch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_file_page_store(tmp_path, capacity_bytes=MANY)
    calls, fsync = count(), os.fsync

    def fail_once(descriptor: int) -> None:
        if next(calls) == 20:
            raise OSError(5, "the disk is broken")
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", fail_once)
    keys = [str(at) for at in range(40)]
    with pytest.raises(StorageError, match="the disk is broken"):
        store.batch_set(keys, [page_of(key) for key in keys])
    assert store.batch_exists(keys[:1]) == 0
    assert store.used_bytes == 0
    assert [path.name for path in (tmp_path / "unfinished").glob("*/*")] == ["writer"]
    assert store.batch_set(keys, [page_of(key) for key in keys]) == [True] * 40
    store.close()


def fill_directory(path: Path) -> None:
    path.mkdir()
    (path / "inside").write_text("x")


OBSTACLES: dict[str, Callable[[Path], object]] = {
    "file": lambda path: path.write_text("foreign"),
    "directory": Path.mkdir,
    "full directory": fill_directory,
    "dangling link": lambda path: path.symlink_to("nowhere"),
    "link to a directory": lambda path: path.symlink_to("/"),
    "pipe": os.mkfifo,
}
PLACES = st.sampled_from(["page", "folder", "foreign", "unfinished"])


@pytest.mark.soak
@settings(deadline=None, max_examples=num_examples(1))
@given(obstacles=st.lists(st.tuples(st.sampled_from(sorted(OBSTACLES)), PLACES, st.integers(0, 11)), max_size=6))
@example(obstacles=[("directory", "page", 0)])
@example(obstacles=[("file", "foreign", 0)])
@example(obstacles=[("full directory", "page", 0), ("directory", "unfinished", 0)])
def test_a_foreign_file_costs_only_the_page_in_its_place(obstacles: list[tuple[str, str, int]]) -> None:
    """Regression: a directory in the place of a page stopped every eviction."""
    keys = [f"key {at}" for at in range(12)]
    with TemporaryDirectory() as folder:
        root = Path(folder)
        open_file_page_store(root, capacity_bytes=MANY).close()
        layout = open_file_page_store(root / "elsewhere", capacity_bytes=MANY)
        layout.batch_set(keys, [page_of(key) for key in keys])
        # A key's path does not depend on the directory; pages are written in the order of their keys.
        by_use = sorted((path.stat().st_mtime_ns, path) for path in pages_on_disk(root / "elsewhere"))
        paths = [root / "pages" / path.parent.name / path.name for _, path in by_use]
        layout.close()
        blocked, placed = set[int](), list[Path]()
        for kind, place, at in obstacles:
            where = {
                "page": paths[at],
                "folder": paths[at].parent,
                "foreign": paths[at].with_name(f"foreign {at}"),
                "unfinished": root / "unfinished" / f"stray {at}",
            }[place]
            if kind == "file" and place == "page":
                continue  # a file there is a page
            if os.path.lexists(where) or (os.path.lexists(where.parent) and not where.parent.is_dir()):
                continue
            if place == "folder" and kind in ("directory", "full directory", "link to a directory"):
                continue
            where.parent.mkdir(exist_ok=True)
            OBSTACLES[kind](where)
            placed.append(where)
            if place in ("page", "folder"):
                blocked |= {other for other, path in enumerate(paths) if where in (path, path.parent)}
        placed = [path for path in placed if path.parent.name != "unfinished"]
        store = open_file_page_store(root, capacity_bytes=4 * PAGE_BYTES)
        for at, key in enumerate(keys):
            assert store.batch_set([key], [page_of(key)]) == [at not in blocked]
            assert store.batch_get([key]) == [None if at in blocked else page_of(key)]
            assert store.batch_exists([key]) == (at not in blocked)
            assert store.used_bytes <= 4 * PAGE_BYTES
        assert store.delete([keys[at] for at in blocked]) == 0
        assert store.clear() > 0 or len(blocked) == 12
        assert all(os.path.lexists(path) for path in placed), "a foreign file was removed"
        store.close()


def test_used_bytes_include_deletions_and_clears(tmp_path: Path) -> None:
    store = open_file_page_store(tmp_path, capacity_bytes=MANY)
    keys = ["a", "b", "c", "d"]
    store.batch_set(keys, [page_of(key) for key in keys])
    assert store.delete(["a", "absent"]) == 1
    assert store.used_bytes == 3 * PAGE_BYTES
    assert store.clear() == 3
    assert (store.used_bytes, store.batch_exists(["b"])) == (0, 0)
    assert store.batch_set(["b"], [page_of("b")]) == [True]
    assert store.used_bytes == PAGE_BYTES
    assert store.delete(["b"]) == 1
    assert store.used_bytes == 0
    store.close()


def test_stores_of_one_directory_open_and_close_at_the_same_time(tmp_path: Path) -> None:
    """Regression: opening failed while another store closed and removed its directory of unfinished pages."""

    def open_and_close(name: int) -> None:
        for at in range(40):
            store = open_file_page_store(tmp_path, capacity_bytes=MANY)
            assert store.batch_set([f"{name} {at}"], [b"page"]) == [True]
            store.close()

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(open_and_close, range(4)))
    assert not any((tmp_path / "unfinished").iterdir())
