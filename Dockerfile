# simpar with its data and the local page; no GPU, no clone needed at run time.
#   docker build -t simpar . && docker run --rm simpar simulate llama3.1-405b_h100x16384_tp8pp16
#   docker run --rm -p 8050:8050 simpar serve --host 0.0.0.0 --port 8050
FROM python:3.11-slim
COPY . /src
RUN pip install --no-cache-dir "/src[ui]" && rm -rf /src && useradd --create-home user
USER user
WORKDIR /home/user
ENTRYPOINT ["simpar"]
