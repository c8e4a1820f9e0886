"""The Hugging Face hub: asked once whether it answers, then used or left alone for the whole run.

Each way in which it can refuse has a message of its own. huggingface_hub reads the token itself,
from HF_TOKEN or its own file. We only copy that of a `.env` file into HF_TOKEN, and never print it.

`python -m model_check.data.sources.hub ORGANISATION/MODEL config.json` prints the path of a file of
a model, for processes that do not import huggingface_hub.
"""

import errno
import glob
import importlib.util
import os
import queue
import socket
import sys
import threading
from collections.abc import Sequence
from functools import cached_property
from http import HTTPStatus
from pathlib import Path
from typing import TYPE_CHECKING

from model_check.config.load import Request, load
from model_check.config.schema import DataSettings
from model_check.data.cache.memo import Memo
from model_check.data.sources.checksums import Kind, changed_files
from model_check.errors import DataError, ModelCheckError, StorageError
from model_check.utils.dotenv import take_from_dotenv, why_unread
from model_check.utils.secrets import MASK, mask_others, masked
from model_check.utils.words import printable_lines

if TYPE_CHECKING:
    from urllib.parse import SplitResult

    from huggingface_hub import HfApi

DEFAULT_ENDPOINT = "https://huggingface.co"

_SOCKS_PORT = 1080
_FULL = (errno.ENOSPC, errno.EDQUOT)
_OF_A_DISK = (*_FULL, errno.EACCES, errno.EPERM, errno.EROFS, errno.EFBIG)


class Hub:
    """The hub as seen from this machine. When it is offline on request or does not answer, no call
    is made, and only files that were fetched before are used."""

    def __init__(self, data: DataSettings) -> None:
        self.timeout_s, self.offline = data.hub_timeout_s, data.offline
        self.memo = Memo(Path(data.cache_dir))
        self._url = os.environ.get("HF_ENDPOINT", DEFAULT_ENDPOINT).rstrip("/")
        self.endpoint = _without_userinfo(self._url)

    @cached_property
    def why_offline(self) -> str | None:
        """None when the hub answers. Asks at most once, before huggingface_hub is imported: at
        import that reads HF_HUB_OFFLINE, and without a network it spends 24 s on each call."""
        reason = None
        if self.offline:
            reason = "offline was asked for (data.offline or HF_HUB_OFFLINE)"
        elif silence := _silence(self.endpoint, self.timeout_s):
            reason = f"{self.endpoint} does not answer ({silence})"
        if reason:
            os.environ["HF_HUB_OFFLINE"] = "1"
        else:
            take_from_dotenv("HF_TOKEN")
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
        return reason

    def dataset_commit(self, repo: str) -> str:
        """The commit of the dataset's main branch; offline, the last one that we saw. Raises
        DataError, as all methods do."""
        signature = f"hub dataset {self.endpoint} {repo}"
        if self.why_offline is not None:
            if known := self.memo.get(signature):
                return known
            raise DataError(
                f"{repo}: was never prepared here, and {self.why_offline}; prepare it once with "
                "network, or take data.dataset=embedded or a local file"
            )
        commit = self._commit(repo, "dataset")
        self.memo.put(signature, commit)
        return commit

    def model_file(self, repo: str, instead: str, name: str, *beside: str) -> Path:
        """One file of a model, with those `beside` it that the model has. `instead`: the cure where
        it cannot be fetched."""
        file = self.model_files(repo, [name, *beside], instead) / name
        if not file.is_file():
            if self.why_offline is not None:
                raise self._not_cached(repo, f"its {name}", instead)
            raise DataError(f"{repo}: has no {name} on {self.endpoint}")
        return file

    def model_files(self, repo: str, patterns: Sequence[str], instead: str) -> Path:
        """The directory of those files of a model, fetched or from huggingface_hub's own cache. It
        lacks files that the model does not have."""
        online = self.why_offline is None
        if online:
            # Asked first because it fails at once: the download alone retries a 429 for 24 s.
            self._commit(repo, "model")
        return self._fetched(repo, "model", patterns, instead)

    def fetch_dataset(self, repo: str, commit: str, files: Sequence[str]) -> None:
        """Fetch files of a dataset into huggingface_hub's cache."""
        patterns = list(map(glob.escape, files))
        self._fetched(repo, "dataset", patterns, "take another dataset", commit)

    def _fetched(
        self,
        repo: str,
        kind: Kind,
        patterns: Sequence[str],
        instead: str,
        commit: str | None = None,
    ) -> Path:
        """A directory of files with the hub's own bytes, as far as it tells their checksums: what
        comes changed is fetched a second time, and then refused."""
        changed: list[str] = []
        for _ in range(2):
            directory = self._snapshot(repo, kind, patterns, instead, commit)
            if self.why_offline is not None:
                return directory
            try:
                changed = changed_files(self._api(), repo, kind, directory, patterns)
                for name in changed:  # else the next run would find it, and ask nobody
                    (directory / name).resolve().unlink()
                    (directory / name).unlink(missing_ok=True)
            except OSError as error:
                what = "is damaged, and cannot be removed" if changed else "is unreadable"
                raise DataError(f"{repo}: {error.filename} {what}: {error.strerror}") from error
            if not changed:
                return directory
        raise DataError(
            f"{repo}: {', '.join(changed[:3])} came with other bytes than {self.endpoint} has, "
            "twice (by its checksums): a proxy or a mirror changes them, or this machine's memory "
            "or disk"
        )

    def _snapshot(
        self,
        repo: str,
        kind: Kind,
        patterns: Sequence[str],
        instead: str,
        commit: str | None,
    ) -> Path:
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import LocalEntryNotFoundError

        try:
            found = snapshot_download(
                repo,
                repo_type=kind,
                revision=commit,
                allow_patterns=list(patterns),
                local_files_only=self.why_offline is not None,
            )
        except LocalEntryNotFoundError as error:
            what = f"its {patterns[0]}" if kind == "model" else "its text"
            raise self._not_cached(repo, what, instead) from error
        except Exception as error:
            raise cache_failure(error, repo) or self._explained(error, repo, kind) from error
        return Path(found)

    def check_access(self, repo: str) -> None:
        """Raises DataError where a gated dataset would refuse its files to us."""
        try:
            self._api().auth_check(repo, repo_type="dataset")
        except Exception as error:
            raise self._explained(error, repo, "dataset") from error

    def _api(self) -> "HfApi":
        from huggingface_hub import HfApi

        return HfApi(endpoint=self._url)

    def _commit(self, repo: str, kind: Kind) -> str:
        try:
            info = self._api().repo_info(repo, repo_type=kind, timeout=max(10.0, self.timeout_s))
        except Exception as error:
            raise self._explained(error, repo, kind) from error
        return str(info.sha)

    def _not_cached(self, repo: str, what: str, instead: str) -> DataError:
        from huggingface_hub.constants import HF_HUB_CACHE

        reason = self.why_offline or f"{self.endpoint} stopped answering"
        return DataError(
            f"{repo}: {what} is not in {HF_HUB_CACHE}, and {reason}; fetch it once with network, "
            f"or {instead}"
        )

    def _explained(self, error: Exception, repo: str, kind: Kind) -> DataError:
        """One line about an error of huggingface_hub. In our own words only: its message may quote
        the token."""
        from huggingface_hub import get_token
        from huggingface_hub.errors import (
            GatedRepoError,
            HFValidationError,
            RepositoryNotFoundError,
        )

        page = f"{self.endpoint}/{'datasets/' if kind == 'dataset' else ''}{repo}"
        response = getattr(error, "response", None)
        status = getattr(response, "status_code", None)
        match error:
            case GatedRepoError() if get_token() is None:
                text = f"is gated: accept its terms at {page}, then export HF_TOKEN=..."
                text += why_unread()
            case GatedRepoError():
                text = f"is gated, and your token has no access to it: ask for it at {page}"
            case RepositoryNotFoundError():
                text = f"no such {kind} at {self.endpoint}, or it is private and needs HF_TOKEN"
                text += why_unread()
            case HFValidationError():
                text = f"is neither a file here nor a name that the hub could have ({kind})"
            case _ if status in (HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN):
                text = f"{self.endpoint} refuses your token (HTTP {status}): is it still valid? "
                text += "HF_TOKEN holds it, or `hf auth login` stored it"
            case _ if status == HTTPStatus.TOO_MANY_REQUESTS and response is not None:
                wait = response.headers.get("Retry-After")
                when = f"in {wait} s" if wait and wait.isdigit() else "in some minutes"
                text = f"{self.endpoint} asks to slow down (HTTP 429): try again {when}"
            case _:
                what = f"HTTP {status}" if status else type(error).__name__
                text = f"{self.endpoint} failed to give it ({what})"
        return DataError(f"{repo}: {text}")


def cache_failure(error: Exception, repo: str) -> StorageError | None:
    """None where it is no error of the directory in which files of the hub are kept."""
    if not isinstance(error, OSError) or error.errno not in _OF_A_DISK:
        return None
    if error.errno not in _FULL and error.filename is None:  # of a connection, perhaps
        return None
    return StorageError(
        f"{repo}: where files of the hub are kept, {error.filename or 'no file named'} cannot be "
        f"written: {error.strerror}; set HF_HOME to a directory that can, with more room"
    )


def _without_userinfo(url: str) -> str:
    scheme, slashes, rest = url.rpartition("://")
    host, slash, path = rest.partition("/")
    return f"{scheme}{slashes}{host.rpartition('@')[2]}{slash}{path}"


def without_secrets(text: str) -> str:
    """A message of another package, without our token."""
    from huggingface_hub import get_token

    token = get_token()
    return masked(text.replace(token, MASK) if token else text)


def _silence(endpoint: str, timeout_s: float) -> str | None:
    """Why no HTTP answer comes in time; None: one comes, even if it is an error page."""
    answers: queue.SimpleQueue[str | None] = queue.SimpleQueue()

    def ask() -> None:
        answers.put(_ask(endpoint, timeout_s))

    # A thread: getaddrinfo has no time-out, and blocks for long when the name server is gone.
    threading.Thread(target=ask, daemon=True, name="hub probe").start()
    try:
        return answers.get(timeout=timeout_s)
    except queue.Empty:
        return f"waited {timeout_s:g} s"


def _ask(endpoint: str, timeout_s: float) -> str | None:
    # 60 ms, which only a process that asks the hub pays for.
    import ssl
    import urllib.error
    import urllib.request

    if (proxy := _socks_proxy(endpoint)) is not None:
        return _ask_socks(proxy, timeout_s)
    try:
        request = urllib.request.Request(f"{endpoint}/", method="HEAD")
        with urllib.request.urlopen(request, timeout=timeout_s):
            return None
    except urllib.error.HTTPError as error:
        error.close()
        return None
    except urllib.error.URLError as error:
        # A server answered. Which certificates to trust is for huggingface_hub to decide.
        return None if isinstance(error.reason, ssl.SSLError) else _in_words(error.reason)
    # A broken answer of a proxy, a malformed endpoint.
    except (OSError, ValueError) as error:
        return _in_words(error)


def _socks_proxy(endpoint: str) -> "SplitResult | None":
    """The proxy that huggingface_hub would take, where it is one of SOCKS: urllib knows none, and
    would ask for the name here, which the proxy alone may know."""
    import urllib.request
    from urllib.parse import urlsplit

    proxies, place = urllib.request.getproxies(), urlsplit(endpoint)
    proxy = proxies.get(place.scheme) or proxies.get("all") or ""
    is_taken = proxy.startswith("socks") and not urllib.request.proxy_bypass(place.hostname or "")
    return urlsplit(proxy) if is_taken else None


def _ask_socks(proxy: "SplitResult", timeout_s: float) -> str | None:
    """Whether it is there, and what speaks to it."""
    if importlib.util.find_spec("socksio") is None:
        return f"{proxy.scheme}:// proxies need a package: pip install socksio"
    try:
        place = proxy.hostname or "", proxy.port or _SOCKS_PORT
        socket.create_connection(place, timeout_s).close()
    except (OSError, ValueError) as error:
        return f"its proxy {proxy.hostname}:{proxy.port}: {_in_words(error)}"
    return None


def _in_words(reason: object) -> str:
    match reason:
        case ConnectionRefusedError():
            return "connection refused"
        case socket.gaierror():
            return "its name cannot be resolved"
        case TimeoutError():
            return "no answer in time"
        case OSError(strerror=str(text)):
            return text
        case _:
            return type(reason).__name__


def main(argv: Sequence[str]) -> int:
    repo, name = argv
    mask_others()
    try:
        settings = load(Request(preset="cpu", environ=os.environ), lambda: False).settings
        print(Hub(settings.data).model_file(repo, "name a local directory", name))
    except ModelCheckError as error:
        print(printable_lines(f"error: {error}"), file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
