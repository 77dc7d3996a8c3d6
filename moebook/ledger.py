"""The ledger: a reading of the verdicts stored in the chapters. Knows files only."""

from __future__ import annotations

import json
import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

#: Largest resolution of an "=" claim, as a share of its target.
LIMIT_SAMPLED = 0.01
LIMIT_CONDITIONAL = 0.003
#: Modules whose estimators condition; their verdicts meet the sharper limit.
CONDITIONAL = re.compile(r"\b(boundary|risk|diffusion)\.(?!brute_force)\w+\(")
#: Every target of an "=" claim is multiplied by these; each must then be refuted.
MUTATIONS = (0.98, 1.02, 0.5, 2.0, -1.0)

THEOREM = re.compile(
    r"^(:{3,})\{prf:(?:theorem|proposition|lemma|corollary)\}[ ]*(?P<title>.*)\n"
    r"(?P<options>(?::[\w-]+:.*\n)*)(?P<body>[\s\S]*?)^\1[ ]*$",
    re.MULTILINE,
)
REASON = "No number decides this:"
#: Chapters in the table of contents; a commented line names none.
NAMED = re.compile(r"^[ \t-]*(?:root|file):[ \t]*[\"']?([^\s\"'#]+)", re.MULTILINE)
#: A theorem shown as an example, inside fenced code, promises nothing.
EXAMPLE = re.compile(r"^(`{3,}|~{3,})[\s\S]*?^\1[ ]*$", re.MULTILINE)


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
    #: The stored line that the tests re-derive; the record must say the same.
    said: str

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
    names = NAMED.findall(toc.read_text())
    paths = [root / f"{name}.ipynb" for name in names]
    read = [read_notebook(p, root) for p in paths if p.exists()]
    return Book(
        tuple(theorem for theorems, _ in read for theorem in theorems),
        tuple(entry for _, entries in read for entry in entries),
    )


def read_notebook(path: Path, root: Path) -> tuple[list[Theorem], list[Entry]]:
    """Theorems and stored verdicts of one notebook."""
    chapter = path.relative_to(root).with_suffix("").as_posix()
    theorems, entries, since = [], [], ""
    for index, cell in enumerate(json.loads(path.read_text())["cells"]):
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            source = EXAMPLE.sub("", source.replace("\r\n", "\n"))
            theorems += [_theorem(m, chapter) for m in THEOREM.finditer(source)]
            continue
        # An estimate may be made a cell before its verdict.
        since += source + "\n"
        for output in cell.get("outputs", []):
            record = output.get("metadata", {}).get("moebook")
            if record:
                conditional = bool(CONDITIONAL.search(since))
                said = "".join(output["data"].get("text/plain", ""))
                entries.append(Entry(record, chapter, index, conditional, said))
                since = ""
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
    found = (
        []
        if book.theorems or book.entries
        else ["the ledger found no theorem: read _toc.yml"]
    )
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
    if entry.said != f"{record['label']} ({record['kind']}): {record['outcome']}":
        found.append(f"its record disagrees with its output, {entry.said!r}")
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
