"""How HTTP requests are made: what `storage_options` say about obstore's client and about retries, with defaults."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Self

from orbax_safetensors.errors import SafetensorsError
from orbax_safetensors.storage.retries import Retries

# What obstore takes as options of its HTTP client rather than of a store.
_CLIENT_OPTIONS = frozenset(
    {
        "allow_http",
        "allow_invalid_certificates",
        "connect_timeout",
        "default_headers",
        "http1_only",
        "http2_keep_alive_interval",
        "http2_keep_alive_timeout",
        "http2_keep_alive_while_idle",
        "http2_only",
        "pool_idle_timeout",
        "pool_max_idle_per_host",
        "proxy_ca_certificate",
        "proxy_excludes",
        "proxy_url",
        "randomize_addresses",
        "read_timeout",
        "root_certificate",
        "timeout",
        "user_agent",
    }
)
# Of these, what `huggingface_hub` takes from the environment, as obstore does if it has no such option.
ENVIRONMENT_OPTIONS = frozenset(
    {"allow_invalid_certificates", "proxy_ca_certificate", "proxy_excludes", "proxy_url", "root_certificate"}
)
# A connection that brings nothing for half a minute is dead. One that brings little is left alone for longer, because
# many share a link that may be slow: 64 requests of 8 MiB take a quarter of an hour at 5 Mbit/s.
_TIMEOUTS = {
    "connect_timeout": timedelta(seconds=10),
    "read_timeout": timedelta(seconds=30),
    "timeout": timedelta(minutes=15),
}
RETRIES = Retries(attempts=10, seconds=120.0)
# The Hub's rate limits are for windows of five minutes: a client over its limit has to wait for the next window.
HUB_RETRIES = Retries(attempts=10, seconds=600.0)
# Seconds of obstore's units of a time. A longer unit counts as a day: that is no limit for a request either.
_UNITS = {
    **dict.fromkeys(("nsec", "ns"), 1e-9),
    **dict.fromkeys(("usec", "us"), 1e-6),
    **dict.fromkeys(("msec", "ms"), 1e-3),
    **dict.fromkeys(("seconds", "second", "sec", "s"), 1.0),
    **dict.fromkeys(("minutes", "minute", "min", "m"), 60.0),
    **dict.fromkeys(("hours", "hour", "hr", "h"), 3600.0),
}


@dataclass(frozen=True)
class HttpOptions:
    """The options of obstore's HTTP client, and the limits of retries."""

    client: Mapping[str, Any] = field(repr=False)  # headers may be secrets
    retries: Retries

    @classmethod
    def pop_from(cls, options: dict[str, Any], *, plain: bool, default: Retries = RETRIES) -> Self:
        """Pop the options of HTTP requests from `options`; `plain` is for a server without TLS."""
        client: dict[str, Any] = {**_TIMEOUTS}
        if plain:
            client["allow_http"] = True
        client |= {name: options.pop(name) for name in _CLIENT_OPTIONS & options.keys()}
        attempts = options.pop("max_retries", default.attempts - 1)
        seconds = options.pop("retry_timeout", default.seconds)
        if isinstance(seconds, timedelta):
            seconds = seconds.total_seconds()
        if not isinstance(attempts, int) or attempts < 0 or not isinstance(seconds, int | float) or seconds < 0:
            raise SafetensorsError(
                f"storage_options: max_retries is {attempts!r} and retry_timeout {seconds!r}, must be a number of "
                "retries and one of seconds"
            )
        return cls(client, Retries(attempts + 1, float(seconds)))

    @property
    def request_seconds(self) -> float:
        """Return the seconds in which a request has to end, as obstore has them, whatever the server sends."""
        return _seconds(self.client["timeout"])

    @property
    def pause_seconds(self) -> float:
        """Return the seconds in which a server has to send something.

        That is the shortest of the timeouts of obstore's HTTP client and of the time for retries, if there is any.
        """
        limits = [_seconds(self.client[name]) for name in ("read_timeout", "timeout")]
        return min(*limits, self.retries.seconds or math.inf)


def _seconds(timeout: timedelta | str) -> float:
    """Return a timeout in seconds: of text like `1min 30s`, as obstore has it."""
    if isinstance(timeout, timedelta):
        return timeout.total_seconds()
    parts = re.findall(r"(\d+)\s*([A-Za-z]+)", timeout) if isinstance(timeout, str) else []
    if not parts:
        raise SafetensorsError(f"storage_options: {timeout!r} is not a time, as '30 s' is")
    return sum(int(count) * _UNITS.get(unit, 86400.0) for count, unit in parts)
