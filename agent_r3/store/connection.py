"""Connecting to Redis: what the user can mend at start, what is infrastructure later, and what is tried again."""

from collections.abc import Callable
from urllib.parse import quote, urlsplit

import redis
import redis.asyncio
import structlog
from redis.backoff import NoBackoff
from redis.exceptions import (
    AuthenticationError,
    NoPermissionError,
    NoScriptError,
    OutOfMemoryError,
    RedisError,
    ResponseError,
)
from redis.retry import Retry
from tenacity import AsyncRetrying, RetryCallState, Retrying, retry_if_exception
from tenacity.stop import stop_after_delay
from tenacity.wait import wait_exponential_jitter

from agent_r3.config import StoreConfig
from agent_r3.errors import ConfigError, StoreError, UserError

log = structlog.get_logger(__name__)

FOREIGN = (RedisError, OSError)  # what redis-py raises
BLOCK_SLICE_S = 2.0  # one blocking call; below the socket time-out, and short enough for a prompt Ctrl-C
_SOCKET_TIMEOUT_S = 30.0
_CONNECTIONS = 32


def connection_url(store: StoreConfig) -> str:
    """`store.url` with the password of `store.password_file`: for `connect` only, never to be written or logged.

    Raises ConfigError where there is no URL, the file cannot be read or is empty, or both name a password.
    """
    if store.url is None:
        raise ConfigError("store.url is not set; the roles of a run meet in that Redis")
    if store.password_file is None:
        return store.url
    try:
        password = store.password_file.read_text().strip()
    except (OSError, UnicodeDecodeError) as exc:
        raise ConfigError(f"store.password_file {store.password_file} cannot be read: {exc}") from exc
    if not password:
        raise ConfigError(f"store.password_file {store.password_file} is empty")
    parts = urlsplit(store.url)
    user, _, known = parts.netloc.rpartition("@")[0].partition(":")
    if known:
        raise ConfigError("store.url names a password, and store.password_file another one; leave one of them out")
    return parts._replace(netloc=f"{user}:{quote(password, safe='')}@{parts.netloc.rpartition('@')[2]}").geturl()


def connect(url: str, *, socket_timeout_s: float = _SOCKET_TIMEOUT_S) -> redis.Redis:
    """A checked blocking client. Raises UserError in one line for a bad URL, a wrong password or a dead server."""
    try:
        client: redis.Redis = redis.Redis.from_url(
            url, socket_timeout=socket_timeout_s, socket_connect_timeout=5, protocol=2, retry=Retry(NoBackoff(), 0)
        )
        client.ping()
    except (ValueError, *FOREIGN) as exc:
        raise explain(url, exc) from exc
    return client


async def connect_async(url: str) -> "redis.asyncio.Redis":
    """The same for asyncio."""
    try:
        # Hundreds of episodes share the connections and queue for them; the default pool refuses the 101st call.
        pool = redis.asyncio.BlockingConnectionPool.from_url(
            url,
            max_connections=_CONNECTIONS,
            timeout=None,
            socket_timeout=_SOCKET_TIMEOUT_S,
            socket_connect_timeout=5,
            protocol=2,
            retry=redis.asyncio.retry.Retry(NoBackoff(), 0),
        )
        client: redis.asyncio.Redis = redis.asyncio.Redis.from_pool(pool)
        await client.ping()
    except (ValueError, *FOREIGN) as exc:
        raise explain(url, exc) from exc
    return client


def check_url(url: str) -> None:
    """Raise UserError unless a server answers at `url` and accepts its password."""
    connect(url).close()


def explain(url: str, exc: Exception) -> UserError:
    """The user's side of a failed first connection; never shows the password."""
    shown = _without_password(url)
    detail = " ".join(str(exc).split())[:200]
    if isinstance(exc, AuthenticationError | NoPermissionError) or (
        isinstance(exc, ResponseError) and ("NOAUTH" in detail or "WRONGPASS" in detail)
    ):
        return UserError(
            f"store.url {shown}: the server refuses the password: {detail}; "
            "give the right one in store.password_file, or as redis://:PASSWORD@host:port"
        )
    if isinstance(exc, ValueError):
        return UserError(f"store.url {shown} is not a Redis URL: {detail}; use redis://, rediss:// or unix://")
    return UserError(
        f"store.url {shown}: no Redis server answers there: {detail}; start one, or leave store.url out to embed one"
    )


def _without_password(url: str) -> str:
    scheme, mark, rest = url.partition("://")
    credentials, at, host = rest.rpartition("@")
    return f"{scheme}{mark}{credentials.partition(':')[0]}:***@{host}" if at else url


def _may_retry(exc: BaseException) -> bool:
    """A lost, busy or full server may come back; a refused command will be refused again."""
    if isinstance(exc, AuthenticationError):
        return False
    if isinstance(exc, ResponseError):
        return isinstance(exc, OutOfMemoryError | NoScriptError) or str(exc).startswith("MISCONF")
    return isinstance(exc, redis.ConnectionError | redis.TimeoutError | OSError)


def _tell(what: str) -> Callable[[RetryCallState], None]:
    """A warning after some tenths of a second without an answer, then ever more rarely."""

    def tell(state: RetryCallState) -> None:
        tries = state.attempt_number
        if tries >= 4 and tries & (tries - 1) == 0:
            problem = state.outcome.exception() if state.outcome else None
            seconds = round(state.seconds_since_start or 0)
            log.warning("waiting for the store", call=what, seconds=seconds, error=str(problem))

    return tell


def retrying(retry_s: float, what: str) -> Retrying:
    """Tries again for `retry_s` seconds after the loss of a connection. Only for idempotent calls."""
    return Retrying(
        retry=retry_if_exception(_may_retry),
        stop=stop_after_delay(retry_s),
        wait=wait_exponential_jitter(initial=0.05, max=1.0, jitter=0.05),
        before_sleep=_tell(what),
        reraise=True,
    )


def retrying_async(retry_s: float, what: str) -> AsyncRetrying:
    """The same for asyncio."""
    return AsyncRetrying(
        retry=retry_if_exception(_may_retry),
        stop=stop_after_delay(retry_s),
        wait=wait_exponential_jitter(initial=0.05, max=1.0, jitter=0.05),
        before_sleep=_tell(what),
        reraise=True,
    )


def lost(what: str, exc: Exception) -> StoreError:
    """The infrastructure error of a call that failed for good."""
    return StoreError(f"store: {what}: {type(exc).__name__}: {' '.join(str(exc).split())[:300]}")
