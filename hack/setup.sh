#!/usr/bin/env bash
# Prepares a Debian machine with Python >= 3.11: system packages, .venv with the locked dependencies, and this project
# as an editable install. Does nothing, in well under a second, when nothing has changed.
#
#   hack/setup.sh            everything
#   hack/setup.sh python     only .venv (no root needed)
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
cd "$root"
venv=$root/.venv
lock=requirements/dev.txt
stamp=$venv/.setup-stamp

die() { printf 'setup: %s\n' "$*" >&2; exit 1; }
say() { printf 'setup: %s\n' "$*" >&2; }

wanted_packages() {
    local list
    for list in hack/packages.txt hack/cluster/packages.txt; do
        if [ -e "$list" ]; then sed 's/#.*//' "$list"; fi
    done | tr -s '[:space:]' '\n' | sed '/^$/d' | sort -u
}

missing_packages() {
    local name
    wanted_packages | while read -r name; do
        case $(dpkg-query -W -f='${db:Status-Abbrev}' "$name" 2>/dev/null) in
            ii*) ;;
            *) printf '%s\n' "$name" ;;
        esac
    done
}

install_packages() {
    local missing
    if ! command -v dpkg-query >/dev/null; then
        say "no dpkg here: install what hack/packages.txt and hack/cluster/packages.txt name by hand"
        return
    fi
    missing=$(missing_packages | xargs)
    [ -n "$missing" ] || return 0
    [ "$(id -u)" = 0 ] || die "these Debian packages are missing; as root: apt-get install --no-install-recommends $missing"
    say "installing $missing"
    export DEBIAN_FRONTEND=noninteractive
    apt-get -qq -o DPkg::Lock::Timeout=300 update
    # shellcheck disable=SC2086  # one word per package
    apt-get -qq -y -o DPkg::Lock::Timeout=300 install --no-install-recommends $missing >/dev/null
}

# The first interpreter that is new enough and can make virtual environments; a pyenv shim may be neither.
find_python() {
    local candidate
    for candidate in python3 python3.13 python3.12 python3.11 python3.14 "$HOME"/.pyenv/versions/*/bin/python3; do
        candidate=$(command -v "$candidate" 2>/dev/null) || continue
        if "$candidate" -c 'import sys, ensurepip, venv; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            printf '%s\n' "$candidate"
            return
        fi
    done
    die "no Python >= 3.11 with the venv module: not python3 in PATH, not python3.11 to python3.14, not under ~/.pyenv"
}

# uv itself comes from the lock too, so its hash is checked before it checks the others.
uv_requirement() { awk '/^uv==/ {found = 1; print; next} found && /^[^ ]/ {exit} found' "$lock"; }

# A virtual environment that was moved or whose interpreter has gone is made again.
fingerprint() {
    { cat "$lock" pyproject.toml hack/setup.sh; printf '%s\n' "$venv"; readlink -f "$venv/bin/python"; } | sha256sum | cut -d' ' -f1
}

# Hard links make 5 GB of wheels an installation of seconds; across file systems they cannot be had.
link_mode() {
    local cache
    cache=$("$venv/bin/uv" cache dir) && mkdir -p "$cache"
    if [ "$(stat -c %d "$cache")" = "$(stat -c %d "$venv")" ]; then echo hardlink; else echo copy; fi
}

install_python() {
    local python
    if [ -x "$venv/bin/python" ] && [ "$(cat "$stamp" 2>/dev/null)" = "$(fingerprint)" ]; then return; fi
    rm -f "$stamp"
    if ! "$venv/bin/uv" --version >/dev/null 2>&1 || ! "$venv/bin/python" -c '' 2>/dev/null; then
        python=$(find_python)
        say "making .venv with $("$python" --version)"
        "$python" -m venv --clear "$venv"
        uv_requirement > "$venv/uv.txt"
        "$venv/bin/python" -m pip install --quiet --disable-pip-version-check --require-hashes -r "$venv/uv.txt"
    fi
    export UV_PYTHON_DOWNLOADS=never UV_SYSTEM_CERTS=${UV_SYSTEM_CERTS:-1} UV_LINK_MODE=${UV_LINK_MODE:-$(link_mode)}
    say "installing $(grep -c '^[a-z].*==' "$lock") locked packages"
    "$venv/bin/uv" pip sync --quiet --python "$venv/bin/python" --require-hashes "$lock"
    "$venv/bin/uv" pip install --quiet --python "$venv/bin/python" --no-deps --no-build-isolation --editable .
    fingerprint > "$stamp"
}

exec 9<"$root"   # one setup at a time in one checkout
if command -v flock >/dev/null; then flock 9; fi
case ${1:-all} in
    all) install_packages; install_python ;;
    python) install_python ;;
    *) die "unknown part '$1': say nothing, or 'python'" ;;
esac
