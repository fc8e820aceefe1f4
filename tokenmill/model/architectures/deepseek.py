"""DeepSeek V2 and V3: the plain decoder with latent attention."""

from __future__ import annotations

import re

from tokenmill.checkpoint.description import ModelDescription
from tokenmill.model.architectures.decoder import Block, Decoder
from tokenmill.model.layers.latent_attention import LatentSelfAttention
from tokenmill.model.reader import WeightReader

_LAYER = re.compile(r"model\.layers\.(\d{1,6})\.")


class DeepseekBlock(Block):
    attention_class = LatentSelfAttention


class Deepseek(Decoder):
    features = frozenset({"latent attention"})
    block_class = DeepseekBlock

    def __init__(self, reader: WeightReader, description: ModelDescription, num_positions: int) -> None:
        super().__init__(reader, description, num_positions)
        # Layers behind the last one predict further tokens, for drafting: they are not used.
        for name in reader.checkpoint.names():
            if (match := _LAYER.match(name)) and int(match[1]) >= description.num_layers:
                reader.ignore(name)
