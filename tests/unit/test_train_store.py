"""Target features, from passes and from disk: equal, resumable, and never those of something else."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from tiny import VOCAB
from toy_training import toy_target

from specflow.build import LoadedTarget
from specflow.draft.base import Needs
from specflow.errors import DataError, ModelError
from specflow.train.capture import KeptFeatures, OnlineFeatures, names_of, pass_groups, united
from specflow.train.sequences import Text
from specflow.train.store import FeatureStore, StoreFacts

NEEDS = Needs(taps=(0, 1), hidden_pre=True)


@pytest.fixture(scope="module")
def loaded() -> LoadedTarget:
    return toy_target()


@pytest.fixture(scope="module")
def texts() -> list[Text]:
    generator = torch.Generator().manual_seed(0)
    lengths = (9, 4, 30, 17, 5)
    return [Text(f"t/{i}", torch.randint(0, VOCAB, (n,), generator=generator), 2) for i, n in enumerate(lengths)]


def filled(path: Path, loaded: LoadedTarget, texts: list[Text], needs: Needs = NEEDS) -> FeatureStore:
    store = FeatureStore(path, StoreFacts.of(loaded), needs)
    assert sum(store.add(store.missing(texts), OnlineFeatures(loaded.target, store.needs))) == sum(map(len, texts))
    return store


def test_features_are_those_of_each_text_alone(loaded: LoadedTarget, texts: list[Text]) -> None:
    together = OnlineFeatures(loaded.target, NEEDS).read(texts)
    for row, text in enumerate(texts):
        cache = loaded.target.new_cache(1, len(text))
        positions = torch.arange(len(text)).unsqueeze(0)
        out = loaded.target.forward(text.tokens.unsqueeze(0), positions, cache, taps=(0, 1))
        pairs = [(together.taps[0], out.taps[0]), (together.taps[1], out.taps[1])]
        pairs += [(together.hidden_pre, out.hidden_pre), (together.hidden_post, out.hidden_post)]  # type: ignore[list-item]
        assert all(torch.allclose(mine[row, : len(text)], theirs[0], atol=1e-4) for mine, theirs in pairs)


def test_long_texts_take_several_passes(loaded: LoadedTarget, monkeypatch: pytest.MonkeyPatch) -> None:
    text = Text("long", torch.arange(50) % VOCAB, 2)
    whole = OnlineFeatures(loaded.target, NEEDS).read([text])
    monkeypatch.setattr("specflow.train.capture._POSITIONS", 16)
    parts = OnlineFeatures(loaded.target, NEEDS).read([text])
    assert torch.allclose(whole.taps[1], parts.taps[1], atol=1e-4)
    assert [len(group) for group in pass_groups([text, text])] == [1, 1]


def test_features_can_take_part_in_a_graph(loaded: LoadedTarget, texts: list[Text]) -> None:
    features = OnlineFeatures(loaded.target, NEEDS).read(texts)
    weight = torch.ones(32, requires_grad=True)
    (features.taps[0] * weight).sum().backward()
    assert weight.grad is not None


def test_kept_features_are_made_once(loaded: LoadedTarget, texts: list[Text]) -> None:
    online = OnlineFeatures(loaded.target, NEEDS)
    kept = KeptFeatures(online)
    first = kept.read(texts)
    online._target = None  # type: ignore[assignment]
    assert torch.equal(kept.read(texts).taps[1], first.taps[1])
    assert torch.allclose(first.taps[1], OnlineFeatures(loaded.target, NEEDS).read(texts).taps[1], atol=2e-2)


def test_names_and_unions() -> None:
    assert names_of(Needs(taps=(3, -1, 3))) == ("tap.-1", "tap.3", "hidden_post")
    both = united([Needs(taps=(5, 2)), Needs(taps=(2,), hidden_pre=True)])
    assert both == Needs((2, 5), True, True)


def test_a_store_gives_what_passes_give(loaded: LoadedTarget, texts: list[Text], tmp_path: Path) -> None:
    store = filled(tmp_path / "store", loaded, texts)
    chosen = [texts[2], texts[1]]
    mine, theirs = store.read(chosen), OnlineFeatures(loaded.target, NEEDS).read(chosen)
    for row, text in enumerate(chosen):
        for one, other in ((mine.taps[1], theirs.taps[1]), (mine.hidden_post, theirs.hidden_post)):
            assert one is not None
            assert other is not None
            assert torch.allclose(one[row, : len(text)], other[row, : len(text)], atol=2e-2)
    assert mine.taps[0].dtype == torch.float32
    files = sum(file.stat().st_size for file in (tmp_path / "store").glob("*.f16"))
    assert files == store.size_of(texts)


def test_a_store_serves_drafters_that_need_less(loaded: LoadedTarget, texts: list[Text], tmp_path: Path) -> None:
    filled(tmp_path / "store", loaded, texts[:2])
    less = FeatureStore(tmp_path / "store", StoreFacts.of(loaded), Needs(taps=(1,)))
    assert less.needs == Needs((0, 1), True, True)
    assert [text.id for text in less.missing(texts)] == ["t/2", "t/3", "t/4"]
    features = less.read(texts[:2])
    assert sorted(features.taps) == [1]
    assert features.hidden_pre is None


def test_a_store_that_was_cut_short_goes_on(loaded: LoadedTarget, texts: list[Text], tmp_path: Path) -> None:
    whole = filled(tmp_path / "store", loaded, texts)
    copy = Path(shutil.copytree(tmp_path / "store", tmp_path / "copy"))
    file = copy / "tap.1.f16"
    with file.open("r+b") as stream:
        stream.truncate(file.stat().st_size // 2)
    with (copy / "index.jsonl").open("a") as stream:
        stream.write('{"id": "torn')
    again = FeatureStore(copy, StoreFacts.of(loaded), NEEDS)
    missing = again.missing(texts)
    assert 0 < len(missing) < len(texts)
    assert sum(again.add(missing, OnlineFeatures(loaded.target, again.needs))) == sum(map(len, missing))
    reopened = FeatureStore(copy, StoreFacts.of(loaded), NEEDS)
    assert not reopened.missing(texts)
    assert torch.allclose(reopened.read(texts).taps[1], whole.read(texts).taps[1], atol=1e-2)


def test_a_store_of_something_else_is_refused(loaded: LoadedTarget, texts: list[Text], tmp_path: Path) -> None:
    filled(tmp_path / "store", loaded, texts, Needs(taps=(0,)))
    with pytest.raises(DataError, match="features of another target"):
        FeatureStore(tmp_path / "store", StoreFacts.of(toy_target(layers=3)), Needs())
    with pytest.raises(DataError, match=r"lacks tap\.1"):
        FeatureStore(tmp_path / "store", StoreFacts.of(loaded), NEEDS)
    other = Text("t/0", texts[0].tokens[:-1], 2)
    with pytest.raises(DataError, match="with other tokens"):
        FeatureStore(tmp_path / "store", StoreFacts.of(loaded), Needs()).missing([other])
    (tmp_path / "store" / "features.json").write_text(json.dumps({"format": 9}))
    with pytest.raises(DataError, match="features"):
        FeatureStore(tmp_path / "store", StoreFacts.of(loaded), Needs())


def test_one_process_adds_at_a_time(loaded: LoadedTarget, texts: list[Text], tmp_path: Path) -> None:
    one = FeatureStore(tmp_path / "store", StoreFacts.of(loaded), Needs())
    other = FeatureStore(tmp_path / "store", StoreFacts.of(loaded), Needs())
    source = OnlineFeatures(loaded.target, Needs())
    adding = one.add([texts[0]], source)
    next(adding)
    with pytest.raises(DataError, match="another process"):
        next(other.add([texts[1]], source))


def test_values_beyond_float16_are_refused(texts: list[Text], tmp_path: Path) -> None:
    loud = toy_target()
    loud.target._norm.gain.mul_(1e6)  # type: ignore[attr-defined]
    store = FeatureStore(tmp_path / "store", StoreFacts.of(loud), Needs())
    with pytest.raises(ModelError, match="beyond float16"):
        list(store.add(texts, OnlineFeatures(loud.target, store.needs)))


def test_a_full_disk_is_told_first(
    loaded: LoadedTarget, texts: list[Text], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = FeatureStore(tmp_path / "store", StoreFacts.of(loaded), Needs())
    monkeypatch.setattr("shutil.disk_usage", lambda path: type("Usage", (), {"free": 10})())
    with pytest.raises(DataError, match="GB free"):
        list(store.add(texts, OnlineFeatures(loaded.target, store.needs)))
