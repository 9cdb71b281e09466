# simpar with its data and the local page; no GPU, no clone needed at run time.
#   docker build -t simpar . && docker run --rm simpar simulate llama3.1-405b_h100x16384_tp8pp16
#   docker run --rm -p 8050:8050 simpar serve --host 0.0.0.0 --port 8050
#   docker build --build-arg VERSION=1.2.3 -t simpar .                   # the image has no git to ask for its version
#   docker build --build-arg EXTRAS=ui,torch -t simpar-torch .           # for `simpar calibrate` and `validate cluster` on GPUs
FROM python:3.11-slim
ARG VERSION=""
ARG EXTRAS="ui"
COPY . /src
RUN if [ -n "$VERSION" ]; then export SETUPTOOLS_SCM_PRETEND_VERSION_FOR_SIMPAR="$VERSION"; fi \
  && pip install --no-cache-dir "/src[$EXTRAS]" && rm -rf /src && useradd --create-home --uid 1000 user
USER 1000
WORKDIR /home/user
ENTRYPOINT ["simpar"]
