"""aiobotocore's HTTP session, without the request that aiohttp repeats by itself, and with the certificates of the host."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

from aiobotocore.httpsession import AIOHTTPSession

from rr_dataset.storage.client import RequestFailed


class OnceSession(AIOHTTPSession):  # type: ignore[misc] # it has no types
    """Sends a request once, and trusts whom obstore trusts too.

    Where a kept connection breaks, aiohttp sends GET, HEAD, PUT and DELETE again. Of a create that was done, and whose answer
    was lost, the second is told that the name is taken. Nor does it follow redirections, which aiohttp would, and take the
    session token along to whatever host they name.
    """

    def _get_ssl_context(self) -> Any:
        context = super()._get_ssl_context()
        if self._verify is True:  # not those of a file of the user's
            context.load_default_certs()
        return context

    async def send(self, request: Any) -> Any:
        """Raises RequestFailed where the answer to a HEAD names another host, and no region.

        Of which region it is botocore would find out by a HEAD, that fares likewise, until there is no more stack.
        """
        answer = await super().send(request)
        if request.method == "HEAD" and 300 <= answer.status_code < 400 and "x-amz-bucket-region" not in answer.headers:
            raise RequestFailed.of_answer(answer.status_code, "")
        return answer

    async def _get_session(self, proxy_url: str | None) -> Any:
        session = await super()._get_session(proxy_url)
        session._retry_connection = False  # noqa: SLF001 -- there is no option for it
        return SimpleNamespace(request=partial(session.request, allow_redirects=False))
