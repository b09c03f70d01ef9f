#!/usr/bin/env bash
# Create or complete .venv: torch first and by itself, then this project held to that torch.
#
#   PYTHON           interpreter that creates .venv, 3.10 or newer   (python3)
#   TORCH_SPEC       what to install if .venv has no torch >= 2.11   (torch==2.13.0)
#   TORCH_INDEX_URL  package index for torch alone                   (pip's own)
#
# On Linux the default torch may be the CUDA build, with gigabytes of libraries. Without a GPU, give TORCH_INDEX_URL the
# index of CPU wheels that pytorch.org/get-started names; this script says so when it matters.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

python=${PYTHON:-python3}
torch_spec=${TORCH_SPEC:-torch==2.13.0}
torch_index_url=${TORCH_INDEX_URL:-}
venv_python=.venv/bin/python
ready=.venv/.ready
export PIP_DISABLE_PIP_VERSION_CHECK=1

[ "$ready" -nt pyproject.toml ] && [ "$ready" -nt scripts/setup_env.sh ] && exit

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

needs_cuda_packages() { # of what pip_install "$@" would install
    local report
    report=$(pip_install --dry-run --no-deps --report - "$@" 2>/dev/null) && [[ $report =~ \"(nvidia|cuda)- ]]
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
    from=(${torch_index_url:+--index-url "$torch_index_url"})
    if [ "$(uname -s)" = Linux ] && ! has_nvidia_gpu && needs_cuda_packages ${from[@]+"${from[@]}"} "$torch_spec"; then
        echo "setup: this is the CUDA build, gigabytes to download, and there is no NVIDIA GPU. To have the CPU build," \
            "stop now and run: make setup TORCH_INDEX_URL=<index of CPU wheels, see pytorch.org/get-started>" >&2
    fi
    pip_install ${from[@]+"${from[@]}"} "$torch_spec"
fi

# Whatever the rest depends on, this torch stays.
"$venv_python" -c 'from importlib.metadata import version; print("torch==" + version("torch"))' >.venv/torch-constraint.txt
echo "setup: installing shardmuon and its tools beside $(cat .venv/torch-constraint.txt)"
pip_install --constraint .venv/torch-constraint.txt --editable '.[dev]'

# For the tests on Megatron's own code. Alone (--no-deps), so that nothing brings another torch, and 0.19 on any Python:
# what its metadata rules out is an older one with which megatron-fsdp does not go. No wheel, no build: those tests skip.
echo "setup: installing megatron-core 0.19.0 and megatron-fsdp 0.6.1 for the tests that run on them"
pip_install --no-deps --only-binary :all: --ignore-requires-python megatron-core==0.19.0 &&
    pip_install --no-deps --only-binary :all: megatron-fsdp==0.6.1 einops packaging ||
    echo "setup: pip could not install them (its message is above): tests/frameworks/test_megatron* say so and skip what needs them" >&2
touch "$ready"
