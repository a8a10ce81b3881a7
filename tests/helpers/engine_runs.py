"""Runs of vLLM's CPU engine on tiny models: one process, several engines one after the other.

``python -m tests.helpers.engine_runs JOB.json`` reads a list of :class:`EngineRun` and writes what
each generated. The engines run inside the process, so that a run can break the decode on purpose.
"""

from __future__ import annotations

import importlib.metadata
import json
import math
import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[2]
PROMPT_LENGTHS = (5, 400, 1, 33, 17, 150, 64)
SLOTS = 3
NEW_TOKENS = 16
MAX_MODEL_LEN = 512


@dataclass
class EngineRun:
    """One engine: what it is started with and, afterwards, what it gave.

    Attributes:
        name: of the run.
        model: folder of a tiny model.
        backend: ``attention_backend`` of the engine; None leaves the choice to vLLM.
        speculative: n-gram drafts, up to three tokens a step.
        fault: None, or what is broken in this package's decode: "zeroed", "split-dropped",
            "lse-base".
        block_size: None leaves it to vLLM.
        in_process: False runs engine and worker in processes of their own, as vLLM does.
        prefix_caching: reuse of prefixes; the second half of the prompts then repeats the first.
        tokens: per prompt, the generated token ids.
        logprobs: per prompt and token, the two most likely tokens as (id, log-probability).
        query_lens: query tokens per request of the decodes of this package, each once.
        calls, splits: of this package's decode.
        seconds: wall time.
    """

    name: str
    model: str
    backend: str | None = "CPU_MLA"
    speculative: bool = False
    fault: str | None = None
    block_size: int | None = 16
    in_process: bool = True
    prefix_caching: bool = False
    tokens: list[list[int]] = field(default_factory=list)
    logprobs: list[list[list[list[float]]]] = field(default_factory=list)
    query_lens: list[int] = field(default_factory=list)
    calls: int = 0
    splits: int = 0
    seconds: float = 0.0


def prompts() -> list[list[int]]:
    """Seeded token-id prompts of 1 to 400 tokens, more of them than the engine has slots."""
    generator = random.Random(1)
    return [[generator.randrange(3, 512) for _ in range(length)] for length in PROMPT_LENGTHS]


def disagreements(reference: EngineRun, other: EngineRun, *, tolerance: float = 0.05) -> list[str]:
    """Where ``other`` is not the reference; empty if the two agree.

    Tokens must be equal and their log-probabilities within ``tolerance``. A run may leave its
    reference only where the reference's two most likely tokens are within ``tolerance``; from
    there on the two have different prefixes and are not compared.
    """
    found = []
    for index, tokens in enumerate(reference.tokens):
        for step, token in enumerate(tokens):
            expected = {int(i): value for i, value in reference.logprobs[index][step]}
            got_token = other.tokens[index][step]
            if got_token != token:
                best, second = sorted(expected.values(), reverse=True)[:2]
                if best - second > tolerance:
                    found.append(f"prompt {index}, token {step}: {got_token}, expected {token}")
                break
            got = {int(i): value for i, value in other.logprobs[index][step]}
            if not abs(got[token] - expected[token]) <= tolerance:
                found.append(
                    f"prompt {index}, token {step}: log-probability {got[token]:.4f}, expected "
                    f"{expected[token]:.4f}"
                )
                break
    return found


def run_engines(
    runs: Sequence[EngineRun],
    folder: Path,
    *,
    plugin: bool,
    cpu_slots: bool = True,
    timeout_s: float = 2000,
    **environment: str,
) -> tuple[list[EngineRun], str]:
    """Run the engines in one process.

    Args:
        folder: scratch space.
        plugin: whether this package's plugin is on.
        cpu_slots: whether it then serves vLLM's own CPU MLA slots.
        environment: more variables.
    Returns:
        The runs with their results, and everything that the process wrote.
    Raises:
        RuntimeError: the process failed.
    """
    folder.mkdir(parents=True, exist_ok=True)
    job, answer = folder / "job.json", folder / "answer.json"
    job.write_text(json.dumps([asdict(run) for run in runs]))
    done = subprocess.run(
        [sys.executable, "-m", "tests.helpers.engine_runs", str(job), str(answer)],
        env=engine_environment(folder, plugin=plugin, cpu_slots=cpu_slots, **environment),
        cwd=REPOSITORY,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    if done.returncode != 0:
        raise RuntimeError(f"exit {done.returncode}\n{done.stdout[-8000:]}")
    return [EngineRun(**item) for item in json.loads(answer.read_text())], done.stdout


def engine_environment(
    folder: Path, *, plugin: bool, cpu_slots: bool = True, **more: str
) -> dict[str, str]:
    """The environment of an engine process in which vLLM finds this package's entry point."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("K3BACKEND_")}
    paths = [str(REPOSITORY)]
    if not entry_point_installed():
        paths.insert(0, str(write_entry_point(folder / "plugin")))
    env |= {
        "PYTHONPATH": os.pathsep.join(paths),
        "K3BACKEND_CPU": "1" if plugin and cpu_slots else "",
        "K3BACKEND_DISABLE": "" if plugin else "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CACHE_ROOT": str(folder.parent / "vllm-cache"),
        "HF_HUB_OFFLINE": "1",
        "VLLM_LOGGING_COLOR": "0",
    }
    return env | more


def entry_point_installed() -> bool:
    """Whether this environment has this package installed with its entry point."""
    points = importlib.metadata.entry_points(group="vllm.general_plugins")
    return any(point.name == "k3backend" for point in points)


def write_entry_point(folder: Path) -> Path:
    """A folder that, on PYTHONPATH, makes vLLM find the plugin as the installed package does."""
    info = folder / "k3backend_entry_point-0.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    (info / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: k3backend-entry-point\nVersion: 0\n"
    )
    (info / "entry_points.txt").write_text(
        "[vllm.general_plugins]\nk3backend = k3backend.vllm_plugin:register\n"
    )
    return folder


def main(job: str, answer: str) -> None:
    """Run every engine of ``job`` and write the results to ``answer``."""
    runs = [EngineRun(**item) for item in json.loads(Path(job).read_text())]
    for run in runs:
        start = time.monotonic()
        with _broken(run.fault), _recorded(run):
            _generate(run)
        run.seconds = time.monotonic() - start
        print(f"engine run {run.name}: {run.seconds:.1f} s", flush=True)
    Path(answer).write_text(json.dumps([asdict(run) for run in runs]))


def _generate(run: EngineRun) -> None:
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0" if run.in_process else "1"
    from vllm import LLM, SamplingParams

    options: dict[str, Any] = {"block_size": run.block_size} if run.block_size else {}
    if run.backend:
        options["attention_backend"] = run.backend
    if run.speculative:
        options["speculative_config"] = {
            "method": "ngram",
            "num_speculative_tokens": 3,
            "prompt_lookup_max": 4,
            "prompt_lookup_min": 1,
        }
    if run.in_process:
        options["distributed_executor_backend"] = "uni"
    llm = LLM(
        run.model,
        skip_tokenizer_init=True,
        dtype="float32",
        max_model_len=MAX_MODEL_LEN,
        max_num_seqs=SLOTS,
        enforce_eager=True,
        enable_prefix_caching=run.prefix_caching,
        **options,
    )
    requests = prompts()
    if run.prefix_caching:
        requests = [*requests, *requests]
    params = SamplingParams(
        temperature=0, max_tokens=NEW_TOKENS, logprobs=2, ignore_eos=True, detokenize=False
    )
    answers = llm.generate(
        [{"prompt_token_ids": prompt} for prompt in requests], params, use_tqdm=False
    )
    for request in answers:
        (completion,) = request.outputs
        run.tokens.append(list(completion.token_ids))
        run.logprobs.append(
            [
                [[token, entry.logprob] for token, entry in step.items()]
                for step in completion.logprobs or ()
            ]
        )
    llm.llm_engine.engine_core.shutdown()
    if run.in_process:
        from vllm.distributed import cleanup_dist_env_and_memory
        from vllm.platforms import current_platform

        cleanup_dist_env_and_memory()
        # They stay registered; doing it again scans every module and trips over numba's.
        type(current_platform).register_triton_kernel_overrides = classmethod(lambda cls: None)


@contextmanager
def _recorded(run: EngineRun) -> Iterator[None]:
    """Count this package's decodes of one run; they are seen only in this process."""
    if os.environ.get("K3BACKEND_CPU") != "1" or not run.in_process:
        yield
        return
    from k3backend.common.decode_counters import read_stats
    from k3backend.vllm_plugin import cpu_backend

    original = cpu_backend.mla_decode
    before = read_stats()

    def recorded(*args: Any, **kwargs: Any) -> Any:
        if kwargs["q_len"] not in run.query_lens:
            run.query_lens.append(kwargs["q_len"])
        return original(*args, **kwargs)

    cpu_backend.mla_decode = recorded
    try:
        yield
    finally:
        cpu_backend.mla_decode = original
        after = read_stats()
        run.calls, run.splits = after.calls - before.calls, after.splits - before.splits


@contextmanager
def _broken(fault: str | None) -> Iterator[None]:
    """Break this package's decode inside the block."""
    if fault is None:
        yield
        return
    from k3backend.common import attention_reference
    from k3backend.vllm_plugin import cpu_backend

    merge, decode = attention_reference.merge, cpu_backend.mla_decode
    if fault == "zeroed":

        def zeroed(*args: Any, **kwargs: Any) -> Any:
            out, lse2 = decode(*args, **kwargs)
            return out.zero_(), lse2

        cpu_backend.mla_decode = zeroed
    elif fault == "split-dropped":
        attention_reference.merge = lambda out, lse2: merge(out[1:], lse2[1:])
    elif fault == "lse-base":
        attention_reference.merge = lambda out, lse2: merge(out, lse2 * math.log(2))
    else:
        raise ValueError(f"unknown fault {fault!r}")
    try:
        yield
    finally:
        attention_reference.merge, cpu_backend.mla_decode = merge, decode


if __name__ == "__main__":
    main(*sys.argv[1:])
