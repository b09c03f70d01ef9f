#!/usr/bin/env bash
# The tests on models of transformers, timm, torchvision and peft, in an environment of their own, .venv-zoo: torch first
# and by itself, then the rest held to that torch, so that nothing pulls another. With --if-possible it is no failure if
# it cannot be made: the reason is printed.
#
#   PYTHON           interpreter that creates .venv-zoo                 (python3)
#   ZOO_TORCH_SPEC   the torch to install there                         (torch==2.13.0)
#   TORCH_INDEX_URL  package index for torch alone                      (pip's own)
set -u
cd "$(dirname "${BASH_SOURCE[0]}")/.."

python=${PYTHON:-python3}
torch_spec=${ZOO_TORCH_SPEC:-torch==2.13.0}
venv=.venv-zoo
export PIP_DISABLE_PIP_VERSION_CHECK=1 OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" DS_ACCELERATOR=cpu

possible=
[ "${1:-}" = --if-possible ] && possible=yes

cannot() { # reason
    echo "zoo: NOT RUN: $1"
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

if ! [ "$venv/.ready" -nt pyproject.toml ] || ! [ "$venv/.ready" -nt scripts/zoo.sh ]; then
    if ! "$venv/bin/python" -c '' 2>/dev/null; then
        echo "zoo: creating $venv"
        rm -rf "$venv"
        "$python" -m venv "$venv" >/dev/null 2>&1 || "$python" -m venv --clear --without-pip "$venv" ||
            cannot "$python cannot create a virtual environment"
    fi
    if ! "$venv/bin/python" -c 'import torch' 2>/dev/null; then
        echo "zoo: installing $torch_spec"
        pip_install ${TORCH_INDEX_URL:+--index-url "$TORCH_INDEX_URL"} "$torch_spec" || cannot "no $torch_spec, see above"
    fi
    "$venv/bin/python" -c 'from importlib.metadata import version; print("torch==" + version("torch"))' \
        >"$venv/torch-constraint.txt" || cannot "the torch in $venv cannot be imported"
    echo "zoo: installing transformers, timm, torchvision and peft beside $(cat "$venv/torch-constraint.txt")"
    pip_install -c "$venv/torch-constraint.txt" --editable '.[zoo]' || cannot "pip could not install them, see above"
    touch "$venv/.ready"
fi

"$venv/bin/python" -m pytest tests/zoo
