"""Drives the page of `q4 serve` in Chromium, against the mock or, with --url, what needs no script against a
real server.

    python3 -m venv VENV && VENV/bin/pip install playwright && VENV/bin/playwright install chromium
    VENV/bin/python test_page.py [--url http://127.0.0.1:8080/] [--shots DIR] [NAME...]

A Chromium of the system is used where there is one. Exits with 1 if a test failed."""
import argparse
import re
import shutil
import sys
import time
import traceback
from pathlib import Path
from urllib.parse import urlsplit

from playwright.sync_api import expect, sync_playwright

from mock import EXPLAIN, Mock

DESK, PHONE = {"width": 1180, "height": 820}, {"width": 390, "height": 844}
LIMIT = 60_000
TESTS = []

# The contrast of every visible text with what it stands on; 3 is enough where the text is large.
CONTRAST = """() => {
  const channels = (colour) => colour.match(/[\\d.]+/g).map(Number);
  const light = (rgb) => rgb.slice(0, 3).map((c) => c / 255)
    .map((c) => (c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4))
    .reduce((sum, c, i) => sum + c * [0.2126, 0.7152, 0.0722][i], 0);
  const ground = (node) => {
    for (; node; node = node.parentElement) {
      const [r, g, b, a = 1] = channels(getComputedStyle(node).backgroundColor);
      if (a === 1) return [r, g, b];
    }
    return [255, 255, 255];
  };
  const faint = [];
  for (const node of document.querySelectorAll('body *')) {
    const own = [...node.childNodes].some((child) => child.nodeType === 3 && child.data.trim());
    if (!own || !node.checkVisibility({ visibilityProperty: true })) continue;
    const style = getComputedStyle(node);
    const [a, b] = [light(channels(style.color)), light(ground(node))].sort((x, y) => y - x);
    const ratio = (a + 0.05) / (b + 0.05);
    const least = parseFloat(style.fontSize) >= 24 ? 3 : 4.5;
    if (ratio < least) faint.push([node.outerHTML.slice(0, 80), ratio]);
  }
  return faint;
}"""
CONTROLS = {"button", "link", "textbox", "searchbox", "spinbutton", "combobox", "checkbox", "dialog", "log"}


def test(real=False, expects=(), **options):
    """Marks a test; `expects` are what the console may say, as the browser reports failed loads there, and
    `options` are of the browser."""
    def mark(run):
        TESTS.append((run, real, expects, options))
        return run
    return mark


class Visit:
    """A page in a context of its own, which notes whatever the page must not do."""

    def __init__(self, browser, url, shots, mock=None, **options):
        self.url, self.shots, self.mock = url, shots, mock
        self.context = browser.new_context(**{"viewport": DESK, **options})
        self.page = self.context.new_page()
        self.console, self.foreign, self.files, self.weights, self.paths = [], [], {}, {}, []
        self.page.on("console", lambda m: m.type in ("error", "warning") and self.console.append(m.text))
        self.page.on("pageerror", lambda e: self.console.append(f"uncaught: {e}"))
        self.page.on("request", self.request)
        self.client = self.context.new_cdp_session(self.page)
        self.client.send("Network.enable")
        self.client.on("Network.responseReceived", self.response)
        self.client.on("Network.loadingFinished", self.loaded)
        self.page.add_init_script(
            "addEventListener('securitypolicyviolation', (e) => console.error('CSP', e.violatedDirective))")
        self.open()

    def request(self, request):
        parts = urlsplit(request.url)
        self.paths.append(parts.path)
        if parts.scheme != "data" and parts.netloc != urlsplit(self.url).netloc:
            self.foreign.append(request.url)

    def response(self, event):
        if event["type"] in ("Document", "Script", "Stylesheet"):
            self.files[event["requestId"]] = urlsplit(event["response"]["url"]).path

    def loaded(self, event):
        """What went over the wire for a file of the page, its head included."""
        if event["requestId"] in self.files:
            self.weights[self.files[event["requestId"]]] = event["encodedDataLength"]

    def open(self):
        self.page.goto(self.url)
        self.page.wait_for_load_state("networkidle")

    def ask(self, text):
        self.page.get_by_label("Message", exact=True).fill(text)
        self.page.keyboard.press("Enter")

    @property
    def answer(self):
        return self.page.locator("article.assistant").last

    def whole(self):
        expect(self.page.get_by_role("button", name="Send", exact=True)).to_be_visible(timeout=120_000)

    def shot(self, name):
        if self.shots:
            self.page.screenshot(path=self.shots / f"{name}.png")

    def named(self):
        """Every control has a name, and every text a contrast."""
        nodes = self.client.send("Accessibility.getFullAXTree")["nodes"]
        controls = [n for n in nodes if not n["ignored"] and n["role"]["value"] in CONTROLS]
        assert controls, "the accessibility tree has no control"
        nameless = [n["role"]["value"] for n in controls if not n.get("name", {}).get("value", "").strip()]
        assert not nameless, f"controls without a name: {nameless}"
        faint = self.page.evaluate(CONTRAST)
        assert not faint, f"text of too little contrast: {faint}"

    def narrow(self):
        root = "document.documentElement"
        wide = self.page.evaluate(f"{root}.scrollWidth - {root}.clientWidth")
        assert wide <= 0, f"the page scrolls sideways by {wide} px"

    def close(self, expects):
        bad = [text for text in self.console if not any(re.search(known, text) for known in expects)]
        assert not bad, f"the console says {bad}"
        assert not self.foreign, f"requests to others: {self.foreign}"
        self.context.close()


@test(real=True)
def the_page_weighs_less_than_the_limit_and_asks_three_things(v):
    weight = v.weights
    print(f"        {sum(weight.values())} bytes: {weight}")
    assert {"/", "/style.css", "/app.js"} < set(weight) and sum(weight.values()) < LIMIT, weight
    asked = [path for path in v.paths if path not in weight]
    assert sorted(asked) == ["/ready", "/v1/models", "/v1/q4/explain"], asked
    time.sleep(2)
    assert len(v.paths) == len(weight) + 3, f"the page polls: {v.paths}"
    v.named()
    v.shot("01-welcome")


@test(real=True)
def a_first_message_gets_an_answer_with_its_measures(v):
    v.ask("Which are the three largest lakes?")
    v.whole()
    # An answer that is there at once, as the demo model's, has no rate.
    rate = r" · [\d.]+ tokens/s" if v.mock else r"( · [\d.]+ tokens/s)?"
    expect(v.answer.locator(".meta")).to_have_text(re.compile(rf"^\d+ tokens{rate}$"))
    expect(v.page.get_by_label("Message", exact=True)).to_be_focused()
    v.named()
    v.narrow()
    v.page.set_viewport_size({"width": 1180, "height": 1400})
    v.shot("02-answer")


@test(real=True)
def a_reload_keeps_the_conversation(v):
    v.ask("Name a river.")
    v.whole()
    before = v.page.locator("#log").inner_text()
    v.open()
    assert v.page.locator("#log").inner_text() == before
    v.page.get_by_role("button", name="New chat").click()
    expect(v.page.locator("article")).to_have_count(0)
    v.shot("03-new-chat")
    v.page.get_by_role("button", name="Bring the last one back").click()
    assert v.page.locator("#log").inner_text() == before
    v.page.get_by_role("button", name="New chat").click()
    v.open()
    expect(v.page.locator("article")).to_have_count(0)


@test(real=True)
def regenerating_replaces_the_last_answer(v):
    v.ask("Name a mountain.")
    v.whole()
    v.answer.get_by_role("button", name="Regenerate").press("Enter")
    v.whole()
    expect(v.page.locator("article")).to_have_count(2)
    # The focus went with the answer before, and must not be lost.
    expect(v.page.get_by_label("Message", exact=True)).to_be_focused()


@test(real=True)
def an_edit_asks_the_last_question_otherwise(v):
    v.ask("Say one")
    v.whole()
    v.ask("Say two")
    v.whole()
    edits = v.page.get_by_role("button", name="Edit")
    expect(edits).to_have_count(1)
    edits.click()
    field = v.page.get_by_label("Edit your message")
    expect(field).to_have_value("Say two")
    v.shot("04-edit")
    field.press("Escape")
    expect(field).to_have_count(0)
    edits.click()
    field.fill("Say three")
    field.press("Enter")
    v.whole()
    expect(v.page.locator("article.user .text")).to_have_text(["Say one", "Say three"])
    expect(v.page.locator("article")).to_have_count(4)


@test(real=True)
def the_panel_says_who_computes(v):
    v.page.locator("#open-plan").click()
    panel = v.page.get_by_role("dialog", name="How answers are computed")
    expect(panel).to_contain_text("Reproducible")
    expect(panel).to_contain_text("Who computes")
    v.named()
    v.shot("05-plan")
    v.page.keyboard.press("Escape")
    expect(panel).to_be_hidden()


@test()
def tokens_show_as_they_come_and_stopping_keeps_them(v):
    v.ask("[slow]")
    expect(v.answer).to_contain_text("counts on: 0 1 2 3")
    expect(v.page.locator("#log")).to_have_attribute("aria-busy", "true")
    early = v.answer.locator(".text").inner_text()
    expect(v.answer).to_contain_text(" 30 ")
    assert v.answer.locator(".text").inner_text().startswith(early)
    v.shot("06-streaming")
    # What is typed meanwhile stays where it is.
    v.ask("And then?")
    expect(v.page.get_by_label("Message", exact=True)).to_have_value("And then?")
    v.page.keyboard.press("Escape")
    v.whole()
    expect(v.answer).to_contain_text("Stopped.")
    expect(v.answer.locator(".meta")).to_have_text(re.compile(r"^about \d+ tokens · [\d.]+ tokens/s$"))
    until = time.time() + 5
    while not v.mock.hung_up and time.time() < until:
        time.sleep(0.05)
    assert v.mock.hung_up == 1, "the server was not told"
    v.ask("[slow]")
    expect(v.answer).to_contain_text("counts on: 0")
    v.page.get_by_role("button", name="Stop", exact=True).click()
    v.whole()
    expect(v.answer).to_contain_text("Stopped.")
    v.shot("07-stopped")


@test()
def a_message_goes_with_history_system_prompt_and_sampling(v):
    v.ask("Say one")
    v.whole()
    first = v.mock.asked[-1]
    assert set(first) == {"model", "messages", "stream", "stream_options"}, first
    assert first["model"] == "Qwen3-4B-NVFP4" and first["stream_options"] == {"include_usage": True}
    v.page.get_by_role("button", name="Settings").click()
    v.page.get_by_label("System prompt").fill("Be brief.")
    for label, value in {"Temperature": "0.7", "Top k": "20", "Max tokens": "64", "Seed": "7"}.items():
        v.page.get_by_label(label).fill(value)
    v.page.get_by_label("Top p").fill("1.5")
    v.named()
    v.shot("08-settings")
    v.page.get_by_role("button", name="Close").click()
    v.open()
    v.ask("Say two")
    v.whole()
    second = v.mock.asked[-1]
    assert second["messages"] == [
        {"role": "system", "content": "Be brief."}, {"role": "user", "content": "Say one"},
        {"role": "assistant", "content": "one"}, {"role": "user", "content": "Say two"}], second
    chosen = {name: second.get(name) for name in ("temperature", "top_p", "top_k", "max_tokens", "seed")}
    # A top_p of 1.5 is out of its range: it is marked, and not sent.
    assert chosen == {"temperature": 0.7, "top_p": None, "top_k": 20, "max_tokens": 64, "seed": 7}, chosen


@test()
def reasoning_is_open_while_it_streams_and_folded_after(v):
    v.ask("[think] Which lake is the largest?")
    thoughts = v.answer.locator("details.reasoning")
    expect(thoughts).to_have_attribute("open", "")
    expect(thoughts.locator("summary")).to_have_text("Thinking")
    expect(thoughts).to_contain_text("Superior")
    v.shot("09-thinking")
    v.whole()
    expect(thoughts).not_to_have_attribute("open", "")
    expect(thoughts.locator("summary")).to_have_text(re.compile(r"^Thought for [\d.]+ s$"))
    expect(v.answer.locator(".text")).to_have_text("The Caspian Sea, by far: 371 000 km².")
    v.shot("10-thought")
    thoughts.locator("summary").click()
    text = thoughts.locator(".thoughts").inner_text()
    assert text.count("Caspian") == 2, f"the thoughts came twice: {text}"


@test()
def an_answer_is_text_and_never_markup(v):
    v.ask("Which are the three largest lakes?")
    v.whole()
    text = v.answer.locator(".text")
    expect(text.locator("img, b, script")).to_have_count(0)
    expect(text).to_contain_text("<img src=x onerror=alert(1)>")
    expect(text).to_contain_text("[a script](javascript:alert(1))")
    links = text.locator("a")
    assert links.evaluate_all("(all) => all.map((a) => [a.href, a.rel])") == [
        ["https://example.org/treaty", "noopener noreferrer"],
        ["https://example.org/lake.png", "noopener noreferrer"]]
    expect(text.locator("table tbody tr")).to_have_count(3)
    expect(text.locator("ol > li")).to_have_count(3)
    expect(text.locator("ol > li ul > li")).to_have_count(2)
    expect(text.locator("pre code")).to_contain_text("    lakes.truncate(n);\n    lakes\n}")


@test()
def code_and_answers_can_be_copied(v):
    v.context.grant_permissions(["clipboard-read", "clipboard-write"])
    v.ask("Which are the three largest lakes?")
    v.whole()
    v.answer.get_by_role("button", name="Copy code").click()
    clip = v.page.evaluate("navigator.clipboard.readText()")
    assert clip.startswith("/// The largest first") and clip.endswith("lakes\n}"), clip
    v.answer.get_by_role("button", name="Copy", exact=True).click()
    assert v.page.evaluate("navigator.clipboard.readText()").startswith("The three largest lakes")


# What a model may write that is hard to read: source, and the HTML that the page must make of it.
MARKDOWN = [
    ("a *b* **c** ***d*** _e_ snake_case_name 2*3*4 ~~f~~",
     "<p>a <em>b</em> <strong>c</strong> <strong><em>d</em></strong> <em>e</em> snake_case_name 2<em>3</em>4 "
     "<del>f</del></p>"),
    ("**bold *and slanted***", "<p><strong>bold <em>and slanted</em></strong></p>"),
    ("2 * 3 * 4 and **open", "<p>2 * 3 * 4 and **open</p>"),
    ("``a ` b`` and `open", "<p><code>a ` b</code> and `open</p>"),
    (r"\*not\* \(x_1\) \[y\]", r"<p>*not* \(x_1\) \[y\]</p>"),
    ("one\ntwo\n\nthree", "<p>one<br>two</p><p>three</p>"),
    ("- a\n- b\n\n\ntext", "<ul><li>a</li><li>b</li></ul><p>text</p>"),
    ("1. a\n\n   more\n2. b", "<ol start=\"1\"><li><p>a</p><p>more</p></li><li><p>b</p></li></ol>"),
    ("3. c\n  - d\n4. e", "<ol start=\"3\"><li>c<ul><li>d</li></ul></li><li>e</li></ol>"),
    ("It was in\n1986. A year", "<p>It was in<br>1986. A year</p>"),
    ("- [x] done\n- [ ] open", "<ul><li>☑ done</li><li>☐ open</li></ul>"),
    ("> a\n> > b\n\n---", "<blockquote><p>a</p><blockquote><p>b</p></blockquote></blockquote><hr>"),
    ("# Head #\ntext", "<h3>Head</h3><p>text</p>"),
    ("See https://a.example/b_(c).",
     "<p>See <a href=\"https://a.example/b_(c)\" rel=\"noopener noreferrer\" target=\"_blank\">"
     "https://a.example/b_(c)</a>.</p>"),
    ("[x](data:text/html,y) [z](/local)", "<p>[x](data:text/html,y) [z](/local)</p>"),
    ("<script>alert(1)</script>", "<p>&lt;script&gt;alert(1)&lt;/script&gt;</p>"),
]


@test()
def markdown_becomes_the_nodes_it_means(v):
    for source, wanted in MARKDOWN:
        script = """async (text) => { const { draw } = await import('/markdown.js');
            const node = document.createElement('div'); draw(node, text); return node.innerHTML; }"""
        assert v.page.evaluate(script, source) == wanted, f"{source!r}: {v.page.evaluate(script, source)}"


@test()
def a_stream_draws_what_the_whole_would(v):
    script = """async (text) => { const { draw } = await import('/markdown.js');
        const [grown, whole] = [document.createElement('div'), document.createElement('div')];
        for (let end = 0; end <= text.length; end += 1) draw(grown, text.slice(0, end));
        draw(whole, text); return [grown.innerHTML, whole.innerHTML]; }"""
    source = (Path(__file__).parent / "answer.md").read_text()
    grown, whole = v.page.evaluate(script, source)
    assert grown == whole


@test()
def hostile_markdown_ends(v):
    script = """async (text) => { const { draw } = await import('/markdown.js');
        draw(document.createElement('div'), text); }"""
    runs = "".join(f"{'`' * (i % 150)} " for i in range(900))
    for source in ["**a " * 20_000, "[" * 20_000, "`" * 20_000 + "a", "> " * 5_000 + "a", "- " * 5_000,
                   "*a _b " * 10_000, "[a](" * 10_000, "|-" * 20_000 + "\n" + "|-" * 20_000, "\\" * 20_000,
                   "a" + " " * 50_000 + "b", "` " * 20_000, runs]:
        v.page.evaluate(script, source)


@test()
def a_fault_in_the_stream_keeps_the_text_and_offers_a_retry(v):
    v.ask("[fault]")
    v.whole()
    expect(v.answer).to_contain_text("This answer meets a fault in")
    expect(v.answer.get_by_role("alert")).to_contain_text("layer 7 gave NaN (Q4-E0211)")
    v.shot("11-fault")


@test(expects=["ERR_INCOMPLETE_CHUNKED_ENCODING", "ERR_CONNECTION_REFUSED", "ERR_CONNECTION_RESET"])
def a_server_that_goes_away_loses_nothing(v):
    v.ask("[drop] a connection")
    v.whole()
    expect(v.answer).to_contain_text("This answer is cut off in the mid")
    expect(v.answer.get_by_role("alert")).to_contain_text("The connection ended before the answer did.")
    v.named()
    port = v.mock.server_port
    v.mock.stop()
    v.answer.get_by_role("button", name="Retry").click()
    expect(v.answer.get_by_role("alert")).to_contain_text("The server does not answer.")
    # The piece that came before is still there.
    expect(v.answer).to_contain_text("This answer is cut off in the mid")
    v.shot("12-away")
    v.ask("Say hello")
    v.whole()
    expect(v.answer.get_by_role("alert")).to_contain_text("The server does not answer.")
    v.mock = Mock(port)
    v.open()
    expect(v.page.locator("article")).to_have_count(4)
    v.answer.get_by_role("button", name="Retry").click()
    v.whole()
    expect(v.answer.locator(".text")).to_have_text("hello")


@test()
def a_new_chat_in_the_middle_can_be_taken_back(v):
    v.ask("[slow]")
    expect(v.answer).to_contain_text(" 20 ")
    v.page.get_by_role("button", name="New chat").click()
    v.whole()
    expect(v.page.locator("article")).to_have_count(0)
    v.page.get_by_role("button", name="Bring the last one back").click()
    expect(v.answer).to_contain_text(" 20 ")
    expect(v.answer).to_contain_text("Stopped.")
    v.open()
    expect(v.answer).to_contain_text(" 20 ")


@test()
def stopping_before_the_first_token_brings_the_old_answer_back(v):
    v.ask("Say one")
    v.whole()
    v.mock.late = True
    v.answer.get_by_role("button", name="Regenerate").click()
    expect(v.answer).to_contain_text("Waiting for the first token")
    v.shot("25-waiting")
    v.page.keyboard.press("Escape")
    v.whole()
    expect(v.answer.locator(".text")).to_have_text("one")
    v.open()
    expect(v.answer.locator(".text")).to_have_text("one")


@test()
def leaving_in_the_middle_keeps_what_came(v):
    v.ask("[slow]")
    expect(v.answer).to_contain_text(" 20 ")
    v.open()
    expect(v.answer).to_contain_text(" 20 ")
    expect(v.answer.get_by_role("alert")).to_contain_text("The page was left before the answer ended.")


@test(expects=["status of 429"])
def a_busy_server_is_named_so(v):
    v.ask("[busy]")
    v.whole()
    alert = v.answer.get_by_role("alert")
    expect(alert).to_contain_text("The server is busy. Retry in 7 s.")
    expect(alert).to_contain_text("8 requests are waiting already (queue_full)")
    v.shot("13-busy")


@test()
def an_answer_in_one_piece_has_a_rate_too(v):
    v.ask("[once]")
    v.whole()
    meta = v.answer.locator(".meta")
    expect(meta).to_have_text(re.compile(r"^7 tokens · [\d.]+ tokens/s$"))
    # The wait for it counts: 7 tokens in at least 0.2 s.
    rate = float(meta.inner_text().split()[3])
    assert 0 < rate <= 35, rate


@test()
def a_cut_answer_says_after_how_many_tokens(v):
    v.ask("[long]")
    v.whole()
    expect(v.answer).to_contain_text("Cut after 10 tokens.")


@test()
def a_call_of_a_tool_is_shown(v):
    v.ask("[tool]")
    v.whole()
    expect(v.answer.locator(".call")).to_contain_text("Calls weather")
    expect(v.answer.locator(".call pre")).to_have_text('{\n  "city": "Oslo",\n  "days": 3\n}')
    v.shot("14-tool")


@test(expects=["status of 401"])
def a_key_is_asked_for_once_and_sent(v):
    v.mock.key = "secret"
    v.page.goto(v.url)
    dialog = v.page.get_by_role("dialog", name="API key")
    expect(dialog).to_contain_text("This server answers only with a key.")
    v.named()
    v.shot("15-key")
    dialog.locator("input").fill("wrong")
    v.page.keyboard.press("Enter")
    expect(dialog).to_contain_text("The server did not take this key.")
    dialog.locator("input").fill("secret")
    v.page.keyboard.press("Enter")
    expect(v.page.locator("#model")).to_have_text("Qwen3-4B-NVFP4")
    v.ask("Say hello")
    v.whole()
    expect(v.answer.locator(".text")).to_have_text("hello")
    v.open()
    expect(dialog).to_be_hidden()
    assert v.page.evaluate("Object.keys(localStorage).every((k) => !localStorage[k].includes('secret'))")


@test(expects=["status of 401"])
def without_a_key_the_question_stays(v):
    v.mock.key = "secret"
    v.ask("Say hello")
    dialog = v.page.get_by_role("dialog", name="API key")
    expect(dialog).to_be_visible()
    v.page.keyboard.press("Escape")
    v.whole()
    expect(v.answer.get_by_role("alert")).to_contain_text("This server needs an API key.")
    v.answer.get_by_role("button", name="Retry").click()
    dialog.locator("input").fill("secret")
    v.page.keyboard.press("Enter")
    v.whole()
    expect(v.answer.locator(".text")).to_have_text("hello")


@test(expects=["status of 503", "status of 404"])
def a_server_that_is_not_ready_or_says_little_is_borne(v):
    v.mock.ready, v.mock.explain = False, {}
    v.open()
    expect(v.page.locator("#notice")).to_contain_text("the model is still being loaded")
    v.shot("16-not-ready")
    v.mock.ready = True
    why = {"layer": "model.layers.0.mlp.down_proj", "why": "sums in any order"}
    v.mock.explain = {
        **EXPLAIN, "reproducible": False, "downgraded": 2, "isa": None, "device": "NVIDIA H100",
        "not_reproducible": [why], "layers": [{"name": "a", "chosen": None}, {}, *EXPLAIN["layers"]]}
    v.page.get_by_role("button", name="Try again").click()
    expect(v.page.locator("#notice")).to_be_empty()
    v.page.locator("#open-plan").click()
    panel = v.page.get_by_role("dialog", name="How answers are computed")
    expect(panel).to_contain_text("sums in any order")
    expect(panel).to_contain_text("nobody")
    panel.get_by_text("Every layer").click()
    v.shot("17-plan-other")


@test()
def a_browser_that_keeps_nothing_still_talks(v):
    v.page.add_init_script("""for (const area of ['localStorage', 'sessionStorage']) {
        const get = () => { throw new DOMException('denied', 'SecurityError'); };
        Object.defineProperty(window, area, { get }); }""")
    v.open()
    v.ask("Say hello")
    v.whole()
    expect(v.answer.locator(".text")).to_have_text("hello")
    expect(v.page.locator("#notice")).to_contain_text("a reload will lose what is new here")


@test()
def shift_enter_starts_a_line(v):
    field = v.page.get_by_label("Message", exact=True)
    field.fill("Say one")
    field.press("Shift+Enter")
    field.press_sequentially("two")
    expect(field).to_have_value("Say one\ntwo")
    field.press("Enter")
    v.whole()
    assert v.mock.asked[-1]["messages"][-1]["content"] == "Say one\ntwo"


@test()
def the_view_follows_the_answer_until_somebody_scrolls_up(v):
    gap = "document.documentElement.scrollHeight - innerHeight - scrollY"
    v.ask("Which are the three largest lakes?")
    v.whole()
    assert v.page.evaluate(gap) < 5
    v.ask("[slow]")
    expect(v.answer).to_contain_text(" 5 ")
    v.page.mouse.move(500, 300)
    v.page.mouse.wheel(0, -600)
    expect(v.answer).to_contain_text(" 60 ")
    assert v.page.evaluate(gap) > 300
    v.page.keyboard.press("Escape")


@test(real=True)
def dark_is_dark_and_readable(v):
    v.page.emulate_media(color_scheme="dark")
    v.ask("Which are the three largest lakes?")
    v.whole()
    ground = v.page.evaluate("getComputedStyle(document.documentElement).backgroundColor")
    assert max(map(int, re.findall(r"\d+", ground))) < 60, ground
    v.named()
    v.page.set_viewport_size({"width": 1180, "height": 1400})
    v.shot("18-dark")
    v.page.locator("#open-plan").click()
    v.named()
    v.shot("19-dark-plan")


@test(real=True, viewport=PHONE, has_touch=True, is_mobile=True, device_scale_factor=2)
def a_phone_scrolls_in_one_direction_and_sends_by_its_button(v):
    v.shot("20-phone-welcome")
    v.narrow()
    field = v.page.get_by_label("Message", exact=True)
    expect(field).not_to_be_focused()
    # Its keyboard has no Shift + Enter, so Enter starts a line.
    v.ask("Which are the three largest lakes?")
    expect(field).to_have_value("Which are the three largest lakes?\n")
    field.press_sequentially("w" * 120)
    v.page.get_by_role("button", name="Send", exact=True).tap()
    v.whole()
    expect(field).not_to_be_focused()
    v.narrow()
    v.shot("21-phone-end")
    v.page.evaluate("scrollTo(0, 0)")
    v.shot("22-phone-begin")
    v.page.locator("#open-plan").tap()
    v.narrow()
    v.shot("23-phone-plan")
    v.page.keyboard.press("Escape")
    v.page.get_by_role("button", name="Settings").click()
    v.narrow()
    v.named()
    v.shot("24-phone-settings")


@test(real=True)
def motion_can_be_reduced(v):
    v.page.emulate_media(reduced_motion="reduce")
    v.ask("Name a lake.")
    moving = v.page.evaluate("document.getAnimations().length")
    assert moving == 0, moving
    v.whole()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--url", help="a real server; tests that need the mock are left out")
    parser.add_argument("--shots", type=Path, help="where screenshots go")
    parser.add_argument("names", nargs="*", help="run only the tests whose names contain one of these")
    args = parser.parse_args()
    if args.shots:
        args.shots.mkdir(parents=True, exist_ok=True)
    failed = ran = 0
    with sync_playwright() as play:
        system = shutil.which("chromium") or shutil.which("chromium-browser")
        browser = play.chromium.launch(executable_path=system, args=["--no-sandbox"])
        for run, real, expects, options in TESTS:
            if (args.url and not real) or (args.names and not any(n in run.__name__ for n in args.names)):
                continue
            ran += 1
            mock = None if args.url else Mock()
            try:
                visit = Visit(browser, args.url or mock.url, args.shots, mock, **options)
                run(visit)
                visit.close(expects)
                print(f"ok      {run.__name__}", flush=True)
            except Exception:
                failed += 1
                print(f"FAILED  {run.__name__}\n{traceback.format_exc()}", flush=True)
        browser.close()
    print(f"{ran - failed} of {ran} passed")
    sys.exit(1 if failed or not ran else 0)


if __name__ == "__main__":
    main()
