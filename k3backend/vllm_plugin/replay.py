"""A request trace through vLLM's own scheduler and KV cache manager, without a model.

Everything that decides about blocks is vLLM's: the scheduler, the managers of every group, the
block pool, the prefix-cache hashes. The one thing that is not there is the model;
:func:`fake_model_output` stands in for it and gives one made-up token to every request whose
prompt is computed. So the numbers say how many requests a layout admits, how often it preempts,
which group holds the blocks and what the host pays per step; they say nothing about device time.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from importlib import metadata
from math import ceil
from pathlib import Path
from statistics import fmean, median
from typing import TYPE_CHECKING, Any

from k3backend.common.errors import InputError, PluginError
from k3backend.common.request_trace import TraceRequest
from k3backend.vllm_plugin.replay_report import ReplayReport, ReplaySettings

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec
    from vllm.v1.outputs import ModelRunnerOutput
    from vllm.v1.request import Request

    from k3backend.common.plan_context import PlanContext

REPLAYED_VLLM = "0.33"
BLOCK_SAMPLE_STEPS = 16
"""Blocks by group are counted every so many steps; counting is not part of the timings."""
MAX_IDLE_STEPS = 1000
FAKE_TOKEN = 7

Progress = Callable[[int, int], None]
"""Called with the requests finished and the requests in all."""


def check_vllm() -> str:
    """The version of vLLM that would be replayed.

    Raises:
        PluginError: vLLM is missing, or is another version.
    """
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("VLLM_LOGGING_STREAM", "ext://sys.stderr")
    try:
        # Its import complains about kernels that a CPU does not need.
        with contextlib.redirect_stderr(io.StringIO()):
            import vllm
    except ImportError as error:
        raise PluginError(
            f"vLLM cannot be imported ({error}); install vllm {REPLAYED_VLLM} for replay"
        ) from error
    version = str(getattr(vllm, "__version__", None) or metadata.version("vllm"))
    if version.split(".")[:2] != REPLAYED_VLLM.split("."):
        raise PluginError(
            f"replay runs the scheduler of vLLM {REPLAYED_VLLM}, found {version}; put vLLM "
            f"{REPLAYED_VLLM} first on PYTHONPATH"
        )
    return version


def scheduler_config(context: PlanContext, settings: ReplaySettings, block_size: int) -> VllmConfig:
    """A real VllmConfig for one layout, on the CPU, with a one-layer stand-in for the model.

    The model part is never used: groups are given, not collected from layers.
    """
    from vllm.config import CacheConfig, DeviceConfig, ModelConfig, SchedulerConfig, VllmConfig

    with tempfile.TemporaryDirectory(prefix="k3backend-replay-") as folder:
        Path(folder, "config.json").write_text(json.dumps(_stand_in_model(context.max_model_len)))
        model = ModelConfig(
            model=folder,
            skip_tokenizer_init=True,
            max_model_len=context.max_model_len,
            dtype="float32",
            seed=0,
        )
        cache = CacheConfig(
            block_size=block_size,
            enable_prefix_caching=context.prefix_caching,
            mamba_cache_mode=context.mamba_cache_mode,
        )
        scheduler = SchedulerConfig(
            max_num_seqs=settings.max_num_seqs,
            max_num_batched_tokens=settings.max_batched_tokens,
            max_model_len=context.max_model_len,
            is_encoder_decoder=False,
            enable_chunked_prefill=True,
            async_scheduling=False,
        )
        config = VllmConfig(
            model_config=model,
            scheduler_config=scheduler,
            cache_config=cache,
            device_config=DeviceConfig("cpu"),
        )
    # Set once here, as the engine core does after it has asked its workers.
    config.cache_config.kv_cache_layout = context.layout
    config.parallel_config.tensor_parallel_size = context.tp_size
    config.parallel_config.decode_context_parallel_size = context.dcp_size
    config.cache_config.block_size = block_size
    config.scheduler_config.disable_hybrid_kv_cache_manager = (
        context.disable_hybrid_kv_cache_manager
    )
    return config


def _stand_in_model(max_model_len: int) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
        "num_key_value_heads": 1,
        "vocab_size": 64,
        "max_position_embeddings": max_model_len,
        "torch_dtype": "float32",
    }


def place_groups(config: VllmConfig, groups: list[KVCacheGroupSpec], memory: int) -> KVCacheConfig:
    """vLLM's placement of the groups in ``memory`` bytes, reduced to what its scheduler reads.

    Raises:
        InputError: fewer than two blocks fit; one of them is the null block.
    """
    from vllm.v1.core.kv_cache_planning import get_kv_cache_config_from_groups
    from vllm.v1.core.kv_cache_utils import generate_scheduler_kv_cache_config

    placed = get_kv_cache_config_from_groups(config, groups, memory)
    if placed.num_blocks < 2:
        raise InputError(
            f"memory of {memory} B holds {placed.num_blocks} blocks, expected at least 2 (one is "
            "the null block); give more memory"
        )
    return generate_scheduler_kv_cache_config([placed])


def build_scheduler(config: VllmConfig, kv_cache: KVCacheConfig) -> Scheduler:
    """vLLM's scheduler over the placed groups, as the engine core builds it."""
    from vllm.v1.core.kv_cache_utils import resolve_kv_cache_block_sizes
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.core.single_type_kv_cache_manager import register_all_kvcache_specs
    from vllm.v1.structured_output import StructuredOutputManager

    register_all_kvcache_specs(config)
    config.cache_config.num_gpu_blocks = kv_cache.num_blocks
    block_size, hash_block_size = resolve_kv_cache_block_sizes(kv_cache, config)
    return Scheduler(
        vllm_config=config,
        kv_cache_config=kv_cache,
        structured_output_manager=StructuredOutputManager(config),
        block_size=block_size,
        hash_block_size=hash_block_size,
    )


def fake_model_output(scheduler: Scheduler, scheduled: SchedulerOutput) -> ModelRunnerOutput:
    """What a model would return for this step: one made-up token per request past its prompt.

    A request whose prompt (or, after a preemption, whose earlier answer) is still being computed
    returns no token, as vLLM's runners do.
    """
    from vllm.v1.outputs import ModelRunnerOutput

    ids = list(scheduled.num_scheduled_tokens)
    tokens = []
    for request_id in ids:
        request = scheduler.requests[request_id]
        computed = request.num_computed_tokens >= request.num_tokens
        tokens.append([FAKE_TOKEN] if computed else [])
    return ModelRunnerOutput(
        req_ids=ids,
        req_id_to_index={request_id: index for index, request_id in enumerate(ids)},
        sampled_token_ids=tokens,
    )


class _Stopwatch:
    """Processor time of the calls of one bound method, in nanoseconds.

    Processor time, because a scheduler shares its machine; the rest of the machine's work is no
    property of a layout.
    """

    def __init__(self, call: Callable[..., Any]) -> None:
        self.call = call
        self.samples_ns: list[int] = []

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        start = time.thread_time_ns()
        try:
            return self.call(*args, **kwargs)
        finally:
            self.samples_ns.append(time.thread_time_ns() - start)

    def microseconds(self) -> dict[str, float]:
        """Median, mean and 99th percentile of the samples; calls. Empty without samples."""
        if not self.samples_ns:
            return {}
        ordered = sorted(self.samples_ns)
        high = ordered[min(len(ordered) - 1, int(len(ordered) * 0.99))]
        return {
            "median": round(median(ordered) / 1e3, 2),
            "mean": round(fmean(ordered) / 1e3, 2),
            "p99": round(high / 1e3, 2),
            "calls": len(ordered),
        }


class LayoutReplay:
    """One layout, its scheduler and what was counted."""

    def __init__(
        self,
        name: str,
        groups: list[KVCacheGroupSpec],
        context: PlanContext,
        settings: ReplaySettings,
    ) -> None:
        check_vllm()
        from vllm.v1.core.kv_cache_planning import _pool_bytes_per_block
        from vllm.v1.metrics.stats import PrefixCacheStats

        self.context = context
        self.settings = settings
        self.config = scheduler_config(context, settings, _scheduling_block(groups))
        kv_cache = place_groups(self.config, groups, settings.memory_bytes)
        self.scheduler = build_scheduler(self.config, kv_cache)
        # The manager's own hit counters, without the per-step statistics of the scheduler.
        manager = self.scheduler.kv_cache_manager
        manager.log_stats = True
        manager.prefix_cache_stats = PrefixCacheStats()
        self.managers = manager.coordinator.single_type_managers
        self.report = ReplayReport(
            name=name,
            block_bytes=_pool_bytes_per_block(self.config, groups),
            num_blocks=kv_cache.num_blocks,
            prefix_hit_tokens=self.managers[0].cache_hit_alignment_tokens,
            groups=[_group_facts(index, group) for index, group in enumerate(groups)],
        )
        self._hasher = self._request_hasher()

    def run(self, trace: Sequence[TraceRequest], progress: Progress | None = None) -> ReplayReport:
        """Feed the trace until every request that fits has ended.

        Raises:
            PluginError: the scheduler makes no progress with requests left.
        """
        schedule = _Stopwatch(self.scheduler.schedule)
        update = _Stopwatch(self.scheduler.update_from_output)
        manager = self.scheduler.kv_cache_manager
        allocate = manager.allocate_slots = _Stopwatch(manager.allocate_slots)  # type: ignore[method-assign,assignment]
        requests = self._requests(trace)
        pending = requests[::-1]
        total = len(requests)
        admitted_sum = waiting_steps = idle_steps = 0
        clock_ms = 0.0
        report = self.report
        while pending or self.scheduler.has_unfinished_requests():
            while pending and (
                self.settings.arrivals == "burst" or pending[-1].arrival_time <= clock_ms
            ):
                self.scheduler.add_request(pending.pop())
            clock_ms += self.settings.step_ms
            if not self.scheduler.has_unfinished_requests():
                clock_ms = max(clock_ms, pending[-1].arrival_time)
                continue
            scheduled = schedule()
            running = len(self.scheduler.running)
            report.admitted_peak = max(report.admitted_peak, running)
            if running < self.scheduler.get_num_unfinished_requests():
                admitted_sum += running
                waiting_steps += 1
            report.pool_usage_peak = max(report.pool_usage_peak, manager.usage)
            if report.steps % BLOCK_SAMPLE_STEPS == 0:
                self._count_blocks()
            if scheduled.total_num_scheduled_tokens == 0:
                idle_steps += 1
                if idle_steps > MAX_IDLE_STEPS:
                    raise PluginError(self._stuck())
            else:
                idle_steps = 0
            update(scheduled, fake_model_output(self.scheduler, scheduled))
            report.steps += 1
            finished = total - len(pending) - self.scheduler.get_num_unfinished_requests()
            if progress is not None:
                progress(finished, total)
        report.requests_finished = total
        report.preemptions = sum(request.num_preemptions for request in requests)
        report.admitted_mean = admitted_sum / waiting_steps if waiting_steps else 0.0
        report.schedule_us = schedule.microseconds()
        report.update_us = update.microseconds()
        report.allocate_us = allocate.microseconds()
        stats = manager.make_prefix_cache_stats()
        if stats is not None:
            report.looked_up_tokens = stats.queries
            report.hit_tokens = stats.hits
        self._close_counts()
        return report

    def _requests(self, trace: Sequence[TraceRequest]) -> list[Request]:
        """The trace as vLLM requests in order of arrival; those that can never run are skipped."""
        from vllm.sampling_params import SamplingParams
        from vllm.v1.request import Request

        shared = self.settings.shared_prefix_tokens
        requests = []
        for index, item in enumerate(sorted(trace, key=lambda item: item.timestamp_ms)):
            if not self._can_run(item.total_tokens):
                self.report.requests_skipped += 1
                continue
            prefix = min(shared, item.input_tokens)
            # Prompts differ from their first own token on, so nothing else is shared.
            own = [index + 1] * (item.input_tokens - prefix)
            requests.append(
                Request(
                    request_id=f"trace-{index}",
                    prompt_token_ids=[0] * prefix + own,
                    sampling_params=SamplingParams(max_tokens=item.output_tokens, ignore_eos=True),
                    pooling_params=None,
                    arrival_time=float(item.timestamp_ms),
                    block_hasher=self._hasher,
                )
            )
        return requests

    def _can_run(self, tokens: int) -> bool:
        if tokens > self.context.max_model_len:
            return False
        model = self.config.model_config
        longest, model.max_model_len = model.max_model_len, tokens
        try:
            specs = [manager.kv_cache_spec for manager in self.managers]
            blocks = sum(
                ceil(spec.max_memory_usage_bytes(self.config) / spec.page_size_bytes)
                for spec in specs
            )
        finally:
            model.max_model_len = longest
        return blocks <= self.report.num_blocks - 1

    def _request_hasher(self) -> Any:
        if not self.config.cache_config.enable_prefix_caching:
            return None
        from vllm.utils.hashing import get_hash_fn_by_name
        from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash

        hash_function = get_hash_fn_by_name(self.config.cache_config.prefix_caching_hash_algo)
        init_none_hash(hash_function)
        return get_request_block_hasher(self.scheduler.hash_block_size, hash_function)

    def _count_blocks(self) -> None:
        running = [request.request_id for request in self.scheduler.running]
        for facts, manager in zip(self.report.groups, self.managers, strict=True):
            held = 0
            for request_id in running:
                blocks = manager.req_to_blocks.get(request_id, ())
                held += sum(not block.is_null for block in blocks)
            facts["blocks_peak"] = max(facts["blocks_peak"], held)
            facts["held"] += held
            facts["seen"] += len(running)

    def _close_counts(self) -> None:
        for facts in self.report.groups:
            held, seen = facts.pop("held"), facts.pop("seen")
            facts["blocks_per_request"] = round(held / seen, 3) if seen else 0.0

    def _stuck(self) -> str:
        free = self.scheduler.kv_cache_manager.block_pool.get_num_free_blocks()
        return (
            f"layout {self.report.name}: {MAX_IDLE_STEPS} steps in a row scheduled nothing with "
            f"{self.scheduler.get_num_unfinished_requests()} requests left and {free} of "
            f"{self.report.num_blocks} blocks free; give more memory or a shorter trace"
        )


def _scheduling_block(groups: Sequence[KVCacheGroupSpec]) -> int:
    """The block size that vLLM's config holds: the Mamba groups' one, else the first group's."""
    from vllm.v1.kv_cache_interface import MambaSpec

    for group in groups:
        if isinstance(group.kv_cache_spec, MambaSpec):
            return int(group.kv_cache_spec.block_size)
    if not groups:
        raise InputError("no group to replay; give a model with a KV cache")
    return int(groups[0].kv_cache_spec.block_size)


def _group_facts(index: int, group: KVCacheGroupSpec) -> dict[str, Any]:
    from vllm.v1.kv_cache_interface import get_kv_cache_spec_kind

    return {
        "id": index,
        "kind": get_kv_cache_spec_kind(group.kv_cache_spec).value,
        "num_layers": len(group.layer_names),
        "block_size": group.kv_cache_spec.block_size,
        "blocks_peak": 0,
        "held": 0,
        "seen": 0,
    }
