"""How a step can be run, fastest first. Each executor may decline a model or store with a reason."""

from tokenmill.registry import Registry

EXECUTORS = Registry(
    "executor",
    {
        "cuda_graph": "tokenmill.runtime.cuda_graph:CudaGraphExecutor",
        "cuda_eager": "tokenmill.runtime.cuda_eager:CudaEagerExecutor",
        "recorded": "tokenmill.runtime.recorded:RecordedExecutor",
        "eager": "tokenmill.runtime.eager:EagerExecutor",
    },
)
