"""The page at / in a real browser."""

import os
import shutil

import pytest
from live_server import Slow, serving
from playwright.sync_api import expect, sync_playwright

WAIT = 15_000  # milliseconds


@pytest.fixture(scope="module")
def browser():
    path = next(
        filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
    )
    if path is None:
        reason = "no Chromium found; `apt-get install chromium` brings it"
        if os.environ.get("CI") == "true":
            pytest.fail(reason)
        pytest.skip(reason)
    with sync_playwright() as playwright:
        # Root, as in containers, gets no sandbox; the page is ours.
        running = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield running
        running.close()


@pytest.fixture
def page(browser):
    """A fresh page that complains of nothing: no script error, no refused resource."""
    context = browser.new_context(viewport={"width": 1100, "height": 760})
    context.set_default_timeout(WAIT)
    page = context.new_page()
    complaints = []
    page.on("console", lambda message: complaints.append(message.text))
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.complaints = complaints
    yield page
    context.close()


@pytest.fixture(scope="module")
def slow(loaded, engine):
    with serving(loaded, Slow(engine, 0.05)) as running:
        yield running


@pytest.fixture(scope="module")
def slower(loaded, engine):
    """Time to press a button between two bursts, on a busy machine too."""
    with serving(loaded, Slow(engine, 2.0)) as running:
        yield running


def ready(page, server):
    page.goto(server.url)
    expect(page.locator("#model")).to_have_text("tiny", timeout=WAIT)


def over(page):
    expect(page.locator("body")).not_to_have_class("running", timeout=WAIT)
    expect(page.locator(".writing")).to_have_count(0, timeout=WAIT)


def set_most(page, tokens):
    page.click("#tune")
    page.fill("#max_tokens", str(tokens))
    page.keyboard.press("Escape")


def test_a_chat(page, server, expected):
    ready(page, server)
    set_most(page, 10)
    page.fill("#prompt", "Hi 😀")
    page.press("#prompt", "Enter")
    over(page)
    first = {"role": "user", "content": "Hi 😀"}
    answer = expected([first], 10)
    assert page.locator(".turn.assistant").evaluate("node => node.textContent") == answer
    # The conversation goes on with what was said.
    page.fill("#prompt", "More")
    page.press("#prompt", "Enter")
    expect(page.locator(".turn.assistant")).to_have_count(2)
    over(page)
    said = [first, {"role": "assistant", "content": answer}, {"role": "user", "content": "More"}]
    second = page.locator(".turn.assistant").nth(1).evaluate("node => node.textContent")
    assert second == expected(said, 10)
    page.click("#fresh")
    expect(page.locator(".turn")).to_have_count(0)
    expect(page.locator("#hello")).to_be_visible()
    assert page.complaints == []


def test_a_completion_and_its_figures(page, slow, expected):
    ready(page, slow)
    page.click("#completion")
    set_most(page, 24)
    page.fill("#prompt", "def f(")
    page.press("#prompt", "Control+Enter")
    over(page)
    assert page.locator(".made").evaluate("node => node.textContent") == expected("def f(", 24)
    assert page.text_content(".given") == "def f("
    assert page.text_content("#count") == "24"
    # Four tokens every 50 ms at most.
    assert 2 < float(page.text_content("#rate")) <= 80.0
    value, unit = page.text_content("#first").split()
    assert 0 < float(value) * {"ms": 1, "s": 1000}[unit] < WAIT
    assert page.locator("#plot path").count() == 2
    expect(page.locator(".after")).to_contain_text("24 tokens")
    assert page.complaints == []


def test_stop_ends_it_here_and_on_the_server(page, slower, expected):
    ready(page, slower)
    before = slower.metric("requests_total", outcome="cancelled")
    page.click("#completion")
    set_most(page, 56)
    page.fill("#prompt", "def f(")
    page.click("#go")
    expect(page.locator(".made")).not_to_be_empty(timeout=WAIT)
    page.click("#go")
    expect(page.locator(".after")).to_have_text("stopped")
    over(page)
    slower.wait(slower.idle)
    assert slower.metric("requests_total", outcome="cancelled") == before + 1
    whole, part = expected("def f(", 56), page.locator(".made").evaluate("n => n.textContent")
    assert whole.startswith(part)
    assert len(part) < len(whole)


def test_text_is_never_html(page, server):
    ready(page, server)
    attack = "<img src=x onerror=alert(1)><script>alert(2)</script>"
    page.on("dialog", lambda dialog: page.complaints.append(dialog.message))
    set_most(page, 2)
    page.fill("#prompt", attack)
    page.press("#prompt", "Enter")
    over(page)
    assert page.text_content(".turn.user") == attack
    assert page.locator(".turn img, .turn script").count() == 0
    assert page.complaints == []


def test_errors_are_told(page, server):
    ready(page, server)
    set_most(page, 1000)
    page.fill("#prompt", "Hi")
    page.press("#prompt", "Enter")
    expect(page.locator(".after.bad")).to_contain_text("max_tokens 1000 exceeds the context of 64")
    expect(page.locator("#go")).to_have_attribute("aria-label", "Send")


def test_a_key_is_asked_for(page, loaded, engine):
    with serving(loaded, engine, keys=[b"sesame"]) as locked:
        page.goto(locked.url)
        expect(page.locator("#model")).to_contain_text("no API key given")
        page.fill("#key", "sesame")
        page.press("#key", "Tab")
        expect(page.locator("#model")).to_have_text("tiny")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_phone_shows_all_of_it(browser, server, scheme):
    context = browser.new_context(
        viewport={"width": 360, "height": 700}, color_scheme=scheme, bypass_csp=True
    )
    page = context.new_page()
    ready(page, server)
    page.click("#completion")
    set_most(page, 10)
    page.fill("#prompt", "x" * 30 + "\n" * 12)
    page.press("#prompt", "Control+Enter")
    over(page)
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    for part in ("#go", "#tune", "#chat", "#completion", "#fresh", "#prompt", "#rate", "#first"):
        box = page.locator(part).bounding_box()
        assert 0 <= box["x"] <= 360 - box["width"], part
        assert 0 <= box["y"] <= 700 - box["height"], part
    context.close()
