"""Labelling over HTTP: what annotators see and change, review, pauses and guidelines."""

from typing import Any

from posttrain.label.queue_rows import NewItem


def test_annotators_see_neither_answers_of_others_nor_gold_answers(server: Any, batch: Any) -> None:
    server.site.accounts.add("second", "annotator", "owner", "correct horse battery")
    first, second = server.program("annotator"), server.program("second")
    task = first.post("/api/items/next", json={}).json()["task"]
    stored = first.post(f"/api/items/{task['item']}/answer", json={"answer": "card", "note": "my secret note"})
    assert stored.status_code == 201
    # By the queue, an answer, its note and its status are for reviewers.
    assert second.post("/api/undo", json={"item": task["item"]}).status_code == 409
    assert second.post("/api/undo", json={}).status_code == 404
    assert second.put(f"/api/items/{task['item']}/lease").status_code == 409
    second.delete(f"/api/items/{task['item']}/lease")
    answer = second.post(f"/api/items/{task['item']}/answer", json={"answer": "cash"})
    assert answer.status_code == 409
    shown = [second.post("/api/items/next", json={}), second.get("/api/batches"), stored, answer]
    for number in range(1, 6):
        shown.append(second.post(f"/api/items/{number}/skip", json={"next": True}))
    text = " ".join(each.text for each in shown)
    for hidden in ("my secret note", "expected", "seed", "gold", "planted", "priority", '"status":"done"', "annotator"):
        assert hidden not in text, hidden
    item = server.site.queue.item(task["item"])
    assert [(each.annotator, each.answer) for each in item.answers if each.status == "answered"] == [
        ("annotator", "card")
    ]


def test_sending_an_answer_again_changes_nothing_and_another_one_is_refused(server: Any, batch: Any) -> None:
    client = server.program("annotator")
    item = client.post("/api/items/next", json={"batch": "round-1"}).json()["task"]["item"]
    url = f"/api/items/{item}/answer"
    first = client.post(url, json={"answer": "card"})
    assert (first.status_code, first.json()["repeated"]) == (201, False)
    again = client.post(url, json={"answer": "card"})
    assert (again.status_code, again.json()) == (201, first.json() | {"repeated": True})
    assert client.post(url, json={"answer": "cash"}).status_code == 409
    undone = client.post("/api/undo", json={"item": item}).json()
    assert undone["task"]["item"] == item
    following = client.post(url, json={"answer": "cash", "next": True}).json()
    assert following["next"]["item"] != item


def test_a_paused_account_is_told_why_and_given_nothing(server: Any, batch: Any) -> None:
    annotator, reviewer = server.program("annotator"), server.program("reviewer")
    sentence = "Let us talk about refunds first."
    assert reviewer.put("/api/people/annotator/pause", json={"reason": sentence}).json()["paused"] == sentence
    assert annotator.post("/api/items/next", json={}).json() == {"task": None, "paused": sentence}
    assert annotator.get("/api/session").json()["paused"] == sentence
    reviewer.put("/api/people/annotator/pause", json={"reason": None})
    assert reviewer.put("/api/people/reviewer/pause", json={"reason": sentence}).status_code == 200
    assert reviewer.put("/api/people/reviewer/pause", json={"reason": None}).status_code == 409
    assert annotator.post("/api/items/next", json={}).json()["task"] is not None


def test_people_are_answered_in_their_language_and_programs_in_english(server: Any) -> None:
    queue = server.site.queue
    item = NewItem("r1", {"text": "a message"}, reason="drawn at random from the whole pool; stands alone")
    queue.add_batch("round-1", "choice", [item], labels=["card", "cash"])
    annotator, reviewer = server.program("annotator"), server.browser("reviewer")
    shown = annotator.post("/api/items/next", json={}).json()["task"]
    assert shown["reason"] == "drawn at random; unlike the other texts"
    answer, sentence = (
        {"answer": "cards"},
        "Thank you for your work so far. 3 of your last 9 answers to items that were ",
    )
    sentence += (
        "checked before are as we expected, so let us talk the guideline over before you continue; an owner will "
    )
    sentence += "resume your account."
    path = f"/api/items/{shown['item']}/answer"
    assert "is not in the label set" in annotator.post(path, json=answer).json()["error"]
    chinese = {"Accept-Language": "zh-CN,zh;q=0.9"}
    assert annotator.post(path, json=answer, headers=chinese).json()["error"] == (
        "标签 `cards` 不在标签集中；是否为 `card`？"
    )
    assert annotator.post("/api/items/next", json={}, headers=chinese).json()["task"]["reason"] == (
        "随机抽取；与其他文本都不相近"
    )
    (reviewed,) = reviewer.get(f"/api/review?item={shown['item']}", headers=chinese).json()
    assert reviewed["reason"].startswith("随机抽取")
    assert reviewer.get("/api/audit", headers=chinese).json()["error"] == ("此操作需要角色“所有者”，您的角色是“复核员”")
    server.site.accounts.pause("annotator", sentence, "(queue)")
    assert annotator.post("/api/items/next", json={}).json()["paused"] == sentence
    assert annotator.post("/api/items/next", json={}, headers=chinese).json()["paused"] == (
        "感谢您到目前为止的工作。在最近 9 个事先核对过的条目中，您有 3 个回答与预期一致，"
        "所以我们想先和您一起看看标注规范再继续；所有者会恢复您的账户。"
    )


def test_a_reviewers_decision_is_logged_with_both_sides(server: Any, batch: Any) -> None:
    annotator, reviewer, owner = (server.program(role) for role in ("annotator", "reviewer", "owner"))
    item = annotator.post("/api/items/next", json={}).json()["task"]["item"]
    annotator.post(f"/api/items/{item}/flag", json={"note": "Both fit."})
    [listed] = reviewer.get("/api/review", params={"batch": "round-1"}).json()
    assert (listed["id"], listed["cause"], listed["answers"][0]["note"]) == (item, "flagged", "Both fit.")
    decided = reviewer.post(f"/api/items/{item}/resolve", json={"answer": "cash", "note": "See rule 3."}).json()
    assert decided["resolution"] == {"answer": "cash", "how": "review", "by": ["reviewer"], "note": "See rule 3."}
    assert reviewer.get("/api/review").json() == []
    reviewer.post(f"/api/items/{item}/drop", json={})
    entries = owner.get("/api/audit", params={"actor": "reviewer", "count": 2}).json()
    assert [(entry["action"], entry["target"]) for entry in entries] == [
        ("drop item", str(item)),
        ("resolve item", str(item)),
    ]
    assert entries[0]["before"] == entries[1]["after"] == decided["resolution"]


def test_a_new_guideline_lists_the_answers_under_earlier_ones(server: Any, batch: Any) -> None:
    annotator, reviewer = server.program("annotator"), server.program("reviewer")
    assert reviewer.post("/api/guidelines", json={"text": " \n"}).status_code == 422
    assert reviewer.post("/api/guidelines", json={"text": "# First"}).json()["version"] == 1
    task = annotator.post("/api/items/next", json={}).json()["task"]
    assert task["guideline"] == 1
    annotator.post(f"/api/items/{task['item']}/answer", json={"answer": "card"})
    assert reviewer.get("/api/guidelines/outdated").json() == []
    reviewer.post("/api/guidelines", json={"text": "# Second", "note": "refunds"})
    [outdated] = reviewer.get("/api/guidelines/outdated").json()
    assert (outdated["item"], outdated["annotator"], outdated["guideline"]) == (task["item"], "annotator", 1)
    assert [row["version"] for row in annotator.get("/api/guidelines").json()] == [1, 2]
    report = reviewer.get("/api/quality").json()
    assert report["counts"]["answers"] == 1


def test_reviewers_see_how_likely_each_answer_is_once_there_are_enough(server: Any) -> None:
    from posttrain.label.queue import Queue
    from posttrain.label.queue_rows import NewItem, QueueConfig

    queue = Queue(server.site.workspace.metadata, QueueConfig(overlap=3, check=0.0))
    labels = ["card", "cash", "loan"]
    for batch, count in (("few", 20), ("enough", 40)):
        items = [NewItem(f"r{number}", {"text": f"message {number}"}) for number in range(count)]
        queue.add_batch(batch, "choice", items, labels=labels)
        for name in ("annotator", "reviewer", "owner"):
            for number in range(count):
                task = queue.next(name, batch)
                assert task is not None
                # The owner is mostly wrong: two who are mostly right, and disagree once, count for more than the owner.
                answers = {
                    "annotator": 0,
                    "reviewer": 0 if number else 1,
                    "owner": 2 if number % 2 or not number else 0,
                }
                queue.answer(task.item, name, labels[(number + answers[name]) % 3])
    reviewer = server.browser("reviewer")
    first = {name: queue.items(name)[0].id for name in ("few", "enough")}
    (item,) = reviewer.get("/api/review", params={"item": first["few"]}).json()
    assert item["posterior"] == []
    (item,) = reviewer.get("/api/review", params={"item": first["enough"]}).json()
    likely = {row["answer"]: row["probability"] for row in item["posterior"]}
    assert 0.98 < sum(likely.values()) <= 1.001
    assert likely.get("loan", 0) < max(likely.values())
    (state,) = reviewer.get("/api/batches", params={"name": "few"}).json()
    assert (state["mine"], state["answers"]) == (20, 60)
    assert reviewer.get("/api/guidelines/1").status_code == 404
