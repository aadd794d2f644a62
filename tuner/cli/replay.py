"""`specflow replay`: how a traced workload would go with another length, policy, rule or concurrency."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from specflow.cost import CostModel
    from specflow.recipe import Recipe
    from tuner.recorded import Trace
    from tuner.replay_types import ReplayConfig, ReplayResult

__all__ = ["replay"]

ALIASES = {"length.k": "draft.k"}
"""What the length of a block is called where one thinks of length policies."""
ORDER = "draft.first_of"
"""Takes the names of a cascade's parts in another order, such as suffix, dspark."""
OF_DRAFTS = ("draft", "verify", "length")
LEAST_WIDTH = 100


def replay(
    trace: Annotated[Path, typer.Argument(help="directory that `specflow trace` wrote")],
    recipe: Annotated[list[str] | None, typer.Option(help="only these of its recipes; may be repeated")] = None,
    overrides: Annotated[
        list[str] | None,
        typer.Option(
            "--set", help="key.key=value of draft.k, length, verify, runtime.batch; draft.first_of=a,b: order"
        ),
    ] = None,
    profile: Annotated[
        list[str] | None, typer.Option(help="costs: FILE of `specflow profile -o`, or RECIPE=FILE; may be repeated")
    ] = None,
    context: Annotated[str, typer.Option(help="count only rounds within these committed tokens, such as 0,512")] = "",
    category: Annotated[list[str] | None, typer.Option(help="only prompts of this category; may be repeated")] = None,
    draws: Annotated[int, typer.Option(min=1, help="replays where acceptance is a matter of chance")] = 8,
    seed: Annotated[int, typer.Option(min=0, help="of that chance")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="one JSON object a recipe on stdout")] = False,
) -> None:
    """Replay a trace: rounds, acceptance and, with costs, seconds; exact where the text follows from the seed."""
    from tuner.recorded import load_trace
    from tuner.replay import Replayer
    from tuner.replay_types import ReplayConfig

    loaded = load_trace(trace)
    names = _chosen(loaded, recipe or ())
    costs = _costs(profile or (), names)
    limits = {"contexts": _range(context), "categories": tuple(category or ()), "draws": draws, "seed": seed}
    results: dict[str, ReplayResult] = {}
    settings, order = _split(overrides or ())
    for name in names:
        made = _recipe(trace, name, settings)
        config = ReplayConfig.of(made, loaded.info, **limits)
        config = config if order is None else _in_order(config, made, order)
        results[name] = Replayer(loaded, costs.get(name)).run(config)
    if as_json:
        for name, result in results.items():
            typer.echo(json.dumps(_data(name, result), ensure_ascii=False))
    else:
        _show(loaded, results)


def _chosen(trace: Trace, wanted: Sequence[str]) -> list[str]:
    from specflow.errors import DataError

    known = list(trace.info.recipes)
    if unknown := [name for name in wanted if name not in known]:
        raise DataError("--recipe", f"'{unknown[0]}', which the trace does not have", f"one of: {', '.join(known)}")
    if not known:
        raise DataError("TRACE", "no drafter in it", "a trace of at least one recipe that drafts")
    return list(wanted) or known


def _recipe(path: Path, name: str, overrides: Sequence[str]) -> Recipe:
    """A recipe as it was traced, with settings."""
    from specflow.recipe import load_recipe
    from tuner.trace_store import recipe_file

    settings = []
    for setting in overrides:
        key, equals, value = setting.partition("=")
        settings.append(f"{ALIASES.get(key, key)}{equals}{value}")
    return load_recipe(recipe_file(path, name), settings)


def _split(overrides: Sequence[str]) -> tuple[list[str], str | None]:
    """Settings of recipes, and the order of a cascade if one of them is that."""
    orders = [setting.partition("=")[2] for setting in overrides if setting.startswith(f"{ORDER}=")]
    rest = [setting for setting in overrides if not setting.startswith(f"{ORDER}=")]
    return rest, orders[-1] if orders else None


def _in_order(config: ReplayConfig, recipe: Recipe, order: str) -> ReplayConfig:
    """The drafters of a cascade in another order, by the names of its parts."""
    from dataclasses import replace

    from specflow.errors import DataError
    from specflow.recipe_draft import FirstOfSection, part_names

    names = part_names(recipe.draft) if isinstance(recipe.draft, FirstOfSection) else ()
    wanted = [name.strip() for name in order.split(",")]
    if sorted(wanted) != sorted(names):
        expected = f"each of these once, between commas: {', '.join(names)}" if names else "a cascade (first_of)"
        raise DataError(f"--set {ORDER} of {recipe.name}", repr(order), expected)
    places = [names.index(name) for name in wanted]
    part_k = tuple(config.part_k[place] for place in places) if config.part_k else ()
    return replace(config, drafters=tuple(config.drafters[place] for place in places), part_k=part_k)


def _range(text: str) -> tuple[int, int] | None:
    if not text:
        return None
    try:
        low, high = (int(part) for part in text.split(","))
    except ValueError as error:
        raise typer.BadParameter(f"{text!r} is no pair of whole numbers", param_hint="--context") from error
    if not 0 <= low < high:
        raise typer.BadParameter(f"{text!r} is no range", param_hint="--context")
    return low, high


def _costs(profiles: Sequence[str], names: Sequence[str]) -> dict[str, CostModel]:
    """The cost model of each recipe that has one."""
    from specflow.cost import load_profile
    from specflow.errors import DataError

    found: dict[str, CostModel] = {}
    for text in profiles:
        name, equals, file = text.partition("=")
        if equals and name in names:
            found[name] = load_profile(Path(file))
        elif len(names) == 1:
            found[names[0]] = load_profile(Path(text))
        else:
            expected = f"RECIPE=FILE with one of: {', '.join(names)}"
            raise DataError("--profile", f"'{text}' for {len(names)} recipes", expected, "or choose one with --recipe")
    return found


def _data(name: str, result: ReplayResult) -> dict[str, Any]:
    from specflow.measure import metrics

    seconds = {each: getattr(result, each) for each in ("seconds", "draft_s", "target_s", "other_s")}
    rates = {each: getattr(result, each) for each in ("tokens_per_s", "p50_latency_s", "p95_latency_s")}
    priced = {**seconds, **rates} if result.seconds else {}
    return {"recipe": name, "config": asdict(result.config), **priced, **metrics(result.counts)}


def _show(trace: Trace, results: dict[str, ReplayResult]) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("recipe")
    for name in ("k", "rounds", "drafted", "accepted", "acceptance\nlength", "tokens/s", "p50 s", "p95 s"):
        table.add_column(name, justify="right")
    for name, result in results.items():
        counts = (result.config.k, result.rounds, result.drafted, result.accepted)
        rates = (
            result.tokens_per_s,
            *((result.p50_latency_s, result.p95_latency_s) if result.seconds else (None,) * 2),
        )
        table.add_row(name, *map(str, counts), *(_number(each) for each in (result.acceptance_length, *rates)))
    Console(width=max(Console().width, LEAST_WIDTH)).print(table)
    if not any(result.seconds for result in results.values()):
        typer.echo("no seconds without costs: --profile FILE, from `specflow profile RECIPE -o FILE`", err=True)
    if not trace.info.greedy:
        typer.echo("sampled: with rules rejection and block, figures are sums over all draws", err=True)


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"
