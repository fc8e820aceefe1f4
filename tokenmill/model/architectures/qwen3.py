"""Qwen3: Llama with a norm on each query and key head."""

from __future__ import annotations

from tokenmill.model.architectures.decoder import Block, Decoder


class Qwen3Block(Block):
    head_norms = True


class Qwen3(Decoder):
    block_class = Qwen3Block
