"""What a manifest must look like: published schemas of Kubernetes, and small ones of our own for what operators add."""

from __future__ import annotations

from typing import Any

import kubernetes_validate
from jsonschema import Draft202012Validator

VERSION = "1.34"
_NAME = {"type": "string", "pattern": "^[a-z]([-a-z0-9]*[a-z0-9])?$", "maxLength": 63}
_META = {"type": "object", "required": ["name"], "properties": {"name": _NAME}}
CUSTOM: dict[str, dict[str, Any]] = {  # what the two operators demand
    "ServiceMonitor": {
        "properties": {
            "apiVersion": {"const": "monitoring.coreos.com/v1"},
            "metadata": _META,
            "spec": {
                "type": "object",
                "required": ["selector", "endpoints"],
                "additionalProperties": False,
                "properties": {
                    "selector": {"type": "object", "required": ["matchLabels"]},
                    "endpoints": {
                        "type": "array",
                        "minItems": 1,
                        "items": {
                            "type": "object",
                            "additionalProperties": False,
                            "properties": {
                                "port": {"type": "string"},
                                "path": {"type": "string", "pattern": "^/"},
                                "interval": {"type": "string", "pattern": "^[0-9]+(s|m)$"},
                                "authorization": {
                                    "type": "object",
                                    "required": ["credentials"],
                                    "additionalProperties": False,
                                    "properties": {
                                        "type": {"const": "Bearer"},
                                        "credentials": {"type": "object", "required": ["name", "key"]},
                                    },
                                },
                            },
                        },
                    },
                },
            },
        }
    },
    "ScaledObject": {
        "properties": {
            "apiVersion": {"const": "keda.sh/v1alpha1"},
            "metadata": _META,
            "spec": {
                "type": "object",
                "required": ["scaleTargetRef", "triggers"],
                "additionalProperties": False,
                "properties": {
                    "scaleTargetRef": {"type": "object", "required": ["name"]},
                    "minReplicaCount": {"type": "integer", "minimum": 0},
                    "maxReplicaCount": {"type": "integer", "minimum": 1},
                    "pollingInterval": {"type": "integer"},
                    "cooldownPeriod": {"type": "integer"},
                    "fallback": {"type": "object", "required": ["failureThreshold", "replicas"]},
                    "advanced": {"type": "object"},
                    "triggers": {
                        "type": "array",
                        "minItems": 1,
                        "items": {
                            "type": "object",
                            "required": ["type", "metadata"],
                            "additionalProperties": False,
                            "properties": {
                                "type": {"const": "prometheus"},
                                "name": {"type": "string"},
                                "metricType": {"enum": ["AverageValue", "Value"]},
                                "metadata": {
                                    "type": "object",
                                    "required": ["serverAddress", "query", "threshold"],
                                    "additionalProperties": {"type": "string"},
                                },
                            },
                        },
                    },
                },
            },
        }
    },
}


def _object(required: list[str], **properties: Any) -> dict[str, Any]:
    return {"type": "object", "required": required, "additionalProperties": False, "properties": properties}


_TEXT = {"type": "string", "minLength": 1}
_COUNT = {"type": "integer", "minimum": 1}
_PORT = {"type": "integer", "minimum": 1, "maximum": 65535}
_LABELS = {"type": "object", "minProperties": 1, "additionalProperties": {"type": "string", "maxLength": 63}}
_DURATION = {"type": "string", "pattern": "^([0-9]{1,5}(h|m|s|ms)){1,4}$"}  # GEP-2257


def _kind(version: str, spec: dict[str, Any]) -> dict[str, Any]:
    return {
        "required": ["apiVersion", "kind", "metadata", "spec"],
        "properties": {"apiVersion": {"const": version}, "metadata": _META, "spec": spec},
    }


CUSTOM |= {
    "InferencePool": _kind(  # gateway-api-inference-extension, api/v1
        "inference.networking.k8s.io/v1",
        _object(
            ["selector", "targetPorts", "endpointPickerRef"],
            selector=_object(["matchLabels"], matchLabels=_LABELS),
            targetPorts={"type": "array", "minItems": 1, "maxItems": 8, "items": _object(["number"], number=_PORT)},
            appProtocol={"enum": ["http", "kubernetes.io/h2c"]},
            endpointPickerRef=_object(
                ["name"],
                group=_TEXT,
                kind=_TEXT,
                name=_TEXT,
                port=_object(["number"], number=_PORT),
                failureMode={"enum": ["FailOpen", "FailClose"]},
            ),
        ),
    ),
    "HTTPRoute": _kind(  # gateway-api, apis/v1
        "gateway.networking.k8s.io/v1",
        _object(
            ["parentRefs", "rules"],
            parentRefs={
                "type": "array",
                "maxItems": 32,
                "items": _object(["name"], group=_TEXT, kind=_TEXT, name=_NAME, namespace=_NAME, sectionName=_TEXT),
            },
            hostnames={"type": "array", "items": _TEXT},
            rules={
                "type": "array",
                "minItems": 1,
                "maxItems": 16,
                "items": _object(
                    ["backendRefs"],
                    matches={
                        "type": "array",
                        "items": _object(
                            ["path"],
                            path=_object(
                                ["type", "value"],
                                type={"enum": ["Exact", "PathPrefix", "RegularExpression"]},
                                value={"type": "string", "pattern": "^/"},
                            ),
                        ),
                    },
                    backendRefs={
                        "type": "array",
                        "items": _object(["name"], group=_TEXT, kind=_TEXT, name=_NAME, port=_PORT, weight=_COUNT),
                    },
                    timeouts=_object([], request=_DURATION, backendRequest=_DURATION),
                ),
            },
        ),
    ),
    "LeaderWorkerSet": _kind(  # lws, api/leaderworkerset/v1
        "leaderworkerset.x-k8s.io/v1",
        _object(
            ["leaderWorkerTemplate"],
            replicas={"type": "integer", "minimum": 0},
            startupPolicy={"enum": ["LeaderCreated", "LeaderReady"]},
            rolloutStrategy=_object(
                ["type"],
                type={"const": "RollingUpdate"},
                rollingUpdateConfiguration=_object(
                    ["maxUnavailable", "maxSurge"], maxUnavailable={"type": "integer"}, maxSurge={"type": "integer"}
                ),
            ),
            leaderWorkerTemplate=_object(
                ["workerTemplate", "size"],
                size=_COUNT,
                restartPolicy={"enum": ["RecreateGroupOnPodRestart", "None"]},
                leaderTemplate={"type": "object"},  # pod templates: checked as pods
                workerTemplate={"type": "object"},
            ),
        ),
    ),
    "Kustomization": _object(
        ["apiVersion", "kind", "resources"],
        apiVersion={"const": "kustomize.config.k8s.io/v1beta1"},
        kind={"const": "Kustomization"},
        namespace=_NAME,
        resources={"type": "array", "minItems": 1, "uniqueItems": True, "items": _TEXT},
        labels={
            "type": "array",
            "items": _object(["pairs"], pairs=_LABELS, includeSelectors={"type": "boolean"}),
        },
        images={
            "type": "array",
            "items": _object(["name"], name=_TEXT, newName=_TEXT, newTag=_TEXT, digest=_TEXT),
        },
    ),
}


def check(document: dict[str, Any]) -> str:
    """The kind of a document that is valid; raises what is wrong with it."""
    kind: str = document["kind"]
    if kind not in CUSTOM:
        kubernetes_validate.validate(document, VERSION, strict=True)
        return kind
    Draft202012Validator(CUSTOM[kind]).validate(document)
    if kind == "LeaderWorkerSet":
        template = document["spec"]["leaderWorkerTemplate"]
        for name in ("leaderTemplate", "workerTemplate"):
            pod = {"apiVersion": "v1", "kind": "Pod", **template[name]}
            pod["metadata"] = {"name": "pod", **pod["metadata"]}
            kubernetes_validate.validate(pod, VERSION, strict=True)
    return kind
