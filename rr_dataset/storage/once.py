"""aiobotocore's HTTP session, without the request that aiohttp repeats by itself, and with the certificates of the host."""

from __future__ import annotations

from typing import Any

from aiobotocore.httpsession import AIOHTTPSession


class OnceSession(AIOHTTPSession):  # type: ignore[misc] # it has no types
    """Sends a request once, and trusts whom obstore trusts too.

    Where a kept connection breaks, aiohttp sends GET, HEAD, PUT and DELETE again. Of a create that was done, and whose answer
    was lost, the second is told that the name is taken.
    """

    def _get_ssl_context(self) -> Any:
        context = super()._get_ssl_context()
        if self._verify is True:  # not those of a file of the user's
            context.load_default_certs()
        return context

    async def _get_session(self, proxy_url: str | None) -> Any:
        session = await super()._get_session(proxy_url)
        session._retry_connection = False  # noqa: SLF001 -- there is no option for it
        return session
