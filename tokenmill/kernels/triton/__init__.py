"""The GPU backend of the op table, in Triton. Importing this package does not import triton; asking for an op does.

  adapters/   adapters (LoRA) of mixed rows, added to products; `GpuSite`
  attention/  paged attention over dense and quantized pages
  matmul/     weights on the GPU and their products; `GpuLinear`
  experts/    mixtures of experts: routing, sort, grouped products; `GpuExperts`
  recurrent/  convolutions and scans that keep a state for each sequence, gated norms
  fused/      norms, gates, embeddings, rotary positions with the KV store
  step/       what a captured step needs besides the model: inputs, sampling, drafts
  shared/     launch keywords, scratch memory and device functions of all of them

Each folder's `__init__.py` says what is in it and how to choose; `choose.py` of attention/, matmul/, experts/ and
recurrent/ are the only places that pick a kernel or its tiles for a shape. Ops of kernels/ref.py have the same
signatures here (activations bf16 or float32, result in the type of the input); the rest is for executors that fuse.
Nothing synchronizes with the host (but `distinct_pages`), and shapes alone decide a launch, so that all of it can be
captured. KV pages are [pages, kv_heads, page_size, head_dim]; 16 tokens a page is the tuned size.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import torch

from tokenmill.kernels import gpu_generation

if TYPE_CHECKING:  # the table below for type checkers; a test compares the two
    from tokenmill.kernels.triton.adapters.site import GpuSite as GpuSite
    from tokenmill.kernels.triton.attention.dense import SharedPrefixes as SharedPrefixes
    from tokenmill.kernels.triton.attention.dense import paged_attention as paged_attention
    from tokenmill.kernels.triton.attention.encoder import encoder_attention as encoder_attention
    from tokenmill.kernels.triton.attention.fp8_widening import DistinctPages as DistinctPages
    from tokenmill.kernels.triton.attention.fp8_widening import distinct_pages as distinct_pages
    from tokenmill.kernels.triton.attention.latent import latent_inputs as latent_inputs
    from tokenmill.kernels.triton.attention.latent import latent_paged_attention as latent_paged_attention
    from tokenmill.kernels.triton.attention.latent_expanded import prompts_to_expand as prompts_to_expand
    from tokenmill.kernels.triton.attention.packed import packed_attention as packed_attention
    from tokenmill.kernels.triton.experts.host import HostExperts as HostExperts
    from tokenmill.kernels.triton.experts.layer import GpuExperts as GpuExperts
    from tokenmill.kernels.triton.experts.stack import GpuExpertStack as GpuExpertStack
    from tokenmill.kernels.triton.experts.stack import bf16_stack as bf16_stack
    from tokenmill.kernels.triton.experts.stack import fp8_stack as fp8_stack
    from tokenmill.kernels.triton.experts.stack import int4_stack as int4_stack
    from tokenmill.kernels.triton.experts.stack import mxfp4_stack as mxfp4_stack
    from tokenmill.kernels.triton.fused.draft_inputs import draft_inputs as draft_inputs
    from tokenmill.kernels.triton.fused.elementwise import add as add
    from tokenmill.kernels.triton.fused.elementwise import add_rms_norm as add_rms_norm
    from tokenmill.kernels.triton.fused.elementwise import add_rms_norm_quantized as add_rms_norm_quantized
    from tokenmill.kernels.triton.fused.elementwise import embed as embed
    from tokenmill.kernels.triton.fused.elementwise import gated as gated
    from tokenmill.kernels.triton.fused.elementwise import gated_quantized as gated_quantized
    from tokenmill.kernels.triton.fused.elementwise import layer_norm as layer_norm
    from tokenmill.kernels.triton.fused.elementwise import quantize_rows as quantize_rows
    from tokenmill.kernels.triton.fused.elementwise import rms_norm as rms_norm
    from tokenmill.kernels.triton.fused.elementwise import softcap as softcap
    from tokenmill.kernels.triton.fused.rotary import rope as rope
    from tokenmill.kernels.triton.fused.rotary import rope_store as rope_store
    from tokenmill.kernels.triton.fused.rotary import store_kv as store_kv
    from tokenmill.kernels.triton.fused.rotary_epilogue import HeadPlaces as HeadPlaces
    from tokenmill.kernels.triton.fused.rotary_epilogue import head_places as head_places
    from tokenmill.kernels.triton.fused.rotary_packed import rope_store_packed as rope_store_packed
    from tokenmill.kernels.triton.matmul.joined import JoinedRows as JoinedRows
    from tokenmill.kernels.triton.matmul.joined import expand_small as expand_small
    from tokenmill.kernels.triton.matmul.joined import join_linears as join_linears
    from tokenmill.kernels.triton.matmul.linear import GpuLinear as GpuLinear
    from tokenmill.kernels.triton.matmul.make import from_quantized as from_quantized
    from tokenmill.kernels.triton.matmul.make import make_linear as make_linear
    from tokenmill.kernels.triton.matmul.make import make_router as make_router
    from tokenmill.kernels.triton.matmul.make import quantize_at_load as quantize_at_load
    from tokenmill.kernels.triton.recurrent.convolution import Convolution as Convolution
    from tokenmill.kernels.triton.recurrent.convolution import convolve as convolve
    from tokenmill.kernels.triton.recurrent.delta import delta_scan as delta_scan
    from tokenmill.kernels.triton.recurrent.gated_norm import gated_norm as gated_norm
    from tokenmill.kernels.triton.recurrent.mamba import mamba_scan as mamba_scan
    from tokenmill.kernels.triton.recurrent.mamba2 import mamba2_scan as mamba2_scan
    from tokenmill.kernels.triton.step.accepted_drafts import follow_drafts as follow_drafts
    from tokenmill.kernels.triton.step.inputs import PADDING_POSITION as PADDING_POSITION
    from tokenmill.kernels.triton.step.inputs import POSITION_ON_DEVICE as POSITION_ON_DEVICE
    from tokenmill.kernels.triton.step.inputs import begin_step as begin_step
    from tokenmill.kernels.triton.step.logit_edits import allow as allow
    from tokenmill.kernels.triton.step.logit_edits import count_tokens as count_tokens
    from tokenmill.kernels.triton.step.logit_edits import penalize as penalize
    from tokenmill.kernels.triton.step.ngram_lookup import look_up_drafts as look_up_drafts
    from tokenmill.kernels.triton.step.reports import token_reports as token_reports
    from tokenmill.kernels.triton.step.sampling import SamplingTensors as SamplingTensors
    from tokenmill.kernels.triton.step.sampling import TokenRing as TokenRing
    from tokenmill.kernels.triton.step.sampling import argmax as argmax
    from tokenmill.kernels.triton.step.sampling import mix_seed as mix_seed
    from tokenmill.kernels.triton.step.sampling import sample as sample

_EXPORTS = {
    "adapters.site": "GpuSite",
    "attention.dense": "SharedPrefixes paged_attention",
    "attention.encoder": "encoder_attention",
    "attention.fp8_widening": "DistinctPages distinct_pages",
    "attention.latent": "latent_inputs latent_paged_attention",
    "attention.latent_expanded": "prompts_to_expand",
    "attention.packed": "packed_attention",
    "experts.host": "HostExperts",
    "experts.layer": "GpuExperts",
    "experts.stack": "GpuExpertStack bf16_stack fp8_stack int4_stack mxfp4_stack",
    "fused.draft_inputs": "draft_inputs",
    "fused.elementwise": "add add_rms_norm add_rms_norm_quantized embed gated gated_quantized layer_norm quantize_rows "
    "rms_norm softcap",
    "fused.rotary": "rope rope_store store_kv",
    "fused.rotary_epilogue": "HeadPlaces head_places",
    "fused.rotary_packed": "rope_store_packed",
    "matmul.joined": "JoinedRows expand_small join_linears",
    "matmul.linear": "GpuLinear",
    "matmul.make": "from_quantized make_linear make_router quantize_at_load",
    "recurrent.convolution": "Convolution convolve",
    "recurrent.delta": "delta_scan",
    "recurrent.gated_norm": "gated_norm",
    "recurrent.mamba": "mamba_scan",
    "recurrent.mamba2": "mamba2_scan",
    "step.accepted_drafts": "follow_drafts",
    "step.inputs": "PADDING_POSITION POSITION_ON_DEVICE begin_step",
    "step.ngram_lookup": "look_up_drafts",
    "step.logit_edits": "allow count_tokens penalize",
    "step.reports": "token_reports",
    "step.sampling": "SamplingTensors TokenRing argmax mix_seed sample",
}
_MODULES = {name: module for module, names in _EXPORTS.items() for name in names.split()}
_OPS = _MODULES | {"attention": "attention.dense"}  # as an attribute of this package, that name is the folder


def unavailable(device: torch.device) -> str | None:
    """Why this backend cannot run on a device; on a CPU only Triton's interpreter can, for tests."""
    interpreted = os.environ.get("TRITON_INTERPRET", "0") == "1"
    if device.type == "cuda":
        reason = gpu_generation.unavailable(device.index)
        if reason is not None:
            return reason
    if device.type != "cuda" and not (device.type == "cpu" and interpreted):
        return f"runs on NVIDIA GPUs, not on {device.type}"
    if find_spec("triton") is None:
        return "triton is not installed; install tokenmill[gpu]"
    return None


def find_op(name: str) -> Callable[..., Any] | None:
    """An op by its name in the op table. Not an attribute: `attention` is an op and a folder here."""
    module = _OPS.get(name)
    found: Callable[..., Any] | None = None if module is None else getattr(import_module(f"{__name__}.{module}"), name)
    return found


if not TYPE_CHECKING:  # else a misspelt name would be Any

    def __getattr__(name: str) -> Any:
        module = _OPS.get(name)
        if module is None:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(import_module(f"{__name__}.{module}"), name)
