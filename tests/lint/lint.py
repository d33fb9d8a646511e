#!/usr/bin/env python3
"""Keeps the house in order: include direction, sizes, banned words and calls, headers that compile alone, doc links.

Prints one line a finding and closes with 'N passed, N failed'. Needs g++ for the header check and git for the file list.
"""
import os
import re
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
os.chdir(ROOT)
FILES = [f for f in subprocess.run(["git", "ls-files", "--cached", "--others", "--exclude-standard"],
                                   capture_output=True, text=True, check=True).stdout.splitlines() if os.path.isfile(f)]
SOURCE = (".h", ".cpp", ".cu", ".cuh")

# Folder -> folders whose headers it may include. Nothing points back.
MAY_INCLUDE = {
    "kernels": {"kernels"},
    "kvcache": {"kvcache", "kernels"},
    "engine": {"engine", "kvcache", "kernels"},
    "server": {"server", "engine", "kvcache", "kernels", "proto", "loupe"},
}
# Finer rules inside folders: (files, forbidden include, why).
FORBIDDEN_INCLUDES = [
    (r"^kvcache/policies/", r"^kernels/backend\.h|^kvcache/(arena|page_pool|block_table)", "policies decide, they never touch memory"),
    (r"^engine/(model|load|text|sample)/", r"^engine/(scheduler|engine|sequence|request_queue)\.h", "the lower parts of the engine do not know requests"),
    (r"^(kernels|kvcache|engine)/", r"prometheus/|grpc|boost/|google/protobuf|CLI/", "only server/ knows the outside"),
    (r"^kernels/(?!cpu/)", r"immintrin\.h|arm_neon\.h", "intrinsics stay in kernels/cpu"),
]
MAX_FILE_LINES = 600
MAX_FUNCTION_LINES = {"kernels/cpu/": 120, "": 70}
MAX_POLICY_LINES = 300
BANNED = [
    (r"\bTODO\b|\bFIXME\b|\bXXX\b", "an open end: finish it or write an issue"),
    (r"\busing namespace std\b", "spell std"),
    (r"\bstd::cout\b", "use stdio in commands, spdlog elsewhere"),
    (r"\bstd::endl\b", "flushes at every line"),
    (r"\bassert\(", "LOUPE_CHECK stays on in release builds"),
]


def read(path):
    with open(path, encoding="utf-8", errors="replace") as f:
        return f.read()


def sources(tests=True):
    return [f for f in FILES if f.endswith(SOURCE) and (tests or not f.startswith("tests/"))]


def check_includes():
    for f in sources(tests=False):
        top = f.split("/")[0]
        for line, text in enumerate(read(f).splitlines(), 1):
            m = re.match(r'\s*#\s*include\s+([<"])([^>"]+)[>"]', text)
            if not m:
                continue
            target = m.group(2)
            folder = target.split("/")[0]
            if m.group(1) == '"' and "/" in target and folder in set(MAY_INCLUDE) | {"proto", "loupe", "tests"}:
                if top in MAY_INCLUDE and folder not in MAY_INCLUDE[top]:
                    yield f"{f}:{line}: {top}/ may not include {target}; allowed: {', '.join(sorted(MAY_INCLUDE[top]))}"
            elif m.group(1) == '"' and "/" not in target:
                yield f'{f}:{line}: include from the repository root, not "{target}"'
            for where, what, why in FORBIDDEN_INCLUDES:
                if re.search(where, f) and re.search(what, target):
                    yield f"{f}:{line}: includes {target}: {why}"



def function_lengths(text):
    """Length of each function: a line that opens a brace at namespace level until the brace that closes it."""
    lines = text.splitlines()
    depth_of_scope = 0  # braces of namespaces and classes
    i = 0
    while i < len(lines):
        line = re.sub(r'"(?:\\.|[^"\\])*"|\'(?:\\.|[^\'\\])\'', '""', lines[i])
        code = line.split("//")[0]
        if re.match(r"^\s*(namespace|class|struct|enum|union|extern)\b[^;()]*\{\s*$", code) or \
                re.match(r"^\s*(template\s*<.*>\s*)?(class|struct)\b[^;]*\{\s*$", code):
            depth_of_scope += 1
            i += 1
            continue
        if "{" in code and code.count("{") > code.count("}"):
            start, depth = i, 0
            while i < len(lines):
                body = re.sub(r'"(?:\\.|[^"\\])*"|\'(?:\\.|[^\'\\])\'', '""', lines[i]).split("//")[0]
                depth += body.count("{") - body.count("}")
                if depth <= 0:
                    break
                i += 1
            first = lines[start]
            if "(" in first or (start and "(" in "".join(lines[max(0, start - 4):start + 1])):
                yield start + 1, i - start + 1
        i += 1


def check_sizes():
    for f in sources():
        text = read(f)
        lines = text.count("\n")
        if lines > MAX_FILE_LINES:
            yield f"{f}: {lines} lines, at most {MAX_FILE_LINES}: split it by what its parts are for"
        if f.startswith("kvcache/policies/") and lines > MAX_POLICY_LINES:
            yield f"{f}: {lines} lines, a policy has at most {MAX_POLICY_LINES}"
        if f.startswith("tests/"):
            continue
        limit = next(v for k, v in MAX_FUNCTION_LINES.items() if f.startswith(k))
        for line, length in function_lengths(text):
            if length > limit:
                yield f"{f}:{line}: function of {length} lines, at most {limit}"
        for line, code in enumerate(text.splitlines(), 1):
            if len(code) > 140:
                yield f"{f}:{line}: line of {len(code)} characters, at most 140"


def check_banned():
    for f in sources(tests=False):
        for line, text in enumerate(read(f).splitlines(), 1):
            for pattern, why in BANNED:
                if re.search(pattern, text):
                    yield f"{f}:{line}: {pattern!r}: {why}"
    for f in FILES:
        if os.path.getsize(f) > 2_000_000:
            yield f"{f}: {os.path.getsize(f)} bytes: data of this size is fetched or made, not committed"


def check_headers():
    """Every header has #pragma once, opens with a comment, and compiles alone."""
    headers = [f for f in sources(tests=False) if f.endswith(".h")]
    for f in headers:
        text = read(f)
        if "#pragma once" not in text:
            yield f"{f}: no #pragma once"
        if not text.startswith("//"):
            yield f"{f}: opens without a comment that says what it is for"
    with tempfile.TemporaryDirectory() as tmp:
        def compile_alone(f):
            unit = os.path.join(tmp, f.replace("/", "_") + ".cpp")
            with open(unit, "w") as out:
                out.write(f'#include "{f}"\n')
            command = ["g++", "-std=c++20", "-fsyntax-only", "-I.", "-DSPDLOG_FMT_EXTERNAL", unit]
            r = subprocess.run(command, capture_output=True, text=True)
            if re.search(r"\.pb\.h: No such file", r.stderr):
                return None  # needs generated code: the build compiles it
            return f"{f}: does not compile alone: {r.stderr.strip().splitlines()[0] if r.stderr else r.returncode}" if r.returncode else None

        with ThreadPoolExecutor(os.cpu_count()) as pool:
            for finding in pool.map(compile_alone, headers):
                if finding:
                    yield finding


def anchors(text):
    for heading in re.findall(r"^#+\s+(.*)$", text, re.M):
        yield re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def check_docs():
    """Links and file names in documents point at things that exist."""
    for f in FILES:
        if not f.endswith(".md"):
            continue
        text = read(f)
        for target in re.findall(r"\]\(([^)\s]+)\)", text):
            if re.match(r"[a-z]+:", target):
                continue
            path, _, anchor = target.partition("#")
            full = os.path.normpath(os.path.join(os.path.dirname(f), path)) if path else f
            if not os.path.exists(full):
                yield f"{f}: link to {target}, which does not exist"
            elif anchor and full.endswith(".md") and anchor not in anchors(read(full)):
                yield f"{f}: link to {target}: no such heading"
        for name in re.findall(r"`((?:kernels|kvcache|engine|server|proto|deploy|tests|docs)/[\w./-]+\.\w+)`", text):
            if not os.path.exists(name):
                yield f"{f}: names {name}, which does not exist"


def main():
    checks = [check_includes, check_sizes, check_banned, check_headers, check_docs]
    passed = failed = 0
    for check in checks:
        findings = list(check())
        for finding in findings:
            print(f"ERROR: {finding}")
        print(f"{check.__name__}: {'ok' if not findings else f'{len(findings)} findings'}")
        passed, failed = passed + (not findings), failed + bool(findings)
    print(f"{passed} passed, {failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
