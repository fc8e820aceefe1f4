"""How byte-level BPE vocabularies cut text into words before merging, by the name in `tokenizer.ggml.pre`.

The patterns are facts of the models, from each one's own tokenizer.json (llama.cpp approximates a few, as gpt-4o's); a
GGUF file stores only the name. Patterns run one after another: each cuts every piece left by the one before into its
matches and what lies between. Knows nothing about vocabularies. Called by gguf_tokenizer.py.
"""

from __future__ import annotations

from dataclasses import dataclass

from tokenmill.errors import CheckpointError

# Case is spelled out: under (?i) a long s (U+017F) would count as an s, which the vocabularies' own splitters refuse.
_CONTRACTIONS = r"'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD]"
_BLANKS = r"\s*[\r\n]+|\s+(?!\S)|\s+"

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"


def _llama3_like(digits: str, contractions: str = _CONTRACTIONS) -> str:
    head = f"(?:{contractions})|" if contractions else ""
    return rf"{head}[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_BLANKS}"


def _cased(digits: str, contractions: str = f"(?:{_CONTRACTIONS})?") -> str:
    """GPT-4o's idea: a word is upper case letters followed by lower case ones, then maybe a contraction."""
    upper, lower = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
    lead = r"[^\r\n\p{L}\p{N}]?"
    words = f"{lead}{upper}*{lower}+{contractions}|{lead}{upper}+{lower}*{contractions}"
    return rf"{words}|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_BLANKS}"


def _ranges(code_points: str) -> str:
    """`41-5A B5` -> a character class body."""
    return "".join("-".join(f"\\x{{{end}}}" for end in span.split("-")) for span in code_points.split())


_ASCII_PUNCTUATION = r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~]"
_DEEPSEEK3 = "|".join(
    (
        _ASCII_PUNCTUATION + "[A-Za-z]+",
        r"[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+",
        r" ?[\p{P}\p{S}]+[\r\n]*",
        _BLANKS,
    )
)
# Code points, because editors and files that normalise Unicode would change some of the characters.
_DEEPSEEK_LETTERS = _ranges(
    "B5 C0-D6 D8-F6 F8-1BA 1BC-1BF 1C4-293 295-2AF 370-373 376 377 37B-37D 37F 386 388-38A 38C 38E-3A1 3A3-3F5 "
    "3F7-481 48A-52F 531-556 10A0-10C5 13A0-13F5 13F8-13FD 1C90-1CBA 1CBD-1CBF 1D00-1D2B 1D6B-1D77 1D79-1D9A "
    "1E00-1F15 1F18-1F1D 1F20-1F45 1F48-1F4D 1F50-1F57 1F59 1F5B 1F5D 1F5F-1F7D 1F80-1FB4 1FB6-1FBC 1FBE 1FC2-1FC4 "
    "1FC6-1FCC 1FD0-1FD3 1FD6-1FDB 1FE0-1FEC 1FF2-1FF4 1FF6-1FFC 2102 2107 210A-2113 2115 2119-211D 2124 2126 2128 "
    "212A-212D 212F-2134 2139 213C-213F 2145-2149 214E 2183 2184 2C00-2C7B 2C7E-2CE4 2CEB-2CEE 2CF2 2CF3 A640-A66D "
    "A680-A69B A722-A76F A771-A787 A78B-A78E AB70-ABBF FB00-FB06 FB13-FB17 FF21-FF3A FF41-FF5A 10400-1044F "
    "104B0-104D3 104D8-104FB 10C80-10CB2 10CC0-10CF2 118A0-118DF 1E900-1E943"
)
_DEEPSEEK_CJK = "[一-龥ࠀ-一가-퟿]+"
_BLOOM = r" ?[^(\s|.,!?…。，、।۔،)]+"


@dataclass(frozen=True, slots=True)
class PreTokenizer:
    patterns: tuple[str, ...]
    ignore_merges: bool = False  # a word that is a token as it stands is that token, whatever the merges say
    adds_bos: bool = False  # unless the file says otherwise


_DIGITS_THEN_GPT2 = PreTokenizer((r"\p{N}", _GPT2))
_PLAIN_GPT2 = PreTokenizer((_GPT2,))
_LLAMA3 = PreTokenizer((_llama3_like(r"\p{N}{1,3}"),), ignore_merges=True, adds_bos=True)
_LLAMA3_PLAIN = PreTokenizer((_llama3_like(r"\p{N}{1,3}"),))
_QWEN2 = PreTokenizer((_llama3_like(r"\p{N}"),))
_DEEPSEEK3_SPLIT = PreTokenizer((r"\p{N}{1,3}", "[一-龥぀-ゟ゠-ヿ]+", _DEEPSEEK3))
_GPT4O = PreTokenizer((_cased(r"\p{N}{1,3}"),))

_TABLE: dict[str, PreTokenizer] = {
    "default": PreTokenizer((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]")),
    "falcon": PreTokenizer((r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, "[0-9][0-9][0-9]")),
    "deepseek-llm": PreTokenizer(
        (
            r"[\r\n]",
            rf"\s?[A-Za-z{_DEEPSEEK_LETTERS}]+",
            r"\s?[!-/:-~！-／：-～‘-‟　-。]+",
            r"\s+$",
            _DEEPSEEK_CJK,
            r"\p{N}+",
        )
    ),
    "deepseek-coder": PreTokenizer((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _DEEPSEEK_CJK, r"\p{N}")),
    "tekken": PreTokenizer((_cased(r"\p{N}", contractions=""),), ignore_merges=True, adds_bos=True),
    "tiny_aya": PreTokenizer((r"\d{1,3}(?=(?:\d{3})*\b)", _cased(r"\p{N}{1,3}"))),
    "bailingmoe": PreTokenizer((_llama3_like(r"\p{N}").replace(r"\s*[\r\n]+", r"\s*[\r\n]"),)),
    "seed-coder": PreTokenizer((_llama3_like(r"\p{N}").replace(r"[^\s\p{L}\p{N}]+[\r\n]*", r"[^\s\p{L}\p{N}]+"),)),
    "qwen35": PreTokenizer(
        (
            _llama3_like(r"\p{N}")
            .replace(r"[^\r\n\p{L}\p{N}]?\p{L}+", r"[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+")
            .replace(r"[^\s\p{L}\p{N}]+", r"[^\s\p{L}\p{M}\p{N}]+"),
        )
    ),
    "minicpm5": PreTokenizer((r"\p{N}{1,3}", _llama3_like(r"\p{N}+")), ignore_merges=True),
    "bloom": PreTokenizer((_BLOOM,)),
    "viking": PreTokenizer((_BLOOM, r"\p{N}")),
}
_SAME: dict[PreTokenizer, tuple[str, ...]] = {
    _PLAIN_GPT2: (
        *("gpt-2", "phi-2", "mpt", "olmo", "jais", "trillion", "granite-docling", "exaone4", "gigachat", "a.x-4.0"),
        *("mellum", "modern-bert", "jina-es", "jina-de", "jina-v2-es", "jina-v2-de"),
    ),
    _DIGITS_THEN_GPT2: (
        *("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b", "mellum2"),
    ),
    _LLAMA3: ("llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2", "jina-v5-nano"),
    _LLAMA3_PLAIN: ("dbrx", "smaug-bpe", "glm4", "chatglm-bpe"),
    _QWEN2: ("qwen2", "deepseek-r1-qwen", "megrez", "stablelm2", "hunyuan", "solar-open", "grok-2", "kormo", "f2llmv2"),
    _DEEPSEEK3_SPLIT: ("deepseek-v3", "hunyuan-dense", "joyai-llm", "hy_v4"),
    _GPT4O: ("gpt-4o", "llama4", "kanana2", "minimax-m2", "talkie"),
    _TABLE["tiny_aya"]: ("cohere2moe",),
    _TABLE["bailingmoe"]: ("bailingmoe2", "llada-moe"),
    _TABLE["bloom"]: ("poro-chat", "gpt3-finnish"),
}
PRE_TOKENIZERS: dict[str, PreTokenizer] = _TABLE | {name: entry for entry, names in _SAME.items() for name in names}


def find_pre_tokenizer(name: str) -> PreTokenizer:
    """The entry of that name. An unknown one is refused: with the wrong words every token after is quietly wrong."""
    if name not in PRE_TOKENIZERS:
        known = ", ".join(sorted(PRE_TOKENIZERS))
        raise CheckpointError(f"unknown pre-tokenizer '{name}'", f"use a model with one of: {known}")
    return PRE_TOKENIZERS[name]
