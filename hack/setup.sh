#!/usr/bin/env bash
# Prepares a Debian machine with Python >= 3.11: system packages, .venv with the locked dependencies, and this project
# as an editable install. Does nothing, in well under a second, when nothing has changed, and needs no network for what
# an earlier set-up on this machine has fetched.
#
#   hack/setup.sh            everything
#   hack/setup.sh python     only .venv (no root needed)
#   hack/setup.sh environment NAME
#                            .venv-NAME with what requirements/NAME.txt locks (torchtitan, peers): what cannot stand
#                            beside the packages of .venv
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
cd "$root"
venv=$root/.venv
lock=requirements/dev.txt
if [ "${1:-}" = environment ]; then
    venv=$root/.venv-${2:?the name of an environment, as in requirements/NAME.txt}
    lock=requirements/$2.txt
    [ -e "$lock" ] || { printf 'setup: no environment %s: there is no %s\n' "$2" "$lock" >&2; exit 1; }
fi
uv_lock=requirements/uv.txt
cache=${RTJ_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/rtj}
uv=$cache/uv/$(sha256sum "$uv_lock" | cut -c1-16)/uv
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

# uv's own hash is checked before it checks the others. It is kept by its lock, outside the checkout.
install_uv() {
    local apart
    if "$uv" --version >/dev/null 2>&1; then return; fi
    mkdir -p "${uv%/*}"
    apart=$(mktemp -d "${uv%/*}/new.XXXXXX")
    "$(find_python)" -m venv "$apart"
    if "$apart/bin/python" -m pip install --quiet --disable-pip-version-check --require-hashes -r "$uv_lock"; then
        mv "$apart/bin/uv" "$uv"
    fi
    rm -rf "$apart"
    "$uv" --version >/dev/null 2>&1 || die "uv is not installed: the package index did not give what $uv_lock names (see above)"
}

# A virtual environment that was moved or whose interpreter has gone is made again.
fingerprint() {
    { cat "$uv_lock" "$lock" pyproject.toml hatch_build.py trainer_sidecar/train/mix.c hack/setup.sh; printf '%s\n' "$venv"; readlink -f "$venv/bin/python"; } | sha256sum | cut -d' ' -f1
}

# Hard links make 5 GB of wheels an installation of seconds; across file systems they cannot be had.
link_mode() {
    local wheels
    wheels=$("$uv" cache dir) && mkdir -p "$wheels"
    if [ "$(stat -c %d "$wheels")" = "$(stat -c %d "$venv")" ]; then echo hardlink; else echo copy; fi
}

# Compiled here, once: where PYTHONDONTWRITEBYTECODE is set each import of torch would compile it, seconds of it.
sync_python() { "$uv" pip sync --quiet --compile-bytecode --python "$venv/bin/python" --require-hashes "$@" "$lock"; }

# An environment without hatchling holds no build of this project: it finds the checkout by its path.
install_project() {
    if [ "$lock" = requirements/dev.txt ]; then
        "$uv" pip install --quiet --offline --python "$venv/bin/python" --no-deps --no-build-isolation --editable .
    else
        printf '%s\n' "$root" "$root/operator" > "$("$venv/bin/python" -c 'import site; print(site.getsitepackages()[0])')/project.pth"
    fi
}

install_python() {
    local python
    # uv is a link into the cache, which may have been cleared.
    if [ -x "$venv/bin/python" ] && [ -x "$venv/bin/uv" ] && [ "$(cat "$stamp" 2>/dev/null)" = "$(fingerprint)" ]; then return; fi
    rm -f "$stamp"
    if ! "$venv/bin/python" -c '' 2>/dev/null; then
        python=$(find_python)
        say "making ${venv##*/} with $("$python" --version)"
        "$python" -m venv --clear "$venv"
    fi
    install_uv
    export UV_PYTHON_DOWNLOADS=never UV_SYSTEM_CERTS=${UV_SYSTEM_CERTS:-1} UV_LINK_MODE=${UV_LINK_MODE:-$(link_mode)}
    say "installing $(grep -c '^[a-z].*==' "$lock") locked packages"
    # The lock's hashes name the same files in the cache as in the index, and the cache asks nobody.
    sync_python --offline 2>/dev/null || sync_python
    install_project
    ln -sfn "$uv" "$venv/bin/uv"
    fingerprint > "$stamp"
}

exec 9<"$root"   # one setup at a time in one checkout
if command -v flock >/dev/null; then flock 9; fi
case ${1:-all} in
    all) install_packages; install_python ;;
    python | environment) install_python ;;
    *) die "unknown part '$1': say nothing, 'python', or 'environment NAME'" ;;
esac
