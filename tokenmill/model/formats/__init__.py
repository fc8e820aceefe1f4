"""Weight formats, tried in this order on the tensors at hand. Add one: a file here and a line in the table."""

from tokenmill.registry import Registry

FORMATS = Registry(
    "weight format",
    {
        "ggml": "tokenmill.model.formats.ggml:GgmlFormat",
        "dense": "tokenmill.model.formats.dense:DenseFormat",
    },
)
