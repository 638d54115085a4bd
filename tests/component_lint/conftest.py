"""What the code of the examples stands below."""

from __future__ import annotations

from textwrap import dedent

import pytest


@pytest.fixture
def head() -> str:
    """The imports of every example."""
    return dedent(
        """
        import os, re, socket, subprocess, threading, zmq
        from abc import ABC
        from collections.abc import Callable, Sequence
        from dataclasses import KW_ONLY, dataclass, field
        from typing import Any, ClassVar, Protocol
        import attrs, msgspec, runtime_context
        from engine.globals import get_parallel, get_server_args
        """
    )
