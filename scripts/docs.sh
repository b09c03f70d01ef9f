#!/usr/bin/env bash
# The documentation site, in an environment of its own (.venv-docs, without torch; Python 3.11.5 or newer).
#
#   scripts/docs.sh          build it, with every link checked, and serve it on http://127.0.0.1:8000
#   scripts/docs.sh build    build it to build/site
#   scripts/docs.sh test     build it and open it in a headless Chromium (the system's, e.g. Debian's package chromium)
#   scripts/docs.sh test --if-possible   no failure if the environment or Chromium cannot be had: the reason is printed
set -u
cd "$(dirname "${BASH_SOURCE[0]}")/.."

what=${1:-serve}
if_possible=${2:-}
venv=.venv-docs
ready="$venv/.ready"
export PIP_DISABLE_PIP_VERSION_CHECK=1 NO_MKDOCS_2_WARNING=1

cannot() { # reason
    echo "docs: NOT RUN: $1"
    [ "$if_possible" = --if-possible ] && exit 0
    exit 1
}

if [ ! "$ready" -nt scripts/docs-requirements.txt ]; then
    "${PYTHON:-python3}" -m venv "$venv" || cannot "no virtual environment could be made"
    "$venv/bin/python" -m pip install -qq --requirement scripts/docs-requirements.txt || cannot "pip could not install scripts/docs-requirements.txt"
    touch "$ready"
fi

case "$what" in
    serve) "$venv/bin/mkdocs" build --strict --quiet && exec "$venv/bin/mkdocs" serve --strict ;;
    build) exec "$venv/bin/mkdocs" build --strict ;;
    test)
        "$venv/bin/mkdocs" build --strict --quiet || exit 1
        chromium=$(command -v chromium || command -v chromium-browser || command -v google-chrome)
        if [ -z "$chromium" ] && [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
            apt-get install -y -qq chromium >/dev/null 2>&1
            chromium=$(command -v chromium)
        fi
        [ -n "$chromium" ] || cannot "the site builds, but there is no Chromium to open it with"
        CHROMIUM="$chromium" exec "$venv/bin/python" -m pytest -q -c /dev/null --rootdir tests/site --noconftest -p no:cacheprovider tests/site
        ;;
    *) echo "docs: $what is none of serve, build, test" >&2; exit 2 ;;
esac
