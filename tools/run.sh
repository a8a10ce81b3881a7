#!/usr/bin/env bash
# The main job, from nothing: sets up an environment and shows how Kimi-K3 and its DSpark drafts are
# grouped on AMD and on NVIDIA, what a bad draft would cost, and why.
. "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
environment_base
K3="$VENV/bin/k3backend"

say "Kimi-K3 with a DSpark MLA draft: TP 8, fp8 cache, 7 draft tokens, 1,048,576 tokens"
"$K3" layout --target kimi-k3 --draft dspark-mla --tp 8 --kv-dtype fp8 --spec-tokens 7 \
  --max-model-len 1048576 --platform all "$@"

say "the same with a draft that does not declare its replication, as vLLM's planner groups it"
"$K3" layout --target kimi-k3 --draft dspark-mla --draft-max-tp-shards none --policy vllm \
  --platform rocm
"$K3" explain --target kimi-k3 --draft dspark-mla --draft-max-tp-shards none --policy vllm \
  --platform rocm

say "GQA drafts: sliding window, and full attention"
"$K3" layout --target kimi-k3 --draft dspark-gqa-window --platform all
"$K3" layout --target kimi-k3 --draft dspark-gqa-full --platform all
