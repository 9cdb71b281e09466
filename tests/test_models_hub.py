"""Models by their name at the Hugging Face Hub, against a server on this machine."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from simpar.cli.app import main
from simpar.errors import UnknownNameError
from simpar.specs.model import TransformerSpec
from simpar.specs.models_io import load_model
from simpar.specs.scenario import apply_override

CONFIG = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 512, "intermediate_size": 1024,
    "num_hidden_layers": 3, "num_attention_heads": 8, "num_key_value_heads": 2,
    "vocab_size": 1000, "rms_norm_eps": 1e-5, "tie_word_embeddings": False,
}  # fmt: skip


def layers(name: str) -> int:
    model = load_model(name)
    assert isinstance(model, TransformerSpec)
    return model.num_hidden_layers


class Hub(BaseHTTPRequestHandler):
    """One open model, one behind a licence, one that breaks the server, one too large."""

    asked: list[tuple[str, str | None]] = []  # noqa: RUF012 - of the running test

    def do_GET(self) -> None:
        self.asked.append((self.path, self.headers.get("Authorization")))
        owner = self.path.split("/")[1]
        if owner == "moved":
            self.send_response(302)
            self.send_header("Location", self.path.replace("moved", "open"))
            self.end_headers()
            return
        code = {"open": 200, "gated": 200 if self.headers.get("Authorization") else 403, "broken": 500}.get(owner, 401)
        self.send_response(code)
        if code == 401:
            self.send_header("X-Error-Code", "RepoNotFound")
        self.end_headers()
        if code == 200:
            self.wfile.write(json.dumps(CONFIG).encode())

    def log_message(self, *_: object) -> None:
        """Nothing."""


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[str, str | None]]]:
    Hub.asked = []
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    for name in ("HF_HUB_OFFLINE", "HF_HUB_CACHE", "HF_HOME", "HF_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{server.server_port}")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    yield Hub.asked
    server.shutdown()
    server.server_close()


def test_a_model_of_the_hub_is_fetched_once(hub: list[tuple[str, str | None]], monkeypatch: pytest.MonkeyPatch) -> None:
    first = load_model("open/some-model-1B")
    assert first.name == "open/some-model-1B"
    assert first.source.endswith("/open/some-model-1B/resolve/main/config.json")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert load_model("open/some-model-1B") == first
    assert hub == [("/open/some-model-1B/resolve/main/config.json", None)]


@pytest.mark.usefixtures("hub")
def test_fields_of_a_model_of_the_hub_can_be_set() -> None:
    table: dict[str, object] = {"model": "open/some-model-1B"}
    apply_override(table, "model.num_hidden_layers=2")
    assert table["model"]["num_hidden_layers"] == 2  # type: ignore[index]
    assert table["model"]["hidden_size"] == 512  # type: ignore[index]


def test_what_huggingface_keeps_on_this_machine_comes_first(hub: list[tuple[str, str | None]], tmp_path: Path) -> None:
    kept = tmp_path / "huggingface" / "hub" / "models--open--some-model-1B"
    for revision, number in (("aaa", 1), ("bbb", 2)):
        (kept / "snapshots" / revision).mkdir(parents=True)
        (kept / "snapshots" / revision / "config.json").write_text(json.dumps({**CONFIG, "num_hidden_layers": number}))
    (kept / "refs").mkdir()
    (kept / "refs" / "main").write_text("bbb\n")
    assert layers("open/some-model-1B") == 2
    assert not hub


def test_a_token_opens_what_is_behind_a_licence(hub: list[tuple[str, str | None]], monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UnknownNameError, match="behind a licence: set HF_TOKEN, or save http"):
        load_model("gated/some-model-1B")
    monkeypatch.setenv("HF_TOKEN", "secret")
    assert layers("gated/some-model-1B") == 3
    assert hub[-1][1] == "Bearer secret"


def test_a_token_does_not_go_where_the_hub_sends_on(hub: list[tuple[str, str | None]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "secret")
    assert layers("moved/some-model-1B") == 3
    assert [token for _, token in hub] == ["Bearer secret", None]


@pytest.mark.usefixtures("hub")
def test_a_cache_that_cannot_be_written_is_one_clear_message(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("no folder")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(UnknownNameError, match=r"cannot be kept in .*: save http"):
        load_model("open/some-model-1B")


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("nobody/lama3.1-8", "did you mean 'llama3.1-8b'?.*The Hugging Face Hub has no config.json of that name either"),
        ("broken/some-model-1B", "The Hugging Face Hub answers 500: save http.*/broken/some-model-1B/resolve/main/config.json"),
    ],
)
@pytest.mark.usefixtures("hub")
def test_what_the_hub_has_not_is_one_clear_message(name: str, said: str) -> None:
    with pytest.raises(UnknownNameError, match=said):
        load_model(name)


@pytest.mark.usefixtures("hub")
def test_without_a_network_the_message_says_what_to_save(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:1")
    asked = ("--hardware", "dgx-h100", "--num-nodes", "1", "--global-batch", "8", "--sequence-length", "512")
    with pytest.raises(SystemExit, match="2"):
        main(["simulate", "--model", "open/some-model-1B", *asked])
    said = " ".join(capsys.readouterr().err.split())
    assert "cannot be asked" in said
    assert "save http://127.0.0.1:1/open/some-model-1B/resolve/main/config.json and name the file" in said
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(UnknownNameError, match="With HF_HUB_OFFLINE nothing is fetched"):
        load_model("open/some-model-1B")


def test_a_missing_file_is_no_name_at_the_hub(hub: list[tuple[str, str | None]]) -> None:
    with pytest.raises(UnknownNameError):
        load_model("tests/no-such-file")
    with pytest.raises(UnknownNameError):
        load_model("some-model-1B")
    assert not hub
