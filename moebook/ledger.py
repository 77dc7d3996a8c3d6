"""The ledger: a reading of the verdicts stored in the chapters. Knows files only."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

#: Largest resolution of an "=" claim, as a share of its target.
LIMIT_SAMPLED = 0.01
LIMIT_CONDITIONAL = 0.003
#: Modules whose estimators condition; a cell that uses one meets the sharper limit.
CONDITIONAL = re.compile(r"\b(boundary|risk|diffusion)\.(?!brute_force)\w+\(")
#: Every target of an "=" claim is multiplied by these; each must then be refuted.
MUTATIONS = (0.98, 1.02, 0.5, 2.0, -1.0)

THEOREM = re.compile(
    r"^(:{3,})\{prf:(?:theorem|proposition|lemma|corollary)\}[ ]*(?P<title>.*)\n"
    r"(?P<options>(?::[\w-]+:.*\n)*)(?P<body>[\s\S]*?)^\1[ ]*$",
    re.MULTILINE,
)
REASON = "No number decides this:"


@dataclass(frozen=True)
class Theorem:
    """A labelled theorem of a chapter; `reason` says why no number decides it."""

    label: str
    title: str
    chapter: str
    unchecked: bool
    reason: str


@dataclass(frozen=True)
class Entry:
    """A stored verdict and where it stands."""

    record: dict
    chapter: str
    cell: int
    conditional: bool

    @property
    def theorem(self) -> str:
        """Label of the theorem that the claim belongs to."""
        return self.record["label"].split("/")[0]

    @property
    def where(self) -> str:
        return f"{self.chapter}, cell {self.cell}: {self.record['label']!r}"


@dataclass(frozen=True)
class Book:
    """Theorems and stored verdicts, in the order of the table of contents."""

    theorems: tuple[Theorem, ...]
    entries: tuple[Entry, ...]


def collect(root: str | Path) -> Book:
    """Read every notebook that `_toc.yml` under `root` names. Source: ours."""
    root = Path(root)
    toc = root / "_toc.yml"
    if not toc.exists():
        raise FileNotFoundError(
            f"the ledger reads the chapters of a checkout; {toc} is not there: clone "
            "the book's repository and name its folder"
        )
    names = re.findall(r"(?:root|file):\s*(\S+)", toc.read_text())
    paths = [root / f"{name}.ipynb" for name in names]
    read = [read_notebook(p, root) for p in paths if p.exists()]
    return Book(
        tuple(theorem for theorems, _ in read for theorem in theorems),
        tuple(entry for _, entries in read for entry in entries),
    )


def read_notebook(path: Path, root: Path) -> tuple[list[Theorem], list[Entry]]:
    """Theorems and stored verdicts of one notebook."""
    chapter = path.relative_to(root).with_suffix("").as_posix()
    theorems, entries = [], []
    for index, cell in enumerate(json.loads(path.read_text())["cells"]):
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            theorems += [_theorem(m, chapter) for m in THEOREM.finditer(source)]
        for output in cell.get("outputs", []):
            record = output.get("metadata", {}).get("moebook")
            if record:
                conditional = bool(CONDITIONAL.search(source))
                entries.append(Entry(record, chapter, index, conditional))
    return theorems, entries


def _theorem(match: re.Match, chapter: str) -> Theorem:
    options = dict(re.findall(r"^:([\w-]+):[ ]*(.*)$", match["options"], re.M))
    after = match["body"].partition(REASON)[2].strip()
    return Theorem(
        label=options.get("label", ""),
        title=match["title"].strip(),
        chapter=chapter,
        unchecked="unchecked" in options.get("class", ""),
        reason=after.partition("\n\n")[0].replace("\n", " "),
    )


def problems(book: Book) -> list[str]:
    """Everything that keeps the ledger from closing, a sentence each."""
    found = []
    checked = {entry.theorem for entry in book.entries}
    labels = Counter(theorem.label for theorem in book.theorems)
    for theorem in book.theorems:
        found += _theorem_problems(theorem, checked, labels)
    kinds = Counter((e.record["label"], e.record["kind"]) for e in book.entries)
    for entry in book.entries:
        if entry.theorem not in labels:
            found.append(f"{entry.where} has a verdict and no theorem of that label")
        if kinds[entry.record["label"], entry.record["kind"]] > 1:
            found.append(f"{entry.where}: two {entry.record['kind']} verdicts share it")
        found += [f"{entry.where}: {trouble}" for trouble in _entry_problems(entry)]
    return found


def _theorem_problems(theorem: Theorem, checked: set, labels: Counter) -> list[str]:
    where = f"{theorem.chapter}: theorem {theorem.label or theorem.title!r}"
    found = []
    if not theorem.label:
        found.append(f"{where} has no :label:")
    elif labels[theorem.label] > 1:
        found.append(f"{where}: its label stands twice in the book")
    if theorem.unchecked and not theorem.reason:
        found.append(f"{where} is unchecked and gives no reason ({REASON!r} ...)")
    if theorem.unchecked and theorem.label in checked:
        found.append(f"{where} is marked unchecked, yet it has a verdict")
    if not theorem.unchecked and theorem.label not in checked:
        found.append(f"{where} has no verdict")
    return found


def _entry_problems(entry: Entry) -> list[str]:
    record = entry.record
    found = []
    if record["outcome"] != "holds":
        found.append(f"its outcome is {record['outcome']}, not holds")
    if not record["controls"]:
        found.append("it has no control")
    if record["relation"] != "=":
        return found
    share = record["resolution"] / (abs(record["target"]) or 1.0)
    limit = LIMIT_CONDITIONAL if entry.conditional else LIMIT_SAMPLED
    if share > limit:
        found.append(f"it resolves {share:.2%} of its target, above {limit:.1%}")
    survivors = survivors_of_mutation(record)
    if survivors:
        found.append(f"its target times {survivors} would still hold")
    return found


def survivors_of_mutation(record: dict) -> list[float]:
    """Factors by which the target could be wrong without being refuted."""
    if record["target"] == 0:
        # A product cannot move zero. Algebra moves by any step, a sample by its error.
        moved = {1.0: 1.0, -1.0: -1.0}
    else:
        moved = {factor: factor * record["target"] for factor in MUTATIONS}
    return [f for f, t in moved.items() if record["low"] <= t <= record["high"]]


def table(book: Book) -> str:
    """The ledger as Markdown, one row a verdict, unchecked theorems at the foot."""
    rows = [
        "| statement | claim | kind | refuted controls | an error shows from | |",
        "| :-- | :-- | :-- | :-- | :-- | :-- |",
    ]
    rows += [_row(entry) for entry in book.entries]
    foot = [
        f"- {{prf:ref}}`{t.label}` ({t.title}): {t.reason}"
        for t in book.theorems
        if t.unchecked
    ]
    if foot:
        rows += ["", "Statements that no number decides:", "", *foot]
    return "\n".join(rows)


def _row(entry: Entry) -> str:
    record = entry.record
    controls = "; ".join(control["name"] for control in record["controls"])
    share = record["resolution"] / (abs(record["target"]) or 1.0)
    size = "any" if record["kind"] == "exact" else f"± {100 * share:.2g} %"
    return (
        f"| {{prf:ref}}`{entry.theorem}` | ${record['tex']}$ | {record['kind']} "
        f"| {controls} | {size} | **{record['outcome']}** |"
    )


def summary(book: Book) -> str:
    """The ledger in one sentence: how many theorems, verdicts and kinds."""
    kinds = Counter(entry.record["kind"] for entry in book.entries)
    counts = ", ".join(f"{kinds[kind]} {kind}" for kind in sorted(kinds))
    controls = sum(len(entry.record["controls"]) for entry in book.entries)
    return (
        f"{len(book.theorems)} statements, {len(book.entries)} verdicts ({counts}), "
        f"{controls} refuted controls"
    )


def concordance(book: Book, statements: Sequence[dict]) -> str:
    """Statements of the papers against this book, as Markdown.

    A statement is a mapping with `paper`, `text`, `labels` (of theorems or claims,
    none where open) and `remark`. Raises ValueError for a label the book lacks.
    """
    known = {e.record["label"] for e in book.entries} | {t.label for t in book.theorems}
    rows = ["| the paper says | here | verdict | remark |", "| :-- | :-- | :-- | :-- |"]
    for statement in statements:
        missing = [label for label in statement["labels"] if label not in known]
        if missing:
            raise ValueError(
                f"the concordance names {missing}, which no chapter has: correct the "
                f"labels of {statement['text']!r}"
            )
        links = ", ".join(_link(label) for label in statement["labels"])
        cells = [statement["text"], links or "-", _verdict(book, statement["labels"])]
        rows.append("| " + " | ".join([*cells, statement["remark"]]) + " |")
    return "\n".join(rows)


def _link(label: str) -> str:
    theorem, _, aspect = label.partition("/")
    return f"{{prf:ref}}`{theorem}`" + (f" ({aspect})" if aspect else "")


def _verdict(book: Book, labels: Sequence[str]) -> str:
    if not labels:
        return "open"
    stances = {
        entry.record["stance"]
        for entry in book.entries
        if entry.record["label"] in labels or entry.theorem in labels
    }
    return ", ".join(sorted(stances)) or "no number decides"
