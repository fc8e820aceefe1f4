"""Which language a text is in: by its script, and among languages of one script by their commonest words.

Enough to check "answer in Hindi"; no statistical model, no dependency. Knows the languages that IFEval asks for and
their neighbours.
"""

from __future__ import annotations

import re
from collections import Counter

_SCRIPTS: dict[str, tuple[tuple[int, int], ...]] = {
    "latin": ((0x41, 0x5A), (0x61, 0x7A), (0xC0, 0x24F), (0x1E00, 0x1EFF)),
    "cyrillic": ((0x400, 0x52F),),
    "greek": ((0x370, 0x3FF),),
    "hebrew": ((0x590, 0x5FF),),
    "arabic": ((0x600, 0x6FF), (0x750, 0x77F), (0xFB50, 0xFDFF), (0xFE70, 0xFEFF)),
    "devanagari": ((0x900, 0x97F),),
    "bengali": ((0x980, 0x9FF),),
    "gurmukhi": ((0xA00, 0xA7F),),
    "gujarati": ((0xA80, 0xAFF),),
    "tamil": ((0xB80, 0xBFF),),
    "telugu": ((0xC00, 0xC7F),),
    "kannada": ((0xC80, 0xCFF),),
    "malayalam": ((0xD00, 0xD7F),),
    "thai": ((0xE00, 0xE7F),),
    "hangul": ((0x1100, 0x11FF), (0xAC00, 0xD7AF)),
    "kana": ((0x3040, 0x30FF),),
    "han": ((0x3400, 0x4DBF), (0x4E00, 0x9FFF)),
}

# A script of one language, or several with the words that tell them apart.
_ONE = {
    "greek": "el",
    "hebrew": "he",
    "bengali": "bn",
    "gurmukhi": "pa",
    "gujarati": "gu",
    "tamil": "ta",
    "telugu": "te",
    "kannada": "kn",
    "malayalam": "ml",
    "thai": "th",
    "hangul": "ko",
    "kana": "ja",
    "han": "zh",
}
_WORDS: dict[str, dict[str, str]] = {
    "latin": {
        "en": "the of and to in is that it for was with as on are this be you your i not have by or from at my we",
        "es": "el la de que y en los se del las por un una con no para es su al lo como más pero sus está muy",
        "pt": "o a de que e do da em um uma para com não os no na por mais as dos como mas foi ao ele é são você",
        "fr": "le la les de et des en un une du est que pour dans qui sur pas au plus par avec ce il sont nous vous",
        "it": "il la di che e è per un una in non con del della sono si le dei come più anche gli da al questo",
        "de": "der die das und ist in den von zu mit sich des auf für nicht ein eine im dem auch als wir ich sie es",
        "nl": "de het een en van in is dat op te zijn met voor niet aan er om ook als bij maar wij",
        "pl": "i w na z się nie do jest to że o jak po co ale za od przez są dla był tym może",
        "fi": "ja on ei se että hän oli joka ovat mutta kun niin myös tai minä sinä kuin olen voi tämä ole",
        "sv": "och att det i en som är på av för med till den inte ett om har de vi jag kan",
        "vi": "và là của có không cho được một người với các trong những này để khi đã tôi bạn",
        "sw": "na ya wa kwa ni katika za la kuwa hii watu yake lakini pia kama sana wakati hiyo mimi",
        "id": "yang dan di dengan untuk dari ini itu tidak dalam pada adalah saya akan ada",
        "tr": "ve bir bu için de da ile çok daha olarak gibi ama ben sen ne kadar",
    },
    "cyrillic": {
        "ru": "и в не на что с он как это по но из к у за от так же вы мы для его ы",
        "uk": "і в не на що з як це до та але для від за є у його ви ми й при",
        "bg": "и на да се не за от е с че в по са но като ще той тя това ги съм",
    },
    "arabic": {
        "ar": "في من على أن إلى هذا التي كان عن مع هو هذه لا ما أو الذي كل",
        "fa": "در و به از که این را با است برای آن یک هم می خود تا بر شما ما",
        "ur": "کے میں کی ہے اور سے کا کو اس نے پر ہیں کہ یہ ایک بھی نہیں آپ",
    },
    "devanagari": {
        "hi": "के में की है और से का को पर हैं यह एक ने कि भी नहीं हम आप था",
        "mr": "आहे आणि या च्या मध्ये ते हे आहेत एक नाही होते तर मी त्या हा ही",
        "ne": "छ र को मा हो गर्न पनि छन् यो एक ले लागि भएको म त्यो गरेको",
    },
}
_MIN_LETTERS = 8
_MIN_SHARE = 0.5  # of the letters, for a script to be the text's


def detect_language(text: str) -> str | None:
    """ISO 639-1 code; None if there is too little text, no main script, or no known word."""
    counts = Counter(filter(None, map(_script, text)))
    total = sum(counts.values())
    if total < _MIN_LETTERS:
        return None
    if counts["kana"] > 0.1 * total:  # Japanese is mostly Han characters, Chinese has no kana
        return "ja"
    script, number = counts.most_common(1)[0]
    if number < _MIN_SHARE * total:
        return None
    return _ONE[script] if script in _ONE else _by_words(text, script)


def _by_words(text: str, script: str) -> str | None:
    # Combining vowel signs belong to the word: \w does not have them.
    words = re.findall(r"[^\s\d.,;:!?()\"'«»“”।،؟*_<>\[\]-]+", text.lower())
    common = {language: set(known.split()) for language, known in _WORDS[script].items()}
    scores = {language: sum(word in known for word in words) for language, known in common.items()}
    best = max(scores, key=lambda language: scores[language])
    return best if scores[best] else None


def _script(letter: str) -> str | None:
    code = ord(letter)
    for name, ranges in _SCRIPTS.items():
        if any(low <= code <= high for low, high in ranges):
            return name
    return None
