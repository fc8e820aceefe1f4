"""Weight formats, tried in this order on the tensors of a matrix. Add one: a file here and a line in the table."""

from tokenmill.registry import Registry

FORMATS = Registry(
    "weight format",
    {
        "ggml": "tokenmill.model.formats.ggml:GgmlFormat",
        "pack-quantized": "tokenmill.model.formats.packed_int:PackedIntFormat",
        "gptq": "tokenmill.model.formats.gptq:GptqFormat",
        "awq": "tokenmill.model.formats.awq:AwqFormat",
        "bitsandbytes-4bit": "tokenmill.model.formats.bitsandbytes:FourBitFormat",
        "bitsandbytes-int8": "tokenmill.model.formats.bitsandbytes:Int8RowFormat",
        "int-quantized": "tokenmill.model.formats.plain_int:PlainIntFormat",
        "float8": "tokenmill.model.formats.float8:Float8Format",
        "float4": "tokenmill.model.formats.float4:Float4Format",
        "codebook": "tokenmill.model.formats.codebook:CodebookFormat",
        "sparse-24": "tokenmill.model.formats.sparse24:Sparse24Format",
        "dense": "tokenmill.model.formats.dense:DenseFormat",
    },
)
