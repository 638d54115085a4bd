"""The commands that run the reference engine, ``serve`` and ``demo``, and their common options."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from inspect import signature
from pathlib import Path
from typing import Annotated, ClassVar, Literal, TypeAlias, TypeVar

import attrs
from cyclopts import Group, Parameter
from cyclopts.validators import Number

from scheduler_components import ConfigError
from scheduler_components._internal.extras import require_modules
from scheduler_components.hicache import HiCachePolicy, LoadBackMode, PrefetchPolicy, WritePolicy
from scheduler_components.kv_events import EventPublisherFactory
from scheduler_components.scheduling.admission_budget import BatchMode
from scheduler_components.scheduling.preemption_policy import PREEMPTION_POLICY_NAMES
from scheduler_components.scheduling.scheduling_policy import POLICY_NAMES
from scheduler_components.values.page_shape import HostLayout
from scheduler_components.waiting.lora_queue import LoraLimits
from scheduler_engine.cli.run_reporter import ConsoleReporter, JsonReporter, RunReporter
from scheduler_engine.cli.server_options import ServerOptions
from scheduler_engine.cli.session import SessionConfig, run_session
from scheduler_engine.cli.sigterm import cancel_on_sigterm
from scheduler_engine.device.model_spec import ModelDtype, ModelSpec, TokenSpec
from scheduler_engine.device.workload import WorkloadConfig
from scheduler_engine.engine.config import (
    DEFAULT_HOST,
    MOONCAKE_MASTER,
    MOONCAKE_METADATA,
    AdapterSpec,
    DecisionLogMode,
    DpAttentionConfig,
    EngineConfig,
    GrammarConfig,
    HiCacheConfig,
    IntegrityConfig,
    LoraConfig,
    SchedulerConfig,
    StorageChecksum,
    StorageKind,
    TelemetryConfig,
)
from scheduler_engine.engine.free_ports import default_kv_events
from scheduler_engine.engine.log_output import LogConfig

T = TypeVar("T")

_HOST_TO_DEVICE = 4  # default size of the host tier, relative to the device
_DEFAULT_WORKLOAD = WorkloadConfig()

Port = Annotated[
    int, Parameter(validator=Number(gte=0, lte=65535), help="Port of the HTTP server; 0 lets the system choose.")
]
AsJson = Annotated[
    bool, Parameter(name="--json", show_default=False, help="One JSON object per line, each with a kind.")
]
Logs = Annotated[LogConfig, Parameter(parse=False)]  # from the options that all commands have
GrammarBackendName: TypeAlias = Literal["llguidance", "none"]
RunningRequests = Annotated[int, Parameter(help="Request slots of each replica.")]


# One process uses all cores. On a CPU a small model computes a chunk of 512 tokens in seconds, while all other requests
# wait. 16,384 tokens of KV are 0.75 GB for a model of 135 million parameters in float32.
_MODEL_SIZES = {"dp_size": 1, "attn_cp_size": 1, "attn_tp_size": 1, "kv_tokens": 16_384, "chunk_tokens": 512}
_SIMULATED_SIZES = {"dp_size": 2, "attn_cp_size": 2, "attn_tp_size": 2, "kv_tokens": 262_144, "chunk_tokens": 2048}


@Parameter(name="*", group=Group("Engine", sort_key=2))
@attrs.frozen(kw_only=True)
class EngineOptions:
    """The options of ``serve``, one field per option. ``sizes`` resolves the options that are None."""

    simulated_sizes: ClassVar[Mapping[str, int]] = _SIMULATED_SIZES
    model_sizes: ClassVar[Mapping[str, int]] = _MODEL_SIZES

    host: Annotated[str, Parameter(help="Address of the HTTP server.")] = DEFAULT_HOST
    port: Port = 30_000
    dp_size: Annotated[
        int | None,
        Parameter(
            help="Data-parallel replicas: independent KV caches, one event stream each. Default: 2; with --model 1."
        ),
    ] = None
    attn_cp_size: Annotated[
        int | None,
        Parameter(help="Ranks per replica along attention context parallelism. Default: 2; with --model 1."),
    ] = None
    attn_tp_size: Annotated[
        int | None, Parameter(help="Ranks per replica along attention tensor parallelism. Default: 2; with --model 1.")
    ] = None
    pp_size: Annotated[int, Parameter(help="Pipeline stages.")] = 1
    moe_dp_size: Annotated[
        int, Parameter(help="Data-parallel copies of the experts, over all ranks of a stage; only described.")
    ] = 1
    dp_attention: Annotated[
        bool,
        Parameter(show_default=False, help="Replicas share the layers behind attention and step in lockstep."),
    ] = False
    prefill_delay_steps: Annotated[
        int, Parameter(help="With --dp-attention: longest wait of the replicas' prefills for each other, in steps.")
    ] = 0
    prefill_delay_low_usage: Annotated[
        float, Parameter(help="Below this usage of its KV tokens, 0 to 1, a replica's prefills do not wait.")
    ] = 0.0
    page_size: Annotated[int, Parameter(help="Tokens per KV page, and per block of the events.")] = 16
    kv_tokens: Annotated[
        int | None,
        Parameter(help="Capacity of each replica's KV pool, in tokens. Default: by command and device."),
    ] = None
    max_running_requests: RunningRequests = 64
    chunk_tokens: Annotated[
        int | None,
        Parameter(help="Most tokens of one request that a step prefills. Default: by command; with --model 512."),
    ] = None
    schedule_policy: Annotated[
        str, Parameter(help=f"Which waiting request is next: {', '.join(POLICY_NAMES)}, or module:name of your own.")
    ] = "fcfs"
    preemption_policy: Annotated[
        str,
        Parameter(help=f"Which running request gives up its pages: {', '.join(PREEMPTION_POLICY_NAMES)}."),
    ] = "latest-arrival"
    batch_mode: Annotated[
        BatchMode, Parameter(help="Batches of decodes and prefills, or of one kind with prefills first.")
    ] = "mixed"
    queue_timeout: Annotated[
        float | None,
        Parameter(help="Seconds in which a request must be admitted, unless its client sets queue_timeout."),
    ] = None
    request_timeout: Annotated[
        float | None, Parameter(help="Seconds in which a request must be complete, unless its client sets timeout.")
    ] = None
    recv_interval: Annotated[int, Parameter(help="Decode steps that share one receive of input.")] = 1
    kv_events_config: Annotated[
        str | None,
        Parameter(help="Configuration of the event publisher, as JSON. Default: loopback, free ports, with replay."),
    ] = None
    affinity_tokens: Annotated[
        int,
        Parameter(help="A conversation stays on its replica up to this many tokens of extra load; 0: by load alone."),
    ] = 8192
    kv_pool: Annotated[
        bool,
        Parameter(
            show_default=False,
            help="Serve /kv_pool: the block hashes of each pool, for conformance --oracle. "
            "Off by default, because a hash reveals to a reader who guesses a prompt whether it was sent.",
        ),
    ] = False
    profile_directory: Annotated[
        str,
        Parameter(show_default=False, help="Directory of profiles. Without it /start_profile is refused."),
    ] = ""
    decision_log: Annotated[
        DecisionLogMode,
        Parameter(help="What to do when the ranks of a replica decide differently. dump and stop also write files."),
    ] = "stop"
    decision_dump_directory: Annotated[
        str,
        Parameter(show_default=False, help="Where each rank writes its recent decisions when the ranks have diverged."),
    ] = ""
    forward_pass_endpoint: Annotated[
        str,
        Parameter(
            show_default=False,
            help="Send the metrics of each forward pass here, for planners. "
            "Replica r binds tcp://HOST:PORT at PORT + r, or ipc://PATH.r.",
        ),
    ] = ""
    forward_pass_worker_id: Annotated[
        str, Parameter(show_default=False, help="Name of this engine in these metrics; Dynamo's id of the worker.")
    ] = ""
    otlp_traces_endpoint: Annotated[
        str,
        Parameter(
            show_default=False,
            help="Export a span of each request to this collector, as OTLP over HTTP: http://127.0.0.1:4318/v1/traces.",
        ),
    ] = ""
    speed: Annotated[float, Parameter(help="Divides the time of workload, trace and device.")] = 1.0
    seed: Annotated[int, Parameter(help="Seed of the generated workload and of the output tokens.")] = 0

    def sizes(self, *, of_a_model: bool) -> dict[str, int]:
        """Return the given sizes, and for the others this command's defaults for a model or a simulated device."""
        defaults = self.model_sizes if of_a_model else self.simulated_sizes
        return {name: size if (given := getattr(self, name)) is None else given for name, size in defaults.items()}


@Parameter(name="*", group=Group("Engine", sort_key=2))
@attrs.frozen(kw_only=True)
class DemoOptions(EngineOptions):
    """The options of ``demo``. By default the pool is so small that the generated chats evict each other's pages."""

    simulated_sizes: ClassVar[Mapping[str, int]] = _SIMULATED_SIZES | {"kv_tokens": 6144, "chunk_tokens": 512}
    model_sizes: ClassVar[Mapping[str, int]] = _MODEL_SIZES | {"kv_tokens": 2048}

    port: Port = 0
    max_running_requests: RunningRequests = 32


@Parameter(name="*", group=Group("Model", sort_key=4))
@attrs.frozen(kw_only=True)
class ModelOptions:
    """The options of a real model, one field per option."""

    model: Annotated[
        Path | None,
        Parameter(help="Serve this model: a folder with config.json and *.safetensors, or a .gguf file."),
    ] = None
    dtype: Annotated[ModelDtype, Parameter(help="Type of weights, keys and values.")] = "float32"
    device: Annotated[str, Parameter(help="Device: cpu, cuda or cuda:N.")] = "cpu"
    allow_untested_model: Annotated[
        bool,
        Parameter(show_default=False, help="Serve a model of a type that was never compared with its own attention."),
    ] = False
    grammar_backend: Annotated[
        GrammarBackendName | None,
        Parameter(
            show_default=False,
            help="What compiles JSON schemas and regular expressions. Default: llguidance if it is installed.",
        ),
    ] = None

    enable_lora: Annotated[
        bool, Parameter(show_default=False, help="Serve LoRA adapters, also without --lora-paths.")
    ] = False
    lora_paths: Annotated[
        tuple[str, ...],
        Parameter(show_default=False, negative="", help="An adapter as NAME=PATH; give the option once per adapter."),
    ] = ()
    max_loaded_loras: Annotated[int, Parameter(help="LoRA adapters that are loaded at the same time.")] = (
        LoraLimits().max_loaded
    )

    def spec(self) -> ModelSpec | None:
        """Inspect the model; None without ``--model``.

        Raises:
            ConfigError: the model cannot be served, or an option needs ``--model``.
            MissingExtraError: a library of an extra is not installed.
        """
        if self.model is None:
            for name in ("dtype", "device", "allow_untested_model", "grammar_backend"):
                if (value := getattr(self, name)) != getattr(_SIMULATED, name):
                    raise ConfigError(name, value, "has no effect by itself", "add --model")
            return None
        require_modules("torch", "transformers", "gguf", "accelerate", otherwise="leave --model out")
        # Other commands, and an engine without a model, must start without torch.
        from scheduler_engine.device.file_model_digest import DigestMemory
        from scheduler_engine.device.torch_model import inspect_model

        return inspect_model(
            self.model,
            dtype=self.dtype,
            device=self.device,
            digests=DigestMemory(_cache_directory() / "model-digests.json"),
            allow_untested=self.allow_untested_model,
        )

    def lora(self) -> LoraConfig | None:
        """Return the adapters; None if the engine serves none.

        Raises:
            ConfigError: an adapter has no name or no path, or two have one name, or a limit is given without adapters.
        """
        if not (self.lora_paths or self.enable_lora):  # noqa: SCH009 - here it is composed
            if self.max_loaded_loras != LoraLimits().max_loaded:
                hint = "add --lora-paths or --enable-lora"
                raise ConfigError("max_loaded_loras", self.max_loaded_loras, "has no effect by itself", hint)
            return None
        pairs = [text.partition("=") for text in self.lora_paths]
        adapters = tuple(AdapterSpec(name=name, path=path) for name, _, path in pairs)
        return LoraConfig(limits=LoraLimits(max_loaded=self.max_loaded_loras), adapters=adapters)

    def grammar(self, spec: ModelSpec | None) -> GrammarConfig | None:
        """Return the limits of grammars; None if this engine compiles none.

        Raises:
            MissingExtraError: the backend was asked for and is not installed.
        """
        if spec is None or not spec.tokens.eos_token_ids or self.grammar_backend == "none":
            return None
        if self.grammar_backend is None and find_spec("llguidance") is None:
            return None
        require_modules("llguidance", otherwise="leave --grammar-backend out")
        return GrammarConfig()


def _cache_directory() -> Path:
    """Return the user's directory for files that can be made again, by the XDG base directory specification."""
    base = os.environ.get("XDG_CACHE_HOME")  # noqa: SCH007 - the command line reads the environment
    return (Path(base) if base else Path.home() / ".cache") / "scheduler-components"


def _with_same_names(kind: Callable[..., T], given: Mapping[str, object], **others: object) -> T:
    """Make a configuration of the options that have the names of its fields, and of ``others``."""
    names = signature(kind).parameters.keys() - others.keys()
    return kind(**{name: given[name] for name in names & given.keys()}, **others)


_POLICY = HiCachePolicy()


@Parameter(name="*", group=Group("Hierarchical cache", sort_key=3))
@attrs.frozen(kw_only=True)
class HiCacheOptions:
    """The options of the hierarchical cache, one field per option."""

    hicache: Annotated[bool, Parameter(show_default=False, help="Keep evicted pages on the host.")] = False
    hicache_host_tokens: Annotated[
        int | None,
        Parameter(validator=Number(gte=1), help="Size of the host tier. Default: four times --kv-tokens."),
    ] = None
    hicache_host_layout: Annotated[
        HostLayout, Parameter(help="Memory layout of the host tier: contiguous pages, for storage, or layers.")
    ] = "page_first"
    hicache_storage: Annotated[StorageKind, Parameter(help="The storage tier behind the host.")] = "none"
    hicache_storage_path: Annotated[
        Path | None, Parameter(help="Directory of the file storage. It outlives the engine.")
    ] = None
    hicache_storage_checksum: Annotated[
        StorageChecksum,
        Parameter(help="Store framed copies with a checksum, or pages in place with a separate checksum or none."),
    ] = "frame"
    hicache_mooncake_master: Annotated[str, Parameter(help="Address of Mooncake's master, host:port.")] = (
        MOONCAKE_MASTER
    )
    hicache_mooncake_metadata: Annotated[str, Parameter(help="URL of Mooncake's metadata server.")] = MOONCAKE_METADATA
    hicache_write: Annotated[WritePolicy, Parameter(help="When to copy pages to the host.")] = "write_through"
    hicache_write_hits: Annotated[
        int, Parameter(validator=Number(gte=1), help="Hits before write_through_selective copies a page.")
    ] = _POLICY.write_threshold_hits
    hicache_prefetch: Annotated[PrefetchPolicy, Parameter(help="When to stop a prefetch from storage.")] = "best_effort"
    hicache_prefetch_pages: Annotated[
        int, Parameter(validator=Number(gte=1), help="Shorter hits in storage are computed, not prefetched.")
    ] = _POLICY.prefetch_threshold_pages
    hicache_retry_steps: Annotated[
        int, Parameter(validator=Number(gte=0), help="Steps after a miss until storage is queried again; 0: never.")
    ] = _POLICY.prefetch_retry_steps
    hicache_load: Annotated[
        LoadBackMode, Parameter(help="When a request starts: after all its pages are loaded, or layer by layer.")
    ] = "whole"
    hicache_load_pages: Annotated[
        int, Parameter(validator=Number(gte=1), help="Shorter runs of pages are computed, not loaded from the host.")
    ] = _POLICY.load_threshold_pages

    def config(self, kv_tokens: int) -> HiCacheConfig | None:
        """Return the configuration for a device of ``kv_tokens``; None without ``--hicache``.

        Raises:
            ConfigError: an option has an invalid value; the error names it.
            MissingExtraError: a library of an extra is not installed. The ranks would report it once each.
        """
        if not self.hicache:
            return None
        given = {name.removeprefix("hicache_"): value for name, value in attrs.asdict(self).items()}
        path = self.hicache_storage_path
        config = _with_same_names(
            HiCacheConfig,
            given,
            host_tokens=_HOST_TO_DEVICE * kv_tokens if self.hicache_host_tokens is None else self.hicache_host_tokens,
            storage_path=str(path.absolute()) if path is not None else "",
            policy=_with_same_names(
                HiCachePolicy,
                given,
                write_threshold_hits=self.hicache_write_hits,
                prefetch_threshold_pages=self.hicache_prefetch_pages,
                prefetch_retry_steps=self.hicache_retry_steps,
                load_threshold_pages=self.hicache_load_pages,
            ),
        )
        require_modules("numpy", otherwise="leave --hicache out")
        if self.hicache_storage == "mooncake":
            require_modules("mooncake", otherwise="choose another --hicache-storage")
        return config


_TEXT_LOGS = LogConfig()
_SERVE, _DEMO, _NO_TIERS, _SIMULATED = EngineOptions(), DemoOptions(), HiCacheOptions(), ModelOptions()
_SERVER = ServerOptions()


def engine_config(options: EngineOptions, hicache: HiCacheOptions, model: ModelOptions = _SIMULATED) -> EngineConfig:
    """Return the engine's configuration.

    Raises:
        ConfigError: an option has an invalid value; the error names it.
    """
    spec = model.spec()
    is_model = spec is not None
    given = attrs.asdict(options) | options.sizes(of_a_model=is_model)
    kv_tokens, chunk_tokens = given["kv_tokens"], given["chunk_tokens"]
    if options.otlp_traces_endpoint:
        require_modules("opentelemetry", otherwise="leave --otlp-traces-endpoint out")
    scheduler = _with_same_names(
        SchedulerConfig,
        given,
        # One chunk per step of a model, because all other requests wait for it.
        max_prefill_tokens=chunk_tokens if is_model else max(chunk_tokens, SchedulerConfig().max_prefill_tokens),
        queue_timeout_s=options.queue_timeout,
        timeout_s=options.request_timeout,
        integrity=_with_same_names(IntegrityConfig, given),
        tokens=TokenSpec() if spec is None else spec.tokens,
        grammar=model.grammar(spec),
        lora=model.lora(),
    )
    engine = _with_same_names(
        EngineConfig,
        given,
        model=spec,
        model_name=EngineConfig().model_name if spec is None else Path(spec.path).name.removesuffix(".gguf"),
        scheduler=scheduler,
        hicache=hicache.config(kv_tokens),
        dp_attention=_dp_attention(options),
        telemetry=_with_same_names(TelemetryConfig, given),
        kv_events=options.kv_events_config,
    )
    _check_memory(engine)
    if engine.kv_events is None:
        return attrs.evolve(engine, kv_events=default_kv_events(engine))
    EventPublisherFactory.find(engine.kv_events.publisher)  # before any process starts
    return engine


def _check_memory(engine: EngineConfig) -> None:
    """Refuse a model and pools that exceed this machine's memory, before the kernel kills a process."""
    model = engine.model
    if model is None or model.device != "cpu":
        return
    pool_bytes = model.kv_bytes_per_token * engine.scheduler.kv_tokens
    # Each rank reads all weights before it keeps its shard. It stores its shard of each page.
    needed_gb = (model.weight_bytes + pool_bytes / engine.attn_tp_size) * engine.world_size / 1e9
    has_gb = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 1e9
    if needed_gb > has_gb:
        problem = f"needs {needed_gb:.1f} GB with the weights of each rank, and this machine has {has_gb:.1f}"
        raise ConfigError("kv_tokens", engine.scheduler.kv_tokens, problem, "give fewer, or a smaller model")


def _dp_attention(options: EngineOptions) -> DpAttentionConfig | None:
    if options.dp_attention:
        return DpAttentionConfig(max_delay_steps=options.prefill_delay_steps, low_usage=options.prefill_delay_low_usage)
    for name in ("prefill_delay_steps", "prefill_delay_low_usage"):
        if value := getattr(options, name):
            raise ConfigError(name, value, "has no effect by itself", "add --dp-attention")
    return None


def serve(
    options: EngineOptions = _SERVE,
    hicache: HiCacheOptions = _NO_TIERS,
    model: ModelOptions = _SIMULATED,
    server: ServerOptions = _SERVER,
    *,
    trace: Annotated[
        Path | None, Parameter(help="Replay this trace (Mooncake's JSON lines), check the run, stop.")
    ] = None,
    limit: Annotated[
        int | None, Parameter(validator=Number(gte=1), help="Replay only the first requests of the trace.")
    ] = None,
    keep_serving: Annotated[bool, Parameter(show_default=False, help="Keep serving after the trace.")] = False,
    duration: Annotated[
        float | None, Parameter(validator=Number(gte=0), help="Stop serving after this many seconds.")
    ] = None,
    as_json: AsJson = False,
    logs: Logs = _TEXT_LOGS,
) -> int:
    """Run the engine and serve HTTP until Ctrl-C, or replay a trace against it."""
    session = _session(options, hicache, model, server, logs)
    served = attrs.evolve(session, trace=trace, limit=limit, keep_serving=keep_serving, duration_s=duration)
    return _run(served, as_json=as_json)


def demo(
    options: DemoOptions = _DEMO,
    hicache: HiCacheOptions = _NO_TIERS,
    model: ModelOptions = _SIMULATED,
    server: ServerOptions = _SERVER,
    *,
    requests: Annotated[
        int | None, Parameter(help="Requests of the generated multi-turn chats. Default: 300; with --model 16.")
    ] = None,
    chats_per_s: Annotated[float, Parameter(help="New chats per second.")] = _DEFAULT_WORKLOAD.chats_per_s,
    as_json: AsJson = False,
    logs: Logs = _TEXT_LOGS,
) -> int:
    """Run the engine under a generated workload, follow its event streams, and verify the run.

    With --model the command also compares every answer, token by token, with transformers' generate.
    """
    session = _session(options, hicache, model, server, logs)
    workload = WorkloadConfig(seed=options.seed, chats_per_s=chats_per_s, **_workload_of(session.engine.model))
    if requests is not None:
        workload = attrs.evolve(workload, num_requests=requests)
    return _run(attrs.evolve(session, workload=workload), as_json=as_json)


def _session(
    options: EngineOptions, hicache: HiCacheOptions, model: ModelOptions, server: ServerOptions, logs: LogConfig
) -> SessionConfig:
    return SessionConfig(
        engine=attrs.evolve(engine_config(options, hicache, model), logs=logs),
        host=options.host,
        port=options.port,
        kv_pool=options.kv_pool,
        server=server.config(),
        affinity_tokens=options.affinity_tokens,
    )


def _workload_of(model: ModelSpec | None) -> dict[str, int]:
    """Return the sizes that differ from the defaults: for a model, about a minute of work for two cores."""
    if model is None:
        return {}
    sizes = {"num_requests": 16, "num_system_prompts": 2, "max_system_prompt_tokens": 96}
    return sizes | {"mean_message_tokens": 16, "mean_output_tokens": 12, "vocab_size": model.tokens.vocab_size}


def _run(config: SessionConfig, *, as_json: bool) -> int:
    screen = JsonReporter.standard() if as_json else ConsoleReporter.standard()
    return 0 if asyncio.run(_until_terminated(config, screen)) else 1


async def _until_terminated(config: SessionConfig, screen: RunReporter) -> bool:
    return await run_session(config, screen, cancel_on_sigterm())
