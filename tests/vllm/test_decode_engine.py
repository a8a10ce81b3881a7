"""vLLM's CPU engine generates through this package's plan, pieces and combine, as with its own."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from k3backend.common.kv_groups import plan_groups
from k3backend.common.kv_spec import spec_kind_name
from k3backend.common.spec_file import load_spec_file
from tests.helpers.engine_runs import MAX_MODEL_LEN, EngineRun, disagreements, prompts, run_engines
from tests.helpers.tiny_mla_model import LAYERS
from tests.vllm.conftest import FAULTS

pytestmark = [pytest.mark.vllm, pytest.mark.engine, pytest.mark.timeout(2400)]


@pytest.mark.parametrize("model", ["12", "16", "12-rotary", "16-rotary"])
def test_plain_generation_equals_vllms_own(stock_runs, our_runs, model):
    assert disagreements(stock_runs[model], our_runs[model]) == []
    assert our_runs[model].query_lens == [1]
    assert our_runs[model].calls > 0
    assert our_runs[model].splits > our_runs[model].calls, "no decode was split"


@pytest.mark.parametrize("heads", ["12", "16"])
def test_speculative_generation_equals_plain(stock_runs, our_runs, heads):
    """Greedy speculation accepts what plain generation gives; drafts reach our decode as tokens."""
    ours = our_runs[f"{heads}-speculative"]
    assert disagreements(stock_runs[heads], ours) == []
    assert sorted(ours.query_lens) == [1, 2, 3, 4]
    assert ours.splits > ours.calls


def test_speculative_generation_equals_vllms_own(stock_runs, our_runs):
    assert disagreements(stock_runs["12-speculative"], our_runs["12-speculative"]) == []


def test_prefix_reuse_and_vllms_choice_of_backend_and_block(stock_runs, our_runs):
    """Neither backend nor block size named, each prompt twice: where the CPU has AMX, vLLM takes
    its AMX slot, larger blocks, chunked prefill and prefix reuse."""
    twice = replace(
        stock_runs["12"],
        tokens=stock_runs["12"].tokens * 2,
        logprobs=stock_runs["12"].logprobs * 2,
    )
    assert disagreements(twice, our_runs["12-prefixes"]) == []
    assert our_runs["12-prefixes"].splits > 0


@pytest.mark.parametrize("fault", FAULTS)
def test_a_broken_decode_is_seen(stock_runs, our_runs, fault):
    """The comparison above would fail for a decode that is wrong in one of these ways."""
    broken = our_runs[fault]
    assert broken.calls > 0
    found = disagreements(stock_runs["12"], broken)
    touched = {int(re.match(r"prompt (\d+)", line)[1]) for line in found}
    if fault == "zeroed":
        assert touched == set(range(len(prompts())))
    else:  # the longest prompts are split from the first step on
        assert {index for index, prompt in enumerate(prompts()) if len(prompt) >= 64} <= touched


def test_the_models_tell_prompts_apart(stock_runs):
    """A model that gave every prompt the same tokens would prove nothing."""
    for run in stock_runs.values():
        assert len({tuple(tokens) for tokens in run.tokens}) == len(run.tokens), run.name


def test_named_backend_in_processes_of_vllm(engine_folder, tiny_models, stock_runs):
    """``attention_backend="KIMI_K3_MLA"`` with engine and worker in processes of their own."""
    run = EngineRun(
        "named", str(tiny_models["12"]), backend="KIMI_K3_MLA", block_size=None, in_process=False
    )
    dump = engine_folder / "specs.json"
    (done,), log = run_engines(
        [run],
        engine_folder / "named",
        plugin=True,
        cpu_slots=False,
        K3BACKEND_DUMP_SPECS=str(dump),
    )
    assert disagreements(stock_runs["12"], done) == []
    assert re.search(r"EngineCore.*platform reference, attention backends KIMI_K3_MLA", log)
    assert "serving CPU_MLA" not in log
    assert re.search(r"MLA layers decode with this package, reference", log)
    lines = re.findall(r"k3backend: (\d+) decode calls, (\d+) split pieces, reference", log)
    assert len(lines) > 1, log[-3000:]
    assert all(int(splits) > int(calls) > 0 for calls, splits in lines)
    steps = max(map(len, done.tokens)) - 1
    assert int(lines[-1][0]) >= LAYERS * steps, "the worker's last line has its totals"
    dumped = load_spec_file(dump)
    assert len(dumped.specs) == LAYERS
    assert {spec_kind_name(spec) for spec in dumped.specs.values()} == {"mla_attention"}
    assert dumped.context.max_model_len == MAX_MODEL_LEN
    assert len(plan_groups(dumped.specs, dumped.context)) == 1
