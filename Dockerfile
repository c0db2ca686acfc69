# Images of the project. Targets: operator, sidecar. Neither holds torch; users' trainer images need only Python and
# the training library, because the launcher comes from the sidecar through the shared volume.
#
#   docker build --target operator -t rtj-operator .
#   docker build --target sidecar  -t rtj-sidecar .
ARG BASE_IMAGE=python:3.12-slim-bookworm

FROM ${BASE_IMAGE} AS base
ENV PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 PATH=/opt/rtj/bin:$PATH

FROM base AS build-sidecar
COPY requirements/sidecar.txt /src/requirements/
RUN python3 -m venv /opt/rtj \
 && /opt/rtj/bin/pip install --no-cache-dir --disable-pip-version-check --require-hashes -r /src/requirements/sidecar.txt
COPY trainer_sidecar /src/trainer_sidecar
# The package is copied, not built: the image needs no build backend, and its bytes are those of the checkout.
RUN site=$(/opt/rtj/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))') \
 && cp -r /src/trainer_sidecar "$site/" \
 && rm -rf "$site/trainer_sidecar/train" "$site/trainer_sidecar/integrations" \
 && /opt/rtj/bin/python -m compileall -q "$site" \
 && /opt/rtj/bin/pip uninstall -q -y pip

FROM base AS build-operator
COPY requirements/operator.txt /src/requirements/
RUN python3 -m venv /opt/rtj \
 && /opt/rtj/bin/pip install --no-cache-dir --disable-pip-version-check --require-hashes -r /src/requirements/operator.txt
COPY trainer_sidecar /src/trainer_sidecar
COPY operator/rtj_operator /src/rtj_operator
RUN site=$(/opt/rtj/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))') \
 && mkdir -p "$site/trainer_sidecar" \
 && cp -r /src/trainer_sidecar/__init__.py /src/trainer_sidecar/contract /src/trainer_sidecar/store "$site/trainer_sidecar/" \
 && cp -r /src/rtj_operator "$site/" \
 && /opt/rtj/bin/python -m compileall -q "$site" \
 && /opt/rtj/bin/pip uninstall -q -y pip

FROM base AS sidecar
LABEL org.opencontainers.image.title="rtj-sidecar" \
      org.opencontainers.image.description="Checkpoint sidecar of ResumableTrainingJob: uploads, verifies, commits, restores" \
      org.opencontainers.image.licenses="Apache-2.0"
COPY --from=build-sidecar /opt/rtj /opt/rtj
COPY LICENSE /licenses/LICENSE
USER 65532:65532
ENTRYPOINT ["python3", "-m", "trainer_sidecar.sidecar"]

FROM base AS operator
LABEL org.opencontainers.image.title="rtj-operator" \
      org.opencontainers.image.description="Kubernetes operator for ResumableTrainingJob" \
      org.opencontainers.image.licenses="Apache-2.0"
COPY --from=build-operator /opt/rtj /opt/rtj
COPY LICENSE /licenses/LICENSE
USER 65532:65532
ENTRYPOINT ["python3", "-m", "rtj_operator.main"]
