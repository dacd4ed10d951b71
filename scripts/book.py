#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Builds docs/ as a site with mdBook, and checks every link and anchor of it.

    python3 scripts/book.py [FOLDER]     [default: target/book]

The pages are laid out as in the repository, with what they link to, so that one link works in both. Mermaid draws the pictures, where npm
can get it; without, they are shown as text.
MDBOOK names the mdbook to use.
"""

import html.parser
import os
import pathlib
import posixpath
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import urllib.parse

ROOT = pathlib.Path(__file__).resolve().parent.parent
MERMAID = "mermaid@11.12.0"
DRAW = """for (const code of document.querySelectorAll("code.language-mermaid")) {
  const picture = document.createElement("pre");
  picture.className = "mermaid";
  picture.textContent = code.textContent;
  code.parentElement.replaceWith(picture);
}
const dark = /navy|coal|ayu/.test(document.documentElement.className);
mermaid.initialize({ startOnLoad: true, theme: dark ? "dark" : "default" });
"""
LINK = re.compile(r"\]\(([^)\s#]+)")


def staged(path):
    """Where a file of the repository is among the pages: mdBook makes index.html of a README."""
    inside = path.relative_to(ROOT)
    if inside == pathlib.Path("README.md"):
        return pathlib.Path("project.md")
    return inside.with_name("index.md") if inside.name == "README.md" else inside


def copy(path, source):
    """Copies a file to its place, with links that lead to the new places of others."""
    target = source / staged(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix != ".md":
        shutil.copyfile(path, target)
        return

    def moved(found):
        there = (path.parent / found[1]).resolve()
        if "://" in found[1] or there.name != "README.md":
            return found[0]
        return "](" + posixpath.relpath(staged(there), staged(path).parent)

    target.write_text(LINK.sub(moved, path.read_text()))


def linked(path):
    """The files of the repository that a page links to."""
    for target in LINK.findall(path.read_text()):
        if "://" not in target:
            found = (path.parent / target).resolve()
            if found.is_file() and found.is_relative_to(ROOT):
                yield found


def lay_out(source):
    """Copies the pages, and all that they link to, under their paths; the summary is at the top."""
    chapters = [ROOT / "docs" / name for name in LINK.findall((ROOT / "docs/SUMMARY.md").read_text())]
    chapters = [path.resolve() for path in chapters]
    missing = sorted(set((ROOT / "docs").rglob("*.md")) - set(chapters) - {ROOT / "docs/SUMMARY.md"})
    if missing:
        sys.exit(f"book: docs/SUMMARY.md lacks {', '.join(str(path.relative_to(ROOT)) for path in missing)}")
    extra = set()
    for chapter in chapters:
        for path in [chapter, *linked(chapter)]:
            copy(path, source)
            if path.suffix == ".md" and path not in chapters:
                extra.add(path)
    for path in [path for page in extra for path in linked(page)]:
        if not (source / staged(path)).exists() and path.suffix != ".md":
            copy(path, source)
    listed = (ROOT / "docs/SUMMARY.md").read_text()
    summary = LINK.sub(lambda found: f"]({staged((ROOT / 'docs' / found[1]).resolve())}", listed)
    for path in sorted(extra):
        title = path.read_text().split("\n", 1)[0].lstrip("# ")
        summary += f"- [{title}]({staged(path)})\n"
    (source / "SUMMARY.md").write_text(summary)


def get_mermaid(folder):
    """Puts mermaid's script into the folder; false where npm cannot get it."""
    if not shutil.which("npm"):
        return False
    with tempfile.TemporaryDirectory() as place:
        packed = subprocess.run(["npm", "pack", "--silent", MERMAID], cwd=place, capture_output=True, text=True)
        if packed.returncode:
            return False
        with tarfile.open(next(pathlib.Path(place).glob("*.tgz"))) as package:
            script = package.extractfile("package/dist/mermaid.min.js").read()
    (folder / "mermaid.min.js").write_bytes(script)
    (folder / "draw.js").write_text(DRAW)
    return True


class Page(html.parser.HTMLParser):
    """The anchors of a page, and where its links lead."""

    def __init__(self, text):
        super().__init__()
        self.anchors, self.links = set(), []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        for name, value in attributes:
            if name == "id":
                self.anchors.add(value)
            elif name in ("href", "src") and tag in ("a", "img", "script", "link") and value:
                self.links.append(value)


def check(folder):
    """The links of a site that lead nowhere."""
    pages = {path: Page(path.read_text()) for path in folder.rglob("*.html")}
    for path, page in pages.items():
        if path.name in ("print.html", "404.html", "toc.html"):
            continue
        for link in page.links:
            parts = urllib.parse.urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            there = (path.parent / urllib.parse.unquote(parts.path)).resolve() if parts.path else path
            there = there / "index.html" if there.is_dir() else there
            anchor = urllib.parse.unquote(parts.fragment)
            known = pages.get(there)
            if not there.exists() or (anchor and known and anchor not in known.anchors):
                yield f"{path.relative_to(folder)}: {link}"


def main():
    target = pathlib.Path(os.environ.get("CARGO_TARGET_DIR", ROOT / "target"))
    folder = pathlib.Path(sys.argv[1]).resolve() if len(sys.argv) > 1 else target.resolve() / "book"
    with tempfile.TemporaryDirectory() as place:
        place = pathlib.Path(place)
        lay_out(place / "src")
        settings = (ROOT / "docs/book.toml").read_text()
        if get_mermaid(place):
            settings = settings.replace("additional-js = []", 'additional-js = ["mermaid.min.js", "draw.js"]')
        else:
            print("book: there is no npm that gets mermaid: pictures are text", file=sys.stderr)
        (place / "book.toml").write_text(settings)
        shutil.rmtree(folder, ignore_errors=True)
        subprocess.run([os.environ.get("MDBOOK", "mdbook"), "build", "--dest-dir", folder, place], check=True)
    (folder / "index.html").write_text('<meta http-equiv="refresh" content="0; url=docs/index.html"><a href="docs/index.html">Baton</a>\n')
    broken = sorted(set(check(folder)))
    if broken:
        sys.exit("book: links that lead nowhere:\n" + "\n".join(broken))
    print(f"book: {folder}/index.html")


if __name__ == "__main__":
    main()
