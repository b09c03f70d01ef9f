#!/usr/bin/env bash
# Create or complete .venv: torch first and by itself, then this project held to that torch.
#
#   PYTHON           interpreter that creates .venv, 3.10 or newer   (python3)
#   TORCH_SPEC       what to install if .venv has no torch >= 2.11   (torch==2.13.0)
#   TORCH_INDEX_URL  package index for torch alone                   (pip's own)
#
# Without a GPU, give TORCH_INDEX_URL the index of CPU wheels that pytorch.org/get-started names, unless pip is set up
# to find CPU wheels anyway: on Linux the default torch brings gigabytes of CUDA libraries.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

python=${PYTHON:-python3}
torch_spec=${TORCH_SPEC:-torch==2.13.0}
torch_index_url=${TORCH_INDEX_URL:-}
venv_python=.venv/bin/python
export PIP_DISABLE_PIP_VERSION_CHECK=1

has_torch() { # has_torch PYTHON: it imports a torch of at least 2.11
    "$1" -c '
import torch
raise SystemExit(tuple(map(int, torch.__version__.split(".")[:2])) < (2, 11))' >/dev/null 2>&1
}

has_nvidia_gpu() { [ -e /dev/nvidia0 ] || nvidia-smi -L >/dev/null 2>&1; }

pip_install() {
    if "$venv_python" -c 'import pip' 2>/dev/null; then
        "$venv_python" -m pip install -qq "$@"
    else # the venv could not be given a pip of its own; the outer one can serve it
        "$python" -m pip --python "$venv_python" install -qq "$@"
    fi
}

if ! "$venv_python" -c '' 2>/dev/null; then
    if ! "$python" -c 'import sys; raise SystemExit(sys.version_info < (3, 10))'; then
        echo "setup: $python is $("$python" --version 2>&1), shardmuon needs 3.10 or newer: make PYTHON=python3.11 setup" >&2
        exit 1
    fi
    echo "setup: creating .venv with $("$python" --version)"
    options=()
    if has_nvidia_gpu && has_torch "$python"; then
        options=(--system-site-packages) # a GPU image with its own build of torch: use that one
    fi
    rm -rf .venv
    "$python" -m venv ${options[@]+"${options[@]}"} .venv >/dev/null 2>&1 ||
        "$python" -m venv --clear --without-pip ${options[@]+"${options[@]}"} .venv # Debian's python3 without python3-venv
fi

if ! has_torch "$venv_python"; then
    echo "setup: installing $torch_spec"
    if [ -z "$torch_index_url" ] && [ "$(uname -s)-$(uname -m)" = Linux-x86_64 ] && ! has_nvidia_gpu; then
        echo "setup: no NVIDIA GPU found; if CUDA packages are now downloaded, stop and give the index of CPU wheels:" \
            "make TORCH_INDEX_URL=... setup" >&2
    fi
    pip_install ${torch_index_url:+--index-url "$torch_index_url"} "$torch_spec"
fi

# Whatever the rest depends on, this torch stays.
"$venv_python" -c 'import torch; print(f"torch=={torch.__version__}")' >.venv/torch-constraint.txt
echo "setup: installing shardmuon and its tools beside $(cat .venv/torch-constraint.txt)"
pip_install --constraint .venv/torch-constraint.txt --editable '.[dev]'
