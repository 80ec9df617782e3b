"""A mkdocs hook: the example READMEs, benchmark results and package READMEs are pages of the site, too.

Their links, and links to them, are written for a reader of the repository; here they become links within the site. A
link to a file that is no page, such as a source file, becomes its path.
"""

from __future__ import annotations

import os
import re
from pathlib import Path, PurePosixPath

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[2]
LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)\s]+)\)")
FENCE = re.compile(r"(^```.*?^```$)", re.MULTILINE | re.DOTALL)


def site_pages() -> dict[str, str]:
    """Return the site's path of each file outside `docs/` that is part of it, by the file's path in the repository."""
    pages = {
        "CONTRIBUTING.md": "internals/contributing.md",
        "skyrl-agent/README.md": "packages/skyrl-agent.md",
        "skyrl-gym/README.md": "packages/skyrl-gym.md",
        "skyrl-report/README.md": "packages/skyrl-report.md",
        "skyrl-train/README.md": "packages/skyrl-train.md",
        "skyrl-tx/README.md": "packages/skyrl-tx.md",
        "skyrl-train/examples/algorithms/README.md": "examples/algorithms/index.md",
        "skyrl-train/examples/from_scratch.py": "examples/from_scratch.md",
        "veritas-rl/README.md": "veritas/index.md",
    }
    for readme in [*ROOT.glob("skyrl-*/examples/*/README.md"), *ROOT.glob("skyrl-train/examples/*/*/README.md")]:
        source = readme.relative_to(ROOT).as_posix()
        folder = source.partition("/")[2].removesuffix("/README.md").replace("+", "plus")
        pages.setdefault(source, f"{folder}.md")
    for path in ROOT.glob("veritas-rl/docs/*.md"):
        pages[path.relative_to(ROOT).as_posix()] = f"veritas/{path.name}"
    for path in [*ROOT.glob("benchmarks/*/*.md"), *ROOT.glob("benchmarks/*/*.png")]:
        name = path.relative_to(ROOT).as_posix()
        pages[name] = name
    return pages


PAGES = site_pages()
SOURCES = {page: source for source, page in PAGES.items()}


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages."""
    for source, page in PAGES.items():
        files.append(File.generated(config, page, abs_src_path=str(ROOT / source)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Rewrite the links of a page, outside of its code blocks."""
    here = page.file.src_uri
    source = SOURCES.get(here, f"docs/{here}")
    if source.endswith(".py"):
        return f"# GRPO from scratch\n\n`{source}`:\n\n```python\n{markdown}```\n"

    def rewrite(match: re.Match[str]) -> str:
        mark, text, target = match.groups()
        path, _, anchor = target.partition("#")
        if not path or "://" in path or path.startswith("mailto:"):
            return match[0]
        in_repository = os.path.normpath(PurePosixPath(source).parent / path)
        if in_repository.startswith("docs/"):
            on_site = in_repository.removeprefix("docs/")
        elif in_repository in PAGES:
            on_site = PAGES[in_repository]
        elif (ROOT / in_repository).exists():
            return f"`{in_repository}`" if text.strip("`") in in_repository else f"{text} (`{in_repository}`)"
        else:
            return match[0]
        relative = os.path.relpath(on_site, PurePosixPath(here).parent)
        return f"{mark}[{text}]({relative}{'#' + anchor if anchor else ''})"

    return "".join(part if part.startswith("```") else LINK.sub(rewrite, part) for part in FENCE.split(markdown))


CODE_BLOCK = re.compile(r"(<pre\b.*?</pre>)", re.DOTALL)
INLINE_CODE = re.compile(r"<code>[^<]*</code>")
SEPARATOR = re.compile(r"(?<=[\w\]}])([./_=]+)(?=[\w$\[{])")


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Let the browser break long keys and paths in inline code after a separator, not in the middle of a word."""

    def separate(match: re.Match[str]) -> str:
        return SEPARATOR.sub(r"\1<wbr>", match[0])

    parts = CODE_BLOCK.split(html)
    return "".join(part if part.startswith("<pre") else INLINE_CODE.sub(separate, part) for part in parts)
