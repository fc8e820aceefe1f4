"""One real server for the clients of other projects, each as it is installed from its package.

The packages are many and heavy: `make test-clients` installs them (the extra `clients`) into an environment of their
own and runs these files there; the server runs in the project's environment (TOKENMILL_SERVER_PYTHON). Without a
package its file is skipped.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.serving import RunningServer, serving

MODEL = "client-test"
FLAGS = (
    *("--served-model-name", MODEL, "--context", "2048", "--concurrency", "8"),
    *("--override-generation-config", '{"max_new_tokens": 16, "temperature": 0}'),
)
# A schema that even a small model completes within a few tokens.
CITIES = ("Oslo", "Rome")


@pytest.fixture(scope="session", autouse=True)
def _no_network() -> Iterator[None]:
    """Some clients ask their makers' sites at import or report what they do."""
    variables = {
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        "OPENAI_AGENTS_DISABLE_TRACING": "1",
        "ANONYMIZED_TELEMETRY": "False",
        "HF_HUB_OFFLINE": "1",
        "HF_DATASETS_OFFLINE": "1",
    }
    with pytest.MonkeyPatch.context() as patch:
        for name, value in variables.items():
            patch.setenv(name, value)
        yield


@pytest.fixture(scope="session")
def server() -> Iterator[RunningServer]:
    python = os.environ.get("TOKENMILL_SERVER_PYTHON", sys.executable)
    pulled = subprocess.run([python, "-m", "tokenmill", "pull", "smollm2"], capture_output=True, text=True)
    if pulled.returncode:
        pytest.skip(f"smollm2 is not cached and cannot be fetched: {pulled.stderr.strip()}")
    with serving(Path("smollm2"), *FLAGS) as running:
        yield running


@pytest.fixture(scope="session")
def v1(server: RunningServer) -> str:
    """The base URL of OpenAI's API."""
    return f"{server.url}/v1"


@pytest.fixture(autouse=True)
def _nothing_left_behind(server: RunningServer) -> Iterator[None]:
    yield
    server.wait_idle()
