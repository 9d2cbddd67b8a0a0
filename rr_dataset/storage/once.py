"""aiobotocore's HTTP session, without the request that aiohttp repeats by itself."""

from __future__ import annotations

from typing import Any

from aiobotocore.httpsession import AIOHTTPSession


class OnceSession(AIOHTTPSession):  # type: ignore[misc] # it has no types
    """Sends a request once.

    Where a kept connection breaks, aiohttp sends GET, HEAD, PUT and DELETE again. Of a create that was done, and whose answer
    was lost, the second is told that the name is taken.
    """

    async def _get_session(self, proxy_url: str | None) -> Any:
        session = await super()._get_session(proxy_url)
        session._retry_connection = False  # noqa: SLF001 -- there is no option for it
        return session
