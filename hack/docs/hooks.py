"""What mkdocs does not know of this repository, so that one text reads alike on a code host and as a site.

Pages link to files outside `docs/`, as to a README or an example, by relative paths, which a code host follows and a
site cannot. Each such file is taken into the site below `repository/`, and the link is written anew; a link to what is
not there ends a strict build. Nothing is loaded from elsewhere, no address of a host is needed.

Code hosts indent nested lists by two spaces, Python-Markdown by four: `TwoSpaces` tells it so.
"""

import os
import posixpath
import re
from collections.abc import Callable
from pathlib import Path, PurePosixPath

from markdown import Markdown  # type: ignore[import-untyped]
from markdown.blockprocessors import build_block_parser  # type: ignore[import-untyped]
from markdown.extensions import Extension  # type: ignore[import-untyped]
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files, InclusionLevel
from mkdocs.structure.pages import Page

REPOSITORY = "repository"
"""Folder of the site with what lies outside `docs/`."""
_LABEL = r"!?\[(?:`[^`\n]*`|[^\]\[`]|\[[^\]]*\])*\]"
_LINK_OR_CODE = re.compile(
    r"^ *(?P<fence>```+|~~~+).*?^ *(?P=fence) *$"
    rf"|(?P<before>{_LABEL}\()(?P<target>[^)\s]+)(?P<after>(?:\s+\"[^\"]*\")?\))"
    r"|`[^`\n]+`",
    re.MULTILINE | re.DOTALL,
)
_ADDRESS = re.compile(r"[a-z][a-z0-9+.-]*:|//|#|mailto:", re.IGNORECASE)


class TwoSpaces(Extension):
    """Lists are nested by two spaces."""

    def extendMarkdown(self, md: Markdown) -> None:  # noqa: N802
        """Set the one number, and make the parser anew, whose parts have read it already."""
        md.tab_length = 2
        md.parser = build_block_parser(md)


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Add the extension, which mkdocs.yml cannot name since this file is in no package; others build on it."""
    config.markdown_extensions.insert(0, TwoSpaces())
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Take in each file outside `docs/` that a page or the navigation names, and what those name in turn."""
    root = _root(config)
    todo = [f"{REPOSITORY}/{name}" for name in _in_navigation(config.nav)]
    done = set()
    for file in files.documentation_pages():
        todo += _named_outside(Path(config.docs_dir, file.src_uri), root)
    while todo:
        name = todo.pop()
        if name in done:
            continue
        done.add(name)
        path = root / name.removeprefix(f"{REPOSITORY}/")
        if not path.is_file():
            raise PluginError(f"mkdocs.yml or a page names {path.relative_to(root)}, which is not there")
        taken = File.generated(config, name, abs_src_path=str(path), inclusion=InclusionLevel.NOT_IN_NAV)
        files.append(taken)
        if taken.is_documentation_page():
            todo += _named_outside(path, root)
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, **_: object) -> str:
    """The page with its links as the site has them."""
    root = _root(config)
    here = PurePosixPath(source_of(page.file.src_uri))
    at = posixpath.dirname(page.file.src_uri)

    def written(target: str) -> str:
        path, mark, anchor = target.partition("#")
        found = in_site(path, here, root)
        return posixpath.relpath(found, at or ".") + mark + anchor

    return with_links(markdown, written)


def source_of(src_uri: str) -> str:
    """Path in the repository of a file of the site."""
    if src_uri.startswith(f"{REPOSITORY}/"):
        return src_uri.removeprefix(f"{REPOSITORY}/")
    return f"docs/{src_uri}"


def in_site(path: str, here: PurePosixPath, root: Path) -> str:
    """Where the site has what `path` names on the page `here` of the repository. A folder is its first page."""
    name = posixpath.normpath(posixpath.join(posixpath.dirname(here), path))
    if (root / name).is_dir():
        first = next((f for f in ("index.md", "README.md") if (root / name / f).is_file()), None)
        if first is None:
            raise PluginError(f"{here}: {path} is a folder without index.md or README.md: name a file in it")
        name = f"{name}/{first}"
    return name.removeprefix("docs/") if name.startswith("docs/") else f"{REPOSITORY}/{name}"


def with_links(markdown: str, written: Callable[[str], str]) -> str:
    """`markdown` with each relative target replaced; code is left alone."""

    def replaced(match: re.Match[str]) -> str:
        target = match["target"]
        if target is None or _ADDRESS.match(target):
            return match.group()
        return f"{match['before']}{written(target)}{match['after']}"

    return _LINK_OR_CODE.sub(replaced, markdown)


def _named_outside(path: Path, root: Path) -> list[str]:
    """Names in the site of what the page at `path` links to outside `docs/`."""
    found = []
    here = PurePosixPath(path.relative_to(root).as_posix())

    def seen(target: str) -> str:
        name = in_site(target.partition("#")[0], here, root)
        if name.startswith(f"{REPOSITORY}/"):
            found.append(name)
        return target

    with_links(path.read_text(encoding="utf-8"), seen)
    return found


def _in_navigation(nav: object) -> list[str]:
    """Files outside `docs/` that the navigation has."""
    if isinstance(nav, str):
        return [nav.removeprefix(f"{REPOSITORY}/")] if nav.startswith(f"{REPOSITORY}/") else []
    children = nav.values() if isinstance(nav, dict) else nav if isinstance(nav, list) else ()
    return [name for child in children for name in _in_navigation(child)]


def _root(config: MkDocsConfig) -> Path:
    return Path(os.path.abspath(config.config_file_path or "mkdocs.yml")).parent
