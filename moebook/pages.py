"""The ledger and the concordance as pages: Markdown made from what `ledger` read.

Definition lists, not tables: they read on a phone.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence

from moebook.ledger import Book, Entry

FOOT = "Statements that no number decides"


def ledger(book: Book) -> str:
    """Chapter, theorem, and under it a line a verdict, as Markdown. Source: ours."""
    verdicts = defaultdict(list)
    for entry in book.entries:
        verdicts[entry.theorem].append(_row(entry))
    chapters = defaultdict(list)
    for theorem in book.theorems:
        place = FOOT if theorem.unchecked else f"{{doc}}`/{theorem.chapter}`"
        name = f"{{prf:ref}}`{theorem.label}`: {theorem.title}"
        below = verdicts[theorem.label] or [f": {theorem.reason or 'no verdict'}"]
        chapters[place] += [name, *below, ""]
    chapters[FOOT] = chapters.pop(FOOT, [])
    lines = []
    for place, rows in chapters.items():
        lines += [f"**{place}**", "", *rows] if rows else []
    return "\n".join(lines)


def _row(entry: Entry) -> str:
    record = entry.record
    controls = "; ".join(f"*{control['name']}*" for control in record["controls"])
    plain = record["kind"] == "exact" or record["relation"] != "="
    sharp = "" if plain else f", resolution {_size(record)}"
    aspect = record["label"].partition("/")[2]
    about = f"*{aspect}*: " if aspect else ""
    return (
        f": {about}${record['tex']}$ **{record['outcome']}** "
        f"({record['kind']}{sharp}). Refuted: {controls}."
    )


def _size(record: dict) -> str:
    target = abs(record["target"])
    if target == 0:
        return f"± {record['resolution']:.1e}"
    return f"± {100 * record['resolution'] / target:.1g} %"


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

    A statement is a mapping with `text`, `labels` (of theorems or claims, none where
    open), `kind` and `remark`. Raises ValueError for a label the book lacks.
    """
    known = {e.record["label"] for e in book.entries} | {t.label for t in book.theorems}
    lines = []
    for statement in statements:
        missing = [label for label in statement["labels"] if label not in known]
        if missing:
            raise ValueError(
                f"the concordance names {missing}, which no chapter has: correct the "
                f"labels of {statement['text']!r}"
            )
        links = [_link(label) for label in statement["labels"]]
        words = ", ".join([*links, f"*{_verdict(book, statement)}*"])
        lines += [statement["text"], f": {words}. {statement['remark']}", ""]
    return "\n".join(lines)


def _link(label: str) -> str:
    theorem, _, aspect = label.partition("/")
    return f"{{prf:ref}}`{theorem}`" + (f" ({aspect})" if aspect else "")


def _verdict(book: Book, statement: dict) -> str:
    labels = statement["labels"]
    if not labels:
        return {"theory": "open"}.get(statement["kind"], statement["kind"])
    found = [e for e in book.entries if {e.record["label"], e.theorem} & set(labels)]
    bad = [e for e in found if e.record["outcome"] != "holds"]
    if bad:
        return ", ".join(sorted({e.record["outcome"] for e in bad}))
    paper = {
        e.record["stance"] for e in found if e.record["source"] == statement["paper"]
    }
    return ", ".join(sorted(paper)) or ("ours" if found else "no number decides")
