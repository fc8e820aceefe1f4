"""An encoder on a device: texts as token ids in, one vector each out, in packed batches without padding.

The counterpart of build.py and runner.py for models that keep nothing between steps. On a CPU it computes in float32;
on a GPU in 16-bit floats (--dtype, else bfloat16 where the file has that and float16 where not), unless the torch
reference is asked for. Called by the engine's construction; knows nothing of queues or text.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from tokenmill.checkpoint.configs.encoders import EncoderDescription
from tokenmill.checkpoint.embedding_files import EmbeddingSettings
from tokenmill.config import ResolvedConfig
from tokenmill.errors import UserError
from tokenmill.hardware.machine import usable_cores
from tokenmill.kernels import triton as gpu
from tokenmill.model.encoders.encoder import Encoder
from tokenmill.model.encoders.packed import Text, pack, split_by_tokens
from tokenmill.model.encoders.pooling import ClassifierHead, Vectors
from tokenmill.model.encoders.weights import EncoderWeights


class EncoderRunner:
    def __init__(
        self,
        path: Path,
        description: EncoderDescription,
        settings: EmbeddingSettings,
        config: ResolvedConfig,
        device: torch.device,
    ) -> None:
        torch.set_num_threads(config.threads if config.is_set("threads") else usable_cores())
        self.device = device
        self.description = description
        self.batch_tokens = config.batch_tokens
        on_gpu = device.type == "cuda"
        kernel = config.kernels == "triton" or (on_gpu and config.kernels != "ref")
        if kernel and (reason := gpu.unavailable(device)) is not None:
            raise UserError(f"kernels triton cannot be used: {reason}", "leave --kernels out")
        weights, self.dtype = EncoderWeights(path, description, device, torch.float32), "float32"
        if kernel and on_gpu:
            own = "bfloat16" if weights.stored_type.endswith("bfloat16") else "float16"
            self.dtype = config.dtype if config.is_set("dtype") else own
            weights = EncoderWeights(path, description, device, getattr(torch, self.dtype))
        self._encoder = Encoder(weights, description, kernel)
        self._finish: ClassifierHead | Vectors
        if description.labels:
            self._finish = ClassifierHead(weights, description)
        else:
            self._finish = Vectors(path, settings, device)
        weights.check()
        self.weight_bytes = weights.num_bytes
        self.stored_type = weights.stored_type.removeprefix("torch.")

    @torch.inference_mode()
    def run(self, texts: Sequence[Text]) -> Tensor:
        """[texts, dimension] float32 on the CPU, in order: all in one batch."""
        batch = pack(texts, self.device)
        found = self._finish(self._encoder.forward(batch), batch).cpu()
        ordered = torch.empty_like(found)
        ordered[torch.tensor(batch.order)] = found
        return ordered

    def run_all(self, texts: Sequence[Text]) -> Tensor:
        """The same for any number of texts but none, in batches of texts of similar length."""
        batches = split_by_tokens(texts, self.batch_tokens)
        vectors = torch.cat([self.run([texts[number] for number in numbers]) for numbers in batches])
        found = torch.empty_like(vectors)
        found[torch.tensor([number for numbers in batches for number in numbers])] = vectors
        return found
