"""DeepSeek V2 and V3: the plain decoder with latent attention."""

from __future__ import annotations

from tokenmill.model.architectures.decoder import Block, Decoder
from tokenmill.model.layers.latent_attention import LatentSelfAttention


class DeepseekBlock(Block):
    attention_class = LatentSelfAttention


class Deepseek(Decoder):
    features = frozenset({"latent attention"})
    block_class = DeepseekBlock
