"""Which kind of mixer each layer of a config.json has: "full", "sliding", "chunked", "recurrent" or "both"."""

from __future__ import annotations

from tokenmill.checkpoint.configs.families import Family
from tokenmill.checkpoint.configs.mixers import rotates
from tokenmill.checkpoint.fields import Fields, shown

_LISTED = {
    "full_attention": "full",
    "attention": "full",
    "sliding_attention": "sliding",
    "chunked_attention": "chunked",
    "linear_attention": "recurrent",
    "mamba": "recurrent",
    "hybrid": "both",
}


def layer_kinds(text: Fields, family: Family, num_layers: int) -> tuple[int, tuple[str, ...]]:
    """(window, kind of each layer); the window is 0 where no layer slides."""
    window = _window(text, family)
    rotated = len(text.integers("no_rope_layers")) if family.rope_layers == "listed" else 0
    if rotated and rotated != num_layers:
        raise text.error(f"'no_rope_layers' lists {rotated} layers, 'num_hidden_layers' is {num_layers}")
    kinds = _recurring(text, family, num_layers) or _sliding(text, family, num_layers, window)
    for key in ("layer_types", "layers_block_type"):
        if family.lists_layers and text.raw(key) is not None:
            kinds = _listed(text, key, num_layers)
    if "sliding" not in kinds:
        return 0, kinds
    if window == 0:
        raise text.error("layers slide but there is no 'sliding_window'")
    return window, kinds


def _window(text: Fields, family: Family) -> int:
    """Null switches sliding off, absence does not where the family has a default; Qwen has a switch of its own."""
    if family.sliding in ("tail", "even_below", "switched") and not text.flag("use_sliding_window", False):
        return 0
    default = 0 if "sliding_window" in text.values else family.sliding_window
    return text.integer("sliding_window", default, low=0)


def _recurring(text: Fields, family: Family, num_layers: int) -> tuple[str, ...]:
    """Patterns of hybrids; empty where the model is none."""
    if text.raw("attn_layer_period"):  # Jamba
        period, offset = text.integer("attn_layer_period"), text.integer("attn_layer_offset", 0, low=0)
        return tuple("full" if layer % period == offset else "recurrent" for layer in range(num_layers))
    if indices := text.integers("attn_layer_indices"):  # Bamba
        return tuple("full" if layer in indices else "recurrent" for layer in range(num_layers))
    if text.raw("full_attention_interval"):  # Qwen3-Next
        period = text.integer("full_attention_interval")
        return tuple("full" if (layer + 1) % period == 0 else "recurrent" for layer in range(num_layers))
    return (family.mixer,) * num_layers if family.mixer else ()


def _sliding(text: Fields, family: Family, num_layers: int, window: int) -> tuple[str, ...]:
    layers = range(num_layers)
    if family.sliding == "chunks":
        return tuple("chunked" if rotates(text, family, layer) else "full" for layer in layers)
    if not window or family.sliding == "never" or not text.flag("use_sliding_window", True):
        return ("full",) * num_layers
    if family.sliding == "tail":
        first = text.integer("max_window_layers", 28, low=0)
        return tuple("sliding" if layer >= first else "full" for layer in layers)
    if family.sliding == "even":
        return tuple("full" if layer % 2 else "sliding" for layer in layers)
    if family.sliding == "even_below":
        end = text.integer("max_window_layers", 28, low=0)
        return tuple("sliding" if layer % 2 == 0 and layer < end else "full" for layer in layers)
    default = family.sliding_period if family.sliding == "period" else 0
    period = text.integer("sliding_window_pattern", text.integer("_sliding_window_pattern", default, low=0), low=0)
    return tuple("full" if period and (layer + 1) % period == 0 else "sliding" for layer in layers)


def _listed(text: Fields, key: str, num_layers: int) -> tuple[str, ...]:
    listed = text.raw(key)
    if not isinstance(listed, list):
        raise text.wrong(key, listed)
    if len(listed) != num_layers:
        raise text.error(f"'{key}' lists {len(listed)} layers, 'num_hidden_layers' is {num_layers}")
    unknown = [entry for entry in listed if not isinstance(entry, str) or entry not in _LISTED]
    if unknown:
        raise text.error(f"the layer type {shown(unknown[0])} ('{key}') is not known", f"known: {', '.join(_LISTED)}")
    return tuple(_LISTED[entry] for entry in listed)
