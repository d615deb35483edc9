"""The site as it is built: opened from file:// it is whole and can be searched; the page of the API has what
scripts call, and nothing else.
"""

from __future__ import annotations

import html
import importlib
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.blocks import PAGES, ROOT

pytestmark = pytest.mark.slow
BROWSER = shutil.which("chromium") or shutil.which("google-chrome")
API = ROOT / "docs" / "reference" / "api.md"
ENTRIES = dict(re.findall(r"^::: (\S+) = (\S+)", API.read_text(), re.MULTILINE))
MODULES = ("fleet", "fleetrun", "progress", "static")
PADDLES = {"fleet.DistributeTranspilerConfig", "fleet.DistributedOptimizer", "fleet.MPISymetricRoleMaker"}
"""Of `trainers.fleet` for scripts of Paddle; reference/paddle-names.md describes them."""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    subprocess.run(command, cwd=ROOT, check=True, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"})
    return folder


def text_of(page: str) -> str:
    """What a reader sees of the article."""
    article = page[page.index("<article") : page.index("</article>")]
    return html.unescape(re.sub(r"<[^>]+>", "", article))


# ---- from file://


def test_no_page_loads_anything_from_elsewhere(site: Path):
    loads = re.compile(
        r"""<(?:script|img|iframe|source)\b[^>]*\bsrc="?(?:https?:)?//|<link\b[^>]*\bhref="?(?:https?:)?//"""
    )
    pages = sorted(site.rglob("*.html"))
    assert len(pages) > 30
    assert [page.name for page in pages if loads.search(page.read_text())] == []


def test_the_search_needs_no_server(site: Path):
    """The index is a script, and the worker is replaced before it is made."""
    begin, _, index = (site / "search" / "search_index.js").read_text().partition(" = ")
    assert begin == "var __index"
    found = {each["location"].partition("#")[0] for each in json.loads(index)["docs"]}
    assert {"index.html", "troubleshooting.html", "reference/api.html", "python.html"} <= found
    page = (site / "index.html").read_text()
    scripts = re.findall(r'<script src="([^"]+)"', page)
    names = [Path(each).name.partition(".")[0] for each in scripts]
    assert names.index("iframe-worker") < names.index("bundle")
    assert (site / "assets" / "iframe-worker.js").is_file()
    assert 'data-md-component="search"' in page


@pytest.mark.skipif(not BROWSER, reason="there is no chromium here")
def test_a_browser_without_a_network_finds_words(site: Path, tmp_path: Path):
    """`?q=` opens the search with these words."""
    command = [
        str(BROWSER), "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path}",
        "--host-resolver-rules=MAP * ~NOTFOUND", "--virtual-time-budget=20000", "--dump-dom",
        f"file://{site}/index.html?q=straggler",
    ]  # fmt: skip
    page = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout
    assert re.search(r'md-search-result__meta">\s*[1-9]\d* matching documents', page)


def test_what_a_reader_looks_for_is_in_the_navigation():
    _, navigation = (ROOT / "mkdocs.yml").read_text().split("\nnav:\n")
    titles = " ".join(re.findall(r"- ([^:]+):", navigation))
    for word in (
        "notebook",
        "pytest",
        "Troubleshooting",
        "Tutorial",
        "Glossary",
        "Slurm",
        "Serving",
        "Paddle",
    ):
        assert word in titles


# ---- the page of the API


def called() -> Iterator[tuple[str, str]]:
    """What the code in the documentation calls: page and name, as `fleet.util`."""
    for page in PAGES:
        if page.name in ("paddle-names.md", "architecture.md", "mechanisms.md", "CONTRIBUTING.md"):
            continue  # the first has also what Paddle calls, the others the inside
        text = page.read_text()
        code = re.findall(r"^```python\n(.*?)^```|((?:^ {4}.*\n)+)", text, re.DOTALL | re.MULTILINE)
        spans = re.findall(r"`([^`\n]+)`", text)
        for block in [*("".join(pair) for pair in code), *spans]:
            for module, name in re.findall(
                r"(?<![\w./`-])(fleet|fleetrun|static|progress)\.([a-zA-Z]\w+)\(", block
            ):
                yield page.name, f"{module}.{name}"


def test_everything_that_the_documentation_calls_is_there():
    known = {*ENTRIES, *(f"progress.{name.partition('.')[2]}" for name in ENTRIES)}
    found = set(called())
    assert len(found) > 30
    assert sorted((page, name) for page, name in found if name not in known) == []


@pytest.mark.parametrize(
    "module", ["fleetrun", "trainers.fleet", "trainers", "trainers.ps", "trainers.static"]
)
def test_everything_that_is_public_is_there(module: str):
    short = module.removeprefix("trainers.") if module in ("trainers.fleet", "trainers.static") else module
    public = {f"{short}.{name}" for name in importlib.import_module(module).__all__}
    modules = {f"trainers.{name}" for name in ("fleet", "progress", "static")}
    inside = {"fleetrun.__version__", "static.Data", "fleet.util"} - set(ENTRIES)
    assert public - set(ENTRIES) - modules - inside - PADDLES == set()


def test_every_name_means_what_it_says():
    homes = {"fleet": "trainers.fleet", "progress": "trainers.progress", "static": "trainers.static"}
    for name, home in ENTRIES.items():
        parts = name.split(".")
        parts[:1] = homes.get(parts[0], parts[0]).split(".")
        module = importlib.import_module(".".join(parts[:-1]))
        there = getattr(module, parts[-1])
        described = there if isinstance(there, type) or callable(there) else type(there)
        assert home.rpartition(".")[2] in (described.__name__, parts[-1]), name
        assert (described.__doc__ or "").strip(), f"{name} has no docstring"


def test_no_place_inside_the_packages_is_shown(site: Path):
    text = text_of((site / "reference" / "api.html").read_text())
    inside = {home.rpartition(".")[0] for home in ENTRIES.values()} - {
        name.rpartition(".")[0] for name in ENTRIES
    }
    shown = [each for each in inside if re.search(rf"\b{re.escape(each)}\.\w", text)]
    assert [each for each in shown if each not in ("trainers", "trainers.fleet", "trainers.progress")] == []
    assert "Bases:" not in text
    for wanted in ("worker_num", "is_server", "Auc(", "fleet.report", "fleet.heartbeat", "fleet.load_latest"):
        assert wanted in text


# ---- link texts


def test_links_say_in_words_where_they_lead():
    named = re.compile(r"\[`?(?:docs/)?[\w-]+\.(?:md|html)`?\]\(")
    assert [(page.name, found) for page in PAGES for found in named.findall(page.read_text())] == []


def test_pages_do_not_name_files_of_pages_where_a_link_belongs():
    """README and CONTRIBUTING.md are read beside the files."""
    named = re.compile(r"`(?:docs/)?([\w-]+\.md)(?:#[\w-]+)?`")
    pages = {page.name for page in PAGES if page.parent.name == "docs"}
    told = [
        f"{page.name}: {name}"
        for page in PAGES
        if page.parent.name == "docs" and page.name not in ("architecture.md", "mechanisms.md")
        for name in named.findall(page.read_text())
        if name in pages
    ]
    assert told == []


def test_the_first_screen_says_what_it_is_three_commands_and_shows_the_live_view():
    screen = (ROOT / "docs" / "index.md").read_text().partition("\n## ")[0]
    (block,) = re.findall(r"^```bash\n(.*?)^```", screen, re.DOTALL | re.MULTILINE)
    assert len(block.splitlines()) == 3
    assert screen.index("# fleetrun") < screen.index("```bash") < screen.index("{ .live }")
    assert len(re.sub(r"---.*?---|<!--.*?-->|```.*?```|!\[.*?\}", "", screen, flags=re.DOTALL).split()) < 60
