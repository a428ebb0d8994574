"""Digests of facts."""

from orbax_safetensors.format.digest import digest_of


def test_digests_tell_facts_apart() -> None:
    assert digest_of([("a", 1)]) == digest_of([("a", 1)])
    assert digest_of([("a", 1)]) != digest_of([("a", 1.0)]) != digest_of((("a", 1),))


def test_a_name_may_have_what_utf_8_does_not_hold() -> None:
    assert digest_of(["\udcff"]) != digest_of(["\udcfe"])


def test_a_later_version_knows_digests_that_this_one_has_recorded() -> None:
    assert digest_of(["a", 1]) == "1d80946614ee16afe9f06ce5ca9c1d106a1882262126748b7c5d851cc753f023"
