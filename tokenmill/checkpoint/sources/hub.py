"""Models on the Hugging Face Hub, through huggingface_hub: its cache and its variables (HF_HOME, HF_TOKEN, HF_ENDPOINT,
HF_HUB_OFFLINE) apply unchanged.

Downloads only the files that select_files names. Without a network a complete cached copy is used, with a warning.
Called by resolve, last of the sources.
"""

from __future__ import annotations

import glob
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tokenmill.checkpoint.sources.base import Options, Resolved, readable_bytes
from tokenmill.checkpoint.sources.cache import free_bytes
from tokenmill.checkpoint.sources.hub_files import HubRequest, Selection, parse_request, select_files
from tokenmill.checkpoint.sources.progress import Progress, wants_bar
from tokenmill.errors import UnavailableError, UserError
from tokenmill.log import get_logger

_log = get_logger(__name__)
_NETWORK_PACKAGES = {"httpx", "httpx2", "httpcore", "requests", "urllib3"}


class HubSource:
    def claims(self, model: str) -> bool:
        return parse_request(model) is not None

    def resolve(self, model: str, options: Options) -> Resolved:
        from huggingface_hub import constants

        request = parse_request(model)
        assert request is not None, "resolve is called after claims"
        cached = _find_cached(request, options.revision)
        if cached is not None and _is_commit(options.revision):
            return cached  # a commit never changes: no need to ask
        if options.offline or constants.HF_HUB_OFFLINE:
            if cached is not None:
                return cached
            raise UnavailableError(f"'{model}' is not in the Hugging Face cache", "fetch it once while online")
        try:
            return _download(request, options)
        except UnavailableError as error:
            if cached is None:
                raise
            _log.warning("%s; using the cached copy", error.problem)
            return cached


def _download(request: HubRequest, options: Options) -> Resolved:
    from huggingface_hub import HfApi, constants, snapshot_download

    with _explained(request, options.revision):
        info = HfApi().model_info(request.repo, revision=options.revision, files_metadata=True, timeout=10)
    sizes = {entry.rfilename: entry.size or 0 for entry in info.siblings or []}
    selection = select_files(request, sizes)
    total = sum(sizes[name] for name in selection.files)
    snapshot = _repository_folder(request.repo) / "snapshots" / str(info.sha)
    missing = sum(sizes[name] for name in selection.files if not (snapshot / name).exists())
    if missing:
        _require_space(request.repo, Path(constants.HF_HUB_CACHE), missing)
        Progress(options.progress).say(
            f"{request.repo}: fetching {len(selection.files)} files, {readable_bytes(total)}"
        )
    with _explained(request, options.revision), _bars(wants_bar(options.progress)):
        patterns = [glob.escape(name) for name in selection.files]
        folder = Path(snapshot_download(request.repo, revision=options.revision, allow_patterns=patterns))
    return _resolved(request, folder, selection)


def _resolved(request: HubRequest, folder: Path, selection: Selection) -> Resolved:
    total = sum((folder / name).stat().st_size for name in selection.files)
    path = folder / selection.main if selection.main else folder
    return Resolved(path, total, f"huggingface:{request.repo}@{folder.name}")


def _find_cached(request: HubRequest, revision: str | None) -> Resolved | None:
    """A snapshot on this disk with all weights, by the documented layout: refs/<revision>, snapshots/<commit>."""
    repository = _repository_folder(request.repo)
    try:
        commit = revision if _is_commit(revision) else (repository / "refs" / (revision or "main")).read_text().strip()
        folder = repository / "snapshots" / str(commit)
        names = [path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()]
        selection = select_files(request, names)
        if not selection.main and not _has_all_shards(folder, selection):
            return None
        return _resolved(request, folder, selection)
    except (OSError, UserError, ValueError, KeyError):
        return None


def _has_all_shards(folder: Path, selection: Selection) -> bool:
    index = folder / "model.safetensors.index.json"
    if not index.exists():
        return True
    shards = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
    return shards <= set(selection.files)


def _repository_folder(repo: str) -> Path:
    from huggingface_hub import constants

    return Path(constants.HF_HUB_CACHE) / f"models--{repo.replace('/', '--')}"


def find_downloaded() -> dict[str, Resolved]:
    """Hugging Face id -> its newest snapshot, for repositories whose weights are complete."""
    found = {}
    for repo in cached_repositories():
        request = parse_request(repo)
        cached = _find_cached(request, None) if request is not None else None
        if cached is not None:
            found[repo] = cached
    return found


def cached_repositories() -> dict[str, Path]:
    """Hugging Face id -> its folder in the cache, for models that are here."""
    from huggingface_hub import constants

    found = sorted(Path(constants.HF_HUB_CACHE).glob("models--*--*"))
    return {path.name.removeprefix("models--").replace("--", "/", 1): path for path in found if path.is_dir()}


def _is_commit(revision: str | None) -> bool:
    return revision is not None and len(revision) == 40 and all(digit in "0123456789abcdef" for digit in revision)


def _require_space(repo: str, cache: Path, needed: int) -> None:
    existing = next(path for path in (cache, *cache.parents) if path.exists())
    free = free_bytes(existing)
    if free < needed:
        raise UserError(
            f"'{repo}' needs {needed} bytes ({readable_bytes(needed)}) in '{cache}', "
            f"where {free} bytes ({readable_bytes(free)}) are free",
            "free some space, or set HF_HOME to a folder on a larger disk",
        )


@contextmanager
def _bars(enabled: bool) -> Iterator[None]:
    """huggingface_hub draws its own bars; they are for terminals only."""
    from huggingface_hub.utils.tqdm import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

    silenced = not enabled and not are_progress_bars_disabled()
    if silenced:
        disable_progress_bars()
    try:
        yield
    finally:
        if silenced:
            enable_progress_bars()


@contextmanager
def _explained(request: HubRequest, revision: str | None) -> Iterator[None]:
    """Turn what huggingface_hub and its HTTP library raise into one sentence with a remedy."""
    from huggingface_hub import constants, errors

    repo = request.repo
    try:
        yield
    except errors.GatedRepoError as error:
        page = f"{constants.ENDPOINT}/{repo}"
        raise UserError(f"'{repo}' is gated", f"accept its terms at {page} and set HF_TOKEN") from error
    except errors.RepositoryNotFoundError as error:
        raise _absent(repo) from error
    except errors.RevisionNotFoundError as error:
        raise UserError(f"'{repo}' has no revision '{revision}'", "give a branch, a tag or a commit") from error
    except errors.HFValidationError as error:
        raise UserError(f"'{repo}' is not a Hugging Face id", "write org/name") from error
    except errors.LocalEntryNotFoundError as error:
        raise _unreachable(repo, error) from error
    except errors.HfHubHTTPError as error:
        status = getattr(error.response, "status_code", None)
        if status == 404:
            raise _absent(repo) from error
        raise UnavailableError(
            f"the Hub answered {status} for '{repo}'", "try again later, or check HF_TOKEN"
        ) from error
    except Exception as error:
        package = type(error).__module__.split(".")[0]
        if package in _NETWORK_PACKAGES or isinstance(error, (ConnectionError, TimeoutError)):
            raise _unreachable(repo, error) from error
        raise


def _absent(repo: str) -> UserError:
    problem = f"there is no path '{repo}' here and no such model on the Hub"
    return UserError(problem, "check the spelling; if it is private, set HF_TOKEN")


def _unreachable(repo: str, error: Exception) -> UnavailableError:
    from huggingface_hub import constants

    reason = str(error.__cause__ or error).splitlines()[0] if str(error.__cause__ or error) else type(error).__name__
    remedy = "check the network, set HF_ENDPOINT to a mirror, or use an alias or a local path"
    return UnavailableError(f"cannot reach {constants.ENDPOINT} for '{repo}' ({reason})", remedy)
