"""The built-in page in a real browser, with a real model: columns, tools, JSON, log-probabilities, conversations, the
dashboard, keys and errors; on a phone and a desk, light and dark, by keyboard; checked by axe. One server for all."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.e2e.axe import axe_source, violations
from tests.e2e.chat_page import SECONDS, ChatPage, api_answer
from tests.e2e.serving import RunningServer, serving, wait_until
from tests.e2e.webdriver import Browser, chromium

_KEYS = [
    {"key": "owner-key", "name": "owner", "metrics": True},
    {"key": "guest-key", "name": "guest", "requests_per_minute": 1},
]
_FLAGS = ("--context", "1024", "--concurrency", "4", "--price", "3600", "--no-access-log")
_NAMES = ("--served-model-name", "small", "--served-model-name", "same")
_SCHEMA = {"type": "object", "properties": {"year": {"enum": [1887, 1889]}}, "additionalProperties": False}


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as running:
        yield running


@pytest.fixture(scope="module")
def server(
    browser: Browser, model_path: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RunningServer]:
    """Started only where there is a browser."""
    assert browser
    keys = tmp_path_factory.mktemp("page") / "keys.json"
    keys.write_text(json.dumps({"keys": _KEYS}))
    with serving(model_path("smollm2"), *_FLAGS, *_NAMES, "--api-keys-file", str(keys)) as running:
        running.http.headers["authorization"] = "Bearer owner-key"
        yield running


@pytest.fixture
def page(browser: Browser, server: RunningServer) -> Iterator[ChatPage]:
    """As its owner sees it for the first time."""
    browser.resize(1280, 860)
    found = ChatPage(browser, server.url)
    found.open("owner-key")
    found.set(temperature="0", max_tokens="24")
    yield found
    assert not [line for line in browser.console() if "Failed to load resource" not in line]


def test_the_page_asks_for_the_key_and_keeps_it_for_the_tab_only(browser: Browser, server: RunningServer) -> None:
    page = ChatPage(browser, server.url)
    page.open()
    wait_until(lambda: browser.shown("#key-dialog"), SECONDS)
    _save(page, "key")
    browser.type("#key-asked", "wrong")
    browser.press("ENTER")
    page.see("#key-problem", "does not know this key")
    wait_until(lambda: browser.shown("#key-dialog"), SECONDS)
    browser.type("#key-asked", "owner-key")
    browser.press("ENTER")
    page.see("#status", "ready")
    page.see(".empty h2", "small")
    assert "owner-key" not in browser.run("return JSON.stringify(localStorage)")
    page.open(fresh=False)
    page.see("#status", "ready")


def test_it_chats_as_the_api_does(page: ChatPage, server: RunningServer) -> None:
    question = "What is the capital of France?"
    page.ask(question, system="Answer in one sentence.")
    messages = [{"role": "system", "content": "Answer in one sentence."}, {"role": "user", "content": question}]
    answer = api_answer(server, messages, max_tokens=24)
    assert page.texts(".answer .body") == [answer]
    assert page.texts(".user .said") == [question]
    note = page.texts(".answer .note span")
    assert [each for each in note if each.endswith("tokens/s")]
    assert note[0].endswith("s to first token")
    assert float(note[-1].removeprefix("$")) > 0
    page.ask("And of Spain?")  # the second turn has the first before it
    assert "cached" in page.texts(".answer .note")[1]


def test_models_answer_side_by_side(page: ChatPage) -> None:
    browser = page.browser
    browser.click("#compare")
    chosen = "return [...document.querySelectorAll('#columns select')].map((each) => each.value)"
    assert browser.run(chosen) == ["small", "same"]
    page.ask("Name a colour.")
    assert page.texts(".answer h2") == ["small", "same"]
    first, second = page.texts(".answer .body")
    assert first == second != ""  # two names of one model
    assert page.count(".answer .note .speed") == 2
    lefts = browser.run("return [...document.querySelectorAll('.answer')].map((e) => e.getBoundingClientRect().top)")
    assert lefts[0] == lefts[1], "they stand side by side"
    _save(page, "columns")
    browser.click("#columns .column:last-of-type button")
    assert page.texts(".answer h2") == ["small"]
    browser.click("#toast button")
    assert page.texts(".answer h2") == ["small", "same"]


def test_stop_edit_and_regenerate(page: ChatPage, server: RunningServer) -> None:
    browser = page.browser
    page.say("Tell a long story.", max_tokens="900")  # it goes on to the limit
    wait_until(lambda: len(browser.text(".answer .body")) > 10, SECONDS)
    browser.press("ESCAPE")
    page.wait()
    assert "stopped" in page.texts(".answer .note .cut")
    server.wait_idle()
    browser.hover(".user")
    browser.click(".user button")
    browser.clear(".editing textarea")
    browser.type(".editing textarea", "Name a fruit.")
    page.set(max_tokens="8")
    browser.click(".editing .main")
    page.wait()
    assert page.texts(".user .said") == ["Name a fruit."]
    before = page.texts(".answer .body")
    page.set(max_tokens="3")
    browser.click(".answer .redo")
    page.wait()
    assert page.count(".answer") == 1
    assert len(page.texts(".answer .body")[0]) < len(before[0])
    assert "cut off at max tokens" in page.texts(".answer .note .cut")


def test_markup_of_the_user_stays_text_and_the_policy_forbids_more(page: ChatPage) -> None:
    page.ask("<img src=x onerror='document.title=\"harmed\"'>", max_tokens="1")
    assert page.texts(".user .said")[0].startswith("<img")
    assert page.count("#log img") == 0
    refused = "try { document.body.innerHTML = '<b>x</b>'; return 'done' } catch (error) { return error.name }"
    assert page.browser.run(refused) == "TypeError"  # trusted types
    page.browser.console()  # which notes the attempt


def test_code_is_copied(page: ChatPage) -> None:
    browser = page.browser
    page.ask("When was it built?", format="json_schema", schema=json.dumps(_SCHEMA), max_tokens="40")
    answer = browser.text(".answer pre")
    assert json.loads(answer).get("year", 1887) in (1887, 1889)
    browser.click(".answer figure button")
    wait_until(lambda: browser.text("#announce") == "Copied", SECONDS)
    browser.click("#prompt")
    browser.press("CONTROL", "v")
    pasted = browser.run("return document.querySelector('#prompt').value")
    assert json.loads(pasted) == json.loads(answer)


def test_a_mistake_in_the_settings_is_said_before_anything_is_sent(page: ChatPage) -> None:
    page.set(format="json_schema", schema="{")
    assert "Not JSON" in page.browser.text("#schema-error")
    page.say("Anything")
    assert page.count(".turn") == 0
    page.set(format="text", tools='{"description": "x"}')
    assert page.browser.text("#tools-error") == "A function needs a name."


def test_tools_are_called_and_answered(page: ChatPage, server: RunningServer) -> None:
    browser = page.browser
    browser.click("#tools-example")
    page.ask("How is the weather in Paris?", tool_choice="required", max_tokens="80")
    assert set(page.texts(".call .name")) == {"get_weather"}
    assert "city" in json.loads(browser.text(".call pre"))
    assert "required" in browser.run("return document.querySelector('#tool_choice').value")
    _save(page, "tools")
    for number in range(page.count(".call")):
        browser.type(f".call:nth-child({number + 1}) textarea", '{"celsius": 21, "sky": "clear"}')
    browser.click(".give")
    wait_until(lambda: page.count(".step") == 2, SECONDS)
    page.wait()
    assert json.loads(browser.text(".result pre")) == {"celsius": 21, "sky": "clear"}
    assert page.texts(".answer .error") == []
    assert page.count(".call textarea") == 0
    server.wait_idle()


def test_tokens_show_their_alternatives(page: ChatPage) -> None:
    browser = page.browser
    page.ask("What is the capital of France?", logprobs=True)
    assert page.count(".token") > 3
    browser.hover(".token")
    assert browser.shown("#token-tip")
    assert page.count("#token-tip tr") == 5
    assert page.count("#token-tip tr.chosen") == 1
    _save(page, "tokens")
    chosen = float(browser.text("#token-tip tr.chosen td:nth-child(2)").removesuffix(" %"))
    assert chosen == max(float(each.removesuffix(" %")) for each in page.texts("#token-tip td:nth-child(2)"))
    browser.run("document.querySelector('.tokens').focus()")
    browser.press("ARROW_RIGHT")
    assert browser.run("return document.querySelector('.tokens').getAttribute('aria-activedescendant')")
    browser.click(".switch [data-mode=text]")
    assert not browser.shown(".tokens")
    assert page.texts(".answer .body")[0].split()[0] in "".join(page.texts(".token"))


def test_conversations_are_kept_exported_and_imported(page: ChatPage, tmp_path: Path) -> None:
    browser = page.browser
    page.ask("What is the capital of France?", system="Be brief.")
    answer = page.texts(".answer .body")
    browser.click("#new")
    page.ask("Name a colour.")
    assert page.texts("#conversation-list .title") == ["Name a colour.", "What is the capital of France?"]
    page.open("owner-key", fresh=False)
    browser.click("#conversation-list li:last-child button")
    assert page.texts(".answer .body") == answer
    assert browser.run("return document.querySelector('#system').value") == "Be brief."
    script = "const done = arguments[0]; import('/page/store.js').then((store) => done(store.exported()))"
    exported = tmp_path / "conversations.json"
    exported.write_text(browser.run_async(script))
    assert "owner-key" not in exported.read_text()
    browser.hover("#conversation-list li:not(.hint)")
    browser.click("#conversation-list li .icon")
    assert page.count("#conversation-list li:not(.hint)") == 1
    browser.click("#toast button")
    assert page.count("#conversation-list li:not(.hint)") == 2
    page.open("owner-key")
    assert page.count("#conversation-list li:not(.hint)") == 0
    browser.run("document.querySelector('#import-file').hidden = false")
    browser.type("#import-file", str(exported))
    page.see("#toast", "2 conversations imported")
    assert page.count("#conversation-list li:not(.hint)") == 2
    odd = {"id": "../x", "title": 5, "columns": "x", "turns": [{"prompt": 1, "answers": [None, 5, {"steps": [7]}]}]}
    exported.write_text(json.dumps({"format": "tokenmill-conversations-1", "conversations": [odd, None, {"turns": 1}]}))
    browser.type("#import-file", str(exported))
    page.see("#toast", "One conversation imported")
    browser.click("#conversation-list li button")
    assert page.count(".turn") == 1
    wrong = tmp_path / "wrong.json"
    wrong.write_text('{"format": "other"}')
    browser.type("#import-file", str(wrong))
    page.see("#toast", "no conversations exported from this page")


def test_the_dashboard_is_live(page: ChatPage, server: RunningServer) -> None:
    browser = page.browser
    page.say("Tell a long story.", max_tokens="900")
    browser.click("#tab-board")

    def value(chart: str, line: int = 0) -> str:
        return browser.text(f"#chart-{chart} .line-{line} b")

    wait_until(lambda: value("batch") == "1" and value("speed") not in ("–", "0"), SECONDS)
    wait_until(lambda: value("kv") not in ("–", "0.0 %") and "tokens/s" in browser.text("#status"), SECONDS)
    wait_until(lambda: value("cost") > "$1," and value("cost")[2] == ",", SECONDS)  # of 3,600 an hour
    _save(page, "board")
    browser.press("ESCAPE")
    wait_until(lambda: value("batch") == "0", SECONDS)
    server.wait_idle()
    lines = server.http.get("/metrics").text.splitlines()
    total = next(line for line in lines if line.startswith("tokenmill_generation_tokens_total"))
    page.see("#chart-speed .hint", f"{float(total.split()[1]):,.0f} generated")
    assert value("hits") != "–"
    assert ["owner", "small"] in [page.texts(".spending tbody td")[at : at + 2] for at in range(0, 12, 6)]
    assert "M" in browser.run("return document.querySelector('#chart-speed .stroke').getAttribute('d')")


def test_limits_and_wrong_requests_are_explained(page: ChatPage) -> None:
    browser = page.browser
    page.ask("word", max_tokens="5000")
    assert "1024" in browser.text(".answer .error") or "5000" in browser.text(".answer .error")
    page.set(max_tokens="2")
    browser.click(".error button")
    page.wait()
    assert not page.has(".error")
    page.set(key="guest-key")
    browser.run("document.querySelector('#key').dispatchEvent(new Event('change', { bubbles: true }))")
    page.see("#status", "connected")
    page.ask("One")
    page.ask("Two")
    assert "try again in" in browser.text(".turn:last-child .error")
    _save(page, "refused")
    browser.click("#tab-board")
    page.see("#board .notice", "may not see the numbers")
    page.see(".spending", "guest")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_nothing(page: ChatPage, scheme: str) -> None:
    """Contrast included, in both themes, on a desk and on a phone, with everything on the page."""
    browser, source = page.browser, axe_source()
    browser.prefer(scheme)
    try:
        _save(page, f"{scheme}-empty")
        assert violations(browser, source) == [], "empty"
        browser.click("#compare")
        browser.click("#tools-example")
        page.ask("How is the weather in Paris?", tool_choice="required", max_tokens="60", logprobs=True)
        _save(page, f"{scheme}-tools")
        assert violations(browser, source) == [], "tools"
        page.ask("word", tools="", max_tokens="5000")
        assert violations(browser, source) == [], "errors"
        browser.click("#tab-board")
        page.see("#chart-speed .hint", "in all")
        page.see(".spending", "owner")
        _save(page, f"{scheme}-board")
        assert violations(browser, source) == [], "dashboard"
        browser.click("#tab-chat")
        browser.resize(360, 740)
        _save(page, f"{scheme}-phone")
        assert violations(browser, source) == [], "phone"
        browser.click("#open-settings")
        _save(page, f"{scheme}-panel")
        assert violations(browser, source) == [], "panel"
    finally:
        browser.prefer("light")


def test_a_phone_has_room_for_everything(page: ChatPage) -> None:
    browser = page.browser
    browser.resize(360, 740)
    fits = "return document.documentElement.scrollWidth <= window.innerWidth"
    wait_until(lambda: not browser.shown("#settings"), SECONDS)
    browser.click("#compare")
    page.ask("Write a table of three fruits, then a line of Python code that is long.", max_tokens="60")
    assert browser.run(fits)
    tops = browser.run("return [...document.querySelectorAll('.answer')].map((e) => e.getBoundingClientRect().top)")
    assert tops[0] < tops[1], "one under the other"
    for button, panel in (("#open-list", "#conversations"), ("#open-settings", "#settings")):
        browser.click(button)
        assert browser.shown(panel)
        assert browser.run("return document.querySelector('#chat').inert")
        assert browser.run("return document.querySelector(arguments[0]).contains(document.activeElement)", panel)
        assert browser.run(fits)
        browser.press("ESCAPE")
        assert not browser.shown(panel)
    browser.click("#tab-board")
    assert browser.run(fits)


def test_the_theme_follows_the_system_until_one_is_chosen(page: ChatPage) -> None:
    browser = page.browser
    ground = "return getComputedStyle(document.body).backgroundColor"
    colors = {}
    try:
        for scheme in ("light", "dark"):
            browser.prefer(scheme)
            colors[scheme] = browser.run(ground)
        assert colors["light"] != colors["dark"]
        browser.click("#theme")  # light
        assert browser.run(ground) == colors["light"]
        page.open("owner-key", fresh=False)
        assert browser.run(ground) == colors["light"], "kept"
        browser.click("#theme")
        browser.prefer("light")
        assert browser.run(ground) == colors["dark"]
    finally:
        browser.prefer("light")


def test_the_keyboard_reaches_everything(page: ChatPage) -> None:
    browser = page.browser
    focused = "const e = document.activeElement; return e.id || e.className || e.tagName"
    browser.run("document.querySelector('#open-list').focus()")
    browser.press("SHIFT", "TAB")
    assert browser.run(focused) == "skip"
    assert browser.shown(".skip")
    browser.press("ENTER")
    assert browser.run(focused) == "prompt"
    browser.press("O")
    browser.press("ENTER")
    page.wait()
    browser.run("document.querySelector('#tab-chat').focus()")
    browser.press("ARROW_RIGHT")
    assert browser.shown("#board")
    assert browser.run(focused) == "tab-board"
    visible = """
      const all = [...document.querySelectorAll("button, select, input, textarea, a[href]")];
      const shown = all.filter((e) => e.checkVisibility());
      return shown.filter((e) => e.tabIndex < 0 && e.getAttribute("role") !== "tab").length"""
    assert browser.run(visible) == 0


def test_a_server_that_is_gone_is_noticed(page: ChatPage, server: RunningServer) -> None:
    """The last test: the server ends."""
    page.say("Tell a long story.", max_tokens="900")
    wait_until(lambda: len(page.browser.text(".answer .body")) > 10, SECONDS)
    server.process.kill()
    page.see(".answer .error", "connection ended")
    page.see("#status", "no connection")
    page.browser.click(".error button")
    page.see(".answer .error", "does not answer")
    _save(page, "gone")
    assert page.browser.shown("#send")


def _save(page: ChatPage, name: str) -> None:
    """Pictures for a person to look at, where one asked for them."""
    folder = os.environ.get("TOKENMILL_SCREENSHOTS")
    if folder:
        (Path(folder) / f"page-{name}.png").write_bytes(page.browser.screenshot())
