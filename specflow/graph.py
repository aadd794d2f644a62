"""The decode graph: what one round of decoding does, as typed parts and typed edges. No torch.

    g = DecodeGraph("mine")
    g.target("smollm2-135m", dtype="bfloat16")
    g.source("history", index="suffix")
    g.dependency("copy", k=12)
    g.length("match", per_match=2.0)
    g.verify("match")
    g.wire()                      # or edge by edge: g.connect("source", "dependency", "target", ...); g.carry(...)
    recipe = g.check().to_recipe()

Edges inside a round form an acyclic graph; what a round leaves for the next one flows along carry edges.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ValidationError

from specflow.draft.dependency import DEPENDENCIES
from specflow.draft.registry import SourceInfo, discover
from specflow.errors import GraphError
from specflow.graph_checks import DraftFacts, TargetFacts, check_graph
from specflow.graph_parts import Combine, Commit, Dependency, Edge, Flow, Kind, Node, links
from specflow.recipe import Recipe, explain, nearest, parse_recipe
from specflow.recipe_draft import COMBINED, CombinedSection, DraftSection, draft_sections, source_sections
from specflow.recipe_sections import RuntimeSection, TargetSection, TuneRange, length_sections, verify_sections
from specflow.types import Sampling

if TYPE_CHECKING:
    import networkx

__all__ = ["DecodeGraph", "DraftFacts", "Edge", "Kind", "Node", "TargetFacts"]

RANK = {kind: rank for rank, kind in enumerate(Kind)}


class DecodeGraph:
    """Parts of a round and what flows between them; a recipe in another form.

    Args:
        name: Short name.
        description: One line.
        sampling: Defaults of the requests.
        runtime: How requests share the machine.
        tune: Dotted key -> values a tuner may try.
        sources: Known sources; None means all installed ones.
    """

    def __init__(
        self,
        name: str = "",
        description: str = "",
        sampling: Sampling | None = None,
        runtime: RuntimeSection | None = None,
        tune: Mapping[str, TuneRange] | None = None,
        sources: Mapping[str, SourceInfo] | None = None,
    ) -> None:
        import networkx

        self.name = name
        self.description = description
        self.sampling = sampling or Sampling()
        self.runtime = runtime or RuntimeSection()
        self.tune = dict(tune or {})
        self.sources: Mapping[str, SourceInfo] = discover() if sources is None else sources
        self._graph: networkx.MultiDiGraph[str] = networkx.MultiDiGraph()

    # Parts

    def target(self, model: str = "smollm2-135m", **options: Any) -> DecodeGraph:
        """Add the target and the commit step that belongs to it; options are those of a recipe's target section."""
        self._add("target", Kind.TARGET, model, self._settings("target", TargetSection, {"model": model, **options}))
        return self._add("commit", Kind.COMMIT, "commit", Commit())

    def source(self, source: str, node: str = "source", **options: Any) -> DecodeGraph:
        """Add a source of drafts, with its own options; `node` tells several apart."""
        info = self._known(node, source, self.sources)
        return self._add(node, Kind.SOURCE, source, self._settings(node, info.config, options))

    def dependency(self, dependency: str, k: int | None = None, node: str = "dependency") -> DecodeGraph:
        """Add how the positions of a block depend on each other, and the longest block."""
        self._known(node, dependency, DEPENDENCIES)
        options = {} if k is None else {"k": k}
        return self._add(node, Kind.DEPENDENCY, dependency, self._settings(node, Dependency, options))

    def combine(self, policy: str = "first_of", k: int | None = None, nodes: int | None = None) -> DecodeGraph:
        """Add what makes one block out of the drafts that are there, in the order of their dependencies' names.

        Args:
            policy: first_of or merge.
            k: Longest block; None takes the longest of the drafts.
            nodes: Most nodes of a merged tree; None takes the default.
        """
        self._known("combine", policy, dict.fromkeys(COMBINED))
        drafts = [node.settings for node in self.nodes(Kind.DEPENDENCY)]
        longest = max((draft.k for draft in drafts if isinstance(draft, Dependency)), default=0)
        options = {"policy": policy, "k": longest if k is None else k, "nodes": nodes}
        return self._add("combine", Kind.COMBINE, policy, self._settings("combine", Combine, options))

    def length(self, policy: str = "fixed", **options: Any) -> DecodeGraph:
        """Add the length policy."""
        section = self._known("length", policy, length_sections())
        return self._add("length", Kind.LENGTH, policy, self._settings("length", section, options))

    def verify(self, rule: str = "match", **options: Any) -> DecodeGraph:
        """Add the verification rule."""
        section = self._known("verify", rule, verify_sections())
        return self._add("verify", Kind.VERIFY, rule, self._settings("verify", section, options))

    # Edges

    def connect(self, *path: str, flow: Flow | None = None) -> DecodeGraph:
        """Add the edges inside a round along a path of nodes: all flows that fit, or just one."""
        return self._connect(path, flow, carry=False)

    def carry(self, *path: str, flow: Flow | None = None) -> DecodeGraph:
        """Add edges from one round to the next along a path of nodes."""
        return self._connect(path, flow, carry=True)

    def wire(self) -> DecodeGraph:
        """Add every edge that fits between the parts. Several sources go with as many dependencies, by their names."""
        for writer in self.nodes():
            for reader in self.nodes():
                if self._through_combine(writer, reader) or self._of_another(writer, reader):
                    continue
                for flow, carry in links(writer, reader, self.sources):
                    self._graph.add_edge(writer.name, reader.name, key=flow, carry=carry)
        return self

    # Questions

    def node(self, name: str) -> Node:
        """The node of this name."""
        if name not in self._graph:
            raise GraphError(
                self.where(name), "no such node", f"one of: {', '.join(self._graph)}", nearest(name, list(self._graph))
            )
        node: Node = self._graph.nodes[name]["node"]
        return node

    def nodes(self, kind: Kind | None = None) -> tuple[Node, ...]:
        """All nodes, or those of one kind, in the order of a round where the kinds decide it."""
        found: Iterator[Node] = (data["node"] for _, data in self._graph.nodes(data=True))
        return tuple(sorted((n for n in found if kind in (None, n.kind)), key=lambda n: (RANK[n.kind], n.name)))

    def edges(self, flow: Flow | None = None, carry: bool | None = None) -> tuple[Edge, ...]:
        """All edges, or those of one flow, or only those inside a round or between rounds."""
        found = (
            Edge(writer, reader, key, data["carry"])
            for writer, reader, key, data in self._graph.edges(keys=True, data=True)
        )
        return tuple(sorted(e for e in found if flow in (None, e.flow) and carry in (None, e.carry)))

    def order(self) -> tuple[str, ...]:
        """Nodes in the order a round runs them.

        Raises:
            GraphError: The edges inside a round form a cycle; it is spelled out.
        """
        import networkx

        inside = networkx.DiGraph()
        inside.add_nodes_from(node.name for node in self.nodes())
        inside.add_edges_from((edge.writer, edge.reader) for edge in self.edges(carry=False))
        try:
            key = {node.name: f"{RANK[node.kind]}{node.name}" for node in self.nodes()}
            return tuple(networkx.lexicographical_topological_sort(inside, key=key.__getitem__))
        except networkx.NetworkXUnfeasible:
            cycle = [writer for writer, _ in networkx.find_cycle(inside)]
            path = " -> ".join([*cycle, cycle[0]])
            raise GraphError(
                self.where(), f"a cycle inside a round: {path}", "no cycle", "carry(...) what the next round reads"
            ) from None

    def check(self, target: TargetFacts | None = None, drafts: Mapping[str, DraftFacts] | None = None) -> DecodeGraph:
        """Refuse a graph whose parts do not fit together.

        Args:
            target: Facts of the loaded target; without them layers and vocabularies are not checked.
            drafts: Facts of loaded draft models, by the name of their source node.

        Raises:
            GraphError: Where, what was found, what was expected, what to do.
        """
        check_graph(self, target, drafts or {})
        return self

    def where(self, part: str = "") -> str:
        """Place of a part in errors."""
        title = f"graph {self.name}" if self.name else "graph"
        return f"{title}: {part}" if part else title

    def __eq__(self, other: object) -> bool:
        return isinstance(other, DecodeGraph) and self._parts() == other._parts()

    def __hash__(self) -> int:
        return hash((self.name, tuple(node.name for node in self.nodes()), self.edges()))

    # Recipes

    @classmethod
    def from_recipe(cls, recipe: Recipe, sources: Mapping[str, SourceInfo] | None = None) -> DecodeGraph:
        """The graph of a recipe, wired but not checked."""
        rest = (recipe.name, recipe.description, recipe.sampling, recipe.runtime, recipe.tune)
        graph = cls(*rest, sources=sources)
        graph._add("target", Kind.TARGET, recipe.target.model, recipe.target)
        graph._add("commit", Kind.COMMIT, "commit", Commit())
        if recipe.draft is not None:
            graph._add_draft(recipe.draft)
            graph._add("length", Kind.LENGTH, recipe.length.policy, recipe.length)
        graph._add("verify", Kind.VERIFY, recipe.verify.rule, recipe.verify)
        return graph.wire()

    def to_recipe(self) -> Recipe:
        """The recipe of this graph, after the checks; `from_recipe` gives an equal graph back."""
        self.check()
        data: dict[str, Any] = {
            "name": self.name,
            "description": self.description,
            "target": self.node("target").settings,
            "verify": self.node("verify").settings,
            "sampling": self.sampling,
            "runtime": self.runtime,
            "tune": self.tune,
        }
        if self.nodes(Kind.SOURCE):
            data["draft"] = self._draft_section()
            data["length"] = self.node("length").settings
        return parse_recipe(data, self.where())

    def source_of(self, dependency: Node) -> Node:
        """The source whose drafts this dependency shapes."""
        writers = (self.node(edge.writer) for edge in self.edges(carry=False) if edge.reader == dependency.name)
        return next(node for node in writers if node.kind is Kind.SOURCE)

    def _add_draft(self, draft: DraftSection) -> None:
        """Nodes of a recipe's draft: numbered where there are several."""
        for number, part in enumerate(draft.parts, start=1):
            suffix = "" if len(draft.parts) == 1 else f"_{number}"
            self._add(f"source{suffix}", Kind.SOURCE, part.source, part.options)
            self._add(f"dependency{suffix}", Kind.DEPENDENCY, part.dependency, Dependency(k=part.k))
        if isinstance(draft, CombinedSection):
            options = {"policy": draft.policy, **draft.model_dump(exclude={draft.policy})}
            self._add("combine", Kind.COMBINE, draft.policy, self._settings("combine", Combine, options))

    def _draft_section(self) -> DraftSection:
        """The draft of this graph as a recipe writes it."""
        parts = []
        for dependency in self.nodes(Kind.DEPENDENCY):
            source = self.source_of(dependency)
            axes = {"source": source.part, "dependency": dependency.part, **dependency.settings.model_dump()}
            section: type[DraftSection] = self._known(source.name, source.part, source_sections())
            parts.append(section.model_validate({**axes, **source.settings.model_dump(exclude_unset=True)}))
        if not self.nodes(Kind.COMBINE):
            return parts[0]
        settings = self.node("combine").settings.model_dump(exclude_none=True)
        policy = settings.pop("policy")
        return draft_sections()[policy].model_validate({policy: tuple(parts), **settings})

    def _parts(self) -> tuple[Any, ...]:
        return self.name, self.description, self.sampling, self.runtime, self.tune, self.nodes(), self.edges()

    def _add(self, name: str, kind: Kind, part: str, settings: BaseModel) -> DecodeGraph:
        if name in self._graph:
            raise GraphError(self.where(name), "a second node of this name", "one", "name it with node=...")
        self._graph.add_node(name, node=Node(name, kind, part, settings))
        return self

    def _settings(self, where: str, model: type[BaseModel], options: Mapping[str, Any]) -> Any:
        try:
            return model.model_validate(dict(options))
        except ValidationError as error:
            first = error.errors()[0]
            problem = explain(first, first["loc"], model, list(model.model_fields))
            place = " ".join([where, *map(str, problem.path)])
            raise GraphError(self.where(place), problem.found, problem.expected, problem.hint) from None

    def _known(self, where: str, name: str, known: Mapping[str, Any]) -> Any:
        if name not in known:
            raise GraphError(self.where(where), f"{name!r}", f"one of: {', '.join(known)}", nearest(name, known))
        return known[name]

    def _through_combine(self, writer: Node, reader: Node) -> bool:
        """Whether a draft reaches this reader by way of a combine node, not directly."""
        drafts = writer.kind is Kind.DEPENDENCY and reader.kind in (Kind.TARGET, Kind.VERIFY)
        return drafts and bool(self.nodes(Kind.COMBINE))

    def _of_another(self, writer: Node, reader: Node) -> bool:
        """Whether a dependency has another source: the first goes with the first by name, and so on."""
        if (writer.kind, reader.kind) != (Kind.SOURCE, Kind.DEPENDENCY):
            return False
        sources, dependencies = self.nodes(Kind.SOURCE), self.nodes(Kind.DEPENDENCY)
        return len(sources) == len(dependencies) and sources.index(writer) != dependencies.index(reader)

    def _connect(self, path: tuple[str, ...], flow: Flow | None, carry: bool) -> DecodeGraph:
        for writer, reader in pairwise(path):
            fitting = links(self.node(writer), self.node(reader), self.sources)
            # A flow that is named may be put on the wrong side of the round; the checks then say why it cannot be.
            chosen = [found for found, natural in fitting if found == flow or (flow is None and natural == carry)]
            if not chosen:
                raise self._misfit(writer, reader, carry, [f"{found}" for found, _ in fitting])
            for found in chosen:
                self._graph.add_edge(writer, reader, key=found, carry=carry)
        return self

    def _misfit(self, writer: str, reader: str, carry: bool, fitting: list[str]) -> GraphError:
        if not fitting:
            return GraphError(
                self.where(f"{writer} -> {reader}"), "nothing that one writes and the other reads", "a flow"
            )
        verb = "connect" if carry else "carry"
        return GraphError(
            self.where(f"{writer} -> {reader}"), "no such flow here", ", ".join(fitting), f"use {verb}(...)"
        )
