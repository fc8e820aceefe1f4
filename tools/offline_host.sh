#!/usr/bin/env bash
# A GPU host without network: what this package needs beside torch, triton and transformers, which the host has.
#   tools/offline_host.sh pack FOLDER          here: wheels for x86_64 and Python 3.12 into FOLDER, some 35 MB
#   tools/offline_host.sh setup FOLDER SITE      there, in the checkout: unpack them into SITE and build the C++ kernels in place
# Then: PYTHONPATH=SITE:. python -m tokenmill ..., and `python -m pytest -n 8 tests/gpu tests/conformance`.
set -euo pipefail
case "${1:-}" in
  pack)
    platforms=(--platform any)
    for tag in manylinux1 manylinux2010 manylinux2014 manylinux_2_5 manylinux_2_12 manylinux_2_17 manylinux_2_24 \
      manylinux_2_26 manylinux_2_27 manylinux_2_28 manylinux_2_31 manylinux_2_34 manylinux_2_35 manylinux_2_39; do
      platforms+=(--platform "${tag}_x86_64")
    done
    mkdir -p "$2"
    pip download --quiet --dest "$2" --only-binary=:all: --python-version 3.12 --implementation cp \
      --abi cp312 --abi abi3 --abi none "${platforms[@]}" \
      fastapi uvicorn uvloop httptools pydantic msgspec pyzmq prometheus_client 'llguidance>=1.9' typer rich httpx \
      pyyaml jinja2 gguf jsonschema pytest pytest-xdist hypothesis
    rm -f "$2"/numpy-*  # the host's own goes with its torch
    ;;
  setup)
    python3 - "$2" "$3" <<'PY'
import sys, zipfile
from pathlib import Path
for wheel in Path(sys.argv[1]).glob("*.whl"):
    zipfile.ZipFile(wheel).extractall(sys.argv[2])
PY
    cmake -S . -B "$3/kernels" -DCMAKE_BUILD_TYPE=Release -DPython_EXECUTABLE="$(command -v python3)" >/dev/null
    cmake --build "$3/kernels" --parallel "$(nproc)" >/dev/null
    PYTHONPATH="$3" python3 -c "import tokenmill.kernels._cpu as cpu; print('kernels for', cpu.best_isa())"
    ;;
  *)
    sed -n '2,5p' "$0"
    exit 2
    ;;
esac
