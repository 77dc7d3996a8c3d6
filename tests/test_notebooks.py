"""Every chapter is in normal form; see hygiene.py for what that means."""

import hygiene
import pytest


def test_the_table_of_contents_is_complete():
    assert hygiene.outside_toc() == []


@pytest.mark.parametrize(
    "path", hygiene.chapter_paths(), ids=lambda p: f"{p.parent.name}/{p.stem}"
)
def test_normal_form(path):
    assert hygiene.problems(path) == []
