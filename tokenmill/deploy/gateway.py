"""The Gateway API inference extension: an InferencePool over the pods, and the HTTPRoute that leads a gateway to it.

The gateway asks an endpoint picker which pod takes a request. Pickers read vLLM's names of waiting requests, running
requests and KV use, which this engine's /metrics has too, so none of them needs a mapping. The picker itself comes with
the extension (llm-d's or another one); it must stand as Service `NAME-epp`. Called by render.py.
"""

from __future__ import annotations

from tokenmill.deploy.engines.base import Engine
from tokenmill.deploy.kubernetes import Manifest, object_labels
from tokenmill.deploy.serving import Serving
from tokenmill.errors import UserError

_PICKER_PORT = 9002
_READS_VLLM_NAMES = ("tokenmill", "vllm")


def gateway_objects(engine: Engine, serving: Serving, gateway: str, pods: str) -> list[Manifest]:
    """`pods`: name of the pods' pool. `gateway`: that of a Gateway of this namespace."""
    if engine.name not in _READS_VLLM_NAMES:
        raise UserError(f"endpoint pickers do not know the metrics of {engine.name}", "drop --gateway")
    labels = object_labels(serving.name, serving)
    pool = {
        "apiVersion": "inference.networking.k8s.io/v1",
        "kind": "InferencePool",
        "metadata": {"name": serving.name, "labels": labels},
        "spec": {
            "selector": {"matchLabels": {"app.kubernetes.io/name": pods}},
            "targetPorts": [{"number": engine.port}],
            "endpointPickerRef": {
                "name": f"{serving.name}-epp",
                "port": {"number": _PICKER_PORT},
                "failureMode": "FailOpen",  # any pod is better than none: each has admission of its own
            },
        },
    }
    backend = {"group": "inference.networking.k8s.io", "kind": "InferencePool", "name": serving.name}
    route = {
        "apiVersion": "gateway.networking.k8s.io/v1",
        "kind": "HTTPRoute",
        "metadata": {"name": serving.name, "labels": labels},
        "spec": {
            "parentRefs": [{"group": "gateway.networking.k8s.io", "kind": "Gateway", "name": gateway}],
            "rules": [
                {
                    "matches": [{"path": {"type": "PathPrefix", "value": "/v1"}}],
                    "backendRefs": [backend],
                    "timeouts": {"request": "0s"},  # none: a stream takes as long as it takes
                }
            ],
        },
    }
    return [pool, route]
