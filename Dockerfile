# tokenmill on CPUs, with the API keys of a file (docs/deployment.md): docker build -t tokenmill . && docker run --read-only
#   --tmpfs /tmp --cap-drop ALL -p 127.0.0.1:8000:8000 -v models:/models -v ./api-keys.yaml:/run/secrets/api-keys:ro tokenmill
FROM python:3.12-slim AS build
RUN apt-get update && apt-get install --yes --no-install-recommends g++ && rm -rf /var/lib/apt/lists/*
WORKDIR /source
COPY . .
RUN pip wheel --no-cache-dir --no-deps --wheel-dir /wheels .

FROM python:3.12-slim
# libgomp: torch's threads. The index has builds of torch without CUDA.
RUN apt-get update && apt-get install --yes --no-install-recommends libgomp1 && rm -rf /var/lib/apt/lists/* \
  && useradd --create-home --uid 1000 tokenmill && install -d -o 1000 -g 1000 /models
COPY --from=build /wheels /wheels
RUN pip install --no-cache-dir --extra-index-url https://download.pytorch.org/whl/cpu \
  "$(echo /wheels/*.whl)[serve,torch,otel,redis]"
USER 1000:1000
ENV TOKENMILL_CACHE=/models PYTHONUNBUFFERED=1
VOLUME /models
EXPOSE 8000
# No curl in the image: Python asks. /readyz answers 200 only while the engine takes requests.
HEALTHCHECK --interval=15s --timeout=5s --start-period=300s \
  CMD ["python", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8000/readyz', timeout=4)"]
STOPSIGNAL SIGTERM
ENTRYPOINT ["tokenmill"]
# Without the file of API keys it does not start: it listens on all interfaces of the container.
CMD ["serve", "smollm2", "--host", "0.0.0.0", "--port", "8000", \
     "--api-keys-file", "/run/secrets/api-keys"]
