"""The page's markdown in a real browser: made of elements, the same at every moment of a stream, never markup of a
model, and quick for texts that are written to make it slow. Needs no model: the files are served as they are."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from importlib.resources import files
from typing import Any

import pytest

from tests.e2e.webdriver import Browser, chromium

_MARKDOWN = """# Title

Some **bold *and* more**, `code`, ~~gone~~, snake_case_name and 2 * 3 * 4.
Second line, <b>raw</b> & [a link](https://example.org/a_(b)) or https://example.org/x.

1. one
   - nested
   - again

     ```py
     print("<i>")
     ```
2. two

| a | b |
|:--|--:|
| `x \\| y` | 1 |

> quoted
> - inside

---
- [bad](javascript:alert(1)) ![pic](https://example.org/p.png) <https://example.org>
"""
_RENDER = """
const [text, done] = arguments, [whole, grown] = [0, 0].map(() => document.createElement("div"));
import("/page/markdown.js").then(({ Markdown }) => {
  new Markdown(whole).update(text);
  const markdown = new Markdown(grown);
  for (let end = 0; end <= text.length; end += 1) markdown.update(text.slice(0, end));
  const all = (selector) => [...whole.querySelectorAll(selector)];
  done({
    same: whole.isEqualNode(grown), tags: [...whole.children].map((each) => each.tagName.toLowerCase()),
    html: whole.innerHTML, text: whole.textContent,
    links: all("a").map((each) => each.href + " " + each.rel), code: all("pre").map((each) => each.textContent),
    cells: all("td").map((each) => each.className + ":" + each.textContent),
    second: whole.querySelector("p")?.innerHTML, items: all("ol > li").length, nested: all("ol ul > li").length,
    harmful: all("script, img, iframe, [onclick], [style], b").length, quoted: all("blockquote li").length,
  });
}, (error) => done({ error: String(error) }));
"""


class _Quiet(SimpleHTTPRequestHandler):
    def log_message(self, format: str, *arguments: Any) -> None:
        pass


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """With the page open."""
    folder = files("tokenmill.serve").joinpath("static")
    with chromium() as found, ThreadingHTTPServer(("127.0.0.1", 0), partial(_Quiet, directory=str(folder))) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        found.go(f"http://127.0.0.1:{server.server_port}/")
        yield found
        server.shutdown()


def _rendered(browser: Browser, text: str) -> dict[str, Any]:
    found: dict[str, Any] = browser.run_async(_RENDER, text)
    assert "error" not in found, found
    return found


def test_a_text_is_made_of_elements_and_is_the_same_while_it_grows(browser: Browser) -> None:
    found = _rendered(browser, _MARKDOWN)
    assert found["same"], found
    assert found["tags"] == ["h3", "p", "ol", "div", "blockquote", "hr", "ul"]
    addresses = [f"https://example.org/{each}" for each in ("a_(b)", "x", "p.png", "")]
    assert found["links"] == [f"{each} noopener noreferrer nofollow" for each in addresses]
    assert found["second"].startswith(
        "Some <strong>bold <em>and</em> more</strong>, <code>code</code>, <del>gone</del>, snake_case_name and "
        "2 * 3 * 4.<br>Second line, &lt;b&gt;raw&lt;/b&gt; &amp; "
    )
    assert (found["items"], found["nested"], found["quoted"], found["harmful"]) == (2, 2, 1, 0)
    assert found["code"] == ['print("<i>")']
    assert found["cells"] == ["start:x | y", "end:1"]


@pytest.mark.parametrize(
    ("text", "html"),
    [
        ("a *b* _c_ **d** __e__", "<p>a <em>b</em> <em>c</em> <strong>d</strong> <strong>e</strong></p>"),
        ("`` a ` b `` \\*kept\\*", "<p><code>a ` b</code> *kept*</p>"),
        ("- a\n- b\n1. c", '<ul><li>a</li><li>b</li></ul><ol start="1"><li>c</li></ol>'),
        ("3. a\n\n4. b", '<ol start="3"><li>a</li><li>b</li></ol>'),
        ("a\n\n\nb\n# c #", "<p>a</p><p>b</p><h3>c</h3>"),
        ("**open and `open", "<p>**open and `open</p>"),
        ("| a |\nno table", "<p>| a |<br>no table</p>"),
        ("[a](data:text/html,x) [b](//evil.example)", "<p><span>a</span> <span>b</span></p>"),
    ],
)
def test_pieces(browser: Browser, text: str, html: str) -> None:
    found = _rendered(browser, text)
    assert found["html"] == html
    assert found["same"]


@pytest.mark.parametrize("attack", ["<script>alert(1)</script>", "<img src=x onerror=alert(1)>", "[x](javascript:a)"])
@pytest.mark.parametrize(
    "around", ["{}", "```\n{}\n```", "| {} |\n|---|\n| {} |", "> - {}", "# {}", "**{}**", "[{}](http:x)"]
)
def test_hostile_text_stays_text(browser: Browser, attack: str, around: str) -> None:
    found = _rendered(browser, around.replace("{}", attack))
    assert found["harmful"] == 0
    assert not [link for link in found["links"] if not link.startswith("http")]


@pytest.mark.parametrize(
    "piece", ["[", "*", "**a", "`", "_a ", "https://", "![", "<https:", "> ", "- a\n", "|a\n|-\n", "~~x"]
)
def test_no_text_makes_it_hang(browser: Browser, piece: str) -> None:
    """As many characters as a long answer has, within the time limit that the driver gives a script."""
    script = """
      const [text, done] = arguments;
      import("/page/markdown.js").then(({ Markdown }) => {
        new Markdown(document.createElement("div")).update(text);
        done(true);
      });
    """
    assert browser.run_async(script, (piece * 20000)[:20000])
