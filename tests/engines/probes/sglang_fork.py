"""Start servers of SGLang quickly: import it once, then fork a process per server.

Each line of standard input is a JSON object: ``args`` of `sglang.launch_server`, ``env``, ``path`` (folders to import
from) and ``log`` (a file). The answer is the process id of the server, which leads a session of its own. The processes
that SGLang starts are forked as well.
"""

import ctypes
import importlib
import json
import multiprocessing
import os
import runpy
import signal
import sys

PRELOADED = (
    "sglang.srt.entrypoints.http_server",
    "sglang.srt.managers.scheduler",
    "sglang.srt.managers.detokenizer_manager",
    "sglang.srt.model_executor.model_runner",
    "sglang.srt.models.registry",
    "sglang.srt.models.llama",
    "sglang.srt.mem_cache.rust_tree_core.adapter",
)


PR_SET_PDEATHSIG = 1


def serve(order):
    os.setsid()
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    log = os.open(order["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.environ.update(order["env"])
    sys.path[:0] = order["path"]
    sys.argv = ["sglang.launch_server", *order["args"]]
    runpy.run_module("sglang.launch_server", run_name="__main__")


def answer(text):
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def main():
    for module in PRELOADED:
        importlib.import_module(module)
    multiprocessing.set_start_method("fork", force=True)
    multiprocessing.set_start_method = lambda *_, **__: None  # SGLang asks for spawn
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the system collects the servers that end
    answer("ready")
    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            serve(json.loads(line))
            os._exit(0)
        answer(str(child))


if __name__ == "__main__":
    main()
