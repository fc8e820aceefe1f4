"""Quantized file formats that can be written, by the name that `--format` takes. Add one: a file here and a line in the
table."""

from tokenmill.registry import Registry

FILE_FORMATS = Registry(
    "quantized file format",
    {
        "compressed-tensors": "tokenmill.model.formats.files.compressed_tensors:CompressedTensorsFile",
        "gptq": "tokenmill.model.formats.files.gptq:GptqFile",
        "gptq_v2": "tokenmill.model.formats.files.gptq:GptqV2File",
        "awq": "tokenmill.model.formats.files.awq:AwqFile",
        "bitsandbytes": "tokenmill.model.formats.files.bitsandbytes:BitsAndBytesFile",
        "bitsandbytes_double": "tokenmill.model.formats.files.bitsandbytes:BitsAndBytesDoubleFile",
        "fp8": "tokenmill.model.formats.files.fp8:Float8File",
        "dense": "tokenmill.model.formats.files.dense:DenseFile",
        "sparse-24": "tokenmill.model.formats.files.sparse24:Sparse24File",
        "tokenmill": "tokenmill.model.formats.files.tokenmill:TokenmillFile",
    },
)
