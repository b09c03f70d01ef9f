#!/usr/bin/env bash
# The tests with other libraries, in an environment of their own, .venv-stack: torch first and by itself, then the rest
# held to that torch, so that nothing pulls another. With --if-possible it is no failure if it cannot be made: the reason
# is printed.
#
#   stack.sh stack [--if-possible]    tests/stack: the examples
#   stack.sh zoo [--if-possible]      tests/zoo: routing of the libraries' models
#
#   PYTHON           interpreter that creates the environment    (python3)
#   TORCH_SPEC       the torch to install there                  (torch==2.13.0)
#   TORCH_INDEX_URL  package index for torch alone               (pip's own)
set -u
cd "$(dirname "${BASH_SOURCE[0]}")/.."

name=$1
python=${PYTHON:-python3}
torch_spec=${TORCH_SPEC:-torch==2.13.0}
venv=.venv-stack
ready=$venv/.ready
export PIP_DISABLE_PIP_VERSION_CHECK=1 OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" DS_ACCELERATOR=cpu

possible=
[ "${2:-}" = --if-possible ] && possible=yes

cannot() { # reason
    echo "$name: NOT RUN: $1"
    [ "$possible" ] && exit 0
    exit 1
}

pip_install() {
    if "$venv/bin/python" -c 'import pip' 2>/dev/null; then
        "$venv/bin/python" -m pip install -qq "$@"
    else # the venv could not be given a pip of its own; the outer one can serve it
        "$python" -m pip --python "$venv/bin/python" install -qq "$@"
    fi
}

if ! [ "$ready" -nt pyproject.toml ] || ! [ "$ready" -nt scripts/stack.sh ]; then
    if ! "$venv/bin/python" -c '' 2>/dev/null; then
        echo "$name: creating $venv"
        rm -rf "$venv"
        "$python" -m venv "$venv" >/dev/null 2>&1 || "$python" -m venv --clear --without-pip "$venv" ||
            cannot "$python cannot create a virtual environment"
    fi
    if ! "$venv/bin/python" -c 'import torch' 2>/dev/null; then
        echo "$name: installing $torch_spec"
        pip_install ${TORCH_INDEX_URL:+--index-url "$TORCH_INDEX_URL"} "$torch_spec" || cannot "no $torch_spec, see above"
    fi
    "$venv/bin/python" -c 'from importlib.metadata import version; print("torch==" + version("torch"))' \
        >"$venv/torch-constraint.txt" || cannot "the torch in $venv cannot be imported"
    echo "$name: installing the extras 'stack' and 'zoo' beside $(cat "$venv/torch-constraint.txt")"
    pip_install --constraint "$venv/torch-constraint.txt" --editable '.[stack,zoo]' || cannot "pip could not install it, see above"
    # Beside a torch of TORCH_INDEX_URL, PyPI's torchvision cannot be imported. The examples and the tests call none of its
    # operators; their names are enough.
    packages=$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
    rm -f "$packages"/torchvision_names.p*
    if ! "$venv/bin/python" -c 'import torchvision' 2>/dev/null; then
        cp scripts/torchvision_names.py "$packages/" && echo 'import torchvision_names' >"$packages/torchvision_names.pth"
    fi
    # torchtitan asks for a `datasets` that trl no longer goes with; its optimizers need none. It comes last: pip would call
    # that a dependency conflict when it installs anything after it.
    pip_install tyro spmd_types && pip_install --no-deps torchtitan==0.3.0 ||
        echo "$name: no torchtitan, see above: its tests are skipped" >&2
    touch "$ready"
fi

"$venv/bin/python" -m pytest "tests/$name"
