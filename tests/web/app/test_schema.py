"""Requests that schemathesis derives from the OpenAPI document: no answer is a defect, and each is as described."""

from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from posttrain.label.queue_rows import NewItem

ADDRESS = "http://localhost:8600/api"

# They end the session or the account that the others use, or do not end.
LEFT_OUT = {"DELETE /people/{name}", "DELETE /session", "GET /events"}
# Outside /api, with tests of their own.
LEFT_OUT |= {"POST /v1/feedback", "GET /v1/status", "GET /healthz", "GET /metrics"}

REFUSALS = {400, 401, 403, 404, 405, 415, 422}


def cases(operation: Any) -> Any:
    """Requests that the document allows, ones that it does not, and both about things that there are."""
    from schemathesis.generation import GenerationMode

    strategies = []
    for mode in GenerationMode:
        strategies.append(operation.as_strategy(generation_mode=mode))
        known = {"id": 1} if "/items/" in operation.path else {"name": "annotator"}
        if set(known) <= {parameter.name for parameter in operation.path_parameters}:
            strategies.append(operation.as_strategy(generation_mode=mode, path_parameters=known))
    return st.one_of(strategies)


def is_reachable(operation: str) -> bool:
    """Returns whether a random request may succeed: not about an id that it does not hit."""
    return not any(part in operation for part in ("{id}", "{version}", "/models/", "/password"))


@pytest.mark.slow
def test_no_request_that_the_document_allows_or_nearly_allows_meets_a_defect(server: Any) -> None:
    import schemathesis
    from schemathesis.checks import not_a_server_error
    from schemathesis.specs.openapi.checks import response_schema_conformance, status_code_conformance

    checks = (not_a_server_error, status_code_conformance, response_schema_conformance)
    items = [NewItem(f"r{number}", {"text": f"message {number}"}) for number in range(300)]
    server.site.queue.add_batch("round-1", "choice", items, labels=["card", "cash"])
    browser = server.browser("owner")
    headers = {
        "Cookie": "; ".join(f"{name}={value}" for name, value in browser.cookies.items()),
        **{name: browser.headers[name] for name in ("Origin", "X-CSRF-Token")},
    }
    schema = schemathesis.openapi.from_dict(server.client().get("/api/openapi.json").json())
    schema.app = server.app
    statuses: dict[str, set[int]] = {}

    def send(case: Any) -> None:
        response = case.call(base_url=ADDRESS, headers=headers)
        statuses.setdefault(case.operation.label, set()).add(response.status_code)
        case.validate_response(response, checks=checks)

    quick = settings(
        max_examples=10,
        deadline=None,
        database=None,
        derandomize=True,
        phases=[Phase.explicit, Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    for result in schema.get_all_operations():
        operation = result.ok()
        if operation.label not in LEFT_OUT:
            quick(given(cases(operation))(send))()
            # A few may all be refused: which ones are drawn depends on the modules that other tests have loaded, as
            # Hypothesis takes constants from them.
            if is_reachable(operation.label) and statuses[operation.label] <= REFUSALS:
                settings(quick, max_examples=200)(given(cases(operation))(send))()
    # A run in which nothing got past the checks of fields would prove little.
    assert not {name: seen for name, seen in statuses.items() if is_reachable(name) and seen <= REFUSALS}
    assert set().union(*statuses.values()) >= {200, 201, 400, 404, 409, 422}
