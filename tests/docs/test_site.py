"""The site: links and anchors lead somewhere, nothing is loaded from elsewhere, a browser shows what was written."""

from __future__ import annotations

import functools
import http.server
import posixpath
import threading
from collections import Counter
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path, PurePosixPath
from urllib.parse import unquote, urlsplit

import pytest
from browser import browser, overlaps
from built_site import Built
from markdown_it import MarkdownIt
from mkdocs.exceptions import PluginError

from hack.docs import hooks

ROOT = Path(__file__).resolve().parents[2]
COUNTED = ("h1", "h2", "h3", "h4", "li", "ol", "ul", "table", "tr", "pre", "img", "blockquote")
VOID = frozenset({"img", "br", "hr", "input", "meta", "link"})


class Reader(HTMLParser):
    """What a page holds. `content`: how often each counted tag stands within its article."""

    def __init__(self, text: str, *, article: bool) -> None:
        super().__init__()
        self.ids: set[str] = set()
        self.links: list[str] = []
        self.loads: list[str] = []
        self.content: Counter[str] = Counter()
        self._inside, self._table = not article, 0
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = {name: value or "" for name, value in attrs}
        self.ids |= {values[name] for name in ("id", "name") if values.get(name)}
        if tag == "a" and "href" in values:
            self.links.append(values["href"])
        if tag in ("script", "img", "iframe", "source") and "src" in values:
            self.loads.append(values["src"])
        if tag == "link" and values.get("rel") in (
            "stylesheet",
            "preload",
            "icon",
            "preconnect",
            "dns-prefetch",
        ):
            self.loads.append(values.get("href", ""))
        if tag == "article":
            self._inside = True
        if self._inside and tag in COUNTED:
            self.content[tag] += 1

    def handle_endtag(self, tag: str) -> None:
        if tag == "article":
            self._inside = False


def source(page: str) -> Path:
    """File of the repository behind a page of the site."""
    return ROOT / hooks.source_of(page.removesuffix(".html") + ".md")


@pytest.fixture(scope="module")
def pages(site: Path) -> dict[str, Reader]:
    """By path in the site. A README is the index of its folder."""
    found = {}
    for path in sorted(site.rglob("*.html")):
        name = path.relative_to(site).as_posix()
        if name == "404.html":
            continue
        if not source(name).is_file() and name.endswith("index.html"):
            name = name.replace("index.html", "README.html")
        found[name] = Reader(path.read_text(encoding="utf-8"), article=True)
    return found


def test_a_strict_build_finds_nothing_to_say(built: Built) -> None:
    assert built.code == 0, built.said


def test_every_page_of_the_documentation_is_in_the_site(pages: dict[str, Reader]) -> None:
    written = {
        path.relative_to(ROOT / "docs").with_suffix(".html").as_posix() for path in ROOT.glob("docs/**/*.md")
    }
    assert written <= set(pages)
    others = set(pages) - written
    assert {"repository/CONTRIBUTING.html", "repository/CHANGELOG.html", "repository/README.html"} <= others
    assert all(name.startswith("repository/") for name in others)


def test_every_link_and_anchor_of_the_site_leads_somewhere(site: Path, pages: dict[str, Reader]) -> None:
    """Looked at in what was built, whatever mkdocs thinks of it."""
    dead, followed = [], 0
    for name, page in pages.items():
        at = posixpath.dirname(name)
        for link in [*page.links, *page.loads]:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc or not link or link == "#":
                continue
            path = posixpath.normpath(posixpath.join(at, unquote(parts.path))) if parts.path else name
            file = site / path.replace("README.html", "index.html")
            file = file / "index.html" if file.is_dir() else file
            target = pages.get(path) or pages.get(path.replace("index.html", "README.html"))
            if not file.is_file() and not target:
                dead.append(f"{name}: {link}")
            elif parts.fragment and target and unquote(parts.fragment) not in target.ids:
                dead.append(f"{name}: {link}: no such anchor")
            followed += 1
    assert dead == []
    assert followed > 1000


def test_nothing_is_loaded_from_elsewhere(site: Path, pages: dict[str, Reader]) -> None:
    foreign = [f"{name}: {load}" for name, page in pages.items() for load in page.loads if "//" in load]
    assert foreign == []
    for style in site.rglob("*.css"):
        assert "@import" not in style.read_text(encoding="utf-8"), style
        assert "url(http" not in style.read_text(encoding="utf-8"), style


def test_a_page_has_as_many_lists_tables_and_blocks_as_on_a_code_host(pages: dict[str, Reader]) -> None:
    """Python-Markdown differs from CommonMark where a list follows a paragraph or is nested by two spaces: a page that
    reads well here alone is not well written."""
    parser, differ = MarkdownIt("commonmark").enable("table"), {}
    for name, page in pages.items():
        asked = Reader(parser.render(source(name).read_text(encoding="utf-8")), article=False).content
        found = {tag: (page.content[tag], asked[tag]) for tag in COUNTED if page.content[tag] != asked[tag]}
        if found:
            differ[name] = found
    assert differ == {}, "(here, on a code host)"


def test_links_that_leave_the_folder_of_the_pages_are_written_anew_and_dead_ones_are_refused() -> None:
    here = PurePosixPath("docs/reference/cli.md")
    assert hooks.in_site("../../README.md", here, ROOT) == "repository/README.md"
    assert hooks.in_site("../format.md", here, ROOT) == "format.md"
    assert hooks.in_site("docs/reference/", PurePosixPath("README.md"), ROOT) == "reference/index.md"
    assert (
        hooks.in_site("examples/pretrain", PurePosixPath("README.md"), ROOT)
        == "repository/examples/pretrain/README.md"
    )
    with pytest.raises(PluginError, match=r"without index\.md or README\.md"):
        hooks.in_site("../crds", PurePosixPath("docs/index.md"), ROOT)
    text = "[a](x.md#y) ![i](i.png) [b](https://e.org/x) `[c](x.md)` [d](#here)\n```\n[e](x.md)\n```\n[`f`](x.md)"
    changed = hooks.with_links(text, lambda target: f"<{target}>")
    assert changed == (
        "[a](<x.md#y>) ![i](<i.png>) [b](https://e.org/x) `[c](x.md)` [d](#here)\n```\n[e](x.md)\n```\n[`f`](<x.md>)"
    )


@pytest.fixture
def served(site: Path) -> Iterator[str]:
    """Address of the site on loopback, as any static host serves it."""

    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, format: str, *args: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=str(site)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


@pytest.mark.slow
def test_a_browser_shows_the_site_without_a_complaint(served: str, site: Path, tmp_path: Path) -> None:
    drawn = (
        "[...document.querySelectorAll('article img')].map(i => i.naturalWidth > 100 && i.clientWidth > 100)"
    )
    with browser() as page:
        for name, width, dark in (
            ("index", 1400, False),
            ("concepts", 1400, True),
            ("reference/job", 420, False),
        ):
            page.open(f"{served}/{name}.html", width=width, dark=dark)
            assert page.width_beyond() <= 0, name
            assert page.evaluate(drawn) == [True] * (name != "reference/job"), name
            assert page.evaluate("document.querySelector('article').innerText.length") > 1000
        page.evaluate(
            "(async () => { document.querySelector('.md-search__input').focus();"
            " const put = () => { const i = document.querySelector('.md-search__input'); i.value = 'quarantined';"
            " i.dispatchEvent(new Event('keyup')); };"
            " const until = Date.now() + 30000;"
            " while (Date.now() < until && !document.querySelector('.md-search-result__item')) {"
            "   put(); await new Promise(r => setTimeout(r, 200)); } })()"
        )
        hits = page.evaluate("[...document.querySelectorAll('.md-search-result__link')].map(a => a.href)")
        assert any("failure-modes" in hit or "concepts" in hit for hit in hits), hits
        assert page.complaints == []
        assert {address.split("/")[2] for address in page.asked if address.startswith("http")} == {
            served.split("/")[2]
        }
        # A picture is an image in its page, so its words are looked at alone.
        drawing = (ROOT / "docs" / "images" / "parts.svg").read_text(encoding="utf-8")
        (tmp_path / "parts.html").write_text(f"<body style='margin:0;width:960px'>{drawing}</body>")
        page.open(f"file://{tmp_path}/parts.html", width=960)
        words = page.texts()
        assert len(words) > 30
        assert overlaps(words) == []
        assert [word["text"] for word in words if word["cut"]] == []
