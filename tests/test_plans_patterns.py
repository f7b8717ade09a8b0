"""Patterns stand for exactly the names they were made from."""

import random

import pytest

from meshwright.plans.patterns import compress, compress_mapping, expand, expand_all, expand_mapping, form

EXPANSIONS = [
    ("head", ["head"]),
    ("a.{0..2}.w", ["a.0.w", "a.1.w", "a.2.w"]),
    ("a.{0..4..2}", ["a.0", "a.2", "a.4"]),
    ("a.{5,0..1}", ["a.5", "a.0", "a.1"]),
    ("a.{0,1}.b.{2,3}", ["a.0.b.2", "a.0.b.3", "a.1.b.2", "a.1.b.3"]),
]
COMPRESSIONS = [
    (["embedding", "l.0", "l.1", "l.2", "head"], ["embedding", "l.{0..2}", "head"]),
    (["l.0.q", "l.0.k", "l.1.q", "l.1.k"], ["l.{0,1}.q", "l.{0,1}.k"]),
    (["l.4", "l.0", "l.2"], ["l.{0..4..2}"]),
    (["l.0", "l.1", "l.2", "l.7"], ["l.{0..2,7}"]),
    (["l.0.e.0", "l.0.e.1", "l.1.e.0", "l.1.e.1"], ["l.{0,1}.e.{0,1}"]),
    (["l.0.e.0", "l.0.e.1", "l.1.e.0"], ["l.{0,1}.e.0", "l.0.e.1"]),
    (["fc1.w", "fc2.w"], ["fc1.w", "fc2.w"]),
    (["a.01", "a.2"], ["a.01", "a.2"]),
    (["bridge", "bridge.1", "bridge.2"], ["bridge", "bridge.{1,2}"]),
    ([], []),
]


@pytest.mark.parametrize(("pattern", "names"), EXPANSIONS)
def test_expand(pattern: str, names: list[str]) -> None:
    assert list(expand(pattern)) == names


@pytest.mark.parametrize(("names", "patterns"), COMPRESSIONS)
def test_compress(names: list[str], patterns: list[str]) -> None:
    assert compress(names) == patterns
    assert sorted(expand_all(patterns)) == sorted(names)


@pytest.mark.parametrize(
    ("pattern", "words"),
    [
        ("a.{0..}", "none of a range"),
        ("a.{}", "none of a range"),
        ("a.{-1..3}", "none of a range"),
        ("a.{x}", "none of a range"),
        ("a.{3..1}", "backwards"),
        ("a.{0..4..0}", "backwards"),
        ("a.{0,0}", "given twice"),
        ("a.{0", "without its partner"),
        ("a}.b", "without its partner"),
        ("a.{0..999999999}", "more than"),
        ("a.{0..9999}.{0..9999}", "more than"),
    ],
)
def test_bad_pattern_is_named(pattern: str, words: str) -> None:
    with pytest.raises(ValueError, match=words) as caught:
        expand(pattern)
    assert repr(pattern) in str(caught.value)


def test_round_trip_of_random_names() -> None:
    rng = random.Random(0)
    for _ in range(300):
        names = {
            ".".join(rng.choice(["model", "h", "0", "1", "2", "3", "11", "w", "b1"]) for _ in range(rng.randint(1, 5)))
            for _ in range(rng.randint(1, 40))
        }
        shuffled = rng.sample(sorted(names), len(names))
        patterns = compress(shuffled)
        assert sorted(expand_all(patterns)) == sorted(names)
        assert len(patterns) <= len(names)
        firsts = [min(shuffled.index(name) for name in expand(pattern)) for pattern in patterns]
        assert firsts[0] == 0


def test_round_trip_of_mappings() -> None:
    rng = random.Random(1)
    for _ in range(100):
        values = {f"l.{i}.{p}": rng.choice("IR") for i in range(rng.randint(1, 9)) for p in ("q", "k", "e.0", "e.1")}
        assert expand_mapping(compress_mapping(values)) == values


def test_mapping_groups_layers_and_keeps_order() -> None:
    values = {f"l.{i}.{p}": v for i in range(126) for p, v in (("q", "S(0)@tp"), ("norm", "R@tp"))}
    values |= {"l.0.q": "I"}
    assert compress_mapping(values) == {"l.0.q": "I", "l.{0..125}.norm": "R@tp", "l.{1..125}.q": "S(0)@tp"}


def test_names_twice_are_refused() -> None:
    with pytest.raises(ValueError, match=r"'a.1' is named twice, by 'a.\{0,1\}' and by 'a.\{1..3\}'"):
        expand_mapping({"a.{0,1}": 0, "a.{1..3}": 1})
    with pytest.raises(ValueError, match="named twice"):
        compress(["a", "a"])
    with pytest.raises(ValueError, match="holds a brace"):
        compress(["a{"])


def test_form() -> None:
    assert form("model.layers.3.experts.11.w1") == ("model.layers.{}.experts.{}.w1", (3, 11))
