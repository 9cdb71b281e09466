"""The config.json of a model at the Hugging Face Hub: what Hugging Face's own tools keep on this machine, else fetched once.

Their variables hold: HF_HUB_CACHE and HF_HOME (where it is kept), HF_HUB_OFFLINE=1 (nothing is fetched), HF_ENDPOINT (a mirror) and
HF_TOKEN (for models behind a licence). What is fetched is kept in `$XDG_CACHE_HOME/simpar/models`, so that a scenario reads
the same file again.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Final

from simpar.boundary import MOST_CONFIG_BYTES

_NAME: Final = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_FILES: Final = ("config.json", "transformer/config.json")
"""Of a model of transformers, and of a diffusion pipeline the part that is trained."""
_TIMEOUT_S: Final = 10.0


def is_hub_name(name: str) -> bool:
    """Whether `name` can be one at the Hub ("Qwen/Qwen3-8B") and is no path here: its owner is not a folder."""
    return bool(_NAME.fullmatch(name)) and not name.endswith((".json", ".toml")) and not Path(name).parent.exists()


def hub_config(name: str) -> Path | str:
    """The config.json of the model called `name` at the Hub, or why there is none and what helps."""
    folder = _caches() / "simpar" / "models" / name.replace("/", "--")
    for path in (*_downloaded(name), *(folder / file for file in _FILES)):
        if path.is_file():
            return path
    if os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE"):
        return f"With HF_HUB_OFFLINE nothing is fetched: {_by_hand(name)}"
    for file in _FILES:
        content = _fetched(name, file)
        if isinstance(content, str):
            return content
        if content is not None:
            return _kept(folder / file, content) or f"Its config.json cannot be kept in {folder}: {_by_hand(name)}"
    return "The Hugging Face Hub has no config.json of that name either"


def hub_url(name: str, file: str = _FILES[0]) -> str:
    """Where the Hub has it."""
    return f"{os.environ.get('HF_ENDPOINT') or 'https://huggingface.co'}/{name}/resolve/main/{file}"


def _by_hand(name: str) -> str:
    return f"save {hub_url(name)} and name the file"


def _kept(path: Path, content: bytes) -> Path | None:
    """`path` with that content, whole or not at all; none where nothing can be written."""
    part = path.with_suffix(f".{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        part.write_bytes(content)
        part.replace(path)
    except OSError:
        return None
    return path


def _caches() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")


def _downloaded(name: str) -> list[Path]:
    """Config files of `name` in the cache of huggingface_hub, that of its main revision first."""
    home = Path(os.environ.get("HF_HOME") or _caches() / "huggingface")
    hub = Path(os.environ.get("HF_HUB_CACHE") or home / "hub")
    model = hub / f"models--{name.replace('/', '--')}"
    main = model / "refs" / "main"
    revisions = [main.read_text().strip()] if main.is_file() else []
    revisions += sorted(p.name for p in model.glob("snapshots/*") if p.name not in revisions)
    return [model / "snapshots" / revision / file for revision in revisions for file in _FILES]


def _fetched(name: str, file: str) -> bytes | str | None:
    """The content of a file of `name`, or why not; none where the Hub does not know it."""
    from urllib.error import HTTPError  # here: a command that asks no network does not load them
    from urllib.request import Request, urlopen

    token = os.environ.get("HF_TOKEN")
    request = Request(hub_url(name, file))
    if token:  # for the Hub alone, not for where it may send on
        request.add_unredirected_header("Authorization", f"Bearer {token}")
    try:
        with urlopen(request, timeout=_TIMEOUT_S) as answer:
            content: bytes = answer.read(MOST_CONFIG_BYTES + 1)
    except HTTPError as error:
        if error.code == 404 or error.headers.get("X-Error-Code") == "RepoNotFound":
            return None
        if error.code in (401, 403):
            return f"At the Hugging Face Hub it is behind a licence: set HF_TOKEN, or {_by_hand(name)}"
        return f"The Hugging Face Hub answers {error.code}: {_by_hand(name)}"
    except (OSError, ValueError) as error:  # no network, no name server, a time-out, an endpoint that is no address
        return f"The Hugging Face Hub cannot be asked ({getattr(error, 'reason', error)}): {_by_hand(name)}"
    return content if len(content) <= MOST_CONFIG_BYTES else f"Its {file} at the Hugging Face Hub is too large"
