"""The rotary tables of a config.json: `rope_parameters` of transformers 5 (nested by layer type or not), or the older
`rope_theta` and `rope_scaling`. A kind of scaling that is not known here is kept by its name."""

from __future__ import annotations

from tokenmill.checkpoint.configs.families import Family
from tokenmill.checkpoint.description import RopeScaling, RopeTable
from tokenmill.checkpoint.fields import Fields

_LAYER_TYPES = ("full_attention", "sliding_attention")


def rope_tables(text: Fields, family: Family, head_dim: int, context_length: int) -> tuple[RopeTable, ...]:
    """ "full", and "sliding" where the sliding layers have frequencies of their own."""
    settings = _settings(text, "full_attention")
    default_theta = text.number("rope_theta", text.number("rotary_emb_base", family.rope_theta, low=1.0), low=1.0)
    theta = settings.number("rope_theta", default_theta, low=1.0)
    size = _rotary_dim(text, settings, family, head_dim)
    tables = [RopeTable("full", size, theta, _scaling(text, settings, context_length, size))]
    nested = "sliding_attention" in text.mapping("rope_parameters")
    if family.local_rope_theta is not None or nested:
        local = _settings(text, "sliding_attention")
        default = family.local_rope_theta if family.local_rope_theta is not None else default_theta
        theta = local.number("rope_theta", text.number("rope_local_base_freq", default, low=1.0), low=1.0)
        size = _rotary_dim(text, local, family, head_dim)
        tables.append(RopeTable("sliding", size, theta, _scaling(text, local, context_length, size)))
    return tuple(tables)


def _settings(text: Fields, layer_type: str) -> Fields:
    """The rotary settings of one layer type: `rope_parameters` (perhaps nested), under the older `rope_scaling`."""
    settings = text.mapping("rope_parameters")
    if any(key in settings for key in _LAYER_TYPES):
        nested = settings.get(layer_type)
        settings = nested if isinstance(nested, dict) else {}
    if layer_type == "full_attention":
        settings = {**settings, **text.mapping("rope_scaling")}
    return Fields(settings, text.label, text.remedy)


def _rotary_dim(text: Fields, settings: Fields, family: Family, head_dim: int) -> int:
    if text.raw("rotary_dim") is not None:
        return text.integer("rotary_dim")
    default = text.number("rotary_pct", family.rotary_factor)
    factor = settings.number("partial_rotary_factor", text.number("partial_rotary_factor", default))
    size = int(head_dim * factor)
    if not 0 < size <= head_dim or size % 2:
        raise text.error(f"{size} of {head_dim} numbers of a head cannot be rotated in pairs")
    return size


def _scaling(text: Fields, settings: Fields, context_length: int, rotary_dim: int) -> RopeScaling:
    kind = settings.text("rope_type", settings.text("type", "default"))
    original = settings.integer("original_max_position_embeddings", context_length)
    original = text.integer("original_max_position_embeddings", original)
    if kind == "default":
        return RopeScaling()
    if kind == "linear":
        return RopeScaling(kind="linear", factor=settings.number("factor", low=1e-6))
    if kind == "llama3":
        low, high = settings.number("low_freq_factor", low=1e-6), settings.number("high_freq_factor", low=1e-6)
        if high <= low:
            raise settings.error(f"'high_freq_factor' {high:g} must be above 'low_freq_factor' {low:g}")
        factor = settings.number("factor", low=1e-6)
        return RopeScaling("llama3", factor, original, low_freq_factor=low, high_freq_factor=high)
    if kind == "longrope" or settings.raw("short_factor") is not None:  # older files say "su" or "yarn"
        return _longrope(settings, original, context_length, rotary_dim // 2)
    if kind == "yarn":
        return _yarn(settings, original, context_length)
    return RopeScaling(kind, settings.number("factor", 1.0), original)


def _longrope(settings: Fields, original: int, context_length: int, count: int) -> RopeScaling:
    factor = settings.number("attention_factor", 0.0)
    return RopeScaling(
        "longrope",
        settings.number("factor", context_length / original, low=1e-6),
        original,
        attention_factor=factor if settings.raw("attention_factor") is not None else None,
        short_factors=_factors(settings, "short_factor", count),
        long_factors=_factors(settings, "long_factor", count),
    )


def _yarn(settings: Fields, original: int, context_length: int) -> RopeScaling:
    attention_factor = settings.number("attention_factor", 0.0)
    return RopeScaling(
        kind="yarn",
        factor=settings.number("factor", context_length / original, low=1e-6),
        original_context=original,
        beta_fast=settings.number("beta_fast", 32.0) or 32.0,
        beta_slow=settings.number("beta_slow", 1.0) or 1.0,
        attention_factor=attention_factor if settings.raw("attention_factor") is not None else None,
        mscale=settings.number("mscale", 0.0),
        mscale_all_dim=settings.number("mscale_all_dim", 0.0),
        truncate=settings.flag("truncate", True),
    )


def _factors(settings: Fields, name: str, count: int) -> tuple[float, ...]:
    values = settings.raw(name)
    if not isinstance(values, list | tuple) or not all(isinstance(v, int | float) and v > 0 for v in values):
        raise settings.wrong(name, values)
    if len(values) != count:
        raise settings.error(f"'{name}' has {len(values)} numbers, one for each of {count} frequencies is needed")
    return tuple(map(float, values))
