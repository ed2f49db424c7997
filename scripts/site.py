"""What mkdocs needs beside docs/: files of the repository that pages lead to, and docstrings that must be there.

mkdocs.yml names this file as a hook. A link from docs/ to a file beside it, such as ``../CHANGELOG.md``, works in the
repository; the site gets a copy of that file. A public name without a docstring is a warning, which
ends a strict build.
"""

from __future__ import annotations

import logging
import os
import re
from pathlib import Path
from typing import Any

import griffe
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[1]
PAGES = {
    "changelog.md": "CHANGELOG.md",
    "contributing.md": "CONTRIBUTING.md",
    "security.md": "SECURITY.md",
}
LINK = re.compile(r"(\]\()([^)\s#:]+)([#)])")
SHOWN = re.compile(r"^::: (dgc\S*)", re.MULTILINE)
log = logging.getLogger("mkdocs.hooks.site")


def on_files(files: Files, config: Any) -> Files:
    """Adds pages that lie at the repository's root, and copies of what pages lead to beside docs/."""
    for uri, source in PAGES.items():
        files.append(File.generated(config, uri, abs_src_path=str(ROOT / source)))
    found, waiting = {}, list(files.documentation_pages())
    while waiting:
        page = waiting.pop()
        for target in _beside(page):
            uri = _uri(target)
            if uri not in found and files.get_file_from_path(uri) is None and target.is_file():
                found[uri] = File.generated(config, uri, abs_src_path=str(target))
                files.append(found[uri])
                waiting += [found[uri]] if target.suffix == ".md" else []
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Has links to files beside docs/ lead to their copies."""

    def moved(match: re.Match[str]) -> str:
        target = (_source(page.file).parent / match[2]).resolve()
        return (
            f"{match[1]}{os.path.relpath(_uri(target), Path(page.file.src_uri).parent)}{match[3]}"
        )

    return LINK.sub(moved, markdown)


def on_pre_build(config: Any) -> None:
    """Warns of public names that the reference leaves out, or that have no docstring."""
    package = griffe.load("dgc", search_paths=[str(ROOT)])
    reference = "\n".join(path.read_text() for path in (ROOT / "docs" / "reference").glob("*.md"))
    shown = {name.removeprefix("dgc.") for name in SHOWN.findall(reference)}
    # Two numbers, in a table.
    public = set(package.exports or ()) - {
        "__version__",
        "Average",
        "Sum",
    }
    for name in sorted(public - shown):
        log.warning(
            "docs/reference must show all names of dgc.__all__, got no %s (add '::: dgc.%s')",
            name,
            name,
        )
    for name in sorted(shown):
        for path, member in _documented(name, package[name]):
            if member.docstring is None:
                log.warning("%s must have a docstring, got none", path)


def _documented(name: str, member: Any) -> list[tuple[str, Any]]:
    """A name, and the public functions in it."""
    member = member.final_target if member.is_alias else member
    inner = [
        (f"{name}.{key}", each)
        for key, each in member.members.items()
        if not key.startswith("_") and not each.is_alias and each.is_function
    ]
    return [(name, member), *inner]


def _source(file: File) -> Path:
    """Where a page's text lies in the repository."""
    return Path(file.abs_src_path).resolve()


def _beside(page: File) -> list[Path]:
    """Files of the repository outside docs/ that a page leads to."""
    source = _source(page)
    targets = [(source.parent / match[2]).resolve() for match in LINK.finditer(source.read_text())]
    return [t for t in targets if ROOT in t.parents and ROOT / "docs" not in t.parents]


def _uri(target: Path) -> str:
    """Where a file of the repository is in the site."""
    if ROOT / "docs" in target.parents:
        return target.relative_to(ROOT / "docs").as_posix()
    if ROOT not in target.parents:
        return target.as_posix()  # is nowhere, and told as a broken link
    inside = target.relative_to(ROOT).as_posix()
    return next((uri for uri, source in PAGES.items() if source == inside), f"repository/{inside}")
