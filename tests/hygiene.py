"""What nbval passes in silence and this book does not: the normal form of a chapter.

`problems(path)` gives one sentence for each fault: which cell, what, and the mend.
"""

import ast
import os
import re
import sys
from pathlib import Path

import nbformat

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tools"))
import notebooks  # noqa: E402

WIDTH, LINES, EXERCISES = 76, 12, 4
TAGS = {"remove-cell", "hide-input"}
TIERS = (": check yourself", ": worked", ": assignment")
#: Calls that draw numbers: each needs generator=, none may use a global state.
DRAWS = {
    *("rand", "randn", "randint", "randperm", "normal", "bernoulli", "multinomial"),
    *("rand_like", "randn_like", "normal_", "uniform_", "exponential_", "cauchy_"),
    *("log_normal_", "geometric_", "random_", "bernoulli_", "poisson"),
}
GLOBAL_STATE = re.compile(r"torch\.manual_seed|np\.random|\brandom\.(?!Generator)\w+\(")


def toc_names(root=ROOT):
    return re.findall(r"(?:root|file):\s*(\S+)", (root / "_toc.yml").read_text())


def chapter_paths(root=ROOT):
    return [root / f"{name}.ipynb" for name in toc_names(root)]


def outside_toc(root=ROOT):
    """Chapters that the table of contents misses, and entries without a chapter."""
    named = set(chapter_paths(root))
    there = {
        path
        for path in (root / "chapters").rglob("*.ipynb")
        if ".ipynb_checkpoints" not in path.parts
    }
    lost = [f"{p.relative_to(root)} is not in _toc.yml" for p in there - named]
    empty = [
        f"_toc.yml names {p.relative_to(root)}: no such file" for p in named - there
    ]
    return sorted(lost + empty)


def problems(path, root=ROOT):
    notebook = nbformat.read(path, as_version=4)
    found = [f"{path.name}: {fault}" for fault in _whole(notebook, path)]
    for index, cell in enumerate(notebook.cells):
        faults = _markdown(cell) if cell.cell_type == "markdown" else _code(cell)
        found += [f"{path.name}, cell {index}: {fault}" for fault in faults]
    return found


def _whole(notebook, path):
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    counts = [cell.execution_count for cell in code]
    if counts != list(range(1, len(code) + 1)):
        yield f"execution counts are {counts}: run `make refresh`"
    if code and code[0].source != notebooks.install_cell():
        yield "the first code cell is not the install cell: run `make refresh`"
    text = nbformat.writes(notebook)
    if text != nbformat.writes(notebooks.normal_form(nbformat.reads(text, 4))):
        yield "it is not in normal form: run `make refresh`"
    if path.parent.name != "appendix":
        yield from _exercises("\n".join(cell.source for cell in notebook.cells))


def _exercises(text):
    titles = re.findall(r"^:{3,}\{exercise\}[ ]*(.*)$", text, re.MULTILINE)
    if len(titles) < EXERCISES:
        yield f"{len(titles)} exercises; a chapter has at least {EXERCISES}"
    for title in titles:
        if not title.endswith(TIERS):
            yield f"the exercise {title!r} names none of the tiers {TIERS}"
    worked = sum(title.endswith(": worked") for title in titles)
    folded = len(re.findall(r"\{solution\}.*\n:class: dropdown", text))
    if not worked <= folded:
        yield f"{worked} worked exercises and {folded} folded solutions"


def _markdown(cell):
    if re.search(r"^`{3,}\{(prf|exercise|solution|admonition|note)", cell.source, re.M):
        yield "a directive in back-tick fences shows as code in Jupyter: use :::"
    if re.search(r"!\[\s*\]\(", cell.source):
        yield "a picture without alt text"
    if re.search(r"\$\$[^$]*\\begin\{align\*?\}", cell.source):
        yield "align inside dollars: use aligned"


def _code(cell):
    lines = cell.source.split("\n")
    if max(map(len, lines)) > WIDTH:
        yield f"a line of {max(map(len, lines))} columns; at most {WIDTH}"
    if len(lines) > LINES:
        yield f"{len(lines)} lines; at most {LINES}"
    tags = set(cell.metadata.get("tags", []))
    if tags - TAGS:
        yield f"the tags {sorted(tags - TAGS)} are not in the list {sorted(TAGS)}"
    if "NBVAL_" in cell.source or "type: ignore" in cell.source:
        yield "a comment that silences a check"
    yield from _randomness(cell.source)
    yield from _outputs(cell)


def _randomness(source):
    if GLOBAL_STATE.search(source):
        yield "randomness from a global state: pass a torch.Generator"
    for call in (n for n in ast.walk(ast.parse(source)) if isinstance(n, ast.Call)):
        name = getattr(call.func, "attr", getattr(call.func, "id", ""))
        if name in DRAWS and "generator" not in {k.arg for k in call.keywords}:
            yield f"{name}(...) draws without generator=: it is unseeded"
        if name == "Generator" and ".manual_seed(" not in source:
            yield "a torch.Generator without manual_seed: it is unseeded"


def _outputs(cell):
    body = ast.parse(cell.source).body
    shows = body and isinstance(body[-1], ast.Expr)
    if shows and "plt.style.use" not in cell.source and not cell.outputs:
        yield "no stored output under an expression: run `make refresh`"
    for output in cell.outputs:
        data = output.get("data", {})
        text = data.get("text/plain", output.get("text", ""))
        if output.output_type == "error":
            yield f"a stored exception, {output.ename}"
        if output.get("name") == "stderr":
            yield f"something was written to stderr: {text[:60]!r}"
        if re.search(r"\bFalse\b", text) or re.search(r"\bnan\b", text):
            yield f"a stored False or nan: {text[:60]!r}"
        if any(kind.startswith("image/") for kind in data):
            yield from _picture(cell.metadata.get("mystnb", {}))
        record = output.get("metadata", {}).get("moebook", {})
        if "control" in {control["name"] for control in record.get("controls", [])}:
            yield f"{record['label']!r} does not say in words what its control is"


def _picture(mystnb):
    if len(mystnb.get("image", {}).get("alt", "")) < 20:
        yield "a picture without alt text: set mystnb.image.alt"
    figure = mystnb.get("figure", {})
    if not (figure.get("caption") and figure.get("name")):
        yield "a picture without caption and name: set mystnb.figure"


def environment():
    """Environment for a run of the gate: one thread a kernel, no progress bars."""
    # A kernel must choose its own backend, or its pictures never reach the page.
    own = {name: text for name, text in os.environ.items() if name != "MPLBACKEND"}
    return {**own, "OMP_NUM_THREADS": "1", "CI": "true"}
