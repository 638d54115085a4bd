"""Test that a ``get_...()`` is ambient by its reads or by the uses of its result, not by its name."""

from __future__ import annotations

from collections.abc import Callable
from textwrap import dedent

import pytest

Lint = Callable[..., list[tuple[int, str]]]

# Each line with a problem ends with "# found".
AMBIENT = {
    "an attribute": "rank = get_parallel().tp_rank  # found",
    "an item": "port = get_server_args()['port']  # found",
    "a call": "now = get_clock()()  # found",
    "a test": "def f():\n    if get_parallel(): ...  # found",
    "a negation": "quiet = not get_parallel()  # found",
    "a fallback": "args = get_server_args() or {}  # found",
    "a comparison": "def f():\n    return 1 if get_parallel() == 4 else 2  # found",
    "by a name": "def f():\n    args = get_server_args()  # found\n    return args.port",
    "by a name that is tested": "def f():\n    if (size := get_parallel()) > 1:  # found\n        return size",
    "by the module's name": "args = get_server_args()  # found\ndef f(): return args.port",
    "by a field": """
        class A:
            def __init__(self):
                self.parallel = get_parallel()  # found
            def f(self): return self.parallel.tp_rank
        """,
    "awaited": "async def f(): return (await get_server_args()).port  # found",
    "by its name": "def f(): record(get_global_recorder())  # found",
    "a single use": "def f(): check(get_parallel())  # found\ndef g(): return get_parallel().tp_rank  # found",
    "a module's": "class A:\n    def f(self): return runtime_context.get_parallel().tp_rank  # found",
    "a match": "def f():\n    match get_parallel():  # found\n        case _: ...",
}
SOUND = {
    "a text that is logged": """
        def run(logger):
            try:
                serve()
            except Exception:
                traceback = get_exception_traceback()
                logger.error(f"the scheduler raised: {traceback}")
                logger.error("the scheduler raised: %s", get_exception_traceback())
                report("raised:\\n" + get_exception_traceback(), get_exception_traceback().splitlines()[-1])
                if "out of memory" in get_exception_traceback():
                    report(traceback[:200])
        """,
    "a value that is passed on": "def main(): run(get_banner(), text=get_banner())",
    "a value that is kept": "class A:\n    def __init__(self): self.banner = get_banner()",
    "a call with arguments": "rank = get_parallel(config).tp_rank",
    "the standard library's": "def f(): return threading.get_native_id() > 1",
    "this file's own factory": "def get_parser(): return Parser()\ndef main(): get_parser().parse()",
    "a parameter of that name": "def f(get_parallel): return get_parallel().tp_rank",
    "a local of that name": "def f(x):\n    get_parallel = x.parallel\n    return get_parallel().tp_rank",
    "a method": "class A:\n    def f(self): return self.get_parallel().tp_rank",
    "another's name of that kind": "def f():\n    banner = get_banner()\ndef g(banner): return banner.width",
}


@pytest.mark.parametrize("code", AMBIENT.values(), ids=AMBIENT)
def test_a_getter_whose_result_is_used_is_ambient(lint: Lint, head: str, code: str) -> None:
    source = head + dedent(code)
    marked = [number for number, line in enumerate(source.splitlines(), 1) if line.endswith("# found")]
    assert marked
    assert lint(source) == [(line, "SCH007") for line in marked]


@pytest.mark.parametrize("code", SOUND.values(), ids=SOUND)
def test_a_getter_whose_result_is_only_passed_on_is_not_ambient(lint: Lint, head: str, code: str) -> None:
    assert lint(head + dedent(code)) == []
