"""The Hugging Face hub: asked once whether it answers, then used or left alone for the whole run.

Every way it can refuse has a message of its own. The token is read by huggingface_hub itself, from
HF_TOKEN or its own file; here only a `.env` puts it into HF_TOKEN, and nothing prints it.
"""

import os
import queue
import re
import socket
import threading
from collections.abc import Sequence
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from model_check.data.cache.memo import Memo
from model_check.errors import DataError

if TYPE_CHECKING:
    from huggingface_hub import HfApi

DEFAULT_ENDPOINT = "https://huggingface.co"
_TOKEN_LINE = re.compile(r"""\s*(?:export\s+)?HF_TOKEN\s*=\s*["']?(?P<token>[^\s"'#]+)""")
_HTTP_UNAUTHORIZED = 401
_HTTP_FORBIDDEN = 403
_HTTP_TOO_MANY = 429

Kind = Literal["model", "dataset"]


class Hub:
    """What the hub has, as seen from here. `offline` and a probe without answer mean the same: no
    call is made, only what was fetched before is used."""

    def __init__(self, timeout_s: float, offline: bool, memo: Memo) -> None:
        self._timeout_s = timeout_s
        self._offline = offline
        self._memo = memo
        self.endpoint = os.environ.get("HF_ENDPOINT", DEFAULT_ENDPOINT).rstrip("/")

    @cached_property
    def why_offline(self) -> str | None:
        """None when the hub answers. Asks at most once, before huggingface_hub is imported: that
        reads HF_HUB_OFFLINE when imported, and burns 24 s a call on a network that is not there.
        """
        reason = None
        if self._offline:
            reason = "offline was asked for (data.offline or HF_HUB_OFFLINE)"
        elif silence := _silence(self.endpoint, self._timeout_s):
            reason = f"{self.endpoint} does not answer ({silence})"
        if reason:
            os.environ["HF_HUB_OFFLINE"] = "1"
        elif token := _token_of_dotenv(Path(".env")):
            os.environ.setdefault("HF_TOKEN", token)
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
        return reason

    def dataset_commit(self, repo: str) -> str:
        """The commit of the dataset's main branch; offline, the one that was seen last."""
        signature = f"hub dataset {self.endpoint} {repo}"
        if self.why_offline is not None:
            if known := self._memo.get(signature):
                return known
            raise DataError(
                f"{repo}: was never prepared here, and {self.why_offline}; prepare it once with "
                "network, or take data.dataset=embedded or a local file"
            )
        commit = self._commit(repo, "dataset")
        self._memo.put(signature, commit)
        return commit

    def tokenizer_file(self, repo: str) -> Path:
        """The repository's tokenizer.json, fetched or from huggingface_hub's own cache."""
        online = self.why_offline is None
        if online:
            # Asked first because it fails at once: the download alone retries a 429 for 24 s.
            self._commit(repo, "model")
        from huggingface_hub import hf_hub_download
        from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError

        try:
            return Path(hf_hub_download(repo, "tokenizer.json", local_files_only=not online))
        except LocalEntryNotFoundError as error:
            raise self._not_cached(repo) from error
        except EntryNotFoundError as error:
            raise DataError(f"{repo}: has no tokenizer.json on {self.endpoint}") from error
        except Exception as error:
            raise self._explained(error, repo, "model") from error

    def model_files(self, repo: str, patterns: Sequence[str]) -> Path:
        """The directory that holds those files of a model, fetched or from huggingface_hub's own
        cache; a file that the model does not have is not in it."""
        online = self.why_offline is None
        if online:
            self._commit(repo, "model")  # asked first, as for a tokenizer
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import LocalEntryNotFoundError

        try:
            found = snapshot_download(
                repo, allow_patterns=list(patterns), local_files_only=not online
            )
        except LocalEntryNotFoundError as error:
            raise DataError(
                f"{repo}: is not in huggingface_hub's cache here, and "
                f"{self.why_offline or f'{self.endpoint} stopped answering'}; fetch it once with "
                "network, or name a local directory"
            ) from error
        except Exception as error:
            raise self._explained(error, repo, "model") from error
        return Path(found)

    def check_access(self, repo: str) -> None:
        """Raises DataError where a gated dataset would refuse its files to us."""
        try:
            self._api().auth_check(repo, repo_type="dataset")
        except Exception as error:
            raise self._explained(error, repo, "dataset") from error

    def _api(self) -> "HfApi":
        from huggingface_hub import HfApi

        return HfApi(endpoint=self.endpoint)

    def _commit(self, repo: str, kind: Kind) -> str:
        try:
            info = self._api().repo_info(repo, repo_type=kind, timeout=max(10.0, self._timeout_s))
        except Exception as error:
            raise self._explained(error, repo, kind) from error
        return str(info.sha)

    def _not_cached(self, repo: str) -> DataError:
        from huggingface_hub.constants import HF_HUB_CACHE

        reason = self.why_offline or f"{self.endpoint} stopped answering"
        return DataError(
            f"{repo}: its tokenizer.json is not in {HF_HUB_CACHE}, and {reason}; fetch it once "
            "with network, or take data.tokenizer=bpe or a local tokenizer.json"
        )

    def _explained(self, error: Exception, repo: str, kind: Kind) -> DataError:
        """One line about what huggingface_hub raised. Our own words only: a foreign message may
        quote what it was given."""
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
            case GatedRepoError():
                text = f"is gated, and your token has no access to it: ask for it at {page}"
            case RepositoryNotFoundError():
                text = f"no such {kind} at {self.endpoint}, or it is private and needs HF_TOKEN"
            case HFValidationError():
                text = f"is neither a file here nor a name that the hub could have ({kind})"
            case _ if status in (_HTTP_UNAUTHORIZED, _HTTP_FORBIDDEN):
                text = f"{self.endpoint} refuses your token (HTTP {status}): is it still valid?"
            case _ if status == _HTTP_TOO_MANY and response is not None:
                wait = response.headers.get("Retry-After")
                when = f"in {wait} s" if wait and wait.isdigit() else "in some minutes"
                text = f"{self.endpoint} asks to slow down (HTTP 429): try again {when}"
            case _:
                what = f"HTTP {status}" if status else type(error).__name__
                text = f"{self.endpoint} failed to give it ({what})"
        return DataError(f"{repo}: {text}")


def _token_of_dotenv(path: Path) -> str | None:
    """HF_TOKEN of a `.env` file here, where there is one: read as data, never executed."""
    with suppress(OSError, UnicodeDecodeError):
        for line in path.read_text().splitlines():
            if found := _TOKEN_LINE.match(line):
                return found["token"]
    return None


def without_secrets(text: str) -> str:
    """A foreign message, fit to be printed."""
    from huggingface_hub import get_token

    token = get_token()
    return text.replace(token, "***") if token else text


def _silence(endpoint: str, timeout_s: float) -> str | None:
    """Why no HTTP answer comes back in time; None: one does, be it an error page."""
    # In a thread: a name server that is gone blocks getaddrinfo for longer than any time-out.
    heard: queue.SimpleQueue[str | None] = queue.SimpleQueue()

    def ask() -> None:
        heard.put(_ask(endpoint, timeout_s))

    threading.Thread(target=ask, daemon=True, name="hub probe").start()
    try:
        return heard.get(timeout=timeout_s)
    except queue.Empty:
        return f"waited {timeout_s:g} s"


def _ask(endpoint: str, timeout_s: float) -> str | None:
    import ssl  # only who asks the hub pays for these: 60 ms
    import urllib.error
    import urllib.request

    try:
        request = urllib.request.Request(f"{endpoint}/", method="HEAD")
        with urllib.request.urlopen(request, timeout=timeout_s):
            return None
    except urllib.error.HTTPError as error:
        error.close()
        return None
    except urllib.error.URLError as error:
        # Somebody answered; whose certificates are trusted is huggingface_hub's question.
        return None if isinstance(error.reason, ssl.SSLError) else _in_words(error.reason)
    except (OSError, ValueError) as error:  # a broken proxy answer, a malformed endpoint
        return _in_words(error)


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
