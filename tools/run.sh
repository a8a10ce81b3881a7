#!/usr/bin/env bash
# The main job, from nothing: sets up an environment, shows how Kimi-K3 and its DSpark drafts are
# grouped on AMD and on NVIDIA, what a bad draft would cost and why, and lets vLLM's CPU engine
# generate through this package's plan and decode, compared with vLLM's own.
#
#   tools/run.sh                   all of it
#   tools/run.sh --without-engine  the groups alone, in half a minute
. "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
engine=1
case "${1:-}" in
  "") ;;
  --without-engine) engine=0 ;;
  *) say "unknown option $1; see the head of tools/run.sh"; exit 2 ;;
esac
environment_base
K3="$VENV/bin/k3backend"

say "Kimi-K3 with a DSpark MLA draft: TP 8, fp8 cache, 7 draft tokens, 1,048,576 tokens"
"$K3" layout --target kimi-k3 --draft dspark-mla --tp 8 --kv-dtype fp8 --spec-tokens 7 \
  --max-model-len 1048576 --platform all

say "the same with a draft that does not declare its replication, as vLLM's planner groups it"
"$K3" layout --target kimi-k3 --draft dspark-mla --draft-max-tp-shards none --policy vllm \
  --platform rocm
"$K3" explain --target kimi-k3 --draft dspark-mla --draft-max-tp-shards none --policy vllm \
  --platform rocm

say "GQA drafts: sliding window, and full attention"
"$K3" layout --target kimi-k3 --draft dspark-gqa-window --platform all
"$K3" layout --target kimi-k3 --draft dspark-gqa-full --platform all

if [ "$engine" = 0 ]; then exit 0; fi
if ! environment_vllm_engine; then
  say "left out: vLLM's CPU engine. Everything above is done."
  exit 0
fi
say "vLLM's CPU engine through this package's plan and decode, and through its own"
"$PY" tools/cpu_engine.py
