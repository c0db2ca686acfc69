# Images of the project. Targets: operator, sidecar, and trainer, a base for users' own images: torch and the training
# library. The first two hold no torch. The launcher comes from the sidecar through the shared volume.
#
#   docker build --target operator -t rtj-operator .
#   docker build --target sidecar  -t rtj-sidecar .
#   docker build --target trainer  -t rtj-trainer .
#   docker build --target trainer-from-base -t rtj-trainer --build-arg BASE_IMAGE=pytorch/pytorch:latest .
#
# The last one leaves Python and torch as the base image has them, and adds the library and its small dependencies.
#
# A release adds --build-arg REVISION=$(git rev-parse HEAD) --build-arg SOURCE=<address of the repository>. Each image holds
# its bill of materials (CycloneDX, JSON) in /sbom/, proven against what is installed in it.
ARG BASE_IMAGE=python:3.12-slim-bookworm
ARG VERSION=0.1.0
ARG REVISION=""
ARG SOURCE=""

FROM ${BASE_IMAGE} AS base
ENV PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 PATH=/opt/rtj/bin:$PATH

FROM base AS build-sidecar
COPY requirements/sidecar.txt /src/requirements/
RUN python3 -m venv /opt/rtj \
 && /opt/rtj/bin/pip install --no-cache-dir --disable-pip-version-check --require-hashes -r /src/requirements/sidecar.txt
COPY trainer_sidecar /src/trainer_sidecar
COPY hack/release /src/hack/release
# The package is copied, not built: the image needs no build backend, and its bytes are those of the checkout. Only what
# the sidecar runs: the ranks' library needs torch, and the command `rtj` the operator's models.
RUN site=$(/opt/rtj/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))') \
 && mkdir -p "$site/trainer_sidecar" \
 && cd /src/trainer_sidecar && cp -r __init__.py launch.py contract sidecar store "$site/trainer_sidecar/" \
 && /opt/rtj/bin/python -m compileall -q "$site" \
 && /opt/rtj/bin/pip uninstall -q -y setuptools pip \
 && cd /src && mkdir sbom \
 && /opt/rtj/bin/python -m hack.release.sbom requirements/sidecar.txt --name rtj-sidecar --installed > sbom/rtj-sidecar.cdx.json

FROM base AS build-operator
COPY requirements/operator.txt /src/requirements/
RUN python3 -m venv /opt/rtj \
 && /opt/rtj/bin/pip install --no-cache-dir --disable-pip-version-check --require-hashes -r /src/requirements/operator.txt
COPY trainer_sidecar /src/trainer_sidecar
COPY operator/rtj_operator /src/rtj_operator
COPY hack/release /src/hack/release
RUN site=$(/opt/rtj/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))') \
 && mkdir -p "$site/trainer_sidecar" \
 && cp -r /src/trainer_sidecar/__init__.py /src/trainer_sidecar/contract /src/trainer_sidecar/store "$site/trainer_sidecar/" \
 && cp -r /src/rtj_operator "$site/" \
 && /opt/rtj/bin/python -m compileall -q "$site" \
 && /opt/rtj/bin/pip uninstall -q -y setuptools pip \
 && cd /src && mkdir sbom \
 && /opt/rtj/bin/python -m hack.release.sbom requirements/operator.txt --name rtj-operator --installed > sbom/rtj-operator.cdx.json

FROM base AS runtime
# Python's own modules come uncompiled in its official images, and a read-only root keeps none that are compiled later:
# each start of a sidecar would compile a hundred of them, half a second.
RUN python3 -m compileall -q -x '/(ensurepip|idlelib|lib2to3|site-packages|test|tests|tkinter|turtledemo)/' \
    "$(python3 -c 'import sysconfig; print(sysconfig.get_path("stdlib"))')"

FROM runtime AS sidecar
ARG VERSION
ARG REVISION
ARG SOURCE
LABEL org.opencontainers.image.title="rtj-sidecar" \
      org.opencontainers.image.description="Checkpoint sidecar of ResumableTrainingJob: uploads, verifies, commits, restores" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}" \
      org.opencontainers.image.source="${SOURCE}" \
      org.opencontainers.image.licenses="Apache-2.0"
COPY --from=build-sidecar /opt/rtj /opt/rtj
COPY --from=build-sidecar /src/sbom /sbom
COPY LICENSE /licenses/LICENSE
USER 65532:65532
# A process with the id 1 never gets a signal that it does not handle yet: a pod deleted while Python starts would keep its
# GPUs for the whole grace period. What is blocked waits instead, and the sidecar takes it when it is up.
ENTRYPOINT ["env", "--block-signal=TERM,INT", "python3", "-m", "trainer_sidecar.sidecar"]

FROM runtime AS operator
ARG VERSION
ARG REVISION
ARG SOURCE
LABEL org.opencontainers.image.title="rtj-operator" \
      org.opencontainers.image.description="Kubernetes operator for ResumableTrainingJob" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}" \
      org.opencontainers.image.source="${SOURCE}" \
      org.opencontainers.image.licenses="Apache-2.0"
# Python's lock lets one thread allocate at a time: more than two of glibc's arenas only keep memory, 30 MB of it.
ENV MALLOC_ARENA_MAX=2
COPY --from=build-operator /opt/rtj /opt/rtj
COPY --from=build-operator /src/sbom /sbom
COPY LICENSE /licenses/LICENSE
USER 65532:65532
ENTRYPOINT ["python3", "-m", "rtj_operator.main"]

FROM base AS digest-loop
# The inner loop of the state digest, as hatch_build.py compiles it. Where no compiler can be had it is left out, and numpy
# computes the same digests in five times the time.
COPY trainer_sidecar/train/mix.c /src/
RUN mkdir /src/made && { command -v cc \
    || { apt-get -qq update && apt-get -qq install -y --no-install-recommends gcc libc6-dev; } ; } >/dev/null 2>&1 \
 && cc -O3 -std=gnu11 -shared -fPIC -nostartfiles -nodefaultlibs -o /src/made/libmix.so /src/mix.c -lgcc \
 || echo "no C compiler: the state digest is numpy's" >&2

FROM base AS library
COPY requirements/sidecar.txt requirements/trainer.txt /src/requirements/
COPY trainer_sidecar /src/trainer_sidecar
COPY --from=digest-loop /src/made/ /src/trainer_sidecar/train/
COPY hack/release /src/hack/release
# What runs in the ranks; and `store`, for containers beside them that bring something to the store.
RUN mkdir -p /src/library/trainer_sidecar && cd /src/trainer_sidecar \
 && cp -r __init__.py py.typed launch.py contract train dcp integrations store /src/library/trainer_sidecar/

FROM runtime AS trainer
# Installed here and not in a stage of its own: copied layers of gigabytes take minutes and the room twice. pip stays, for
# what users add.
COPY requirements/trainer.txt /tmp/rtj/
RUN python3 -m venv /opt/rtj \
 && pip install --no-cache-dir --disable-pip-version-check --require-hashes -r /tmp/rtj/trainer.txt
# Copied, though it is removed again: buildah does not see that what is behind a bind mount has changed, and would take an
# older library from its cache.
COPY --from=library /src /tmp/rtj
RUN site=$(python3 -c 'import sysconfig; print(sysconfig.get_path("purelib"))') \
 && cp -r /tmp/rtj/library/trainer_sidecar "$site/" && python3 -m compileall -q "$site/trainer_sidecar" \
 && mkdir /sbom && cd /tmp/rtj \
 && python3 -m hack.release.sbom requirements/trainer.txt --name rtj-trainer --installed --beside pip \
    > /sbom/rtj-trainer.cdx.json \
 && rm -r /tmp/rtj
ARG VERSION
ARG REVISION
ARG SOURCE
LABEL org.opencontainers.image.title="rtj-trainer" \
      org.opencontainers.image.description="torch and the training library of ResumableTrainingJob, to build images on" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}" \
      org.opencontainers.image.source="${SOURCE}" \
      org.opencontainers.image.licenses="Apache-2.0"
COPY LICENSE /licenses/LICENSE
# The user below has no entry in /etc/passwd, and torch's compiler asks for a name and a home.
ENV USER=trainer HOME=/tmp
WORKDIR /workspace
USER 65532:65532
CMD ["python3"]

FROM ${BASE_IMAGE} AS trainer-from-base
ENV PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
# The base may pin by PIP_CONSTRAINT what the lock pins by hash, and pip takes no both. Debian's Python wants to be told
# that an image is not a system that somebody administers.
COPY requirements/sidecar.txt /tmp/rtj/
RUN env -u PIP_CONSTRAINT PIP_BREAK_SYSTEM_PACKAGES=1 \
    python3 -m pip install --no-cache-dir --disable-pip-version-check --require-hashes -r /tmp/rtj/sidecar.txt
COPY --from=library /src /tmp/rtj
RUN site=$(python3 -c 'import sysconfig; print(sysconfig.get_path("purelib"))') \
 && cp -r /tmp/rtj/library/trainer_sidecar "$site/" && python3 -m compileall -q "$site/trainer_sidecar" \
 && mkdir -p /sbom && cd /tmp/rtj \
 && python3 -m hack.release.sbom requirements/sidecar.txt --name rtj-trainer --installed --among-others \
    > /sbom/rtj-trainer.cdx.json \
 && rm -r /tmp/rtj
ARG VERSION
ARG REVISION
ARG SOURCE
LABEL org.opencontainers.image.title="rtj-trainer" \
      org.opencontainers.image.description="the training library of ResumableTrainingJob beside the base image's own torch" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}" \
      org.opencontainers.image.source="${SOURCE}" \
      org.opencontainers.image.licenses="Apache-2.0"
COPY LICENSE /licenses/LICENSE
ENV USER=trainer HOME=/tmp
WORKDIR /workspace
USER 65532:65532
CMD ["python3"]
