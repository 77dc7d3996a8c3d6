"""The built site: every page stands, links, typesets, and asks no other host.

Chapters come from `_toc.yml`, addresses from `_config.yml`. `make site` runs this on
the site that `make book` has built; without a browser the second half skips.
"""

import functools
import http.server
import json
import re
import shutil
import threading
from pathlib import Path
from urllib.parse import parse_qs, unquote, urldefrag, urlsplit

import pytest
import yaml
from bs4 import BeautifulSoup

pytestmark = pytest.mark.site

ROOT = Path(__file__).parents[1]
SITE = ROOT / "_build" / "html"
CONFIG = yaml.safe_load((ROOT / "_config.yml").read_text())
TOC = yaml.safe_load((ROOT / "_toc.yml").read_text())
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")

# What is not ours, with the reason. Everything else is an error.
CONSOLE = {
    "'THEBE_JS_URL' has already been declared": "sphinx-thebe is loaded twice by the "
    "theme even when it is off",
}
AXE = {
    ("aria-required-children", 'class="citation-list"'): "docutils gives a list of "
    "citations the role list without list items",
}


def entries(node):
    """Document names under one node of the table of contents, in order."""
    for key in ("root", "file"):
        if key in node:
            yield node[key]
    for key in ("parts", "chapters", "sections", "subtrees"):
        for child in node.get(key, []):
            yield from entries(child)


PAGES = list(entries(TOC))


@functools.cache
def soup(path):
    return BeautifulSoup(path.read_text(encoding="utf-8"), "html.parser")


def html(docname):
    path = SITE / f"{docname}.html"
    assert path.is_file(), f"_toc.yml names {docname}, the site has no such page"
    return path


def article(docname):
    return soup(html(docname)).find("article")


def source(docname):
    found = [p for s in (".ipynb", ".md") if (p := ROOT / f"{docname}{s}").is_file()]
    assert found, f"_toc.yml names {docname}, there is no such chapter"
    return found[0]


@functools.cache
def cells(docname):
    """Code cells that the page shows, with their stored outputs."""
    path = source(docname)
    if path.suffix != ".ipynb":
        return []
    return [
        cell
        for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]
        if cell["cell_type"] == "code"
        and "remove-cell" not in cell["metadata"].get("tags", [])
    ]


def records(some_cells):
    return [
        output["metadata"]["moebook"]
        for cell in some_cells
        for output in cell["outputs"]
        if "moebook" in output.get("metadata", {})
    ]


@pytest.fixture(scope="session", autouse=True)
def site():
    if not (SITE / "index.html").is_file():
        pytest.fail(f"there is no site at {SITE}: run `make book` first")


# --- The files ---------------------------------------------------------------------


def test_front_door_leads_to_the_root_page():
    door = soup(SITE / "index.html").find("meta", attrs={"http-equiv": "Refresh"})
    target = door["content"].split("url=")[1]
    assert target == f"{TOC['root']}.html"
    assert (SITE / target).is_file()


@pytest.mark.parametrize("docname", PAGES)
def test_page_has_a_title_and_text(docname):
    body = article(docname)
    assert body.find("h1"), f"{docname} has no title"
    assert len(body.get_text()) > 300, f"{docname} is all but empty"


@pytest.mark.parametrize("docname", PAGES)
def test_stored_outputs_are_on_the_page(docname):
    stored = [cell for cell in cells(docname) if cell["outputs"]]
    shown = article(docname).select("div.cell_output")
    assert len(shown) == len(stored), f"{docname}: {len(stored)} stored outputs"
    if cells(docname):
        assert stored, f"{docname} has code and no output: run `make refresh`"


@pytest.mark.parametrize("docname", PAGES)
def test_verdicts_are_on_the_page(docname):
    """Under each cell with a record stands a table whose head says its outcome."""
    stored = [cell for cell in cells(docname) if cell["outputs"]]
    shown = article(docname).select("div.cell_output")
    for number, (cell, output) in enumerate(zip(stored, shown, strict=True)):
        outcomes = [record["outcome"] for record in records([cell])]
        heads = output.select(
            "thead th:nth-child(2):last-child > p > :is(strong, em):only-child"
        )
        shown_words = iter([head.get_text() for head in heads])
        assert all(outcome in shown_words for outcome in outcomes), (
            f"{docname}, output {number} lacks one of {outcomes} (a bare | in TeX?): "
            f"{''.join(cell['source'])[-200:]}"
        )


def test_the_book_has_verdicts():
    assert sum(len(records(cells(docname))) for docname in PAGES) > 0


@pytest.mark.parametrize("docname", PAGES)
def test_published_source_is_the_chapter_and_all_its_verdicts_hold(docname):
    path = source(docname)
    published = SITE / "_sources" / path.relative_to(ROOT)
    assert published.read_bytes() == path.read_bytes(), f"{docname} is stale: make book"
    open_ones = [r["label"] for r in records(cells(docname)) if r["outcome"] != "holds"]
    assert not open_ones, f"{docname} publishes verdicts that do not hold: {open_ones}"


@pytest.mark.parametrize("docname", PAGES)
def test_no_markup_is_left_over(docname):
    body = BeautifulSoup(str(article(docname)), "html.parser")
    assert not body.select(".problematic, .system-message")
    for tag in body.select("pre, code, .math, .cell_input"):
        tag.decompose()
    left = re.findall(r"\{\w[\w:-]*\}`[^`]*`|^:{3,}|\$\$|\*\*", body.get_text(), re.M)
    assert not left, f"{docname} shows markup: {left}"


@pytest.mark.parametrize("docname", PAGES)
def test_pictures_say_what_they_show(docname):
    silent = [
        image["src"]
        for image in article(docname).find_all("img")
        if not image.get("alt", "").strip() or image["alt"] == image["src"]
    ]
    assert not silent, f"{docname} has pictures without alt text: {silent}"


@pytest.mark.parametrize("docname", PAGES)
def test_solutions_are_folded(docname):
    open_ones = [
        box["id"]
        for box in article(docname).select("div.solution")
        if not {"dropdown", "toggle"} & set(box["class"])
    ]
    assert not open_ones, f"{docname}: give them `:class: dropdown`: {open_ones}"


# --- The links ---------------------------------------------------------------------


@functools.cache
def anchors(path):
    page = soup(path)
    return {tag["id"] for tag in page.find_all(id=True)} | {
        tag["name"] for tag in page.find_all("a", attrs={"name": True})
    }


ALL_FILES = sorted(SITE.rglob("*.html")) if SITE.is_dir() else []
ALL_HTML = [p for p in ALL_FILES if not p.is_relative_to(SITE / "_static")]


@pytest.mark.parametrize(
    "path", ALL_HTML, ids=lambda path: path.relative_to(SITE).as_posix()
)
def test_links_and_anchors_resolve(path):
    broken = []
    for tag in soup(path).find_all(["a", "link", "img", "script", "source"]):
        url = tag.get("href") or tag.get("src") or ""
        if urlsplit(url).scheme or url.startswith("//") or not url:
            continue
        file, fragment = urldefrag(url)
        file = urlsplit(file).path
        target = (path.parent / unquote(file)).resolve() if file else path
        if not target.is_file():
            broken.append(f"{url}: no such file")
            continue
        known = anchors(target) if target.suffix == ".html" else {unquote(fragment)}
        if fragment and unquote(fragment) not in known:
            broken.append(f"{url}: no such anchor")
    assert not broken, "\n".join(broken)


@pytest.mark.parametrize("docname", PAGES)
def test_nothing_is_loaded_from_elsewhere(docname):
    page = soup(html(docname))
    loaded = [tag.get("src", "") for tag in page.find_all(src=True)]
    loaded += [tag["href"] for tag in page.find_all("link", href=True)]
    away = [url for url in loaded if urlsplit(url).netloc]
    assert not away, f"{docname} loads from other hosts: {away}"


NOTEBOOKS = [docname for docname in PAGES if (ROOT / f"{docname}.ipynb").is_file()]


@pytest.mark.parametrize("docname", NOTEBOOKS)
def test_buttons_lead_to_this_chapter(docname):
    """Binder, Colab and download point at the file that this page was made from."""
    address, branch = CONFIG["repository"]["url"], CONFIG["repository"]["branch"]
    repository = urlsplit(address).path.strip("/")
    launch = CONFIG["launch_buttons"]
    buttons = [a["href"] for a in soup(html(docname)).select("a.dropdown-item[href]")]

    def one(start):
        found = [url for url in buttons if url.startswith(start)]
        assert len(found) == 1, f"{docname}: {start} has {len(found)} buttons"
        return found[0]

    binder = urlsplit(one(f"{launch['binderhub_url']}/v2/gh/{repository}/{branch}?"))
    opened = parse_qs(binder.query)["urlpath"][0].removeprefix("lab/tree/")
    colab = one(f"{launch['colab_url']}/github/{repository}/blob/{branch}/")
    copied = colab.split(f"/blob/{branch}/")[1]
    assert (ROOT / opened) == (ROOT / copied) == source(docname)
    assert address in buttons

    (download,) = [url for url in buttons if "_sources/" in url]
    file = (html(docname).parent / download).resolve()
    assert file == SITE / "_sources" / f"{docname}.ipynb"


# --- In a browser, with every other host cut off -------------------------------------


class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *args):
        pass


@pytest.fixture(scope="session")
def address(site):
    handler = functools.partial(Quiet, directory=str(SITE))
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()


@pytest.fixture(scope="session")
def browser():
    program = next(filter(None, map(shutil.which, BROWSERS)), None)
    if program is None:
        pytest.skip(f"no browser on PATH (looked for {', '.join(BROWSERS)})")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        flags = ["--no-sandbox", "--disable-background-networking", "--disable-sync"]
        chromium = playwright.chromium.launch(executable_path=program, args=flags)
        yield chromium
        chromium.close()


class Visit:
    """A page as a reader meets it: what it asked for and what it complained about."""

    def __init__(self, browser, address):
        self.away, self.missing, self.complaints = [], [], []
        self.address = address
        self.context = browser.new_context(viewport={"width": 1300, "height": 900})
        self.page = self.context.new_page()
        self.page.route("**/*", self._gate)
        self.page.on("response", self._response)
        self.page.on("pageerror", lambda error: self._complain(str(error)))
        self.page.on("console", self._console)

    def _gate(self, route):
        if route.request.url.startswith((self.address, "data:", "blob:")):
            route.continue_()
        else:
            self.away.append(route.request.url)
            route.abort()

    def _response(self, response):
        if response.status >= 400:
            self.missing.append(response.url.removeprefix(self.address))

    def _console(self, message):
        if message.type == "error":
            self._complain(message.text)

    def _complain(self, text):
        if not any(known in text for known in CONSOLE):
            self.complaints.append(text)

    def go(self, path):
        self.page.goto(f"{self.address}/{path}", wait_until="load")
        self.page.evaluate("document.fonts.ready")
        if self.page.locator(".math").count():
            self.page.wait_for_function("window.MathJax?.startup?.promise")
            self.page.evaluate("MathJax.startup.promise")
        return self


@pytest.fixture(scope="module", params=PAGES)
def visit(request, browser, address):
    visit = Visit(browser, address).go(f"{request.param}.html")
    yield visit
    visit.context.close()


def test_page_asks_no_other_host(visit):
    assert not visit.away
    assert not visit.missing


def test_console_is_silent(visit):
    assert not visit.complaints


def test_mathematics_is_typeset(visit):
    raw, wrong = visit.page.evaluate(
        """() => {
            const all = [...document.querySelectorAll('article .math')];
            const raw = all.filter(e => !e.querySelector('mjx-container'));
            const wrong = [...document.querySelectorAll(
                'mjx-merror, [data-mjx-error], mjx-container [style*="color: red"]')];
            const text = e => e.textContent.trim().slice(0, 80);
            return [raw.map(text), wrong.map(text)];
        }"""
    )
    assert not raw, f"not typeset: {raw}"
    assert not wrong, f"TeX that MathJax does not know: {wrong}"
    left = visit.page.evaluate(
        r"""() => {
            const body = document.querySelector('article').cloneNode(true);
            body.querySelectorAll('pre, code, script, mjx-container')
                .forEach(e => e.remove());
            return body.textContent.match(/\\[(\[][^\n]{0,40}/g) || [];
        }"""
    )
    assert not left, f"raw TeX on the page: {left}"


def test_solutions_are_hidden_until_asked_for(visit):
    seen = visit.page.evaluate(
        """() => [...document.querySelectorAll('article div.solution > *')]
            .filter(e => !e.matches('.admonition-title, button')
                         && e.checkVisibility({visibilityProperty: true}))
            .map(e => e.textContent.slice(0, 60))"""
    )
    assert not seen, f"visible before the click: {seen}"


def test_page_fits_a_phone(visit):
    visit.page.set_viewport_size({"width": 390, "height": 844})
    wide = visit.page.evaluate(
        """() => {
            const room = document.documentElement.clientWidth;
            const over = document.documentElement.scrollWidth - room;
            if (over <= 0) return [];
            return [...document.querySelectorAll('article *')]
                .filter(e => e.getBoundingClientRect().right > room)
                .map(e => e.outerHTML.slice(0, 100)).slice(0, 5);
        }"""
    )
    visit.page.set_viewport_size({"width": 1300, "height": 900})
    assert not wide, "wider than 390 px: " + "\n".join(wide)


# Formulas are MathJax's, and code has the same colours in every cell: without them axe
# is five times as fast. Nothing below may look at a formula.
THIN = """() => {
    document.querySelectorAll('mjx-container').forEach(e => e.replaceChildren('x'));
    [...document.querySelectorAll('.highlight pre')].slice(6)
        .forEach(e => { e.textContent = e.textContent; });
}"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_page_is_accessible(visit, scheme):
    from axe_playwright_python.sync_playwright import Axe

    visit.page.evaluate(THIN)
    visit.page.emulate_media(color_scheme=scheme)
    visit.page.wait_for_function(
        f"document.documentElement.dataset.theme === '{scheme}'"
    )
    # Colours glide from one theme to the other; judge them when they stand.
    visit.page.evaluate(
        "Promise.all(document.getAnimations().map(a => a.finished.catch(() => {})))"
    )
    options = {"resultTypes": ["violations"]}
    if scheme == "dark":  # only the colours have changed
        options["runOnly"] = ["color-contrast", "link-in-text-block"]
    found = Axe().run(visit.page, options=options).response
    ours = [
        f"{v['id']} ({v['impact']}): {node['html'][:160]}"
        for v in found["violations"]
        if v["impact"] in ("serious", "critical")
        for node in v["nodes"]
        if not any(v["id"] == rule and mark in node["html"] for rule, mark in AXE)
    ]
    assert not ours, "\n".join(ours)


def test_search_finds_a_chapter_by_its_title(browser, address):
    docname = PAGES[1]
    title = article(docname).find("h1").get_text()
    word = max(re.findall(r"[A-Za-z]+", title), key=len)
    visit = Visit(browser, address).go(f"search.html?q={word}")
    result = visit.page.locator(f'#search-results a[href*="{docname}.html"]').first
    result.wait_for(timeout=10_000)
    assert not visit.away
    assert not visit.complaints
    visit.context.close()
