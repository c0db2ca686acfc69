#!/usr/bin/env bash
# Compiles requirements/*.txt from pyproject.toml, pinned by hash for every platform and Python that the project supports.
# Pins stay as they are unless the sources forbid it; `make lock UPGRADE=1` takes the newest versions.
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.."
compile() {
    local out=$1
    shift
    .venv/bin/uv pip compile --quiet --universal --python-version 3.11 --generate-hashes --no-emit-index-url --no-header \
        ${UPGRADE:+--upgrade} "$@" --output-file "requirements/$out"
    sed -i "1i # Compiled from pyproject.toml by \`make lock\`. Do not edit." "requirements/$out"
}

export UV_SYSTEM_CERTS=${UV_SYSTEM_CERTS:-1}
compile uv.txt --group uv   # nothing of the project's own beside it
compile peers.txt --group peers
compile dev.txt pyproject.toml --extra operator --extra train --group dev
compile torchtitan.txt pyproject.toml --extra train --group torchtitan
unset UPGRADE   # the images get exactly the versions that the tests ran with
compile operator.txt pyproject.toml --extra operator --constraints requirements/dev.txt --no-annotate
compile sidecar.txt pyproject.toml --constraints requirements/dev.txt --no-annotate
compile trainer.txt pyproject.toml --extra train --constraints requirements/dev.txt --no-annotate
