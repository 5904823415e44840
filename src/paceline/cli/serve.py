"""`paceline serve`: an OpenAI-compatible endpoint."""

from __future__ import annotations

import errno
import functools
import os
import signal
import socket
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.cli.flags import EngineOptions, flag, shared_fields, with_options
from paceline.cli.output import print_note
from paceline.errors import InvalidParameter, PacelineError, short_repr

if TYPE_CHECKING:
    from paceline.server.state import ServerSettings
    from paceline.server.trust import ApiKey

LOOPBACK = ("127.0.0.1", "localhost", "::1")
KEY_VARIABLE = "PACELINE_API_KEY"
_flag = functools.partial(flag, rich_help_panel="Server")


@dataclass(frozen=True, kw_only=True)
class ServeOptions(EngineOptions):
    host: str = _flag("127.0.0.1", "Address to listen on; 0.0.0.0 is open to the network.")
    port: int = _flag(8000, "Port to listen on; 0 picks a free one.", "N", min=0, max=65535)
    served_model_name: str | None = _flag(None, "The model's name in the API.", "NAME")
    api_key_file: Path | None = _flag(
        None, f"Keys that clients must send, KEY or NAME KEY a line; or set {KEY_VARIABLE}.", "FILE"
    )
    share_caches: bool = _flag(False, "Clients with different keys share caches: they can tell what others sent.")
    no_prefix_caching: bool = _flag(False, "Compute every prompt anew.")
    no_suffix_store: bool = _flag(False, "Draft from no past answers.")
    max_num_seqs: int = _flag(64, "Most sequences that share a step.", "N", min=1)
    max_num_batched_tokens: int = _flag(512, "Most tokens of one pass.", "N", min=1)
    max_waiting: int = _flag(256, "Answers of one client that may wait; more are refused with 429.", "N", min=1)
    kv_cache_bytes: int | None = _flag(None, "Memory for keys and values; unset: decided at the start.", "BYTES")
    max_body_bytes: int = _flag(4 << 20, "Largest body of a request, in bytes.", "N", min=1024)
    request_limit: float = _flag(600.0, "Seconds a request may take.", "SECONDS", min=0.001)
    engine_timeout: float = _flag(
        60.0, "Seconds without a finished step after which the engine is started again.", "SECONDS", min=5
    )
    max_connections: int | None = _flag(None, "Most connections; unset: what the limit of files allows.", "N", min=1)
    admin_key: Path | None = _flag(None, "File with the key that may reload drafters from elsewhere.", "FILE")
    allow_fetch: bool = _flag(False, "A reload may name a drafter that has to be fetched.")
    grace: float = _flag(10.0, "Seconds for running requests to finish at a stop.", "SECONDS", min=0)
    cors_origin: list[str] | None = _flag(None, "Allow pages of this origin; repeatable.", "ORIGIN")
    capture: Path | None = _flag(
        None, "Append every prompt and answer to this file, for `train --data`. Tell the users.", "FILE"
    )
    log_json: bool = _flag(False, "Write logs as JSON, one object a line.")
    replicas: int | None = _flag(
        None, "Engines behind one address on this machine, by Ray; needs the extra ray.", "N", min=1
    )
    max_replicas: int | None = _flag(
        None, "Start up to this many where the load asks for it; needs --replicas.", "N", min=1
    )

    @property
    def prefix_caching(self) -> bool:
        return not self.no_prefix_caching

    @property
    def on_network(self) -> bool:
        """Return whether other machines can connect."""
        return self.host not in LOOPBACK

    def _drafting_flags(self) -> dict[str, Any]:
        return {**super()._drafting_flags(), "suffix_answers": not self.no_suffix_store}


@with_options
def serve(*, options: ServeOptions) -> int:
    """Serve a model at an OpenAI-compatible endpoint."""
    keys = read_keys(options.api_key_file)
    if options.max_replicas is not None and options.replicas is None:
        raise InvalidParameter("max-replicas", "needs --replicas, the number to start with")
    settings = server_settings(options, keys)
    listener = listen(options.host, options.port)
    if options.on_network and not keys:
        print_note(f"listening on {options.host} without an API key: every machine that reaches it can use it")
    if options.replicas is not None:
        return serve_replicas(settings, listener, options.replicas, options.max_replicas, log_json=options.log_json)
    from paceline.server.run import run

    return run(settings, listener, log_json=options.log_json)


def serve_replicas(
    settings: ServerSettings, listener: socket.socket, replicas: int, max_replicas: int | None, *, log_json: bool
) -> int:
    """Serve until a signal."""
    if settings.capture is not None:
        raise InvalidParameter("capture", "replicas would write one file; serve without --replicas to capture")
    if log_json:
        raise InvalidParameter("log-json", "Ray writes the logs of replicas; set RAY_SERVE_LOG_ENCODING=JSON instead")
    try:
        from paceline.server import ray
    except ImportError as error:
        raise PacelineError(f"replicas need more packages ({error.name}); pip install 'paceline[ray]'") from error
    stopped = threading.Event()
    try:
        where = ray.start(settings, listener, replicas, max_replicas)
        for number in (signal.SIGINT, signal.SIGTERM):  # now: Ray has set handlers of its own
            signal.signal(number, lambda *_: stopped.set())
        print_note(f"{replicas} replicas of {settings.engine.model} at {where}")
        while not stopped.wait(1):  # in steps: a signal is noticed between them
            pass
    finally:
        ray.stop()
    return 0


def server_settings(options: ServeOptions, keys: tuple[ApiKey, ...]) -> ServerSettings:
    from paceline.config import EngineConfig

    speculation = options.speculation_config()
    try:
        from paceline.server.process.messages import EngineSettings
        from paceline.server.state import ServerSettings
        from paceline.server.trust import Sharing
    except ImportError as error:
        raise PacelineError(f"serving needs more packages ({error.name}); pip install 'paceline[serve]'") from error
    config = EngineConfig(**shared_fields(options, EngineConfig))
    return ServerSettings(
        engine=EngineSettings(options.model, options.load_options, config, speculation),
        served_name=options.served_model_name,
        api_keys=keys,
        sharing=Sharing(options.on_network, options.share_caches),
        max_body_bytes=options.max_body_bytes,
        request_limit_s=options.request_limit,
        engine_timeout_s=options.engine_timeout,
        max_connections=options.max_connections,
        admin_key=read_admin_key(options.admin_key),
        allow_fetch=options.allow_fetch,
        grace_s=options.grace,
        cors_origins=tuple(options.cors_origin or ()),
        capture=options.capture,
    )


def read_keys(file: Path | None) -> tuple[ApiKey, ...]:
    """Read keys from a file or the environment; every user of the machine can read the command line."""
    from paceline.server.trust import ApiKey

    if file is None:
        return tuple(ApiKey.unnamed(key) for key in os.environ.get(KEY_VARIABLE, "").split())
    keys: dict[str, ApiKey] = {}
    for number, line in enumerate(_text_of("api-key-file", file).splitlines(), 1):
        words = line.split()
        if len(words) > 2:
            raise InvalidParameter(
                "api-key-file", f"line {number} of {file} has {len(words)} words; write KEY or NAME KEY"
            )
        if words:
            key = ApiKey(words[1], words[0]) if len(words) == 2 else ApiKey.unnamed(words[0])
            if keys.setdefault(key.key, key) != key:
                raise InvalidParameter(
                    "api-key-file", f"line {number} of {file} gives a key a second name; leave one out"
                )
    if not keys:
        raise InvalidParameter("api-key-file", f"{file} holds no key; write one a line")
    return tuple(keys.values())


def read_admin_key(file: Path | None) -> str | None:
    if file is None:
        return None
    words = _text_of("admin-key", file).split()
    if len(words) != 1:
        raise InvalidParameter("admin-key", f"{file} must hold one key, and has {len(words)} words")
    return words[0]


def _text_of(option: str, file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or "it is not UTF-8 text"
        raise InvalidParameter(option, f"cannot read {file}: {reason}") from error


def listen(host: str, port: int) -> socket.socket:
    """Open the port before the model is loaded, so that a port in use is refused at once."""
    if not host.strip():  # to a socket that is every address
        raise InvalidParameter("host", "it is empty; to listen on every address give 0.0.0.0")
    try:
        host.encode("idna")  # sockets do the same, and raise a TypeError of two words
    except UnicodeError as error:
        raise InvalidParameter("host", f"cannot listen on {short_repr(host)}: it is not the name of a host") from error
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        return socket.create_server((host, port), family=family, backlog=2048)
    except OSError as error:
        field = "port" if error.errno in (errno.EADDRINUSE, errno.EACCES) else "host"
        reason = str(error.strerror).partition(" (while")[0]  # the socket module adds the address once more
        problem = f"cannot listen on {host}:{port}: {reason}; choose another --{field}"
        raise InvalidParameter(field, problem) from error
