"""The short form of the fuzzer of chat templates finds nothing."""

import pytest
import template_fuzz


@pytest.mark.slow
def test_templates_end_in_a_rendering_or_a_clear_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["template_fuzz.py", "--count", "15", "--seed", "1"])
    monkeypatch.setenv("XDG_CACHE_HOME", "set again after the test, as the fuzzer has a cache of its own")
    code = template_fuzz.main()
    output = capsys.readouterr().out
    assert code == 0, output[-2000:]
    assert "27 templates: " in output
