"""The checkers of IFEval: for each instruction an answer that follows it and some that do not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tokenmill.evaluate.instructions import INSTRUCTIONS, follows
from tokenmill.evaluate.instructions.language import detect_language
from tokenmill.evaluate.instructions.length import count_sentences
from tokenmill.evaluate.tasks.ifeval import IfEval, judge, loose_variants

# (instruction, arguments, answers that follow it, answers that do not)
CASES: list[tuple[str, dict[str, Any], list[str], list[str]]] = [
    ("keywords:existence", {"keywords": ["Tree", "river"]}, ["Trees by the RIVER"], ["a tree", "a river"]),
    (
        "keywords:frequency",
        {"keyword": "war", "frequency": 2, "relation": "at least"},
        ["War and war", "warward"],
        ["one war"],
    ),
    ("keywords:frequency", {"keyword": "x", "frequency": 2, "relation": "less than"}, ["x y"], ["x x"]),
    ("keywords:forbidden_words", {"forbidden_words": ["cat"]}, ["category"], ["A Cat!"]),
    ("keywords:letter_frequency", {"letter": "N", "let_frequency": 2, "let_relation": "at least"}, ["nN"], ["n"]),
    ("language:response_language", {"language": "hi"}, ["यह एक किताब है और मैं पढ़ता हूँ"], ["This is a book."]),
    ("length_constraints:number_words", {"num_words": 3, "relation": "at least"}, ["one, two-three"], ["one two"]),
    ("length_constraints:number_sentences", {"num_sentences": 2, "relation": "at least"}, ["A b. C d!"], ["A b."]),
    ("length_constraints:number_paragraphs", {"num_paragraphs": 2}, ["a\n***\nb", "a *** b ***"], ["a", "a***  ***b"]),
    (
        "length_constraints:nth_paragraph_first_word",
        {"num_paragraphs": 2, "nth_paragraph": 2, "first_word": "weekend"},
        ['x\n\n"Weekend, yes'],
        ["weekend\n\nx", "x\n\nweekends y", "x\n\nweekend\n\ny"],
    ),
    ("detectable_content:number_placeholders", {"num_placeholders": 2}, ["[a] and [b]"], ["[a]", "[a\nb] [c]"]),
    ("detectable_content:postscript", {"postscript_marker": "P.S."}, ["Hi\nP.S. more", "p. s. x"], ["PS more"]),
    ("detectable_content:postscript", {"postscript_marker": "P.P.S"}, ["P.P.S more", "P. P. S. x"], ["P.S. more"]),
    ("detectable_format:number_bullet_lists", {"num_bullets": 2}, ["* a\n- b"], ["* a", "* a\n* b\n* c", "**a\n**b"]),
    ("detectable_format:constrained_response", {}, ["My answer is maybe."], ["Maybe."]),
    ("detectable_format:number_highlighted_sections", {"num_highlights": 2}, ["*a* and *b*"], ["*a*", "** **"]),
    (
        "detectable_format:multiple_sections",
        {"section_spliter": "Day", "num_sections": 2},
        ["Day 1\nx\nDay 2\ny"],
        ["Day 1\nx", "Day\nDay\n"],
    ),
    ("detectable_format:json_format", {}, ['```json\n{"a": 1}\n```', "[1]"], ["{a: 1}", 'Here: {"a": 1}']),
    ("detectable_format:title", {}, ["<<Joy>>\ntext"], ["Joy", "<<>>", "<< >>"]),
    ("combination:two_responses", {}, ["a ****** b"], ["a ****** a", "a", "a ****** b ****** c"]),
    ("combination:repeat_prompt", {"prompt_to_repeat": "Say it."}, ["say it. Yes"], ["Yes. Say it."]),
    ("startend:end_checker", {"end_phrase": "Any more?"}, ['"... any more?"\n'], ["Any more? No."]),
    ("startend:quotation", {}, ['"Hello"\n'], ['"Hello', '"']),
    (
        "change_case:capital_word_frequency",
        {"capital_frequency": 2, "capital_relation": "less than"},
        ["ONE two"],
        ["ONE TWO"],
    ),
    ("change_case:english_capital", {}, ["THIS IS THE ANSWER TO IT."], ["This", "ЭТО НЕ ТО ЧТО НАДО"]),
    ("change_case:english_lowercase", {}, ["this is the answer."], ["This is it.", "это не то что надо"]),
    ("punctuation:no_comma", {}, ["a b; c"], ["a, b"]),
]


@pytest.mark.parametrize(("name", "arguments", "good", "bad"), CASES, ids=[case[0] for case in CASES])
def test_checkers(name: str, arguments: dict[str, Any], good: list[str], bad: list[str]) -> None:
    for answer in good:
        assert follows(name, answer, arguments), answer
    for answer in [*bad, "", " \n"]:
        assert not follows(name, answer, arguments), answer


def test_every_instruction_has_a_case() -> None:
    assert {case[0] for case in CASES} == set(INSTRUCTIONS)


def test_arguments_that_are_null_do_not_count() -> None:
    assert follows("punctuation:no_comma", "a b", {"num_words": None, "relation": None})


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("One. Two! Three?", 3),
        ("Dr. Smith met J. Doe at 3.5 p.m. sharp.", 1),
        ('He said "Stop!" and left. "Why?" she asked.', 4),
        ("1. First point\n\n2. Second point", 2),
        ("A heading\n\nText without end", 2),
        ("...", 0),
        ("Is it? The answer is no. Cats etc. are not meant. It was at 5 p.m. Then we left.", 5),
    ],
)
def test_sentences(text: str, count: int) -> None:
    assert count_sentences(text) == count


@pytest.mark.parametrize(
    ("text", "language"),
    [
        ("The quick brown fox jumps over the lazy dog and it is happy.", "en"),
        ("El perro está en la casa y no quiere salir por la noche.", "es"),
        ("O menino não quer ir para a escola com os amigos dele.", "pt"),
        ("Le chat est sur la table et il ne veut pas descendre.", "fr"),
        ("Der Hund ist in dem Haus und will nicht auf die Straße.", "de"),
        ("Il gatto è sulla tavola e non vuole scendere per mangiare.", "it"),
        ("Kissa on pöydällä ja se ei halua tulla alas, mutta hän odottaa.", "fi"),
        ("Con mèo của tôi không thích nước và nó là một con mèo đen.", "vi"),
        ("Paka wangu ni mweusi na anapenda kulala kwa muda mrefu katika nyumba.", "sw"),
        ("Кошка сидит на столе, и она не хочет спать, потому что это день.", "ru"),
        ("Кішка сидить на столі і вона не хоче спати, але це її дім.", "uk"),
        ("Котката е на масата и не иска да се качи, защото това са нейните неща.", "bg"),
        ("القط يجلس على الطاولة وهو لا يريد أن ينام في هذا البيت", "ar"),
        ("گربه در خانه است و برای آن غذا می خواهد که از این بهتر باشد", "fa"),
        ("بلی میز پر ہے اور وہ اس گھر میں نہیں رہنا چاہتی کہ یہ چھوٹا ہے", "ur"),
        ("मांजर टेबलवर आहे आणि ते खाली येत नाही", "mr"),
        ("बिरालो टेबल मा छ र यो तल आउन चाहँदैन", "ne"),
        ("ಬೆಕ್ಕು ಮೇಜಿನ ಮೇಲಿದೆ", "kn"),
        ("고양이가 식탁 위에 앉아 있습니다", "ko"),
        ("猫はテーブルの上に座っています。", "ja"),
        ("猫坐在桌子上，不想下来吃东西。", "zh"),
        ("12345", None),
    ],
)
def test_languages(text: str, language: str | None) -> None:
    assert detect_language(text) == language


def test_loose_judging_forgives_an_opening_line_and_asterisks() -> None:
    item = {"instruction_id_list": ["startend:quotation"], "kwargs": [{}]}
    assert judge(item, 'Sure:\n"The text."')[0] == {"prompt_strict": 0.0, "prompt_loose": 1.0}
    assert judge(item, '**"The text."**')[0]["prompt_loose"] == 1.0
    assert judge(item, "The text.")[0] == {"prompt_strict": 0.0, "prompt_loose": 0.0}
    assert len(loose_variants("a\nb\nc")) == 8


def test_every_item_of_the_benchmark_is_understood(data_path: Path) -> None:
    path = data_path / "tasks" / "ifeval.jsonl"
    items = [json.loads(line) for line in path.read_text().splitlines()]
    assert len(items) == 271
    for item in items:
        assert IfEval.defect(item) is None
        metrics, details = judge(item, "A plain answer, in one line.")
        assert set(metrics) == {"prompt_strict", "prompt_loose"}
        assert len(details["strict"]) == len(item["kwargs"])  # type: ignore[arg-type]
    unknown = {"instruction_id_list": ["keywords:rhyme"], "kwargs": [{}]}
    assert "keywords:rhyme" in (IfEval.defect(unknown) or "")
