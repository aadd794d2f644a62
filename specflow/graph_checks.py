"""What must hold before a decode graph may run. Every refusal says where, what was found, expected, and what to do."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from specflow.draft.dependency import DEPENDENCIES
from specflow.errors import GraphError
from specflow.graph_parts import Kind, Node, links, reads
from specflow.length import POLICIES
from specflow.recipe_sections import VerifySection
from specflow.rules import RULE_INFOS

if TYPE_CHECKING:
    from specflow.graph import DecodeGraph

__all__ = ["DraftFacts", "TargetFacts", "check_graph"]


@dataclass(frozen=True, slots=True)
class TargetFacts:
    """What is known of a loaded target."""

    num_layers: int  # L
    vocab_size: int  # V
    hidden_size: int | None = None  # H


@dataclass(frozen=True, slots=True)
class DraftFacts:
    """What is known of a loaded draft model."""

    vocab_size: int  # Vd
    maps_to_target: bool = False  # it carries a map of its own ids to the target's
    hidden_size: int | None = None  # width of the target features it was made for


def check_graph(graph: DecodeGraph, target: TargetFacts | None, drafts: Mapping[str, DraftFacts]) -> None:
    """Run all checks in the order in which their errors help most.

    Raises:
        GraphError: The first thing that does not fit.
    """
    _check_parts(graph)
    _check_offers(graph)
    _check_edges(graph)
    graph.order()
    _check_reads(graph)
    _check_correctors(graph)
    _check_shapes(graph)
    _check_law(graph)
    _check_truncation(graph)
    _check_memory(graph)
    if target is not None:
        _check_taps(graph, target)
        for name, facts in drafts.items():
            _check_model(graph, graph.node(name), target, facts)


def _check_parts(graph: DecodeGraph) -> None:
    """One target and one rule; a draft has a source, a dependency and a length policy; several need a combine node."""
    count = {kind: len(graph.nodes(kind)) for kind in Kind}
    for kind, method in ((Kind.TARGET, "target"), (Kind.VERIFY, "verify")):
        if not count[kind]:
            raise GraphError(graph.where(kind.value), "missing", "one node of this kind", f"add it with {method}(...)")
    sources, dependencies = count[Kind.SOURCE], count[Kind.DEPENDENCY]
    if sources != dependencies:
        found = f"{sources} sources and {dependencies} dependencies"
        raise GraphError(graph.where(), found, "one dependency for each source", "add it with dependency(...)")
    if count[Kind.LENGTH] != min(sources, 1):
        found = f"{count[Kind.LENGTH]} length policies for {sources} sources"
        raise GraphError(
            graph.where("length"), found, "one where there is a draft, else none", "add it with length(...)"
        )
    if count[Kind.COMBINE] != (sources > 1):
        found = f"{count[Kind.COMBINE]} combine nodes for {sources} sources"
        raise GraphError(graph.where("combine"), found, "one where there are several sources, else none")


def _check_edges(graph: DecodeGraph) -> None:
    """An edge stays on its side of the round: a block is verified in the round that drafted it."""
    for edge in graph.edges(carry=True):
        natural = dict(links(graph.node(edge.writer), graph.node(edge.reader), graph.sources))
        if not natural[edge.flow]:
            where = graph.where(f"{edge.writer} -> {edge.reader}")
            raise GraphError(where, f"{edge.flow} carried to the next round", "within the round", "use connect(...)")


def _check_reads(graph: DecodeGraph) -> None:
    """Each read has exactly one writer; a combine node reads several blocks, a policy what several sources offer."""
    drafting = bool(graph.nodes(Kind.SOURCE))
    for node in graph.nodes():
        for flow in reads(node, graph.sources, drafting):
            writers = [edge.writer for edge in graph.edges(flow) if edge.reader == node.name]
            many = node.kind is Kind.COMBINE or (node.kind is Kind.LENGTH and flow != "stats")
            if not writers or (len(writers) > 1 and not many):
                found = f"{flow} written by {' and '.join(writers)}" if writers else f"nothing writes its {flow}"
                hint = (
                    "add the edge with connect(...), carry(...) or wire()" if not writers else "leave one of them out"
                )
                raise GraphError(graph.where(node.name), found, f"one writer of {flow}", hint)


def _check_offers(graph: DecodeGraph) -> None:
    """A source offers what the parts it is connected to need."""
    for writer, reader in _pairs(graph, Kind.SOURCE, Kind.DEPENDENCY):
        info = graph.sources[writer.part]
        need = DEPENDENCIES[reader.part].reads
        where = graph.where(f"{writer.name} -> {reader.name}")
        if need not in info.offers:
            found = f"{reader.part} needs {need}; {writer.part} offers {', '.join(info.offers) or 'nothing'}"
            raise GraphError(where, found, f"a source that offers {need}", f"use {' or '.join(info.dependency)}")
        if reader.part not in info.dependency:
            found = f"{reader.part} with source {writer.part}"
            raise GraphError(where, found, f"one of: {', '.join(info.dependency)}")
    for length in graph.nodes(Kind.LENGTH):
        sources = graph.nodes(Kind.SOURCE)
        missing = sorted(
            POLICIES[length.part].needs - {offer for each in sources for offer in graph.sources[each.part].offers}
        )
        if missing:
            names = " and ".join(source.part for source in sources)
            found = f"policy {length.part} needs {', '.join(missing)}, which {names} does not offer"
            free = [name for name, policy in POLICIES.items() if not policy.needs]
            raise GraphError(graph.where("length"), found, f"one of: {', '.join(free)}")


def _pairs(graph: DecodeGraph, writer: Kind, reader: Kind) -> Iterator[tuple[Node, Node]]:
    """Connected nodes of two kinds."""
    joined = sorted({(edge.writer, edge.reader) for edge in graph.edges()})
    for one, other in ((graph.node(one), graph.node(other)) for one, other in joined):
        if (one.kind, other.kind) == (writer, reader):
            yield one, other


def _rule(graph: DecodeGraph) -> VerifySection:
    settings = graph.nodes(Kind.VERIFY)[0].settings
    assert isinstance(settings, VerifySection)
    return settings


def _merges(graph: DecodeGraph) -> bool:
    return any(node.part == "merge" for node in graph.nodes(Kind.COMBINE))


def _check_correctors(graph: DecodeGraph) -> None:
    """A dependency that corrects needs a corrector, and one that does not must not have any.

    What a checkpoint may still say is left to the loader.
    """
    for source, dependency in _pairs(graph, Kind.SOURCE, Kind.DEPENDENCY):
        settings, corrects = source.settings, DEPENDENCIES[dependency.part].corrects
        untold = getattr(settings, "weights", None) is not None and "corrector" not in settings.model_fields_set
        corrector = getattr(settings, "corrector", None)
        if "corrector" not in type(settings).model_fields or untold or corrects == (corrector is not None):
            continue
        where = graph.where(f"{source.name} corrector")
        if corrects:
            found, kinds = f"none with dependency {dependency.part}", "a corrector"
            raise GraphError(where, found, kinds, "set corrector: markov, or dependency: parallel")
        found = f"{corrector} with dependency {dependency.part}, which corrects nothing"
        raise GraphError(where, found, "none", "set dependency: parallel+corrector, or corrector: null")


def _check_shapes(graph: DecodeGraph) -> None:
    """Rules and policies made for chains get chains; a tree fits its depth and its rule."""
    rule = _rule(graph)
    for node in graph.nodes(Kind.SOURCE):
        if node.shape == "chain":
            continue
        _check_tree_rule(graph, graph.where(f"{node.name} shape"), f"shape {node.shape}", "shape: chain")
        if node.shape == "sampled" and rule.info.needs_law and not rule.info.without_replacement and rule.lossless:
            found = f"siblings sampled without replacement with rule {rule.rule}"
            raise GraphError(graph.where(f"{node.name} shape"), found, "a rule that knows of it", "use rule rejection")
    if _merges(graph):
        _check_tree_rule(graph, graph.where("combine"), "a merged tree", "first_of in place of merge")
        length = graph.nodes(Kind.LENGTH)[0].part
        if needs := sorted(POLICIES[length].needs):
            found = f"a merged tree has no {', '.join(needs)}, which policy {length} needs"
            free = [name for name, policy in POLICIES.items() if not policy.needs]
            raise GraphError(graph.where("length"), found, f"one of: {', '.join(free)}")


def _check_tree_rule(graph: DecodeGraph, where: str, tree: str, chains: str) -> None:
    rule, length = _rule(graph), graph.nodes(Kind.LENGTH)[0].part
    if not rule.info.trees:
        trees = [name for name, info in RULE_INFOS.items() if info.trees]
        found = f"{tree} with rule {rule.rule}, which takes chains only"
        raise GraphError(where, found, f"one of: {', '.join(trees)}", f"use rule match, or {chains}")
    if POLICIES[length].chains:
        others = [name for name, policy in POLICIES.items() if not policy.chains]
        found = f"{tree} with policy {length}, which shortens chains only"
        raise GraphError(where, found, f"one of: {', '.join(others)}", f"use policy fixed, or {chains}")


def _check_law(graph: DecodeGraph) -> None:
    """A rule that weighs p against q needs drafts that say their q: sampled probabilities, or a point mass."""
    rule = _rule(graph)
    for node in graph.nodes(Kind.SOURCE):
        if rule.info.needs_law and graph.sources[node.part].law == "unknown":
            found = f"rule {rule.rule} needs the law of the draft, which {node.part} does not know"
            raise GraphError(graph.where("verify"), found, "a source that knows its law", "use rule match")


def _check_truncation(graph: DecodeGraph) -> None:
    """A policy that drops a token for what that sampled token itself says biases the text (methods 0.2).

    The match rule is immune: its tokens are the target's own draws whatever is submitted. So is a point mass, whose
    token, and so its confidence, follows from the context. The recipe's temperature does not matter: requests may
    bring their own.
    """
    rule = _rule(graph)
    if not (rule.info.needs_law and rule.lossless) or _merges(graph):
        return
    for length in graph.nodes(Kind.LENGTH):
        for node in graph.nodes(Kind.SOURCE):
            info = graph.sources[node.part]
            if POLICIES[length.part].cuts_before and info.confidence_from == "self" and info.law == "sampled":
                found = (
                    f"{length.part} drops tokens of {node.part} by their own confidence, which biases rule {rule.rule}"
                )
                expected = "a policy that cuts after such a token, or a confidence from the context or the prefix"
                raise GraphError(graph.where(node.name), found, expected, "use rule match, or lossless: false")


def _check_memory(graph: DecodeGraph) -> None:
    """A source that remembers other requests needs a rule whose text does not depend on what was drafted.

    Under any other rule the same seed would give another text after other requests. The recipe's temperature does not
    matter: requests may bring their own.
    """
    rule = _rule(graph)
    for node in graph.nodes(Kind.SOURCE):
        option = graph.sources[node.part].remembers
        if option is not None and getattr(node.settings, option) and not rule.info.same_text:
            found = f"drafts depend on earlier requests, and with rule {rule.rule} a sampled text depends on its drafts"
            expected = "the same text for the same seed"
            raise GraphError(
                graph.where(f"{node.name} {option}"), found, expected, f"use rule match, or {option}: false"
            )


def _check_taps(graph: DecodeGraph, target: TargetFacts) -> None:
    """Every tapped layer exists in the target; -1 is the embedding output."""
    for node in graph.nodes(Kind.SOURCE):
        wrong = [tap for tap in node.taps if not -1 <= tap < target.num_layers]
        if wrong:
            found = f"taps {', '.join(map(str, wrong))} of a target with {target.num_layers} layers"
            raise GraphError(graph.where(node.name), found, f"layers -1 to {target.num_layers - 1}")


def _check_model(graph: DecodeGraph, node: Node, target: TargetFacts, draft: DraftFacts) -> None:
    """The draft speaks the target's vocabulary, or maps to it, and takes features of the target's width."""
    fits = draft.vocab_size <= target.vocab_size if draft.maps_to_target else draft.vocab_size == target.vocab_size
    if not fits:
        found = f"a draft vocabulary of {draft.vocab_size}, the target's has {target.vocab_size}"
        expected = "no more than the target's" if draft.maps_to_target else "the same, or a map to the target's"
        raise GraphError(graph.where(node.name), found, expected, "use a draft made for this target")
    if None not in (draft.hidden_size, target.hidden_size) and draft.hidden_size != target.hidden_size:
        found = f"features of width {draft.hidden_size}, the target's are {target.hidden_size} wide"
        raise GraphError(graph.where(node.name), found, "the same width", "use a draft made for this target")
