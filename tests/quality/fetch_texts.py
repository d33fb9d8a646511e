"""Brings the texts of the quality figures from Debian packages into build/quality/{train,heldout}, one .txt a book.

  python3 tests/quality/fetch_texts.py

Calibration reads train only, evaluation heldout only; no book stands in both. Nothing is installed: packages are downloaded
and unpacked below build/quality/packages.
"""

import gzip
import html.parser
import pathlib
import re
import subprocess
import sys

ROOT = pathlib.Path("build/quality")
LONGEST = 900_000  # bytes kept of a book


class PlainText(html.parser.HTMLParser):
    """The running text of a page, a paragraph a line."""

    SKIP = {"script", "style", "head", "nav", "pre"}
    BREAK = {"p", "div", "li", "h1", "h2", "h3", "h4", "tr", "dd", "dt", "blockquote", "br"}

    def __init__(self):
        super().__init__()
        self.skipped, self.parts = 0, []

    def handle_starttag(self, tag, attrs):
        self.skipped += tag in self.SKIP
        if tag in self.BREAK:
            self.parts.append("\n")

    def handle_endtag(self, tag):
        self.skipped -= tag in self.SKIP
        if tag in self.BREAK:
            self.parts.append("\n")

    def handle_data(self, data):
        if self.skipped <= 0:
            self.parts.append(data)


def paragraphs(text):
    """Joins the lines of a paragraph and drops short ones, which are headings and menus."""
    text = text.replace("\r", "")
    joined = (re.sub(r"\s+", " ", p).strip() for p in re.split(r"\n\s*\n|\n(?=\s{4,}\S)", text))
    return "\n".join(p for p in joined if len(p) > 60)


def from_pages(folder, pattern):
    text = []
    for page in sorted(folder.rglob(pattern)):
        data = page.read_bytes()
        parser = PlainText()
        parser.feed((gzip.decompress(data) if page.suffix == ".gz" else data).decode("utf-8", "replace"))
        text.append(paragraphs("".join(parser.parts).replace("\n", "\n\n")))
    return "\n".join(text)


def from_dictionary(folder, pattern):
    return paragraphs(gzip.decompress(next(folder.rglob(pattern)).read_bytes()).decode("utf-8", "replace"))


def from_file(folder, pattern):
    return paragraphs(next(folder.rglob(pattern)).read_text("utf-8", "replace"))


# split, book, package, how
BOOKS = [
    ("train", "opticks", "golang-1.19-src", lambda f: from_file(f, "Isaac.Newton-Opticks.txt")),
    ("train", "jargon-file", "dict-jargon", lambda f: from_dictionary(f, "jargon.dict.dz")),
    ("train", "debian-reference", "debian-reference-en", lambda f: from_pages(f, "*.en.html")),
    ("heldout", "devils-dictionary", "dict-devil", lambda f: from_dictionary(f, "devil.dict.dz")),
    ("heldout", "anarchist-faq", "anarchism", lambda f: from_pages(f, "*.html")),
]


def unpacked(package):
    folder = ROOT / "packages" / package
    if not folder.exists():
        work = ROOT / "packages"
        work.mkdir(parents=True, exist_ok=True)
        subprocess.run(["apt-get", "download", "-q", package], cwd=work, check=True, stdout=subprocess.DEVNULL)
        archive = next(work.glob(f"{package}_*.deb"))
        subprocess.run(["dpkg-deb", "-x", archive, folder], check=True)
        archive.unlink()
    return folder


def main():
    for split, book, package, how in BOOKS:
        path = ROOT / split / f"{book}.txt"
        if not path.exists():
            text = how(unpacked(package))
            if len(text) < 100_000:
                sys.exit(f"error: {package} gave {len(text)} bytes of text for {book}, at least 100000 are expected; has the package changed?")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text[:LONGEST], "utf-8")
        print(f"{path}: {path.stat().st_size} bytes")


if __name__ == "__main__":
    main()
