"""Sends a JSON document to a URL."""

import http.client
import json
import urllib.request
from typing import Any

from posttrain.store.errors import shorten, to_line


def check_webhook(url: str | None) -> str | None:
    """Returns the URL of a webhook if it is one, or None if there is none.

    Raises:
        ValueError: it is not a web address.
    """
    if url is not None and not url.startswith(("http://", "https://")):
        raise ValueError("must start with http:// or https://")
    return url


class _RefuseRedirects(urllib.request.HTTPRedirectHandler):
    """Refuses redirects: urllib would send an empty GET to the new address, of ftp too, and take it for delivered."""

    def http_error_302(self, req: Any, fp: Any, code: int, msg: str, headers: Any) -> Any:
        target = to_line(str(headers.get("location") or "nowhere"))
        raise ValueError(f"the server redirects to {shorten(target, 200)} (status {code}); give that address")

    http_error_301 = http_error_303 = http_error_307 = http_error_308 = http_error_302


_opener = urllib.request.build_opener(_RefuseRedirects)


def post_json(url: str, body: dict[str, Any], timeout: float) -> str | None:
    """Sends a POST request; returns None once it is answered with success, else the reason of the failure.

    A redirect is a failure.

    Args:
        timeout: Seconds to wait for the server.
    """
    try:
        request = urllib.request.Request(
            url, json.dumps(body).encode(), {"Content-Type": "application/json"}, method="POST"
        )
        with _opener.open(request, timeout=timeout):
            return None
    except (OSError, ValueError, http.client.HTTPException) as error:
        return str(error) or type(error).__name__
