"""The ledger closes over the book, and each way to break it is named."""

import copy
import json
import tomllib

import pytest
import sympy as sp
from hygiene import ROOT

from moebook import Claim, Estimate, ledger, pages


def test_the_book_closes():
    book = ledger.collect(ROOT)
    assert ledger.problems(book) == []
    assert len(book.entries) >= 25


def test_every_equality_is_refuted_when_its_target_is_wrong():
    entries = [e for e in ledger.collect(ROOT).entries if e.record["relation"] == "="]
    assert entries
    assert [e.where for e in entries if ledger.survivors_of_mutation(e.record)] == []


def test_every_claim_about_a_paper_stands_in_the_concordance():
    file = ROOT / "chapters" / "appendix" / "statements.toml"
    statements = tomllib.loads(file.read_text())["statement"]
    answered = {(s["paper"], label) for s in statements for label in s["labels"]}
    entries = ledger.collect(ROOT).entries
    lost = [
        entry.where
        for entry in entries
        if (source := entry.record["source"]) != "ours"
        and not {(source, entry.record["label"]), (source, entry.theorem)} & answered
    ]
    assert lost == []
    assert len({s["id"] for s in statements}) == len(statements)


# --- a small book of our own, broken one way at a time -----------------------------

THEOREM = ":::{prf:theorem} Coin\n:label: coin\n\nIt is fair.\n:::"
CLAIM = Claim("coin", "p", "=", sp.Rational(1, 2))


def verdict(evidence=None, control=None, claim=CLAIM):
    evidence = evidence or Estimate(0.5001, 0.0005)
    return claim.check(evidence, control={"biased": control or sp.Rational(2, 3)})


def check_cell(found, source="coin.check(...)"):
    data, metadata = found._repr_mimebundle_()
    output = {"output_type": "execute_result", "data": data, "metadata": metadata}
    return {"cell_type": "code", "source": [source], "outputs": [output]}


def words(text):
    return {"cell_type": "markdown", "source": text.splitlines(True)}


def book(tmp_path, *cells):
    (tmp_path / "_toc.yml").write_text("format: jb-book\nroot: coin\n")
    (tmp_path / "coin.ipynb").write_text(json.dumps({"cells": cells}))
    return ledger.collect(tmp_path)


def test_a_closed_book_has_no_problems(tmp_path):
    whole = book(tmp_path, words(THEOREM), check_cell(verdict()))
    assert ledger.problems(whole) == []
    assert "{prf:ref}`coin`" in pages.ledger(whole)
    assert "1 statements, 1 verdicts (1 sampled)" in pages.summary(whole)


UNCHECKED = THEOREM.replace(":label: coin", ":label: coin\n:class: unchecked")
OTHER = Claim("dice", "p", "=", sp.Rational(1, 2))
EMPTY = copy.deepcopy(check_cell(verdict()))
EMPTY["outputs"][0]["metadata"]["moebook"]["controls"] = []
FORGED = copy.deepcopy(check_cell(verdict(Estimate(0.6, 0.0005))))
FORGED["outputs"][0]["metadata"]["moebook"]["outcome"] = "holds"


@pytest.mark.parametrize(
    ("cells", "complaint"),
    [
        ([words(THEOREM)], "'coin' has no verdict"),
        ([check_cell(verdict())], "no theorem of that label"),
        (
            [words(THEOREM), words(THEOREM), check_cell(verdict())],
            "stands twice",
        ),
        (
            [words(THEOREM), check_cell(verdict()), check_cell(verdict())],
            "two sampled verdicts",
        ),
        (
            [words(THEOREM), check_cell(verdict(claim=OTHER))],
            "'dice' has a verdict and no theorem",
        ),
        (
            [words(THEOREM), check_cell(verdict(Estimate(0.6, 0.0005)))],
            "its outcome is refuted",
        ),
        (
            [words(THEOREM), check_cell(verdict(control=sp.Rational(1, 2)))],
            "its outcome is unresolved",
        ),
        (
            [words(THEOREM), check_cell(verdict(Estimate(0.5, 0.0011)))],
            "above 1.0%",
        ),
        (
            [words(THEOREM), check_cell(verdict(), "boundary.mass(router, x, w)")],
            "above 0.3%",
        ),
        (
            [words(THEOREM), check_cell(verdict(Estimate(0.5, 0.0021)))],
            "[0.98, 1.02] would still hold",
        ),
        ([words(THEOREM), EMPTY], "has no control"),
        ([words(THEOREM), FORGED], "its record disagrees"),
        (
            [
                words(THEOREM),
                {"cell_type": "code", "source": ["e = boundary.mass(r, x, w)"]},
                check_cell(verdict(Estimate(0.5, 0.0004))),
            ],
            "above 0.3%",
        ),
        ([words(UNCHECKED)], "gives no reason"),
        (
            [words(UNCHECKED), check_cell(verdict())],
            "marked unchecked, yet",
        ),
        ([words(THEOREM.replace(":label: coin", ""))], "no :label:"),
    ],
)
def test_each_break_is_named(tmp_path, cells, complaint):
    found = ledger.problems(book(tmp_path, *cells))
    assert any(complaint in line for line in found), found
    assert all("coin" in line for line in found)


def test_an_unchecked_theorem_gives_its_reason(tmp_path):
    reason = "No number decides this: it speaks of all routers."
    whole = book(tmp_path, words(UNCHECKED.replace("It is fair.", reason)))
    assert ledger.problems(whole) == []
    assert "it speaks of all routers" in pages.ledger(whole)


def test_the_exact_and_the_computed_survive_no_mutation():
    exact = verdict(sp.Rational(1, 2), sp.Rational(2, 3)).record()
    computed = verdict(Estimate(0.5, 0, bias=1e-6), sp.Rational(2, 3)).record()
    zero = Claim("zero", "p", "=", sp.Integer(0))
    odd = zero.check(sp.Integer(0), control={"even": sp.Integer(1)}).record()
    for record in (exact, computed, odd):
        assert ledger.survivors_of_mutation(record) == []


def test_without_a_checkout_it_says_what_to_do(tmp_path):
    with pytest.raises(FileNotFoundError, match="clone"):
        ledger.collect(tmp_path)


def test_the_concordance_refuses_a_label_that_no_chapter_has(tmp_path):
    whole = book(tmp_path, words(THEOREM), check_cell(verdict()))
    row = {
        "paper": "p",
        "kind": "theory",
        "text": "Fair.",
        "labels": ["coin"],
        "remark": "",
    }
    assert "{prf:ref}`coin`, *ours*." in pages.concordance(whole, [row])
    open_row = {**row, "labels": []}
    assert ": *open*." in pages.concordance(whole, [open_row])
    with pytest.raises(ValueError, match="no chapter has"):
        pages.concordance(whole, [{**row, "labels": ["dice"]}])
