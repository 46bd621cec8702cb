"""Passwords and keys are masked in texts and in configs; what only looks like one is not."""

import pytest

from posttrain.store.secrets import mask_text, mask_values


@pytest.mark.parametrize(
    ("text", "masked"),
    [
        ("postgresql://u:p%40ss@h/db", "postgresql://u:***@h/db"),
        ("postgresql+psycopg://:pw@h", "postgresql+psycopg://:***@h"),
        ("http://user:a:b@c@host/x", "http://user:***@host/x"),
        ("https://token@host/x", "https://***@host/x"),
        ("postgresql://h/d?sslmode=require&sslpassword=x", "postgresql://h/d?sslmode=require&sslpassword=***"),
        ("s3://b/p?key=AK&secret=SK&region=eu", "s3://b/p?key=***&secret=***&region=eu"),
        ("https://h/x?X-Amz-Signature=abc&a=b", "https://h/x?X-Amz-Signature=***&a=b"),
        ("deploy --api-key xx --token=yy --name n", "deploy --api-key *** --token=*** --name n"),
        ("API_TOKEN=zz AWS_SECRET_ACCESS_KEY=k sh x", "API_TOKEN=*** AWS_SECRET_ACCESS_KEY=*** sh x"),
        ("curl -H 'Authorization: Bearer abcdefghijk'", "curl -H 'Authorization: Bearer ***'"),
    ],
)
def test_secrets_in_texts(text: str, masked: str) -> None:
    assert mask_text(f"before {text} after") == f"before {masked} after"


@pytest.mark.parametrize(
    "text",
    [
        "postgresql://user:${PASSWORD}@host/name",
        "https://host:8080/path?page=2",
        "see http://h/a and me@x.org: b",
        "no token is given: set POSTTRAIN_TOKEN",
        "deploy --token $TOKEN --key-variable OPENAI_KEY",
        "s3://bucket/prefix@v3",
    ],
)
def test_other_texts_stay(text: str) -> None:
    assert mask_text(text) == text


def test_values_under_a_secret_key_are_masked() -> None:
    values = {
        "webhook": "https://hooks.example.com/services/T/B/x",
        "aws_secret": "x",
        "nested": [{"password": "x", "key_variable": "OPENAI_KEY"}],
        "token": "${TOKEN}",
        "tokens": "many",
        "max_tokens": 3,
        "api_key": None,
    }
    assert mask_values(values) == values | {
        "webhook": "https://hooks.example.com/***",
        "aws_secret": "***",
        "nested": [{"password": "***", "key_variable": "OPENAI_KEY"}],
    }
