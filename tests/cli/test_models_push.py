"""``posttrain models push``: the model and its card on a small Hub on this machine, and mistakes before any work."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from hub_server import TOKEN, Hub

from posttrain import Workspace
from posttrain.loop.config import open_workspace
from posttrain.loop.state import RoundState

pytestmark = pytest.mark.slow

Call = Callable[..., Any]


@pytest.fixture
def signed_in(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> Hub:
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    return hub


@pytest.fixture
def card(posttrain: Call, finished_copy: Path, tmp_path: Path) -> str:
    """The card of the champion, of a dry run without a network."""
    outcome = posttrain("models", "push", "champion", "me/support", "--dry-run", tmp_path / "dry", "-w", finished_copy)
    assert (outcome.code, outcome.out) == (0, f"wrote {tmp_path / 'dry'}, as it would be uploaded to me/support\n")
    return (tmp_path / "dry" / "README.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("private", [True, False])
def test_the_model_arrives_with_its_card(
    posttrain: Call, finished_copy: Path, tmp_path: Path, card: str, signed_in: Hub, private: bool
) -> None:
    options = ["--private"] if private else []
    outcome = posttrain("models", "push", "champion", "me/support", "-w", finished_copy, *options)
    assert outcome.code == 0, outcome
    model = Workspace(finished_copy).models.champion
    assert outcome.out == f"pushed {model}: {signed_in.address}/me/support/commit/{'0' * 40}\n"
    sent = signed_in.uploads["me/support"]
    dry = {path.name: path.read_bytes() for path in (tmp_path / "dry").iterdir()}
    # `.gitattributes` is for the Hub's own history.
    assert {name: content for name, content in sent.items() if name != ".gitattributes"} == dry
    assert sent["README.md"].decode() == card
    assert (signed_in.created[0]["visibility"] == "private") == private
    assert not list((finished_copy / ".posttrain" / "tmp").glob("*/model"))


def test_the_card_states_data_metrics_gate_and_lineage(card: str, finished_copy: Path) -> None:
    header, text = re.fullmatch(r"---\n(.*?)\n---\n(.*)", card, re.DOTALL).groups()
    front = yaml.safe_load(header)
    assert (front["library_name"], front["license"], front["tags"]) == ("transformers", "unknown", ["posttrain"])
    with open_workspace(finished_copy) as (store, _):
        state = RoundState.from_row(store.metadata.rounds()[-1])
        run = store.metadata.producers(str(state.candidate))[-1]
    assert text.strip().splitlines()[0] == "# me/support"
    assert "Trained in round 2 of a loop of posttrain, on 24 records." in text
    assert f"| training | `train@v2` | `{state.dataset}` | 24 |" in text
    assert f"| test | `test@v1` | `{state.test}` | 20 |" in text
    assert "| labelled | 24 |" in text
    accuracy = state.metrics["accuracy"]
    low, high = map(float, re.search(rf"\| accuracy \| {accuracy:.4f} \| (\S+) to (\S+) \| 20 \|", text).groups())
    assert low < accuracy < high
    gain = state.decision["intervals"]["accuracy"]
    assert f"| accuracy | {gain['difference']:+.4f} | {gain['low']:+.4f} to {gain['high']:+.4f} | 20 |" in text
    assert "Decision: **deploy**." in text
    assert "| deploy | `accuracy >= 0` | holds | accuracy = " in text
    for fact in (state.candidate, state.selection, state.labelled, state.base, f"| {run.seed} |", run.code_version):
        assert str(fact) in text


def test_the_card_holds_no_text_of_a_record_and_no_path(card: str, finished_copy: Path) -> None:
    with open_workspace(finished_copy) as (store, _):
        state = RoundState.from_row(store.metadata.rounds()[-1])
        from posttrain.data.versions.version import Version

        records = Version.open(store.artifacts, str(state.dataset)).records().to_pylist()
    texts = [turn["content"] for record in records for turn in record["prompt"]]
    assert len(texts) >= 24
    assert not [text for text in texts if text in card]
    assert str(finished_copy) not in card
    assert "pool.csv" not in card


def test_a_base_model_has_a_card_too(posttrain: Call, finished_copy: Path, tmp_path: Path) -> None:
    base = Workspace(finished_copy).models.list()[0]["id"]
    outcome = posttrain("models", "export", base, tmp_path / "base", "--card", "-w", finished_copy)
    assert outcome.code == 0, outcome
    card = (tmp_path / "base" / "README.md").read_text(encoding="utf-8")
    assert "A base model, not trained here." in card
    assert "None: it is the base model, which round 0 put in service." in card


def test_mistakes_are_one_line_before_any_work(
    posttrain: Call, finished_copy: Path, tmp_path: Path, hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    from huggingface_hub import constants

    def mistake(*arguments: object) -> str:
        return str(posttrain("models", "push", *arguments, "-w", finished_copy).mistake)

    assert mistake("champion", "support") == "support: is not the name of a repository; write OWNER/NAME"
    assert mistake("nothing", "me/support").startswith("nothing here is called `nothing`; ")
    sign_in = "me/support: nobody is signed in to the Hub; hf auth login, or set HF_TOKEN"
    assert mistake("champion", "me/support") == sign_in
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    assert mistake("champion", "me/support").startswith("me/support: the Hub has no such model, or this token may not ")
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    assert re.match(
        r"me/support: the Hub cannot be reached \(.+\); check the network$", mistake("champion", "me/support")
    )
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    line = "me/support: the Hub cannot be reached (HF_HUB_OFFLINE is set); check the network"
    assert mistake("champion", "me/support") == line
    (tmp_path / "there").mkdir()
    assert mistake("champion", "me/support", "--dry-run", tmp_path / "there").endswith("remove it or name another")
    assert not hub.created
    assert not hub.uploads


def test_python_pushes_the_same(signed_in: Hub, finished_copy: Path, tmp_path: Path, card: str) -> None:
    models = Workspace(finished_copy).models
    assert models.push("champion", "me/support").endswith("/me/support/commit/" + "0" * 40)
    assert signed_in.uploads["me/support"]["README.md"].decode() == card
    assert models.push("champion", "me/support", dry_run=tmp_path / "again") == str(tmp_path / "again")
