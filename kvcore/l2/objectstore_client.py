"""The client of an object store: made from typed options, with its errors in our words.

All kinds go through obstore, so one `ObjectClient` serves S3 and what speaks like it, Google Cloud Storage, Azure Blob,
a directory and memory. obstore's own defaults (10 retries in 3 minutes, 30 s per request) are far too patient for
a cache: here a request has one try and one deadline, and who wants more wraps the adapter.

Traps met, and what is done about them:
 1. A missing object and a missing bucket both raise `FileNotFoundError`. The error body tells them apart for GET, and
    only there: HEAD has no body. So the bucket is checked with a GET at open, and each GET looks again.
 2. `put` returns after a timeout while the HTTP client may still read the caller's buffer (seen: 1.5 ms longer). The
    view given to it is therefore released before `put` returns, which fails as long as anybody else holds it.
 3. The memory store keeps the caller's buffer as the object. It gets a copy.
 4. Error texts repeat URLs and bodies. Ours are made from the code and the status alone; theirs stay the `__cause__`.
 5. Without credentials the client asks a cloud's metadata service, which hangs elsewhere until the connect timeout.

Who holds: the backend holds its client; buffers stay the caller's. Nothing here announces anything. Any thread may
call, several at once: the client releases the GIL.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from kvcore.errors import ConfigError, StoreError
from kvcore.runtime.calls import pause

Kind = Literal["s3", "gs", "az", "file", "memory"]

_CODE = re.compile(r"<Code>(\w{1,64})</Code>")
_STATUS = re.compile(r"status code: (\d{3})\b")
_REFUSED = frozenset({"AccessDenied", "SignatureDoesNotMatch", "InvalidAccessKeyId", "AuthorizationHeaderMalformed"})
_NO_BUCKET = frozenset({"NoSuchBucket", "InvalidBucketName", "ContainerNotFound", "InvalidResourceName"})
_FULL = ("QuotaExceeded", "InsufficientStorage", "status code: 507", "No space left on device")
_STREAM_BYTES = 256 * 1024
_RELEASE_TRIES_S = 0.001
_LIST_PAGE = 1000


@dataclass(frozen=True, slots=True)
class ObjectStoreOptions:
    """What `s3://bucket/prefix?...` means. Secrets are not shown by `repr`; empty ones come from the environment.

    `bucket`: the bucket, the container, or for "file" a directory. `endpoint`: another place that speaks S3.
    `anonymous`: sign nothing. `sign_payload`: hash the body for the signature as well; our own checksum finds damage
    without it.
    GCS and Azure take their credentials from the environment alone (GOOGLE_*, AZURE_*).
    """

    kind: Kind = "s3"
    bucket: str = ""
    prefix: str = ""
    endpoint: str = ""
    region: str = ""
    access_key_id: str = ""
    secret_access_key: str = field(default="", repr=False)
    session_token: str = field(default="", repr=False)
    anonymous: bool = False
    virtual_hosted: bool = False
    sign_payload: bool = False
    timeout_s: float = 5.0
    connect_timeout_s: float = 1.0
    requests_parallel: int = 8


class MissingBucketError(StoreError):
    """The bucket is not there. At open that is a ConfigError."""


class RefusedError(StoreError):
    """The store knows us and says no, or does not know us."""


class FullError(StoreError):
    """The store has no room."""


class ExistsError(StoreError):
    """A create-only put found an object."""


@dataclass(frozen=True, slots=True)
class Meta:
    """One object as the store describes it. `modified_s`: seconds since the epoch, by the store's clock."""

    path: str
    size: int
    e_tag: str | None
    modified_s: float


def check_options(options: ObjectStoreOptions) -> None:
    """ConfigError for options that can never work. No I/O."""
    if options.kind not in get_args(Kind):
        raise ConfigError(f"an object store is one of {', '.join(get_args(Kind))}, not {options.kind[:40]!r}")
    if not options.bucket and options.kind != "memory":
        raise ConfigError(f"a store of kind {options.kind} needs a bucket: s3://bucket/prefix, or a directory for file")
    if "@" in options.endpoint.partition("://")[2].partition("/")[0]:
        raise ConfigError("an endpoint holds no user and password; give access_key_id and secret_access_key")
    if min(options.timeout_s, options.connect_timeout_s) <= 0 or options.requests_parallel < 1:
        raise ConfigError("timeouts are above 0 seconds, and requests_parallel is at least 1")
    if options.prefix != options.prefix.strip("/") or "//" in options.prefix or ".." in options.prefix.split("/"):
        raise ConfigError(f"the prefix {options.prefix[:80]!r} has an empty or '..' part")


class ObjectClient:
    """`get`, `put`, `head`, `delete`, `listing` of one bucket. StoreErrors only; a miss is None or False."""

    def __init__(self, options: ObjectStoreOptions) -> None:
        self._obstore = _obstore()
        self._store = _store(options)
        self._keeps_buffers = options.kind == "memory"
        self._ask_mode = "create"

    def head(self, path: str) -> Meta | None:
        """None: it is not there, or the bucket is not (a HEAD cannot tell)."""
        try:
            return _meta(self._obstore.head(self._store, path))
        except Exception as error:
            _raise_unless_missing(error, "head")
            return None

    def get(self, path: str, parts: Sequence[memoryview]) -> Meta | None:
        """Fill `parts` one after the other with the object's first bytes; what is longer is not fetched to its end.

        One copy, from the client's chunks into the parts. None: it is not there. MissingBucketError: the bucket is not.
        """
        try:
            result = self._obstore.get(self._store, path)
            meta = _meta(result.meta)
            _fill(result.stream(min_chunk_size=_STREAM_BYTES), parts)
            return meta
        except Exception as error:
            _raise_unless_missing(error, "get")
            return None

    def put(self, path: str, parts: Sequence[memoryview | bytes], *, create: bool) -> None:
        """Write the object as a whole. No copy here: the client sends the parts (the memory store copies).

        `create`: ExistsError when there is one already. A store that does not know create-only puts is asked once.
        """
        views = [memoryview(bytes(part) if self._keeps_buffers else part) for part in parts]
        mode = self._ask_mode if create else "overwrite"
        try:
            self._obstore.put(self._store, path, views, mode=mode, use_multipart=False)
        except Exception as error:
            if mode == "create" and _not_supported(error):
                self._ask_mode = "overwrite"
                return self.put(path, parts, create=False)
            raise _translated(error, "put") from error
        finally:
            if not self._keeps_buffers:
                _release(views)

    def delete(self, paths: Sequence[str]) -> None:
        """Remove the objects, many per request where the store can. Those that are not there are fine."""
        try:
            self._obstore.delete(self._store, list(paths))
        except FileNotFoundError as error:
            if len(paths) > 1 or _is_bucket_missing(error):
                raise _translated(error, "delete") from error
        except Exception as error:
            raise _translated(error, "delete") from error

    def listing(self, prefix: str) -> Iterator[Meta]:
        """All objects below the prefix, page by page."""
        try:
            for page in self._obstore.list(self._store, prefix=prefix or None, chunk_size=_LIST_PAGE):
                yield from map(_meta, page)
        except Exception as error:
            raise _translated(error, "list") from error


def _obstore() -> Any:
    try:
        import obstore
    except ImportError as error:
        raise ConfigError("object stores need the obstore package: pip install 'kvcore[s3]'") from error
    return obstore


def _store(options: ObjectStoreOptions) -> Any:
    """The obstore object of this kind. ConfigError: it refuses the options."""
    from obstore import store

    if options.kind == "memory":
        return store.MemoryStore()
    if options.kind == "file":
        return store.LocalStore(options.bucket, mkdir=True)
    makers = {
        "s3": (store.S3Store, _s3_config),
        "gs": (store.GCSStore, _no_config),
        "az": (store.AzureStore, _no_config),
    }
    make, config = makers[options.kind]
    try:
        return make(
            options.bucket,
            config=config(options),
            client_options=_client_options(options),
            retry_config={"max_retries": 0},
        )
    except Exception as error:
        raise ConfigError(f"the {options.kind} client refuses these options ({type(error).__name__})") from error


def _client_options(options: ObjectStoreOptions) -> dict[str, Any]:
    return {
        "allow_http": options.endpoint.startswith("http://"),
        "timeout": f"{round(options.timeout_s * 1000)}ms",
        "connect_timeout": f"{round(options.connect_timeout_s * 1000)}ms",
    }


def _no_config(_options: ObjectStoreOptions) -> dict[str, Any]:
    return {}


def _s3_config(options: ObjectStoreOptions) -> dict[str, Any]:
    texts: Mapping[str, str] = {
        "endpoint": options.endpoint,
        "region": options.region or ("us-east-1" if options.endpoint else ""),
        "access_key_id": options.access_key_id,
        "secret_access_key": options.secret_access_key,
        "session_token": options.session_token,
    }
    config: dict[str, Any] = {name: text for name, text in texts.items() if text}
    config["virtual_hosted_style_request"] = options.virtual_hosted
    config["unsigned_payload"] = not options.sign_payload
    config["skip_signature"] = options.anonymous
    return config


def _meta(entry: Mapping[str, Any]) -> Meta:
    return Meta(entry["path"], entry["size"], entry["e_tag"], entry["last_modified"].timestamp())


def _fill(chunks: Iterator[Any], parts: Sequence[memoryview]) -> None:
    """Copy the chunks into the parts until these are full."""
    room = list(parts)
    for chunk in chunks:
        rest = memoryview(chunk)
        while rest and room:
            count = min(len(rest), len(room[0]))
            room[0][:count] = rest[:count]
            rest, room[0] = rest[count:], room[0][count:]
            if not room[0]:
                room.pop(0)
        if not room:
            return


def _release(views: Sequence[memoryview]) -> None:
    """Wait until nobody but us holds the views. Bounded by the client's own clean-up of a dead connection."""
    for view in views:
        while True:
            try:
                view.release()
                break
            except BufferError:  # "memoryview has exported buffers": the client has not let go yet
                pause(_RELEASE_TRIES_S)


def _raise_unless_missing(error: Exception, doing: str) -> None:
    """Our error from theirs, but for a plain miss."""
    if isinstance(error, FileNotFoundError) and not _is_bucket_missing(error):
        return
    raise _translated(error, doing) from error


def _is_bucket_missing(error: Exception) -> bool:
    return bool(_NO_BUCKET.intersection(_CODE.findall(str(error))))


def _not_supported(error: Exception) -> bool:
    name, text = type(error).__name__, str(error)
    return "NotImplemented" in name + text or name == "NotSupportedError" or "status code: 501" in text


def _translated(error: Exception, doing: str) -> StoreError:
    """Our error for obstore's. No part of its text is repeated but the code and the status."""
    if isinstance(error, StoreError):
        return error
    text = str(error)
    codes, status = _CODE.findall(text), _STATUS.findall(text)
    said = " ".join([*codes[:1], *status[:1]]) or _transport_reason(error, text)
    kind = _kind_of(error, text, codes, status)
    return kind(f"the object store did not {doing}: {said}")


def _kind_of(error: Exception, text: str, codes: list[str], status: list[str]) -> type[StoreError]:
    name = type(error).__name__
    if _NO_BUCKET.intersection(codes):
        return MissingBucketError
    if name in ("PermissionDeniedError", "UnauthenticatedError") or _REFUSED.intersection(codes):
        return RefusedError
    if {"401", "403"}.intersection(status):
        return RefusedError
    if name == "AlreadyExistsError":
        return ExistsError
    return FullError if any(sign in text for sign in _FULL) else StoreError


def _transport_reason(error: Exception, text: str) -> str:
    signs = {
        "TimedOut": "timed out",
        "timed out": "timed out",
        "ConnectionRefused": "connection refused",
        "ConnectionReset": "connection reset",
        "No space left": "no space left",
    }
    for sign, reason in signs.items():
        if sign in text:
            return reason
    return type(error).__name__
