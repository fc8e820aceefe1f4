"""Which files of a Hugging Face repository make a model: one GGUF with its splits, or safetensors, config, tokenizer.

Pure functions on file names, so that the same choice is made from a listing of the Hub and from a cached snapshot.
Called by hub.py.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from tokenmill.errors import UserError

_PREFERRED = ("Q4_K_M", "Q4_0", "Q8_0")
_SIDE_FILES = re.compile(r"[^/]+\.(json|jinja|model|txt|tiktoken)|additional_chat_templates/[^/]+\.jinja")
_SPLIT = re.compile(r"-\d{5}-of-(\d{5})\.gguf$")
_QUANT = re.compile(r"(?:^|[-._/])((?:UD-)?(?:I?Q\d\w*|TQ\d_\d|BF16|F16|F32|MXFP4\w*))(?=[-.]|$)", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class HubRequest:
    """`org/name`, `org/name:QUANT` or `org/name/path/file.gguf`."""

    repo: str
    quant: str = ""
    file: str = ""


@dataclass(frozen=True, slots=True)
class Selection:
    files: tuple[str, ...]
    main: str  # the GGUF to open; "" for a directory of safetensors


def parse_request(model: str) -> HubRequest | None:
    matched = re.fullmatch(r"([\w-][\w.-]*/[\w-][\w.-]*)(?::([\w.-]+)|/(.+\.gguf))?", model, re.ASCII)
    return HubRequest(matched[1], matched[2] or "", matched[3] or "") if matched else None


def select_files(request: HubRequest, names: Iterable[str]) -> Selection:
    listing = sorted(names)
    weights = [name for name in listing if name.endswith(".safetensors") and "/" not in name]
    if request.file or request.quant or not weights:
        return _select_gguf(request, listing)
    if "config.json" not in listing:
        raise UserError(
            f"'{request.repo}' has safetensors but no config.json", "it may be an adapter; name its base model"
        )
    # some repositories hold a second copy in the layout of the training code
    named = [name for name in weights if name.startswith("model")] or weights
    return Selection((*(name for name in listing if _SIDE_FILES.fullmatch(name)), *named), "")


def _select_gguf(request: HubRequest, listing: list[str]) -> Selection:
    groups: dict[str, list[str]] = {}  # the splits of one model, under the name without its split number
    for name in listing:
        if name.endswith(".gguf") and not re.search(r"mmproj|imatrix", name, re.IGNORECASE):
            groups.setdefault(_SPLIT.sub(".gguf", name), []).append(name)
    if not groups:
        raise UserError(f"'{request.repo}' has neither safetensors nor GGUF files", "choose a repository that has")
    chosen = _choose(request, groups)
    split = _SPLIT.search(chosen[0])
    if split and len(chosen) != int(split[1]):
        raise UserError(
            f"'{request.repo}' has {len(chosen)} of the {split[1]} splits of '{chosen[0]}'", "choose another file"
        )
    return Selection(tuple(chosen), chosen[0])


def _choose(request: HubRequest, groups: dict[str, list[str]]) -> list[str]:
    if request.file:
        matches = [group for group in groups.values() if request.file in group]
        if not matches:
            raise UserError(f"'{request.repo}' has no '{request.file}'", f"it has: {', '.join(groups)}")
        return matches[0]
    preferred = (request.quant,) if request.quant else _PREFERRED
    for quant in preferred:
        pattern = re.compile(rf"(?:^|[-._/]){re.escape(quant)}(?=[-.]|$)", re.IGNORECASE)
        matches = [group for name, group in groups.items() if pattern.search(name)]
        if matches:
            return min(matches, key=lambda group: len(group[0]))
    if not request.quant and len(groups) == 1:
        return next(iter(groups.values()))
    quants = list(dict.fromkeys(tag for name in groups for tag in _QUANT.findall(name))) or list(groups)
    problem = (
        f"'{request.repo}' has no GGUF of type '{request.quant}'" if request.quant else "the GGUF type is not clear"
    )
    raise UserError(problem, f"write {request.repo}:TYPE with one of: {', '.join(quants)}")
