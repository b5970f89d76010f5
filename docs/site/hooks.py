"""What the site adds to MkDocs: pages from all over the repository, formulas without JavaScript, and nothing from other hosts."""

from __future__ import annotations

import html
import re
from pathlib import Path

from latex2mathml.converter import convert
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[2]
PAGES = ("*.md", "docs/*.md", "bench/*.md", "bench/results/*.md")
ASSETS = ("docs/img/*", "docs/img/*/*", "docs/*.html", "docs/site/*.css")
# Built from docs/site, since GitHub would show its directives.
REFERENCE = "docs/reference.md"

LINK = re.compile(r"\[([^\]]*)\]\(([^)#\s:]+)(?:#[^)\s]*)?\)")
FORMULA = re.compile(r'<(span|div) class="arithmatex">(?:\\\(|\\\[)?(.*?)(?:\\\)|\\\])?</\1>', re.DOTALL)
TAG = re.compile(r"\\tag\{(\d+)\}")
# What latex2mathml does not know; and roots, whose sign browsers leave out where no mathematical font is installed: write a power.
NOT_DRAWN = ("<mi>&</mi>", "<mi>\\", "<msqrt>", "<mroot>")
FROM_ELSEWHERE = re.compile(r'<(?:script|img|link|iframe)\b[^>]*\b(?:src|href)="(?:https?:)?//[^"]*"')


def on_files(files: Files, config) -> Files:
    """The pages and what they show or link to, each at its path in the repository; MkDocs' own search of docs/ is left out."""
    pages = [path for pattern in PAGES for path in sorted(ROOT.glob(pattern))]
    shown = {path for pattern in ASSETS for path in ROOT.glob(pattern) if path.is_file()} | {
        x for page in pages for x in linked(page)
    }
    found = [file for file in files if file.src_dir != config.docs_dir]  # of the theme and of plugins
    paths = [path.relative_to(ROOT).as_posix() for path in [*pages, *sorted(shown - set(pages))]]
    found += [File(path, str(ROOT), config.site_dir, config.use_directory_urls) for path in paths]
    reference = (ROOT / "docs" / "site" / "reference.md").read_text(encoding="utf-8")
    return Files([*found, File.generated(config, REFERENCE, content=reference)])


def linked(page: Path) -> set[Path]:
    """The files of the repository, other than pages, that a page links to: sources are shown as they are."""
    targets = [(page.parent / target).resolve() for _, target in LINK.findall(page.read_text(encoding="utf-8"))]
    return {target for target in targets if target.is_file() and target.suffix != ".md" and ROOT in target.parents}


def on_page_markdown(markdown: str, page, **_) -> str:
    """The page without its links to folders, which a site cannot show: their text stays."""
    here = (ROOT / page.file.src_uri).parent
    return LINK.sub(lambda found: found[1] if (here / found[2]).is_dir() else found[0], markdown)


def on_page_content(content: str, **_) -> str:
    """Formulas as MathML, which browsers set by themselves."""
    return FORMULA.sub(_formula, content)


def _formula(found: re.Match) -> str:
    latex, tag = html.unescape(found[2]).strip(), TAG.search(found[2])
    display = "block" if found[1] == "div" else "inline"
    # The converter knows `aligned` by the name of the environment outside a formula, which looks the same.
    mathml = convert(TAG.sub("", latex).replace("{aligned}", "{align*}"), display=display)
    if any(x in mathml for x in NOT_DRAWN):
        raise PluginError(f"a formula has what the site cannot draw: {latex}")
    if display == "inline":
        return mathml
    number = f'<span class="formula-number">({tag[1]})</span>' if tag else ""
    return f'<div class="formula">{mathml}{number}</div>'


def on_post_page(output: str, page, **_) -> str:
    """The finished page.

    Raises:
        PluginError: it would fetch something from another host.
    """
    fetched = FROM_ELSEWHERE.findall(output)
    if fetched:
        raise PluginError(f"{page.file.src_uri} fetches from another host: {fetched[0]}")
    return output
