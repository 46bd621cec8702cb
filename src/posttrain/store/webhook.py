"""Sends a JSON document to a URL."""

import http.client
import json
import urllib.request
from typing import Any


def check_webhook(url: str | None) -> str | None:
    """Returns the URL of a webhook if it is one, or None if there is none.

    Raises:
        ValueError: it is not a web address.
    """
    if url is not None and not url.startswith(("http://", "https://")):
        raise ValueError("must start with http:// or https://")
    return url


def post_json(url: str, body: dict[str, Any], timeout: float) -> str | None:
    """Sends a POST request; returns None once it is answered with success, else the reason of the failure.

    Args:
        timeout: Seconds to wait for the server.
    """
    try:
        request = urllib.request.Request(
            url, json.dumps(body).encode(), {"Content-Type": "application/json"}, method="POST"
        )
        with urllib.request.urlopen(request, timeout=timeout):
            return None
    except (OSError, ValueError, http.client.HTTPException) as error:
        return str(error) or type(error).__name__
