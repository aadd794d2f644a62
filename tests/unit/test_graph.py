"""The decode graph: built by hand or from a recipe, the same either way, and refused where parts do not fit."""

from __future__ import annotations

import inspect
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
from pydantic import BaseModel

from specflow.draft.registry import SourceInfo, discover
from specflow.errors import GraphError
from specflow.graph import DecodeGraph, DraftFacts, Edge, Kind, TargetFacts
from specflow.length import POLICIES
from specflow.recipe import Recipe, load_recipe, parse_recipe, shipped_recipes
from specflow.recipe_draft import COMBINED
from specflow.rules import RULE_INFOS
from specflow.types import Sampling

FACTS = TargetFacts(num_layers=30, vocab_size=49152, hidden_size=576)


class HeadOptions(BaseModel):
    taps: tuple[int, ...] = (2, 15, 28)


class StepOptions(BaseModel):
    taps: tuple[int, ...] | None = None  # only a loaded target can tell
    shape: str = "chain"


class FixableOptions(BaseModel):
    corrector: str | None = None
    weights: str | None = None


def made(name: str, **facts: Any) -> SourceInfo:
    """A source as an outside package might declare it."""
    facts = {"dependency": ("parallel",), "offers": ("marginals",), "reads": ("tokens", "features"), **facts}
    facts = {"config": HeadOptions, "axis": "target_features", **facts}
    return SourceInfo(name, build=lambda config, context: pytest.fail("not built here"), **facts)


SOURCES: Mapping[str, SourceInfo] = {
    **discover(),
    "heads": made("heads", law="sampled"),
    "doubtful": made("doubtful", law="sampled", confidence_from="self", offers=("marginals", "confidence")),
    "careful": made("careful", law="sampled", confidence_from="prefix", offers=("marginals", "confidence")),
    "steps": made("steps", config=StepOptions, law="sampled", dependency=("ar",), offers=("logits", "confidence")),
    "fixable": made("fixable", config=FixableOptions, dependency=("parallel", "parallel+corrector")),
    "silent": made("silent", law="unknown"),
    "mute": made("mute", offers=()),
}


SHARED: dict[str, Any] = {"source_options": {"share": True}}
BEAM: dict[str, Any] = {"source_options": {"shape": "beam"}}
MARKOV: dict[str, Any] = {"source_options": {"corrector": "markov"}}


def several(combine: str, rule: str = "match", policy: str = "fixed") -> DecodeGraph:
    """Two sources."""
    graph = DecodeGraph("two", sources=SOURCES).target()
    graph.source("history", node="a").dependency("copy", k=4, node="a_block")
    graph.source("steps", node="b").dependency("ar", k=3, node="b_block")
    return graph.combine(combine).length(policy).verify(rule).wire()


def graph_of(source: str = "history", dependency: str = "copy", rule: str = "match", **options: Any) -> DecodeGraph:
    sampling = Sampling(temperature=options.pop("temperature", 0.0))
    graph = DecodeGraph("mine", sampling=sampling, sources=SOURCES)
    graph.target().source(source, **options.pop("source_options", {})).dependency(dependency, k=4)
    return graph.length(options.pop("policy", "fixed")).verify(rule, **options).wire()


def by_hand() -> DecodeGraph:
    graph = DecodeGraph("mine")
    graph.target("smollm2-135m", dtype="bfloat16")
    graph.source("history", index="suffix")
    graph.dependency("copy", k=12)
    graph.length("match", per_match=3.0)
    graph.verify("match")
    graph.connect("source", "dependency", "target", "verify", "commit")
    graph.connect("source", "length", "dependency", "verify").connect("target", "commit")
    graph.carry("commit", "source").carry("commit", "target").carry("verify", "length")
    return graph


def test_a_graph_by_hand_is_the_graph_of_its_recipe() -> None:
    data = {
        "name": "mine",
        "target": {"dtype": "bfloat16"},
        "draft": {"method": "suffix", "k": 12},
        "length": {"policy": "match", "per_match": 3.0},
    }
    recipe = parse_recipe(data)
    assert by_hand().check() == DecodeGraph.from_recipe(recipe)
    assert by_hand().to_recipe() == recipe
    assert len(inspect.getsource(by_hand).splitlines()) < 15


def samples() -> list[Recipe]:
    """Shipped recipes, and random ones over every method, rule, policy and section."""
    draw = random.Random(5)
    methods = [name for info in discover().values() for name in info.presets()]
    found = [load_recipe(name) for name in shipped_recipes()]
    for number in range(90):
        rule = draw.choice(list(RULE_INFOS))
        data: dict[str, Any] = {
            "name": f"r{number}",
            "description": draw.choice(["", "one line"]),
            "target": {"model": draw.choice(["a/b", "smollm2-135m"]), "dtype": draw.choice(["auto", "float64"])},
            "verify": {"rule": rule, "lossless": not RULE_INFOS[rule].lossy},
            "sampling": {"temperature": draw.choice([0.0, 0.9]), "logit_bias": {3: 0.5}, "stop_strings": ("x",)},
            "runtime": {"batch": draw.randint(1, 5), "context": draw.choice([None, 512])},
        }
        if draw.random() < 0.8:
            data["draft"] = drafted(draw, methods)
            data["length"] = {"policy": draw.choice(list(POLICIES))}
            data["tune"] = draw.choice([{}, {"draft.k": {"choices": (5, 9)}}])
        recipe = parse_recipe(data)
        if fits(recipe):
            found.append(recipe)
    return found


def drafted(draw: random.Random, methods: Sequence[str]) -> dict[str, Any]:
    """One method, or a combination of two or three whose parts may have a k of their own."""
    if draw.random() < 0.5:
        return {"method": draw.choice(methods), "k": draw.randint(0, 40)}
    parts = [{"method": draw.choice(methods), **draw.choice([{}, {"k": 3}])} for _ in range(draw.randint(2, 3))]
    return draw.choice([{"first_of": parts, "k": 7}, {"merge": parts, "k": 7, "nodes": draw.randint(1, 64)}])


def fits(recipe: Recipe) -> bool:
    """Not every rule and policy goes with every draft; the checks have tests of their own."""
    try:
        DecodeGraph.from_recipe(recipe).check()
    except GraphError:
        return False
    return True


def test_samples_cover_what_recipes_can_say() -> None:
    drafts = [recipe.draft for recipe in samples()]
    assert None in drafts
    assert {len(draft.parts) for draft in drafts if draft is not None} >= {1, 2, 3}
    assert {kind for kind in COMBINED for draft in drafts if hasattr(draft, kind)} == set(COMBINED)


@pytest.mark.parametrize("recipe", samples(), ids=lambda recipe: recipe.name)
def test_recipe_to_graph_and_back_loses_nothing(recipe: Recipe) -> None:
    graph = DecodeGraph.from_recipe(recipe)
    assert graph.to_recipe() == recipe
    assert DecodeGraph.from_recipe(graph.to_recipe()) == graph


def test_a_difference_anywhere_makes_graphs_differ() -> None:
    recipe = parse_recipe({"draft": {"method": "ngram"}})
    changes: list[dict[str, Any]] = [
        {"name": "x"},
        {"draft": {"method": "suffix"}},
        {"draft": {"method": "ngram", "k": 3}},
        {"draft": {"method": "ngram", "min_match": 3}},
        {"length": {"policy": "additive"}},
        {"verify": {"rule": "block"}},
        {"sampling": {"temperature": 1.0}},
        {"runtime": {"batch": 2}},
    ]
    for change in changes:
        other = parse_recipe({"draft": {"method": "ngram"}, **change})
        assert DecodeGraph.from_recipe(other) != DecodeGraph.from_recipe(recipe), change


def test_order_and_edges() -> None:
    graph = by_hand().check()
    assert graph.order() == ("source", "length", "dependency", "target", "verify", "commit")
    assert graph.edges("stats") == (Edge("verify", "length", "stats", True),)
    assert {(e.writer, e.reader) for e in graph.edges(carry=True)} == {
        ("commit", "source"),
        ("commit", "target"),
        ("verify", "length"),
    }
    assert graph.node("target").part == "smollm2-135m"
    assert [node.part for node in graph.nodes(Kind.LENGTH)] == ["match"]
    plain = DecodeGraph.from_recipe(parse_recipe({})).check()
    assert plain.order() == ("target", "verify", "commit")
    assert not plain.edges("block")


def test_several_sources_meet_in_a_combine_node() -> None:
    graph = DecodeGraph("both", sources=SOURCES).target()
    graph.source("history", node="copied").source("heads", node="drawn")
    graph.dependency("copy", node="copy").dependency("parallel", node="heads").combine().length().verify()
    graph.connect("copied", "copy", "combine", "target", "verify", "commit").connect(
        "drawn", "heads", "combine", "verify"
    )
    graph.connect("length", "copy").connect("length", "heads").connect("target", "commit")
    graph.carry("verify", "length").carry("commit", "target").carry("commit", "copied").carry("commit", "drawn")
    with pytest.raises(GraphError, match="nothing writes its features"):
        graph.check()
    graph.carry("target", "drawn").check(FACTS)
    assert graph.nodes(Kind.COMBINE)[0].settings.model_dump() == {"policy": "first_of", "k": 8, "nodes": None}


def incomplete(missing: str) -> Callable[[], DecodeGraph]:
    def build() -> DecodeGraph:
        graph = DecodeGraph(sources=SOURCES)
        parts = ("target", "source", "dependency", "length", "verify")
        arguments = {"source": "history", "dependency": "copy"}
        for part in parts:
            if part != missing:
                getattr(graph, part)(*([arguments[part]] if part in arguments else []))
        return graph.wire()

    return build


def crossed(flow: str, *path: str, carry: bool) -> DecodeGraph:
    graph = graph_of()
    return graph.carry(*path, flow=flow) if carry else graph.connect(*path, flow=flow)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("build", "where", "found"),
    [
        (incomplete("target"), "target", "missing"),
        (incomplete("verify"), "verify", "missing"),
        (incomplete("source"), "graph", "0 sources and 1 dependencies"),
        (incomplete("dependency"), "graph", "1 sources and 0 dependencies"),
        (incomplete("length"), "length", "0 length policies"),
        (lambda: graph_of().combine(), "combine", "1 combine nodes for 1 sources"),
        (lambda: DecodeGraph().target().verify(), "target", "nothing writes its"),
        (lambda: crossed("stats", "verify", "length", carry=False), "mine", "a cycle inside a round: "),
        (lambda: crossed("tokens", "commit", "source", carry=False), "mine", "a cycle inside a round: "),
        (lambda: crossed("block", "dependency", "target", carry=True), "dependency -> target", "block carried"),
        (
            lambda: graph_of("history", "parallel"),
            "source -> dependency",
            "parallel needs marginals; history offers tokens",
        ),
        (lambda: graph_of("mute", "parallel"), "source -> dependency", "mute offers nothing"),
        (
            lambda: graph_of("heads", "parallel+corrector"),
            "source -> dependency",
            "parallel+corrector with source heads",
        ),
        (lambda: graph_of("heads", "parallel", policy="match"), "length", "match needs match_lengths"),
        (lambda: graph_of("silent", "parallel", "block"), "verify", "needs the law of the draft"),
        (lambda: graph_of("silent", "parallel", "rejection"), "verify", "needs the law of the draft"),
        (lambda: graph_of("steps", "ar", "block", source_options={"shape": "beam"}), "source shape", "chains only"),
        (
            lambda: graph_of("steps", "ar", policy="threshold", **BEAM),
            "source shape",
            "threshold, which shortens chains",
        ),
        (lambda: graph_of("steps", "ar", policy="confidence", **BEAM), "source shape", "confidence, which shortens"),
        (lambda: graph_of("fixable", "parallel+corrector"), "source corrector", "none with dependency"),
        (lambda: graph_of("fixable", "parallel", **MARKOV), "source corrector", "markov with dependency parallel"),
        (lambda: several("merge", rule="block"), "combine", "a merged tree with rule block"),
        (lambda: several("merge", policy="match"), "length", "a merged tree has no match_lengths"),
        (lambda: several("merge", policy="confidence"), "combine", "a merged tree with policy confidence"),
        (lambda: graph_of(rule="rejection", **SHARED), "source share", "with rule rejection a sampled text"),
        (lambda: graph_of(rule="block", temperature=1.0, **SHARED), "source share", "with rule block a sampled text"),
        (lambda: graph_of(rule="typical", lossless=False, **SHARED), "source share", "with rule typical"),
    ],
)
def test_parts_that_do_not_fit_are_refused(build: Callable[[], DecodeGraph], where: str, found: str) -> None:
    with pytest.raises(GraphError) as caught:
        build().check()
    assert where in caught.value.where
    assert found in caught.value.found
    assert caught.value.expected


@pytest.mark.parametrize(
    "graph",
    [
        graph_of(rule="block", temperature=1.0),
        graph_of(rule="rejection", temperature=1.0),
        graph_of(rule="typical", lossless=False),
        graph_of("silent", "parallel", "match"),
        graph_of("heads", "parallel", "block", temperature=1.0),
        graph_of("careful", "parallel", "block", temperature=1.0),
        graph_of(rule="match", temperature=1.0, **SHARED),
        graph_of("doubtful", "parallel", "match", temperature=1.0),
        graph_of("doubtful", "parallel", "block", temperature=1.0, policy="confidence"),
        graph_of("steps", "ar", "rejection", **BEAM),
        graph_of("steps", "ar", "rejection", source_options={"shape": "sampled"}),
        graph_of("fixable", "parallel+corrector", **MARKOV),
        graph_of("fixable", "parallel"),
        # What the recipe does not say a checkpoint may.
        graph_of("fixable", "parallel+corrector", source_options={"weights": "somewhere"}),
        several("merge", rule="rejection"),
        several("merge", policy="expected_gain"),
        several("first_of", rule="block"),
        several("first_of", policy="match"),
        several("first_of", policy="confidence"),
    ],
)
def test_parts_that_fit_are_not_refused(graph: DecodeGraph) -> None:
    assert graph.check(FACTS) is graph


@pytest.mark.parametrize("rule", ["block", "rejection"])
def test_a_policy_that_drops_tokens_for_what_they_say_is_refused(monkeypatch: pytest.MonkeyPatch, rule: str) -> None:
    """The shipped policies cut after such a token; one from outside may not."""
    rash = replace(POLICIES["confidence"], cuts_before=True)
    monkeypatch.setitem(POLICIES, "confidence", rash)  # type: ignore[misc]
    with pytest.raises(GraphError, match=f"biases rule {rule}") as caught:
        graph_of("doubtful", "parallel", rule, policy="confidence").check()
    assert "lossless: false" in caught.value.hint
    graph_of("doubtful", "parallel", rule, policy="confidence", lossless=False).check()
    graph_of("doubtful", "parallel", "match", policy="confidence").check()
    graph_of("careful", "parallel", rule, policy="confidence").check()


def test_a_read_with_two_writers_is_refused() -> None:
    graph = graph_of()
    graph.source("history", node="other").dependency("copy", node="copy").combine()
    graph.connect("other", "dependency").wire()
    with pytest.raises(GraphError, match=r"tokens written by other and source|block written by"):
        graph.check()


@pytest.mark.parametrize(
    ("build", "found", "hint"),
    [
        (lambda: graph_of(rule="typical"), "true with rule typical", ""),
        (lambda: graph_of(rule="mach"), "'mach'", "did you mean match?"),
        (lambda: graph_of("histry"), "'histry'", "did you mean history?"),
        (lambda: graph_of(policy="fix"), "'fix'", "did you mean fixed?"),
        (lambda: graph_of(dependency="parallell"), "'parallell'", "did you mean parallel?"),
        (lambda: graph_of(source_options={"min_mach": 2}), "unknown key", "did you mean min_match?"),
        (lambda: graph_of(source_options={"min_match": 0}), "0", ""),
        (lambda: graph_of().target(), "a second node", "node="),
        (lambda: graph_of().connect("sauce", "dependency"), "no such node", "did you mean source?"),
        (lambda: graph_of().connect("commit", "source"), "no such flow here", "use carry(...)"),
        (lambda: graph_of().carry("source", "verify"), "nothing that one writes", ""),
    ],
)
def test_mistakes_are_told_where_they_are_made(build: Callable[[], DecodeGraph], found: str, hint: str) -> None:
    with pytest.raises(GraphError) as caught:
        build()
    assert found in caught.value.found
    assert hint in caught.value.hint


def test_facts_of_loaded_models() -> None:
    graph = graph_of("heads", "parallel", source_options={"taps": (-1, 29)}).check(FACTS)
    with pytest.raises(GraphError, match="taps 30 of a target with 30 layers"):
        graph_of("heads", "parallel", source_options={"taps": (1, 30)}).check(FACTS)
    with pytest.raises(GraphError, match="taps -2"):
        graph_of("heads", "parallel", source_options={"taps": (-2,)}).check(FACTS)
    graph.check(FACTS, {"source": DraftFacts(49152, hidden_size=576)})
    graph.check(FACTS, {"source": DraftFacts(32000, maps_to_target=True)})
    for facts, found in (
        (DraftFacts(32000), "a draft vocabulary of 32000"),
        (DraftFacts(50000, maps_to_target=True), "a draft vocabulary of 50000"),
        (DraftFacts(49152, hidden_size=960), "features of width 960"),
    ):
        with pytest.raises(GraphError, match=found):
            graph.check(FACTS, {"source": facts})
