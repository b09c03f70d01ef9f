#!/usr/bin/env bash
# The tests with real swap files. They need DeepSpeed's async_io, which takes libaio, a C++ compiler and some minutes;
# what was compiled once is used again. With --if-possible it is no failure if they cannot run: the reason is printed.
set -u
cd "$(dirname "${BASH_SOURCE[0]}")/.."

bin="$PWD/.venv/bin"
export PATH="$bin:$PATH" DS_ACCELERATOR=cpu OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"

cannot() { # reason
    echo "nvme: NOT RUN: $1"
    [ "${possible:-}" ] && exit 0
    exit 1
}

possible=
[ "${1:-}" = --if-possible ] && possible=yes

python -c 'import deepspeed' 2>/dev/null || cannot "DeepSpeed is not installed in .venv"
command -v "${CXX:-c++}" >/dev/null || cannot "there is no C++ compiler (${CXX:-c++}) to compile DeepSpeed's async_io with"
command -v ninja >/dev/null || cannot "there is no ninja to compile DeepSpeed's async_io with"

has_libaio() {
    echo 'int io_submit(void); int main() { return io_submit(); }' | "${CXX:-c++}" -x c - -laio -o /dev/null 2>/dev/null &&
        echo '#include <libaio.h>' | "${CXX:-c++}" -x c++ -fsyntax-only - 2>/dev/null
}

if ! has_libaio; then
    root=()
    [ "$(id -u)" = 0 ] || root=(sudo -n)
    echo "nvme: installing libaio-dev"
    { "${root[@]}" apt-get update -qq && "${root[@]}" apt-get install -y -qq libaio-dev; } >/dev/null 2>&1
    has_libaio || cannot "there is no libaio, and it could not be installed: apt-get install libaio-dev, as root"
fi

# A compilation that was killed leaves a lock for which the next one would wait.
cache="${TORCH_EXTENSIONS_DIR:-$HOME/.cache/torch_extensions}"
if ! pgrep -x ninja >/dev/null; then
    find "$cache" -path '*async_io/lock' -delete -o -path '*pin_memory/lock' -delete 2>/dev/null
fi

echo "nvme: async_io, compiled if it is not yet (5 minutes or more)"
load='from deepspeed.ops.op_builder import AsyncIOBuilder; AsyncIOBuilder().load()'
log="$(mktemp)"
trap 'rm -f "$log"' EXIT
if ! timeout "${NVME_BUILD_TIMEOUT:-1800}" python -c "$load" >"$log" 2>&1; then
    tail -n 20 "$log"
    cannot "DeepSpeed's async_io does not compile here, see above"
fi

SHARDMUON_NVME=1 python -m pytest -s tests/frameworks/test_deepspeed_nvme.py
