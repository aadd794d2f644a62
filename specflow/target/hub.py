"""Models of the Hugging Face hub, through its own client and its own cache.

HF_HOME, HF_TOKEN, HF_ENDPOINT and HF_HUB_OFFLINE mean what they mean everywhere.
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from pathlib import Path

from specflow.errors import ModelError

__all__ = ["HubModel", "cached_hub_models", "fetch_snapshot"]

_WANTED = ["*.safetensors", "*.json", "tokenizer.model", "*.tiktoken", "merges.txt", "vocab.txt", "*.jinja"]
_UNWANTED = ["*/*", "consolidated*", "adapter_*"]
"""Files of other formats, and second copies of the weights."""
_PICKLES = ["*.bin", "*.pt"]


@dataclass(frozen=True, slots=True)
class HubModel:
    """A model in the hub client's cache."""

    name: str
    directory: Path
    size: int  # bytes


def fetch_snapshot(name: str, revision: str | None, with_code: bool = False, pickles: bool = False) -> Path:
    """The directory of a hub model, downloaded if it is not cached.

    Args:
        with_code: Fetch Python files too; whoever loads the model may then run them.
        pickles: Fetch pickled weights where there are no safetensors; whoever reads them must run nothing in them.

    Raises:
        ModelError: It does not exist, is not accessible, or cannot be reached.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.utils.tqdm import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

    quiet = not sys.stderr.isatty() and not are_progress_bars_disabled()
    if quiet:
        disable_progress_bars()
    wanted = [*_WANTED, "*.py"] if with_code else _WANTED
    try:
        path = Path(snapshot_download(name, revision=revision, allow_patterns=wanted, ignore_patterns=_UNWANTED))
        if pickles and not any(path.glob("*.safetensors")):
            files = [*wanted, *_PICKLES]
            path = Path(snapshot_download(name, revision=revision, allow_patterns=files, ignore_patterns=_UNWANTED))
        return path
    except Exception as error:
        # The client raises its own, its HTTP library's and the system's errors; all of them mean "no model".
        raise _explain(name, revision, error) from error
    finally:
        if quiet:
            enable_progress_bars()


def cached_hub_models() -> list[HubModel]:
    """Models in the hub client's cache."""
    from huggingface_hub import scan_cache_dir
    from huggingface_hub.errors import CacheNotFound

    try:
        repos = scan_cache_dir().repos
    except CacheNotFound:
        return []
    models = [HubModel(repo.repo_id, repo.repo_path, repo.size_on_disk) for repo in repos if repo.repo_type == "model"]
    return sorted(models, key=lambda model: model.name)


def _explain(name: str, revision: str | None, error: Exception) -> ModelError:
    kinds = {kind.__name__ for kind in type(error).__mro__}
    if isinstance(error, OSError) and error.errno == 28:
        return ModelError(name, "the disk is full", "", "free space or point HF_HOME elsewhere")
    if "GatedRepoError" in kinds:
        hint = "accept its terms on the hub's page, then set HF_TOKEN"
        return ModelError(name, "access is gated", "a token that was granted access", hint)
    if "RepositoryNotFoundError" in kinds:
        hint = "check the spelling; for a private model set HF_TOKEN"
        return ModelError(name, "no such model on the hub", "an id like org/name", hint)
    if kinds & {"RevisionNotFoundError", "RevisionResolutionError"}:
        return ModelError(name, f"no revision {revision!r}", "a branch, tag or commit of the model")
    if "HFValidationError" in kinds:
        return ModelError(name, "not a valid model id", "an id like org/name, a directory or a .gguf file")
    if kinds & {"LocalEntryNotFoundError", "OfflineModeIsEnabled"}:
        offline = os.environ.get("HF_HUB_OFFLINE", "0").lower() in ("1", "true", "yes", "on")
        reason = "HF_HUB_OFFLINE is set" if offline else "the hub cannot be reached"
        hint = "the embedded model smollm2-135m needs no hub; a local directory or .gguf file neither"
        return ModelError(name, f"not in the cache, and {reason}", "a cached or reachable model", hint)
    lines = str(error).strip().splitlines()
    reason = lines[0] if lines else type(error).__name__
    return ModelError(name, f"the hub could not deliver it ({reason})", "", "try again, or name a local directory")
