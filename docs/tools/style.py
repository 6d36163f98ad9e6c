"""Check the pages' style: banned phrases, sentence length (a ratchet), one sentence on a line. See style.toml."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import tomllib

DOCS = Path(__file__).resolve().parents[1]
ROOT = DOCS.parent
RULES = DOCS / "tools" / "style.toml"
_PATH = re.compile(
    r"`((?:operator|sidecar|client|crds|charts|e2e|bench|tests|supply|examples|images|docs|requirements)/[\w./-]+)`"
)
_PAGE = re.compile(r"(?<![\w/.'-])(?<!'s )docs/[\w/-]+\.md")
_ROOT_PAGES = (
    "README.md",
    "CONTRIBUTING.md",
    "SECURITY.md",
    "examples/README.md",
    "examples/demo/README.md",
    "charts/kvpool/README.md",
    "e2e/airgap/README.md",
)
_FENCE = re.compile(r"^\s*(```|~~~)")
_END = re.compile(r"(?<=[.!?:])[\"')*_]*\s+(?=[\"'(*_]*[A-Z`\[])")
_ABBREVIATION = re.compile(r"(\b[A-Z]|\bvs|\bNo|\d)\.$")


def prose(text: str) -> list[tuple[int, str]]:
    """Return the numbered lines of prose: without code, tables, headings, links' targets and front matter."""
    lines = []
    fenced = front = False
    for number, line in enumerate(text.split("\n"), 1):
        if number == 1 and line == "---":
            front = True
            continue
        if front:
            front = line != "---"
            continue
        if _FENCE.match(line):
            fenced = not fenced
            continue
        if re.fullmatch(r"\*\*.*\*\*", line):  # a motto
            continue
        if fenced or line.startswith(("#", "!!!", "???", "===", "<", "--8<--", "[")) or "<!--" in line:
            continue
        plain = re.sub(r"`[^`]*`", "`x`", line)
        plain = re.sub(r"\]\([^)]*\)", "]", plain)
        lines.append((number, plain))
    return lines


def sentences(line: str) -> list[str]:
    """Split one line of prose into sentences."""
    parts: list[str] = []
    for part in _END.split(line.strip()):
        lead_in = re.fullmatch(r"[>\s]*\*\*[^*]+", parts[-1]) if parts else None
        if parts and (lead_in or _ABBREVIATION.search(parts[-1]) or parts[-1].endswith(":")):
            parts[-1] += " " + part
        else:
            parts.append(part)
    return [p for p in parts if p]


def _is_table(line: str) -> bool:
    return line.lstrip().startswith("|")


def check(page: str, text: str, rules: dict, *, generated: bool) -> tuple[list[str], int]:
    """Return the page's problems and the number of its sentences above the limit."""
    found = []
    long_sentences = 0
    allowed = rules["allow"].get(page, [])
    banned = [(re.compile(rf"\b(?:{p})\b", re.IGNORECASE), advice) for p, advice in rules["banned"].items()]
    for number, line in prose(text):
        for pattern, advice in banned:
            for match in pattern.finditer(line):
                if match.group(0).lower() not in allowed:
                    found.append(f"{page}:{number}: `{match.group(0)}`: write {advice}")
        if line.count("**") % 2:
            found.append(f"{page}:{number}: `**` has no partner on this line: close the emphasis")
        if generated or _is_table(line):
            continue
        parts = sentences(re.sub(r"^\s*([-*]|\d+\.)\s+", "", line))
        if len(parts) > 1:
            found.append(f"{page}:{number}: {len(parts)} sentences on a line: write one sentence on each line")
        long_sentences += sum(len(p.split()) > rules["max_words"] for p in parts)
    return found, long_sentences


def missing_paths(page: str, text: str) -> list[str]:
    """List the files and folders of the repository that the page names and that do not exist."""
    return [
        f"{page}: `{path}` does not exist"
        for path in _PATH.findall(text)
        if path != "operator/__init__.py" and not (ROOT / path).exists()
    ]


def moved_pages() -> list[str]:
    """List the pages that a file of the repository names and that do not exist."""
    found = []
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in listed.split("\0"):
        path = ROOT / name
        if path.suffix not in {".py", ".yaml", ".toml", ".md", ".mk", ".sh", ".txt", ".json"} or not path.is_file():
            continue
        for page in set(_PAGE.findall(path.read_text(errors="replace"))):
            if not (ROOT / page).is_file():
                found.append(f"{name}: {page} does not exist")
    return found


def main(arguments: list[str]) -> int:
    """Check every page; with --write record the present numbers of long sentences where they fell."""
    rules = tomllib.loads(RULES.read_text())
    pages = {str(p.relative_to(DOCS)): p for p in sorted(DOCS.rglob("*.md"))}
    pages |= {f"../{name}": ROOT / name for name in _ROOT_PAGES}
    problems = moved_pages()
    lengths = {}
    for page, path in pages.items():
        generated = "Generated" in path.read_text()[:400]  # such a page follows the rules of its source
        found, lengths[page] = check(page, path.read_text(), rules, generated=generated)
        problems += [] if generated else found + missing_paths(page, path.read_text())
        if lengths[page] > rules["long"].get(page, 0) and "--write" not in arguments:
            problems.append(f"{page}: {lengths[page]} sentences above {rules['max_words']} words: split them")
    if "--write" in arguments:
        head = RULES.read_text().split("\n[long]\n")[0]
        rows = [f'"{p}" = {n}' for p, n in sorted(lengths.items()) if n]
        RULES.write_text(head + "\n[long]\n" + "\n".join(rows) + ("\n" if rows else ""))
    print("\n".join(problems), file=sys.stderr) if problems else None
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
